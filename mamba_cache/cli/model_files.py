"""Model configurations for ``plan``: built in, in a file or folder, or in the hub's cache."""

from __future__ import annotations

import importlib
import json
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mamba_cache.cli.built_in import BUILT_IN
from mamba_cache.cli.model_shapes import ModelShape, shape_of
from mamba_cache.errors import InvalidArgumentError

__all__ = ["load_shape"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
"""What names a repository of the Hugging Face hub: owner/name."""


def load_shape(model: str) -> ModelShape:
    """Read a model's shape. Nothing is downloaded.

    Args:
        model: One of ``BUILT_IN``, in any case; the path of a config.json or of the folder that
            holds one; or the hub id of a model that is in the local cache of huggingface_hub.

    Raises:
        InvalidArgumentError: There is no such model or file, or it cannot be read.
    """
    if model.lower() in BUILT_IN:
        billions, config = BUILT_IN[model.lower()]
        return shape_of(config, name=model.lower(), weight_bytes=int(billions * 10**9) * 2)
    path = _find(model)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} must be a Hugging Face config.json: {error}") from error
    return shape_of(found, name=str(path), weight_bytes=_checkpoint_bytes(path.parent))


def _find(model: str) -> Path:
    """Return the file that holds a model's configuration.

    Raises:
        InvalidArgumentError: There is none.
    """
    path = Path(model)
    try:
        is_folder, is_file = bool(model) and path.is_dir(), path.is_file()
    except (OSError, ValueError):  # too long for a path, or with a character that none can have
        is_folder = is_file = False
    if is_folder and not (path / "config.json").is_file():
        raise InvalidArgumentError(f"the folder {model!r} must hold a config.json, and holds none")
    if is_folder or is_file:
        return path / "config.json" if is_folder else path
    cached = _cached_config(model) if _HUB_ID.fullmatch(model) else None
    if cached is None:
        raise InvalidArgumentError(_not_found(model))
    return cached


def _cached_config(hub_id: str) -> Path | None:
    """Return a repository's config.json if huggingface_hub is here and has it in its cache."""
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        return None
    try:
        found: Any = hub.try_to_load_from_cache(hub_id, "config.json")
    except (OSError, ValueError):  # no valid id, or a cache that cannot be read
        return None
    return Path(found) if isinstance(found, str) else None


def _not_found(model: str) -> str:
    """Say what is allowed, what may have been meant, and how to get it."""
    allowed = f"{', '.join(BUILT_IN)}, or a Hugging Face config.json or the folder that holds one"
    message = f"model must be one of {allowed}, got {model!r:.200}"
    near = get_close_matches(model.rpartition("/")[2].lower(), BUILT_IN, n=1)
    message += f"; did you mean {near[0]!r}?" if near else "."
    if _HUB_ID.fullmatch(model) and not model.endswith(".json"):
        message += (
            " Nothing is downloaded, and this machine's cache of the hub has no such model: run "
            f"'hf download {model} config.json' first"
        )
    return message


def _checkpoint_bytes(folder: Path) -> int | None:
    """Return the bytes of the weights beside a configuration, if they are there.

    Raises:
        InvalidArgumentError: Their index cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        except (LookupError, TypeError, ValueError, OSError) as error:
            raise InvalidArgumentError(
                f"{index} must say metadata.total_size: {error!r}"
            ) from error
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None
