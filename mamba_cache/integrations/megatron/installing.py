"""Installation: this package's slots in the place of Megatron Core's, whose contexts use them.

As in ``from mamba_cache.integrations import megatron`` and ``megatron.install()``. It may come
before or after Megatron's modules are imported, but before a context is made.
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
"""Methods of Megatron's context that are amended, and what makes ours from theirs."""

_originals: dict[str, Any] = {}
"""Megatron's own classes while they are replaced; None for one that its version does not have."""

_original_methods: dict[str, Any] = {}
"""Methods of Megatron's context while they are replaced."""


def install() -> None:
    """Make Megatron Core use this package's ``MambaSlotAllocator`` and capacity error.

    Both are put into the module that defines them and into every module of Megatron that has
    imported them. Methods of its context are amended (``replaced`` lists them): no request skips
    tokens without a saved state, and a step's restores are one launch. Contexts that exist already
    keep their slots, and Megatron's way with them. Doing it again does nothing.

    Raises:
        MissingExtraError: Megatron Core is not installed.
        UnsupportedVersionError: It is older than 0.19, or lacks what is replaced; the message says
            what. Nothing was replaced.
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


def _import_parts() -> tuple[Any, type]:
    """Import the module whose classes are replaced, and the class of contexts."""
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
    """Check that ours has each parameter that theirs has."""
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
    """Put ``new`` wherever a module of Megatron has ``old``, under whatever name."""
    for module_name, module in list(sys.modules.items()):
        is_megatrons = module_name.split(".")[0] == "megatron"
        if is_megatrons and isinstance(module, ModuleType) and old is not None:
            for name in [name for name, value in vars(module).items() if value is old]:
                setattr(module, name, new)
