"""YAML that remembers on which line each key stands, so that an error can say so."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import yaml

from ._errors import ConfigError

# Lists and mappings within each other. Deploy files have some six; Python's stack ends at some hundreds.
_MAX_DEPTH = 64


class Section(dict[object, object]):
    """A mapping of a YAML file, with the lines of its keys. Lines count from 1."""

    def __init__(self, line: int = 1) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[object, int] = {}

    def line_of(self, key: object) -> int:
        """Where a key stands; the line of the whole section for a key that it lacks."""
        return self.lines.get(key, self.line)


def read_yaml(path: str) -> object:
    """Read one YAML (or JSON) document; its mappings are `Section`s.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has a key twice. Says where.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", key="path", value=path, source=path) from error
    try:
        # _Loader is a SafeLoader: nothing named by the file is imported or called.
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}, line {mark.line + 1}" if mark else path
        raise ConfigError(f"{place}: not YAML: {error.problem or error.context}", key="", source=path) from error
    # PyYAML's conversions let these through: `!!int ""`, `2001-99-99`, `!!timestamp x`.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {error}", key="", source=path) from error


class _Loader(yaml.SafeLoader):
    """Builds a `Section` for each mapping, and refuses a key that is there twice (PyYAML keeps the last)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"it is nested more than {_MAX_DEPTH} levels deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: dict[object, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        # Here, and not where the mapping is built: by then the keys of a merge (`<<`) are among its own.
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in lines:
                    first = lines[key.tag, key.value]
                    raise _malformed(f"the key {key.value!r} is there twice, first on line {first}", key)
                lines[key.tag, key.value] = key.start_mark.line + 1
        return node

    def construct_section(self, node: yaml.MappingNode) -> Generator[Section, None, None]:
        section = Section(node.start_mark.line + 1)
        yield section  # before its values, which may refer to it
        self.flatten_mapping(node)
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key_node, yaml.ScalarNode):
                raise _malformed("a key is a list or a mapping", key_node)
            section[key] = self.construct_object(value_node, deep=True)
            section.lines[key] = key_node.start_mark.line + 1


def _malformed(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_section)
