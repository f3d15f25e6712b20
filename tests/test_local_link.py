"""How a receiver goes over to the unix link, and back."""

from __future__ import annotations

import pytest
import trio
from rig import FAST, SOON, filled, open_pair, wait_until

from trio_mori import Connector, PeerLost
from trio_mori._unix import UnixListener
from trio_mori._upstream import Upstream


def upstream_of(receiver: Connector) -> Upstream:
    (upstream,) = receiver._receiver.upstreams.values()
    return upstream


def is_local(receiver: Connector) -> bool:
    return any(u._links.local is not None and u.channel.up for u in receiver._receiver.upstreams.values())


async def test_peers_of_one_host_go_over_to_the_unix_link() -> None:
    async with open_pair() as pair:
        await pair.put("k", filled(100))
        await pair.get("k")
        await wait_until(lambda: is_local(pair.receiver))
        await pair.put("l", filled(100))
        await pair.get("l")
        await pair.assert_whole()


async def test_a_receiver_that_does_not_want_it_stays_on_its_remote_link() -> None:
    async with open_pair(receiver={"same_host_link": "off"}) as pair:
        for number in range(3):
            await pair.put(f"k{number}", filled(100))
            await pair.get(f"k{number}")
        assert upstream_of(pair.receiver)._links.local is None
        await pair.assert_whole()


async def test_a_sender_without_one_offers_none() -> None:
    async with open_pair(sender={"same_host_link": "off"}) as pair:
        await pair.put("k", filled(100))
        await pair.get("k")
        assert upstream_of(pair.receiver)._links.local is None


async def test_gets_that_wait_survive_the_way_there_and_back() -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(pair.get, f"k{number}")
        await wait_until(lambda: is_local(pair.receiver))
        for number in range(10):
            await pair.put(f"k{number}", filled(100))
        assert pair.sender._sender is not None
        (session,) = pair.sender._sender.book.sessions.values()
        local = session.handle.link  # type: ignore[attr-defined]
        assert isinstance(local, UnixListener)
        # As if the kernel had dropped the connection: nothing of it is said at either end before.
        transport = local._transport
        (connection,) = transport._connections.values()  # type: ignore[union-attr]
        connection.socket.shutdown(2)
        await wait_until(
            lambda: upstream_of(pair.receiver)._links.local is None and upstream_of(pair.receiver).channel.up
        )
        for number in range(10, 20):
            await pair.put(f"k{number}", filled(100))


async def test_a_silent_sender_is_lost_for_each_get_also_where_only_this_link_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_pair(receiver=FAST) as pair:
        await pair.assert_whole()
        await wait_until(lambda: is_local(pair.receiver))
        assert pair.sender._sender is not None
        upstream_of(pair.receiver)._links.remote = None
        monkeypatch.setattr(pair.sender._sender.reception, "_on_arrival", lambda *_: None)
        for _ in range(2):
            with pytest.raises(PeerLost), trio.fail_after(SOON):
                await pair.get("k")
