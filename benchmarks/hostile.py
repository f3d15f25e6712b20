"""What traffic takes beside hostile traffic, each in a process of its own: ``python benchmarks/hostile.py [SECONDS]``.

A sender puts a payload every 20 ms, and a receiver that waits for it takes the time from before the put to after its
get, by the clock that all processes of a machine share. Both use the ZMQ port, which an attacker is let loose on.
Besides what it does to the port it takes processor time; so its figures stand beside those of a process that burns as
much as it can and touches nothing (`busy`). It says little where other programs want the processors, too.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from statistics import median, quantiles
from typing import Any

import trio

from trio_mori import open_connector

COMMON = {"memory_pool_size": 4 << 20, "same_host_link": "off"}
PAUSE = 0.02

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
HTTP = b"GET / HTTP/1.1\r\nHost: stage\r\n\r\n"


async def send() -> None:
    async with open_connector({"role": "sender", "host": "127.0.0.1", "zmq_port": 0, **COMMON}) as conn:
        print(conn.get_connection_info()["zmq_port"], flush=True)
        while not conn.statistics().peers:  # noqa: ASYNC110 - nothing is to wait for a receiver that is to come
            await trio.sleep(PAUSE)
        number = 0
        while True:
            await conn.put("0", "1", str(number), time.perf_counter().hex().encode())
            number += 1
            await trio.sleep(PAUSE)


async def receive(port: int, seconds: float) -> None:
    taken: list[float] = []
    config = {"role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": port, **COMMON}
    async with open_connector(config) as conn:
        number, end = 0, time.perf_counter() + 1 + seconds
        while (now := time.perf_counter()) < end:
            value: Any = await conn.get("0", "1", str(number))
            if now > end - seconds:  # the first second is for what has waited
                taken.append(time.perf_counter() - float.fromhex(bytes(value).decode()))
            number += 1
    print(1e3 * median(taken), 1e3 * quantiles(taken, n=20)[-1], len(taken))


def connect(port: int) -> socket.socket:
    """A connection whose handshake is over."""
    link = socket.create_connection(("127.0.0.1", port))
    link.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
    heard = b""
    while b"Identity" not in heard:
        heard += link.recv(4096)
    return link


def attack(kind: str, port: int) -> None:
    while True:
        try:
            if kind == "busy":
                sum(range(10000))
            elif kind == "malformed":  # messages that are none
                link = connect(port)
                while True:
                    link.sendall(b"\x01\x00\x00\x04junk" * 100)
                    link.recv(65536)
            elif kind == "endless":  # a message without an end, of empty parts
                link = connect(port)
                while True:
                    link.sendall(b"\x01\x00" * 32768)
            elif kind == "oversized":  # a part larger than any may be
                connect(port).sendall(b"\x02" + (1 << 40).to_bytes(8, "big") + bytes(1000))
            elif kind == "identities":  # connections that come and go
                connect(port).sendall(b"\x01\x00\x00\x04junk")
            elif kind == "http":
                socket.create_connection(("127.0.0.1", port)).sendall(HTTP)
            else:  # slow: a byte now and then on each of many
                links = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
                for byte in GREETING:
                    for link in links:
                        link.sendall(bytes([byte]))
                    time.sleep(0.1)
        except OSError:  # hung up on, as it should be
            continue


def measure(kind: str, seconds: float) -> list[float]:
    """Milliseconds that a payload takes, median and 95 of 100."""
    me = [sys.executable, __file__]
    sender = subprocess.Popen([*me, "send"], stdout=subprocess.PIPE, text=True)
    assert sender.stdout is not None
    port = sender.stdout.readline().strip()
    attacker = subprocess.Popen([*me, kind, port]) if kind != "nothing" else None
    try:
        out = subprocess.run([*me, "receive", port, str(seconds)], stdout=subprocess.PIPE, text=True, check=True).stdout
    finally:
        for process in filter(None, (sender, attacker)):
            process.kill()
            process.wait()
    return [float(word) for word in out.split()]


def main(seconds: float) -> None:
    busy = None
    for kind in ("nothing", "busy", "malformed", "endless", "oversized", "identities", "http", "slow"):
        middle, late, count = measure(kind, seconds)
        busy = middle if kind == "busy" else busy
        beside = f", {middle / busy:.2f} of busy" if busy else ""
        print(f"{kind:10} {middle:7.2f} ms, 95%: {late:7.2f} ms, {count:.0f} payloads{beside}", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["send"]:
            trio.run(send)
        case ["receive", port, seconds]:
            trio.run(receive, int(port), float(seconds))
        case [kind, port]:
            attack(kind, int(port))
        case rest:
            main(float(rest[0]) if rest else 10)
