"""Which struct types arrive as such, and who is told of the others."""

from __future__ import annotations

import logging

import attrs
import pytest
import trio
from rig import filled, open_pair, sender_config

from trio_mori import ConfigError, open_connector
from trio_mori._payload_types import MAX_UNLISTED, PayloadTypes
from trio_mori.testing import MemoryFabric

pytestmark = pytest.mark.deterministic


@attrs.frozen
class Frame:
    number: int


class Plain:
    pass


@pytest.mark.parametrize("listed", [3, int, Plain, "Frame", None], ids=repr)
async def test_what_is_no_type_of_a_structure_is_refused_when_the_connector_is_opened(listed: object) -> None:
    async with MemoryFabric().open(pool_size=1 << 20) as engine:
        with pytest.raises(ConfigError, match="payload_types lists"):
            async with open_connector(sender_config(), engine=engine, payload_types=[listed]):  # type: ignore[list-item]
                pass


async def test_a_type_that_is_not_listed_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "trio_mori.receiver")
    async with open_pair() as pair:
        for number in range(3):
            await pair.put("k", [Frame(number)])
            arrival = await pair.receiver.take("0", "1", "k")
            assert await trio.to_thread.run_sync(arrival.restore) == [{"number": number}]
            assert arrival.unlisted_types == ("test_payload_types:Frame",)
            arrival.finish()
    told = [r.getMessage() for r in caplog.records if "payload_types" in r.getMessage()]
    assert told == [
        "a payload holds a test_payload_types:Frame, which payload_types does not list: it arrives without its class"
    ]


async def test_a_lone_tensor_holds_no_types() -> None:
    async with open_pair() as pair:
        await pair.put("k", filled(10))
        arrival = await pair.receiver.take("0", "1", "k")
        arrival.restore()
        assert arrival.unlisted_types == ()
        arrival.finish()


def test_a_sender_cannot_fill_the_memory_with_names_of_types(monkeypatch: pytest.MonkeyPatch) -> None:
    from trio_mori import _payload_types
    from trio_mori._payload import Restored

    names = iter(range(2 * MAX_UNLISTED))
    monkeypatch.setattr(_payload_types, "restore", lambda *_, **__: Restored(None, (f"m:T{next(names)}",)))
    types = PayloadTypes(())
    for _ in range(2 * MAX_UNLISTED):
        types.restore(b"", filled(1))
    assert len(types.unlisted) == MAX_UNLISTED
