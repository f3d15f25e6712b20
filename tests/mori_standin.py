"""A stand-in for `mori.io` that takes only calls that the real one takes, for tests of what no machine of ours can run.

It checks number, kinds and lengths of every call's arguments, and what Mori leaves to its caller: ranges, unequal
lists, and memory that is deregistered while transfers are under way.
"""

from __future__ import annotations

import enum
import os
import time
import weakref

import attrs
import msgspec
import torch


class StatusCode(enum.IntEnum):
    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15


class BackendType(enum.IntEnum):
    XGMI = 1
    RDMA = 2


class PollCqMode(enum.IntEnum):
    POLLING = 0
    EVENT = 1


class MemoryLocationType(enum.IntEnum):
    CPU = 1
    GPU = 2


class PeerFailureReason(enum.IntEnum):
    PEER_UNREACHABLE = 1


@attrs.frozen
class PeerFailureEvent:
    remote_engine_key: str
    reason: PeerFailureReason
    detail: str = ""


@attrs.frozen
class IOEngineConfig:
    host: str = attrs.field(validator=attrs.validators.instance_of(str))
    port: int = attrs.field(
        validator=[attrs.validators.instance_of(int), attrs.validators.ge(0), attrs.validators.lt(65536)]
    )


def _int(default: int) -> int:
    """One that fits in Mori's."""
    fits = [attrs.validators.instance_of(int), attrs.validators.ge(-1), attrs.validators.lt(1 << 31)]
    return attrs.field(default=default, validator=fits)  # type: ignore[no-any-return]


@attrs.frozen
class RdmaBackendConfig:
    qp_per_transfer: int = _int(1)
    post_batch_size: int = _int(-1)
    num_worker_threads: int = _int(-1)
    poll_cq_mode: PollCqMode = attrs.field(
        default=PollCqMode.POLLING, validator=attrs.validators.instance_of(PollCqMode)
    )
    enable_notification: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    notif_per_qp: int = _int(1024)
    enable_transfer_chunking: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    chunk_bytes: int = _int(65536)
    max_chunks_per_transfer: int = _int(64)
    num_nics_per_transfer: int = _int(1)


@attrs.frozen
class EngineDesc:
    key: str
    node_id: str
    hostname: str
    host: str
    port: int
    pid: int

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(attrs.astuple(self))

    @staticmethod
    def unpack(packed: bytes) -> EngineDesc:
        return EngineDesc(*msgspec.msgpack.decode(packed))


@attrs.frozen
class MemoryDesc:
    engine_key: str
    id: int
    device_id: int
    device_bus_id: str
    data: int
    size: int
    loc: int
    ipc_handle: bytes = bytes(64)
    tail: tuple[object, ...] = (-1, 0, bytes(64), -1, "", 0, 0)

    def pack(self) -> bytes:
        return msgspec.msgpack.encode([*attrs.astuple(self)[:-1], *self.tail])

    @staticmethod
    def unpack(packed: bytes) -> MemoryDesc:
        head = msgspec.msgpack.decode(packed)
        return MemoryDesc(*head[:8], tail=tuple(head[8:]))


class TransferStatus:
    """Ends when the test says so, or at once."""

    def __init__(self, code: StatusCode = StatusCode.INIT, message: str = "", asked: int = 0) -> None:
        self.code = code
        self.message = message
        self.asked = asked

    def WaitFor(self, timeout_ms: int = -1) -> StatusCode:
        assert timeout_ms == 0, "the only bounded question is WaitFor(0)"
        self.asked -= 1
        return self.Code()

    def Code(self) -> StatusCode:
        return self.code if self.asked <= 0 else StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:
        return self.Code() is StatusCode.SUCCESS

    def Message(self) -> str:
        return self.message


class Fabric:
    """The module, and what all of its engines share.

    Attributes:
        devices: What $MORI_RDMA_DEVICES was when each backend was made.
        nics: Whether there are any.
        fate: Code of the next statuses.
        asked: How often they are asked before they have it.
        unreachable: Keys that no connection can be made to.
        failures: Events that engines will report.
        count: How many statuses come back for one write.
        slow: How long it takes to make a backend, in seconds.
        tensors: Registered memory that is still there, by its address.
    """

    StatusCode = StatusCode
    BackendType = BackendType
    PollCqMode = PollCqMode
    EngineDesc = EngineDesc
    MemoryDesc = MemoryDesc
    IOEngineConfig = IOEngineConfig
    RdmaBackendConfig = RdmaBackendConfig

    def __init__(self) -> None:
        self.devices: list[str | None] = []
        self.configs: list[RdmaBackendConfig] = []
        self.engines: dict[str, IOEngine] = {}
        self.tensors: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.nics = True
        self.fate = StatusCode.SUCCESS
        self.asked = 0
        self.statuses: list[TransferStatus] = []
        self.unreachable: set[str] = set()
        self.failures: list[PeerFailureEvent] = []
        self.count = 1
        self.slow = 0.0

    def IOEngine(self, key: str, config: IOEngineConfig) -> IOEngine:
        assert isinstance(key, str)
        assert isinstance(config, IOEngineConfig)
        assert key not in self.engines, "two engines with one key"
        engine = self.engines[key] = IOEngine(self, key, config)
        return engine


