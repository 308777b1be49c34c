"""Each room of the package imports only from rooms below its own floor."""

import ast
import re
import sys

import pytest
from sources import PACKAGE, ROOT, Source, sources

# A room is a module or package right below `mamba_cache`. docs/explanation/architecture.md says
# what each holds; `mamba_cache/__init__.py` is the front door on top, which no room goes through.
FLOORS = {
    "__init__": 8,
    "cli": 7,
    "__main__": 6,
    "bench": 6,
    "engine": 5,
    "models": 5,
    "integrations": 5,
    "context": 4,
    "align": 4,
    "slots": 3,
    "states": 2,
    "blocks": 2,
    "metadata": 2,
    "protocols": 1,
    "config": 1,
    "_eviction_queue": 1,
    "_guard": 1,
    "_in_flight": 1,
    "_indices": 1,
    "_lasting": 1,
    "_weak_callback": 1,
    "_checks": 0,
    "_extras": 0,
    "errors": -1,  # which even the lowest floor raises
    "_version": 0,
}

# Rooms below that a room leaves alone all the same: blocks and slots can be used one without
# the other.
FORBIDDEN = {"slots": {"blocks", "metadata"}}

EXTRAS = {"rich", "typer", "prometheus_client", "transformers", "megatron"}
UPPER_FLOORS = {"numpy", "torch", *EXTRAS}
THIRD_PARTY = {
    **dict.fromkeys(("bench", "cli", "__main__", "engine", "models", "integrations"), UPPER_FLOORS),
    "context": {"numpy", "torch", "triton"},
    "align": {"numpy", "torch", "triton"},
    "slots": {"numpy", "torch"},
    "states": {"numpy", "torch", "triton"},
    "blocks": {"numpy", "xxhash"},
    "metadata": {"numpy", "torch"},
    "_lasting": {"torch"},
}

SOURCES = sources(PACKAGE)


def room_of(module: str) -> str:
    """`mamba_cache.slots.pool` is in the room `slots`; `mamba_cache` is its own front door."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported_modules(source: Source, node: ast.Import | ast.ImportFrom) -> list[str]:
    """Absolute names that an import statement reaches."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = source.module.split(".")
        if source.path.name != "__init__.py":
            package.pop()
        package = package[: len(package) - node.level + 1]
        base = ".".join([*package, *base.split(".")]).strip(".")
    if base == PACKAGE:  # `from mamba_cache import slots` reaches the room, not the front door
        return [f"{PACKAGE}.{a.name}" if a.name in FLOORS else PACKAGE for a in node.names]
    return [base]


def imports(source: Source, tree: ast.AST) -> list[str]:
    nodes = (n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)))
    return [module for node in nodes for module in imported_modules(source, node)]


def own(modules: list[str]) -> list[str]:
    return [module for module in modules if module.split(".")[0] == PACKAGE]


def foreign(modules: list[str]) -> set[str]:
    tops = {module.split(".")[0] for module in modules}
    return tops - set(sys.stdlib_module_names) - {PACKAGE}


def test_every_room_has_a_floor() -> None:
    assert [source.name for source in SOURCES if room_of(source.module) not in FLOORS] == []


def test_imports_go_down() -> None:
    breaches = []
    for source in SOURCES:
        room = room_of(source.module)
        for module in own(imports(source, source.tree)):
            target = room_of(module)
            if target != room and FLOORS[target] >= FLOORS[room]:
                breaches.append(f"{source.name} imports {module}, which is not below it")
            if target in FORBIDDEN.get(room, ()):
                breaches.append(f"{source.name} must not know {module}")
    assert breaches == []


def test_third_party_imports_are_those_of_the_room() -> None:
    breaches = {
        source.name: foreign(imports(source, source.tree))
        - THIRD_PARTY.get(room_of(source.module), set())
        for source in SOURCES
    }
    assert {name: modules for name, modules in breaches.items() if modules} == {}


def may_fail(tree: ast.AST) -> set[ast.AST]:
    """Everything inside a `try` that catches ImportError."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = {ast.unparse(handler.type) for handler in node.handlers if handler.type}
            if "ImportError" in caught:
                found.update(child for statement in node.body for child in ast.walk(statement))
    return found


def imports_inside_functions(tree: ast.AST) -> set[int]:
    """Lines that import inside a function, without `try`."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inside = {n for f in ast.walk(tree) if isinstance(f, functions) for n in ast.walk(f)}
    hidden = {n.lineno for n in inside if isinstance(n, (ast.Import, ast.ImportFrom))}
    return hidden - {n.lineno for n in may_fail(tree) if isinstance(n, ast.stmt)}


def test_imports_inside_functions_are_those_that_may_fail() -> None:
    """Any other would hide a cycle."""
    found = {source.name: imports_inside_functions(source.tree) for source in SOURCES}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("module", "statement", "expected"),
    [
        ("mamba_cache/slots/pool.py", "import torch.nn", ["torch.nn"]),
        ("mamba_cache/slots/pool.py", "from ..blocks import pool", ["mamba_cache.blocks"]),
        ("mamba_cache/slots/pool.py", "from . import policy", ["mamba_cache.slots"]),
        ("mamba_cache/slots/__init__.py", "from .pool import P", ["mamba_cache.slots.pool"]),
        ("mamba_cache/slots/pool.py", "from mamba_cache import blocks", ["mamba_cache.blocks"]),
        ("mamba_cache/slots/pool.py", "from mamba_cache import Request", ["mamba_cache"]),
        ("mamba_cache/slots/pool.py", "from .. import blocks", ["mamba_cache.blocks"]),
    ],
)
def test_reading_of_imports(module: str, statement: str, expected: list[str]) -> None:
    """The walk itself: relative and absolute imports name what they reach."""
    source = Source(SOURCES[0].path.parent.parent / module)
    assert imports(source, ast.parse(statement)) == expected


def test_the_documentation_shows_these_floors() -> None:
    """The table names every room; the picture names those that have no underscore."""
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (\d) \| ([^|]*) \| [^|]* \| ([^|]*) \|$", page, flags=re.MULTILINE)
    shown = {room: int(floor) for floor, rooms, _ in table for room in re.findall(r"`(\w+)", rooms)}
    # The table counts as the first floor what only the first floor stands on.
    rooms = {room: max(floor, 1) for room, floor in FLOORS.items() if "version" not in room}
    assert shown == {room: floor for room, floor in rooms.items() if "__" not in room}
    allowed = {room: text for _, rooms, text in table for room in re.findall(r"`(\w+)", rooms)}
    for room, modules in THIRD_PARTY.items():
        wanted = "any, extras too" if modules >= EXTRAS else ", ".join(sorted(modules))
        assert allowed.get(room, wanted) == wanted, room
    picture = (ROOT / "docs" / "figures" / "house.svg").read_text(encoding="utf-8")
    drawn = set(re.findall(r"<text[^>]*>([a-z]+)</text>", picture))
    assert drawn >= {room for room in shown if not room.startswith("_")}
