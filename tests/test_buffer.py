from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
import trio
import trio.testing

from trio_mori import _errors
from trio_mori._buffer import ManagedBuffer
from trio_mori._pool import Pool
from trio_mori._protocol.extents import INBOUND, OUTBOUND, Extent, Extents
from trio_mori.abc import Region

UNIT = 4096
deterministic = pytest.mark.deterministic


class Lessor:
    """A pool that lends buffers, and counts what came back."""

    def __init__(self, units: int = 4, *, device: str = "cpu", **guarantees: int) -> None:
        if device == "cpu":
            memory = bytearray(units * UNIT)
            region = Region(tensor=torch.frombuffer(memory, dtype=torch.uint8), buffer=memoryview(memory), device="cpu")
        else:
            tensor = torch.zeros(units * UNIT, dtype=torch.uint8, device=device)
            region = Region(tensor=tensor, buffer=None, device=device)
        kept = {share: count * UNIT for share, count in guarantees.items()}
        self.pool = Pool(region, Extents(units * UNIT, guarantees=kept))
        self.released: list[Extent] = []
        self.detached: list[Extent] = []

    def lend(self, size: int) -> ManagedBuffer:
        extent = self.pool.reserve_nowait(size, INBOUND)

        def release() -> None:
            self.released.append(extent)
            self.pool.extents.free(extent)

        return ManagedBuffer(self.pool, extent, size, release, on_detach=lambda: self.detached.append(extent))

    @property
    def live(self) -> int:
        return self.pool.extents.live


def itself(extent: Extent) -> Extent:
    """Take memory over."""
    return extent


async def posted() -> None:
    """Let everything that was posted to the trio run happen."""
    await trio.testing.wait_all_tasks_blocked()


@deterministic
async def test_tensors_show_the_pool_s_own_memory() -> None:
    lessor = Lessor()
    lessor.lend(1)
    buffer = lessor.lend(12)
    buffer.tensor[:] = torch.arange(12, dtype=torch.uint8)
    assert lessor.pool.region.tensor[UNIT : UNIT + 13].tolist() == [*range(12), 0]
    halves = buffer.as_tensor(torch.bfloat16, (2, 3))
    assert halves.dtype == torch.bfloat16
    assert halves.shape == (2, 3)
    assert halves.view(torch.uint8).flatten().tolist() == list(range(12))
    assert buffer.to_bytes() == bytes(range(12))
    assert (buffer.size, buffer.device, buffer.released) == (12, "cpu", False)


@deterministic
async def test_a_tensor_s_storage_holds_the_buffer_s_bytes_and_no_neighbour_s() -> None:
    buffer = Lessor().lend(100)
    assert buffer.tensor.untyped_storage().nbytes() == 100


@deterministic
async def test_a_scalar_and_an_empty_buffer_are_tensors_too() -> None:
    lessor = Lessor()
    assert lessor.lend(8).as_tensor(torch.float64, ()).item() == 0.0
    empty = lessor.lend(0)
    assert empty.tensor.shape == (0,)
    assert empty.as_tensor(torch.int32, (3, 0)).shape == (3, 0)
    assert empty.to_bytes() == b""
    empty.release()


@deterministic
async def test_a_shape_that_needs_other_bytes_is_refused_naming_both_sizes() -> None:
    buffer = Lessor().lend(12)
    with pytest.raises(ValueError, match=r"shape \(4,\) and torch.float32 has 16 bytes, but this buffer has 12"):
        buffer.as_tensor(torch.float32, (4,))
    with pytest.raises(ValueError, match=r"\(-1,\) has a negative"):
        buffer.as_tensor(torch.float32, (-1,))


@deterministic
async def test_an_offset_that_the_dtype_cannot_stand_at_is_refused() -> None:
    lessor = Lessor()
    pool = Pool(lessor.pool.region, Extents(UNIT, alignment=4))
    pool.reserve_nowait(4, INBOUND)
    extent = pool.reserve_nowait(8, INBOUND)
    buffer = ManagedBuffer(pool, extent, 8, release=lambda: None)
    assert buffer.as_tensor(torch.int32, (2,)).numel() == 2
    with pytest.raises(ValueError, match="multiple of 8 bytes, but this buffer begins at byte 4"):
        buffer.as_tensor(torch.int64, (1,))


