"""What a model keeps of a sequence, read from its Hugging Face configuration.

Every family names the same sizes differently. A size is looked up under all the names that are
known for it, so a new family that keeps to one of them needs nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mamba_cache._checks import INT32_MAX, as_ints, check_int
from mamba_cache.cli.built_in import BUILT_IN
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states import KVCacheSpec, StateSpec

__all__ = ["ModelShape", "load_shape", "shape_of"]

_Config = Mapping[str, Any]

_MAMBA, _ATTENTION, _NEITHER, _BOTH = (True, False), (False, True), (False, False), (True, True)
_LAYER_KINDS = {
    "M": _MAMBA,
    "*": _ATTENTION,
    "-": _NEITHER,
    "E": _NEITHER,
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "linear_attention": _MAMBA,
    "attention": _ATTENTION,
    "full_attention": _ATTENTION,
    "hybrid": _BOTH,
    "mlp": _NEITHER,
    "moe": _NEITHER,
}
"""Whether a layer keeps a state, and whether it keeps keys and values."""

_LAYER_LISTS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_MAMBA_HEADS = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
_MAMBA_HEAD_DIM = ("mamba_head_dim", "mamba_d_head", "mamba_headdim")
_STATE_DIM = ("ssm_state_size", "mamba_d_state", "state_size")
_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
_CONV_WINDOW = ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim")
_EXPAND = ("mamba_expand", "expand")
_CHUNK = ("chunk_size", "mamba_chunk_size")
_HEAD_DIM = ("head_dim", "attention_head_dim")
_SSM_DTYPE = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
_DTYPE = ("dtype", "torch_dtype")

_MOST_LAYERS = 10_000

_LINEAR_ATTENTION_CHUNK = 64
"""The chunk of the usual kernels of gated delta rules; configurations do not name it."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model keeps of a sequence.

    Attributes:
        name: What it is called.
        state_spec: One state: a conv window and an SSM state in each Mamba layer.
        kv_spec: One token's keys and values.
        ssm_chunk_size: Tokens of one chunk of its SSM kernels; 1 if they have none.
        weight_bytes: Bytes of its weights; None if that is not known.
    """

    name: str
    state_spec: StateSpec
    kv_spec: KVCacheSpec
    ssm_chunk_size: int
    weight_bytes: int | None


def load_shape(model: str) -> ModelShape:
    """Read a model's shape.

    Args:
        model: One of ``BUILT_IN``, or the path of a config.json or of the folder that holds one.

    Raises:
        InvalidArgumentError: There is no such model or file, or it cannot be read.
    """
    if model in BUILT_IN:
        billions, config = BUILT_IN[model]
        return shape_of(config, name=model, weight_bytes=int(billions * 10**9) * 2)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"model must be one of {', '.join(BUILT_IN)}, or a Hugging Face config.json, got "
            f"{model!r}: {error}"
        ) from error
    return shape_of(config, name=str(path), weight_bytes=_checkpoint_bytes(path.parent))


def shape_of(
    config: Mapping[str, Any], *, name: str, weight_bytes: int | None = None
) -> ModelShape:
    """Read a model's shape from its configuration.

    Args:
        config: A Hugging Face configuration; of a multimodal one, the text model's part counts.
        name: What to call the model.
        weight_bytes: Bytes of its weights, if they are known.

    Raises:
        InvalidArgumentError: It is of a kind that is not known, or has no Mamba layers.
    """
    for part in (config, config.get("text_config") if isinstance(config, Mapping) else None):
        if part is not None and not isinstance(part, Mapping):
            raise InvalidArgumentError(f"a configuration must be an object, got {part!r:.60}")
    config = config.get("text_config") or config
    kinds = _layer_kinds(config)
    num_mamba = sum(keeps_state for keeps_state, _ in kinds)
    num_attention = sum(keeps_tokens for _, keeps_tokens in kinds)
    if not num_mamba:
        raise InvalidArgumentError(
            f"{name} must have Mamba layers, got {len(kinds)} layers of none"
        )
    dtype = _dtype(config, _DTYPE, torch.bfloat16)
    conv, ssm, chunk = _state_shapes(config)
    ssm_dtype = _dtype(config, _SSM_DTYPE, torch.float32)
    return ModelShape(
        name,
        StateSpec.mamba(num_mamba, conv, ssm, dtype, ssm_dtype),
        KVCacheSpec(num_attention, *_kv_shape(config), dtype),
        chunk,
        weight_bytes,
    )


def _layer_kinds(config: _Config) -> list[tuple[bool, bool]]:
    """Return of each layer whether it keeps a state, and whether keys and values."""
    listed = next((config[name] for name in _LAYER_LISTS if config.get(name)), None)
    if listed is not None:
        kinds = list(listed) if isinstance(listed, (list, str)) else [listed]
        unknown = [kind for kind in kinds if not isinstance(kind, str) or kind not in _LAYER_KINDS]
        if unknown:
            raise InvalidArgumentError(
                f"layers must be of the kinds {sorted(_LAYER_KINDS)}, got {unknown}"
            )
        return [_LAYER_KINDS[kind] for kind in kinds]
    num_layers = _int(config, ("num_hidden_layers",), maximum=_MOST_LAYERS)
    if config.get("mamba_d_ssm"):  # attention and Mamba side by side in every layer
        return [_BOTH] * num_layers
    attention = _attention_layers(config, num_layers)
    return [_ATTENTION if layer in attention else _MAMBA for layer in range(num_layers)]


def _attention_layers(config: _Config, num_layers: int) -> set[int]:
    if "attn_layer_indices" in config:
        return set(as_ints("attn_layer_indices", config["attn_layer_indices"] or ()))
    if "attn_layer_period" in config:
        period = _int(config, ("attn_layer_period",))
        offset = check_int("attn_layer_offset", config.get("attn_layer_offset", 0), minimum=0)
        return {layer for layer in range(num_layers) if layer % period == offset}
    if "full_attention_interval" in config:
        interval = _int(config, ("full_attention_interval",))
        return {layer for layer in range(num_layers) if (layer + 1) % interval == 0}
    raise InvalidArgumentError(
        f"the configuration must say which layers are attention, under one of "
        f"{[*_LAYER_LISTS, 'attn_layer_indices', 'attn_layer_period', 'full_attention_interval']}, "
        f"got model_type {config.get('model_type')!r} with none of them"
    )


def _state_shapes(config: _Config) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the shapes of one layer's conv window and SSM state, and the chunk of its kernel."""
    window = _int(config, _CONV_WINDOW)
    if "linear_num_value_heads" in config:
        return _linear_attention(config, window)
    state_dim = _int(config, _STATE_DIM)
    if not _has(config, _CHUNK):  # Mamba-1: a state for each channel, and no chunks
        inner = _int(config, _EXPAND) * _int(config, ("hidden_size",))
        return (inner, window), (inner, state_dim), 1
    heads, head_dim = _mamba_heads(config)
    groups = _int(config, _GROUPS)
    conv_dim = heads * head_dim + 2 * groups * state_dim
    return (conv_dim, window), (heads, head_dim, state_dim), _int(config, _CHUNK)


