"""The package follows its page on architecture: layers, and imports that go down only."""

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

from sources import PACKAGE, ROOT, Source, is_old_path, sources

EXTRAS = {
    *("prometheus_client", "transformers", "megatron", "msgspec", "scipy", "zmq"),
}
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
ROW = re.compile(
    r"^\| (?P<layer>\d) \| (?P<names>[^|]*) \| [^|]* \| (?P<imports>[^|]*) \| (?P<others>[^|]*) \|$"
)
SOURCES = sources(PACKAGE)
TOPS = {source.module.split(".")[1] for source in SOURCES if "." in source.module}


class Place(NamedTuple):
    """The table's place of a package, or of a module directly below ``mamba_cache``."""

    layer: int
    imports: str
    third_party: set[str]


def read_table(page: str) -> dict[str, Place]:
    """Return the table of layers. ``_*`` means private modules directly below ``mamba_cache``."""
    table = {}
    for row in filter(None, map(ROW.match, page.splitlines())):
        third_party = set(re.findall(r"\w+", row["others"])) - {"none"}
        if "extras" in third_party:
            third_party = third_party - {"extras"} | EXTRAS
        for name in re.findall(r"`([\w*]+)", row["names"]):
            names = [top for top in TOPS if top.startswith("_")] if name == "_*" else [name]
            place = Place(int(row["layer"]), row["imports"], third_party)
            table.update(dict.fromkeys(names, place))
    return table


TABLE = read_table(PAGE.read_text(encoding="utf-8"))


def top_of(module: str) -> str:
    """Return `cache` for `mamba_cache.cache.rows`; `mamba_cache` itself is the top layer."""
    return (*module.split("."), "")[1]


def may_import(source: str, target: str) -> bool:
    """Return whether the table lets one package import another."""
    if source in ("", target):  # the front door imports from everywhere, and nothing imports it
        return True
    if target == "":
        return False
    below = TABLE[target].layer
    layers = {int(number) for number in re.findall(r"layer (\d)", TABLE[source].imports)}
    if "all below" in TABLE[source].imports:
        layers |= set(range(TABLE[source].layer))
    return below in layers or f"`{target}`" in TABLE[source].imports


def imported_modules(source: Source, node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the absolute names that an import statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = source.module.split(".")
        if source.path.name != "__init__.py":
            package.pop()
        package = package[: len(package) - node.level + 1]
        base = ".".join([*package, *base.split(".")]).strip(".")
    if base == PACKAGE:  # `from mamba_cache import slots` reaches that package, not the front door
        return [f"{PACKAGE}.{a.name}" if a.name in TOPS else PACKAGE for a in node.names]
    return [base]


def imports(source: Source, tree: ast.AST) -> list[str]:
    nodes = (n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)))
    return [module for node in nodes for module in imported_modules(source, node)]


def test_the_table_names_every_package_and_no_other() -> None:
    old = {top_of(source.module) for source in SOURCES if is_old_path(source)} - {"metadata"}
    assert set(TABLE) == TOPS - old


def test_imports_go_down() -> None:
    """Imports follow the table and never use an old path."""
    old = {source.module for source in SOURCES if is_old_path(source)}
    breaches = []
    for source in SOURCES:
        top = top_of(source.module)
        for module in () if source.module in old else imports(source, source.tree):
            foreign = module.split(".")[0]
            if foreign != PACKAGE:
                third_party = TABLE[top].third_party if top else set()
                if foreign not in {*third_party, *sys.stdlib_module_names}:
                    breaches.append(f"{source.name} imports {module}")
            elif module in old or not may_import(top, top_of(module)):
                breaches.append(f"{source.name} imports {module}")
    assert breaches == []


def test_the_layers_that_the_page_counts_are_those_of_its_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    numbers = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    counted = re.findall(r"package has (\w+) layers", page)
    assert [numbers.index(word) for word in counted] == [len({p.layer for p in TABLE.values()})]


def test_reading_of_the_table() -> None:
    for source, target, allowed in (
        ("context", "slots", True),
        ("slots", "context", False),
        ("cache", "slots", False),
        ("cli", "reference", True),
        ("reference", "cli", False),
        ("reference", "integrations", False),
        ("cache", "", False),
        ("", "cli", True),
    ):
        assert may_import(source, target) is allowed, (source, target)


def test_reading_of_imports() -> None:
    """The walk resolves relative and absolute imports."""
    for module, statement, expected in (
        ("slots/pool.py", "import torch.nn", "torch.nn"),
        ("slots/pool.py", "from ..cache import rows", "mamba_cache.cache"),
        ("slots/pool.py", "from . import policy", "mamba_cache.slots"),
        ("slots/__init__.py", "from .pool import P", "mamba_cache.slots.pool"),
        ("slots/pool.py", "from mamba_cache import cache", "mamba_cache.cache"),
        ("slots/pool.py", "from mamba_cache import Request", "mamba_cache"),
        ("slots/pool.py", "from .. import cache", "mamba_cache.cache"),
    ):
        source = Source(Path(ROOT / PACKAGE / module))
        assert imports(source, ast.parse(statement)) == [expected]
