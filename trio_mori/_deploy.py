"""What a vllm-omni deploy file says about connectors: its edges, and the configuration of each stage's connector."""

from __future__ import annotations

import os
from collections.abc import Mapping

import attrs

from ._allowed import show
from ._config import KEYS, ConnectorConfig, located
from ._deploy_file import Definition, DeployContent, Edge, read_deploy
from ._endpoint import AUTO, WILDCARDS, port_for
from ._errors import ConfigError

__all__ = ["DeployFile", "Edge", "load_deploy"]

# What the definitions of a middle stage's inputs and outputs may say differently: where to listen and dial, what
# follows from the edges, and what only stage code reads. A stage has one pool, one engine and one set of limits.
_MAY_DIFFER = frozenset(
    (
        *("host", "zmq_port", "advertise_host", "sender_host", "sender_zmq_port", "curve_sender_key"),
        *("role", "stage_id", "from_stage", "to_stage"),
        *("codec_chunk_frames", "codec_left_context_frames"),
    )
)

# The overrides that choose among a stage's edges.
_CHOOSING = ("role", "from_stage", "to_stage")
# Those that both ends of an edge compute their ports from.
_PLACE = ("rank", "replica")


@attrs.frozen
class DeployFile:
    """The connectors of a deployment. Obtained from `load_deploy`.

    Attributes:
        path: The file.
        async_chunk: Whether stages hand over chunks while they work; true unless the file says otherwise.
        stages: Their numbers, in the file's order.
        edges: Ordered by the stage that they come from.
    """

    path: str
    async_chunk: bool
    stages: tuple[int, ...]
    edges: tuple[Edge, ...]
    _definitions: Mapping[str, Definition] = attrs.field(repr=False, eq=False)

    def config_for_stage(self, stage_id: int, **overrides: object) -> ConnectorConfig:
        """The configuration of a stage's connector: it listens on the stage's port and dials the stage before it.

        Args:
            overrides: Keys of `ConnectorConfig`; they replace what the file and its edges say. `rank` and `replica`
                enter into the ports of both ends. `role`, `from_stage` and `to_stage` choose among the stage's edges
                where one connector cannot serve them all.

        Raises:
            ConfigError: there is no such stage or edge, its connectors are not ours or contradict each other, or a
                value is not allowed.
        """
        inputs, outputs = self._edges_of(stage_id, overrides)
        dial = self._definitions[inputs[0].connector] if inputs else None
        listen = self._definitions[outputs[0].connector] if outputs else None
        role = "receiver" if listen is None else "sender" if dial is None else "both"
        if dial is not None and listen is not None:
            self._check_agreement(stage_id, listen, dial)
        own = self._definitions[(outputs or inputs)[0].connector]
        stated = own.config()
        if "role" in own.extra and stated.role != role and "role" not in overrides:
            why = f"{show(stated.role)} is not allowed; the edges make stage {stage_id} a {role}: leave the key out"
            raise own.refused("role", stated.role, why)
        values = {
            **own.values(),
            "role": role,
            "stage_id": stage_id,
            "from_stage": inputs[0].from_stage if inputs else stage_id,
            "to_stage": (outputs[0].to_stage if len(outputs) == 1 else None) if outputs else stage_id,
        }
        try:
            place = ConnectorConfig.from_dict({**values, **{key: overrides[key] for key in _PLACE if key in overrides}})
            if "zmq_port" not in overrides:
                values["zmq_port"] = _port(stated.zmq_port, stage_id, place)
            if dial is not None:
                upstream = dial.config()
                values["sender_host"] = upstream.sender_host or upstream.host
                values["sender_zmq_port"] = upstream.sender_zmq_port
                values["curve_sender_key"] = upstream.curve_sender_key
                if upstream.sender_zmq_port is None and "sender_zmq_port" not in overrides:
                    values["sender_zmq_port"] = _port(upstream.zmq_port, inputs[0].from_stage, place) or None
            return ConnectorConfig.from_dict({**values, **overrides})
        except ConfigError as error:
            raise located(error, self.path, None, f"stage {stage_id}") from None

    def is_ours(self, edge: Edge) -> bool:
        """Whether an edge goes by a connector that trio_mori can be."""
        return self._definitions[edge.connector].is_ours

    def name_of(self, edge: Edge) -> str:
        """The name of the connector by which it goes, such as ``SharedMemoryConnector``."""
        return self._definitions[edge.connector].name

    def _edges_of(self, stage_id: int, overrides: Mapping[str, object]) -> tuple[list[Edge], list[Edge]]:
        """The inputs, at most one, and the outputs, all through one definition, that a connector is to serve."""
        if stage_id not in self.stages:
            known = ", ".join(map(str, self.stages))
            raise self._refused("stage_id", stage_id, f"there is no stage {show(stage_id)}; there are {known}")
        role, source, target = (overrides.get(key) for key in ("role", "from_stage", "to_stage"))
        inputs = [
            edge
            for edge in self.edges
            if edge.to_stage == stage_id and role != "sender" and source in (None, stage_id, edge.from_stage)
        ]
        outputs = [
            edge
            for edge in self.edges
            if edge.from_stage == stage_id and role != "receiver" and target in (None, stage_id, edge.to_stage)
        ]
        if not inputs and not outputs:
            edges = ", ".join(map(str, self.edges)) or "none"
            chosen = ", ".join(f"{key}={show(value)}" for key, value in overrides.items() if key in _CHOOSING)
            why = f"stage {stage_id} has no edge{chosen and ' with ' + chosen}; the edges are {edges}"
            raise self._refused("stage_id", stage_id, why)
        if len(inputs) > 1:
            ways = " or ".join(f"from_stage={edge.from_stage}" for edge in inputs)
            raise self._refused("from_stage", source, f"stage {stage_id} needs a connector for each input; give {ways}")
        if len({edge.connector for edge in outputs}) > 1:
            ways = " or ".join(f"to_stage={edge.to_stage} ({edge.connector})" for edge in outputs)
            why = f"the outputs of stage {stage_id} go through different connectors; give {ways}"
            raise self._refused("to_stage", target, why)
        return inputs, outputs

    def _check_agreement(self, stage_id: int, listen: Definition, dial: Definition) -> None:
        ours, theirs = (attrs.asdict(definition.config(), recurse=False) for definition in (listen, dial))
        for key in KEYS:
            if key not in _MAY_DIFFER and ours[key] != theirs[key]:
                why = (
                    f"{show(ours[key])} is not allowed with {show(theirs[key])} in {dial.where}, line "
                    f"{dial.line_of(key)}: stage {stage_id} has one connector for both; give both the same"
                )
                raise listen.refused(key, ours[key], why)

    def _refused(self, key: str, value: object, why: str) -> ConfigError:
        return located(ConfigError(why, key=key, value=value), self.path, None, None)