def _linear_attention(config: _Config, window: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    heads = _int(config, ("linear_num_value_heads",))
    key_dim = _int(config, ("linear_key_head_dim",))
    value_dim = _int(config, ("linear_value_head_dim",))
    conv_dim = 2 * _int(config, ("linear_num_key_heads",)) * key_dim + heads * value_dim
    chunk = _int(config, _CHUNK) if _has(config, _CHUNK) else _LINEAR_ATTENTION_CHUNK
    return (conv_dim, window), (heads, key_dim, value_dim), chunk


def _mamba_heads(config: _Config) -> tuple[int, int]:
    heads = _int(config, _MAMBA_HEADS)
    if _has(config, _MAMBA_HEAD_DIM) and _first(config, _MAMBA_HEAD_DIM) != "auto":
        return heads, _int(config, _MAMBA_HEAD_DIM)
    if _has(config, ("mamba_d_ssm",)):
        return heads, _int(config, ("mamba_d_ssm",)) // heads
    return heads, _int(config, _EXPAND) * _int(config, ("hidden_size",)) // heads


def _kv_shape(config: _Config) -> tuple[int, int]:
    """Return the key and value heads of an attention layer, and the size of one."""
    num_heads = _int(config, ("num_attention_heads",))
    num_kv_heads = num_heads
    if _has(config, ("num_key_value_heads",)):
        num_kv_heads = _int(config, ("num_key_value_heads",))
    if _has(config, _HEAD_DIM):
        return num_kv_heads, _int(config, _HEAD_DIM)
    return num_kv_heads, _int(config, ("hidden_size",)) // num_heads


def _has(config: _Config, names: tuple[str, ...]) -> bool:
    return any(config.get(name) is not None for name in names)


def _first(config: _Config, names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _int(config: _Config, names: tuple[str, ...], *, maximum: int = INT32_MAX) -> int:
    """Return a size, whatever it is called.

    Raises:
        InvalidArgumentError: It is missing, or no int from 1 to ``maximum``.
    """
    name = f"the configuration's {' or '.join(names)}"
    return check_int(name, _first(config, names), minimum=1, maximum=maximum)


def _dtype(config: _Config, names: tuple[str, ...], default: torch.dtype) -> torch.dtype:
    name = _first(config, names)
    if name is None:
        return default
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(f"{' or '.join(names)} must be a torch dtype, got {name!r}")
    return dtype


def _checkpoint_bytes(folder: Path) -> int | None:
    """Return the bytes of the weights beside a configuration, if they are there.

    Raises:
        InvalidArgumentError: Their index cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        except (LookupError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"{index} must say metadata.total_size: {error!r}"
            ) from error
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None
