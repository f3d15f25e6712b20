"""Memory of large results: used again once a tensor is gone, never before; and pages found before a copy."""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import struct
import time
from collections.abc import Iterator

import pytest
import torch

from trio_mori import _pages, _payload, _spare
from trio_mori._engines import _memfd

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    _spare._waiting.clear()
    yield
    _spare._waiting.clear()


def received(value: object) -> torch.Tensor:
    """A payload as it is after its way through a pool."""
    plan = _payload.plan(value)
    pool = torch.empty(plan.size, dtype=torch.uint8)
    plan.copy_into(pool)
    result = _payload.restore(plan.header, pool).value
    assert isinstance(result, torch.Tensor)
    return result


class Page(enum.IntEnum):
    """What this process's table says of a page, in the upper two bits of its entry."""

    ABSENT = 0
    SWAPPED = 1
    PRESENT = 2


def pages_of(address: int, nbytes: int) -> list[Page]:
    """All that a region touches."""
    first, end = address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        entries = os.pread(table.fileno(), 8 * (end - first), 8 * first)
    return [Page(entry >> 62) for (entry,) in struct.iter_unpack("=Q", entries)]


def knows(advice: int) -> bool:
    """Whether this kernel does what it is advised to."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        return _pages._madvise(_memfd.address(memoryview(page)), mmap.PAGESIZE, advice) == 0


MADV_PAGEOUT = 21  # since Linux 5.4

needs_pageout = pytest.mark.skipif(
    not knows(MADV_PAGEOUT), reason="Linux before 5.4 takes pages when it needs them only"
)
needs_populate = pytest.mark.skipif(
    not knows(_pages._MADV_POPULATE_WRITE), reason="Linux before 5.14 finds pages by faults only"
)


@pytest.fixture
def one_cpu() -> Iterator[None]:
    """This thread stays on one CPU: each has a list of its own, of pages of which it has yet to tell the rest."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    yield
    os.sched_setaffinity(0, cpus)


def test_the_memory_of_a_large_result_that_is_gone_is_used_for_the_next_one() -> None:
    first = received(torch.full((4 * MIB,), 1, dtype=torch.uint8))
    address = first.data_ptr()
    del first
    second = received(torch.full((3 * MIB // 2, 2), 2.5, dtype=torch.bfloat16))
    assert second.shape == (3 * MIB // 2, 2)
    assert second.dtype is torch.bfloat16
    assert second.data_ptr() != address, "6 MiB do not fit into 4"
    third = received(torch.arange(MIB // 2, dtype=torch.int64))
    assert third.data_ptr() == address
    assert torch.equal(third, torch.arange(MIB // 2))
    assert bool((second == 2.5).all())


def test_memory_is_not_used_again_while_a_view_of_the_result_is_alive() -> None:
    result = received(torch.full((4 * MIB,), 1, dtype=torch.uint8))
    part = result.view(-1, MIB)[3]
    array = result[:10].numpy()
    del result
    second = received(torch.full((4 * MIB,), 2, dtype=torch.uint8))
    del part
    third = received(torch.full((4 * MIB,), 3, dtype=torch.uint8))
    assert bool((array == 1).all())
    assert second.data_ptr() != third.data_ptr()
    assert bool((second == 2).all())


def test_a_small_result_does_not_take_a_large_block() -> None:
    large = received(torch.full((16 * MIB,), 1, dtype=torch.uint8))
    address = large.data_ptr()
    del large
    assert received(torch.full((8 * MIB,), 2, dtype=torch.uint8)).data_ptr() != address
    assert received(torch.full((13 * MIB,), 2, dtype=torch.uint8)).data_ptr() == address


def test_no_more_is_kept_than_the_bound_says_and_the_oldest_goes_first() -> None:
    results = [_spare.take(20 * MIB) for _ in range(4)]
    last = ctypes.addressof(ctypes.c_char.from_buffer(results[-1]))
    while results:
        del results[0]
    assert sum(map(len, _spare._waiting)) == 60 * MIB
    assert last in [ctypes.addressof(ctypes.c_char.from_buffer(block)) for block in _spare._waiting]
    huge = _spare.take(_spare.KEPT + 1)
    del huge
    assert sum(map(len, _spare._waiting)) == 60 * MIB


@needs_pageout
@pytest.mark.usefixtures("one_cpu")
def test_the_kernel_may_take_what_is_kept() -> None:
    result = _spare.take(8 * MIB)
    size = len(result)
    address = ctypes.addressof(ctypes.c_char.from_buffer(result))
    ctypes.memset(address, 1, size)
    del result
    assert sum(map(len, _spare._waiting)) == size
    give_up = time.monotonic() + 60
    # Not at once those that the kernel is moving elsewhere at this moment.
    while set(pages_of(address, size)) != {Page.ABSENT}:
        assert time.monotonic() < give_up, "these pages are in use, for all that the kernel knows"
        assert _pages._madvise(address, size, MADV_PAGEOUT) == 0


def test_memory_whose_pages_cannot_be_given_back_is_not_kept() -> None:
    shared = mmap.mmap(-1, MIB)  # as little as what is locked does it take the advice
    _spare._keep(shared)
    assert not _spare._waiting


@needs_populate
def test_a_copy_into_another_process_s_pool_finds_its_pages() -> None:
    size = 5 * MIB + 3 * mmap.PAGESIZE
    fd = _memfd.create(size)
    ours = _memfd.map_pool(fd, size)
    ctypes.memset(_memfd.address(ours), 0, size)
    # If it may be: a kernel that is short of memory would take pages out of both tables.
    ctypes.CDLL(None).mlock(ctypes.c_void_p(_memfd.address(ours)), ctypes.c_size_t(size))
    theirs = _memfd.map_pool(fd, size)
    address = _memfd.address(theirs)
    finder = _pages.PageFinder(address, size)
    count = -(-size // mmap.PAGESIZE)
    assert pages_of(address, size) == [Page.ABSENT] * count
    finder.find(3 * MIB, MIB + 100)
    unasked = finder.piece // mmap.PAGESIZE
    assert pages_of(address, size) == [Page.ABSENT] * unasked + [Page.PRESENT] * (count - unasked)
    finder.find(0, size)
    assert pages_of(address, size) == [Page.PRESENT] * count


@needs_populate
def test_each_piece_of_a_pool_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(_pages, "find_pages", lambda address, nbytes: found.append((address, nbytes)))
    finder = _pages.PageFinder(0, 9 * MIB)
    finder.find(4 * MIB, 1)
    finder.find(0, 9 * MIB)
    finder.find(0, 9 * MIB)
    assert found == [(4 * MIB, 2 * MIB), (0, 4 * MIB), (6 * MIB, 3 * MIB)]


def test_pages_that_cannot_be_found_are_left_to_the_copy() -> None:
    pages = mmap.mmap(-1, 4 * MIB)
    address = _memfd.address(memoryview(pages))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4 * MIB), mmap.PROT_READ) == 0
    finder = _pages.PageFinder(address, 4 * MIB)
    finder.find(0, 4 * MIB)
    finder.find(MIB, MIB)


def test_every_dtype_is_made_over_memory_of_its_own() -> None:
    for dtype in (torch.bool, torch.complex32, torch.complex128, torch.float8_e4m3fn, torch.bfloat16):
        value = torch.zeros(2 * MIB, dtype=torch.uint8).view(dtype).view(2, -1)
        result = received(value)
        assert result.dtype is dtype
        assert result.shape == value.shape
        assert result.is_contiguous()
        assert not result.requires_grad
