"""Memory of large results, used again for later ones.

What the C library gives back to the kernel comes again empty, with a fault for every page: for a tensor of 16 MiB that
is two to three times the copy itself, and above 32 MiB it happens every time. So a block whose tensor is gone is kept
for a while. Its pages are the kernel's to take meanwhile (``MADV_FREE``), should anybody lack memory.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

# Since Linux 4.5. Some Pythons lack the name.
_MADV_FREE = 8

# Smaller ones come from the heap, where they mostly lie where others did.
LARGE = 1 << 20

# Of blocks that wait, all together: four of 16 MiB, as many as are in the hands of a caller that follows a stream.
KEPT = 64 << 20

# Blocks are multiples of this, so that results of nearly the same size share them.
_STEP = 1 << 20

# Appended to and removed from by any thread, one call each, which the interpreter does not divide.
_waiting: list[mmap.mmap] = []


def take(nbytes: int) -> memoryview:
    """Memory of exactly that size and undefined contents. It is the caller's until the last view of it is gone."""
    block = _find(nbytes)
    if block is None:
        block = mmap.mmap(-1, -(-nbytes // _STEP) * _STEP, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(block)[:nbytes]
    weakref.finalize(view, _keep, block).atexit = False
    return view


def _find(nbytes: int) -> mmap.mmap | None:
    """One that waits, and is not much too large."""
    for block in sorted(_waiting, key=len):
        if nbytes <= len(block) <= nbytes + max(nbytes // 4, _STEP):
            try:
                _waiting.remove(block)
            except ValueError:
                continue  # another thread was faster
            return block
    return None


def _keep(block: mmap.mmap) -> None:
    """In any thread, between any two instructions."""
    if len(block) > KEPT:
        return
    try:
        block.madvise(_MADV_FREE)
    except OSError:
        return  # an old kernel, or memory that is locked: it would be kept from everybody else
    _waiting.append(block)
    while sum(map(len, list(_waiting))) > KEPT:
        with suppress(IndexError):
            _waiting.pop(0)
