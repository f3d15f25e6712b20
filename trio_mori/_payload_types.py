"""The struct types that a receiver has restored."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ._errors import ConfigError
from ._payload_restore import Restored, restore
from ._payload_structs import struct_type, type_name

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("trio_mori.receiver")

# Names that are kept at most, of types that arrived and are not listed. A sender chooses them.
MAX_UNLISTED = 1024


class PayloadTypes:
    """What `payload_types` lists, and what arrived although it does not. May be used from any thread.

    Attributes:
        unlisted: Names of types of which instances arrived as dicts or tuples, each as ``module:qualname``.
    """

    def __init__(self, types: Iterable[type]) -> None:
        """
        Raises:
            ConfigError: something listed is no type of a structure.
        """
        self.unlisted: dict[str, None] = {}
        self._listed: dict[str, type] = {}
        for each in types:
            if not isinstance(each, type) or struct_type(each) is None:
                raise ConfigError(
                    f"payload_types lists {each!r}, which is no dataclass, attrs class, msgspec.Struct or named tuple: "
                    "remove it, or give the class itself",
                    key="payload_types",
                    value=each,
                )
            self._listed[type_name(each)] = each

    def restore(
        self, header: bytes, source: torch.Tensor, *, device: torch.device | None = None, copy: bool = True
    ) -> Restored:
        """See `trio_mori._payload.restore`. Says once of each type that it is not listed."""
        restored = restore(header, source, payload_types=self._listed, device=device, copy=copy)
        for name in restored.unknown_types:
            if name not in self.unlisted and len(self.unlisted) < MAX_UNLISTED:
                self.unlisted[name] = None
                logger.warning(
                    "a payload holds a %s, which payload_types does not list: it arrives without its class", name
                )
        return restored
