"""Imports point down: from the shim to the connector, to its parts, to the rules, which know neither trio nor zmq."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "trio_mori"
SOURCES = [*sorted((ROOT / PACKAGE).rglob("*.py")), *sorted((ROOT / "adapters").rglob("*.py"))]

# From bottom to top; a module imports from lower layers, and within its own layer never in a circle. A name stands for
# the module, for everything in a package of that name, and with a star for all that begin so.
LAYERS = (
    ("_errors",),
    ("_protocol",),
    ("abc",),
    (
        *("_allowed", "_config", "_endpoint", "_deploy*", "_yaml", "_traffic", "_offers", "_link", "_scope", "_zm*"),
        *("_unix*", "_pool", "_buffer", "_payload*", "_stock_payload", "_engines", "_lease", "_arrival", "_gpu"),
        *(
            "_keys",
            "_key_files",
            "_events",
            "_room_watch",
            "_log_limit",
            "_quarantine",
            "_pages",
            "_spare",
            "_descriptors",
            "_presence",
            "_process_watch",
            "_sender_links",
            "_afterwork",
            "_heartbeat",
        ),
    ),
    ("_stock", "_statistics", "_stock_reception", "_chunks"),
    ("_upstream", "_reception", "_staging"),
    ("_sender", "_receiver"),
    ("_inquiry", "_address", "_port"),
    ("_figures", "_source"),
    ("_connector",),
    ("_opening",),
    ("_entered", "_portal_calls"),
    ("_portal",),
    ("_held", "_blocks"),
    ("blocking",),
    ("testing", "metrics", "aio", "__main__"),
)

# Layers whose modules know nothing of each other.
APART = frozenset({4, 5, 6})

# What a caller may wait on, what a clock is, and where bytes come from: none of it is for the rules.
NOT_IN_RULES = frozenset(
    {"asyncio", "concurrent", "queue", "select", "selectors", "socket", "ssl", "subprocess", "threading", "time"}
)
RULES_MAY_IMPORT = frozenset({"msgspec", "attrs", "sortedcontainers"}) | sys.stdlib_module_names - NOT_IN_RULES


@attrs.frozen
class Import:
    """One import: which module of ours has it, in which line, and what it names."""

    importer: str
    line: int
    target: str

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    base = ROOT if path.is_relative_to(ROOT / PACKAGE) else ROOT / "adapters"
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def imports_in(module: str, source: str, *, is_package: bool) -> Iterator[Import]:
    """Every import of a module, also those inside functions and those for type checkers."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{target}.{alias.name}"
                yield Import(module, node.lineno, whole if whole in MODULES else target)


def layer_of(module: str) -> int | None:
    """How high a module of trio_mori stands; None for the package itself, whose names are only ever looked up."""
    if module == PACKAGE:
        return None
    name = module.split(".")[1]
    found = [
        height
        for height, layer in enumerate(LAYERS)
        for entry in layer
        if entry == name or (entry.endswith("*") and name.startswith(entry[:-1]))
    ]
    assert len(found) == 1, f"{module} stands in {len(found)} layers: give it one in LAYERS"
    return found[0]


def arrows_up(imports: list[Import]) -> list[Import]:
    """The imports that point up, or to the side where a layer's modules are to know nothing of each other."""
    wrong = []
    for each in imports:
        if each.top != PACKAGE or each.importer.partition(".")[0] != PACKAGE or each.importer == PACKAGE:
            continue
        here, there = layer_of(each.importer), layer_of(each.target)
        aside = here == there and here in APART and each.importer != each.target
        if here is None or there is None or there > here or aside:
            wrong.append(each)
    return wrong


ALL = [
    each
    for name, path in MODULES.items()
    for each in imports_in(name, path.read_text(), is_package=path.name == "__init__.py")
]


def shown(imports: list[Import]) -> list[str]:
    return [str(each) for each in imports]


@pytest.mark.deterministic
def test_no_import_points_up() -> None:
    assert len(ALL) > 100
    assert shown(arrows_up(ALL)) == []


@pytest.mark.deterministic
@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("trio_mori._protocol.wire", "from .. import abc"),
        ("trio_mori._protocol.wire", "def late():\n    from trio_mori import _link"),
        ("trio_mori._pool", "from ._sender import Sender"),
        ("trio_mori._sender", "from ._receiver import Receiver"),
        ("trio_mori._connector", "if TYPE_CHECKING:\n    from . import testing"),
        ("trio_mori._connector", "import trio_mori"),
    ],
)
def test_an_arrow_up_is_found_wherever_it_hides(module: str, line: str) -> None:
    assert len(arrows_up(list(imports_in(module, line, is_package=False)))) == 1


