"""An interrupt in a blocking call leaves nothing taken, and nothing claimed."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from blocking_pair import SIZES, Both, both
from blocking_pair import open_both as open_both
from rig import filled
from threads import Other

from trio_mori import NotReady
from trio_mori._arrival import Arrival
from trio_mori._portal_calls import Call
from trio_mori._staging import Reservation
from trio_mori.blocking import COPY_IN_LOOP


def test_an_interrupt_as_a_call_is_answered_keeps_nothing_while_its_traceback_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = Call.wait

    def interrupted(call: Call[object]) -> None:
        wait(call)
        raise KeyboardInterrupt

    large = filled(COPY_IN_LOOP + 1)
    with both(pool=4 * COPY_IN_LOOP) as pair:
        pair.put("k", "here")
        with monkeypatch.context() as patch:
            patch.setattr(Call, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt) as first:
                pair.get("k")
            with pytest.raises(KeyboardInterrupt) as second:
                pair.put("large", large)
        assert pair.get("k") == "here"
        assert first.value.__traceback__ is not second.value.__traceback__ is not None
        pair.assert_whole()


def test_an_interrupted_get_takes_nothing(pair: Both) -> None:
    def press() -> None:
        pair.wait_until(pair.pair.parked)
        os.kill(os.getpid(), signal.SIGINT)

    presser = Other(press)
    with pytest.raises(KeyboardInterrupt):
        pair.get("k", timeout=None)
    presser.wait()
    pair.put("k", "still there")
    assert pair.get("k") == "still there"


@pytest.mark.parametrize("size", SIZES)
def test_what_came_for_a_thread_that_was_interrupted_stays_with_the_sender(
    pair: Both, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    pair.put("k", filled(size))
    with monkeypatch.context() as patch:
        patch.setattr(Arrival, "restore", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.get("k")
    assert torch.equal(pair.get("k"), filled(size))  # type: ignore[arg-type]


def test_what_was_claimed_for_a_put_that_was_interrupted_is_free_again(
    pair: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Reservation, "fill", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.put("k", filled(SIZES[1]))
    with pytest.raises(NotReady):
        pair.receiver.get_nowait("0", "1", "k")
    pair.receiver.cleanup("k")


def interrupt(_: object) -> None:
    """As if Ctrl-C were pressed here."""
    raise KeyboardInterrupt
