"""One sender that a receiver talks to: the hello, what is said and heard, and when it is given up."""

from __future__ import annotations

import logging
import os
from collections import deque
from math import inf
from typing import Protocol

import attrs
import trio

from ._config import ConnectorConfig, Endpoint
from ._errors import (
    AuthenticationFailed,
    DescriptorRefused,
    EngineMismatch,
    PeerLost,
    RemoteProtocolError,
    TrioMoriError,
)
from ._events import PEER_LOST, SENDER_REFUSED
from ._keys import Keys
from ._link import QUIET, QueuedLink
from ._log_limit import LogLimit
from ._offers import landing_of, names_of, offers_of
from ._presence import Presence
from ._process_watch import ProcessWatch
from ._protocol import interests as book
from ._protocol import stock_wire, wire
from ._protocol.inbox import Inbox
from ._protocol.interests import Channel, Interest
from ._sender_links import SenderLinks
from ._statistics import KnownSender, SenderStanding
from ._stock import StockSender
from .abc import Arrived, Engine, Landing

logger = logging.getLogger("trio_mori.receiver")

# Notices that payloads are gone that wait for a next call, which most keys never have. To forget the oldest costs an
# answer: the call waits as for a payload that is yet to come.
MAX_NOTICES = 1024

# How often in a row a sender may not have understood a hello before it counts as one that never does.
_HELLOS = 3

# A reason of `Interest.failure` beside those of the book: the peer turned out to speak the other dialect.
CHANGED_DIALECT = 301


class Surroundings(Protocol):
    """What an upstream uses of the receiver that it belongs to."""

    config: ConnectorConfig
    engine: Engine
    nursery: trio.Nursery
    deployment: wire.Deployment
    keys: Keys | None
    book: Inbox

    def flush(self) -> None:
        """Carry out what the book decided."""

    def note_progress(self) -> None:
        """Something was settled that a closing receiver may wait for."""

    def note_cut_off(self) -> None:
        """A connection to a sender was cut off, for a message without an end or of too many parts."""

    def hand_over_soon(self, link: QueuedLink) -> None:
        """Have the task that listens on a link do so again, in the next tick."""

    def stock_sender(self, endpoint: Endpoint) -> StockSender:
        """How a stock sender is asked."""


@attrs.define(eq=False)
class Dialect:
    """What is found out about a peer, once per time that it has to be.

    Attributes:
        known: Set when it is known what the peer speaks, or that it is of no use.
        refusal: Why it is of no use.
    """

    known: trio.Event = attrs.field(factory=trio.Event)
    refusal: TrioMoriError | None = None


