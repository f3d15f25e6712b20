"""A way from one thread into another that costs one waking for whatever was put in meanwhile. No lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

Command = Callable[[], None]


class Mailbox:
    """Commands for the loop. `put` and `flush` are one thread's, `carry_out` the loop's.

    *Why nothing is left lying.* A command is put in before the flag is looked at, and the flag is cleared before the
    commands are taken out. So whoever finds it set knows that the loop will still look; and each of both is one step
    for Python.
    """

    def __init__(self, post: Callable[[Command], None]) -> None:
        """Store how the loop is woken; that may raise if there is none any more, and `flush` then raises it."""
        self._post = post
        self._commands: deque[Command] = deque()
        self._is_posted = False

    def put(self, command: Command) -> None:
        """For the next time."""
        self._commands.append(command)

    def flush(self) -> None:
        """Wake the loop, if there is something for it and it was not woken."""
        if self._commands and not self._is_posted:
            self._is_posted = True
            self._post(self.carry_out)

    def carry_out(self) -> None:
        """Everything that was put in, in order. In the loop."""
        self._is_posted = False
        with suppress(IndexError):
            while True:
                command = self._commands.popleft()
                command()
