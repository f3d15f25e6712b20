"""A sender on ::1, found in each of the ways in which a receiver learns where it is."""

from __future__ import annotations

import pytest
import torch
from rig import assert_free, filled, open_pair, port_of
from zmq_links import V6, needs_ipv6

from trio_mori import NotReady, open_connector

pytestmark = [pytest.mark.deterministic, needs_ipv6]


@pytest.mark.parametrize("link", ["off", "auto"])
async def test_a_payload_comes_across_over_ipv6_by_configuration_by_metadata_and_by_what_is_said_later(
    link: str,
) -> None:
    here = {"same_host_link": link}
    async with open_pair(sender={"host": V6, **here}, receiver={"sender_host": V6, **here}) as pair:
        port = port_of(pair.sender)
        assert pair.sender.get_connection_info()["host"] == V6
        receipt = await pair.put("configured", filled(1000))
        assert receipt.metadata["source_host"] == V6
        assert torch.equal(await pair.get("configured"), filled(1000))  # type: ignore[arg-type]
        async with (
            pair.fabric.open(pool_size=1 << 18) as engine,
            open_connector({"role": "receiver", **here}, engine=engine) as later,
        ):
            await pair.put("with metadata", filled(1000, 1))
            known = {"source_host": V6, "source_port": port}
            assert torch.equal(await later.get("0", "1", "with metadata", known), filled(1000, 1))
            later.update_sender_info(V6, port)
            await pair.put("told later", filled(1000, 2))
            assert torch.equal(await later.get("0", "1", "told later"), filled(1000, 2))
            with pytest.raises(NotReady):
                later.get_nowait("0", "1", "not put")
            assert await later.cleanup("not put") == 1
            await assert_free(later)
        await pair.assert_whole()
