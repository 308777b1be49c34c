"""Installation: replaces Megatron Core's slot allocator with this package's.

Use ``from mamba_cache.integrations import megatron`` and ``megatron.install()``, before or after
the import of Megatron's modules, but before a context is created.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from mamba_cache._extras import install_hint
from mamba_cache.errors import MambaSlotCapacityError, MissingExtraError, UnsupportedVersionError
from mamba_cache.integrations.megatron.stepping import (
    compute_prefix_match,
    execute_pending_mamba_ops,
    reset_mamba_state,
)
from mamba_cache.slots import MAX_INTERMEDIATE_OFFSETS_PER_REQUEST, MambaSlotAllocator

__all__ = ["install", "installed", "replaced", "uninstall"]

_CONTEXTS: Final = "megatron.core.inference.contexts"
_HOME: Final = f"{_CONTEXTS}.mamba_slot_allocator"
_CONTEXT: Final = "DynamicInferenceContext"
_MIN_VERSION: Final = (0, 19)

_REPLACEMENTS: dict[str, type] = {
    "MambaSlotAllocator": MambaSlotAllocator,
    "MambaSlotCapacityError": MambaSlotCapacityError,
}

_METHODS: dict[str, Callable[..., Any]] = {
    "_compute_prefix_match": compute_prefix_match,
    "_execute_pending_mamba_ops": execute_pending_mamba_ops,
    "reset_mamba_state": reset_mamba_state,
}
"""Wrapped methods of Megatron's context, each with the function that wraps the original."""

_originals: dict[str, Any] = {}
"""Megatron's classes while they are replaced; None if this Megatron version lacks the class."""

_original_methods: dict[str, Any] = {}
"""Methods of Megatron's context while they are replaced."""


def install() -> None:
    """Make Megatron Core use this package's ``MambaSlotAllocator`` and capacity error.

    Both are set in the module that defines them and in every Megatron module that imported them.
    Methods of Megatron's context are wrapped (``replaced`` lists them): no request skips tokens
    without a saved state, and a step's restores are one launch. Existing contexts keep their slots
    and Megatron's methods for these slots. A second call does nothing.

    Raises:
        MissingExtraError: Megatron Core is not installed.
        UnsupportedVersionError: Megatron Core is older than 0.19, or lacks a name to replace; the
            message names the missing parts. Nothing was replaced.
    """
    if _originals:
        return
    home, context = _import_parts()
    theirs = getattr(home, "MambaSlotAllocator", None)
    missing = [f"{_CONTEXT}.{name}" for name in _METHODS if name not in vars(context)]
    if not inspect.isclass(theirs):
        missing.append(f"{_HOME}.MambaSlotAllocator")
    limit = getattr(home, "MAX_INTERMEDIATE_OFFSETS_PER_REQUEST", None)
    if limit != MAX_INTERMEDIATE_OFFSETS_PER_REQUEST:
        missing.append(
            f"MAX_INTERMEDIATE_OFFSETS_PER_REQUEST={MAX_INTERMEDIATE_OFFSETS_PER_REQUEST}"
        )
    if missing:
        raise UnsupportedVersionError(f"{_version_text()} lacks {', '.join(missing)}")
    _check_constructor(theirs)
    _originals.update({name: getattr(home, name, None) for name in _REPLACEMENTS})
    for name, ours in _REPLACEMENTS.items():
        _replace(_originals[name], ours)
        setattr(home, name, ours)
    for name, make in _METHODS.items():
        _original_methods[name] = vars(context)[name]
        setattr(context, name, make(_original_methods[name]))


def uninstall() -> None:
    """Restore Megatron Core's classes and methods, wherever this package's are installed.

    Contexts created meanwhile keep their slots. Without an ``install`` this does nothing.
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
    """Return dotted names of Megatron Core's replaced classes and methods; empty if none."""
    classes = [f"{_HOME}.{name}" for name in _originals]
    home = f"{_CONTEXTS}.dynamic_context.{_CONTEXT}"
    return classes + [f"{home}.{name}" for name in _original_methods]


@contextmanager
def installed() -> Iterator[None]:
    """Install for the length of a ``with`` block; an earlier installation stays afterwards.

    Raises:
        MissingExtraError: As ``install`` does.
        UnsupportedVersionError: As ``install`` does.
    """
    was_installed = bool(_originals)
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def _import_parts() -> tuple[Any, type]:
    """Import and return the module of the replaced classes, and the context class."""
    try:
        importlib.import_module("megatron.core")
    except ImportError as error:
        raise MissingExtraError(
            f"Megatron Core is not installed, or cannot be imported: {install_hint('megatron')}"
        ) from error
    version = tuple(map(int, re.findall(r"\d+", _version())[:2]))
    if version and version < _MIN_VERSION:
        raise UnsupportedVersionError(
            f"{_version_text()} is older than 0.19: install that or later"
        )
    try:
        return importlib.import_module(_HOME), _context_class()
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(_CONTEXTS):
            raise
        raise UnsupportedVersionError(f"{_version_text()} has no module {error.name}") from error


def _check_constructor(theirs: Any) -> None:
    """Check that our constructor has every parameter of Megatron's constructor."""
    known = inspect.signature(MambaSlotAllocator).parameters
    unknown = [name for name in inspect.signature(theirs).parameters if name not in known]
    if unknown:
        raise UnsupportedVersionError(
            f"{_version_text()} makes slots with {', '.join(unknown)}, which are not known here"
        )


def _context_class() -> type:
    module = importlib.import_module(f"{_CONTEXTS}.dynamic_context")
    context: type = getattr(module, _CONTEXT)
    return context


def _version() -> str:
    return str(getattr(sys.modules["megatron.core"], "__version__", ""))


def _version_text() -> str:
    return f"Megatron Core {_version() or '(no version)'}"


def _replace(old: Any, new: Any) -> None:
    """Replace ``old`` by ``new`` in every Megatron module, under any name."""
    for module_name, module in list(sys.modules.items()):
        is_megatrons = module_name.split(".")[0] == "megatron"
        if is_megatrons and isinstance(module, ModuleType) and old is not None:
            for name in [name for name, value in vars(module).items() if value is old]:
                setattr(module, name, new)
