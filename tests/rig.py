"""Connectors over memory engines and real sockets on loopback, as the tests of the shell need them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import attrs
import pytest
import torch
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_mori import Connector, Receipt, open_connector
from trio_mori._protocol.entries import Want
from trio_mori.testing import ENGINE_CHECKS, MemoryEngine, MemoryFabric
from trio_mori.testing._engine_checks import check_bytes_arrive_exactly, check_concurrent_writes

T = TypeVar("T")

UNIT = 4096
POOL = 64 * UNIT

# Seconds for a whole test, which on an idle machine takes a few milliseconds.
LIMIT = 20.0

# Seconds until something is settled at the latest. Below the default heartbeat of 5 s, which would repair what was
# forgotten.
SOON = 3.0

# The checks of an engine; those of many megabytes are not among what is run a thousand times.
EVERY_ENGINE_CHECK = [
    pytest.param(
        check,
        id=check.__name__,
        marks=[] if check in (check_bytes_arrive_exactly, check_concurrent_writes) else [pytest.mark.deterministic],
    )
    for check in ENGINE_CHECKS
]

# Heartbeats for tests in which a peer has to be missed.
FAST: Mapping[str, object] = {"heartbeat_interval": 0.02, "peer_timeout": 0.3, "acknowledge_timeout": 0.3}


def filled(size: int, value: int = 7) -> torch.Tensor:
    """A payload of so many equal bytes."""
    return torch.full((size,), value, dtype=torch.uint8)


async def wait_until(condition: Callable[[], object], within: float = SOON) -> None:
    """Look again and again until a condition holds: what it waits for comes by sockets and threads.

    It looks a hundred times at least. A machine that stood still for longer has not given anybody that time.
    """
    give_up = trio.current_time() + within
    looks = 0
    while not condition():
        if looks >= 100 and trio.current_time() > give_up:
            raise AssertionError(f"not settled within {within} s")
        looks += 1
        await trio.sleep(0.001)


async def pass_time(clock: MockClock, seconds: int) -> None:
    """Have time pass second by second. To whoever counts the silence of others, a longer jump is that it was stuck."""
    for _ in range(seconds):
        clock.jump(1)
        await wait_all_tasks_blocked()


def is_free(connector: Connector) -> bool:
    """Whether the pool is wholly free, in one piece, and the books say so too."""
    now = connector.statistics()
    others = sum(size for state, size in now.held.items() if state != "free")
    return now.pool.free == now.pool.largest_free == now.pool.size and others == 0


async def assert_free(*connectors: Connector) -> None:
    """Every pool is wholly free, soon."""
    for connector in connectors:
        try:
            await wait_until(lambda connector=connector: is_free(connector))
        except AssertionError:
            raise AssertionError(f"the pool is not free: {connector.statistics()}") from None


def assert_books_agree(*connectors: Connector) -> None:
    """The pool by state sums to the pool."""
    for connector in connectors:
        now = connector.statistics()
        assert sum(now.held.values()) == now.pool.size, now


def port_of(connector: Connector) -> int:
    """Where a sender listens."""
    return int(connector.get_connection_info()["zmq_port"])


def sender_config(**more: object) -> dict[str, object]:
    """A sender on any free port of loopback."""
    return {"role": "sender", "host": "127.0.0.1", "zmq_port": 0, **more}


def receiver_config(port: int | Connector, **more: object) -> dict[str, object]:
    """A receiver of the sender that listens there."""
    number = port if isinstance(port, int) else port_of(port)
    return {"role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": number, **more}


class Outcome:
    """What became of a call in another task."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.over = trio.Event()
        self.value: object = None
        self.error: BaseException | None = None

    async def run(self, function: Callable[..., Awaitable[object]], args: tuple[object, ...]) -> None:
        try:
            with self.scope:
                self.value = await function(*args)
        except Exception as error:  # noqa: BLE001 - raised again by `wait`
            self.error = error
        finally:
            self.over.set()

    async def wait(self) -> object:
        """What it returned, or raise what it raised."""
        with trio.move_on_after(SOON):
            await self.over.wait()
        await wait_until(self.over.is_set, within=0)
        if self.error is not None:
            raise self.error
        assert not self.scope.cancelled_caught, "it was cancelled"
        return self.value


def begin(nursery: trio.Nursery, function: Callable[..., Awaitable[object]], *args: object) -> Outcome:
    """Call something in a task of its own."""
    outcome = Outcome()
    nursery.start_soon(outcome.run, function, args)
    return outcome


class Sleeps(trio.abc.Instrument):
    """How often the run has slept, and how often it only looked whether there was something."""

    def __init__(self) -> None:
        self.slept = 0
        self.looked = 0

    def before_io_wait(self, timeout: float) -> None:
        if timeout > 0:
            self.slept += 1
        else:
            self.looked += 1


class Crash(Exception):
    """What ends a stage that is crashed."""


