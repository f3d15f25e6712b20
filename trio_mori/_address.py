"""A stage's address, and what one of its instances has of it: it listens there, or knows who does."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from enum import Enum

import attrs
import trio

from ._config import ConnectorConfig
from ._errors import BindFailed, InternalError, NoDescriptors
from ._inquiry import NOBODY, ask_holder, held_by, held_by_instance, tell_apart
from ._keys import Keys
from ._protocol import wire
from ._sender import Sender
from ._unix import LOCAL_PREFIX, UnixListener, open_unix_listener
from ._zmq_listener import ListeningLink, open_listener

logger = logging.getLogger("trio_mori.port")

# How often listening is tried. Somebody who listens and answers decides it the first time; further times are for
# holders that end or yield, and for others that are quicker then.
ATTEMPTS = 8

# Seconds before the third time, doubled each time. What else comes and goes there is given 1.3 s in all.
PAUSE = 0.02

# Seconds that a holder which yields may take until the port is free: it waits for its receivers for a quarter of one,
# and for its socket. One that closes has its `close_grace`, which is ours, beforehand.
PATIENCE = 2.0


class Standing(Enum):
    """What an instance has of its address."""

    OPENING = "opening"  # it tries to listen
    HELD = "held"  # it listens
    SHARED = "shared"  # an older instance of this process listens for it, or will
    PASSIVE = "passive"  # another process listens, as far as is known
    YIELDING = "yielding"  # it stops listening, for another process that asked
    CLOSING = "closing"


NEXT: Mapping[Standing, frozenset[Standing]] = {
    Standing.OPENING: frozenset({Standing.HELD, Standing.SHARED, Standing.PASSIVE, Standing.CLOSING}),
    Standing.HELD: frozenset({Standing.YIELDING, Standing.CLOSING}),
    Standing.SHARED: frozenset({Standing.OPENING, Standing.CLOSING}),
    Standing.PASSIVE: frozenset({Standing.OPENING, Standing.CLOSING}),
    Standing.YIELDING: frozenset({Standing.PASSIVE, Standing.CLOSING}),
    Standing.CLOSING: frozenset(),
}


@attrs.define(eq=False)
class Attempt:
    """One try to listen for a put.

    Attributes:
        failure: Why it failed.
        told: Whether anybody who puts has been told so.
    """

    failure: BindFailed | NoDescriptors | None = None
    told: bool = False


class Address:
    """One instance's part in its stage's address.

    Attributes:
        standing: Moves along `NEXT`; each move is announced by `on_change`.
        attempt: The last one.
        puts: How many puts need this instance to listen, now.
        reserved: Whether it has to listen for a put that may come.
    """

    def __init__(
        self,
        sender: Sender,
        config: ConnectorConfig,
        hosts: Sequence[str],
        *,
        deployment: wire.Deployment,
        keys: Keys | None,
        nursery: trio.Nursery,
        on_change: Callable[[], object],
    ) -> None:
        self.sender = sender
        self.standing = Standing.OPENING
        self.attempt = Attempt()
        self.puts = 0
        self.reserved = False
        self._config = config
        self._hosts = hosts
        self._deployment = deployment
        self._keys = keys
        self._listener: ListeningLink | None = None
        self._refused = 0  # by earlier ones
        self._cut_off = 0  # likewise
        self._nursery = nursery
        self._on_change = on_change
        self._claiming = trio.CancelScope()
        self._asked = trio.Event()
        sender.reception.may_yield = self._may_yield

    def __str__(self) -> str:
        return self.sender.endpoint.address

    @property
    def refused(self) -> int:
        """Connections that were not let in, for want of keys."""
        return self._refused + (0 if self._listener is None else self._listener.refused)

    @property
    def cut_off(self) -> int:
        """Connections that were cut off for a message without an end or of too many parts."""
        return self._cut_off + (0 if self._listener is None else self._listener.cut_off)

    async def open(self) -> None:
        """Listen, or see that another process does so for this stage.

        Raises:
            BindFailed: the address cannot be listened on, and nobody of this stage does.
        """
        await self._claim(wanted=False)

    def ask(self) -> Attempt | None:
        """Try to listen for a put, in the background. None: it is busy with something else first."""
        if self.standing is Standing.PASSIVE:
            self._begin()
            self._nursery.start_soon(self._claim_for_put, self.attempt)
        return self.attempt if self.standing is Standing.OPENING else None

    def inherit(self) -> None:
        """Whoever listened for it does so no more: do it, in the background."""
        self._begin()
        self._nursery.start_soon(self._claim_as_heir)

    def share(self) -> None:
        """Another instance of this process listens for it."""
        self._move(Standing.SHARED)

    def stop(self) -> None:
        """Try to listen no more. What it listens on stays open until its nursery ends. Idempotent."""
        if self.standing is not Standing.CLOSING:
            self._claiming.cancel()
            self._move(Standing.CLOSING)

    def _begin(self) -> None:
        self._move(Standing.OPENING)
        self.attempt = Attempt()

    def _move(self, standing: Standing) -> None:
        if standing not in NEXT[self.standing]:
            raise InternalError(f"an address that was {self.standing.value} cannot be {standing.value} next")
        self.standing = standing
        self._on_change()

    # --- how it is had ------------------------------------------------------------------------------------

    async def _claim_for_put(self, attempt: Attempt) -> None:
        try:
            await self._claim(wanted=True)
        except (BindFailed, NoDescriptors) as error:
            attempt.failure, self.reserved = error, False
            self._move(Standing.PASSIVE)

    async def _claim_as_heir(self) -> None:
        try:
            await self._claim(wanted=False)
        except (BindFailed, NoDescriptors) as error:
            logger.warning("nobody listens for this stage until its next put: %s", error)
            self._move(Standing.PASSIVE)

    async def _claim(self, *, wanted: bool) -> None:
        """Come to listen or, unless that is `wanted` for a put, be passive. Ends early by `stop`.

        Raises:
            PortHeld: another instance of this stage has put there.
            BindFailed: it cannot be listened on.
            NoDescriptors: too few are left for it.
        """
        with trio.CancelScope() as self._claiming:
            found: wire.Holder | str | None = None
            for attempt in range(ATTEMPTS):
                taken: BindFailed | NoDescriptors | None = await self._nursery.start(self._listen)
                if taken is None:
                    return
                await trio.lowlevel.checkpoint_if_cancelled()
                if isinstance(taken, NoDescriptors) or taken.errno != errno.EADDRINUSE or not self._config.zmq_port:
                    raise taken
                if isinstance(found, str):
                    raise held_by(found, taken)  # it was asked before, and is still there
                if attempt == ATTEMPTS - 1:
                    raise held_by(NOBODY, taken)
                patience = self._config.close_grace + PATIENCE
                found = await ask_holder(
                    taken.host, taken.port, self._deployment, keys=self._keys, wanted=wanted, patience=patience
                )
                await trio.lowlevel.checkpoint_if_cancelled()
                if isinstance(found, wire.Holder):
                    if stranger := tell_apart(found, self._deployment):
                        raise held_by(stranger, taken)
                    if not wanted:
                        logger.info("process %d listens on %s; this one will when it puts", found.pid, self)
                        self._move(Standing.PASSIVE)
                        return
                    if not found.yields:
                        raise held_by_instance(found, taken)
                if attempt:
                    await trio.sleep(PAUSE * 2 ** (attempt - 1))

    def _may_yield(self) -> bool:
        """Another process would put at this address: let it, if nothing was or is being put here."""
        book = self.sender.book
        if self.standing is Standing.HELD:
            if self.puts or self.reserved or book.shelf.staged or book.counters.puts:
                return False
            logger.info("%s is given up for another process of this stage, which puts", self)
            self._move(Standing.YIELDING)
            self.sender.reception.leave()  # whoever comes from now on is not told to go
            self._asked.set()
        return self.standing in (Standing.YIELDING, Standing.CLOSING)

    def _forget(self, listener: ListeningLink) -> None:
        self._refused += listener.refused
        self._cut_off += listener.cut_off
        self._listener = None

    async def _listen(self, *, task_status: trio.TaskStatus[BindFailed | NoDescriptors | None]) -> None:
        """Serve receivers until it is cancelled, or yields."""
        sender = self.sender
        async with AsyncExitStack() as stack:
            try:
                listener = await stack.enter_async_context(
                    open_listener(self._hosts, self._config.zmq_port, keys=self._keys)
                )
            except (BindFailed, NoDescriptors) as error:
                task_status.started(error)  # not raised here: on its way through `start` it might lose its cause
                return
            self._listener = listener
            stack.callback(self._forget, listener)
            local = await _open_local_link(stack) if self._config.same_host_link == "auto" else None
            sender.endpoint = attrs.evolve(sender.endpoint, port=listener.port)
            sender.reception.local = "" if local is None else local.name
            async with trio.open_nursery() as serving:
                serving.start_soon(sender.reception.serve, listener)
                if local is not None:
                    serving.start_soon(sender.reception.serve, local)
                await trio.lowlevel.checkpoint_if_cancelled()  # by `stop`, too
                self._asked = trio.Event()
                self._move(Standing.HELD)
                task_status.started(None)
                await self._asked.wait()
                await sender.say_farewell()
                serving.cancel_scope.cancel()
            sender.begin_anew()
        if self.standing is Standing.YIELDING:
            self._move(Standing.PASSIVE)


async def _open_local_link(stack: AsyncExitStack) -> UnixListener | None:
    """A listener for processes of this host; None where the system has no such sockets."""
    try:
        return await stack.enter_async_context(open_unix_listener(f"{LOCAL_PREFIX}{os.urandom(16).hex()}"))
    except OSError as error:
        logger.info("no unix sockets here (%s): peers on this host use the ZMQ port", error)
        return None
