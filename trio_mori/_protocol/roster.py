"""The receivers that a sender knows, and what waits to be said to each."""

from __future__ import annotations

from . import wire
from .alarm import Alarm
from .entries import Session


class Roster:
    """The sessions of receivers, by the token that each chose.

    Attributes:
        talking: Those with messages in `Session.outgoing`.
    """

    def __init__(self, alarm: Alarm, acknowledge_timeout: float) -> None:
        self.sessions: dict[bytes, Session] = {}
        self.talking: dict[Session, None] = {}
        self._alarm = alarm
        self._acknowledge_timeout = acknowledge_timeout

    def forget(self, session: Session) -> None:
        """Nothing more is said to it."""
        session.outgoing.clear()
        self.talking.pop(session, None)
        if not self.has_left(session):
            del self.sessions[session.token]

    def speaker(self, requests: wire.Requests, epoch: bytes) -> Session | None:
        """Whose words these are. None if the session, the generation of it or the incarnation of this sender that they
        name is not the present one: they are answered `wire.Stale`, and change nothing.
        """
        session = self.sessions.get(requests.session)
        if session is None or requests.generation != session.generation or requests.epoch != epoch:
            return None
        return session

    def has_left(self, session: Session) -> bool:
        """Whether it was forgotten."""
        return self.sessions.get(session.token) is not session

    def say(self, session: Session, message: wire.ToReceiver) -> None:
        """Leave a message for the shell to send; none for one that has left."""
        if self.sessions.get(session.token) is session:
            session.outgoing.append(message)
            session.is_quiet = False
            self.talking[session] = None

    def await_word(self, session: Session) -> None:
        """If nothing is heard of it in time, what it was told and given counts as unheard."""
        self._alarm.at = min(self._alarm.at, session.last_heard + self._acknowledge_timeout)

    def silent_at(self, session: Session) -> float:
        """When its acknowledgement time is over, if nothing more is heard of it."""
        return session.last_heard + self._acknowledge_timeout

    def silent(self, now: float) -> list[Session]:
        """Those whose acknowledgement time is over."""
        return [session for session in self.sessions.values() if self.silent_at(session) <= now]

    def excuse(self, seconds: float, now: float) -> None:
        """So many seconds were no silence of the receivers, for nobody listened."""
        for session in self.sessions.values():
            session.last_heard = min(session.last_heard + seconds, now)
