"""Instances of one configuration, and how connectors and their loop end."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import trio_mori_vllm_omni._home as home_module
from ports import free_port
from sync_pair import LIMIT, POOL, eventually, held_loop, is_told, made, make, open_pair, poll
from sync_pair import _leaves_nothing_in_the_loop as _leaves_nothing_in_the_loop
from trio_mori_vllm_omni._place import find_place

from trio_mori import BindFailed, ConnectorClosed, PortHeld, TrioMoriError, blocking

deterministic = pytest.mark.deterministic


@deterministic
def test_two_instances_of_one_configuration_share_memory_and_port() -> None:
    with open_pair() as (up, down):
        again = make(dict(up.config))
        try:
            assert again.get_connection_info() == up.get_connection_info()
            assert again.put("0", "1", "k", {"n": 1})[0]
            up.close()
            assert again.put("0", "1", "l", {"n": 2})[0]
            assert poll(down, "k")[0] == {"n": 1}
            assert poll(down, "l")[0] == {"n": 2}
        finally:
            again.close()
        assert again.health()["status"] == "unhealthy"


@deterministic
def test_a_connector_that_was_closed_says_so_and_can_be_made_again() -> None:
    with open_pair() as (up, _):
        port = up.get_connection_info()["zmq_port"]
        up.close()
        up.close()
        for call in (
            lambda: up.put("0", "1", "k", b"x"),
            lambda: up.get("0", "1", "k", {"source_host": "127.0.0.1", "source_port": port}),
            lambda: up.cleanup("k"),
            lambda: up.abandon_get("k"),
            up.get_connection_info,
        ):
            with pytest.raises(ConnectorClosed, match="stage 0 was closed"):
                call()
        up.forget_request("k")
        with made(role="sender", stage_id=0, zmq_port=port, backend_type="shm") as fresh:
            assert fresh.put("0", "1", "k", b"x")[0]


@deterministic
def test_closing_ends_the_calls_that_wait_with_a_typed_error() -> None:
    with open_pair() as (_, down):
        errors: list[Exception] = []

        def wait() -> None:
            try:
                down.get_with_deadline("0", "1", "k", deadline=time.monotonic() + LIMIT)
            except TrioMoriError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: down.health()["parked"] > 0, "that it waits")
        begun = time.monotonic()
        down.close()
        thread.join(LIMIT)
        assert time.monotonic() - begun < 2
        assert [type(error) for error in errors] == [ConnectorClosed]


@deterministic
def test_closing_is_quick_when_the_sender_has_never_been_there() -> None:
    with made(
        role="receiver", stage_id=1, from_stage=0, sender_host="127.0.0.1", sender_zmq_port=9, backend_type="shm"
    ) as down:
        assert down.get("0", "1", "k") is None
        begun = time.monotonic()
        down.close()
        assert time.monotonic() - begun < 2


@deterministic
def test_a_connector_that_is_collected_lets_go_without_waiting() -> None:
    with open_pair() as (up, _):
        config = dict(up.config)
        again = make(config)
        with held_loop(up):
            del again
            gc.collect()
        eventually(lambda: up._client is not None and up._client.shared.users == 1, "that it has let go")


@deterministic
def test_a_constructor_that_failed_leaves_nothing_to_close() -> None:
    with made(role="sender", stage_id=0, zmq_port=0, backend_type="shm") as up:
        port = up.get_connection_info()["zmq_port"]
        with pytest.raises(BindFailed, match=f"cannot listen on tcp://127.0.0.1:{port}"):
            make({"role": "sender", "stage_id": 5, "zmq_port": port, "backend_type": "shm"})
        gc.collect()


def test_a_put_gets_the_port_from_an_idle_instance_of_another_process_and_not_from_one_that_put() -> None:
    extra: dict[str, object] = {"role": "sender", "stage_id": 0, "zmq_port": free_port(1), "backend_type": "shm"}
    config = find_place({"host": "127.0.0.1", "memory_pool_size": POOL, **extra}, resolved=True).config
    with blocking.open_connector(config) as other:  # another trio run is as good as another process
        with made(**extra) as up:
            assert other.health()["port"] == "held"  # making one is no reason to give the port up
            assert up.put("0", "1", "k", b"x")[0]
            assert other.health()["port"] == "passive"
    with blocking.open_connector(config) as other:
        other.put("0", "1", "k", b"x", timeout=LIMIT)
        with made(**extra) as up, pytest.raises(PortHeld):
            up.put("0", "1", "k", b"y")


@deterministic
def test_calls_in_the_loop_s_own_thread_are_refused_and_close_does_not_wait() -> None:
    with open_pair() as (up, _):
        outcome: list[object] = []
        done = threading.Event()

        def call() -> None:
            try:
                up.put("0", "1", "k", b"x")
            except TrioMoriError as error:
                outcome.append(error)
            up.close()
            done.set()

        up._home.portal.post(call)
        assert done.wait(LIMIT)
        assert "own thread" in str(outcome[0])
        eventually(lambda: up.health()["status"] == "unhealthy", "that it is closed")


@deterministic
def test_the_loop_s_death_is_the_cause_of_every_later_error_and_a_new_connector_gets_a_new_loop() -> None:
    with open_pair() as (up, down):
        assert down.get("0", "1", "k") is None

        async def fail() -> None:
            raise RuntimeError("planted")

        up._home.post(lambda: up._home._nursery.start_soon(fail))  # type: ignore[union-attr]
        begun = time.monotonic()
        for call in (
            lambda: up.put("0", "1", "k", b"x"),
            lambda: down.get("0", "1", "k"),
            lambda: down.get_with_deadline("0", "1", "k", deadline=begun + LIMIT),
            lambda: up.cleanup("k"),
        ):
            eventually(lambda call=call: is_told(call, "died of RuntimeError: planted"), "the error")  # type: ignore[misc]
        for connector in (up, down):
            assert connector.health()["status"] == "unhealthy"
            connector.close()
        assert time.monotonic() - begun < 2
    with open_pair() as (up, down):
        up.put("0", "1", "k", {"n": 1})
        assert poll(down, "k")[0] == {"n": 1}


def test_a_failure_of_the_core_connector_is_the_cause_of_every_later_error_and_spares_the_others() -> None:
    with open_pair() as (up, down):
        assert down.get("0", "1", "k") is None
        assert down._client is not None
        shared = down._client.shared

        async def fail() -> None:
            raise RuntimeError("planted")

        core = down._home.portal.call(shared.core, "receiver")
        down._home.post(lambda: core._receiver.nursery.start_soon(fail))

        eventually(lambda: is_told(lambda: down.get("0", "1", "k"), "planted"), "that the poller is told")
        with pytest.raises(ConnectorClosed, match=r"stage 1 has failed.*planted"):
            down.get_with_deadline("0", "1", "k", deadline=time.monotonic() + LIMIT)
        assert up.put("0", "1", "k", b"x")[0]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # from 3.12 on
def test_a_forked_child_is_refused_and_leaves_its_parent_alone() -> None:
    with open_pair() as (up, down):
        child = os.fork()
        if not child:
            code = 1
            try:
                up.put("0", "1", "k", b"x")
            except TrioMoriError as error:
                code = 0 if "fork" in str(error) else 2
            up.close()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        up.put("0", "1", "k", {"n": 1})
        assert poll(down, "k")[0] == {"n": 1}


@deterministic
def test_closed_connectors_leave_nothing_in_the_loop() -> None:
    home = home_module.home_of_this_process()

    async def tasks() -> int:
        assert home._nursery is not None
        return len(home._nursery.child_tasks)

    assert home.portal.call(tasks) == 0
    for _ in range(3):
        with open_pair() as (up, down):
            assert down.get("0", "1", "k") is None
            up.put("0", "1", "l", b"x")
    eventually(lambda: home.portal.call(tasks) == 0, "that no task is left")
    assert not home._shared


@deterministic
def test_one_thread_serves_all_connectors_of_the_process() -> None:
    with open_pair() as (up, down):
        assert up._home is down._home is home_module.home_of_this_process()
        assert up._home.portal.call(_thread_id) == down._home.portal.call(_thread_id)


async def _thread_id() -> int:
    return threading.get_ident()
