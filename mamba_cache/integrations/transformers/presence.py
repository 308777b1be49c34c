"""Foreign code: functions in a model's forward that its libraries did not bring."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Literal

from mamba_cache._extras import installed_version

__all__ = [
    "FUNCTION_TYPES",
    "KERNEL_PACKAGES",
    "BypassReason",
    "ForeignKind",
    "foreign_layer",
    "is_library",
    "module_of",
    "registries",
]

ForeignKind = Literal["forward hook", "replaced method", "registered function", "foreign attribute"]
BypassReason = ForeignKind | Literal["hidden tokens"]
"""Why a call neither used the cache nor filled it, as ``CacheStats.bypasses`` counts it."""

# A user's own file may be called kernels.py, so a name counts only if its package is installed.
_OPTIONAL = ("accelerate", "kernels", "peft")
_LIBRARIES = frozenset(
    {"mamba_cache", "torch", "transformers", *filter(installed_version, _OPTIONAL)}
)
KERNEL_PACKAGES = frozenset({"causal_conv1d", "fla", "flash_attn", "mamba_ssm", "triton"})
"""What layers take their kernels from, beside the libraries. Versions are part of the identity."""

# The file of a kernel that `kernels` has loaded from the hub, under a module name of its own.
_HUB_KERNEL = re.compile(r"/snapshots/[0-9a-f]{8,}/build/torch")

FUNCTION_TYPES = (
    FunctionType, MethodType, partial, type(len), type(str.join), type(object.__init__), type,
)  # fmt: skip


def is_library(module_name: str | None) -> bool:
    """Return whether a module belongs to torch, transformers, peft, accelerate or kernels."""
    if not module_name:
        return False
    if module_name.partition(".")[0] in _LIBRARIES:
        return True
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return "kernels" in _LIBRARIES and bool(file and _HUB_KERNEL.search(file))


def module_of(thing: Any) -> str | None:
    """Return the name of the module that the code of a callable was defined in, if it has one."""
    if isinstance(thing, FunctionType):
        # functools.wraps copies __module__ from the wrapped function; globals cannot be copied.
        name = thing.__globals__.get("__name__")
        return name if isinstance(name, str) else None
    if isinstance(thing, type):
        return thing.__module__
    name = getattr(thing, "__module__", None)
    if isinstance(name, str):
        return name
    owner = getattr(thing, "__objclass__", None)  # of a method of a C class
    return None if owner is None else owner.__module__


def foreign_layer(thing: Any, own: Collection[str] | None = None) -> str | None:
    """Name the first function inside a callable that no library brought; None if there is none.

    Partials, bound methods, wrapped functions and the methods of callable objects are unwrapped.
    With ``own``, names of the modules of a model's classes, functions are not foreign either that a
    kernel package brought, or that such a module's file names.
    """
    layers, seen = [thing], set[int]()
    while layers:
        layer = layers.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        wrapped = getattr(layer, "__dict__", {}).get("__wrapped__")
        if wrapped is not None:
            layers.append(wrapped)
        if isinstance(layer, partial):
            arguments = (*layer.args, *layer.keywords.values())
            layers += [
                layer.func,
                *(each for each in arguments if isinstance(each, FUNCTION_TYPES)),
            ]
        elif isinstance(layer, MethodType):
            layers.append(layer.__func__)
        else:
            name = module_of(layer)
            called = getattr(layer, "__qualname__", type(layer).__qualname__)
            if not (is_library(name) or (own is not None and _is_named(layer, called, name, own))):
                return f"{called} of module {name}"
            if not isinstance(layer, FUNCTION_TYPES):  # an object: its class may be patched
                layers.append(vars(type(layer)).get("__call__", type(layer)))
    return None


def _is_named(function: Any, called: str, module_name: str | None, own: Collection[str]) -> bool:
    """Return whether a name tells a function from others: of closures and lambdas it does not."""
    if str(module_name).partition(".")[0] in KERNEL_PACKAGES:
        return True
    return module_name in own and "<" not in called and not getattr(function, "__closure__", None)


def registries(namespaces: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Find transformers' registries of attention, mask and experts functions, by name.

    A model's file may have registries of its own: ``namespaces`` are those of such files.
    """
    found: dict[int, tuple[str, Any]] = {}
    for module, name in (
        ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
        ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
        ("transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS"),
    ):
        registry = getattr(sys.modules.get(module), name, None)
        if registry is not None:
            found[id(registry)] = name, registry
    for namespace in namespaces:
        for name, value in list(namespace.items()):
            if isinstance(getattr(value, "_local_mapping", None), dict):
                found.setdefault(id(value), (name, value))
    yield from found.values()