class Stage:
    """A connector in a task of its own, which can be closed in good order or crashed, and its engine.

    Made by `start_stage`.
    """

    def __init__(self, connector: Connector, engine: MemoryEngine) -> None:
        self.connector = connector
        self.engine = engine
        self.left = trio.Event()
        self.over = trio.Event()

    @property
    def port(self) -> int:
        """Where it listens."""
        return port_of(self.connector)

    async def close(self) -> None:
        """Leave its ``async with``."""
        self.left.set()
        await self.over.wait()

    async def crash(self) -> None:
        """End it as a process that is killed: nobody is told, and writes under way never arrive."""
        self.engine.kill()
        self.connector._receiver.nursery.start_soon(fail, Crash())
        await self.over.wait()


async def fail(error: Exception) -> None:
    """Raise."""
    raise error


async def start_stage(nursery: trio.Nursery, fabric: MemoryFabric, pool: int = POOL, **config: object) -> Stage:
    """Open a connector in a task of this nursery."""
    stage: Stage = await nursery.start(_run_stage, fabric, pool, config)
    return stage


async def _run_stage(
    fabric: MemoryFabric, pool: int, config: Mapping[str, object], *, task_status: trio.TaskStatus[Stage]
) -> None:
    async with fabric.open(pool_size=pool) as engine:
        stage = None
        try:
            async with open_connector({"host": "127.0.0.1", "zmq_port": 0, **config}, engine=engine) as connector:
                stage = Stage(connector, engine)
                task_status.started(stage)
                await stage.left.wait()
        except Crash:
            pass
        finally:
            if stage is not None:
                stage.over.set()
    assert engine.violations == []


@attrs.frozen
class Pair:
    """A sender (stage 0) and a receiver (stage 1)."""

    fabric: MemoryFabric
    sender: Connector
    receiver: Connector
    sender_engine: MemoryEngine
    receiver_engine: MemoryEngine

    async def put(self, key: str, data: object) -> Receipt:
        """Put on the edge of the two."""
        return await self.sender.put("0", "1", key, data)

    async def get(self, key: str) -> object:
        """Get on the edge of the two."""
        return await self.receiver.get("0", "1", key)

    def get_nowait(self, key: str) -> object:
        """Get on the edge of the two, now."""
        return self.receiver.get_nowait("0", "1", key)

    def parked(self) -> int:
        """Gets that the sender knows of and has nothing for."""
        assert self.sender._sender is not None
        sessions = self.sender._sender.book.sessions.values()
        return sum(f.state is Want.WAITING for session in sessions for f in session.fetches.values())

    async def get_later(self, nursery: trio.Nursery, key: str) -> Outcome:
        """A get that waits: the sender has heard of it."""
        before = self.parked()
        outcome = begin(nursery, self.get, key)
        await wait_until(lambda: self.parked() > before)
        return outcome

    async def hold_one(self, nursery: trio.Nursery, key: str, data: object, *, arrived: float = 0.0) -> Outcome:
        """A get whose write is under way, and stays so until the engine's `release`."""
        self.sender_engine.hold(arrived=arrived)
        outcome = await self.get_later(nursery, key)
        await self.put(key, data)
        await wait_until(lambda: self.sender_engine.held)
        return outcome

    async def assert_whole(self) -> None:
        """Both pools are wholly free, soon, and a payload still comes across."""
        await assert_free(self.sender, self.receiver)
        await self.put("whole", filled(100))
        assert torch.equal(await self.get("whole"), filled(100))
        await assert_free(self.sender, self.receiver)
        assert self.sender_engine.violations == []
        assert self.receiver_engine.violations == []


def is_local(receiver: Connector) -> bool:
    """Whether it talks with its sender by the link for one host, to which the two go over soon after they have met."""
    # The hello on the local link is the second one: until it was answered, the channel is up by the first.
    return any(
        u._links.local is not None and u.channel.generation > 1 and u.channel.up
        for u in receiver._receiver.upstreams.values()
    )


@asynccontextmanager
async def open_pair(
    *,
    sender: Mapping[str, object] = {},
    receiver: Mapping[str, object] = {},
    sender_pool: int = POOL,
    receiver_pool: int = POOL,
    inline: bool = True,
    within: float = LIMIT,
) -> AsyncIterator[Pair]:
    """A sender and a receiver over memory engines, for a body that takes no longer than that."""
    fabric = MemoryFabric()
    with trio.fail_after(within):
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            sender_engine = await enter(fabric.open(pool_size=sender_pool, inline=inline))
            receiver_engine = await enter(fabric.open(pool_size=receiver_pool, inline=inline))
            source = await enter(open_connector(sender_config(**sender), engine=sender_engine))
            target = await enter(open_connector(receiver_config(source, **receiver), engine=receiver_engine))
            yield Pair(fabric, source, target, sender_engine, receiver_engine)


async def fill_receiver(pair: Pair, nursery: trio.Nursery) -> Outcome:
    """Lease all of the receiver's pool, until the outcome's scope is cancelled."""
    leased = trio.Event()

    async def hold() -> None:
        async with pair.receiver.lease("0", "1", "big"):
            leased.set()
            await trio.sleep_forever()

    await pair.put("big", filled(POOL))
    outcome = begin(nursery, hold)
    await leased.wait()
    return outcome
