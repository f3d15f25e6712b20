"""Keys and addresses that cannot be, from the caller or from metadata: refused by name, and nothing else is hurt."""

from __future__ import annotations

import pytest
import trio
from rig import filled, open_pair

from trio_mori import ConfigError, KeyRefused

pytestmark = pytest.mark.deterministic


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("x" * 1021, "has 1025 characters with its edge; at most 1024"),
        ("\ud800", "has no form in UTF-8"),
        (None, "have to be strings"),
        (5, "have to be strings"),
    ],
    ids=["long", "surrogate", "None", "int"],
)
async def test_a_key_that_no_peer_would_accept_is_refused_at_both_ends(key: object, said: str) -> None:
    async with open_pair() as pair:
        with pytest.raises(KeyRefused, match=said):
            await pair.sender.put("0", "1", key, filled(10))  # type: ignore[arg-type]
        for get in (pair.receiver.get_nowait, pair.receiver.take_nowait):
            with pytest.raises(KeyRefused, match=said):
                get("0", "1", key)  # type: ignore[arg-type]
        with pytest.raises(KeyRefused, match=said):
            await pair.receiver.get("0", "1", key)  # type: ignore[arg-type]
        await pair.assert_whole()


async def test_the_longest_key_comes_across() -> None:
    async with open_pair() as pair:
        key = "ß" * 1020
        await pair.put(key, filled(10))
        assert (await pair.get(key)).sum() == 70  # type: ignore[attr-defined]
        await pair.assert_whole()


@pytest.mark.parametrize(
    ("host", "port"),
    [("..", 5000), ("x" * 300, 5000), ("\ud800", 5000), ("a b", 5000), ("tcp://a", 5000), (["a"], 5000), ("", 5000)]
    + [("127.0.0.1", port) for port in (True, 0, 65536, "5000", None, 5.0)],
    ids=repr,
)
async def test_metadata_that_names_no_possible_sender_are_refused_and_hurt_nobody(host: object, port: object) -> None:
    async with open_pair() as pair:
        with pytest.raises(ConfigError, match="metadata names the sender"):
            await pair.receiver.get("0", "1", "k", {"source_host": host, "source_port": port})
        await pair.assert_whole()


async def test_a_host_that_cannot_be_dialled_is_tried_on_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with open_pair() as pair:
        with trio.move_on_after(0.1):
            await pair.receiver.get("0", "1", "k", {"source_host": "fe80::1%nosuch", "source_port": 5000})
        assert "cannot dial tcp://[fe80::1%nosuch]:5000" in caplog.text
        await pair.assert_whole()
