"""Every public async call, cancelled at each of its checkpoints: it had no effect, and nothing is left of it.

A call that was cancelled is a call that never was: what it would have taken is still there, what it would have given is
not. A call that returned did all of it, also if it was cancelled when it was done but for the way back.
"""

from __future__ import annotations

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch
import trio
from rig import LIMIT, UNIT, Pair, assert_free, filled, open_pair, port_of, receiver_config, sender_config, wait_until
from stock_peers import StockServer, open_stock_server

from trio_mori import ChunkReceiver, ChunkSender, Connector, ManagedBuffer, NotReady, open_connector
from trio_mori.testing import MemoryEngine, MemoryFabric

pytestmark = pytest.mark.deterministic

POOL = 3 << 20
BIG = (1 << 20) + UNIT  # copied in a thread


class CancelAt(trio.abc.Instrument):
    """Cancels a task's scope when the task has come to a halt for the n-th time, or is about to go on again.

    Attributes:
        reached: Whether it came so far.
    """

    def __init__(self, moment: str, number: int) -> None:
        self.scope = trio.CancelScope()
        self.task: trio.lowlevel.Task | None = None
        self.reached = False
        self._moment = moment
        self._number = number

    def watch(self) -> None:
        """Begin with the task that is running."""
        self.task = trio.lowlevel.current_task()
        self._count(self.task, self._moment)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._count(task, "halted")

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self._count(task, "scheduled")

    def _count(self, task: trio.lowlevel.Task, moment: str) -> None:
        if task is not self.task or moment != self._moment:
            return
        if self._number == 0:
            self.reached = True
            self.scope.cancel()
        self._number -= 1


class Call:
    """A call in a task of its own, cancelled at one moment.

    Attributes:
        over: Whether it has ended.
        cancelled: Whether it ended by raising Cancelled.
        value: What it returned.
    """

    def __init__(self) -> None:
        self.over = False
        self.cancelled = False
        self.value: object = None

    async def run(self, function: Callable[[], Awaitable[object]], instrument: CancelAt) -> None:
        with instrument.scope:
            instrument.watch()
            try:
                self.value = await function()
            finally:
                instrument.task = None
        self.cancelled = instrument.scope.cancelled_caught
        self.over = True


class Case(ABC):
    """A call, and how it is seen afterwards whether it had its effect. Its number makes each round's keys new.

    Attributes:
        sweeps: Which public call that is.
    """

    sweeps: str
    sender_pool = receiver_pool = POOL

    def __init__(self, pair: Pair, number: int) -> None:
        self.pair = pair
        self.key = f"k{number}"

    async def before(self) -> None:  # noqa: B027 - most need nothing
        """What has to be there."""

    @abstractmethod
    async def call(self) -> object:
        """The call that is swept."""

    async def meanwhile(self, call: Call) -> None:  # noqa: B027 - most wait for nothing
        """What happens while it waits."""

    @abstractmethod
    async def check(self, call: Call) -> None:
        """Whether it had all of its effect, or none; and clean up."""


class PutWithRoom(Case):
    sweeps = "Connector.put"
    size = UNIT

    async def call(self) -> object:
        return await self.pair.put(self.key, filled(self.size))

    async def check(self, call: Call) -> None:
        if call.cancelled:
            assert await self.pair.sender.cleanup(self.key) == 0
        else:
            assert torch.equal(await self.pair.get(self.key), filled(self.size))


class PutOfMuch(PutWithRoom):
    """Copied in a thread."""

    size = BIG


class PutThatWaits(PutWithRoom):
    sender_pool = 16 * UNIT

    async def before(self) -> None:
        await self.pair.put("full", filled(16 * UNIT))

    async def meanwhile(self, call: Call) -> None:
        await wait_until(lambda: call.over or self.pair.sender.statistics().pool.waiting)
        assert await self.pair.sender.cleanup("full") == 1
        assert await self.pair.receiver.cleanup("full") == 0


