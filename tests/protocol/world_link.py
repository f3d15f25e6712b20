"""What lies between a receiver and a sender."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trio_mori._protocol import wire
from trio_mori._protocol.entries import Session

if TYPE_CHECKING:
    from world_receiver import Receiver
    from world_sender import Sender


@attrs.define(eq=False)
class Connection:
    """One link between two processes, for one generation. What is queued in it may still arrive after its end."""

    receiver: Receiver
    sender: Sender
    up: list[list[bytes]] = attrs.field(factory=list)
    down: list[list[bytes]] = attrs.field(factory=list)
    open: bool = True

    def deliver(self, way: str, frames: list[bytes]) -> None:
        if way == "up" and self.sender.running:
            self.sender.receive(self, frames)
        elif way == "down" and self.receiver.running:
            self.receiver.receive(frames)


DEPLOYMENT = wire.Deployment("model", 0, 0, 0, "")


def connection_of(session: Session) -> Connection:
    assert isinstance(session.handle, Connection)
    return session.handle
