"""Style rules beyond ruff: exceptions in docstrings, clocks in tests.

Each rule is one test that lists every breach.
"""

import ast
import builtins
import importlib
import inspect
import json
import re
from collections.abc import Iterator

from sources import PACKAGE, ROOT, Source, definitions, is_public, sources

from mamba_cache import errors

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef

MODULES = [source for source in sources(PACKAGE) if source.path.name != "__main__.py"]
# Exported names; names of other modules are internal to the package.
EXPORTED = {
    name
    for source in MODULES
    if source.path.name == "__init__.py" or source.module.count(".") == 1
    for name in getattr(importlib.import_module(source.module), "__all__", ())
    if not source.module.split(".")[-1].startswith("_")
}
# These make faults and clocks; commands beside the tests print measured times.
READ_CLOCKS = {
    f"tests/support/{name}.py"
    for name in ("clocks", "faulty_store", "store_kill_rig", "tier_fault_rig")
}
CLOCK = re.compile(r"^\s*(?:import|from) time(?:it)?\b|(?<![?&])\b(?:timeout|deadline)=(?!None\b)")


def public_definitions(source: Source) -> Iterator[tuple[str, ast.AST]]:
    """Return a package's exported classes, their methods, and its exported functions."""
    for name, node in definitions(source.tree):
        decorators = {ast.unparse(d) for d in getattr(node, "decorator_list", [])}
        second_half = any(d.endswith(".setter") for d in decorators) or "overload" in decorators
        is_exported = name.split(".")[0] in EXPORTED
        if is_exported and all(is_public(part) for part in name.split(".")) and not second_half:
            yield name, node


def methods_and_functions(source: Source) -> Iterator[tuple[str, Function]]:
    """Return public functions and methods of public classes, without nested functions."""
    inner = {
        child
        for _, node in definitions(source.tree)
        if isinstance(node, FUNCTIONS)
        for child in ast.walk(node)
        if child is not node
    }
    for name, node in public_definitions(source):
        if isinstance(node, FUNCTIONS) and node not in inner:
            yield name, node


def promised(docstring: str | None) -> set[str]:
    """Return the names in the `Raises:` section of a Google style docstring."""
    section = re.search(r"^Raises:\n((?:[ ]+.*\n?|\n)*)", inspect.cleandoc(docstring or ""), re.M)
    return set(re.findall(r"^    (\w+):", section[1], re.M)) if section else set()


def raised(node: Function) -> set[str]:
    """Return exceptions of the package's tree that a function's own statements raise."""
    names: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Raise) and child.exc is not None:
            exception = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            names.add(ast.unparse(exception).split(".")[-1])
    return names & set(errors.__all__)


def is_exception(source: Source, name: str) -> bool:
    """Return whether a name means an exception in that module."""
    module = importlib.import_module(source.module)
    found = getattr(module, name, None) or getattr(errors, name, None)
    found = found or getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def test_no_test_decides_by_a_clock() -> None:
    """The machine may be busy. ``work.lines_executed`` counts; ``clocks.Clock`` is turned by hand.

    Timed code belongs into a benchmark, or needs a GPU and a machine for itself.
    """
    found = [
        f"{source.name}: {line.strip()}"
        for source in sources("tests")
        if source.path.name.startswith("test_") or "/support/" in source.name
        if source.name not in READ_CLOCKS and not source.name.startswith("tests/gpu/")
        for line in source.lines
        if CLOCK.search(line)
    ]
    assert found == []


def test_explained_mutants_are_on_lines_that_exist() -> None:
    """``python tests/mutation`` refuses to run otherwise: each explanation needs its line."""
    explained = json.loads((ROOT / "tests/mutation/explained.json").read_text(encoding="utf-8"))
    gone = [
        f"{name}: {line}"
        for name, lines in explained.items()
        for line in lines
        if line not in map(str.strip, (ROOT / name).read_text(encoding="utf-8").splitlines())
    ]
    assert gone == []


def test_docstrings_list_the_raised_exceptions() -> None:
    """An exported function lists each package exception that it raises itself in ``Raises:``.

    A class's docstring covers its ``__init__``. Each name in the section is an exception.
    """
    breaches = []
    for source in MODULES:
        constructors = [
            (name, method, node)
            for name, node in definitions(source.tree)
            if isinstance(node, ast.ClassDef) and name in EXPORTED
            for method in node.body
            if isinstance(method, FUNCTIONS) and method.name in ("__init__", "__post_init__")
        ]
        functions = [(name, node, node) for name, node in methods_and_functions(source)]
        for name, code, documented in constructors + functions:
            missing = raised(code) - promised(ast.get_docstring(documented))
            breaches += [f"{source.name}: {name} raises {exception}" for exception in missing]
        for name, node in [(source.module, source.tree), *definitions(source.tree)]:
            unknown = {e for e in promised(ast.get_docstring(node)) if not is_exception(source, e)}
            breaches += [f"{source.name}: {name} names {exception}" for exception in unknown]
    assert breaches == []


def test_reading_of_docstrings() -> None:
    function = ast.parse(
        'def f(x):\n    """Does.\n\n    Args:\n        x: Any.\n\n    Raises:\n'
        "        BudgetError: If\n            so.\n\n        KeyError: If not.\n\n"
        '    Returns:\n        y: One.\n    """\n    if x:\n        raise errors.BudgetError()\n'
        "    raise KeyError\n"
    ).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert promised(ast.get_docstring(function)) == {"BudgetError", "KeyError"}
    assert raised(function) == {"BudgetError"}
