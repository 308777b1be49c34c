"""Model shapes: what a model keeps of a sequence, read from its Hugging Face configuration.

Every family names the same sizes differently. A size is looked up under all the names that are
known for it, so a new family that keeps to one of them needs nothing here. What kind of recurrence
its layers have is told by the names of their sizes, never by ``model_type``.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from mamba_cache._checks import INT32_MAX, as_ints, check_int
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states import KVCacheSpec, StateSpec, StateTensorSpec

__all__ = ["BUILT_IN", "ModelShape", "load_shape", "shape_of"]

_Config = Mapping[str, Any]

_NESTED = ("text_config", "llm_config", "language_config", "decoder", "generator")
"""Where a multimodal configuration keeps its language model's."""

_LAYER_KINDS = {
    "M": "s",
    "*": "t",
    "-": "",
    "E": "",
    "mamba": "s",
    "mamba2": "s",
    "linear_attention": "s",
    "conv": "s",
    "attention": "t",
    "full_attention": "t",
    "sliding_attention": "w",
    "hybrid": "st",
    "hybrid_sliding": "sw",
    "mlp": "",
    "moe": "",
}
"""What a layer keeps: "s" a state, "t" keys and values of all tokens, "w" of a window of them."""

_LAYER_LISTS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_MAMBA_HEADS = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
_MAMBA_HEAD_DIM = ("mamba_head_dim", "mamba_d_head", "mamba_headdim")
_STATE_DIM = ("ssm_state_size", "mamba_d_state", "state_size")
_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
_CONV_WINDOW = ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim")
_KIMI_WINDOW = ("linear_conv_kernel_dim", "short_conv_kernel_size")
_KEY_VALUE_WINDOW = ("sconv_kernel_size", "conv_kernel_size")
_EXPAND = ("mamba_expand", "expand")
_CHUNK = ("chunk_size", "mamba_chunk_size")
_HEAD_DIM = ("head_dim", "attention_head_dim")
_ATTENTION_WINDOW = ("sliding_window", "sliding_window_size", "attention_window_size")
_SSM_DTYPE = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
_DTYPE = ("dtype", "torch_dtype")

_MOST_LAYERS = 10_000

_LINEAR_ATTENTION_CHUNK = 64
"""The chunk of the usual kernels of gated delta rules; configurations do not name it."""


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
"""What names a repository of the Hugging Face hub: owner/name."""

