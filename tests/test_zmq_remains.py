"""ZMQ links leave nothing behind: no descriptor, no thread that keeps the interpreter, nothing in a forked child."""

from __future__ import annotations

import os
import textwrap

import pytest
import trio
import trio.testing
from zmq_links import V4, bounded, connected_pair, run_script

from trio_mori._zmq_dialler import open_dialler
from trio_mori._zmq_listener import open_listener


@bounded
async def test_links_leave_no_descriptor_open() -> None:
    async def use() -> None:
        async with connected_pair() as (dialler, listener):
            dialler.send([b"x"])
            await listener.receive()

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    await use()
    before = descriptors()
    for _ in range(20):
        await use()
    while descriptors() > before:  # noqa: ASYNC110 - libzmq closes them in its own thread
        await trio.sleep(0.01)


@bounded
async def test_opening_in_a_cancelled_scope_leaves_nothing() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        async with open_listener([V4], 0):
            pass
    with trio.CancelScope() as scope:
        scope.cancel()
        async with open_dialler(V4, 1):
            pass


LINKS = f"""
    import os, sys, threading, trio
    from trio_mori._zmq_dialler import open_dialler
    from trio_mori._zmq_listener import open_listener

    async def echo():
        async with open_listener(["{V4}"], 0) as listener, open_dialler("{V4}", listener.port) as dialler:
            await dialler.receive()
            dialler.send([b"hello"])
            [message] = await listener.receive()
            listener.send(message.frames, message.route)
            [message] = await dialler.receive()
            return message.frames[0].decode()
    """


def test_an_interpreter_exits_while_another_thread_has_links_open() -> None:
    script = """
    opened = threading.Event()

    async def stay():
        async with open_listener(["127.0.0.1"], 0) as listener, open_dialler("127.0.0.1", listener.port) as dialler:
            await dialler.receive()
            dialler.send([b"x" * 1000000])
            opened.set()
            await trio.sleep_forever()

    threading.Thread(target=trio.run, args=(stay,), daemon=True).start()
    opened.wait()
    print("exits")
    """
    assert run_script(textwrap.dedent(LINKS) + textwrap.dedent(script)) == "exits"


def test_an_interpreter_exits_from_within_a_link() -> None:
    script = """
    async def leave():
        async with open_listener(["127.0.0.1"], 0) as listener, open_dialler("127.0.0.1", listener.port) as dialler:
            await dialler.receive()
            print("exits", flush=True)
            sys.exit()

    trio.run(leave)
    """
    assert run_script(textwrap.dedent(LINKS) + textwrap.dedent(script)) == "exits"


@pytest.mark.parametrize("secured", [False, True])
def test_a_forked_child_has_links_of_its_own_and_leaves_the_parents_alone(secured: bool) -> None:
    script = f"""
    from trio_mori._keys import Keys
    from trio_mori._zmq_socket import new_key_pair

    public, secret = new_key_pair()
    keys = Keys(public=public, secret=secret, sender=public, allowed={{public: "own"}}) if {secured} else None

    async def main():
        async with (
            open_listener(["127.0.0.1"], 0, keys=keys) as listener,
            open_dialler("127.0.0.1", listener.port, keys=keys) as dialler,
        ):
            await dialler.receive()
            child = os.fork()
            if child == 0:
                os._exit(20 if run_child() == "hello" else 21)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            dialler.send([b"still there"])
            [message] = await listener.receive()
            print(message.frames[0].decode())

    def run_child():
        result = []
        thread = threading.Thread(target=lambda: result.append(trio.run(echo)))
        thread.start()
        thread.join()
        return result[0]

    trio.run(main)
    """
    assert run_script(textwrap.dedent(LINKS) + textwrap.dedent(script)).split("\n") == ["20", "still there"]
