"""Chunk streams for code without an event loop."""

from __future__ import annotations

import pytest
from blocking_pair import Both, both
from blocking_pair import open_both as open_both
from rig import SOON, UNIT, filled
from threads import Other

from trio_mori import Misuse, StreamFailed


def test_a_stream_is_an_iterator_that_ends(pair: Both) -> None:
    def send() -> int:
        with pair.sender.open_chunk_sender("r", "1", from_stage="0", timeout=SOON) as out:
            for number in range(10):
                out.send(number)
            return out.sent

    other = Other(send)
    with pair.receiver.open_chunk_receiver("r", "0", to_stage="1", timeout=SOON) as chunks:
        assert list(chunks) == list(range(10))
        assert chunks.received == 10
        assert list(chunks) == []
    assert other.wait() == 10


def test_a_chunk_that_does_not_come_in_time_comes_with_the_next_call(pair: Both) -> None:
    with (
        pair.sender.open_chunk_sender("r", "1", from_stage="0") as out,
        pair.receiver.open_chunk_receiver("r", "0", to_stage="1", timeout=SOON) as chunks,
    ):
        chunks._timeout = 0.02
        with pytest.raises(TimeoutError, match=r"chunk 0 of 'r' did not end within 0\.02 s"):
            next(chunks)
        chunks._timeout = SOON
        out.send("a")
        assert next(chunks) == "a"
    pair.sender.cleanup("r")


def test_a_chunk_without_room_in_time_was_not_sent() -> None:
    with both(pool=2 * UNIT) as pair:
        with pair.sender.open_chunk_sender("r", "1", from_stage="0", timeout=SOON) as out:
            out.send(filled(UNIT - 500))
            out._timeout = 0.02
            with pytest.raises(TimeoutError, match=r"chunk 1 of 'r' did not end within 0\.02 s"):
                out.send(filled(UNIT + 500))
            assert out.sent == 1
        with pair.receiver.open_chunk_receiver("r", "0", to_stage="1", timeout=SOON) as chunks:
            assert len(list(chunks)) == 1
        pair.assert_whole()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_stream_that_is_left_by_an_exception_tells_the_receiver(pair: Both, kind: type[BaseException]) -> None:
    with pytest.raises(kind, match="mine"):
        with pair.sender.open_chunk_sender("r", "1", from_stage="0"):
            raise kind("mine")
    with pair.receiver.open_chunk_receiver("r", "0", to_stage="1", timeout=SOON) as chunks:
        with pytest.raises(StreamFailed, match=f"{kind.__name__}: mine"):
            next(chunks)


def test_two_threads_cannot_use_one_end_of_a_stream(pair: Both) -> None:
    with (
        pair.sender.open_chunk_sender("r", "1", from_stage="0") as out,
        pair.receiver.open_chunk_receiver("r", "0", to_stage="1") as chunks,
    ):
        other = Other(next, chunks)
        pair.wait_until(pair.pair.parked)
        with pytest.raises(Misuse, match="two tasks receive chunks of 'r' at once"):
            next(chunks)
        out.send("a")
        assert other.wait() == "a"
    pair.sender.cleanup("r")
