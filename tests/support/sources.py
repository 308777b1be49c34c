"""The package's source files as syntax trees, for tests of its structure."""

import ast
import importlib.util
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "mamba_cache"


@dataclass(frozen=True)
class Source:
    """One Python file of the project."""

    path: Path

    @property
    def name(self) -> str:
        """Path from the project's root, as in test ids."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """Dotted name to import the file."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse("\n".join(self.lines), filename=self.name)


@cache
def sources(*folders: str) -> list[Source]:
    """Every Python file in the given folders of the project, each parsed once for all tests."""
    return [Source(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def load_example(name: str) -> ModuleType:
    """Import one of the examples."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up annotations there
    spec.loader.exec_module(module)
    return module


def is_old_path(source: Source) -> bool:
    """Whether a module only re-exports another one under an old name."""
    return (ast.get_docstring(source.tree) or "").startswith("Old import path of")


def is_public(name: str) -> bool:
    return not name.startswith("_")


def definitions(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    """Every class, function and method as (dotted name, node); functions inside functions too."""
    found: list[tuple[str, ast.AST]] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.append((prefix + child.name, child))
                walk(child, f"{prefix}{child.name}.")
            else:
                walk(child, prefix)

    walk(tree, "")
    return found
