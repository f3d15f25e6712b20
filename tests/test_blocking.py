"""The connector for code without an event loop: put, get, leases, and what it tells."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from blocking_pair import LARGE, SIZES, Both, both
from blocking_pair import open_both as open_both
from rig import SOON, UNIT, Pair, filled
from threads import Other

from trio_mori import ConfigError, KeyBusy, LeaseError, ManagedBuffer, NoRoom, NotReady, TooBig, UnsupportedPayload
from trio_mori._staging import Reservation


@pytest.mark.parametrize("size", SIZES)
def test_what_was_put_is_got_and_belongs_to_the_caller(pair: Both, size: int) -> None:
    data = {"states": filled(size, 3), "last": False}
    receipt = pair.sender.put("0", "1", "k", data)
    data["states"] = filled(size, 9)
    assert receipt.size >= size
    assert receipt.metadata["source_port"] == pair.sender.get_connection_info()["zmq_port"]
    got = pair.get("k")
    assert isinstance(got, dict)
    assert torch.equal(got["states"], filled(size, 3))
    assert got["last"] is False
    pair.portal.call_sync(pair.pair.sender.put_nowait, "0", "1", "l", filled(size, 4))
    pair.get("l")
    assert torch.equal(got["states"], filled(size, 3))  # it aliases no pool


def test_a_receipt_says_where_its_sender_is(pair: Both) -> None:
    receipt = pair.sender.put("0", "1", "k", b"x")
    pair.pair.receiver._source.endpoint = None
    assert pair.receiver.get("0", "1", "k", receipt, timeout=SOON) == b"x"
    with pair.receiver.lease("0", "1", "l", pair.sender.put("0", "1", "l", b"y"), timeout=SOON) as lease:
        assert lease.buffer.to_bytes() == b"y"
    pair.pair.receiver.update_sender_info("127.0.0.1", receipt.endpoint.port)


@pytest.mark.parametrize("size", SIZES)
def test_the_nowait_twins_do_not_wait(pair: Both, size: int) -> None:
    with pytest.raises(NotReady):
        pair.receiver.get_nowait("0", "1", "k")
    pair.sender.put_nowait("0", "1", "k", filled(size))
    pair.wait_until(lambda: pair.pair.receiver.statistics().held.get("arrived"))
    assert torch.equal(pair.receiver.get_nowait("0", "1", "k"), filled(size))  # type: ignore[arg-type]


def test_a_get_that_waits_is_woken_by_the_put_of_another_thread(pair: Both) -> None:
    others = [Other(pair.get, f"k{number}") for number in range(4)]
    pair.wait_until(lambda: pair.pair.parked() == 4)
    for number in range(4):
        pair.put(f"k{number}", number)
    assert [other.wait() for other in others] == [0, 1, 2, 3]


def test_a_get_that_times_out_leaves_the_payload_with_its_sender(pair: Both) -> None:
    with pytest.raises(TimeoutError, match=r"get of 'k' did not end within 0\.02 s"):
        pair.get("k", timeout=0.02)
    pair.put("k", "late")
    assert pair.get("k") == "late"


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_that_leaves_no_time_is_refused(pair: Both, timeout: float) -> None:
    refused: list[Callable[[], object]] = [
        partial(pair.put, "k", b"x", timeout),
        partial(pair.get, "k", timeout),
        partial(pair.receiver.lease, "0", "1", "k", timeout=timeout),
        partial(pair.sender.open_chunk_sender, "r", "1", from_stage="0", timeout=timeout),
        partial(pair.receiver.open_chunk_receiver, "r", "0", to_stage="1", timeout=timeout),
    ]
    for call in refused:
        with pytest.raises(ValueError, match="give a number of seconds above zero"):
            call()


def test_a_put_waits_for_room_and_says_so_when_there_is_none_in_time() -> None:
    with both(pool=4 * UNIT) as pair:
        for key in ("a", "b"):
            pair.put(key, filled(2 * UNIT))
        with pytest.raises(TimeoutError, match="put of 'c' did not end within"):
            pair.put("c", filled(2 * UNIT), timeout=0.02)
        with pytest.raises(NoRoom):
            pair.sender.put_nowait("0", "1", "c", filled(2 * UNIT))
        other = Other(pair.put, "c", filled(2 * UNIT))
        pair.wait_until(lambda: pair.pair.sender.statistics().pool.waiting)
        pair.get("a")
        other.wait()
        for key in ("b", "c"):
            pair.get(key)
        pair.assert_whole()


def test_a_put_that_is_refused_leaves_no_trace(pair: Both) -> None:
    with pytest.raises(UnsupportedPayload, match=r"payload\['x'\]"):
        pair.put("k", {"x": object()})
    with pytest.raises(TooBig):
        pair.put("k", torch.empty(2 * LARGE, dtype=torch.uint8))
    pair.portal.call_sync(pair.pair.sender_engine.hold)
    other = Other(pair.get, "busy")
    pair.put("busy", filled(1000))
    pair.wait_until(lambda: pair.pair.sender_engine.held)
    for size in SIZES:
        with pytest.raises(KeyBusy):
            pair.put("busy", filled(size))
    pair.portal.call_sync(pair.pair.sender_engine.release)
    other.wait()


def test_a_key_that_becomes_busy_during_the_copy_refuses_the_put(pair: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[Other] = []
    fill = Reservation.fill

    def fill_late(reservation: Reservation) -> None:
        if not others:
            pair.portal.call_sync(pair.pair.sender_engine.hold)
            others.append(Other(pair.get, "k"))
            pair.put("k", b"first")
            pair.wait_until(lambda: pair.pair.sender_engine.held)
        fill(reservation)

    monkeypatch.setattr(Reservation, "fill", fill_late)
    with pytest.raises(KeyBusy):
        pair.put("k", filled(SIZES[1]))
    pair.portal.call_sync(pair.pair.sender_engine.release)
    assert others[0].wait() == b"first"


def test_a_buffer_of_the_pool_is_passed_on_without_a_copy() -> None:
    with both(pool=4 * UNIT) as pair:
        held = pair.portal.call_sync(partial(buffer_of, pair.pair, 3 * UNIT))
        pair.put("k", held)  # twice this does not fit
        assert held.released
        assert pair.get("k") is not None


def buffer_of(pair: Pair, size: int) -> ManagedBuffer:
    """Memory of the sender's pool in a caller's hands."""
    pool = pair.sender._pool
    extent = pool.reserve_nowait(size, "outbound")
    return ManagedBuffer(pool, extent, size, partial(pool.extents.free, extent))


def test_a_lease_is_the_memory_it_arrived_in(pair: Both) -> None:
    pair.put("k", torch.arange(1000))
    with pair.receiver.lease("0", "1", "k", timeout=SOON) as lease:
        assert int(lease.as_tensor(torch.int64, (1000,)).sum()) == 499500
        assert pair.receiver.health()["pool"]["leased"]
    with pytest.raises(TimeoutError, match="lease of 'k' did not end within"):
        with pair.receiver.lease("0", "1", "k", timeout=0.02):
            pass


def test_a_tensor_that_outlives_its_lease_is_named(pair: Both) -> None:
    pair.put("k", torch.arange(1000))
    kept: list[torch.Tensor] = []
    with pytest.raises(LeaseError):
        with pair.receiver.lease("0", "1", "k") as lease:
            kept.append(lease.tensor)
    assert kept[0].numel() == 8000
    kept.clear()


def test_cleanup_and_statistics_and_health(pair: Both) -> None:
    pair.put("k", b"1")
    pair.put("l", b"2")
    assert pair.sender.cleanup("k") == 1
    assert pair.sender.cleanup("l", "0", "1") == 1
    with pytest.raises(ValueError, match="both or neither"):
        pair.sender.cleanup("l", "0")
    assert pair.sender.statistics().put["0_1"].payloads == 2
    assert pair.sender.health()["puts"] == 2
    assert pair.sender.get_connection_info()["can_put"]
    port = pair.sender.get_connection_info()["zmq_port"]
    pair.receiver.update_sender_info("127.0.0.1", port)
    with pytest.raises(ConfigError):
        pair.receiver.update_sender_info("127.0.0.1", 0)
