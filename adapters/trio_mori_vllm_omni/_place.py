"""What a stage's connector is, by the `extra` that vllm-omni hands to it: its role, and where it listens and dials.

vllm-omni 0.30 gives a stage the configuration of its *incoming* edge, with role receiver; a stage without one gets that
of its outgoing edge, with role sender. So whoever has a stage number may put, and listens on the port of that stage.

Under the stock name vllm-omni has done the sum of ports itself: a sender's `zmq_port` and a receiver's
`sender_zmq_port` are final, rank and replica included, and a receiver's own port is found by going from one stage to
the other. Under our own name `zmq_port` is the base that stands in the YAML.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import attrs

from trio_mori import ConfigError, ConnectorConfig, port_for

# What stock Mori does without the key.
_STOCK_BACKEND = "rdma"

# Closing is over within two seconds in every state, unless the YAML gives writes more time.
CLOSE_GRACE = 1.0

# Keys that are for vllm-omni, for the registration, or worked out here.
_NOT_HANDED_ON = frozenset(
    ("replace_stock", "chunk_adapter", "outgoing", "type", "role", "sender_host", "sender_zmq_port", "zmq_port")
)


@attrs.frozen
class Place:
    """A stage's connector.

    Attributes:
        config: Of the core; its `zmq_port` is where to listen, and `role` is sender, receiver or both.
        can_put: Whether it may listen and send.
        sender_host, sender_zmq_port: Whom `get` asks unless its metadata says otherwise; None if that is not known.
    """

    config: ConnectorConfig
    can_put: bool
    sender_host: str | None
    sender_zmq_port: int | None


def find_place(extra: Mapping[str, object], *, resolved: bool, rank: int = 0, replica: int = 0) -> Place:
    """The place of a connector in its deployment.

    Args:
        resolved: The ports are final: vllm-omni knew the connector's name.
        rank, replica: Of this process; they enter into the ports that are not final.

    Raises:
        ConfigError: a value is not allowed, or a port would be above 65535.
    """
    role = str(extra.get("role") or "sender").lower()
    if role not in ("sender", "receiver", "both", "auto"):
        raise ConfigError(f"role: {role!r} is not allowed; give sender, receiver or both", key="role", value=role)
    stage = _number(extra, "stage_id", -1)
    came_from = _number(extra, "from_stage", stage - 1 if stage > 0 else -1)
    host, dialled = extra.get("sender_host"), _number(extra, "sender_zmq_port", 0) or None
    if resolved:
        port = _resolved_port(extra, role, stage, came_from, dialled)
    else:
        base = _number(extra, "zmq_port", 50051)
        by_stage = stage >= 0 and base > 0
        port = port_for(base, stage=stage, rank=rank, replica=replica) if by_stage else base
        if role == "receiver" and stage < 0:
            port = None
        if role != "sender" and dialled is None and by_stage and came_from >= 0:
            dialled = port_for(base, stage=came_from, rank=rank, replica=replica)
    if host is None and dialled is not None:
        host = extra.get("host", "auto")
    values = {key: value for key, value in extra.items() if key not in _NOT_HANDED_ON}
    if resolved:
        values.setdefault("backend_type", _STOCK_BACKEND)
    values.setdefault("close_grace", CLOSE_GRACE)
    for key in ("from_stage", "to_stage"):
        if key in values:
            values[key] = _number(extra, key, 0)
    values |= {"stage_id": stage, "rank": rank, "replica": replica}
    if port is not None:
        values["zmq_port"] = port
    values["role"] = "receiver" if port is None else "sender" if role == "sender" else "both"
    config = ConnectorConfig.from_dict(values)
    return Place(config, port is not None, None if host is None else str(host), dialled)


def _resolved_port(
    extra: Mapping[str, object], role: str, stage: int, came_from: int, dialled: int | None
) -> int | None:
    """Where it listens; None if that cannot be known, as for a receiver outside of a deployment."""
    if role != "receiver":
        return _number(extra, "zmq_port", 50051)
    if dialled is None or stage < 0 or came_from < 0:
        return None
    port = dialled - came_from + stage
    if not 0 < port <= 65535:
        raise ConfigError(
            f"sender_zmq_port: {dialled} is not allowed; stage {stage} would listen on port {port}: give the "
            "connector a lower zmq_port",
            key="sender_zmq_port",
            value=dialled,
        )
    return port


def _number(extra: Mapping[str, object], key: str, default: int) -> int:
    """An integer, also as text and by an environment variable, as vllm-omni allows for ports."""
    value = extra.get(key)
    if value is None:
        return default
    if isinstance(value, str):
        text = os.path.expandvars(value)
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{key}: {text!r} is not allowed; give an integer", key=key, value=value) from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key}: {value!r} is not allowed; give an integer", key=key, value=value)
    return value
