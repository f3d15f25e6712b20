"""Chunk streams: many chunks of one request, in order, with an end; and several requests at the same time.

python examples/chunk_streams.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import trio

import trio_mori
from trio_mori import Connector, ConnectorConfig

POOL = 16 * 1024 * 1024
REQUESTS = {"first": 5, "second": 8, "third": 3}  # how many chunks each has


class Chunk(NamedTuple):
    """What travels; the receiver names this type, or would be given a dict."""

    number: int
    codes: torch.Tensor


async def speak(conn: Connector, request: str, chunks: int) -> None:
    """Send chunks. A full pool makes `send` wait; leaving the block says that the stream is over."""
    async with conn.open_chunk_sender(request, to_stage="1") as out:
        for number in range(chunks):
            await out.send(Chunk(number, torch.full((25, 16), number)))


async def listen(conn: Connector, request: str) -> None:
    """Receive until the sender has left its block. Abandoning the loop early is fine, too."""
    frames = 0
    async with conn.open_chunk_receiver(request, from_stage="0") as chunks:
        async for chunk in chunks:
            assert isinstance(chunk, Chunk)
            assert bool((chunk.codes == chunk.number).all())
            frames += len(chunk.codes)
    print(f"{request}: {frames} frames")


async def main() -> None:
    sender_config = ConnectorConfig(role="sender", host="127.0.0.1", zmq_port=0, stage_id=0, memory_pool_size=POOL)
    async with trio_mori.open_connector(sender_config) as sender:
        receiver_config = ConnectorConfig(
            role="receiver",
            sender_host="127.0.0.1",
            sender_zmq_port=sender.get_connection_info()["zmq_port"],
            stage_id=1,
            memory_pool_size=POOL,
        )
        async with (
            trio_mori.open_connector(receiver_config, payload_types=[Chunk]) as receiver,
            trio.open_nursery() as nursery,
        ):
            for request, chunks in REQUESTS.items():
                nursery.start_soon(speak, sender, request, chunks)
                nursery.start_soon(listen, receiver, request)


if __name__ == "__main__":
    # Ctrl-C arrives where main waits, and not in the middle of trio's bookkeeping.
    trio.run(main, restrict_keyboard_interrupt_to_checkpoints=True)