@deterministic
async def test_release_gives_the_memory_back_at_once_and_once() -> None:
    lessor = Lessor()
    buffer = lessor.lend(10)
    assert buffer.tensor.sum() == 0
    buffer.release()
    buffer.release()
    assert len(lessor.released) == 1
    assert lessor.live == 0
    del buffer
    await posted()
    assert len(lessor.released) == 1


@deterministic
async def test_a_released_buffer_refuses_to_show_what_is_no_longer_its_own() -> None:
    buffer = Lessor().lend(4)
    buffer.release()
    assert buffer.released
    with pytest.raises(_errors.LeaseError, match="4 bytes has ended"):
        _ = buffer.tensor
    with pytest.raises(_errors.LeaseError):
        buffer.as_tensor(torch.int32, (1,))
    with pytest.raises(_errors.LeaseError):
        buffer.to_bytes()
    with pytest.raises(_errors.LeaseError):
        buffer.detach_nowait(OUTBOUND)
    with pytest.raises(_errors.LeaseError):
        await buffer.detach(OUTBOUND, itself)
    with pytest.raises(_errors.LeaseError), buffer:
        pass


@deterministic
async def test_release_with_a_living_tensor_raises_and_leaves_the_buffer_valid() -> None:
    lessor = Lessor()
    buffer = lessor.lend(8)
    alive = buffer.as_tensor(torch.int32, (2,))[1:]
    with pytest.raises(_errors.LeaseError, match=r"8 bytes cannot be released.*x\.clone\(\)"):
        buffer.release()
    assert lessor.live == 1
    alive.fill_(7)
    assert buffer.as_tensor(torch.int32, (2,)).tolist() == [0, 7]
    del alive
    buffer.release()
    assert lessor.live == 0


VIEWS = {
    "a slice": lambda tensor: tensor[4:],
    "another dtype": lambda tensor: tensor.view(torch.float32),
    "a transposed reshape": lambda tensor: tensor.view(torch.int16).reshape(2, 4).T,
    "detached": lambda tensor: tensor.detach(),
    "the storage": lambda tensor: tensor.untyped_storage(),
    "a numpy array": lambda tensor: tensor.numpy(),
    "a view of a numpy array": lambda tensor: tensor.numpy().view(np.float32)[::2],
    "a memoryview of a numpy array": lambda tensor: memoryview(tensor.numpy()),
    "a tensor over a numpy array": lambda tensor: torch.from_numpy(tensor.numpy()),
    "a dlpack tensor": lambda tensor: torch.from_dlpack(tensor),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor.view(torch.float32)),
    "an autograd graph": lambda tensor: torch.nn.Parameter(tensor.view(torch.float32)).square(),
}


@deterministic
@pytest.mark.parametrize("kind", VIEWS)
async def test_the_memory_stays_leased_until_the_last_view_of_any_kind_is_gone(kind: str) -> None:
    lessor = Lessor()
    buffer = lessor.lend(16)
    view = VIEWS[kind](buffer.tensor)
    gc.collect()
    with pytest.raises(_errors.LeaseError):
        buffer.release()
    del buffer
    await posted()
    assert lessor.live == 1
    del view
    gc.collect()
    await posted()
    assert lessor.live == 0
    assert len(lessor.released) == 1


@deterministic
async def test_a_clone_does_not_hold_the_memory() -> None:
    lessor = Lessor()
    buffer = lessor.lend(4)
    copy = buffer.tensor.clone()
    buffer.release()
    lessor.pool.region.tensor.fill_(9)
    assert copy.tolist() == [0, 0, 0, 0]


@deterministic
async def test_a_buffer_that_is_dropped_unreleased_is_given_back_by_a_post() -> None:
    lessor = Lessor()
    buffer = lessor.lend(4)
    del buffer
    assert lessor.live == 1, "a finaliser must not touch the pool: it may run between any two instructions"
    await posted()
    assert lessor.live == 0


@deterministic
async def test_a_second_tensor_after_the_first_died_is_watched_too() -> None:
    lessor = Lessor()
    buffer = lessor.lend(4)
    _ = buffer.tensor
    del _
    second = buffer.tensor
    with pytest.raises(_errors.LeaseError):
        buffer.release()
    del second
    buffer.release()
    await posted()
    assert len(lessor.released) == 1


@deterministic
async def test_leaving_the_block_gives_the_memory_back() -> None:
    lessor = Lessor()
    with lessor.lend(4) as buffer:
        total = buffer.tensor.sum()
    assert total == 0
    assert lessor.live == 0
    with lessor.lend(4) as buffer:
        buffer.release()


