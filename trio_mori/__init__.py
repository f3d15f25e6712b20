"""Stage-to-stage transfer for multi-stage models, on structured concurrency.

```python
async with trio_mori.open_connector(config) as conn:
    await conn.put("0", "1", "key", tensor)
    value = await conn.get("0", "1", "key")
```

Everything public is here, in `trio_mori.blocking`, `trio_mori.aio`, `trio_mori.abc` and `trio_mori.testing`. Names are
imported when they are first used: importing the package loads neither torch nor zmq.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str

    from ._arrival import Arrival as Arrival
    from ._arrival import StockArrival as StockArrival
    from ._buffer import ManagedBuffer as ManagedBuffer
    from ._chunks import ChunkReceiver as ChunkReceiver
    from ._chunks import ChunkSender as ChunkSender
    from ._config import ConnectorConfig as ConnectorConfig
    from ._config import port_for as port_for
    from ._connector import Connector as Connector
    from ._deploy import DeployFile as DeployFile
    from ._deploy import load_deploy as load_deploy
    from ._engines import open_engine as open_engine
    from ._errors import AuthenticationFailed as AuthenticationFailed
    from ._errors import BindFailed as BindFailed
    from ._errors import ConfigError as ConfigError
    from ._errors import ConnectorClosed as ConnectorClosed
    from ._errors import DescriptorRefused as DescriptorRefused
    from ._errors import EngineMismatch as EngineMismatch
    from ._errors import EngineUnavailable as EngineUnavailable
    from ._errors import Expired as Expired
    from ._errors import Gone as Gone
    from ._errors import InternalError as InternalError
    from ._errors import KeyBusy as KeyBusy
    from ._errors import KeyRefused as KeyRefused
    from ._errors import LeaseError as LeaseError
    from ._errors import Misuse as Misuse
    from ._errors import NoDescriptors as NoDescriptors
    from ._errors import NoEndpoint as NoEndpoint
    from ._errors import NoRoom as NoRoom
    from ._errors import NotReady as NotReady
    from ._errors import PayloadLost as PayloadLost
    from ._errors import PeerLost as PeerLost
    from ._errors import PeerRestarted as PeerRestarted
    from ._errors import PortHeld as PortHeld
    from ._errors import RemoteProtocolError as RemoteProtocolError
    from ._errors import StreamFailed as StreamFailed
    from ._errors import TooBig as TooBig
    from ._errors import TransferFailed as TransferFailed
    from ._errors import TrioMoriError as TrioMoriError
    from ._errors import UnsupportedPayload as UnsupportedPayload
    from ._errors import WrongRole as WrongRole
    from ._lease import Lease as Lease
    from ._opening import open_connector as open_connector
    from ._payload import Plan as Plan
    from ._quarantine import Quarantined as Quarantined
    from ._staging import Reservation as Reservation
    from ._staging import plan_payload as plan_payload
    from ._statistics import ConnectorStatistics as ConnectorStatistics
    from ._statistics import KnownSender as KnownSender
    from ._statistics import Receipt as Receipt

_HOMES = {
    "_arrival": ("Arrival", "StockArrival"),
    "_buffer": ("ManagedBuffer",),
    "_chunks": ("ChunkReceiver", "ChunkSender"),
    "_config": ("ConnectorConfig", "port_for"),
    "_connector": ("Connector",),
    "_opening": ("open_connector",),
    "_deploy": ("DeployFile", "load_deploy"),
    "_engines": ("open_engine",),
    "_errors": (
        "AuthenticationFailed",
        "BindFailed",
        "ConfigError",
        "ConnectorClosed",
        "DescriptorRefused",
        "EngineMismatch",
        "EngineUnavailable",
        "Expired",
        "Gone",
        "InternalError",
        "KeyBusy",
        "KeyRefused",
        "LeaseError",
        "Misuse",
        "NoDescriptors",
        "NoEndpoint",
        "NoRoom",
        "NotReady",
        "PayloadLost",
        "PeerLost",
        "PeerRestarted",
        "PortHeld",
        "RemoteProtocolError",
        "StreamFailed",
        "TooBig",
        "TransferFailed",
        "TrioMoriError",
        "UnsupportedPayload",
        "WrongRole",
    ),
    "_lease": ("Lease",),
    "_payload": ("Plan",),
    "_quarantine": ("Quarantined",),
    "_staging": ("Reservation", "plan_payload"),
    "_statistics": ("ConnectorStatistics", "KnownSender", "Receipt"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

_MODULES = frozenset({"abc", "aio", "blocking", "metrics", "testing"})

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        value = _installed_version()
    elif name in _HOME_OF:
        value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    else:
        raise AttributeError(f"module 'trio_mori' has no attribute {name!r}")
    globals()[name] = value
    return value


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("trio-mori")
    except PackageNotFoundError as error:
        raise AttributeError(
            "trio_mori.__version__ is not known, for the package was not installed; `pip install .` does that"
        ) from error


def __dir__() -> list[str]:
    loaded = {name for name in globals() if name in _MODULES or (name.startswith("__") and name.endswith("__"))}
    return sorted({*loaded, *__all__, "__version__"})
