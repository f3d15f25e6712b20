"""The contract of an engine as tests: every sentence of `trio_mori.abc.Engine` that can be seen from outside."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import inf

import torch
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from .._errors import DescriptorRefused, TransferFailed
from ..abc import Descriptor, Engine, EnginePeer, Posted, Write
from ._engine_bench import (
    LARGE,
    SIZES,
    SMALL,
    Check,
    EngineBench,
    altered_descriptors,
    assert_refused,
    blank,
    expect,
    fill,
    junk_descriptors,
    same,
    untouched,
)


async def check_engine(bench: EngineBench, *, timeout: float = inf) -> None:
    """Run every check of `ENGINE_CHECKS`; an AssertionError says what an engine does not keep.

    Args:
        timeout: Seconds for each check.
    """
    for check in ENGINE_CHECKS:
        with trio.fail_after(timeout):
            await check(bench)


async def check_bytes_arrive_exactly(bench: EngineBench) -> None:
    """All bytes of a write are there when it returns, and no neighbour was touched."""
    room = SIZES[-1] + 300
    async with bench.open(room) as writer, bench.open(room) as owner:
        peer = writer.add_peer(owner.descriptor)
        fill(writer, 0, room)
        for size in SIZES:
            blank(owner)
            await writer.write(peer, Write(source=7, destination=131, size=size))
            expect(same(writer, 7, owner, 131, size), f"a write of {size} bytes arrived altered")
            expect(untouched(owner, 0, 131), f"a write of {size} bytes touched what stands before it")
            expect(untouched(owner, 131 + size, room), f"a write of {size} bytes touched what stands behind it")


async def check_region_and_descriptor(bench: EngineBench) -> None:
    """A region is what was asked for; a descriptor stays the same, differs between engines, and fits the wire."""
    async with bench.open(SMALL) as one, bench.open(3 * SMALL) as other:
        for engine, size in ((one, SMALL), (other, 3 * SMALL)):
            region = engine.region
            expect(region is engine.region, "region is a new object each time")
            expect(region.size == size, f"asked for {size} bytes, got {region.size}")
            expect(region.tensor.dtype == torch.uint8, "the region is not uint8")
            expect(region.tensor.dim() == 1, "the region is not 1-D")
            expect(region.buffer is None or region.buffer.nbytes == size, "buffer and tensor differ in size")
        expect(one.descriptor == one.descriptor, "the descriptor changes")
        expect(one.descriptor != other.descriptor, "two engines have the same descriptor")
        descriptor = one.descriptor
        expect(max(len(descriptor.engine), len(descriptor.memory)) <= 4096, "half of the descriptor is over 4096 bytes")


async def check_out_of_bounds_is_refused(bench: EngineBench) -> None:
    """A write that leaves either region is refused, settled, before anything moves."""
    async with bench.open(SMALL) as writer, bench.open(2 * SMALL) as owner:
        peer = writer.add_peer(owner.descriptor)
        blank(owner)
        for write in (
            Write(source=0, destination=2 * SMALL - 1, size=2),
            Write(source=SMALL - 1, destination=0, size=2),
            Write(source=0, destination=0, size=SMALL + 1),
            Write(source=-1, destination=0, size=1),
            Write(source=0, destination=-1, size=1),
            Write(source=0, destination=0, size=-1),
            Write(source=SMALL + 1, destination=0, size=0),
            Write(source=0, destination=1 << 62, size=1),
            Write(source=1 << 62, destination=1 << 62, size=1 << 62),
        ):
            await assert_refused(writer, peer, write)
        expect(untouched(owner, 0, 2 * SMALL), "a refused write moved bytes")
        await writer.write(peer, Write(source=0, destination=2 * SMALL - 1, size=1))


async def check_add_peer_is_idempotent(bench: EngineBench) -> None:
    """Equal descriptors are one peer, with the size of its region and an identity that no other has."""
    async with bench.open(SMALL) as engine, bench.open(2 * SMALL) as one, bench.open(SMALL) as other:
        copy = Descriptor(bytes(bytearray(one.descriptor.engine)), bytes(bytearray(one.descriptor.memory)))
        first, second = engine.add_peer(one.descriptor), engine.add_peer(other.descriptor)
        expect(engine.add_peer(copy) is first, "an equal descriptor became another peer")
        expect(first.size == 2 * SMALL and second.size == SMALL, "a peer's size is not that of its region")
        expect(first.identity != second.identity, "two peers have the same identity")


async def check_junk_descriptors_are_refused(bench: EngineBench) -> None:
    """What is no descriptor is refused as such; an altered one raises nothing else; real ones still work after."""
    async with bench.open(SMALL) as engine, bench.open(SMALL) as one, bench.open(2 * SMALL) as other:
        for junk in junk_descriptors(one.descriptor, other.descriptor):
            try:
                engine.add_peer(junk)
            except DescriptorRefused:
                continue
            raise AssertionError(f"taken for a peer: {junk}")
        for forged in altered_descriptors(one.descriptor):
            with suppress(DescriptorRefused):
                engine.drop_peer(engine.add_peer(forged))
        fill(engine, 0, SMALL)
        await engine.write(engine.add_peer(one.descriptor), Write(0, 0, SMALL))
        expect(same(engine, 0, one, 0, SMALL), "the real descriptor does not work after forged ones")


async def check_cancelled_before_posting(bench: EngineBench) -> None:
    """A write is a checkpoint, and one that is cancelled there had no effect."""
    async with bench.open(SIZES[2]) as writer, bench.open(SIZES[2]) as owner:
        peer = writer.add_peer(owner.descriptor)
        blank(owner)
        for size in (1, SIZES[2]):
            with trio.CancelScope() as scope:
                scope.cancel()
                await writer.write(peer, Write(0, 0, size))
            expect(scope.cancelled_caught, f"a write of {size} bytes in a cancelled scope was not cancelled")
            expect(untouched(owner, 0, SIZES[2]), "a write that was cancelled before it was posted moved bytes")
        with assert_checkpoints():
            await writer.write(peer, Write(0, 0, 1))


async def check_cancelled_after_posting(bench: EngineBench) -> None:
    """A write that was posted is not cancelled: whether it returns or raises, its bytes have stopped moving."""
    async with bench.open(LARGE) as writer, bench.open(LARGE) as owner:
        peer = writer.add_peer(owner.descriptor)
        fill(writer, 0, LARGE)
        blank(owner)
        if bench.hold is not None:
            bench.hold(writer, peer)
        ended = trio.Event()

        async def write() -> None:
            try:
                await writer.write(peer, Write(0, 0, LARGE))
            finally:
                ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            if bench.hold is not None and bench.release is not None:
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                    expect(not ended.is_set(), "a posted write returned when it was cancelled, its bytes under way")
                    bench.release(writer)
        arrived = same(writer, 0, owner, 0, LARGE)
        expect(arrived or untouched(owner, 0, LARGE), "a cancelled write returned with a part of its bytes there")
        expect(arrived or bench.hold is None, "a posted write was cancelled")


async def check_concurrent_writes(bench: EngineBench) -> None:
    """32 writes at once to one peer, and to two, all arrive where they should."""
    count, size = 32, SIZES[2] // 4
    async with bench.open(count * size) as writer, bench.open(count * size) as one, bench.open(count * size) as other:
        fill(writer, 0, count * size)
        for owners in ([one], [one, other]):
            peers = [writer.add_peer(owner.descriptor) for owner in owners]
            async with trio.open_nursery() as nursery:
                for index in range(count):
                    write = Write(index * size, (count - 1 - index) * size, size)
                    nursery.start_soon(writer.write, peers[index % len(peers)], write)
            for index in range(count):
                owner = owners[index % len(owners)]
                expect(
                    same(writer, index * size, owner, (count - 1 - index) * size, size), f"write {index} is not there"
                )
            blank(one, 0)


async def check_a_stuck_peer_delays_no_other(bench: EngineBench) -> None:
    """While 64 writes to one peer do not end, those to another do, and so do all once the peer is free."""
    if bench.hold is None or bench.release is None:
        return
    async with bench.open(SMALL) as writer, bench.open(SMALL) as stuck, bench.open(SMALL) as free:
        fill(writer, 0, SMALL)
        held, quick = writer.add_peer(stuck.descriptor), writer.add_peer(free.descriptor)
        bench.hold(writer, held)
        async with trio.open_nursery() as nursery:
            for index in range(64):
                nursery.start_soon(writer.write, held, Write(index * 1024, index * 1024, 1024))
            await wait_all_tasks_blocked()
            await writer.write(quick, Write(0, 0, SMALL))
            expect(same(writer, 0, free, 0, SMALL), "a write beside a stuck peer returned without its bytes")
            bench.release(writer)
        expect(same(writer, 0, stuck, 0, SMALL), "writes to a peer that was stuck ended without their bytes")


async def check_write_nowait(bench: EngineBench) -> None:
    """True: the bytes are there; False: nothing was done, and `write` does it; else they are there after a wait."""
    async with bench.open(LARGE) as writer, bench.open(LARGE) as owner:
        peer = writer.add_peer(owner.descriptor)
        fill(writer, 0, LARGE)
        for size in (*SIZES[:-1], LARGE):
            blank(owner)
            begun = writer.write_nowait(peer, Write(0, 0, size))
            if isinstance(begun, Posted):
                await begun.wait()
            elif not begun:
                expect(untouched(owner, 0, LARGE), "write_nowait returned False and moved bytes")
                await writer.write(peer, Write(0, 0, size))
            expect(same(writer, 0, owner, 0, size), f"a write of {size} bytes is not there")
            expect(untouched(owner, size, LARGE), "write_nowait touched what stands behind")


async def check_a_posted_write_ends_as_any(bench: EngineBench) -> None:
    """What `write_nowait` posted goes on when the wait for it is cancelled and its peer dropped; closing waits."""
    if bench.hold is None or bench.release is None:
        return
    async with bench.open(LARGE) as owner, trio.open_nursery() as nursery:
        async with bench.open(LARGE) as writer:
            peer = writer.add_peer(owner.descriptor)
            fill(writer, 0, LARGE)
            blank(owner)
            await writer.write(peer, Write(0, 0, 1))
            bench.hold(writer, peer)
            posted = writer.write_nowait(peer, Write(0, 0, SMALL))
            if not isinstance(posted, Posted):
                bench.release(writer)
                return
            ended = trio.Event()

            async def wait() -> None:
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await posted.wait()
                expect(same(writer, 0, owner, 0, SMALL), "the wait for a posted write returned without its bytes")
                ended.set()

            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            expect(not ended.is_set(), "a cancelled wait for a posted write returned, its bytes under way")
            writer.drop_peer(peer)
            bench.release(writer)
            await ended.wait()


async def check_drop_peer(bench: EngineBench) -> None:
    """Dropping is idempotent, may happen during a write, ends no wait for a fence, and can be undone."""
    async with bench.open(LARGE) as writer, bench.open(LARGE) as owner:
        peer = writer.add_peer(owner.descriptor)
        fill(writer, 0, LARGE)
        blank(owner)
        async with trio.open_nursery() as waiting:
            waiting.start_soon(writer.wait_fenced, peer)
            async with trio.open_nursery() as writing:
                writing.start_soon(writer.write, peer, Write(0, 0, LARGE))
                await wait_all_tasks_blocked()
                writer.drop_peer(peer)
                writer.drop_peer(peer)
            await wait_all_tasks_blocked()
            expect(len(waiting.child_tasks) == 1, "dropping a peer that lives ended a wait for its fence")
            waiting.cancel_scope.cancel()
        expect(same(writer, 0, owner, 0, LARGE), "a write during which its peer was dropped returned without its bytes")
        await assert_refused(writer, peer, Write(0, 0, 1))
        again = writer.add_peer(owner.descriptor)
        writer.drop_peer(peer)
        blank(owner)
        await writer.write(again, Write(0, 0, LARGE))
        expect(same(writer, 0, owner, 0, LARGE), "a peer that was dropped and learned again is not written to")


async def check_wait_fenced(bench: EngineBench) -> None:
    """`wait_fenced` does not return while the peer lives, for however many wait, and each may be cancelled."""
    async with bench.open(SMALL) as engine:
        async with bench.open(SMALL) as owner:
            peer = engine.add_peer(owner.descriptor)
            fenced: list[int] = []

            async def wait(number: int) -> None:
                await engine.wait_fenced(peer)
                fenced.append(number)

            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(wait, number)
                await wait_all_tasks_blocked()
                for _ in range(3):
                    await engine.write(peer, Write(0, 0, SMALL))
                    await owner.write(owner.add_peer(engine.descriptor), Write(0, 0, SMALL))
                await wait_all_tasks_blocked()
                expect(not fenced, "wait_fenced returned while the peer lives")
                nursery.cancel_scope.cancel()
            expect(not fenced, "wait_fenced returned when it was cancelled")
            with trio.CancelScope() as scope:
                scope.cancel()
                await engine.wait_fenced(peer)
            expect(scope.cancelled_caught, "wait_fenced is not a checkpoint")


async def check_closing_fences(bench: EngineBench) -> None:
    """Where closing is a fence: those who wait go on, a later wait returns at once, and writes are refused."""
    if not bench.closing_fences:
        return
    async with bench.open(SMALL) as engine, trio.open_nursery() as nursery:
        async with bench.open(SMALL) as owner:
            peer = engine.add_peer(owner.descriptor)
            for _ in range(3):
                nursery.start_soon(engine.wait_fenced, peer)
            await wait_all_tasks_blocked()
            expect(len(nursery.child_tasks) == 3, "wait_fenced returned before the peer was closed")
        await engine.wait_fenced(peer)
        await assert_refused(engine, peer, Write(0, 0, 1))


async def check_leaving_waits_for_writes(bench: EngineBench) -> None:
    """An engine's context does not end before its writes; its region is there for as long as somebody holds it."""
    ended: list[bool] = []

    async def write(engine: Engine, peer: EnginePeer) -> None:
        await engine.write(peer, Write(0, 0, LARGE))
        ended.append(True)

    async with bench.open(LARGE) as owner, trio.open_nursery() as nursery:
        async with bench.open(LARGE) as writer:
            peer = writer.add_peer(owner.descriptor)
            fill(writer, 0, LARGE)
            nursery.start_soon(write, writer, peer)
            await wait_all_tasks_blocked()
            region = writer.region
        arrived = torch.equal(region.tensor[:LARGE].cpu(), owner.region.tensor[:LARGE].cpu())
        expect(arrived, "the engine closed before the bytes of its last write had arrived")
        await assert_refused(writer, peer, Write(0, 0, 1))
    region.tensor.fill_(3)
    expect(int(region.tensor[-1]) == 3, "the region ended with its engine while its tensor was held")


