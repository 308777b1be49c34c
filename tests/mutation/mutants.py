"""Mutants: one small change each to one function, made by mutmut's operators on libcst's trees.

Where no test can notice a change, ``explained.json`` has the reason, by file and text of the line.
The reason of a block's first line holds for the whole block.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import libcst as cst
from libcst.metadata import (
    CodeRange,
    MetadataWrapper,
    PositionProvider,
    WhitespaceInclusivePositionProvider,
)
from mutmut.mutation.mutators import mutation_operators, operator_string

__all__ = ["EXPLAINED", "Mutant", "codes_in", "explained_lines", "mutants_of"]

OPERATORS = [(kind, make) for kind, make in mutation_operators if make is not operator_string]
TEXT = (cst.SimpleString, cst.FormattedString, cst.ConcatenatedString)
# Changes there have no effect, or run before a function can be exchanged.
LEFT_OUT = (*TEXT, cst.Annotation, cst.Decorator, cst.Parameters, cst.Assert)
LEFT_OUT_CALLS = {"cast", "isinstance", "len"}  # as mutmut does
ROOT = Path(__file__).resolve().parents[2]
EXPLAINED: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("explained.json").read_text(encoding="utf-8")
)
"""Reasons why no test notices a change, by file (path from the root) and text of the line."""


@dataclass(frozen=True)
class Mutant:
    """A function in which one piece of text is replaced by another."""

    file: Path
    function: str  # qualified by its class's name
    first_line: int  # of the function, decorators included
    lines: frozenset[int]  # where the change takes effect: a relevant test runs one
    start: int  # of the replaced text in the file
    end: int
    text: str  # the replacement
    why: str | None  # the explanation, if there is one

    def code(self) -> CodeType:
        """Compile the changed function, if the change is valid Python."""
        module = compile(self._source(), str(self.file), "exec", dont_inherit=True)
        name = self.function.rpartition(".")[2]
        return next(
            code
            for code in codes_in(module)
            if (code.co_name, code.co_firstlineno) == (name, self.first_line)
        )

    def change(self) -> tuple[str, str]:
        """Return the changed code before and after, each joined to one line."""
        source, changed = self.file.read_text(encoding="utf-8"), self._source()
        return _lines(source, self.start, self.end), _lines(
            changed, self.start, self.start + len(self.text)
        )

    def _source(self) -> str:
        source = self.file.read_text(encoding="utf-8")
        return source[: self.start] + self.text + source[self.end :]


def explained_lines(source: str, explained: dict[str, str]) -> dict[int, str]:
    """Return the reasons of a file by number of the line."""
    lines = [line.strip() for line in source.splitlines()]
    if stale := sorted(explained.keys() - set(lines)):
        raise ValueError(f"explained.json has lines that are not there any more: {stale}")
    return {number: explained[line] for number, line in enumerate(lines, 1) if line in explained}


def mutants_of(file: Path) -> list[Mutant]:
    """Return every mutant of a module's functions and methods, in the order of the file."""
    wrapper = MetadataWrapper(cst.parse_module(file.read_text(encoding="utf-8")))
    finder = _Finder(file, wrapper.module)
    wrapper.visit(finder)
    return finder.found


class _Finder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider, WhitespaceInclusivePositionProvider)

    def __init__(self, file: Path, module: cst.Module) -> None:
        super().__init__()
        self.found: list[Mutant] = []
        self._file = file
        self._module = module
        lines = module.code.splitlines(keepends=True)
        is_ours = file.is_relative_to(ROOT)
        name = file.relative_to(ROOT).as_posix() if is_ours else str(file)
        self._reasons = explained_lines(module.code, EXPLAINED.get(name, {}))
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._scopes: list[str] = []
        self._function: cst.FunctionDef | None = None
        self._statements: list[int] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_left_out(node):
            return False
        if isinstance(node, cst.ClassDef | cst.FunctionDef) and self._function is None:
            self._scopes.append(node.name.value)
            if isinstance(node, cst.FunctionDef):
                self._function = node
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            self._statements.append(self._range(node).start.line)
        if self._function is not None:
            self._mutate(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        node = original_node
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            self._statements.pop()
        if node is self._function:
            self._function = None
            self._scopes.pop()
        elif isinstance(node, cst.ClassDef) and self._function is None:
            self._scopes.pop()

    def _mutate(self, node: cst.CSTNode) -> None:
        for kind, make in OPERATORS:
            if not isinstance(node, kind):
                continue
            for changed in make(node):
                if not _drops_excluded_argument(node, changed) and not _is_same(node, changed):
                    self._add(node, changed)

    def _add(self, node: cst.CSTNode, changed: cst.CSTNode) -> None:
        whole = self.get_metadata(WhitespaceInclusivePositionProvider, node)
        seen = self._range(node)
        lines = frozenset({*range(seen.start.line, seen.end.line + 1), self._statements[-1]})
        said_on = [*sorted(lines), *reversed(self._statements)]
        self.found.append(
            Mutant(
                self._file,
                ".".join(self._scopes),
                self._first_line(),
                lines,
                self._starts[whole.start.line - 1] + whole.start.column,
                self._starts[whole.end.line - 1] + whole.end.column,
                self._module.code_for_node(changed),
                next((self._reasons[line] for line in said_on if line in self._reasons), None),
            )
        )

    def _first_line(self) -> int:
        assert self._function is not None
        nodes = [*self._function.decorators, self._function.name]
        return min(self._range(node).start.line for node in nodes)

    def _range(self, node: cst.CSTNode) -> CodeRange:
        return self.get_metadata(PositionProvider, node)


def _is_left_out(node: cst.CSTNode) -> bool:
    match node:
        case cst.Arg():
            # zip's `strict` is an assertion of the impossible.
            return isinstance(node.value, TEXT) or (
                node.keyword is not None and node.keyword.value == "strict"
            )
        case cst.Call(func=cst.Name(value=name)):
            return name in LEFT_OUT_CALLS
    return isinstance(node, LEFT_OUT)


def _drops_excluded_argument(node: cst.CSTNode, changed: cst.CSTNode) -> bool:
    """Return whether a changed call only lacks an argument of an excluded kind, such as a text."""
    if not isinstance(node, cst.Call) or not isinstance(changed, cst.Call):
        return False
    kept = {id(argument) for argument in changed.args}
    return any(_is_left_out(argument) for argument in node.args if id(argument) not in kept)


def _is_same(node: cst.CSTNode, changed: cst.CSTNode) -> bool:
    """Return whether a number is as large as before, since 1e18 + 1 is 1e18."""
    numbers = cst.Integer | cst.Float
    return isinstance(node, numbers) and node.evaluated_value == changed.evaluated_value


def _lines(text: str, start: int, end: int) -> str:
    """Return the whole lines around a range of the text, without their indentation."""
    before = text.rfind("\n", 0, start) + 1
    after = text.find("\n", end)
    return " ".join(text[before : len(text) if after < 0 else after].split())


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield code and the code of all functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)
