"""Former submodules under the names that they had: the modules that took their place.

``mamba_cache.align``, ``mamba_cache.engine``, ``mamba_cache.models`` and
``mamba_cache.metadata.mamba2`` are thin modules that stand for others in this way. What is imported
by an old path is the same object, so pickles and ``isinstance`` know it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module

__all__ = ["keep_submodules"]


def keep_submodules(old: str, package: str, names: Mapping[str, str]) -> None:
    """Let the former submodules of a module be imported as they were.

    Args:
        old: The module, which is being imported.
        package: Where its submodules are now.
        names: Their names there, by those that they had.
    """
    for name, new in names.items():
        module = import_module(f"{package}.{new}")
        sys.modules[f"{old}.{name}"] = module
        setattr(sys.modules[old], name, module)  # unnoticed: it runs when a module is imported
