"""What a deploy file comes to, in lines of text: the connectors of each stage, or why it cannot have them."""

from __future__ import annotations

import attrs

from ._config import KEYS, ConnectorConfig
from ._deploy import DeployFile, Edge
from ._endpoint import AUTO, WILDCARDS, format_endpoint
from ._errors import ConfigError

# Said in the first lines of a connector already.
_SAID = frozenset(("role", "host", "zmq_port", "sender_host", "sender_zmq_port", "stage_id", "from_stage", "to_stage"))

_DEFAULTS = {field.name: field.default for field in attrs.fields(ConnectorConfig) if field.name in KEYS}


@attrs.frozen
class StageReport:
    """One stage of a deploy file.

    Attributes:
        lines: What it opens.
        errors: Why it cannot.
    """

    lines: tuple[str, ...]
    errors: tuple[str, ...]


def report_stage(deploy: DeployFile, stage_id: int) -> StageReport:
    """The connectors of a stage: their edges, addresses, and the keys that are not as by default.

    Raises:
        ConfigError: there is no such stage.
    """
    inputs = [edge for edge in deploy.edges if edge.to_stage == stage_id]
    outputs = [edge for edge in deploy.edges if edge.from_stage == stage_id]
    if not inputs and not outputs and stage_id in deploy.stages:
        return StageReport((f"stage {stage_id}: no edge, and so no connector",), ())
    lines: list[str] = []
    errors: list[str] = []
    foreign = [edge for edge in (*inputs, *outputs) if not deploy.is_ours(edge)]
    lines += [f"stage {stage_id}: {edge} goes by {deploy.name_of(edge)}, not by trio_mori" for edge in foreign]
    inputs, outputs = ([edge for edge in edges if edge not in foreign] for edges in (inputs, outputs))
    if foreign and not inputs and not outputs:
        return StageReport(tuple(lines), ())
    for choice, edges in _choices(inputs, outputs, has_foreign=bool(foreign)):
        try:
            config = deploy.config_for_stage(stage_id, **choice)
        except ConfigError as error:
            errors.append(str(error))
        else:
            lines += _describe(stage_id, config, edges)
    return StageReport(tuple(lines), tuple(errors))


def _choices(
    inputs: list[Edge], outputs: list[Edge], *, has_foreign: bool
) -> list[tuple[dict[str, object], list[Edge]]]:
    """What `config_for_stage` is to be told for each connector of a stage, and the edges of that."""
    by_connector: dict[str, list[Edge]] = {}
    for edge in outputs:
        by_connector.setdefault(edge.connector, []).append(edge)
    if len(inputs) <= 1 and len(by_connector) <= 1 and not has_foreign:
        return [({}, [*inputs, *outputs])]
    receiving = [({"role": "receiver", "from_stage": edge.from_stage}, [edge]) for edge in inputs]
    if len(by_connector) == 1 and not has_foreign:
        return [*receiving, ({"role": "sender"}, outputs)]
    sending = [({"role": "sender", "to_stage": edge.to_stage}, [edge]) for edge in outputs]
    return [*receiving, *sending]


def _describe(stage_id: int, config: ConnectorConfig, edges: list[Edge]) -> list[str]:
    names = ", ".join(dict.fromkeys(edge.connector for edge in edges))
    lines = [f"stage {stage_id}: {config.role}, {', '.join(map(str, edges))} by {names}"]
    if config.role != "receiver":
        if config.zmq_port and config.host not in (AUTO, *WILDCARDS):
            place = format_endpoint(config.host, config.zmq_port)
        else:
            place = f"{f'port {config.zmq_port}' if config.zmq_port else 'any free port'} of host {config.host}"
        lines.append(f"  listens at {place}")
    if config.role != "sender":
        source = config.sender_endpoint
        lines.append(f"  gets from {'whom update_sender_info names' if source is None else source.address}")
    for key in KEYS:
        value = getattr(config, key)
        if key not in _SAID and value != _DEFAULTS[key]:
            lines.append(f"  {key}: {value}")
    others = [key for key in config.extra if key not in KEYS]
    if others:
        lines.append(f"  for others: {', '.join(others)}")
    return lines
