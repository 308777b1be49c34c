"""How the code is written: sizes, docstrings, and the exceptions that docstrings promise."""

import ast
import builtins
import inspect
import re
from collections.abc import Iterator

import pytest
from sources import PACKAGE, ROOT, Source, definitions, is_public, sources

from mamba_cache import errors

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40
LONG_MARKER = "# Long: "  # above a function, with the reason why it is not split
UNFINISHED = re.compile(r"\b(TO[D]O|FIX[M]E|X{3}|HA[C]K)\b")

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef

every_module = pytest.mark.parametrize("source", sources(PACKAGE), ids=lambda source: source.name)
every_file = pytest.mark.parametrize(
    "source",
    sources(PACKAGE, "tests", "examples", "docs"),
    ids=lambda source: source.name,
)
every_text = pytest.mark.parametrize(
    "name",
    [
        path.relative_to(ROOT).as_posix()
        for folder in (".", "docs/**", "mamba_cache/**", "tests/**", "examples/**")
        for pattern in ("*.md", "*.py", "*.toml", "*.txt")
        for path in sorted(ROOT.glob(f"{folder}/{pattern}"))
        if not {"_build", "api"} & set(path.parts)
    ],
)


def first_line(node: Function) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def code_lines(node: Function) -> int:
    """Lines of a function, its docstring left out."""
    total = (node.end_lineno or node.lineno) - first_line(node) + 1
    if ast.get_docstring(node) is None:
        return total
    docstring = node.body[0]
    return total - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


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


@every_file
def test_files_are_short(source: Source) -> None:
    assert len(source.lines) <= MAX_FILE_LINES


@every_file
def test_functions_are_short(source: Source) -> None:
    too_long = {
        name: code_lines(node)
        for name, node in definitions(source.tree)
        if isinstance(node, FUNCTIONS)
        and code_lines(node) > MAX_FUNCTION_LINES
        and not source.lines[first_line(node) - 2].strip().startswith(LONG_MARKER)
    }
    assert too_long == {}


@every_text
def test_nothing_is_left_for_later(name: str) -> None:
    assert UNFINISHED.findall((ROOT / name).read_text(encoding="utf-8")) == []


@every_module
def test_public_names_have_docstrings(source: Source) -> None:
    documented = [(source.module, source.tree), *public_definitions(source)]
    inner = {name for name, node in documented if isinstance(node, FUNCTIONS)}
    missing = [
        name
        for name, node in documented
        if len((ast.get_docstring(node) or "").split()) < 2
        and not any(name.startswith(f"{outer}.") for outer in inner)
    ]
    assert missing == []


@every_module
def test_promised_exceptions_exist(source: Source) -> None:
    for name, node in [(source.module, source.tree), *definitions(source.tree)]:
        unknown = {e for e in promised(ast.get_docstring(node)) if not is_exception(e)}
        assert not unknown, name


@every_module
def test_raised_exceptions_are_promised(source: Source) -> None:
    for name, node in methods_and_functions(source):
        assert raised(node) <= promised(ast.get_docstring(node)), name


@every_module
def test_constructors_exceptions_are_promised(source: Source) -> None:
    """The class docstring speaks for `__init__`."""
    for name, node in definitions(source.tree):
        if isinstance(node, ast.ClassDef) and is_public(name):
            for method in node.body:
                if isinstance(method, FUNCTIONS) and method.name in ("__init__", "__post_init__"):
                    assert raised(method) <= promised(ast.get_docstring(node)), name


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
    assert code_lines(function) == 4
