"""What lies between a receiver and a sender."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trio_mori._protocol import wire
from trio_mori._protocol.entries import Session

if TYPE_CHECKING:
    from world_receiver import Receiver
    from world_sender import Sender


@attrs.frozen(eq=False)
class Letter:
    """A message on its way, and what only an onlooker knows of it.

    Attributes:
        greeting: The hello after which it was said: each is another one, of whichever process, session and connection.
        sender: Who it is from, if it is from a sender; else who its writer takes to be at the other end.
    """

    frames: list[bytes]
    greeting: int
    sender: Sender | None


@attrs.define(eq=False)
class Connection:
    """One link from a receiver to who has the address, which another process may get without the receiver's noticing.

    What is queued in it may still arrive after its end.
    """

    receiver: Receiver
    sender: Sender
    up: list[Letter] = attrs.field(factory=list)
    down: list[Letter] = attrs.field(factory=list)
    open: bool = True

    def deliver(self, way: str, letter: Letter) -> None:
        if way == "up" and self.sender.running:
            self.sender.receive(self, letter)
        elif way == "down" and self.receiver.running:
            self.receiver.receive(letter)


DEPLOYMENT = wire.Deployment("model", 0, 0, 0, "")


def connection_of(session: Session) -> Connection:
    assert isinstance(session.handle, Connection)
    return session.handle