@deterministic
async def test_leaving_the_block_with_a_living_tensor_raises_and_the_tensor_stays_true() -> None:
    lessor = Lessor()
    with pytest.raises(_errors.LeaseError, match="`del x`"):
        with lessor.lend(4) as buffer:
            alive = buffer.tensor
    assert buffer.released
    await posted()
    assert lessor.live == 1
    assert alive.tolist() == [0, 0, 0, 0]
    del alive
    await posted()
    assert lessor.live == 0


@deterministic
async def test_an_error_in_the_block_is_not_hidden_by_the_tensors_that_it_keeps_alive() -> None:
    lessor = Lessor()
    buffer = lessor.lend(4)
    kept: list[torch.Tensor] = []

    def use() -> None:
        with buffer:
            kept.append(buffer.tensor)
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        use()
    assert caught.value.__context__ is None
    assert buffer.released
    assert lessor.live == 1
    kept.clear()
    await posted()
    assert lessor.live == 0


@deterministic
async def test_a_block_that_is_cancelled_ends_cancelled() -> None:
    lessor = Lessor()
    with trio.CancelScope() as scope:
        with lessor.lend(4) as buffer:
            alive = buffer.tensor
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    del alive
    await posted()
    assert lessor.live == 0


@deterministic
async def test_another_thread_may_release_and_the_books_change_in_the_trio_run() -> None:
    lessor = Lessor()
    released_in: list[trio.lowlevel.Task | trio.lowlevel.TrioToken] = []
    extent = lessor.pool.reserve_nowait(4, INBOUND)
    came_back = trio.Event()

    def release() -> None:
        released_in.append(trio.lowlevel.current_trio_token())
        lessor.pool.extents.free(extent)
        came_back.set()

    buffer = ManagedBuffer(lessor.pool, extent, 4, release)
    with trio.fail_after(10):
        await trio.to_thread.run_sync(buffer.release)
        await came_back.wait()
    assert buffer.released
    assert released_in == [trio.lowlevel.current_trio_token()]
    assert lessor.live == 0


@deterministic
async def test_a_buffer_whose_last_tensor_dies_in_another_thread_comes_back() -> None:
    lessor = Lessor()
    kept = [lessor.lend(4).tensor]
    await posted()
    assert lessor.live == 1
    with trio.fail_after(10):
        await trio.to_thread.run_sync(kept.clear)  # its answer comes after what it posted
    assert lessor.live == 0


@deterministic
def test_a_buffer_may_outlive_the_trio_run() -> None:
    async def main() -> tuple[ManagedBuffer, ManagedBuffer, torch.Tensor]:
        lessor = Lessor()
        first, second = lessor.lend(4), lessor.lend(4)
        return first, second, second.tensor

    first, second, tensor = trio.run(main)
    assert first.to_bytes() == bytes(4)
    first.release()
    del second
    assert tensor.tolist() == [0, 0, 0, 0]
    del tensor


@deterministic
async def test_a_finished_buffer_and_its_tensors_leave_nothing_behind() -> None:
    lessor = Lessor()
    buffer = lessor.lend(4)
    tensor = buffer.tensor
    dead = [weakref.ref(buffer), weakref.ref(tensor)]
    del buffer, tensor
    await posted()
    assert [ref() for ref in dead] == [None, None]


@deterministic
async def test_detach_hands_the_bytes_over_without_a_copy() -> None:
    lessor = Lessor()
    buffer = lessor.lend(4)
    buffer.tensor.fill_(5)
    assert buffer.belongs_to(lessor.pool)
    assert not buffer.belongs_to(Lessor().pool)
    extent = buffer.detach_nowait(OUTBOUND)
    assert buffer.released
    assert list(lessor.pool.extents) == [extent]
    assert (extent.offset, extent.share) == (lessor.detached[0].offset, OUTBOUND)
    assert lessor.pool.tensor(extent, 4).tolist() == [5, 5, 5, 5]
    buffer.release()
    del buffer
    await posted()
    assert not lessor.released


@deterministic
async def test_detach_with_a_living_tensor_is_refused_and_changes_nothing() -> None:
    lessor = Lessor()
    buffer = lessor.lend(4)
    alive = buffer.tensor
    with pytest.raises(_errors.LeaseError, match="cannot be given away"):
        buffer.detach_nowait(OUTBOUND)
    with pytest.raises(_errors.LeaseError, match="cannot be given away"):
        await buffer.detach(OUTBOUND, itself)
    assert not lessor.detached
    del alive
    with trio.testing.assert_checkpoints():
        await buffer.detach(OUTBOUND, itself)
    assert len(lessor.detached) == 1