class PutOfABuffer(PutWithRoom):
    """Of the own pool, given away without a copy."""

    async def before(self) -> None:
        await self.pair.receiver.put("1", "0", self.key, filled(self.size))
        known = {"source_host": "127.0.0.1", "source_port": port_of(self.pair.receiver)}
        self.stack = AsyncExitStack()
        self.lease = await self.stack.enter_async_context(self.pair.sender.lease("1", "0", self.key, known))

    async def call(self) -> object:
        return await self.pair.put(self.key, self.lease.buffer)

    async def check(self, call: Call) -> None:
        assert self.lease.buffer.released is not call.cancelled
        await super().check(call)
        await self.stack.aclose()


class Cleanup(Case):
    sweeps = "Connector.cleanup"

    async def before(self) -> None:
        await self.pair.put(self.key, filled(UNIT))

    async def call(self) -> object:
        return await self.pair.sender.cleanup(self.key)

    async def check(self, call: Call) -> None:
        assert await self.pair.sender.cleanup(self.key) == int(call.cancelled)


class CleanupOfWhatWasAskedFor(Case):
    sweeps = "Connector.cleanup"

    async def before(self) -> None:
        with pytest.raises(NotReady):
            self.pair.get_nowait(self.key)

    async def call(self) -> object:
        return await self.pair.receiver.cleanup(self.key)

    async def check(self, call: Call) -> None:
        assert await self.pair.receiver.cleanup(self.key) == int(call.cancelled)


class Drain(Case):
    sweeps = "Connector.drain"

    async def before(self) -> None:
        await self.pair.put(self.key, filled(UNIT))

    async def call(self) -> object:
        return await self.pair.sender.drain()

    async def meanwhile(self, call: Call) -> None:
        await trio.testing.wait_all_tasks_blocked()
        assert torch.equal(await self.pair.get(self.key), filled(UNIT))

    async def check(self, call: Call) -> None:
        assert call.cancelled or call.value == 0


class GetOfWhatIsThere(Case):
    sweeps = "Connector.get"
    size = UNIT

    async def before(self) -> None:
        await self.pair.put(self.key, filled(self.size))

    async def call(self) -> object:
        return await self.pair.get(self.key)

    async def check(self, call: Call) -> None:
        value = await self.pair.get(self.key) if call.cancelled else call.value
        assert torch.equal(value, filled(self.size))


class GetOfMuch(GetOfWhatIsThere):
    """Copied in a thread, and announced before it is written."""

    size = BIG


class GetThatWaits(GetOfWhatIsThere):
    async def before(self) -> None:
        pass

    async def meanwhile(self, call: Call) -> None:
        await wait_until(lambda: call.over or self.pair.parked())
        await self.pair.put(self.key, filled(self.size))


class GetOfWhatArrived(GetOfWhatIsThere):
    """Asked for by get_nowait before."""

    async def before(self) -> None:
        with pytest.raises(NotReady):
            self.pair.get_nowait(self.key)
        await super().before()
        await wait_until(lambda: self.pair.receiver.statistics().held["arrived"])


class GetThatIsBeingWritten(GetOfWhatIsThere):
    async def before(self) -> None:
        self.pair.sender_engine.hold(arrived=0.5)
        await super().before()

    async def meanwhile(self, call: Call) -> None:
        await wait_until(lambda: call.over or self.pair.sender_engine.held)
        if not call.over:
            await trio.testing.wait_all_tasks_blocked()
        self.pair.sender_engine.release()


class Take(GetOfWhatIsThere):
    sweeps = "Connector.take"

    async def call(self) -> object:
        arrival = await self.pair.receiver.take("0", "1", self.key)
        value = arrival.restore()
        arrival.finish()
        return value


class TakeThatWaits(GetThatWaits):
    sweeps = "Connector.take"
    call = Take.call


class Lease(GetOfWhatIsThere):
    sweeps = "Connector.lease"

    async def call(self) -> object:
        async with self.pair.receiver.lease("0", "1", self.key) as lease:
            return lease.buffer.tensor.clone()


