"""Puts this package's slots in the place of Megatron Core's, whose contexts then use them.

As in ``from mamba_cache.integrations import megatron`` and ``megatron.install()``. It may come
before or after Megatron's modules are imported, but before a context is made.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from mamba_cache.errors import MambaSlotCapacityError, MissingExtraError, UnsupportedVersionError
from mamba_cache.slots import MAX_INTERMEDIATE_OFFSETS_PER_REQUEST, MambaSlotAllocator

__all__ = ["install", "installed", "uninstall"]

_HOME = "megatron.core.inference.contexts.mamba_slot_allocator"

_REPLACEMENTS: dict[str, type] = {
    "MambaSlotAllocator": MambaSlotAllocator,
    "MambaSlotCapacityError": MambaSlotCapacityError,
}

_METHODS = (
    "allocate_slots_batch",
    "get_slot",
    "has_state",
    "invalidate_block",
    "on_kv_blocks_deregistered",
    "store_from_tensors",
    "store_from_live_batch",
    "restore_to_live",
    "register_block_hashes_batch",
    "compute_and_store_offsets",
    "commit_intermediate_states",
    "reset",
)
"""What every version that can be served has. Others read the intermediate offsets in other ways."""

_originals: dict[str, Any] = {}
"""Megatron's own classes while they are replaced; None for one that its version does not have."""


def install() -> None:
    """Makes Megatron Core use this package's ``MambaSlotAllocator`` and capacity error.

    Both are put into the module that defines them and into every module of Megatron that has
    imported them. Contexts that exist already keep what they have. Doing it again does nothing.

    Raises:
        MissingExtraError: Megatron Core is not installed.
        UnsupportedVersionError: Its version has no such class, or one whose interface differs; the
            message lists the differences. Nothing was replaced.
    """
    if _originals:
        return
    home = _import_home()
    differences = _differences(home)
    if differences:
        raise UnsupportedVersionError(
            f"{_version()} is not of the interface that MambaSlotAllocator replaces: "
            + "; ".join(differences)
        )
    _originals.update({name: getattr(home, name, None) for name in _REPLACEMENTS})
    for name, ours in _REPLACEMENTS.items():
        _replace(_originals[name], ours)
        setattr(home, name, ours)


def uninstall() -> None:
    """Gives Megatron Core its own classes back, wherever it has this package's.

    Contexts made meanwhile keep their slots. Without an ``install`` before it, it does nothing.
    """
    for name, original in _originals.items():
        if original is None:
            delattr(sys.modules[_HOME], name)
        else:
            _replace(_REPLACEMENTS[name], original)
    _originals.clear()


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
    """Imports the module whose classes are replaced."""
    try:
        importlib.import_module("megatron.core")
    except ImportError as error:
        raise MissingExtraError(
            "Megatron Core is not installed, or cannot be imported: pip install megatron-core"
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


def _version() -> str:
    return f"Megatron Core {getattr(sys.modules['megatron.core'], '__version__', '(no version)')}"


def _differences(home: ModuleType) -> list[str]:
    """Lists where Megatron's interface is not the one that is replaced."""
    theirs = getattr(home, "MambaSlotAllocator", None)
    if not inspect.isclass(theirs):
        return [f"{_HOME} has no class MambaSlotAllocator"]
    constant = "MAX_INTERMEDIATE_OFFSETS_PER_REQUEST"
    value = getattr(home, constant, "missing")
    differences = []
    if value != MAX_INTERMEDIATE_OFFSETS_PER_REQUEST:
        differences.append(f"{constant} is {value}, not {MAX_INTERMEDIATE_OFFSETS_PER_REQUEST}")
    offered = [name for name, _ in inspect.getmembers(theirs, callable) if not name.startswith("_")]
    differences += [f"it has no {name}" for name in _METHODS if name not in offered]
    for name in ["__init__", *offered]:
        wanted, given = _parameters(MambaSlotAllocator, name), _parameters(theirs, name)
        if wanted is None:
            differences.append(f"its {name}({', '.join(given or ())}) is unknown here")
        elif wanted != given:
            differences.append(f"{name} takes {given}, not {wanted}")
    return differences


def _parameters(cls: type, method: str) -> list[str] | None:
    """Returns the names of what a method takes in order, None if there is no such method.

    Megatron says ``block_ids_list`` in some places where it says ``block_ids`` in others.
    """
    if not hasattr(cls, method):
        return None
    _self, *parameters = inspect.signature(getattr(cls, method)).parameters.values()
    return [
        parameter.name.removesuffix("_list")
        for parameter in parameters
        # What this package's class takes by keyword alone is its own business.
        if cls is not MambaSlotAllocator or parameter.kind is not parameter.KEYWORD_ONLY
    ]


def _replace(old: Any, new: Any) -> None:
    """Puts ``new`` wherever a module of Megatron has ``old``, under whatever name."""
    for module_name, module in list(sys.modules.items()):
        is_megatrons = module_name.split(".")[0] == "megatron"
        if is_megatrons and isinstance(module, ModuleType) and old is not None:
            for name in [name for name, value in vars(module).items() if value is old]:
                setattr(module, name, new)