async def check_abandon(bench: EngineBench) -> None:
    """`abandon` ends pending writes, unsettled, and keeps both regions; nothing is written afterwards."""
    outcomes: list[TransferFailed | None] = []
    async with bench.open(LARGE) as owner:
        async with bench.open(LARGE) as writer:
            peer = writer.add_peer(owner.descriptor)
            fill(writer, 0, LARGE)
            blank(owner)
            if bench.hold is not None:
                bench.hold(writer, peer)

            async def write() -> None:
                try:
                    await writer.write(peer, Write(0, 0, LARGE))
                except TransferFailed as error:
                    outcomes.append(error)
                else:
                    outcomes.append(None)

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(write)
                await wait_all_tasks_blocked()
                writer.abandon()
            expect(len(outcomes) == 3, "a write did not end when it was abandoned")
            expect(bench.hold is None or None not in outcomes, "a pending write was abandoned and returned")
            expect(
                all(error is None or not error.settled for error in outcomes), "an abandoned write claims to be settled"
            )
            expect(None not in outcomes or same(writer, 0, owner, 0, LARGE), "a write returned without its bytes")
            await assert_refused(writer, peer, Write(0, 0, 1))
            if bench.release is not None:
                bench.release(writer)
        writer.region.tensor.fill_(1)
    owner.region.tensor.fill_(2)


ENGINE_CHECKS: Sequence[Check] = (
    check_bytes_arrive_exactly,
    check_region_and_descriptor,
    check_out_of_bounds_is_refused,
    check_add_peer_is_idempotent,
    check_junk_descriptors_are_refused,
    check_cancelled_before_posting,
    check_cancelled_after_posting,
    check_concurrent_writes,
    check_a_stuck_peer_delays_no_other,
    check_write_nowait,
    check_a_posted_write_ends_as_any,
    check_drop_peer,
    check_wait_fenced,
    check_closing_fences,
    check_leaving_waits_for_writes,
    check_abandon,
)
