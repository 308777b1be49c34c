"""Model shapes: specs of a model's state and KV cache, read from a cache that the model fills.

The model of a configuration is built on the meta device, where tensors have shapes but no memory,
and computes a few tokens. There is no list of families: transformers builds the models.
"""

from __future__ import annotations

import importlib
import inspect
import json
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import torch

from mamba_cache.errors import InvalidArgumentError, MambaCacheError
from mamba_cache.integrations.transformers.layers import (
    PrefixLayout,
    SequenceMemory,
    learn_layers,
    read_layers,
)
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.states import KVCacheSpec, StateSpec

__all__ = ["BUILT_IN", "ModelShape", "load_shape", "shape_of"]

_TOKENS: Final = 8
_LINEAR_ATTENTION_CHUNK: Final = 64
"""Chunk size of the usual gated delta rule kernels; configurations do not name it."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Memory of one sequence in a model.

    Attributes:
        name: The model's name.
        state_spec: One state. It includes the keys and values of sliding windows, whose size does
            not depend on the position.
        kv_spec: Keys and values of one token.
        ssm_chunk_size: Tokens of one chunk of the SSM kernels; 1 without chunks.
        weight_bytes: Bytes of the weights.
        num_state_layers: Number of layers with a state.
    """

    name: str
    state_spec: StateSpec
    kv_spec: KVCacheSpec
    ssm_chunk_size: int
    weight_bytes: int
    num_state_layers: int


def _built_in(
    name: str,
    billions: float,
    mamba: tuple[int, int, tuple[int, int, int]],
    kv: tuple[int, int, int],
    chunk: int,
) -> ModelShape:
    layers, channels, ssm = mamba
    spec = StateSpec.mamba(layers, (channels, 4), ssm, torch.bfloat16, torch.float32)
    weight_bytes = int(billions * 10**9) * 2
    return ModelShape(name, spec, KVCacheSpec(*kv, torch.bfloat16), chunk, weight_bytes, layers)


BUILT_IN: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _built_in("nemotron-h-8b", 8.1, (24, 10240, (128, 64, 128)), (4, 8, 128), 128),
        _built_in("nemotron-nano-9b-v2", 8.9, (27, 12288, (128, 80, 128)), (4, 8, 128), 128),
        _built_in("granite-4.0-h-tiny", 6.9, (36, 3328, (48, 64, 128)), (4, 4, 128), 256),
        _built_in("qwen3-next-80b-a3b", 81.3, (36, 8192, (32, 128, 128)), (12, 2, 256), 64),
        _built_in("falcon-h1-7b", 7.6, (44, 3584, (24, 128, 256)), (44, 2, 128), 256),
        _built_in("zamba2-7b", 7.4, (81, 7424, (112, 64, 64)), (13, 32, 224), 256),
    )
}
"""Published models by name, in bfloat16. Their shapes do not need transformers."""


def load_shape(model: str) -> ModelShape:
    """Return a model's shape. Nothing is downloaded.

    Args:
        model: A name in ``BUILT_IN``, upper or lower case; the path of a config.json or of its
            folder; or the hub id of a model in the local cache of huggingface_hub.

    Raises:
        InvalidArgumentError: There is no such model or file, or the file cannot be read.
        MissingExtraError: A configuration must be read and transformers is not installed.
        UnsupportedVersionError: transformers is too old.
    """
    if model.lower() in BUILT_IN:
        return BUILT_IN[model.lower()]
    path = _find(model)
    library = transformers()
    try:
        config = library.AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers may raise anything for a malformed file
        raise InvalidArgumentError(
            f"{path} must be a config.json that transformers reads: {_first_line(error)}"
        ) from error
    shape = shape_of(config, name=str(path))
    stored = _checkpoint_bytes(path.parent)
    return shape if stored is None else replace(shape, weight_bytes=stored)


