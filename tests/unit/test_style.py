"""How the code is written: docstrings, the exceptions that they promise, and no clocks in tests.

Each rule is one test, which names every breach.
"""

import ast
import builtins
import inspect
import re
from collections.abc import Iterator

from sources import PACKAGE, ROOT, Source, definitions, is_public, sources

from mamba_cache import errors

UNFINISHED = re.compile(r"\b(TO[D]O|FIX[M]E|X{3}|HA[C]K)\b")

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef

MODULES = sources(PACKAGE)
TEXTS = [
    path
    for folder in (".", "docs/**", "mamba_cache/**", "tests/**", "examples/**")
    for pattern in ("*.md", "*.py", "*.toml", "*.txt")
    for path in sorted(ROOT.glob(f"{folder}/{pattern}"))
    if not {"_build", "api"} & set(path.parts)
]

# These are no tests, or print what they have measured.
READ_CLOCKS = {
    "tests/conftest.py",
    "tests/support/clocks.py",
    "tests/fault_table.py",
    "tests/interrupt_table.py",
    "tests/mutation/__main__.py",
    "tests/mutation/search.py",
}
CLOCKS = {"time", "timeit"}
TIMED = {"timeout", "deadline"}  # arguments


def public_definitions(source: Source) -> Iterator[tuple[str, ast.AST]]:
    """Classes, functions and methods that a user may name; an override repeats no docstring."""
    for name, node in definitions(source.tree):
        decorators = {ast.unparse(d) for d in getattr(node, "decorator_list", [])}
        second_half = any(d.endswith(".setter") for d in decorators) or "overload" in decorators
        if all(is_public(part) for part in name.split(".")) and not second_half:
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


def is_exception(name: str) -> bool:
    found = getattr(errors, name, None) or getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def reads_a_clock(tree: ast.AST) -> list[int]:
    """Lines that import a clock, or wait for something no longer than a time."""
    lines = []
    for node in ast.walk(tree):
        names: set[str | None] = set()
        if isinstance(node, ast.Import):
            names = CLOCKS & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = CLOCKS & {node.module}
        elif isinstance(node, ast.Call):
            names = {
                keyword.arg
                for keyword in node.keywords
                if keyword.arg in TIMED and ast.unparse(keyword.value) != "None"
            }
        if names:
            lines.append(node.lineno)
    return lines


def test_no_test_decides_by_a_clock() -> None:
    """The machine may be busy. ``work.lines_executed`` counts; ``clocks.Clock`` is turned by hand.

    What must be timed is a benchmark, or needs a GPU and a machine of its own.
    """
    found = {
        source.name: reads_a_clock(source.tree)
        for source in sources("tests")
        if source.name not in READ_CLOCKS and not source.name.startswith("tests/gpu/")
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_nothing_is_left_for_later() -> None:
    found = {path: UNFINISHED.findall(path.read_text(encoding="utf-8")) for path in TEXTS}
    assert {path: words for path, words in found.items() if words} == {}


def test_public_names_have_docstrings() -> None:
    missing = []
    for source in MODULES:
        documented = [(source.module, source.tree), *public_definitions(source)]
        inner = {name for name, node in documented if isinstance(node, FUNCTIONS)}
        missing += [
            f"{source.name}: {name}"
            for name, node in documented
            if len((ast.get_docstring(node) or "").split()) < 2
            and not any(name.startswith(f"{outer}.") for outer in inner)
        ]
    assert missing == []


def test_promised_exceptions_exist() -> None:
    unknown = [
        (source.name, name, exception)
        for source in MODULES
        for name, node in [(source.module, source.tree), *definitions(source.tree)]
        for exception in promised(ast.get_docstring(node))
        if not is_exception(exception)
    ]
    assert unknown == []


def test_raised_exceptions_are_promised() -> None:
    broken = [
        (source.name, name, raised(node) - promised(ast.get_docstring(node)))
        for source in MODULES
        for name, node in methods_and_functions(source)
        if not raised(node) <= promised(ast.get_docstring(node))
    ]
    assert broken == []


def test_constructors_exceptions_are_promised() -> None:
    """The class docstring speaks for `__init__`."""
    broken = [
        (source.name, name, raised(method) - promised(ast.get_docstring(node)))
        for source in MODULES
        for name, node in definitions(source.tree)
        if isinstance(node, ast.ClassDef) and is_public(name)
        for method in node.body
        if isinstance(method, FUNCTIONS) and method.name in ("__init__", "__post_init__")
        if not raised(method) <= promised(ast.get_docstring(node))
    ]
    assert broken == []


def test_reading_of_clocks() -> None:
    for line in ("import time", "from time import sleep", "run(timeout=3)", "wait(deadline=x)"):
        assert reads_a_clock(ast.parse(line)) == [1]
    for line in ("import clocks", "run(timeout=None)", "settings(max_examples=3)"):
        assert reads_a_clock(ast.parse(line)) == []


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
