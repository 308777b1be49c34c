"""Installation: this package's slots in the place of Megatron Core's, whose contexts use them.

As in ``from mamba_cache.integrations import megatron`` and ``megatron.install()``. It may come
before or after Megatron's modules are imported, but before a context is made.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from mamba_cache._extras import install_hint
from mamba_cache.errors import MambaSlotCapacityError, MissingExtraError, UnsupportedVersionError
from mamba_cache.integrations.megatron.stepping import (
    compute_prefix_match,
    execute_pending_mamba_ops,
    reset_mamba_state,
    with_matched_blocks_held,
)
from mamba_cache.integrations.megatron.usage import (
    class_source,
    context_differences,
    method_source,
    names_on_self,
    use_differences,
)
from mamba_cache.slots import MAX_INTERMEDIATE_OFFSETS_PER_REQUEST, MambaSlotAllocator

__all__ = ["install", "installed", "replaced", "uninstall"]

_CONTEXTS = "megatron.core.inference.contexts"
_HOME = f"{_CONTEXTS}.mamba_slot_allocator"

_REPLACEMENTS: dict[str, type] = {
    "MambaSlotAllocator": MambaSlotAllocator,
    "MambaSlotCapacityError": MambaSlotCapacityError,
}

_CONTEXT = "DynamicInferenceContext"

_MATCH = (
    "matched_block_ids",
    "num_blocks_from_pool",
    "already_allocated_blocks",
    "overall_required_blocks",
    "prefix_skip_tokens",
    "effective_prefill_chunk_length",
)
"""What the context's match of a prompt returns."""

_PENDING = {
    "_pending_mamba_restores",
    "_pending_mamba_zeros",
    "mamba_slot_allocator",
    "mamba_conv_states",
    "mamba_ssm_states",
}
"""What the method that restores one request after the other deals with, and nothing else."""

_originals: dict[str, Any] = {}
"""Megatron's own classes while they are replaced; None for one that its version does not have."""

_original_methods: dict[str, Any] = {}
"""Methods of Megatron's context while they are replaced."""


def install() -> None:
    """Make Megatron Core use this package's ``MambaSlotAllocator`` and capacity error.

    Both are put into the module that defines them and into every module of Megatron that has
    imported them. Methods of its context are amended where the version needs it (``replaced`` lists
    them): so that no request skips tokens without a saved state or loses the blocks that it
    matched, and that a step's restores are one launch. Contexts that exist already keep their
    slots, and Megatron's way with them. Doing it again does nothing.

    Raises:
        MissingExtraError: Megatron Core is not installed.
        UnsupportedVersionError: Its version has no such class, or uses it in a way that cannot be
            served right; the message lists where. Nothing was replaced.
    """
    if _originals:
        return
    home = _import_home()
    classes = _classes(Path(str(home.__file__)).parent)
    differences = _differences(home, classes)
    if differences:
        raise UnsupportedVersionError(
            f"{_version()} does not use MambaSlotAllocator as it can be replaced: "
            + "; ".join(differences)
        )
    context = _context_class()  # imported before anything is replaced, for it may fail
    _originals.update({name: getattr(home, name, None) for name in _REPLACEMENTS})
    for name, ours in _REPLACEMENTS.items():
        _replace(_originals[name], ours)
        setattr(home, name, ours)
    for name, make in _methods(classes[_CONTEXT]).items():
        _original_methods[name] = vars(context)[name]
        setattr(context, name, make(_original_methods[name]))


def uninstall() -> None:
    """Give Megatron Core its own classes and methods back, wherever it has this package's.

    Contexts made meanwhile keep their slots. Without an ``install`` before it, it does nothing.
    """
    for name, method in _original_methods.items():
        setattr(_context_class(), name, method)
    _original_methods.clear()
    for name, original in _originals.items():
        if original is None:
            delattr(sys.modules[_HOME], name)
        else:
            _replace(_REPLACEMENTS[name], original)
    _originals.clear()


def replaced() -> list[str]:
    """List what of Megatron Core is replaced now, as dotted names; nothing before ``install``."""
    classes = [f"{_HOME}.{name}" for name in _originals]
    home = f"{_CONTEXTS}.dynamic_context.{_CONTEXT}"
    return classes + [f"{home}.{name}" for name in _original_methods]


