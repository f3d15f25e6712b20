"""What a deploy file says about connectors, as it is written; `trio_mori._deploy` says what it means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import attrs

from ._allowed import misspelt, near, show
from ._config import ConnectorConfig, located, placed, warn_once
from ._errors import ConfigError
from ._yaml import Section, read_yaml

# The connectors that are ours, each with the engine that its name means where the file does not say.
_ENGINES = {"MoriTransferEngineConnector": "rdma", "TrioMoriConnector": "shm"}

# What is read of each part of the file.
_TOP = ("stages", "connectors", "async_chunk")
_STAGE = ("stage_id", "input_connectors", "output_connectors")
_DEFINITION = ("name", "extra")

# As many as `ConnectorConfig.stage_id` allows; ours have at most 16, for want of ports.
_STAGES = 2**31 - 1


@attrs.frozen
class Edge:
    """Two stages, and the definition of the connector through which one hands data to the other."""

    from_stage: int
    to_stage: int
    connector: str

    def __str__(self) -> str:
        return f"{self.from_stage}->{self.to_stage}"


@attrs.frozen
class Definition:
    """A connector as the file defines it: under `connectors`, or in place within a stage.

    Attributes:
        reference: What edges call it: its key under `connectors`, or the place in the stage.
        name: Which connector it is; not necessarily one of ours.
        extra: Its keys.
    """

    path: str
    reference: str
    name: str
    extra: Mapping[str, object]
    _in_place: bool
    _line: int
    _lines: Mapping[str, int]

    @property
    def is_ours(self) -> bool:
        """Whether it is a connector that trio_mori can be."""
        return self.name in _ENGINES

    def config(self) -> ConnectorConfig:
        """What it says by itself, without the edges.

        Raises:
            ConfigError: it is not ours, or a value is not allowed.
        """
        if not self.is_ours:
            why = f"{show(self.name)} is not a connector of trio_mori; give {' or '.join(_ENGINES)}"
            raise self.refused("name", self.name, why)
        return ConnectorConfig.from_dict(self.values(), source=self.path, where=self.where, line_of=self.line_of)

    def values(self) -> dict[str, object]:
        """Its keys, and the engine that its name means."""
        return {"backend_type": _ENGINES[self.name], **self.extra}

    @property
    def where(self) -> str:
        """The path to it within the file."""
        return self.reference if self._in_place else f"connectors.{self.reference}"

    def line_of(self, key: str) -> int:
        """Where a key stands; the line of the definition for one that it leaves out."""
        return self._lines.get(key, self._line)

    def is_same(self, other: Definition) -> bool:
        """Whether both ends of an edge may name these two: one definition, or two equal ones in place."""
        in_place = self._in_place and other._in_place
        return self is other or (in_place and (self.name, self.extra) == (other.name, other.extra))

    def located(self, error: ConfigError) -> ConfigError:
        """An error about one of its keys, saying where that stands."""
        return located(error, self.path, self.line_of(error.key), self.where)

    def refused(self, key: str, value: object, why: str) -> ConfigError:
        """A new error about one of its keys."""
        return self.located(ConfigError(f"{key}: {why}", key=key, value=value))


@attrs.frozen
class DeployContent:
    """What `read_deploy` found."""

    path: str
    async_chunk: bool
    stages: tuple[int, ...]
    edges: tuple[Edge, ...]
    definitions: Mapping[str, Definition]


@attrs.frozen
class _End:
    """One end of an edge, as a stage names it."""

    edge: tuple[int, int]
    definition: Definition
    line: int


def read_deploy(path: str) -> DeployContent:
    """Read a deploy file. The values of `extra` are not looked at.

    Raises:
        ConfigError: it is not YAML, or its stages, connectors and edges do not fit together.
    """
    return _Reader(path).read()


@attrs.frozen
class _Reader:
    path: str

    def read(self) -> DeployContent:
        top = read_yaml(self.path)
        if not isinstance(top, Section):
            raise self.refused("", top, 1, f"{show(top)} at top level is not allowed; give a mapping with stages in it")
        self.warn_of_misspelt(top, _TOP)
        async_chunk = top.get("async_chunk", True)
        if not isinstance(async_chunk, bool):
            why = f"async_chunk: {show(async_chunk)} is not allowed; give true or false"
            raise self.refused("async_chunk", async_chunk, top.line_of("async_chunk"), why)
        definitions: dict[str, Definition] = {}
        connectors = self.section(top, "connectors", "a mapping of connector definitions")
        for name, content in connectors.items():
            if not isinstance(name, str):
                why = f"connectors: {show(name)} is no name; names are strings"
                raise self.refused("connectors", name, connectors.line_of(name), why)
            definitions[name] = self.definition(content, name, connectors.line_of(name))
        stages = self.stages(top)
        edges: dict[tuple[int, int], _End] = {}
        for stage_id, stage in stages.items():
            self.warn_of_misspelt(stage, _STAGE, f"stage {stage_id}")
            for end in self.ends(stage_id, stage, definitions, self.meant(top, "connectors", _TOP)):
                self.join(edges, end, stages)
        used = {end.definition.reference: end.definition for end in edges.values()}
        ordered = tuple(Edge(*edge, edges[edge].definition.reference) for edge in sorted(edges))
        return DeployContent(self.path, async_chunk, tuple(stages), ordered, {**definitions, **used})

    def stages(self, top: Section) -> dict[int, Section]:
        given = top.get("stages")
        if not isinstance(given, list):
            old = " (stage_args and runtime.connectors, the older layout, are not read)" if "stage_args" in top else ""
            meant = self.meant(top, "stages", _TOP)
            what = f"{show(given)} is not allowed" if "stages" in top else "it is missing"
            why = f"stages: {what}; give a list of stages{old}{meant}"
            raise self.refused("stages", given, top.line_of("stages"), why)
        stages: dict[int, Section] = {}
        for stage in given:
            if not isinstance(stage, Section):
                why = f"stages: {show(stage)} is not allowed in it; each stage is a mapping"
                raise self.refused("stages", stage, top.line_of("stages"), why)
            number, line = stage.get("stage_id"), stage.line_of("stage_id")
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _STAGES:
                what = f"{show(number)} is not allowed" if "stage_id" in stage else "it is missing"
                meant = self.meant(stage, "stage_id", _STAGE)
                why = f"stage_id: {what}; give an integer from 0 to {_STAGES}{meant}"
                raise self.refused("stage_id", number, line, why)
            if number in stages:
                first = stages[number].line_of("stage_id")
                why = f"stage_id: {number} is not allowed twice; it is on line {first} already"
                raise self.refused("stage_id", number, line, why)
            stages[number] = stage
        return stages

    def definition(self, content: object, reference: str, line: int, *, in_place: bool = False) -> Definition:
        where = reference if in_place else f"connectors.{reference}"
        if not isinstance(content, Section):
            names = "the name of a connector, or " if in_place else ""
            why = f"{where}: {show(content)} is not allowed; give {names}a mapping with name and extra"
            raise self.refused(reference, content, line, why)
        name = content.get("name")
        if not isinstance(name, str):
            what = f"{show(name)} is not allowed" if "name" in content else "it is missing"
            meant = self.meant(content, "name", _DEFINITION)
            why = f"{where}: name: {what}; give {' or '.join(_ENGINES)}{meant}"
            raise self.refused("name", name, content.line_of("name"), why)
        self.warn_of_misspelt(content, _DEFINITION, where)
        extra = self.section(content, "extra", "a mapping of keys", where)
        keys: dict[str, object] = {}
        lines = {"name": content.line_of("name")}
        for key, value in extra.items():
            if not isinstance(key, str):
                why = f"{where}.extra: {show(key)} is no key; keys are strings"
                raise self.refused(show(key), value, extra.line_of(key), why)
            keys[key], lines[key] = value, extra.line_of(key)
        return Definition(self.path, reference, name, keys, in_place, line, lines)

    def ends(self, stage_id: int, stage: Section, definitions: Mapping[str, Definition], meant: str) -> Iterator[_End]:
        """The edges that a stage names, each seen from this stage.

        Args:
            meant: Where the definitions may be, if they are not where they should.
        """
        for side, prefix in (("input_connectors", "from_stage_"), ("output_connectors", "to_stage_")):
            section = self.section(
                stage, side, f"a mapping of {prefix}N to the name of a connector", f"stage {stage_id}"
            )
            for key, content in section.items():
                line = section.line_of(key)
                found = re.fullmatch(prefix + "([0-9]{1,10})", key) if isinstance(key, str) else None
                if found is None:
                    why = f"stage {stage_id}.{side}: {show(key)} is not allowed; give {prefix}N, N being a stage_id"
                    raise self.refused(show(key), content, line, why)
                where = f"stage {stage_id}.{side}.{found[0]}"
                if not isinstance(content, str):
                    definition = self.definition(content, where, line, in_place=True)
                elif content in definitions:
                    definition = definitions[content]
                else:
                    known = ", ".join(definitions) or "none"
                    remedy = near(content, definitions)
                    hint = f"{remedy and '; ' + remedy}{meant}"
                    why = f"{where}: {show(content)} is not defined; connectors has {known}{hint}"
                    raise self.refused(found[0], content, line, why)
                other = int(found[1])
                edge = (other, stage_id) if side == "input_connectors" else (stage_id, other)
                yield _End(edge, definition, line)

    def join(self, edges: dict[tuple[int, int], _End], end: _End, stages: Mapping[int, Section]) -> None:
        """Add one end of an edge, which has to fit the other end if that is there already."""
        text = "edge {}->{}".format(*end.edge)
        for stage in end.edge:
            if stage not in stages:
                why = f"{text}: there is no stage {stage}; there are {', '.join(map(str, stages))}"
                raise self.refused("stages", stage, end.line, why)
        if end.edge[0] == end.edge[1]:
            raise self.refused("stages", end.edge[0], end.line, f"{text}: a stage has no edge to itself")
        first = edges.setdefault(end.edge, end)
        if not end.definition.is_same(first.definition):
            ours, theirs = end.definition.reference, first.definition.reference
            why = f"{text}: {ours} here, but {theirs} on line {first.line}; both ends name the same connector"
            raise self.refused("connectors", ours, end.line, why)

    def meant(self, section: Section, key: str, known: Sequence[str]) -> str:
        """For an error: that a key which is missing may be there, misspelt."""
        found = None if key in section else misspelt(key, section, known)
        return "" if found is None else f"; did you mean {show(key)} by {show(found)} on line {section.line_of(found)}?"

    def warn_of_misspelt(self, section: Section, known: Sequence[str], where: str = "") -> None:
        """Warn of keys that are passed over, as all that are not ours, and hardly mean anything else than ours do."""
        for key in known:
            found = misspelt(key, section, known)
            if found is not None:
                text = f"{show(found)} is not read; did you mean {show(key)}?"
                line = section.line_of(found)
                warn_once(f"{self.path}:{line}:{found}", placed(text, self.path, line, where or None))

    def section(self, parent: Section, key: str, what: str, where: str = "") -> Section:
        """A mapping that may be left out."""
        given = parent.get(key)
        if given is None:
            return Section(parent.line)
        if not isinstance(given, Section):
            path = f"{where}.{key}" if where else key
            why = f"{path}: {show(given)} is not allowed; give {what}"
            raise self.refused(key, given, parent.line_of(key), why)
        return given

    def refused(self, key: str, value: object, line: int, why: str) -> ConfigError:
        return located(ConfigError(why, key=key, value=value), self.path, line, None)
