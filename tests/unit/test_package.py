"""The package from outside: its front door, its version, and what it needs to be imported."""

import ast
import importlib
import re
import subprocess
import sys
from importlib import metadata

from sources import PACKAGE, ROOT, Source, is_old_path, is_public, sources

import mamba_cache

FRONT_DOOR = {
    "Admission",
    "BlockHasher",
    "BlockHashes",
    "CacheConfig",
    "CacheStats",
    "CapturedExtractions",
    "CheckpointPlacement",
    "ConsumedSlotPolicy",
    "DeviceTokens",
    "DynamicInferenceContext",
    "EveryNthBlock",
    "EvictionPolicy",
    "Forks",
    "KVBlockAllocator",
    "KVCacheSpec",
    "LastBlock",
    "LayerKind",
    "LruSlotPolicy",
    "MambaSlotAllocator",
    "MegatronPlacement",
    "MissReason",
    "PrefixMatch",
    "PreparedRequest",
    "RefZeroSlotPolicy",
    "Request",
    "RequestStatus",
    "ScheduledRequest",
    "ScoreSlotPolicy",
    "SlotEvictionPolicy",
    "StateSpec",
    "Step",
    "StepMetadata",
    "__version__",
    "compute_block_hashes",
    "compute_varlen_chunk_metadata",
    # What an embedder catches; the others are in ``mamba_cache.errors``.
    "CapacityError",
    "InvalidArgumentError",
    "MambaCacheError",
    "PoisonedError",
    "StepOrderError",
    "UnknownRequestError",
}

NOT_ALWAYS_INSTALLED = (
    *("triton", "rich", "typer", "prometheus_client", "transformers", "megatron"),
    *("msgspec", "scipy", "zmq"),
)

# Importing a `__main__` would run it.
SOURCES = [source for source in sources(PACKAGE) if source.path.name != "__main__.py"]


def defined_names(source: Source) -> set[str]:
    """Public names that a module's own top-level statements bind, imports left out."""
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
    assert set(mamba_cache.__all__) == FRONT_DOOR


def test_all_leaves_nothing_public_out() -> None:
    """That `__all__` is sorted, and names what is there, ruff sees."""
    breaches = [
        f"{source.name}: {name} is public"
        for source in SOURCES
        for name in sorted(
            defined_names(source) - set(importlib.import_module(source.module).__all__)
        )
    ]
    assert breaches == []


def test_others_import_only_what_is_exported() -> None:
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


def test_import_needs_no_triton_and_no_extra() -> None:
    """Where there is no GPU there may be no Triton; a name set to None fails to be imported."""
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({NOT_ALWAYS_INSTALLED}))\n"
        f"import {PACKAGE}\n"
        f"for name in {PACKAGE}.__all__: getattr({PACKAGE}, name)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_import_loads_no_extra() -> None:
    """Importing the package does not pay for what only some of its users need."""
    program = f"import sys, {PACKAGE}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert not set(NOT_ALWAYS_INSTALLED[1:]) & set(result.stdout.split())