BUILT_IN: dict[str, tuple[float, Mapping[str, Any]]] = {
    "nemotron-h-8b": (
        8.1,
        {
            "hybrid_override_pattern": "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "chunk_size": 128,
        },
    ),
    "nemotron-nano-9b-v2": (
        8.9,
        {
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            "hidden_size": 4480,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 80,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "chunk_size": 128,
        },
    ),
    "granite-4.0-h-tiny": (
        6.9,
        {
            "layer_types": 4 * (5 * ["mamba"] + ["attention"] + 4 * ["mamba"]),
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 256,
        },
    ),
    "qwen3-next-80b-a3b": (
        81.3,
        {
            "num_hidden_layers": 48,
            "full_attention_interval": 4,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
    ),
    "falcon-h1-7b": (
        7.6,
        {
            "num_hidden_layers": 44,
            "hidden_size": 3072,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 256,
        },
    ),
    "zamba2-7b": (
        7.4,
        {
            "layers_block_type": [
                "hybrid" if layer in (6, *range(11, 78, 6)) else "mamba" for layer in range(81)
            ],
            "hidden_size": 3584,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "attention_head_dim": 224,
            "n_mamba_heads": 112,
            "mamba_headdim": 64,
            "mamba_d_state": 64,
            "mamba_ngroups": 2,
            "mamba_d_conv": 4,
            "chunk_size": 256,
        },
    ),
}
"""Billions of parameters, and what the published configurations say, by name."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model keeps of a sequence.

    Attributes:
        name: What it is called.
        state_spec: One state: of a Mamba layer a conv window and an SSM state. What layers of
            sliding-window attention keep is of one size at any position, so it is part of it, as a
            kind of layers of its own.
        kv_spec: One token's keys and values. Of latent attention the latent vector and the rotated
            key count as one head, half of it as keys.
        ssm_chunk_size: Tokens of one chunk of its SSM kernels; 1 if they have none.
        weight_bytes: Bytes of its weights; None if that is not known.
        bytes_per_logits: Bytes of the logits of one token, which a ``PrefixCache`` keeps in each
            slot beside the state; 0 if the size of the vocabulary is not known.
    """

    name: str
    state_spec: StateSpec
    kv_spec: KVCacheSpec
    ssm_chunk_size: int
    weight_bytes: int | None
    bytes_per_logits: int = 0


@dataclass(frozen=True, slots=True)
class _Layers:
    """How many of a model's layers keep a state, all tokens, and a window of them."""

    states: int
    tokens: int
    windows: int


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


def shape_of(
    config: Mapping[str, Any], *, name: str, weight_bytes: int | None = None
) -> ModelShape:
    """Read a model's shape from its configuration.

    Args:
        config: A Hugging Face configuration; of a multimodal one, the text model's part counts.
        name: What to call the model.
        weight_bytes: Bytes of its weights, if they are known.

    Raises:
        InvalidArgumentError: It is of a kind that is not known, or has no layers with a state.
    """
    config = _language_model(config)
    read_states = _recurrence(config)
    layers = _count_layers(config)
    if not layers.states:
        raise InvalidArgumentError(
            f"{name} must have Mamba layers or others with a state, got "
            f"{layers.tokens + layers.windows} layers of attention alone"
        )
    dtype = _dtype(config, _DTYPE, torch.bfloat16)
    states, chunk = read_states(config, layers, dtype)
    if layers.windows:
        states.append(_attention_windows(config, layers, dtype))
    kv_spec = KVCacheSpec(layers.tokens, *(_kv_shape(config) if layers.tokens else (1, 1)), dtype)
    spec = StateSpec(tuple(tensor for tensor in states if tensor.num_layers))
    vocabulary = config.get("vocab_size")
    logits = vocabulary * dtype.itemsize if isinstance(vocabulary, int) else 0
    return ModelShape(name, spec, kv_spec, chunk, weight_bytes, logits)


def _language_model(config: _Config) -> _Config:
    """Return the part that describes the language model, with the dtype of the whole."""
    nested = None
    if isinstance(config, Mapping):
        nested = next((config[part] for part in _NESTED if config.get(part)), None)
    for part in (config, nested):
        if part is not None and not isinstance(part, Mapping):
            raise InvalidArgumentError(f"a configuration must be an object, got {part!r:.60}")
    if nested is None:
        return config
    return {**{name: config[name] for name in _DTYPE if config.get(name)}, **nested}


def _count_layers(config: _Config) -> _Layers:
    kinds = _layer_kinds(config)
    return _Layers(*(sum(part in kind for kind in kinds) for part in "stw"))


def _layer_kinds(config: _Config) -> list[str]:
    """Return what each layer keeps, in the letters of ``_LAYER_KINDS``."""
    listed = next((config[name] for name in _LAYER_LISTS if config.get(name)), None)
    if listed is not None:
        kinds = list(listed) if isinstance(listed, (list, str)) else [listed]
        unknown = [kind for kind in kinds if not isinstance(kind, str) or kind not in _LAYER_KINDS]
        if unknown:
            raise InvalidArgumentError(
                f"layers must be of the kinds {sorted(_LAYER_KINDS)}, got "
                f"{sorted({str(kind) for kind in unknown})}"
            )
        return [_LAYER_KINDS[kind] for kind in kinds]
    num_layers = _int(config, ("num_hidden_layers",), maximum=_MOST_LAYERS)
    if config.get("mamba_d_ssm") or _has(config, ("cca_time0",)):
        return ["st"] * num_layers  # attention and a state side by side in every layer
    if _is_pure(config):
        return ["s"] * num_layers
    if "local_layer_ids" in config:
        local = set(as_ints("local_layer_ids", config["local_layer_ids"] or ()))
        return ["sw" if layer in local else "st" for layer in range(num_layers)]
    attention = _attention_layers(config, num_layers)
    return ["t" if layer in attention else "s" for layer in range(num_layers)]


def _attention_layers(config: _Config, num_layers: int) -> set[int]:
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if name in config:
            return set(as_ints(name, config[name] or ()))
    if "attn_layer_period" in config:
        period = _int(config, ("attn_layer_period",))
        offset = check_int("attn_layer_offset", config.get("attn_layer_offset", 0), minimum=0)
        return {layer for layer in range(num_layers) if layer % period == offset}
    for name in ("full_attention_interval", "layer_group_size"):
        if name in config:
            interval = _int(config, (name,))
            return {layer for layer in range(num_layers) if (layer + 1) % interval == 0}
    full = _kimi_part(config).get("full_attn_layers")
    if full is not None:  # which counts from 1
        return {layer - 1 for layer in as_ints("linear_attn_config.full_attn_layers", full)}
    names = [
        *_LAYER_LISTS, "attn_layer_indices", "full_attn_idxs", "attn_layer_period",
        "full_attention_interval", "layer_group_size", "linear_attn_config.full_attn_layers",
        "local_layer_ids",
    ]  # fmt: skip
    raise InvalidArgumentError(
        f"the configuration must say which layers are attention, under one of {names}, "
        f"got model_type {config.get('model_type')!r} with none of them"
    )


_States = tuple[list[StateTensorSpec], int]
"""The tensors of a state, that of most layers first, and the tokens of the kernels' chunk."""


def _recurrence(config: _Config) -> Callable[[_Config, _Layers, torch.dtype], _States]:
    """Return what reads the sizes of the layers' states, by the names that these have.

    Raises:
        InvalidArgumentError: There is none of the names.
    """
    for _, names, read in _RECURRENCES:
        if _has(config, names):
            return read
    known = "; ".join(f"{what}: {' or '.join(names)}" for what, names, _ in _RECURRENCES)
    raise InvalidArgumentError(
        f"the configuration must say the size of a layer's state, under one of the names known "
        f"({known}), got model_type {config.get('model_type')!r} with none of them"
    )


def _mamba(config: _Config, layers: _Layers, dtype: torch.dtype) -> _States:
    window, state_dim = _int(config, _CONV_WINDOW), _int(config, _STATE_DIM)
    ssm_dtype = _dtype(config, _SSM_DTYPE, torch.float32)
    if not _has(config, _CHUNK):  # Mamba-1: a state for each channel, and no chunks
        if _is_pure(config) and _has(config, ("intermediate_size",)):
            inner = _int(config, ("intermediate_size",))
        else:
            inner = _int(config, _EXPAND) * _int(config, ("hidden_size",))
        return _conv_and_ssm(layers, (inner, window), (inner, state_dim), dtype, ssm_dtype), 1
    heads, head_dim = _mamba_heads(config)
    conv_dim = heads * head_dim + 2 * _int(config, _GROUPS) * state_dim
    ssm = (heads, head_dim, state_dim)
    return _conv_and_ssm(layers, (conv_dim, window), ssm, dtype, ssm_dtype), _int(config, _CHUNK)


def _gated_delta(config: _Config, layers: _Layers, dtype: torch.dtype) -> _States:
    heads = _int(config, ("linear_num_value_heads",))
    key_dim = _int(config, ("linear_key_head_dim",))
    value_dim = _int(config, ("linear_value_head_dim",))
    conv_dim = 2 * _int(config, ("linear_num_key_heads",)) * key_dim + heads * value_dim
    chunk = _int(config, _CHUNK) if _has(config, _CHUNK) else _LINEAR_ATTENTION_CHUNK
    ssm_dtype = _dtype(config, _SSM_DTYPE, torch.float32)
    conv, ssm = (conv_dim, _int(config, _CONV_WINDOW)), (heads, key_dim, value_dim)
    return _conv_and_ssm(layers, conv, ssm, dtype, ssm_dtype), chunk


def _kimi_delta(config: _Config, layers: _Layers, dtype: torch.dtype) -> _States:
    part = _kimi_part(config)
    sizes = {
        "linear_num_heads": part.get("num_heads"),
        "linear_head_dim": part.get("head_dim"),
        "short_conv_kernel_size": part.get("short_conv_kernel_size"),
        **config,
    }
    heads = _int(sizes, ("linear_num_heads", "num_attention_heads"))
    head_dim = _int(sizes, ("linear_head_dim", "head_dim"))
    conv, ssm = (3 * heads * head_dim, _int(sizes, _KIMI_WINDOW)), (heads, head_dim, head_dim)
    states = _conv_and_ssm(layers, conv, ssm, dtype, torch.float32)
    return states, _LINEAR_ATTENTION_CHUNK


def _short_conv(config: _Config, layers: _Layers, dtype: torch.dtype) -> _States:
    shape = (_int(config, ("hidden_size",)), _int(config, ("conv_L_cache",)))
    return [StateTensorSpec("conv", layers.states, shape, dtype)], 1


def _compressed_attention(config: _Config, layers: _Layers, dtype: torch.dtype) -> _States:
    """Read two convolutions over queries and keys, and half of the last token's values."""
    kv_heads, head_dim = _kv_shape(config)
    channels = (_int(config, ("num_attention_heads",)) + kv_heads) * head_dim
    window = _int(config, ("cca_time0",)) + _int(config, ("cca_time1",)) - 2
    if not window:
        raise InvalidArgumentError("cca_time0 + cca_time1 must be at least 3, got 2")
    values = max(kv_heads * head_dim // 2, 1)
    return [
        StateTensorSpec("conv", layers.states, (channels, window), dtype),
        StateTensorSpec("values", layers.states, (values,), dtype),
    ], 1


def _key_value_convs(config: _Config, layers: _Layers, dtype: torch.dtype) -> _States:
    """Read convolutions over keys, values and what both halves of a layer add; in float32."""
    del dtype
    window, hidden = _int(config, _KEY_VALUE_WINDOW), _int(config, ("hidden_size",))

    def convs(name: str, count: int, channels: int) -> StateTensorSpec:
        return StateTensorSpec(name, count, (2, channels, window), torch.float32)

    heads, head_dim = _kv_shape(config)
    window_heads, window_dim = _window_kv_shape(config)
    return [
        convs("conv", layers.states, hidden),
        convs("attention.conv", layers.tokens, heads * head_dim),
        convs("sliding_attention.conv", layers.windows, window_heads * window_dim),
    ], 1


_RECURRENCES = (
    ("gated delta rule", ("linear_num_value_heads",), _gated_delta),
    (
        "Kimi delta attention",
        ("linear_num_heads", "linear_attn_config", "short_conv_kernel_size"),
        _kimi_delta,
    ),
    ("short convolutions", ("conv_L_cache",), _short_conv),
    ("compressed convolutional attention", ("cca_time0",), _compressed_attention),
    ("convolutions of keys and values", _KEY_VALUE_WINDOW, _key_value_convs),
    ("Mamba", _STATE_DIM, _mamba),
)
"""Kinds of layers with a state: what they are, the names that tell them, and what reads them."""


def _conv_and_ssm(
    layers: _Layers,
    conv: tuple[int, ...],
    ssm: tuple[int, ...],
    dtype: torch.dtype,
    ssm_dtype: torch.dtype,
) -> list[StateTensorSpec]:
    return list(StateSpec.mamba(layers.states, conv, ssm, dtype, ssm_dtype).tensors)


def _mamba_heads(config: _Config) -> tuple[int, int]:
    if _is_pure(config):  # whose heads need no prefix: there are no others
        return (
            _int(config, ("num_heads", *_MAMBA_HEADS)),
            _int(config, ("head_dim", *_MAMBA_HEAD_DIM)),
        )
    heads = _int(config, _MAMBA_HEADS)
    if _has(config, _MAMBA_HEAD_DIM) and _first(config, _MAMBA_HEAD_DIM) != "auto":
        return heads, _int(config, _MAMBA_HEAD_DIM)
    if _has(config, ("mamba_d_ssm",)):
        return heads, _int(config, ("mamba_d_ssm",)) // heads
    return heads, _int(config, _EXPAND) * _int(config, ("hidden_size",)) // heads


def _attention_windows(config: _Config, layers: _Layers, dtype: torch.dtype) -> StateTensorSpec:
    """Return the keys and values of a window: the next token's own are not among them."""
    tokens = max(_int(config, _ATTENTION_WINDOW) - 1, 1)
    heads, head_dim = _window_kv_shape(config)
    shape = (2, heads, tokens, head_dim)
    return StateTensorSpec("sliding_attention.window", layers.windows, shape, dtype)


def _kv_shape(config: _Config) -> tuple[int, int]:
    """Return the key and value heads of an attention layer, and the size of one."""
    if _has(config, ("kv_lora_rank",)):  # latent attention: one vector, and the rotated key
        values = _int(config, ("kv_lora_rank",)) + _int(config, ("qk_rope_head_dim",))
        return 1, -(-values // 2)
    num_heads = _int(config, ("num_attention_heads",))
    num_kv_heads = num_heads
    if _has(config, ("num_key_value_heads",)):
        num_kv_heads = _int(config, ("num_key_value_heads",))
    if _has(config, _HEAD_DIM):
        return num_kv_heads, _int(config, _HEAD_DIM)
    return num_kv_heads, _int(config, ("hidden_size",)) // num_heads


def _window_kv_shape(config: _Config) -> tuple[int, int]:
    """Return the same of a layer of sliding-window attention."""
    if _has(config, ("swa_num_key_value_heads",)):
        return _int(config, ("swa_num_key_value_heads",)), _int(config, ("swa_head_dim",))
    return _kv_shape(config)


def _is_pure(config: _Config) -> bool:
    """Whether the model has layers of Mamba and none of attention."""
    return _has(config, _STATE_DIM) and not _has(config, ("num_attention_heads",))


def _kimi_part(config: _Config) -> _Config:
    """Return the sizes of Kimi delta attention that published files keep apart."""
    part = config.get("linear_attn_config") or {}
    if not isinstance(part, Mapping):
        raise InvalidArgumentError(f"linear_attn_config must be an object, got {part!r:.60}")
    return part


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
    if model.endswith(".json") or model.startswith(("/", ".", "~")):
        message += " There is no file or folder of that name"
    elif _HUB_ID.fullmatch(model):
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