def load_deploy(path: str | os.PathLike[str]) -> DeployFile:
    """Read the connectors and edges of a deploy file, and check all that is ours in it.

    Raises:
        ConfigError: names the file, the line, the key and the value, and says what is allowed.
    """
    content = read_deploy(os.fspath(path))
    for definition in content.definitions.values():
        if definition.is_ours:
            definition.config()
    _check_ports(content)
    return DeployFile(content.path, content.async_chunk, content.stages, content.edges, content.definitions)


@attrs.frozen
class _Listener:
    """Where a stage would listen."""

    stage: int
    port: int
    config: ConnectorConfig
    definition: Definition


def _check_ports(content: DeployContent) -> None:
    """Refuse a file by which two stages of one machine would listen on one port."""
    listeners: list[_Listener] = []
    for stage, connector in dict.fromkeys((edge.from_stage, edge.connector) for edge in content.edges):
        definition = content.definitions[connector]
        if not definition.is_ours:
            continue
        config = definition.config()
        try:
            port = _port(config.zmq_port, stage, config)
        except ConfigError as error:
            raise definition.located(error) from None
        for other in listeners:
            if 0 < port == other.port and stage != other.stage and _same_machine(config, other.config):
                why = (
                    f"{config.zmq_port} is not allowed; stage {stage} would listen on port {port}, as stage "
                    f"{other.stage} does by {other.definition.where}, line {other.definition.line_of('zmq_port')}; "
                    f"give both the same zmq_port, from which they count, or leave 16 between"
                )
                raise definition.refused("zmq_port", config.zmq_port, why)
        listeners.append(_Listener(stage, port, config, definition))


def _port(base: int, stage: int, place: ConnectorConfig) -> int:
    """Where a stage listens; 0 if it takes any free port."""
    return base and port_for(base, stage=stage, rank=place.rank, replica=place.replica)


def _same_machine(one: ConnectorConfig, other: ConnectorConfig) -> bool:
    """Whether two listeners could meet: only two explicit, different addresses cannot."""
    return one.host == other.host or bool({one.host, other.host} & {AUTO, *WILDCARDS})
