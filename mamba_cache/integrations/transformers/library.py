"""The transformers library, imported when it is first needed."""

from __future__ import annotations

import importlib
from typing import Any

from mamba_cache._extras import install_hint
from mamba_cache.errors import MissingExtraError, UnsupportedVersionError

__all__ = ["transformers"]


def transformers() -> Any:
    """Return the module ``transformers``; raise if it is missing or too old."""
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError(
            f"this needs transformers >= 5.10: {install_hint('transformers')}"
        ) from error
    if not hasattr(library.cache_utils, "LinearAttentionLayer"):
        raise UnsupportedVersionError(
            f"transformers must be >= 5.10, got {library.__version__}: its caches have no "
            "LinearAttentionLayer"
        )
    return library