def shape_of(config: Any, *, name: str) -> ModelShape:
    """Build a configuration's model on the meta device, and return the shape of its cache.

    Args:
        config: A configuration of transformers; only the text part of a multimodal one is used.
        name: The model's name.

    Raises:
        InvalidArgumentError: transformers cannot build or run the model on the meta device, or the
            model has no layer whose state a prefix cache could keep.
    """
    library = transformers()
    whole, config = config, config.get_text_config(decoder=True)
    dtype = config.dtype or whole.dtype or torch.bfloat16
    log = library.utils.logging
    verbosity = log.get_verbosity()
    log.set_verbosity_error()  # hides warnings of missing kernels, which do not affect shapes
    try:
        # bfloat16: grouped matrix products of experts require it on the meta device.
        with torch.device("meta"):
            model = library.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, trust_remote_code=False
            ).eval()
        cache = _filled_cache(model)
    except MambaCacheError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"{name} cannot be built on the meta device: {_first_line(error)}"
        ) from error
    finally:
        log.set_verbosity(verbosity)
    layers = learn_layers(cache)
    memory = read_layers(cache, layers, _TOKENS)
    kept = [dtype if each == torch.bfloat16 else each for each in memory.dtypes()]
    layout = PrefixLayout(cache, layers, memory.to_dtypes(kept), block_size_tokens=1)
    num_weights = sum(weight.numel() for weight in model.parameters())
    return ModelShape(
        name,
        layout.state_spec,
        _kv_spec(layout),
        _chunk_size(config, memory),
        num_weights * dtype.itemsize,
        layout.num_state_layers,
    )


def _filled_cache(model: Any) -> Any:
    """Return the cache of a model on the meta device after a few tokens."""
    accepted = inspect.signature(model.forward).parameters
    name = "cache_params" if "cache_params" in accepted else "past_key_values"
    cache = transformers().DynamicCache(config=model.config.get_text_config(decoder=True))
    options: dict[str, Any] = {name: cache, "use_cache": True}
    if "position_ids" in accepted:
        options["position_ids"] = torch.arange(_TOKENS, device="meta")[None]
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    with torch.no_grad():
        model(input_ids=ids, **options)
    return cache


def _kv_spec(layout: PrefixLayout) -> KVCacheSpec:
    """Return a token's keys and values as one head of the mean size, because layers may differ."""
    kept = layout.block_tensors
    num_layers = sum(tensor.num_layers for tensor in kept) // 2
    dtype = kept[0].dtype if kept else torch.bfloat16
    size = -(-layout.bytes_per_block // (2 * max(num_layers, 1) * dtype.itemsize))
    return KVCacheSpec(num_layers, 1, max(size, 1), dtype)


def _chunk_size(config: Any, memory: SequenceMemory) -> int:
    for name in ("chunk_size", "mamba_chunk_size"):
        if isinstance(size := getattr(config, name, None), int):
            return size
    has_heads = any(state.dim() == 4 for state in memory.states)  # [1, heads, key, value]
    return _LINEAR_ATTENTION_CHUNK if has_heads else 1


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _find(model: str) -> Path:
    """Return the file with a model's configuration."""
    cached: Any = None
    try:
        for path in (Path(model), Path(model, "config.json")):
            if model and path.is_file():
                return path
        hub = importlib.import_module("huggingface_hub")
        cached = hub.try_to_load_from_cache(model, "config.json")
    except (ImportError, OSError, ValueError):  # no path, no hub id, or no huggingface_hub
        pass
    if isinstance(cached, str):
        return Path(cached)
    near = get_close_matches(model.rpartition("/")[2].lower(), BUILT_IN, n=1)
    raise InvalidArgumentError(
        f"model must be one of {', '.join(BUILT_IN)}, a Hugging Face config.json or the folder "
        "that holds one, or the hub id of a model in this machine's cache, where 'hf download "
        f"OWNER/NAME config.json' puts it, got {model!r:.200}"
        + (f"; did you mean {near[0]!r}?" if near else "")
    )


def _checkpoint_bytes(folder: Path) -> int | None:
    """Return the bytes of the weight files in a folder, None without weight files.

    Raises:
        InvalidArgumentError: The index of the weights cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        except (LookupError, TypeError, ValueError, OSError) as error:
            raise InvalidArgumentError(
                f"{index} must have metadata.total_size: {error!r}"
            ) from error
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None