@contextmanager
def installed() -> Iterator[None]:
    """Installs for the length of a ``with`` block; what was installed before stays afterwards.

    Raises:
        MissingExtraError: As ``install`` does.
        UnsupportedVersionError: Likewise.
    """
    was_installed = bool(_originals)
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def _import_home() -> ModuleType:
    """Import the module whose classes are replaced."""
    try:
        importlib.import_module("megatron.core")
    except ImportError as error:
        raise MissingExtraError(
            f"Megatron Core is not installed, or cannot be imported: {install_hint('megatron')}"
        ) from error
    try:
        return importlib.import_module(_HOME)
    except ModuleNotFoundError as error:
        if error.name is None or not _HOME.startswith(error.name):
            raise
        raise UnsupportedVersionError(
            f"{_version()} has no module {error.name}, so it cannot cache Mamba states: "
            "install a version that can"
        ) from error


def _context_class() -> type:
    module = importlib.import_module(f"{_CONTEXTS}.dynamic_context")
    context: type = getattr(module, _CONTEXT)
    return context


def _version() -> str:
    return f"Megatron Core {getattr(sys.modules['megatron.core'], '__version__', '(no version)')}"


def _differences(home: ModuleType, classes: dict[str, ast.ClassDef]) -> list[str]:
    """List what of this version cannot be served, or would be served wrong."""
    theirs = getattr(home, "MambaSlotAllocator", None)
    if not inspect.isclass(theirs):
        return [f"{_HOME} has no class MambaSlotAllocator"]
    constant = "MAX_INTERMEDIATE_OFFSETS_PER_REQUEST"
    value = getattr(home, constant, "missing")
    differences = []
    if value != MAX_INTERMEDIATE_OFFSETS_PER_REQUEST:
        differences.append(f"{constant} is {value}, not {MAX_INTERMEDIATE_OFFSETS_PER_REQUEST}")
    home_path = Path(str(home.__file__))
    differences += use_differences(home_path.parents[2], without=home_path)
    differences += context_differences(classes)
    if _CONTEXT in classes and not _is_known_match(classes[_CONTEXT]):
        differences.append(f"{_CONTEXT}._compute_prefix_match is not the one that is amended here")
    return differences


def _classes(contexts: Path) -> dict[str, ast.ClassDef]:
    """Read the classes that slots and contexts meet in."""
    modules = ("dynamic_context", "kv_block_allocator", "attention_context/mamba_metadata")
    return class_source(contexts / f"{module}.py" for module in modules)


def _is_known_match(context: ast.ClassDef) -> bool:
    """Says whether the match of a prompt returns what ``compute_prefix_match`` amends."""
    method = method_source(context, "_compute_prefix_match")
    if method is None or [a.arg for a in method.args.args[1:3]] != ["req", "prefill_chunk_length"]:
        return False
    returned = [node.value for node in ast.walk(method) if isinstance(node, ast.Return)]
    tuples = [
        tuple(ast.unparse(item) for item in value.elts) if isinstance(value, ast.Tuple) else ()
        for value in returned
    ]
    return _MATCH in tuples and {len(items) for items in tuples} == {len(_MATCH)}


def _methods(context: ast.ClassDef) -> dict[str, Callable[..., Any]]:
    """Chooses the methods of the context that are amended, and how."""
    chosen: dict[str, Callable[..., Any]] = {"_compute_prefix_match": compute_prefix_match}
    pending = method_source(context, "_execute_pending_mamba_ops")
    if pending is not None and names_on_self(pending) == _PENDING:
        chosen["_execute_pending_mamba_ops"] = execute_pending_mamba_ops
        chosen["reset_mamba_state"] = reset_mamba_state
    if not _holds_before_allocating(context):
        chosen["check_availability"] = chosen["add_request"] = with_matched_blocks_held
    return {name: make for name, make in chosen.items() if method_source(context, name)}


def _holds_before_allocating(context: ast.ClassDef) -> bool:
    """Says whether a request's matched blocks are referred to before room is made for others."""
    method = method_source(context, "add_request")
    lines = ast.unparse(method).splitlines() if method else []
    holds = [i for i, line in enumerate(lines) if re.search(r"block_ref_counts\[.*\] \+= 1", line)]
    allocates = [i for i, line in enumerate(lines) if ".allocate_memory_blocks(" in line]
    return bool(holds and allocates) and holds[0] < allocates[0]


def _replace(old: Any, new: Any) -> None:
    """Put ``new`` wherever a module of Megatron has ``old``, under whatever name."""
    for module_name, module in list(sys.modules.items()):
        is_megatrons = module_name.split(".")[0] == "megatron"
        if is_megatrons and isinstance(module, ModuleType) and old is not None:
            for name in [name for name, value in vars(module).items() if value is old]:
                setattr(module, name, new)
