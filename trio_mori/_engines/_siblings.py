"""The engines of one kind in this process, for peers that are in it, too: what is at hand is neither mapped nor watched
by way of the system."""

from __future__ import annotations

import os
from typing import Generic, TypeVar

from .._errors import DescriptorRefused
from ..abc import Descriptor, Engine

E = TypeVar("E", bound=Engine)


class Siblings(Generic[E]):
    """By nonce; in any thread, since each trio run of the process may have some."""

    def __init__(self) -> None:
        self._engines: dict[bytes, E] = {}

    def add(self, nonce: bytes, engine: E) -> None:
        """It is open."""
        self._engines[nonce] = engine

    def remove(self, nonce: bytes) -> None:
        """It is not any more. Idempotent."""
        self._engines.pop(nonce, None)

    def find(self, nonce: bytes, descriptor: Descriptor, identity: str) -> E:
        """The engine that has this descriptor.

        Raises:
            DescriptorRefused: it was closed, or never was one.
        """
        engine = self._engines.get(nonce)
        if engine is None or engine.descriptor != descriptor:
            raise DescriptorRefused(f"{identity}: no engine of this process has this descriptor, or it was closed")
        return engine

    def dup_fence(self, nonce: bytes, fence: int, identity: str) -> int:
        """A copy, the caller's, of the descriptor that tells the end of an engine that was found.

        Raises:
            DescriptorRefused: it was closed meanwhile, or there are no descriptors left.
        """
        try:
            copy = os.dup(fence)
        except OSError as error:
            raise DescriptorRefused(f"{identity} cannot be watched: {error}") from error
        if nonce not in self._engines:
            os.close(copy)  # closed meanwhile, in another thread's trio: that number may mean another file by now
            raise DescriptorRefused(f"{identity} was closed")
        return copy