@pytest.mark.deterministic
def test_no_module_imports_itself_by_a_detour() -> None:
    graph: dict[str, set[str]] = {}
    for each in ALL:
        if each.importer != PACKAGE and each.target in MODULES and each.target != each.importer:
            graph.setdefault(each.importer, set()).add(each.target)
    tuple(TopologicalSorter(graph).static_order())


@pytest.mark.deterministic
def test_the_rules_import_neither_clocks_nor_sockets_nor_libraries_that_have_them() -> None:
    foreign = [
        each
        for each in ALL
        if each.importer.startswith(f"{PACKAGE}._protocol") and each.top not in RULES_MAY_IMPORT | {PACKAGE}
    ]
    assert shown(foreign) == []


@pytest.mark.deterministic
def test_a_portal_knows_nothing_of_connectors() -> None:
    names = {f"{PACKAGE}.{name}" for name in ("_portal", "_portal_calls", "_entered", "_descriptors", "_errors")}
    own = {each.target for each in ALL if each.importer in names and each.top == PACKAGE}
    assert own <= names


@pytest.mark.deterministic
@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("zmq", ("_zmq",)),
        ("mori", ("_engines._mori",)),
        ("prometheus_client", ("metrics",)),
        # The second one guards the environment, which the trio runs of a process share.
        ("threading", ("_portal", "_engines._mori_options")),
    ],
)
def test_a_library_has_one_home(library: str, homes: tuple[str, ...]) -> None:
    core = [each for each in ALL if each.importer.partition(".")[0] == PACKAGE and each.top == library]
    allowed = tuple(f"{PACKAGE}.{home}" for home in homes)
    assert shown([each for each in core if not each.importer.startswith(allowed)]) == []


def changes_environment(source: str) -> list[int]:
    """The lines in which something other than reading is done with the environment, as far as it is called that."""
    tree = ast.parse(source)
    reads: set[ast.AST] = set()
    for node in ast.walk(tree):
        if (isinstance(node, ast.Attribute) and node.attr in ("get", "copy", "items", "keys")) or (
            isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
        ):
            reads.add(node.value)
        elif isinstance(node, ast.Compare):
            reads.update(node.comparators)
        elif isinstance(node, ast.Dict):
            reads.update(value for key, value in zip(node.keys, node.values, strict=True) if key is None)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (node.attr in ("putenv", "unsetenv") or node.attr.startswith("environ")):
            found += [] if node in reads else [node.lineno]
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [node.lineno for alias in node.names if alias.name.startswith(("environ", "putenv", "unsetenv"))]
    return found


@pytest.mark.deterministic
def test_the_environment_is_changed_in_one_place() -> None:
    found = {name for name, path in MODULES.items() if changes_environment(path.read_text())}
    assert found == {f"{PACKAGE}._engines._mori_options"}


@pytest.mark.deterministic
@pytest.mark.parametrize(
    "line",
    [
        "os.environ['A'] = 'b'",
        "os.environ['A'] += 'b'",
        "del os.environ['A']",
        "os.environ |= {}",
        "os.environ.update(A='b')",
        "os.environ.setdefault('A', 'b')",
        "os.environ.pop('A')",
        "environment = os.environ",
        "change(os.environ)",
        "os.environb[b'A'] = b'b'",
        "os.putenv('A', 'b')",
        "from os import environ",
    ],
)
def test_a_change_of_the_environment_is_found_however_it_is_written(line: str) -> None:
    assert changes_environment(f"import os\n{line}") == [2]
    assert (
        changes_environment("import os\nos.environ['A'], os.environ.get('B'), 'C' in os.environ, {**os.environ}") == []
    )


@pytest.mark.deterministic
def test_sender_and_receiver_are_given_their_engine() -> None:
    givers = (f"{PACKAGE}._engines", f"{PACKAGE}._opening", f"{PACKAGE}.testing")
    takers = [
        each
        for each in ALL
        if each.target.startswith(f"{PACKAGE}._engines")
        and each.importer != PACKAGE
        and not each.importer.startswith(givers)
    ]
    assert shown(takers) == []


@pytest.mark.deterministic
def test_the_adapters_use_public_names_only() -> None:
    private = [
        each
        for each in ALL
        if each.importer.partition(".")[0] != PACKAGE and each.top == PACKAGE and "._" in each.target
    ]
    assert shown(private) == []


@pytest.mark.parametrize("module", ["trio_mori", "trio_mori._protocol.wire"])
def test_importing_it_loads_neither_torch_nor_zmq_nor_trio(module: str) -> None:
    program = f"import sys, {module}; print(sorted({{'torch', 'zmq', 'trio', 'numpy', 'mori'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=180, check=True
    )
    assert done.stdout == "[]\n"