class IOEngine:
    """As mori.io.IOEngine, for rdma."""

    def __init__(self, fabric: Fabric, key: str, config: IOEngineConfig) -> None:
        self._fabric = fabric
        self._desc = EngineDesc(key, "node", "host", config.host, 0, os.getpid())
        self._backend = False
        self.remotes: dict[str, EngineDesc] = {}
        self._memory: list[MemoryDesc] = []
        self._uids = 0
        self._posted: list[TransferStatus] = []

    def create_backend(self, type: BackendType, config: RdmaBackendConfig) -> None:
        assert type is BackendType.RDMA
        assert isinstance(config, RdmaBackendConfig)
        assert not self._backend
        if not self._fabric.nics:
            raise RuntimeError("no active RDMA device on this host; set MORI_DISABLE_AUTO_XGMI=0")
        self._backend = True
        time.sleep(self._fabric.slow)
        self._desc = attrs.evolve(self._desc, port=40000)
        self._fabric.devices.append(os.environ.get("MORI_RDMA_DEVICES"))
        self._fabric.configs.append(config)

    def get_engine_desc(self) -> EngineDesc:
        return self._desc

    def register_remote_engine(self, desc: EngineDesc) -> None:
        assert self._backend, "what is registered before the backend is forgotten"
        assert isinstance(desc, EngineDesc)
        self.remotes[desc.key] = desc

    def deregister_remote_engine(self, desc: EngineDesc) -> None:
        assert isinstance(desc, EngineDesc)
        self.remotes.pop(desc.key, None)

    def register_torch_tensor(self, tensor: torch.Tensor) -> MemoryDesc:
        assert self._backend
        assert tensor.is_contiguous()
        location = MemoryLocationType.CPU if tensor.is_cpu else MemoryLocationType.GPU
        number = len(self._memory)
        one = MemoryDesc(self._desc.key, number, tensor.get_device(), "", tensor.data_ptr(), tensor.nbytes, location)
        self._memory.append(one)
        self._fabric.tensors[one.data] = tensor
        return one

    def deregister_memory(self, desc: MemoryDesc) -> None:
        assert isinstance(desc, MemoryDesc)
        assert all(status.Code() is not StatusCode.IN_PROGRESS for status in self._posted)
        self._memory.remove(desc)

    def allocate_transfer_uid(self) -> int:
        self._uids += 1
        return self._uids

    def pop_peer_failure(self) -> PeerFailureEvent | None:
        return self._fabric.failures.pop(0) if self._fabric.failures else None

    def batch_write(self, local, local_offsets, remote, remote_offsets, sizes, uids, /):  # type: ignore[no-untyped-def]
        outer = (local, local_offsets, remote, remote_offsets, sizes, uids)
        assert all(isinstance(each, list) for each in outer), "lists only"
        assert len({len(each) for each in outer}) == 1, "unequal outer lists abort the process"
        statuses = []
        for source, starts, target, ends, counts, uid in zip(*outer, strict=True):
            assert source in self._memory, "the source is not registered here"
            assert isinstance(target, MemoryDesc)
            assert isinstance(uid, int)
            assert len(starts) == len(ends) == len(counts), "unequal inner lists abort the process"
            if target.engine_key not in self.remotes or target.engine_key in self._fabric.unreachable:
                raise RuntimeError(f"cannot connect to {target.engine_key}")
            assert all(type(each) is int for each in (*starts, *ends, *counts))
            for start, end, count in zip(starts, ends, counts, strict=True):
                assert 0 <= start <= source.size - count, "Mori does not check this"
                assert 0 <= end <= target.size - count, "Mori does not check this"
                if self._fabric.fate in (StatusCode.SUCCESS, StatusCode.IN_PROGRESS):
                    self._copy(source, start, target, end, count)
            statuses.append(TransferStatus(self._fabric.fate, "as the test wants", self._fabric.asked))
        self._fabric.statuses += statuses
        self._posted += statuses
        return statuses * self._fabric.count

    def _copy(self, source: MemoryDesc, start: int, target: MemoryDesc, end: int, count: int) -> None:
        tensors = self._fabric.tensors
        tensors[target.data][end : end + count].copy_(tensors[source.data][start : start + count])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
