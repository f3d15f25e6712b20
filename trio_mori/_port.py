"""Where a connector's puts go: to its own sender, or to that of another instance of its stage in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import trio

from ._address import Address, Standing
from ._config import ConnectorConfig
from ._errors import ConnectorClosed, NotReady
from ._keys import Keys
from ._payload import Plan
from ._protocol import wire
from ._scope import open_service
from ._sender import Sender
from ._staging import Reservation
from ._statistics import Receipt

T = TypeVar("T")


class _Family:
    """The instances of one stage in this trio run, eldest first. The eldest listens, and sends, for all."""

    def __init__(self) -> None:
        self.members: list[Address] = []
        self.changes = trio.lowlevel.ParkingLot()


Families = dict[wire.Deployment, _Family]

# Of each trio run: the stages that have a port of their own choice.
FAMILIES: trio.lowlevel.RunVar[Families] = trio.lowlevel.RunVar("trio_mori.families")


def known_families() -> Families:
    """Those of this trio run."""
    try:
        return FAMILIES.get()
    except LookupError:
        FAMILIES.set({})
        return FAMILIES.get()


class Port:
    """The way from a connector's puts to the sender that listens for its stage. Made by `open_port`.

    A stage may be given its configuration several times: vllm-omni makes one connector in the worker and one in the
    scheduler, in one process or in two, and only one of them ever puts. All of them open; the address goes to the one
    that puts.

    *In one trio run* the eldest listens, and whatever any of them puts goes to its sender. When it closes, the next
    eldest listens, with a sender of its own: what nobody had fetched is dropped, as at any close.

    *Between processes* whoever finds the address taken by another instance of its stage stays passive. Its first put
    asks the holder to yield. A holder that has put nothing sends its receivers away and stops listening, and is
    passive from then on; they find the new one as they would find one that was restarted. A holder that has put
    refuses, for its payloads are at that address, and so the put that asked fails.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        hosts: Sequence[str],
        *,
        deployment: wire.Deployment,
        keys: Keys | None,
        nursery: trio.Nursery,
    ) -> None:
        self._config = config
        self._hosts = hosts
        self._deployment = deployment
        self._keys = keys
        self._nursery = nursery
        self._families: Families = {}
        self._family = _Family()
        self._opened: Address | None = None
        self._borrowing: set[trio.CancelScope] = set()  # around calls of another instance's sender

    @property
    def _own(self) -> Address:
        assert self._opened is not None
        return self._opened

    @property
    def standing(self) -> Standing:
        """What this connector has of its stage's address."""
        return self._own.standing

    @property
    def refused(self) -> int:
        """Connections that were not let in, for want of keys, where this connector listens."""
        return self._own.refused

    @property
    def cut_off(self) -> int:
        """Connections that were cut off for a message without an end or of too many parts, likewise."""
        return self._own.cut_off

    # --- puts ---------------------------------------------------------------------------------------------

    async def put(self, key: str, data: object) -> Receipt:
        """See `Connector.put`."""
        while True:
            eldest = self._eldest()
            eldest.puts += 1
            try:
                if eldest.standing is not Standing.HELD:
                    await self._wait(eldest)
                elif eldest is self._opened:
                    return await eldest.sender.put(key, data)
                else:
                    return await self._borrow(partial(eldest.sender.put, key, data), f"the put of {key!r}")
            except ConnectorClosed:
                if eldest is self._own or eldest.standing is not Standing.CLOSING:
                    raise
            finally:
                eldest.puts -= 1

    async def _borrow(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        scope = trio.CancelScope()
        self._borrowing.add(scope)
        try:
            with scope:
                return await call()
        finally:
            self._borrowing.remove(scope)
        raise ConnectorClosed(f"the connector was closed during {what}")

    def put_nowait(self, key: str, data: object) -> Receipt:
        """See `Connector.put_nowait`."""
        return self._sender_now(key).put_nowait(key, data)

    def reserve_nowait(self, key: str, plan: Plan) -> Reservation:
        """See `Connector.reserve_nowait`."""
        return self._sender_now(key).reserve_nowait(key, plan)

    def has_place(self, key: str, size: int) -> bool:
        """See `Connector.has_place`. False, too, where another instance puts for this one."""
        own = self._own
        return self._family.members[:1] == [own] and own.standing is Standing.HELD and own.sender.has_place(key, size)

    async def wait_listening(self) -> None:
        """See `Connector.wait_listening`."""
        await trio.lowlevel.checkpoint()
        while True:
            eldest = self._eldest()
            if eldest.standing is Standing.HELD:
                eldest.reserved = True
                return
            eldest.puts += 1
            try:
                await self._wait(eldest)
            finally:
                eldest.puts -= 1

    async def wait_empty(self) -> int:
        """See `Connector.drain`."""
        eldest = self._eldest()
        if eldest is self._opened:
            return await eldest.sender.wait_empty()
        return await self._borrow(eldest.sender.wait_empty, "drain")

    def cleanup(self, name: str, edge: str | None, *, tell: bool = True) -> int:
        """See `Connector.cleanup_nowait`."""
        members = self._family.members
        return members[0].sender.cleanup(name, edge, tell=tell) if self._own in members else 0

    def lose(self, key: str) -> None:
        """See `Sender.lose`."""
        members = self._family.members
        if self._own in members:
            members[0].sender.lose(key)

    def _eldest(self) -> Address:
        if self._own.standing is Standing.CLOSING:
            raise ConnectorClosed("the connector was closed before the call had begun")
        return self._family.members[0]

    async def _wait(self, eldest: Address) -> None:
        """Wait until something has changed about who listens; have the eldest try to, if nobody does."""
        attempt = eldest.ask()
        await self._family.changes.park()
        if attempt is not None and attempt.failure is not None:
            attempt.told = True
            raise attempt.failure

    def _sender_now(self, key: str) -> Sender:
        eldest = self._eldest()
        if eldest.standing is Standing.HELD:
            return eldest.sender
        last = eldest.attempt
        if eldest.standing is Standing.PASSIVE and last.failure is not None and not last.told:
            last.told = True
            raise last.failure
        eldest.reserved = True
        eldest.ask()
        raise NotReady(
            f"put of {key!r}: another instance of this stage has its address, {eldest}, or has just closed, and this "
            "one asks for it; put again in a moment, or use put or wait_listening, which wait"
        )

    # --- life ---------------------------------------------------------------------------------------------

    async def open(self, sender: Sender) -> None:
        """Listen for the connector's sender, or see that another instance of the stage listens.

        Raises:
            BindFailed: the address cannot be listened on, and nobody of this stage does.
        """
        if self._config.zmq_port:  # one that the system chooses is shared with nobody
            self._families = known_families()
            self._family = self._families.setdefault(self._deployment, self._family)
        members, changes = self._family.members, self._family.changes
        own = self._opened = Address(
            sender,
            self._config,
            self._hosts,
            deployment=self._deployment,
            keys=self._keys,
            nursery=self._nursery,
            on_change=changes.unpark_all,
        )
        members.append(own)
        while members[0] is not own:
            if members[0].standing in (Standing.HELD, Standing.PASSIVE, Standing.YIELDING):
                own.share()
                await trio.lowlevel.checkpoint()
                return
            await changes.park()  # it opens, and may fail to, or it closes
        await own.open()

    def stop(self) -> None:
        """Put nothing any more; whoever waits to put is told. Idempotent."""
        own, members = self._opened, self._family.members
        if own is None:
            return
        if own in members[1:]:
            members.remove(own)  # the eldest may be listening, and stays in the way until it has left
        own.stop()
        for scope in self._borrowing:
            scope.cancel()

    def leave(self) -> None:
        """It does not listen any more: the next one may."""
        members = self._family.members
        if self._opened in members:
            members.remove(self._opened)
            if members and members[0].standing is Standing.SHARED:
                members[0].inherit()
        if not members and self._families.get(self._deployment) is self._family:
            del self._families[self._deployment]
        self._family.changes.unpark_all()


@asynccontextmanager
async def open_port(
    config: ConnectorConfig, hosts: Sequence[str], deployment: wire.Deployment, keys: Keys | None
) -> AsyncIterator[Port]:
    """A connector's port, to be opened: once this has been left, the address is free, or another instance's.

    Args:
        hosts: Addresses to listen on.
        keys: Whom to let in there; None: everybody.
    """
    port = None
    try:
        async with open_service() as nursery:
            port = Port(config, hosts, deployment=deployment, keys=keys, nursery=nursery)
            try:
                yield port
            finally:
                port.stop()
    finally:
        if port is not None:
            port.leave()
