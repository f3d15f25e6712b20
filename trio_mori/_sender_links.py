"""The two links to one sender: by the port that it listens on, and for processes of one host while there is that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import trio

from ._config import Endpoint
from ._errors import PeerLost
from ._keys import Keys
from ._link import QueuedLink
from ._unix import LOCAL_PREFIX, UnixDialler, open_unix_dialler
from ._zmq_dialler import open_dialler
from .abc import Arrived, Connected, Disconnected, Link, Refused

logger = logging.getLogger("trio_mori.receiver")


class Talker(Protocol):
    """Who talks over them, and takes the two for one connection that is made anew now and then."""

    def on_connected(self) -> None:
        """The sender's port has taken a connection."""

    def on_moved(self) -> None:
        """What is said goes by the other link from now on: what was said by the first one may be lost."""

    def on_disconnected(self) -> None:
        """The connection is over; another one may be there already."""

    def on_barred(self, why: str) -> None:
        """There is no connection, since the keys do not fit."""

    def on_arrival(self, event: Arrived) -> None:
        """A message came."""


class Awaited(Protocol):
    """What a task waits for.

    Attributes:
        waiter: Whom to wake when it is settled: the link that the task reads.
    """

    waiter: object

    @property
    def settled(self) -> bool: ...


class SenderLinks:
    """Keeps the port dialled, from `talk` until that is cancelled, and goes over to the link for one host and back.

    Attributes:
        remote: By the sender's port, while it is connected. It stays so, unused, while there is the other one.
        local: For one host.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        talker: Talker,
        *,
        keys: Keys | None,
        nursery: trio.Nursery,
        flush: Callable[[], object],
        on_cut_off: Callable[[], object],
    ) -> None:
        """Stores what it is given.

        Args:
            flush: Called when everything that had arrived was handed over.
            on_cut_off: Called when a connection was cut off, for a message without an end.
        """
        self.remote: QueuedLink | None = None
        self.local: UnixDialler | None = None
        self._endpoint = endpoint
        self._talker = talker
        self._keys = keys
        self._nursery = nursery
        self._flush = flush
        self._on_cut_off = on_cut_off
        self._barred = ""  # why the port takes no connection, if the keys are why
        self._tried = ""  # the last name that was gone over to

    @property
    def current(self) -> QueuedLink | None:
        """The link on which things are said now; None while nobody would hear them."""
        return self.remote if self.local is None else self.local

    async def talk(self) -> None:
        """Dial, listen, and dial again, until cancelled."""
        host, port = self._endpoint.host, self._endpoint.port
        async with open_dialler(host, port, keys=self._keys, on_cut_off=self._on_cut_off) as link:
            try:
                while True:
                    for event in await link.receive():
                        if isinstance(event, Arrived):
                            self._talker.on_arrival(event)
                        elif isinstance(event, Connected):
                            self.remote = link
                            self._barred = ""
                            if self.local is None:
                                self._talker.on_connected()
                        elif isinstance(event, Disconnected):
                            self.remote = None
                            self._barred = ""
                            if self.local is None:
                                self._talker.on_disconnected()
                        elif isinstance(event, Refused):
                            self._barred = event.why
                            if self.local is None:
                                self._talker.on_barred(event.why)
                    self._flush()
            finally:
                # Whoever gives something back from now on has nobody to tell.
                self.remote = None

    def go_over(self, name: str) -> None:
        """Try the link for one host that a sender of this name listens on, unless it is in use or did not work."""
        if self.local is None and name.startswith(LOCAL_PREFIX) and name != self._tried:
            self._tried = name
            self._nursery.start_soon(self._talk_locally, name)

    async def _talk_locally(self, name: str) -> None:
        """Use that link for as long as it lasts.

        To the sender this is a new connection of the same session, so that whatever is open is said once more. When it
        ends, the session goes back to the remote link.
        """
        try:
            async with open_unix_dialler(name) as link:
                self.local = link
                try:
                    await self._follow(link)
                finally:
                    self.local = None
        except PeerLost as error:
            logger.debug("the sender %s stays on its remote link: %s", self._endpoint.address, error)
            return
        self._talker.on_disconnected()
        if self.remote is not None:
            self._talker.on_moved()
        elif self._barred:
            self._talker.on_barred(self._barred)
        self._flush()

    async def _follow(self, link: Link) -> None:
        while True:
            for event in await link.receive():
                if isinstance(event, Arrived):
                    self._talker.on_arrival(event)
                elif isinstance(event, Connected):
                    self._talker.on_moved()
                elif isinstance(event, Disconnected):
                    return
            self._flush()

    def look(self) -> None:
        """Take what has arrived on the link for one host here and now, for a task that waits for it awake."""
        if self.local is not None:
            arrived = self.local.receive_nowait()
            for event in arrived:
                self._talker.on_arrival(event)
            if arrived:
                self._flush()

    async def lead(self, awaited: Awaited) -> QueuedLink | None:
        """Read the link in the place of the task that listens, until something is settled or as long as that may be.

        Cancellation: while nothing has come.

        Returns:
            The link that is to be handed over to that task again; None: nothing is to be done.
        """
        led: QueuedLink | None = None
        try:
            while not awaited.settled:
                link = self.current
                if link is None or led not in (None, link) or not link.may_lead:
                    break
                awaited.waiter = led = link
                try:
                    await link.wait_input()
                finally:
                    awaited.waiter = None
                try:
                    for event in link.take_nowait():
                        self._talker.on_arrival(event)
                    self._flush()
                except Exception as error:  # noqa: BLE001 - it is raised by the task that listens, as if that had read it
                    link.hand_over(error)
                    return None
            else:
                return led
        except BaseException:
            if led is not None:
                led.hand_over()
            raise
        if led is not None:
            led.hand_over()
        return None

    def recheck(self) -> None:
        """See `Link.recheck`."""
        if self.remote is not None:
            self.remote.recheck()