class Upstream:
    """Talks with one sender, from `talk` until that is cancelled.

    Attributes:
        channel: The book that is kept of it.
        dialect: Of the present connection, or of the next one; replaced when it has to be found out again.
        stock: How it is asked if it is a stock sender.
        way: The engine by which the sender writes; empty while unknown.
        landing: Where in host memory what it writes arrives, if that is not the pool.
        last_refusal: For those who waited when it was refused: it may have been greeted well before they look.
        parked: What `get_nowait` asked for and nobody has taken yet, by key; and notices for the next call.
        malformed: Messages that could not be understood.
        timeouts: How often it was given up.
        refusals: How often it turned out that it and this side do not accept each other's keys.
    """

    def __init__(self, endpoint: Endpoint, channel: Channel, surroundings: Surroundings) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self.dialect = Dialect()
        self.stock: StockSender | None = None
        self.way = ""
        self.landing: Landing | None = None
        self.parked: dict[str, Interest] = {}
        self._notices: deque[Interest] = deque()  # of those, oldest first, and some that were told
        self.malformed = 0
        self.timeouts = 0
        self.refusals = 0
        self._around = surroundings
        self._log_limit = LogLimit()
        self.last_refusal: TrioMoriError | None = None
        self._links = SenderLinks(
            endpoint,
            self,
            keys=surroundings.keys,
            nursery=surroundings.nursery,
            flush=surroundings.flush,
            on_cut_off=surroundings.note_cut_off,
        )
        self._composing = False
        self._presence = Presence(surroundings.config, endpoint.address)
        self._misunderstood = 0  # since the last welcome
        self._watch = ProcessWatch(
            surroundings.engine,
            surroundings.nursery,
            address=endpoint.address,
            log_limit=self._log_limit,
            on_end=self._on_ended,
        )

    # --- the connection -----------------------------------------------------------------------------------

    async def talk(self) -> None:
        """Dial, listen, and dial again, until cancelled."""
        await self._links.talk()

    def look(self) -> None:
        """Take what has arrived here and now, if this side can, for a task that waits for it awake."""
        self._links.look()

    @trio.lowlevel.enable_ki_protection  # a Ctrl-C comes before a message or when the link is handed over
    async def lead(self, interest: Interest) -> None:
        """See `SenderLinks.lead`; if it is the only one, and follows upon another: then there is time to change places.

        The answers to many leave together, in a tick of their own. One that goes ahead has messages go one by one:
        16 streams flat out took a fifth more CPU at both ends.
        """
        link = self._links.current
        if link is None or len(self.channel.interests) > 1:
            return
        if link.is_watched and trio.current_time() - self._presence.last_heard > QUIET:
            return
        led = await self._links.lead(interest)
        if led is not None:
            self._around.hand_over_soon(led)  # whoever asks for the next payload at once leads on

    def on_connected(self) -> None:
        """Greet it; if it was refused, this may be another one."""
        if self.refusal is not None:
            self.dialect = Dialect()
        self._say_hello(self.channel.generation + 1)

    def on_moved(self) -> None:
        """Greet it, so that whatever is open is said once more."""
        self._say_hello(self.channel.generation + 1)

    def on_disconnected(self) -> None:
        """It is away. If it was a stock sender, or of no use, whoever comes next is found out anew."""
        now = trio.current_time()
        self._presence.left(now)
        self._around.book.disconnected(self.channel, now)
        if self.stock is not None:
            self.stock.retire()
            self.stock = None
            self.channel.lost_since = min(self.channel.lost_since, now)
            self.dialect = Dialect()
        elif self.refusal is not None:
            self.dialect = Dialect()

    def on_barred(self, why: str) -> None:
        """Whoever waits for it is told why it cannot be had."""
        address = self.endpoint.address
        self.refusals += 1
        self._refuse(AuthenticationFailed(f"no connection to the sender {address}: {why}", peer=address))

    def compose_later(self) -> None:
        """Have everything that is said until this tick ends leave as one message."""
        link = self._links.current
        if self._composing or link is None:
            return
        self._composing = True
        # Nobody waits for an acknowledgement, but who has just been given a payload does for the call that sends it.
        link.send(self._compose, urgent=set(map(type, self.channel.outgoing)) != {wire.Ack})

    def _compose(self) -> list[bytes] | None:
        self._composing = False
        channel = self.channel
        if not channel.outgoing or channel.epoch is None:
            return None
        batch = wire.Requests(channel.token, channel.generation, channel.epoch, channel.outgoing)
        frames, count = wire.encode_batch(batch)
        channel.outgoing = channel.outgoing[count:]
        if channel.outgoing:
            self.compose_later()
        return frames

    @property
    def has_heard(self) -> bool:
        """Whether the sender has read all that was said up to the last heartbeat; also if it is not there to do so."""
        if self.channel.up:
            return self.channel.answered >= self.channel.sequence
        # Between two links: what was said on the first one may be lost, and is said once more on the next.
        return self.channel.epoch is None or not self._reachable

    @property
    def _reachable(self) -> bool:
        return self._links.current is not None

    @property
    def established(self) -> bool:
        """Whether the sender is there and known, of whichever dialect; also while it goes over to another link."""
        return self._reachable and (self.channel.epoch is not None or self.stock is not None)

    @property
    def waiting(self) -> int:
        """Gets and interests that wait for it."""
        return self.dialect.known.statistics().tasks_waiting + sum(
            each.state in (book.State.POSTED, book.State.OFFERED) for each in self.channel.interests.values()
        )

    def tell(self, now: float) -> KnownSender:
        """How this side stands with it."""
        if self.refusal is not None:
            standing = SenderStanding.REFUSED
        else:
            standing = SenderStanding.CONNECTED if self.established else SenderStanding.DIALLING
        seconds = self._presence.absent_for(now) if standing is SenderStanding.DIALLING else 0.0
        return KnownSender(self.endpoint.address, standing.value, seconds, self.waiting)

    def say_goodbye(self) -> None:
        """Let the sender forget this session; everything was given back before."""
        channel, link = self.channel, self._links.current
        if link is not None and channel.up and channel.epoch is not None:
            farewell = wire.Requests(channel.token, channel.generation, channel.epoch, [*channel.outgoing, wire.Bye()])
            channel.outgoing.clear()
            link.send(wire.encode(farewell))

    @property
    def refusal(self) -> TrioMoriError | None:
        """Why it cannot be used, until the next connection."""
        return self.dialect.refusal

    def stop(self) -> None:
        """Nothing is asked any more: whoever waits to learn what the peer speaks, or for a stock sender, looks up."""
        self.dialect.known.set()
        if self.stock is not None:
            self.stock.retire()

    def _say_hello(self, generation: int) -> None:
        link = self._links.current
        if link is None:
            return  # what it answers was said before the link broke: whoever connects next is greeted
        around, channel = self._around, self.channel
        if generation != channel.generation:
            around.book.disconnected(channel, trio.current_time())
            channel.generation = generation
        hello = wire.Hello(
            wire.OLDEST_VERSION,
            wire.VERSION,
            channel.token,
            generation,
            around.config.heartbeat_interval,
            offers_of(around.engine),
            around.deployment,
        )
        link.send(wire.encode(hello))

    # --- messages -----------------------------------------------------------------------------------------

    def on_arrival(self, event: Arrived) -> None:
        """Understand a message, and do what it asks for."""
        channel = self.channel
        try:
            if not wire.is_native(event.frames):
                self._on_stock_answer(event)
                return
            body = wire.decode_from_sender(event.frames)
            self._presence.last_heard = now = trio.current_time()
            if isinstance(body, wire.VersionRange):
                self._on_version_range(body)
            elif not self._around.book.concerns(channel, body):
                return
            elif isinstance(body, wire.Welcome):
                self._on_welcome(body)
            elif isinstance(body, wire.Mismatch):
                self._refuse(self._mismatch(body))
            elif isinstance(body, wire.Stale):
                self._say_hello(channel.generation + 1)
            else:
                for message in body.messages:
                    if isinstance(message, wire.Leaving):
                        self._on_leaving(body.epoch)
                    self._around.book.on_message(channel, message, now)
                self._around.note_progress()
        except RemoteProtocolError as error:
            self.malformed += 1
            self._warn("from %s: %s", self.endpoint.address, error)

    def _on_version_range(self, body: wire.VersionRange) -> None:
        """The sender could not understand something: it is of another release, or a message did not come whole."""
        if body.newest < wire.OLDEST_VERSION or body.oldest > wire.VERSION:
            self._refuse(self._other_version(body))
            return
        self._misunderstood += 1
        what = f"the sender {self.endpoint.address} could not understand a message of this side"
        if self._misunderstood <= _HELLOS:
            # What was in the message has to be said again, and after a hello everything is.
            self._say_hello(self.channel.generation + 1)
        else:
            self._refuse(RemoteProtocolError(f"{what}, nor {_HELLOS} hellos: install the same release at both ends"))
            self.channel.lost_since = inf  # it is there, and greeted again at each heartbeat
        raise RemoteProtocolError(what)

    def _on_leaving(self, epoch: bytes) -> None:
        logger.info("sender %s closed", self.endpoint.address)
        self._watch.note_leaving(epoch)
        self.say_goodbye()

    def _on_welcome(self, welcome: wire.Welcome) -> None:
        around, channel = self._around, self.channel
        # Before any destination is named to it: whatever becomes of its process after that, we are told.
        try:
            peer = None if channel.epoch == welcome.epoch else self._watch.recognise(welcome)
        except DescriptorRefused as error:
            # Said hello to again at the next heartbeat. Were it taken as it is, its end could never be proven.
            self._warn("the sender %s has to wait: %s", self.endpoint.address, error)
            return
        if not around.book.welcome(channel, welcome.epoch):
            around.book.rename(channel, os.urandom(16))
            self._say_hello(channel.generation + 1)
            return
        self._misunderstood = 0
        self._presence.came()
        self._presence.tell_stage(welcome.deployment.stage)
        if self.way != welcome.chosen and self._log_limit.admits():
            logger.info("sender %s writes by %s", self.endpoint.address, welcome.chosen)
        self.way = welcome.chosen
        self.landing = landing_of(around.engine, welcome.chosen)
        self.dialect.refusal = None
        self.dialect.known.set()
        if peer is not None:
            self._watch.follow(welcome.epoch, peer)
        if around.config.same_host_link == "auto":
            self._links.go_over(welcome.local)

    def _on_stock_answer(self, event: Arrived) -> None:
        """A stock sender answers our hello, and nothing else on this connection."""
        if stock_wire.decode_answer(event.frames) != stock_wire.TRANSFER_ERROR or self.stock is not None:
            return
        if self.channel.up:
            raise RemoteProtocolError("a native sender does not answer so: what we sent did not come whole")
        logger.info("sender %s speaks the vllm-omni dialect", self.endpoint.address)
        self.stock = self._around.stock_sender(self.endpoint)
        self._presence.came()
        self.channel.lost_since = self._presence.last_heard = inf
        self._around.book.fail_all(self.channel, CHANGED_DIALECT, "")
        # What came from the sender before it is here, and stays; what did not is asked for anew.
        self.parked = {key: each for key, each in self.parked.items() if each.state is book.State.ARRIVED}
        self.dialect.refusal = None
        self.dialect.known.set()

    def _refuse(self, error: TrioMoriError) -> None:
        self._warn("%s", error, event=SENDER_REFUSED)
        self._around.book.fail_all(self.channel, book.MISMATCH, str(error))
        self.dialect.refusal = self.last_refusal = error
        self.dialect.known.set()

    def keep_notice(self, interest: Interest) -> None:
        """Tell the next call for its key that its payload is gone: the call that was told was cancelled just then."""
        if self.parked.setdefault(interest.key, interest) is not interest:
            return
        self._notices.append(interest)
        if len(self._notices) > MAX_NOTICES:
            oldest = self._notices.popleft()
            if self.parked.get(oldest.key) is oldest:
                del self.parked[oldest.key]

    def _warn(self, text: str, *details: object, event: str | None = None) -> None:
        """Log what the sender, whoever that is, can have said any number of times."""
        if self._log_limit.admits():
            extra = None if event is None else {"event": event, "peer": self.endpoint.address}
            logger.warning(text, *details, extra=extra)

    def _mismatch(self, body: wire.Mismatch) -> EngineMismatch:
        ours = names_of(self._around.engine)
        return EngineMismatch(
            f"no way for the sender {self.endpoint.address} to write into this pool: {body.detail} "
            f"(ours: {', '.join(ours)}; its: {', '.join(body.engines)}); give both ends one backend_type, or auto",
            ours=ours,
            theirs=tuple(body.engines),
        )

    def _other_version(self, body: wire.VersionRange) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"the sender {self.endpoint.address} speaks versions {body.oldest} to {body.newest} of the protocol, "
            f"this side {wire.OLDEST_VERSION} to {wire.VERSION}: install the same release of trio_mori at both ends"
        )

    # --- liveness -----------------------------------------------------------------------------------------

    def _on_ended(self, epoch: bytes) -> None:
        """Free what a sender may write to: its process is proven dead."""
        self._around.book.fenced(self.channel, epoch, trio.current_time())
        self._around.note_progress()
        self._around.flush()

    def beat(self, now: float, late: float) -> None:
        """At each heartbeat: say that we live; give the sender up if it has been gone for too long.

        Args:
            late: By how many seconds. In these this process was stopped or stuck, and heard nobody: what the sender
                said is yet to be read, and what it would have answered was not asked.
        """
        around, channel, presence = self._around, self.channel, self._presence
        presence.make_up(late, now)
        if channel.lost_since < inf:
            channel.lost_since = min(channel.lost_since + late, now)
        self._links.recheck()
        around.book.heartbeat(channel)  # which counts it also if nothing can be said
        if not channel.up and self._reachable and self.stock is None:
            self._say_hello(channel.generation)  # the first one, or its answer, was lost
        if presence.is_missed(now) and self.refusal is None and channel.lost_since == inf and (waiting := self.waiting):
            presence.tell_absence(now, waiting=waiting, is_connected=self._reachable)
        silent = now - min(channel.lost_since, presence.last_heard)
        if silent >= around.config.peer_timeout:
            self._give_up(now, silent)

    def _give_up(self, now: float, silent: float) -> None:
        """Fail what waits for it; whoever asks it from now on waits anew."""
        around, channel = self._around, self.channel
        limit = around.config.peer_timeout
        detail = f"the sender {self.endpoint.address} has been silent for {silent:.0f} s (peer_timeout is {limit:g} s)"
        if channel.end:
            gone = now - channel.lost_since
            detail += f": {channel.end} {gone:.0f} s ago, and none came in its place; start it again, and ask again"
        else:
            detail += "; its process may have ended, or be stopped or stuck"
        extra = {"event": PEER_LOST, "peer": self.endpoint.address, "seconds": silent}
        logger.warning("%s", detail, extra=extra)
        self.timeouts += 1
        around.book.fail_all(channel, book.PEER_LOST, detail)
        if not self.dialect.known.is_set():
            self.dialect.refusal = PeerLost(detail, peer=self.endpoint.address)
            self.dialect.known.set()
            self.dialect = Dialect()
        channel.lost_since = inf
        # One that is connected and says nothing is stopped or stuck: whoever asks it from now on is told in that
        # time, too. One that is not connected may come up at any time, as before the first connection.
        self._presence.last_heard = now if self._reachable else inf
