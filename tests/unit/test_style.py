"""What ruff does not see of how the code is written: exceptions in docstrings, clocks in tests.

Each rule is one test, which names every breach.
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
# What a package exports; names of other modules are for those who work on the package.
EXPORTED = {
    name
    for source in MODULES
    if source.path.name == "__init__.py" or source.module.count(".") == 1
    for name in getattr(importlib.import_module(source.module), "__all__", ())
    if not source.module.split(".")[-1].startswith("_")
}
# These make faults and clocks; commands beside the tests print what they have measured.
READ_CLOCKS = {
    f"tests/support/{name}.py"
    for name in ("clocks", "faulty_store", "store_kill_rig", "tier_fault_rig")
}
CLOCK = re.compile(r"^\s*(?:import|from) time(?:it)?\b|(?<![?&])\b(?:timeout|deadline)=(?!None\b)")


def public_definitions(source: Source) -> Iterator[tuple[str, ast.AST]]:
    """Classes, functions and methods of them that a package exports."""
    for name, node in definitions(source.tree):
        decorators = {ast.unparse(d) for d in getattr(node, "decorator_list", [])}
        second_half = any(d.endswith(".setter") for d in decorators) or "overload" in decorators
        is_exported = name.split(".")[0] in EXPORTED
        if is_exported and all(is_public(part) for part in name.split(".")) and not second_half:
            yield name, node


def methods_and_functions(source: Source) -> Iterator[tuple[str, Function]]:
    """Public functions, and methods of public classes, none that is inside another function."""
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
    """Names in the `Raises:` section of a Google style docstring."""
    section = re.search(r"^Raises:\n((?:[ ]+.*\n?|\n)*)", inspect.cleandoc(docstring or ""), re.M)
    return set(re.findall(r"^    (\w+):", section[1], re.M)) if section else set()


def raised(node: Function) -> set[str]:
    """Exceptions of the package's tree that a function's own statements raise."""
    names: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Raise) and child.exc is not None:
            exception = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            names.add(ast.unparse(exception).split(".")[-1])
    return names & set(errors.__all__)


def is_exception(source: Source, name: str) -> bool:
    """Whether a name means an exception to a reader of that module."""
    module = importlib.import_module(source.module)
    found = getattr(module, name, None) or getattr(errors, name, None)
    found = found or getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def test_no_test_decides_by_a_clock() -> None:
    """The machine may be busy. ``work.lines_executed`` counts; ``clocks.Clock`` is turned by hand.

    What must be timed is a benchmark, or needs a GPU and a machine of its own.
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
    """``python tests/mutation`` refuses to run otherwise: explanations go with their lines."""
    explained = json.loads((ROOT / "tests/mutation/explained.json").read_text(encoding="utf-8"))
    gone = [
        f"{name}: {line}"
        for name, lines in explained.items()
        for line in lines
        if line not in map(str.strip, (ROOT / name).read_text(encoding="utf-8").splitlines())
    ]
    assert gone == []


def test_docstrings_promise_what_is_raised() -> None:
    """Each exception of the package that an exported function raises itself is in its ``Raises:``.

    A class's docstring speaks for its ``__init__``. What is named there is an exception.
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
