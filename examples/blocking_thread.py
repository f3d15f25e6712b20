"""Code without an event loop: the blocking facade, used from plain threads.

python examples/blocking_thread.py
"""

from __future__ import annotations

import threading

import torch

from trio_mori import ConnectorConfig, blocking

POOL = 16 * 1024 * 1024


def produce(conn: blocking.BlockingConnector) -> None:
    """Any thread may call a blocking connector; every call that can wait takes a time limit."""
    for step in range(3):
        conn.put("0", "1", f"step-{step}", torch.full((1000,), step), timeout=10)
    with conn.open_chunk_sender("request", to_stage="1", timeout=10) as out:
        for number in range(5):
            out.send(torch.full((25, 16), number))


def main() -> None:
    sender_config = ConnectorConfig(role="sender", host="127.0.0.1", zmq_port=0, stage_id=0, memory_pool_size=POOL)
    with blocking.open_connector(sender_config) as sender:
        receiver_config = ConnectorConfig(
            role="receiver",
            sender_host="127.0.0.1",
            sender_zmq_port=sender.get_connection_info()["zmq_port"],
            stage_id=1,
            memory_pool_size=POOL,
        )
        with blocking.open_connector(receiver_config) as receiver:
            producer = threading.Thread(target=produce, args=(sender,))
            producer.start()
            for step in range(3):
                tensor = receiver.get("0", "1", f"step-{step}", timeout=10)
                assert isinstance(tensor, torch.Tensor)
                print(f"got step-{step}, {len(tensor)} values, all {tensor[0].item()}")
            with receiver.open_chunk_receiver("request", from_stage="0", timeout=10) as chunks:
                print(f"got {len(list(chunks))} chunks")
            producer.join()
            try:
                receiver.get("0", "1", "nobody puts this", timeout=0.1)
            except TimeoutError as error:
                print(f"gave up: {error}")


if __name__ == "__main__":
    main()
