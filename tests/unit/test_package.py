"""The package from outside: its exports, its version, and the imports that it needs."""

import ast
import importlib
import re
import sys
from importlib import metadata
from unittest import mock

import pytest
from sources import PACKAGE, ROOT, Source, is_old_path, is_public, sources

import mamba_cache

NOT_ALWAYS_INSTALLED = (
    *("triton", "prometheus_client", "transformers", "megatron"),
    *("msgspec", "redis", "scipy", "zmq"),
)

OLD_PATHS = {
    "mamba_cache.align": "mamba_cache.integrations.vllm",
    "mamba_cache.metadata.mamba2": "mamba_cache.integrations.vllm.mamba2_attention",
}

# Importing a `__main__` would run it.
SOURCES = [source for source in sources(PACKAGE) if source.path.name != "__main__.py"]


def forget(*packages: str) -> None:
    """Make the next import of these packages run their modules."""
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            del sys.modules[name]


def defined_names(source: Source) -> set[str]:
    """Return the public names bound by a module's top-level statements, except imports."""
    names: set[str] = set()
    for node in source.tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if is_public(name)}


def test_front_door() -> None:
    """Type checkers see the same source of each name as the lazy import at its first use."""
    [source] = [source for source in SOURCES if source.module == PACKAGE]
    told = {
        alias.name: node.module
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}.")
        for alias in node.names
    }
    assert set(told) == set(mamba_cache.__all__) <= set(dir(mamba_cache))
    assert len(told) <= 45
    for name, module in told.items():
        assert getattr(mamba_cache, name) is getattr(importlib.import_module(module or ""), name)


def test_modules_of_the_front_door_are_attributes_and_no_other_name_is() -> None:
    with mock.patch.dict(sys.modules):
        forget(PACKAGE)
        package = importlib.import_module(PACKAGE)
        assert package.errors.MambaCacheError is package.MambaCacheError
        with pytest.raises(
            AttributeError, match="module 'mamba_cache' has no attribute 'PrefixCach"
        ):
            package.PrefixCache  # noqa: B018


def test_all_leaves_nothing_public_out() -> None:
    """ruff checks that `__all__` is sorted and that its names exist."""
    breaches = [
        f"{source.name}: {name} is public"
        for source in SOURCES
        for name in sorted(
            defined_names(source) - set(importlib.import_module(source.module).__all__)
        )
    ]
    assert breaches == []


def test_other_packages_import_only_exported_names() -> None:
    submodules = {source.module for source in SOURCES}
    breaches = [
        f"{source.name}: {node.module}.{alias.name}"
        for source in SOURCES
        if not is_old_path(source)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        for alias in node.names
        if f"{node.module}.{alias.name}" not in submodules
        and alias.name not in importlib.import_module(node.module or "").__all__
    ]
    assert breaches == []


def test_version() -> None:
    """The installed metadata, the package and the newest entry of the changelog agree."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## ([0-9][\w.]*)", changelog, flags=re.MULTILINE)
    assert newest is not None
    assert mamba_cache.__version__ == metadata.version("mamba-cache") == newest[1]


def test_types_are_shipped() -> None:
    assert (ROOT / PACKAGE / "py.typed").exists()


class NotInstalled:
    """A finder that hides these packages and records requests for them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names, self.asked = names, set[str]()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        package = name.partition(".")[0]
        if package in self.names:
            self.asked.add(package)
            raise ModuleNotFoundError(name, name=name)


def test_import_asks_for_no_triton_and_no_extra(monkeypatch) -> None:
    """Without a GPU there may be no Triton; optional packages cost only their users."""
    finder = NotInstalled(NOT_ALWAYS_INSTALLED)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    with mock.patch.dict(sys.modules):
        forget(PACKAGE, *NOT_ALWAYS_INSTALLED)
        package = importlib.import_module(PACKAGE)
        assert package is not mamba_cache
        assert all(getattr(package, name) for name in package.__all__)
    assert finder.asked == set()


# Old import paths.


@pytest.mark.parametrize("path", OLD_PATHS)
def test_an_old_path_exports_the_same_objects_and_may_be_imported_first(path: str) -> None:
    with mock.patch.dict(sys.modules):
        forget(PACKAGE)
        old, new = importlib.import_module(path), importlib.import_module(OLD_PATHS[path])
    assert old.__all__ == new.__all__
    assert {name for name in old.__all__ if getattr(old, name) is not getattr(new, name)} == set()


def test_the_page_on_architecture_lists_the_old_paths() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(mamba_cache[^|`]*)` \| `(mamba_cache[\w.]*)` \|$", page, re.MULTILINE)
    assert dict(rows) == OLD_PATHS
