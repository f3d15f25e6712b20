"""Turns of peers whose put and get are plain calls."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable
from typing import Any

from ..half import GIVE_UP, PAUSE, Half, Ready, pace
from ..payload import Payload, check
from ..turn import Turn


class BlockingHalf(Half):
    """A peer in terms of `put`, `poll` and `wait`. A turn's streams are polled in one thread, one after the other."""

    @abc.abstractmethod
    def put(self, key: str, value: Any) -> None:
        """Hand it over; afterwards the source may be overwritten. Raises if it was refused."""

    @abc.abstractmethod
    def poll(self, key: str) -> Any:
        """The payload, or None."""

    def wait(self, key: str) -> Any:
        """The payload, when it comes. As it stands a tight loop, for peers that can only be polled."""
        until = time.monotonic() + GIVE_UP
        while (value := self.poll(key)) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"{key} did not come within {GIVE_UP} s")
        return value

    def release(self, value: Any) -> None:
        """Give a payload's memory back, where the peer wants that."""

    def turn(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        doing = {
            ("streams", "send"): self._send_streams,
            ("streams", "receive"): self._receive_streams,
            ("present", "send"): self._put_all,
            ("present", "receive"): self._get_all,
        }[turn.scenario, self.role]
        return doing(turn, ready)

    def _send_streams(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        payload = Payload(turn)
        starts = [[0] * turn.chunks for _ in range(turn.streams)]
        begin = time.monotonic()
        for chunk in range(turn.chunks):
            if (left := pace(begin, turn, chunk + 1)) > 0:
                time.sleep(left)
            for stream in range(turn.streams):
                payload.mark(turn.number(stream, chunk))
                starts[stream][chunk] = time.monotonic_ns()
                self.put(turn.key(stream, chunk), payload.value)
        return {"starts": starts}

    def _receive_streams(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        ends = [[0] * turn.chunks for _ in range(turn.streams)]
        ready()
        if turn.streams == 1:
            for chunk in range(turn.chunks):
                value = self.wait(turn.key(0, chunk))
                ends[0][chunk] = time.monotonic_ns()
                self._accept(value, turn, 0, chunk)
            return {"ends": ends}
        waiting = dict.fromkeys(range(turn.streams), 0)
        until = time.monotonic() + GIVE_UP
        while waiting:
            for stream, chunk in list(waiting.items()):
                value = self.poll(turn.key(stream, chunk))
                if value is None:
                    continue
                ends[stream][chunk] = time.monotonic_ns()
                self._accept(value, turn, stream, chunk)
                waiting[stream] += 1
                if waiting[stream] == turn.chunks:
                    del waiting[stream]
            if time.monotonic() > until:
                raise TimeoutError(f"{len(waiting)} of {turn.streams} streams did not end within {GIVE_UP} s")
        return {"ends": ends}

    def _accept(self, value: Any, turn: Turn, stream: int, chunk: int) -> None:
        check(value, turn, turn.number(stream, chunk))
        self.release(value)

    def _put_all(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        def put(stream: int, payload: Payload, took: list[float]) -> None:
            for chunk in range(turn.chunks):
                payload.mark(turn.number(stream, chunk))
                if turn.streams == 1:
                    time.sleep(PAUSE)
                begin = time.monotonic_ns()
                self.put(turn.key(stream, chunk), payload.value)
                took.append((time.monotonic_ns() - begin) / 1000)

        payloads = [Payload(turn) for _ in range(turn.streams)]
        took, wall = in_threads(turn.streams, lambda stream, took: put(stream, payloads[stream], took))
        return {"puts": took, "put_wall_us": wall}

    def _get_all(self, turn: Turn, ready: Ready) -> dict[str, Any]:
        def get(stream: int, took: list[float]) -> None:
            for chunk in range(turn.chunks):
                if turn.streams == 1:
                    time.sleep(PAUSE)
                begin = time.monotonic_ns()
                value = self.wait(turn.key(stream, chunk))
                took.append((time.monotonic_ns() - begin) / 1000)
                self._accept(value, turn, stream, chunk)

        took, wall = in_threads(turn.streams, get)
        return {"gets": took, "get_wall_us": wall}


def in_threads(count: int, run: Callable[[int, list[float]], None]) -> tuple[list[float], float]:
    """Run it in so many threads; what they measured, and the microseconds that all of them took together."""
    took: list[list[float]] = [[] for _ in range(count)]
    errors: list[BaseException] = []
    gate = threading.Barrier(count + 1)

    def work(number: int) -> None:
        gate.wait()
        try:
            run(number, took[number])
        except BaseException as error:  # noqa: BLE001 - carried over to the caller's thread
            errors.append(error)

    if count == 1:
        begin = time.monotonic_ns()
        run(0, took[0])
        return took[0], (time.monotonic_ns() - begin) / 1000
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    gate.wait()
    begin = time.monotonic_ns()
    for thread in threads:
        thread.join()
    wall = (time.monotonic_ns() - begin) / 1000
    if errors:
        raise errors[0]
    return [each for one in took for each in one], wall