@deterministic
async def test_a_detach_that_has_to_wait_can_be_cancelled_and_then_changed_nothing() -> None:
    lessor = Lessor(2, inbound=1)
    sent = lessor.pool.reserve_nowait(UNIT, OUTBOUND)
    buffer = lessor.lend(4)
    with pytest.raises(_errors.NoRoom):
        buffer.detach_nowait(OUTBOUND)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(buffer.detach, OUTBOUND, itself)
        await posted()
        with pytest.raises(_errors.LeaseError):
            _ = buffer.tensor
        nursery.cancel_scope.cancel()
    assert buffer.tensor.tolist() == [0, 0, 0, 0]
    assert not lessor.detached
    async with trio.open_nursery() as nursery:
        nursery.start_soon(buffer.detach, OUTBOUND, itself)
        await posted()
        lessor.pool.extents.free(sent)
    assert lessor.pool.extents.used(OUTBOUND) == UNIT
    assert len(lessor.detached) == 1


@deterministic
async def test_a_size_beyond_the_extent_is_a_bug_and_refused() -> None:
    lessor = Lessor()
    extent = lessor.pool.reserve_nowait(1, INBOUND)
    with pytest.raises(_errors.InternalError):
        ManagedBuffer(lessor.pool, extent, UNIT + 1, release=lambda: None)


def test_an_interpreter_that_exits_with_living_buffers_exits_quietly() -> None:
    program = """
import torch, trio
from trio_mori._buffer import ManagedBuffer
from trio_mori._pool import Pool
from trio_mori._protocol.extents import Extents
from trio_mori.abc import Region

async def main():
    memory = bytearray(8192)
    pool = Pool(Region(torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory), "cpu"), Extents(8192))
    buffers = [ManagedBuffer(pool, pool.reserve_nowait(1, "inbound"), 1, lambda: None) for _ in range(2)]
    return buffers, [buffers[0].tensor, buffers[0].tensor.numpy()]

kept = trio.run(main)
kept[0].append(kept)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_drops_its_copies_of_buffers_even_if_a_thread_was_about_to_do_so() -> None:
    program = """
import os, signal, threading, torch, trio
from trio_mori._buffer import ManagedBuffer
from trio_mori._pool import Pool
from trio_mori._protocol.extents import Extents
from trio_mori.abc import Region

def hold(lock, held, over):
    with lock:
        held.set()
        over.wait()

async def main():
    memory = bytearray(8192)
    pool = Pool(Region(torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory), "cpu"), Extents(8192))
    extents = [pool.reserve_nowait(1, "inbound") for _ in range(2)]
    buffers = [ManagedBuffer(pool, extent, 1, lambda extent=extent: pool.extents.free(extent)) for extent in extents]
    held, over = threading.Event(), threading.Event()
    lock = trio.lowlevel.current_trio_token()._reentry_queue.lock
    thread = threading.Thread(target=hold, args=(lock, held, over))
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(10)
        buffers.pop()
        buffers.pop().release()
        os._exit(pool.extents.live != 2)
    over.set()
    thread.join()
    print(os.waitpid(child, 0)[1])
    buffers.clear()
    await trio.testing.wait_all_tasks_blocked()
    print(pool.extents.live)

import trio.testing
trio.run(main)
"""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n0\n", "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
async def test_on_a_gpu_tensors_hold_the_memory_in_the_same_way() -> None:
    lessor = Lessor(device="cuda:0")
    neighbour = lessor.lend(1)
    buffer = lessor.lend(16)
    tensor = buffer.tensor
    tensor.fill_(3)
    assert tensor.data_ptr() == lessor.pool.region.tensor.data_ptr() + UNIT
    assert lessor.pool.region.tensor[UNIT - 1 : UNIT + 17].tolist() == [0, *[3] * 16, 0]
    assert buffer.to_bytes() == ctypes.string_at(tensor.cpu().data_ptr(), 16) == bytes([3] * 16)
    view = buffer.as_tensor(torch.bfloat16, (2, 4)).T[1:]
    del tensor
    with pytest.raises(_errors.LeaseError):
        buffer.release()
    del buffer
    await posted()
    assert not lessor.released
    del view
    await posted()
    assert len(lessor.released) == 1
    neighbour.release()
