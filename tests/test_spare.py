"""Memory of large results: used again once a tensor is gone, never before; and pages found before a copy."""

from __future__ import annotations

import ctypes
import mmap
import resource
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


def faults_of_writing(address: int, nbytes: int) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    ctypes.memset(address, 1, nbytes)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def populates() -> bool:
    """Whether this kernel finds pages when it is asked to."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        return _pages._madvise(_memfd.address(memoryview(page)), mmap.PAGESIZE, _pages._MADV_POPULATE_WRITE) == 0


needs_populate = pytest.mark.skipif(not populates(), reason="Linux before 5.14 finds pages by faults only")


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


def test_the_kernel_may_take_what_is_kept() -> None:
    result = _spare.take(8 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(result))
    ctypes.memset(address, 1, len(result))
    del result
    with open("/proc/self/smaps") as maps:
        text = maps.read()
    # Neighbouring blocks may be one mapping; and a CPU may have some pages yet to hand over.
    freed = [int(line.split()[1]) for line in text.splitlines() if line.startswith("LazyFree:")]
    assert sum(freed) >= 7 << 10


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
    theirs = _memfd.map_pool(fd, size)
    address = _memfd.address(theirs)
    finder = _pages.PageFinder(address, size)
    finder.find(3 * MIB, MIB + 100)
    assert faults_of_writing(address + 3 * MIB, MIB + 100) == 0
    assert faults_of_writing(address, MIB) == MIB // mmap.PAGESIZE, "nobody asked for these"
    finder.find(0, size)
    assert faults_of_writing(address, size) == 0


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
