"""Fuzzed: what says where memory is, who has it, and which keys count."""

from __future__ import annotations

import array
import functools
import os
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import trio

sys.path.insert(0, str(Path(__file__).parent.parent))
import mori_standin

from trio_mori import ConfigError
from trio_mori._engines import _cuda_owner, _memfd, _mori_peer, _share_directory, _shm_owner
from trio_mori._engines._mori_identity import process_of
from trio_mori._engines._syscalls import pidfd_open
from trio_mori._errors import DescriptorRefused
from trio_mori._key_files import _File
from trio_mori._unix_transport import _unpack
from trio_mori._zmq_socket import is_key
from trio_mori._zmtp import mechanism_in, name_in
from trio_mori.abc import Descriptor

_SIZE = 4096
_NONCE = bytes(range(16))

# What the pools' descriptors say; the seeds say the same. Which process and which of its files they are in is put in
# when they are read: it is another one each time.
SHM = (_shm_owner.Owner(bytes(16), 1, 1, 1, 0, _NONCE, False), _shm_owner.Memory(0, _SIZE))
CUDA = (
    _cuda_owner.Owner(bytes(16), 1, 1, 1, _NONCE),
    _cuda_owner.Memory(_NONCE, 0, _SIZE, bytes(64), 0, "a GPU", "GPU-0"),
)


def halves(data: bytes) -> tuple[bytes, bytes]:
    """Two pieces: the first two bytes say where they meet."""
    at = int.from_bytes(data[:2], "big")
    return data[2 : 2 + at], data[2 + at :]


def here(owner: Any, memory: Any, fd: int) -> Descriptor:
    """The same, in this process under that number."""
    ours = msgspec.structs.replace(owner, pid=os.getpid())
    return Descriptor(msgspec.msgpack.encode(ours), msgspec.msgpack.encode(msgspec.structs.replace(memory, fd=fd)))


@functools.cache
def labelled(kind: str) -> tuple[int, Descriptor]:
    """A sealed file with the label of the descriptor above; it stays as long as the process."""
    fd = _memfd.create(_SIZE)
    descriptor = here(*(SHM if kind == "shm" else CUDA), fd)
    _memfd.publish(fd, descriptor, _SIZE)
    return fd, descriptor


def shm_descriptor(data: bytes) -> bool:
    """Who has a pool, and where it is; nothing is opened that is not checked."""
    descriptor = Descriptor(*halves(data))
    owner, memory = _shm_owner.decode(descriptor)
    with suppress(DescriptorRefused):
        _shm_owner.choose_way(_shm_owner.describe_self(shared=False), owner)
    fd, genuine = labelled("shm")
    moved = here(owner, memory, fd)
    try:
        os.close(_shm_owner.open_memory(*_shm_owner.decode(moved), moved))
    except DescriptorRefused:
        assert moved != genuine
    else:
        assert moved == genuine, "a pool was opened whose label says something else"
    return True


def cuda_descriptor(data: bytes) -> bool:
    """The same of a GPU's pool, up to the comparison with the sealed file that proves its author."""
    descriptor = Descriptor(*halves(data))
    owner, memory = _cuda_owner.decode(descriptor)
    fd, genuine = labelled("cuda")
    moved = here(owner, memory, fd)
    try:
        _cuda_owner.check_author(*_cuda_owner.decode(moved), moved)
    except DescriptorRefused:
        assert moved != genuine
    else:
        assert moved == genuine, "the author was taken for another"
    return True


class _Unpacking:
    """Of Mori: only what unpacks descriptors. It raises what the real one does of what it cannot unpack."""

    class EngineDesc(mori_standin.EngineDesc):
        pass

    class MemoryDesc(mori_standin.MemoryDesc):
        pass


def mori_descriptor(data: bytes) -> bool:
    """The same of an engine of Mori, as far as it is checked before Mori believes it."""
    library: Any = _Unpacking
    peer = _mori_peer.decode(library, Descriptor(*halves(data[1:])), gpu=bool(data[:1] > b"\x7f"))
    assert 1 <= peer.size < 1 << 62
    assert peer.identity
    return True


def mori_key(data: bytes) -> bool:
    """Which process an engine of Mori belongs to, by its key."""
    return process_of(data.decode("utf-8", "replace")) is not None


def shared_descriptors(data: bytes) -> bool:
    """What a process of our user passes in a share directory: each byte is a descriptor. None is left open."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        kinds = [_new_descriptor(byte) for byte in data[:8]]
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", kinds))] if kinds else []
        theirs.sendmsg([b"\0"], passed)
        theirs.close()
        for each in kinds:
            os.close(each)
        before = set(os.listdir("/proc/self/fd"))
        try:
            got = trio.run(_receive, ours)
        except DescriptorRefused:
            assert set(os.listdir("/proc/self/fd")) == before
            return False
        for fd in filter(None, (got.memory, got.process)):
            os.close(fd)
        assert set(os.listdir("/proc/self/fd")) == before
        assert min(len(kinds), 2) == 1 + (got.process is not None)  # there is no room for more, and they are closed
        return True


async def _receive(connection: socket.socket) -> _share_directory.Passed:
    with trio.socket.from_stdlib_socket(connection.dup()) as copy:
        return await _share_directory._receive(copy)


def _new_descriptor(byte: int) -> int:
    if byte % 4 == 0:
        return os.memfd_create("fuzzed")
    if byte % 4 == 1:
        return pidfd_open(os.getpid())
    return os.open("/dev/null" if byte % 4 == 2 else "/", os.O_RDONLY)


def key_file(data: bytes) -> bool:
    """A file of keys, of either kind."""
    understood = False
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with suppress(ConfigError):
            assert is_key(_File("curve_secret_key", file.name).secret())
            understood = True
        with suppress(ConfigError):
            keys = _File("curve_allowed_keys", file.name).public()
            assert keys
            assert all(is_key(key) and 0 < len(name) <= 64 for key, name in keys.items())
            understood = True
    return understood


def zmq_greeting(data: bytes) -> bool:
    """The first bytes of whoever listens where this side would."""
    mechanism, name = mechanism_in(data[:64]), name_in(data[64:66], data[66:])
    assert len(mechanism) <= 20
    assert len(name) < 256
    return bool(mechanism and name)


def unix_message(data: bytes) -> bool:
    """The frames of a message of the unix link."""
    frames = _unpack(data, 8)
    assert frames is None or (0 < len(frames) <= 8 and sum(map(len, frames)) <= len(data))
    return frames is not None
