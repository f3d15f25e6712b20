"""ZMQ links: the addresses, ports and names that they listen on and dial."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable

import pytest
import trio
import trio.testing
import zmq
from ports import free_port
from zmq_links import V4, V6, Inbox, Peer, bounded, needs_ipv6, plain_socket, run_script

from trio_mori import _zmq_listener
from trio_mori._errors import BindFailed
from trio_mori._zmq_dialler import open_dialler
from trio_mori._zmq_listener import open_listener
from trio_mori.abc import Connected

# --- addresses and ports --------------------------------------------------------------------------------------


@bounded
async def test_port_0_becomes_a_port_that_can_be_dialled() -> None:
    async with open_listener([V4], 0) as listener:
        assert listener.address == f"tcp://{V4}:{listener.port}"
        async with open_dialler(V4, listener.port) as dialler:
            assert dialler.address == listener.address
            assert await dialler.receive() == [Connected()]


@needs_ipv6
@bounded
async def test_one_port_on_addresses_of_both_families() -> None:
    async with open_listener([V4, V6], 0) as listener:
        assert listener.address == f"tcp://{V4}:{listener.port},tcp://[{V6}]:{listener.port}"
        inbox = Inbox(listener)
        for address in (V4, V6):
            async with open_dialler(address, listener.port) as dialler:
                assert await dialler.receive() == [Connected()]
                dialler.send([address.encode()])
                assert (await inbox.message()).frames == [address.encode()]


@bounded
async def test_an_address_given_twice_is_bound_once() -> None:
    async with open_listener([V4, V4], 0) as listener:
        assert listener.address == f"tcp://{V4}:{listener.port}"


@bounded
async def test_an_ephemeral_port_taken_on_the_second_address_is_given_up_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bind = _zmq_listener._bind
    thieves: list[socket.socket] = []

    def bind_late(zmq_socket: Peer, address: str, port: int) -> str:
        if address == "127.0.0.2" and len(thieves) < 3:
            thieves.append(socket.create_server((address, port)))
        return bind(zmq_socket, address, port)

    monkeypatch.setattr(_zmq_listener, "_bind", bind_late)
    async with open_listener([V4, "127.0.0.2"], 0) as listener:
        taken = {thief.getsockname()[1] for thief in thieves}
        assert len(taken) == 3
        assert listener.port not in taken
        assert listener.address == f"tcp://{V4}:{listener.port},tcp://127.0.0.2:{listener.port}"
    for thief in thieves:
        thief.close()


@bounded
async def test_an_ephemeral_port_is_not_looked_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_zmq_listener, "EPHEMERAL_ATTEMPTS", 3)
    with pytest.raises(BindFailed, match="no such address"):
        async with open_listener([V4, "203.0.113.7"], 0):
            pass
    with socket.create_server((V4, 0)) as thief:
        port = thief.getsockname()[1]
        monkeypatch.setattr(_zmq_listener, "_port_of", lambda endpoints: port if endpoints else 0)
        with pytest.raises(BindFailed, match="another socket listens there"):
            async with open_listener(["127.0.0.3", V4], 0):
                pass


@bounded
async def test_the_port_is_free_as_soon_as_the_listener_has_been_left() -> None:
    port = free_port()
    for _ in range(20):
        async with open_listener([V4], port):
            pass
    async with open_listener([V4], port), open_dialler(V4, port) as dialler:
        assert await dialler.receive() == [Connected()]


@bounded
async def test_the_port_is_free_though_peers_are_connected_and_do_not_read() -> None:
    port = free_port()
    async with open_listener([V4], port) as listener:
        with plain_socket(zmq.DEALER, port) as peer:
            peer.send(b"hello")
            route = (await Inbox(listener).message()).route
            for _ in range(100):
                listener.send([b"x" * 100_000], route)
            await trio.lowlevel.checkpoint()
    async with open_listener([V4], port):
        pass


@bounded
async def test_the_port_is_free_when_the_listener_was_cancelled() -> None:
    port = free_port()
    with trio.CancelScope() as scope:
        async with open_listener([V4], port):
            scope.cancel()
            await trio.sleep_forever()
    async with open_listener([V4], port):
        pass


@pytest.mark.parametrize("hosts", [[V4], ["127.0.0.2", V4]])
@bounded
async def test_a_port_in_use_says_whose_and_what_to_do(hosts: list[str]) -> None:
    with socket.create_server((V4, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(BindFailed) as caught:
            async with open_listener(hosts, port):
                pass
    error = caught.value
    assert (error.host, error.port, error.errno) == (V4, port, errno.EADDRINUSE)
    assert f"tcp://{V4}:{port}: Address already in use; another socket listens there (`ss -ltnp` names" in str(error)
    assert isinstance(error.__cause__, zmq.ZMQError)
    with socket.create_server(("127.0.0.2", port)):  # nothing of ours is left on the first address
        pass


@bounded
async def test_where_one_address_is_taken_the_port_is_free_on_the_others_as_soon_as_that_is_told() -> None:
    for _ in range(50):
        with socket.create_server((V4, 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(BindFailed):
                async with open_listener(["127.0.0.2", V4], port):
                    pass
            with socket.create_server(("127.0.0.2", port)):
                pass


@bounded
async def test_an_address_of_another_host_says_so() -> None:
    with pytest.raises(BindFailed, match=r"203\.0\.113\.7:50051: .*this host has no such address") as caught:
        async with open_listener(["203.0.113.7"], 50051):
            pass
    assert caught.value.errno == errno.EADDRNOTAVAIL


def test_a_port_that_needs_privileges_says_so() -> None:
    script = f"""
        import encodings.idna, errno, os, trio
        from trio_mori._errors import BindFailed
        from trio_mori._zmq_listener import open_listener

        async def main():
            try:
                async with open_listener(["{V4}"], 81):
                    print("bound")
            except BindFailed as error:
                print(error.errno == errno.EACCES, error)

        if os.geteuid() == 0:
            os.setuid(65534)
        trio.run(main)
        """
    result = run_script(script)
    if result == "bound":
        pytest.skip("this host lets everybody listen on port 81")
    assert result.startswith("True ")
    assert result.endswith("set a port from 1024 to 65535, or 0 for any free one")


# --- names ----------------------------------------------------------------------------------------------------


class Resolver(trio.abc.HostnameResolver):
    """Knows names only after it was asked `failures` times."""

    def __init__(self, failures: int, addresses: list[str]) -> None:
        self.failures = failures
        self.addresses = addresses

    async def getaddrinfo(  # type: ignore[override]
        self, host: bytes, port: int, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        await trio.lowlevel.checkpoint()
        if self.failures:
            self.failures -= 1
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in self.addresses]
        return [(family, type, 0, "", (address, port)) for family, address in zip(families, self.addresses)]  # noqa: B905

    async def getnameinfo(self, sockaddr: object, flags: int) -> tuple[str, str]:
        raise NotImplementedError


@pytest.fixture
def resolver() -> Callable[[int, list[str]], None]:
    def resolve(failures: int, addresses: list[str]) -> None:
        trio.socket.set_custom_hostname_resolver(Resolver(failures, addresses))

    return resolve


@bounded
async def test_a_name_that_does_not_resolve_yet_is_tried_on_and_reported_once(
    resolver: Callable[[int, list[str]], None], caplog: pytest.LogCaptureFixture
) -> None:
    resolver(2, [V6, V4])
    async with open_listener([V4], 0) as listener, open_dialler("stage-0", listener.port) as dialler:
        assert dialler.address == f"tcp://stage-0:{listener.port}"
        assert await dialler.receive() == [Connected()]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"stage-0:{listener.port}" in caplog.text


@bounded
async def test_listening_on_a_name_listens_on_its_address(resolver: Callable[[int, list[str]], None]) -> None:
    resolver(0, [V4])
    async with open_listener(["stage-0"], 0) as listener:
        assert listener.address == f"tcp://{V4}:{listener.port}"


@pytest.mark.parametrize("host", ["stage-0", "x" * 64])
@bounded
async def test_listening_on_a_name_that_does_not_resolve_fails_at_once(
    host: str, resolver: Callable[[int, list[str]], None]
) -> None:
    resolver(1, [V4])
    with pytest.raises(BindFailed, match=f"cannot listen on {host}:50051: .*or 'auto'") as caught:
        async with open_listener([host], 50051):
            pass
    assert caught.value.errno is None
