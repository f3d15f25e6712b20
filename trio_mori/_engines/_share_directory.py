"""Passing a pool to processes that cannot see ours: over a unix socket in a directory that both have mounted.

Each engine listens there under a name made of its nonce. Whoever connects and runs as the same user is sent the
pool's memfd and a pidfd of the owner, and nothing else happens on the connection. A pidfd works in every pid
namespace, so that such a peer can be fenced as well.
"""

from __future__ import annotations

import array
import errno
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path

import attrs
import trio

from .._errors import ConfigError, DescriptorRefused, EngineUnavailable
from .._scope import open_service
from ._syscalls import pidfd_open

logger = logging.getLogger("trio_mori.engine")

# A socket younger than this may belong to a process that has bound it and not listened yet, 20 us later.
_STALE_AGE = 60.0

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


@attrs.frozen
class Passed:
    """What an owner handed over. The receiver owns both descriptors.

    Attributes:
        memory: The pool's memfd; not checked yet.
        process: The owner's pidfd; None where its system has none.
    """

    memory: int
    process: int | None


class ShareDirectory:
    """A directory that belongs to us alone and is mounted wherever our peers run. See `open_share_directory`."""

    def __init__(self, path: str, fd: int) -> None:
        self._path = path
        self._fd = fd

    def listen(self, name: str) -> socket.socket:
        """A listening socket under this name. The caller owns it, and unlinks it with `remove`.

        Raises:
            EngineUnavailable: the directory is read-only, or on a file system without sockets.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._place(name))
            os.chmod(name, 0o600, dir_fd=self._fd)
            listener.listen(128)  # each peer connects once or twice in its life
        except OSError as error:
            listener.close()
            raise EngineUnavailable(f"shm: no socket can be made in share_directory {self._path}: {error}") from error
        return listener

    def remove(self, name: str) -> None:
        """Unlink a socket; it is no error if it is gone."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def remove_stale(self) -> None:
        """Unlink the sockets of engines that ended without doing it themselves, as after SIGKILL.

        A process in another container cannot be asked whether it lives. Its socket can: nobody listening is proof
        that the engine is gone.
        """
        for name in os.listdir(self._fd):
            if not name.endswith(".shm"):
                continue
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                old = time.time() - status.st_mtime > _STALE_AGE
                if old and stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid() and self._is_dead(name):
                    os.unlink(name, dir_fd=self._fd)

    async def fetch(self, name: str) -> Passed:
        """Ask the engine of this name for its pool. Waits for as long as that process is stuck; cancellable.

        Raises:
            DescriptorRefused: nobody is there, or not our user, or it sent something else; says what to do.
        """
        try:
            with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                await connection.connect(self._place(name))
                uid = _peer_uid(connection)
                if uid != os.geteuid():
                    raise DescriptorRefused(f"shm: {self._path}/{name} is held by uid {uid}, ours is {os.geteuid()}")
                return await _receive(connection)
        except OSError as error:
            raise DescriptorRefused(
                f"shm: no engine answers at {self._path}/{name} ({error.strerror}): its process has ended, or its "
                "share_directory is another directory than ours"
            ) from error

    def _is_dead(self, name: str) -> bool:
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            probe.setblocking(False)
            return probe.connect_ex(self._place(name)) == errno.ECONNREFUSED

    def _place(self, name: str) -> str:
        # By descriptor, not by path: a socket's path is limited to 107 bytes, and this is the directory we checked.
        return f"/proc/self/fd/{self._fd}/{name}"


@contextmanager
def open_share_directory(path: object) -> Iterator[ShareDirectory]:
    """Use this directory, and remove what dead engines of ours left there.

    Raises:
        ConfigError: not an absolute path, or there is nothing: where a mount was forgotten, a new directory would be
            one that no peer looks into.
        EngineUnavailable: it cannot be used, or other users can; says what to do.
    """
    if not isinstance(path, str) or not os.path.isabs(path):
        raise ConfigError(f"share_directory must be an absolute path, not {path!r}", key="share_directory", value=path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ConfigError(
            f"share_directory: {path!r} does not exist; make it with mkdir -m 700, and mount that one directory here "
            "and wherever the peers run",
            key="share_directory",
            value=path,
        ) from error
    except OSError as error:
        raise EngineUnavailable(f"shm: share_directory {path} cannot be used: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise EngineUnavailable(
                f"shm: share_directory {path} has mode {stat.filemode(status.st_mode)} and belongs to uid "
                f"{status.st_uid}; it must belong to uid {os.geteuid()} and to nobody else: chown it and chmod 700"
            )
        directory = ShareDirectory(path, fd)
        directory.remove_stale()
        yield directory
    finally:
        os.close(fd)


@attrs.frozen(eq=False)
class Sharing:
    """A pool that is handed out in a share directory.

    Attributes:
        directory: Where the pools of our peers are found.
        tasks: Where tasks that talk to peers may run; cancelled with the sharing.
    """

    directory: ShareDirectory
    tasks: trio.Nursery


@asynccontextmanager
async def open_sharing(path: object, *, name: str, memory: int) -> AsyncIterator[Sharing]:
    """Hand a pool, and a pidfd of this process, to whoever connects to `name` in this directory as our user.

    Raises:
        ConfigError: as `open_share_directory`.
        EngineUnavailable: as `open_share_directory`.
    """
    with open_share_directory(path) as directory, _open_own_process() as process:
        descriptors = [memory] if process is None else [memory, process]
        async with open_service() as tasks:
            tasks.start_soon(_serve, directory.listen(name), descriptors)
            try:
                yield Sharing(directory, tasks)
            finally:
                directory.remove(name)


@contextmanager
def _open_own_process() -> Iterator[int | None]:
    try:
        process = pidfd_open(os.getpid())
    except OSError:
        yield None
        return
    try:
        yield process
    finally:
        os.close(process)


async def _serve(listener: socket.socket, descriptors: list[int]) -> None:
    async def hand_out(stream: trio.SocketStream) -> None:
        async with stream:
            if _peer_uid(stream.socket) != os.geteuid():
                return
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            try:
                await stream.socket.sendmsg([b"\0"], passed)
            except OSError as error:
                logger.info("a peer that asked for our shm pool went away: %s", error)

    await trio.serve_listeners(hand_out, [trio.SocketListener(trio.socket.from_stdlib_socket(listener))])


async def _receive(connection: trio.socket.SocketType) -> Passed:
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(2 * descriptors.itemsize)
    _, ancillary, _, _ = await connection.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(payload[: len(payload) // descriptors.itemsize * descriptors.itemsize])
    return _told_apart(descriptors.tolist())


def _told_apart(descriptors: list[int]) -> Passed:
    match descriptors:
        case [memory]:
            return Passed(memory, None)
        case [memory, process] if "Pid:" in Path(f"/proc/self/fdinfo/{process}").read_text():
            return Passed(memory, process)
    for fd in descriptors:
        os.close(fd)
    raise DescriptorRefused(f"shm: an engine passed {len(descriptors)} descriptors instead of its pool and its process")


def _peer_uid(connection: trio.socket.SocketType) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid
