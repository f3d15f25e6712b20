"""What the checks of an engine work with: how to get engines, and how to look at their bytes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import attrs
import torch

from .._errors import TransferFailed
from ..abc import Descriptor, Engine, EnginePeer, Write

# One byte; a page; just over what engines may copy inline; far more than that. LARGE is never copied inline either.
SIZES = (1, 4096, (1 << 20) + 1, 16 << 20)
SMALL = 64 << 10
LARGE = 4 << 20


@attrs.frozen
class EngineBench:
    """How to get engines to check.

    Attributes:
        open: Opens an engine with a region of so many bytes. Those that are open at one time reach each other.
        hold: From now on writes of this engine to this peer do not end. None: the engine cannot be made to do that,
            and the checks that need it do less.
        release: Let all held writes of this engine end.
        closing_fences: An engine that was closed is fenced for its peers.
    """

    open: Callable[[int], AbstractAsyncContextManager[Engine]]
    hold: Callable[[Engine, EnginePeer], None] | None = None
    release: Callable[[Engine], None] | None = None
    closing_fences: bool = False


Check = Callable[[EngineBench], Awaitable[None]]


def expect(condition: bool, what: str) -> None:
    """Raise AssertionError with these words unless the condition holds; not an ``assert``, which ``-O`` removes."""
    if not condition:
        raise AssertionError(what)


def junk_descriptors(one: Descriptor, other: Descriptor) -> list[Descriptor]:
    """What no engine may take for a peer, made from two real descriptors."""
    return [
        Descriptor(b"", b""),
        Descriptor(one.engine, b""),
        Descriptor(b"", one.memory),
        Descriptor(one.memory, one.engine),
        Descriptor(one.engine[:-1], one.memory),
        Descriptor(one.engine, one.memory[:-1]),
        Descriptor(one.engine[: len(one.engine) // 2], one.memory),
        Descriptor(one.engine + one.engine, one.memory),
        Descriptor(one.engine, one.memory + b"\0"),
        Descriptor(one.engine, other.memory),
        Descriptor(other.engine, one.memory),
        Descriptor(b"\0" * len(one.engine), b"\0" * len(one.memory)),
        Descriptor(b"\xff" * len(one.engine), b"\xff" * len(one.memory)),
        Descriptor(b"../../etc/passwd", b"/dev/zero"),
        Descriptor(b"\x91" * 4096, b"\x91" * 4096),
    ]


def altered_descriptors(descriptor: Descriptor) -> list[Descriptor]:
    """The descriptor with every single bit of it inverted, one at a time."""
    altered = []
    for half in ("engine", "memory"):
        original = descriptor.engine if half == "engine" else descriptor.memory
        for bit in range(8 * len(original)):
            changed = bytearray(original)
            changed[bit // 8] ^= 1 << bit % 8
            altered.append(attrs.evolve(descriptor, **{half: bytes(changed)}))
    return altered


async def assert_refused(engine: Engine, peer: EnginePeer, write: Write) -> None:
    """Both kinds of write raise TransferFailed, settled; or write_nowait leaves it to `write`."""
    for nowait in (True, False):
        try:
            if nowait and not engine.write_nowait(peer, write):
                continue
            if not nowait:
                await engine.write(peer, write)
        except TransferFailed as error:
            expect(error.settled, f"{write} was refused as if its bytes were under way")
            expect(str(error) != "", f"{write} was refused without a reason")
        else:
            raise AssertionError(f"{write} was not refused")


def fill(engine: Engine, start: int, stop: int) -> None:
    """Give a part of a region bytes that repeat with no power of two, and are never 255."""
    values = torch.arange(251, dtype=torch.uint8, device=engine.region.tensor.device)
    engine.region.tensor[start:stop] = values.repeat(-(-(stop - start) // 251))[: stop - start]
    settle(engine)


def blank(engine: Engine, value: int = 255) -> None:
    """Fill a region with one byte."""
    engine.region.tensor.fill_(value)
    settle(engine)


def settle(engine: Engine) -> None:
    """Wait until what was done to a region by torch is done: a write begins with what is there."""
    if engine.region.tensor.is_cuda:
        torch.cuda.synchronize(engine.region.tensor.device)


def same(one: Engine, first: int, other: Engine, second: int, size: int) -> bool:
    """Whether two parts of regions are equal."""
    left, right = one.region.tensor[first : first + size], other.region.tensor[second : second + size]
    return torch.equal(left.cpu(), right.cpu())


def untouched(engine: Engine, start: int, stop: int) -> bool:
    """Whether a part of a region is still filled with 255."""
    return bool((engine.region.tensor[start:stop] == 255).all())
