"""The kernels that a transformers model computes with: a package's, or PyTorch's reference."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

REFERENCE = "reference (PyTorch)"
"""Name in place of a kernel that is not installed."""

KERNEL_PACKAGES = ("causal_conv1d", "fla", "mamba_ssm")
"""Packages that transformers takes linear-attention kernels from, if they are installed."""

_KERNELS = {
    "scan": (
        "mamba_chunk_scan_combined",
        "chunk_gated_delta_rule",
        "chunk_kda",
        "selective_scan_fn",
    ),
    "convolution": ("causal_conv1d_fn",),
    "decode step": (
        "selective_state_update",
        "fused_recurrent_gated_delta_rule",
        "fused_recurrent_kda",
    ),
    "decode convolution": ("causal_conv1d_update",),
}
"""Functions that a linear-attention layer calls, by part."""


def kernels_of(model: Any) -> dict[str, str]:
    """Return the package and version of each part of the linear-attention layers.

    Args:
        model: A model of transformers.

    Returns:
        By part ("scan", "convolution", "decode step", "decode convolution"): a package with its
        version, or ``REFERENCE``. A part that the model's module does not name is left out.
    """
    modules = [sys.modules[name] for name in sorted({type(m).__module__ for m in model.modules()})]
    found: dict[str, str] = {}
    for module in modules:
        for part, names in _KERNELS.items():
            sources = [source for name in names if (source := _source(module, name))]
            kernels = [source for source in sources if source != REFERENCE]
            if sources and found.get(part, REFERENCE) == REFERENCE:
                found[part] = (kernels or sources)[0]
    return {part: found[part] for part in _KERNELS if part in found}


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that a model's time depends on."""
    return {name: _version(name) for name in ("torch", "triton", "transformers")}


@contextmanager
def without_kernels() -> Iterator[None]:
    """Import models as if no kernel package were installed, while the context manager is open.

    Raises:
        RuntimeError: One of the packages is in use already, so that models may have it.
    """
    loaded = [name for name in KERNEL_PACKAGES if sys.modules.get(name) is not None]
    if loaded:
        raise RuntimeError(
            f"the reference path needs a process that has not imported {', '.join(loaded)}"
        )
    kept = {name: sys.modules[name] for name in KERNEL_PACKAGES if name in sys.modules}
    sys.modules.update(dict.fromkeys(KERNEL_PACKAGES))
    try:
        yield
    finally:
        for name in KERNEL_PACKAGES:
            del sys.modules[name]
        sys.modules.update(kept)


def _source(module: ModuleType, name: str) -> str | None:
    """Return the source of a module's kernel; None if the module has no function for the part."""
    for function in list(vars(module).values()):
        chosen = _frozen(function, "implementation")
        if chosen is not None and name in (
            _frozen(function, "func_name"),
            getattr(chosen, "__name__", ""),
        ):
            return _package_of(chosen)
    # Before transformers 5.17 kernels are globals of the module, None where they are missing.
    if name not in vars(module):
        return None
    # Mamba2 layers use all of these kernels or none.
    is_mamba = "selective_state_update" in vars(module)
    if is_mamba and not getattr(module, "is_fast_path_available", True):
        return REFERENCE
    return _package_of(getattr(module, name))


def _frozen(function: object, variable: str) -> Any:
    """Return the value of a name in a closure; None if missing.

    transformers picks the implementation of a function when it decorates it
    (``use_kernel_func_from_hub_with_fallback``), and stores the choice only in the closure.
    """
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return cells[variable].cell_contents if variable in cells else None


def _package_of(implementation: Any) -> str:
    package = getattr(implementation, "__module__", None)
    package = package.partition(".")[0] if package else "transformers"
    return REFERENCE if package == "transformers" else f"{package} {_version(package)}"


def _version(package: str) -> str:
    """Return a package's own version attribute; else the version of its distribution."""
    own = getattr(sys.modules.get(package), "__version__", None)
    return importlib.metadata.version(package) if own is None else str(own)
