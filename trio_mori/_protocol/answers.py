"""What senders say: each message, and what it does to the interest that it is about."""

from __future__ import annotations

from .._errors import RemoteProtocolError, TooBig
from . import wire
from .asking import Asking, InboxCounters
from .interests import TOO_BIG, Cause, Channel, State
from .placement import Placement
from .returns import Returns
from .senders import Senders


class Answers:
    """A part of `Inbox`: the answers of senders, which may come late, twice, or not in order."""

    def __init__(
        self, asking: Asking, placement: Placement, returns: Returns, senders: Senders, counters: InboxCounters
    ) -> None:
        self._asking = asking
        self._placement = placement
        self._returns = returns
        self._senders = senders
        self._counters = counters

    def concerns(self, channel: Channel, body: wire.Welcome | wire.Stale | wire.Mismatch | wire.Replies) -> bool:
        """Whether this is said to the present generation of our session, and, if it is about what was asked, by the
        incarnation of the sender that was asked. What is not changes nothing.
        """
        if body.session != channel.token or body.generation != channel.generation:
            return False
        return not isinstance(body, wire.Replies) or body.epoch == channel.epoch

    def on_message(self, channel: Channel, message: wire.ToReceiver, now: float) -> None:
        """A message of the sender arrived that `concerns` this channel.

        Raises:
            RemoteProtocolError: it says what cannot be; nothing was changed.
        """
        if not channel.up:
            return  # it stood behind a farewell
        if isinstance(message, wire.Done):
            self._on_done(channel, message)
        elif isinstance(message, wire.Ready):
            self._on_ready(channel, message)
        elif isinstance(message, wire.Failed):
            self._on_failed(channel, message)
        elif isinstance(message, wire.Closed):
            for fetch_id in message.ids:
                self._on_closed(channel, fetch_id)
        elif isinstance(message, wire.Pulse):
            channel.answered = max(channel.answered, message.sequence)
            for fetch_id in message.unknown:
                interest = channel.interests.get(fetch_id)
                if interest is not None and interest.state in (State.POSTED, State.OFFERED):
                    self._asking.ask(interest)
        elif isinstance(message, wire.Retracted):
            self._on_retracted(channel, message)
        elif isinstance(message, wire.Leaving):
            self._senders.leave(channel, frozenset(message.unsettled), now)

    def _on_done(self, channel: Channel, message: wire.Done) -> None:
        interest = channel.interests.get(message.id)
        if interest is None or interest.state in (State.ARRIVED, State.TAKEN) or message.round < interest.round:
            return
        capacity = 0 if interest.extent is None else interest.extent.size
        if interest.state is not State.RETURNING and message.size > capacity:
            raise RemoteProtocolError(
                f"the sender says it wrote {message.size} bytes of {interest.key!r} into a destination of {capacity}"
            )
        self._asking.move(interest, Cause.ARRIVE)
        self._placement.leave(interest)
        self._placement.find_room()
        if interest.state is State.RETURNING:
            self._placement.free(interest)  # the cancel is on its way; `Closed` will confirm it
            return
        interest.size, interest.header, interest.epoch = message.size, message.header, channel.epoch
        self._counters.arrived += 1
        self._counters.preposted_hits += interest.round == 0 and capacity > 0
        self._placement.sizes.add(interest.key, message.size)
        self._asking.wake(interest)

    def _on_ready(self, channel: Channel, message: wire.Ready) -> None:
        interest = channel.interests.get(message.id)
        if interest is None or interest.state not in (State.POSTED, State.OFFERED):
            return
        if message.round <= interest.round:
            if message.round == interest.round and interest.extent is not None:
                self._asking.ask(interest)  # what we said was lost, or it crossed
            return
        interest.round, interest.needed = message.round, message.size
        if interest.extent is not None and interest.extent.size >= message.size:
            self._asking.move(interest, Cause.PLACE)
            self._asking.ask(interest)
            return
        self._placement.leave(interest)
        self._placement.free(interest)  # void by the new round
        self._asking.move(interest, Cause.OFFER)
        try:
            self._placement.hungry.join(interest, message.size)
        except TooBig as error:
            self._asking.fail(interest, TOO_BIG, str(error))
            self._returns.cancel(interest)
        self._placement.find_room()

    def _on_retracted(self, channel: Channel, message: wire.Retracted) -> None:
        interest = channel.interests.get(message.id)
        if interest is None or interest.state is not State.POSTED or message.round < interest.round:
            return
        # Nothing counts this destination against those ahead of the data, and it may lie in the way of a payload.
        if interest.extent is not None and len(channel.interests) <= wire.MAX_OPEN:  # else at the next heartbeat
            self._placement.ask_anew(interest)

    def _on_failed(self, channel: Channel, message: wire.Failed) -> None:
        interest = channel.interests.get(message.id)
        if interest is None or interest.state in (State.ARRIVED, State.TAKEN):
            return
        cause = Cause.FAIL if message.settled else Cause.DOUBT
        if interest.state is not State.RETURNING:
            self._asking.fail(interest, message.code, message.detail)
        elif interest.is_told and message.settled:
            cause = Cause.CONFIRM
        if not message.settled:
            interest.returned = -2
        self._asking.move(interest, cause)
        self._placement.leave(interest)
        if message.settled:
            self._placement.free(interest)
        if interest.state is State.OVER:
            self._returns.forget(interest)
            self._asking.say(channel, wire.Ack([interest.id]))
        self._placement.find_room()

    def _on_closed(self, channel: Channel, fetch_id: int) -> None:
        interest = channel.interests.get(fetch_id)
        if interest is None or interest.state is not State.RETURNING:
            return
        self._asking.move(interest, Cause.CONFIRM)
        self._placement.free(interest)
        self._returns.forget(interest)
