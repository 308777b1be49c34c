"""Specs of Mamba groups, copy functions such as ``get_conv_copy_spec``, and state memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from mamba_cache._torch import outside_inference_mode
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.protocols import KVCacheConfig

__all__ = [
    "CopyFuncs",
    "MambaCopySpec",
    "MambaLayer",
    "MambaSpec",
    "StateMemory",
    "describe_states",
    "get_conv_copy_spec",
    "get_conv_copy_spec_ds",
    "get_mamba_groups",
    "get_temporal_copy_spec",
    "list_layers",
    "shared_schedule",
]

_SPEC_FIELDS = ("block_size", "num_speculative_blocks", "shapes", "dtypes", "mamba_cache_mode")
_SHARED_FIELDS = ("block_size", "num_speculative_blocks", "mamba_cache_mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """The states of the layers of one KV cache group.

    Attributes:
        block_size: Tokens of one column of the block table.
        num_speculative_blocks: Maximum drafts of a step: columns after the running column.
        shapes: Shape of each kind of state in one block.
        dtypes: Dtype of each kind of state.
        mamba_cache_mode: "none", "align" or "all".
        mamba_type: The kind of layer: the key if copy functions are given as a dict.

    Raises:
        InvalidArgumentError: A field is out of range, or shapes and dtypes differ in number.
    """

    block_size: int
    num_speculative_blocks: int = 0
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mamba_cache_mode: str = "none"
    mamba_type: str = "mamba2"

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_speculative_blocks < 0:
            raise InvalidArgumentError(
                f"block_size must be >= 1 and num_speculative_blocks >= 0, "
                f"got {self.block_size} and {self.num_speculative_blocks}"
            )
        if self.mamba_cache_mode not in ("none", "align", "all"):
            raise InvalidArgumentError(
                f"mamba_cache_mode must be 'none', 'align' or 'all', got {self.mamba_cache_mode!r}"
            )
        if len(self.shapes) != len(self.dtypes):
            raise InvalidArgumentError(
                f"shapes and dtypes must be equally many, "
                f"got {len(self.shapes)} and {len(self.dtypes)}"
            )


def get_mamba_groups(kv_cache_config: KVCacheConfig) -> dict[Any, list[int]]:
    """Return the ids of the Mamba groups by the specs of their layers.

    A spec of another class is recognised by the attributes of ``MambaSpec``. A group with a spec
    for each layer (``kv_cache_specs``) is listed under each of these specs.

    Raises:
        InvalidArgumentError: There is no Mamba group.
    """
    groups: dict[Any, dict[int, None]] = {}
    for group_id, _, spec in list_layers(kv_cache_config):
        groups.setdefault(spec, {})[group_id] = None
    return {spec: list(group_ids) for spec, group_ids in groups.items()}


MambaLayer: TypeAlias = tuple[int, "str | None", Any]
"""Group, name and spec of a layer. The name is None for a group without layers on this pipeline
rank."""


def list_layers(kv_cache_config: KVCacheConfig) -> list[MambaLayer]:
    """Return all layers of Mamba groups."""
    layers: list[MambaLayer] = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        some_spec = next(iter(by_layer.values()), group.kv_cache_spec)
        if all(hasattr(some_spec, field) for field in _SPEC_FIELDS):
            for name in group.layer_names or [None]:
                spec = by_layer[name] if by_layer and name else some_spec
                layers.append((group_id, name, spec))
    if not layers:
        raise InvalidArgumentError(
            f"a group whose spec has {', '.join(_SPEC_FIELDS)} is required, got "
            f"{[type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]}"
        )
    return layers


def shared_schedule(kv_cache_config: KVCacheConfig) -> tuple[list[int], MambaSpec]:
    """Return the ids of all Mamba groups, and a spec with their shared attributes.

    Groups and layers may differ in kind, shapes and dtypes, but not in ``_SHARED_FIELDS``.
    """
    layers = list_layers(kv_cache_config)
    scheduling: dict[tuple[Any, ...], list[int]] = {}
    for group_id, _, spec in layers:
        shared = tuple(getattr(spec, field) for field in _SHARED_FIELDS)
        scheduling.setdefault(shared, []).append(group_id)
    if len(scheduling) > 1:
        raise InvalidArgumentError(
            f"all Mamba groups must agree on {', '.join(_SHARED_FIELDS)}, got {scheduling}"
        )
    return list(dict.fromkeys(group_id for group_id, *_ in layers)), layers[0][2]


CopyFuncs: TypeAlias = "Mapping[Any, Sequence[Callable[..., Any]]] | Sequence[Callable[..., Any]]"
"""Copy functions, one for each kind of state, by ``mamba_type`` of the layer's spec. Engines before
vLLM 0.32 have one sequence for all layers."""

_KINDS = ("get_conv_copy_spec", "get_conv_copy_spec_ds", "get_temporal_copy_spec")


@dataclass(frozen=True, slots=True)
class MambaCopySpec:
    """The part of one block to read.

    Attributes:
        start_addr: Address of the first byte.
        num_elements: Contiguous elements of one row.
        num_rows: Number of rows: more than one for a shifted conv window stored as [dim, W].
        row_stride: Elements from row to row.
    """

    start_addr: int
    num_elements: int
    num_rows: int = 1
    row_stride: int = 0


@dataclass(frozen=True, slots=True)
class StateMemory:
    """One state tensor as bytes.

    A conv window stored as [W, dim] has one row of W tokens; stored as [dim, W] it has a row for
    each channel. A temporal state is one row of one token.
    """

    blocks: torch.Tensor  # [num_blocks, num_rows, tokens, token_bytes] uint8, each contiguous
    conv_width: int  # tokens of the window, 0 for a temporal state
    group: int  # index among the Mamba groups


def get_conv_copy_spec(
    state: torch.Tensor, block_ids: Sequence[int], cur_block_idx: int, num_accepted_tokens: int
) -> MambaCopySpec:
    """Return the part to read of a conv window in SD layout: ``state`` is [blocks, W, dim].

    In ``mamba_state_copy_funcs`` this function marks a state as such a window. ``block_ids`` are
    the blocks of all columns, ``cur_block_idx`` is the running column, and
    ``num_accepted_tokens`` includes the first token.
    """
    return _read(get_conv_copy_spec, state, block_ids, cur_block_idx, num_accepted_tokens - 1)


def get_conv_copy_spec_ds(
    state: torch.Tensor, block_ids: Sequence[int], cur_block_idx: int, num_accepted_tokens: int
) -> MambaCopySpec:
    """Return the part to read of a conv window in DS layout: ``state`` is [blocks, dim, W]."""
    return _read(get_conv_copy_spec_ds, state, block_ids, cur_block_idx, num_accepted_tokens - 1)


def get_temporal_copy_spec(
    state: torch.Tensor, block_ids: Sequence[int], cur_block_idx: int, num_accepted_tokens: int
) -> MambaCopySpec:
    """Return the part to read of a temporal (SSM) state: ``state`` is [blocks, ...]."""
    return _read(get_temporal_copy_spec, state, block_ids, cur_block_idx, num_accepted_tokens - 1)


@outside_inference_mode
def describe_states(
    layers: Sequence[MambaLayer], forward_context: Mapping[str, Any], copy_funcs: CopyFuncs
) -> list[StateMemory]:
    """Describe every state tensor of the layers, in the order of groups, layers, states.

    A copy function may be another library's function of the same name. A layer may have more states
    than functions; the rest is not copied.
    """
    group_ids = list(dict.fromkeys(group_id for group_id, *_ in layers))
    memories = []
    for group_id, name, spec in layers:
        if name is None:
            continue
        states, funcs = forward_context[name].kv_cache, copy_funcs
        if isinstance(funcs, Mapping):
            if spec.mamba_type not in funcs:
                raise InvalidArgumentError(
                    f"copy functions of layers of the kind {spec.mamba_type} are required, "
                    f"got those of {list(funcs)}"
                )
            funcs = funcs[spec.mamba_type]
        if len(states) < len(funcs):
            raise InvalidArgumentError(
                f"a layer must have a state for each of {len(funcs)} copy functions, "
                f"got {len(states)} in {name!r}"
            )
        group = group_ids.index(group_id)
        memories += [_describe(*pair, group) for pair in zip(states, funcs, strict=False)]
    return memories


def _read(
    copy_func: Callable[..., Any],
    state: torch.Tensor,
    block_ids: Sequence[int],
    column: int,
    bias: int,
) -> MambaCopySpec:
    memory = _describe(state, copy_func, 0)
    shift = bias if memory.conv_width else 0
    rows = memory.blocks[block_ids[column + bias - shift], :, shift:]
    if rows.is_contiguous():
        return MambaCopySpec(rows.data_ptr(), rows.numel() // state.element_size())
    row_elements = rows[0].numel() // state.element_size()
    row_stride = rows.stride(0) // state.element_size()
    return MambaCopySpec(rows.data_ptr(), row_elements, len(rows), row_stride)


def _describe(state: torch.Tensor, copy_func: Callable[..., Any], group: int) -> StateMemory:
    kind = _kind(copy_func)
    is_conv = kind != "get_temporal_copy_spec"
    # The function's name gives the tokens' axis; the strides give the layout in memory.
    tokens_axis = -1 if kind == "get_conv_copy_spec_ds" else 1
    blocks = state
    if is_conv and state.dim() > 2 and not state[:1].is_contiguous():
        other_axis = 1 if tokens_axis == -1 else -1
        blocks, tokens_axis = state.movedim(tokens_axis, other_axis), other_axis
    if state.dim() < 2 or (len(state) and not blocks[0].is_contiguous()):
        raise InvalidArgumentError(
            f"the state of one block must be contiguous, got shape {tuple(state.shape)}, "
            f"strides {state.stride()}"
        )
    width = blocks.shape[tokens_axis] if is_conv else 0
    num_rows = math.prod(blocks.shape[1:-1]) if tokens_axis == -1 else 1
    tokens = max(width, 1)
    token_bytes = math.prod(blocks.shape[1:]) * state.element_size() // max(num_rows * tokens, 1)
    as_bytes = blocks.unsqueeze(-1).view(torch.uint8)
    return StateMemory(as_bytes.view(len(blocks), num_rows, tokens, token_bytes), width, group)


def _kind(copy_func: Callable[..., Any]) -> str:
    """Return the name of this module's function that a copy function corresponds to."""
    kind = getattr(copy_func, "__name__", repr(copy_func))
    if kind not in _KINDS:
        raise InvalidArgumentError(f"a copy function must be one of {_KINDS}, got {kind}")
    # vLLM has one function for both layouts, and a setting for the layout of all windows.
    module = sys.modules.get(copy_func.__module__)
    is_dim_first = getattr(module, "is_conv_state_dim_first", None)
    if kind == "get_conv_copy_spec" and is_dim_first is not None and is_dim_first():
        return "get_conv_copy_spec_ds"
    return kind