class SendOfAChunk(Case):
    """The stream goes on with the same number."""

    sweeps = "ChunkSender.send"

    async def call(self) -> object:
        async with self.pair.sender.open_chunk_sender(self.key, "1", from_stage="0") as self.out:
            assert isinstance(self.out, ChunkSender)
            with trio.CancelScope(shield=True):
                await self.out.send(0)
            await self.out.send(1)
            with trio.CancelScope(shield=True):
                await self.out.send(2)
        return None

    async def check(self, call: Call) -> None:
        got: list[object] = []
        async with self.pair.receiver.open_chunk_receiver(self.key, "0", to_stage="1") as chunks:
            try:
                async for chunk in chunks:
                    got.append(chunk)
            except Exception as error:  # noqa: BLE001 - looked at below
                got.append(type(error).__name__)
        assert got in ([0, 1, 2], [0, 1, 2, "StreamFailed"], [0, "StreamFailed"], [0, 1, "StreamFailed"])
        assert call.cancelled or got == [0, 1, 2]


class ReceptionOfAChunk(Case):
    sweeps = "ChunkReceiver.__anext__"

    async def before(self) -> None:
        async with self.pair.sender.open_chunk_sender(self.key, "1", from_stage="0") as out:
            for number in range(3):
                await out.send(number)
        self.stack = AsyncExitStack()
        self.chunks = await self.stack.enter_async_context(
            self.pair.receiver.open_chunk_receiver(self.key, "0", to_stage="1")
        )
        assert isinstance(self.chunks, ChunkReceiver)

    async def call(self) -> object:
        return await self.chunks.__anext__()

    async def check(self, call: Call) -> None:
        rest = [chunk async for chunk in self.chunks]
        assert rest == ([0, 1, 2] if call.cancelled else [1, 2])
        await self.stack.aclose()


class ReceptionThatWaits(ReceptionOfAChunk):
    async def before(self) -> None:
        self.stack = AsyncExitStack()
        self.chunks = await self.stack.enter_async_context(
            self.pair.receiver.open_chunk_receiver(self.key, "0", to_stage="1")
        )

    async def meanwhile(self, call: Call) -> None:
        await wait_until(lambda: call.over or self.pair.parked())
        async with self.pair.sender.open_chunk_sender(self.key, "1", from_stage="0") as out:
            for number in range(3):
                await out.send(number)


class EndOfAStream(Case):
    """Leaving the sender's block: the end gets through whatever happens."""

    sweeps = "Connector.open_chunk_sender"

    async def call(self) -> object:
        async with self.pair.sender.open_chunk_sender(self.key, "1", from_stage="0") as out:
            with trio.CancelScope(shield=True):
                await out.send(0)
        return None

    async def check(self, call: Call) -> None:
        async with self.pair.receiver.open_chunk_receiver(self.key, "0", to_stage="1") as chunks:
            assert [chunk async for chunk in chunks] == [0]


CASES = [
    PutWithRoom,
    PutOfMuch,
    PutThatWaits,
    PutOfABuffer,
    Cleanup,
    CleanupOfWhatWasAskedFor,
    Drain,
    GetOfWhatIsThere,
    GetOfMuch,
    GetThatWaits,
    GetOfWhatArrived,
    GetThatIsBeingWritten,
    Take,
    TakeThatWaits,
    Lease,
    SendOfAChunk,
    ReceptionOfAChunk,
    ReceptionThatWaits,
    EndOfAStream,
]
MOMENTS = ["halted", "scheduled"]


async def run_cancelled(case: Case, moment: str, number: int) -> tuple[Call, bool]:
    """Make the call, cancel it at that moment, and check. Returns whether it came so far."""
    await case.before()
    instrument = CancelAt(moment, number)
    call = Call()
    trio.lowlevel.add_instrument(instrument)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call.run, case.call, instrument)
            await case.meanwhile(call)
    finally:
        trio.lowlevel.remove_instrument(instrument)
    await case.check(call)
    return call, instrument.reached


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", CASES)
async def test_a_call_cancelled_at_any_checkpoint_had_no_effect(kind: type[Case], moment: str) -> None:
    both = {"role": "both", "host": "127.0.0.1", "zmq_port": 0}
    cancelled = 0
    async with open_pair(sender_pool=kind.sender_pool, receiver_pool=kind.receiver_pool, receiver=both) as pair:
        for number in itertools.count():
            call, reached = await run_cancelled(kind(pair, number), moment, number)
            cancelled += call.cancelled
            await assert_free(pair.sender, pair.receiver)
            if not reached:
                break
        await pair.assert_whole()
        assert not call.cancelled
    assert cancelled >= 1, "cancelled before it begins it is always cancelled"
    assert number >= 2


