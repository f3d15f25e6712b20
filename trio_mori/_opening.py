"""`open_connector`: one connector of a stage, and everything that runs for it."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import trio

from ._address import Standing
from ._config import PAGE, ConnectorConfig, Endpoint, resolve_host, warn_if_exposed
from ._connector import Connector
from ._descriptors import require_descriptors
from ._engines import open_engine
from ._errors import Misuse
from ._events import CLOSED, OPEN
from ._gpu import check_device
from ._key_files import load_keys
from ._payload_types import PayloadTypes
from ._pool import Pool
from ._port import Port, open_port
from ._protocol import wire
from ._protocol.extents import INBOUND, OUTBOUND, Extents
from ._receiver import Receiver
from ._scope import open_service
from ._sender import Sender
from .abc import Engine

logger = logging.getLogger("trio_mori.connector")

# What a connector has of its stage's address when it opens.
_LISTENS = {
    Standing.HELD: "listens at {}",
    Standing.SHARED: "shares the listener at {} with another instance of its stage",
    Standing.PASSIVE: "leaves {} to another process of its stage until it puts",
}


@asynccontextmanager
async def open_connector(
    config: ConnectorConfig | Mapping[str, object],
    *,
    engine: Engine | None = None,
    payload_types: Iterable[type] = (),
) -> AsyncIterator[Connector]:
    """Open a stage's connector for the length of an ``async with`` block.

    A sender listens when the block is entered. Leaving it closes everything in order and within `close_grace`: calls
    that wait end with `ConnectorClosed`, writes in flight are waited for, peers are told, the port is free. What nobody
    has fetched is dropped, with a warning in the log; `Connector.drain` waits until nothing of it is left.

    Args:
        config: A `ConnectorConfig`, or the `extra` of a deploy file.
        engine: An engine that the caller opened and keeps open longer than the connector; by default one is
            opened as `backend_type` says.
        payload_types: Dataclasses, attrs classes, msgspec structs and named tuples that `get` restores; others arrive
            as dicts.

    Raises:
        Misuse: called outside of a trio run, as from asyncio.
        ConfigError: a value is not allowed.
        BindFailed: the port cannot be listened on.
        EngineUnavailable: the engine cannot be opened here.
        NoDescriptors: too few file descriptors are left.
    """
    if not trio.lowlevel.in_trio_task():
        raise Misuse(
            "trio_mori.open_connector was entered outside of trio; asyncio code enters trio_mori.aio.open_connector, "
            "and code without an event loop trio_mori.blocking.open_connector"
        )
    if not isinstance(config, ConnectorConfig):
        config = ConnectorConfig.from_dict(config)
    types = PayloadTypes(payload_types)
    require_descriptors("a connector")
    if config.role != "sender":
        check_device(config.payload_device)
    async with AsyncExitStack() as stack:
        # In a thread: a name is looked up, which may take as long as the resolver likes.
        hosts = await trio.to_thread.run_sync(partial(resolve_host, config.host, advertise=config.advertise_host))
        keys = await trio.to_thread.run_sync(load_keys, config)
        if engine is None:
            engine = await stack.enter_async_context(
                open_engine(
                    _engine_name(config),
                    pool_size=config.memory_pool_size,
                    device=config.memory_pool_device,
                    options=_engine_options(config, hosts.advertise),
                )
            )
        pool = Pool(engine.region, Extents(engine.region.size, guarantees=_guarantees(config, engine.region.size)))
        stack.callback(pool.let_go)
        deployment = wire.Deployment(socket.gethostname(), config.stage_id, config.rank, config.replica, config.digest)
        endpoint = Endpoint(hosts.advertise, config.zmq_port)
        port = None
        if config.role != "receiver":
            port = await stack.enter_async_context(open_port(config, hosts.bind, deployment, keys))
            if keys is None:
                warn_if_exposed(config, hosts)
        connector: Connector | None = None

        async def drain() -> None:
            if connector is not None:  # otherwise its port could not be opened
                await connector._wind_up()

        # The grace is the drain's own; what is added here only bounds the farewell.
        async with open_service(drain=drain, drain_timeout=config.close_grace + 1) as nursery:
            receiver = Receiver(
                config,
                engine=engine,
                pool=pool,
                nursery=nursery,
                deployment=deployment,
                payload_types=types,
                keys=keys,
            )
            nursery.start_soon(receiver.heartbeat.go_on)
            sender = None
            if port is not None:
                sender = Sender(
                    config, engine=engine, pool=pool, nursery=nursery, deployment=deployment, endpoint=endpoint
                )
                await port.open(sender)
                endpoint = sender.endpoint
                nursery.start_soon(sender.sweep)
            connector = Connector(
                config, engine=engine, pool=pool, sender=sender, receiver=receiver, port=port, endpoint=endpoint
            )
            nursery.start_soon(connector._guard)
            size = pool.extents.size
            does = _describe(config, endpoint, port)
            extra = {
                "address": "" if port is None else endpoint.address,
                "sender": "" if config.sender_endpoint is None else config.sender_endpoint.address,
                "role": config.role,
                "stage": config.stage_id,
                "engine": engine.name,
            }
            logger.info(
                "connector open: %s, engine %s, pool %d bytes",
                does,
                engine.name,
                size,
                extra={"event": OPEN, "size": size, **extra},
            )
            try:
                yield connector
            except BaseException:
                connector._is_broken_off = True
                raise
        logger.info("connector closed: %s", does, extra={"event": CLOSED, **extra})


def _describe(config: ConnectorConfig, endpoint: Endpoint, port: Port | None) -> str:
    """What a connector does, for the log: a receiver listens nowhere."""
    source = config.sender_endpoint
    parts = [config.role if config.stage_id < 0 else f"{config.role} of stage {config.stage_id}"]
    if port is not None:
        parts.append(_LISTENS.get(port.standing, "for {}").format(endpoint.address))
    if source is not None:
        parts.append(f"gets from {source.address}")
    elif config.role != "sender":
        parts.append("gets from whom update_sender_info or metadata names")
    return ", ".join(parts)


def _engine_name(config: ConnectorConfig) -> str:
    by_host = config.fallback == "host" and config.backend_type in ("cuda_ipc", "xgmi")
    return "auto" if by_host else config.backend_type


def _engine_options(config: ConnectorConfig, host: str) -> dict[str, object]:
    xgmi = {"xgmi_num_streams": config.xgmi_num_streams, "xgmi_num_events": config.xgmi_num_events}
    shm = {"share_directory": config.share_directory} if config.share_directory else {}
    if _engine_name(config) == "auto":
        only = {} if config.backend_type == "auto" else {"only": config.backend_type}
        return {"xgmi": xgmi, "shm": shm, **only}
    if config.backend_type == "xgmi":
        return {**xgmi}
    if config.backend_type == "rdma":
        chunking = {"enable_transfer_chunking": True, "chunk_bytes": config.chunk_bytes} if config.chunk_bytes else {}
        return {
            "host": host,
            "rdma_devices": config.rdma_devices,
            "qp_per_transfer": config.qp_per_transfer,
            "post_batch_size": config.post_batch_size,
            "num_worker_threads": config.num_worker_threads,
            "poll_cq_mode": config.poll_cq_mode,
            "num_nics_per_transfer": config.num_nics_per_transfer,
            **chunking,
        }
    return {**shm} if config.backend_type == "shm" else {}


def _guarantees(config: ConnectorConfig, size: int) -> dict[str, int]:
    if config.role != "both":
        return {}
    # Shares are rounded up to pages; of an odd number of pages two halves would be more than the whole.
    share = min(int(size * config.guaranteed_fraction), size // 2 // PAGE * PAGE)
    return {INBOUND: share, OUTBOUND: share}