def is_async(function: object) -> bool:
    """Whether it is awaited, or left and entered by ``async with``."""
    plain = inspect.unwrap(function) if callable(function) else function
    return inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain)


def test_every_public_call_that_may_wait_is_among_them() -> None:
    public = {
        f"{kind.__name__}.{name}"
        for kind in (Connector, ChunkSender, ChunkReceiver)
        for name, member in vars(kind).items()
        if is_async(member) and (not name.startswith("_") or name == "__anext__")
    }
    swept = {case.sweeps for case in CASES} | {"Connector.wait_listening"}  # which is in test_port_cancellation.py
    assert "Connector.take" in public
    assert public <= swept, public - swept


# --- opening and closing ------------------------------------------------------------------------------------


async def use(connector: Connector) -> None:
    """A body: both ways in, and something left behind."""
    await connector.put("0", "1", "k", filled(UNIT))
    with pytest.raises(NotReady):
        connector.get_nowait("1", "0", "other")


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_connector_cancelled_at_any_checkpoint_from_opening_to_closing_frees_its_port_and_its_peer(
    moment: str,
) -> None:
    fabric = MemoryFabric()
    with trio.fail_after(2 * LIMIT):
        async with fabric.open(pool_size=POOL) as other_engine:
            async with open_connector(sender_config(), engine=other_engine) as other:
                async with open_connector(sender_config(), engine=other_engine) as probe:
                    port = port_of(probe)
                for number in itertools.count():
                    async with fabric.open(pool_size=POOL) as engine:
                        call, reached = await _open_cancelled(engine, other, port, moment, number)
                    await wait_until(lambda: other.health()["peers"] == 0)
                    await assert_free(other)
                    if not reached:
                        break
                assert not call.cancelled
                assert number >= 5


async def _open_cancelled(
    engine: MemoryEngine, other: Connector, port: int, moment: str, number: int
) -> tuple[Call, bool]:
    config = receiver_config(other, role="both", host="127.0.0.1", zmq_port=port)

    async def call_() -> object:
        async with open_connector(config, engine=engine) as connector:
            await use(connector)
        return None

    instrument, call = CancelAt(moment, number), Call()
    trio.lowlevel.add_instrument(instrument)
    try:
        await call.run(call_, instrument)
    finally:
        trio.lowlevel.remove_instrument(instrument)
    return call, instrument.reached


# --- gets of a stock sender ---------------------------------------------------------------------------------


@asynccontextmanager
async def open_stock_pair() -> AsyncIterator[tuple[StockServer, Connector]]:
    fabric = MemoryFabric()
    with trio.fail_after(2 * LIMIT):
        async with open_stock_server(fabric) as server, fabric.open(pool_size=POOL) as engine:
            async with open_connector(receiver_config(server.port), engine=engine) as connector:
                yield server, connector


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("whole", [True, False])
async def test_a_get_of_a_stock_sender_cancelled_at_any_checkpoint_leaves_the_pool_whole(
    moment: str, whole: bool
) -> None:
    """What the stock sender has delivered it has forgotten: there a cancelled get may cost the payload."""
    async with open_stock_pair() as (server, connector):
        for number in itertools.count():
            key = f"k{number}@0_1"
            metadata = server.put(key, filled(UNIT))
            instrument, call = CancelAt(moment, number), Call()

            async def get(number: int = number, known: object = metadata if whole else None) -> object:
                return await connector.get("0", "1", f"k{number}", known)

            trio.lowlevel.add_instrument(instrument)
            await call.run(get, instrument)
            trio.lowlevel.remove_instrument(instrument)
            if not call.cancelled:
                assert isinstance(call.value, ManagedBuffer)
                assert call.value.to_bytes() == bytes(filled(UNIT).tolist())
                call.value.release()
            elif key in server.entries:
                await wait_until(lambda: connector.health()["quarantined"] == 0)
                if key in server.entries:
                    value = await connector.get("0", "1", f"k{number}")
                    assert isinstance(value, ManagedBuffer)
                    value.release()
            await assert_free(connector)
            if not instrument.reached:
                break
        assert not call.cancelled
        assert number >= 3
