"""Copy functions such as ``get_conv_copy_spec``, and where each layer's states lie in memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from mamba_cache._inference_mode import outside_inference_mode
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.mamba_spec import spec_of_layer
from mamba_cache.integrations.vllm.protocols import KVCacheConfig

__all__ = [
    "CopyFuncs",
    "MambaCopySpec",
    "StateMemory",
    "count_states",
    "describe_states",
    "get_conv_copy_spec",
    "get_conv_copy_spec_ds",
    "get_temporal_copy_spec",
    "validate_mamba_state_copy_funcs",
]

CopyFuncs: TypeAlias = "Mapping[Any, Sequence[Callable[..., Any]]] | Sequence[Callable[..., Any]]"
"""Copy functions, one for each kind of state, by ``mamba_type`` of the layer's spec. Engines before
vLLM 0.32 have one sequence for all layers."""

_KINDS = ("get_conv_copy_spec", "get_conv_copy_spec_ds", "get_temporal_copy_spec")


@dataclass(frozen=True, slots=True)
class MambaCopySpec:
    """What is read of one block.

    Attributes:
        start_addr: Address of the first byte.
        num_elements: Elements of one row, without a gap.
        num_rows: Rows: more than one where a shifted conv window lies as [dim, W].
        row_stride: Elements from row to row.
    """

    start_addr: int
    num_elements: int
    num_rows: int = 1
    row_stride: int = 0


@dataclass(frozen=True, slots=True)
class StateMemory:
    """One state tensor as bytes.

    Attributes:
        blocks: [num_blocks, num_rows, tokens, token_bytes] uint8, contiguous within a block. A conv
            window that lies as [W, dim] has one row of W tokens; one that lies as [dim, W] has a
            row for each channel. A temporal state is one row of one token.
        conv_width: Tokens of the window, 0 for a temporal state.
        element_size: Bytes of an element.
        group: Position of the layer's group among the Mamba groups.
    """

    blocks: torch.Tensor
    conv_width: int
    element_size: int
    group: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's state, without what may lie between blocks."""
        return self.blocks.shape[1] * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.blocks.shape[2] * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one row."""
        return self.blocks.shape[3]

    def source_column(self, column: int, bias: int) -> int:
        """Return the column that a move reads: drafts leave temporal states in later ones."""
        return column if self.conv_width else column + bias

    def shift(self, bias: int) -> int:
        """Return by how many tokens a move shifts the state."""
        return bias if self.conv_width else 0

    def address(self, block_id: int) -> int:
        """Return the address of a block's state."""
        return self.blocks.data_ptr() + block_id * self.blocks.stride(0)

    def copy_spec(self, block_id: int, bias: int) -> MambaCopySpec:
        """Return what a move by ``bias`` drafts reads of the block in its source column."""
        shift = self.shift(bias)
        skipped = shift * self.token_bytes
        # Without a shift the rows of a block follow each other without a gap.
        num_rows = self.blocks.shape[1] if shift else 1
        num_bytes = self.row_bytes - skipped if shift else self.block_bytes
        return MambaCopySpec(
            start_addr=self.address(block_id) + skipped,
            num_elements=num_bytes // self.element_size,
            num_rows=num_rows,
            row_stride=self.row_bytes // self.element_size if num_rows > 1 else 0,
        )


def get_conv_copy_spec(
    state: torch.Tensor, block_ids: Sequence[int], cur_block_idx: int, num_accepted_tokens: int
) -> MambaCopySpec:
    """Return what is read of a conv window in SD layout after ``num_accepted_tokens``.

    As an entry of ``mamba_state_copy_funcs`` it says that a state is such a window.

    Args:
        state: [blocks, W, dim].
        block_ids: Physical block of each column.
        cur_block_idx: The running column.
        num_accepted_tokens: Accepted tokens, the first one included.
    """
    return _read(get_conv_copy_spec, state, block_ids, cur_block_idx, num_accepted_tokens - 1)


def get_conv_copy_spec_ds(
    state: torch.Tensor, block_ids: Sequence[int], cur_block_idx: int, num_accepted_tokens: int
) -> MambaCopySpec:
    """Do the same for a conv window in DS layout: ``state`` is [blocks, dim, W]."""
    return _read(get_conv_copy_spec_ds, state, block_ids, cur_block_idx, num_accepted_tokens - 1)


def get_temporal_copy_spec(
    state: torch.Tensor, block_ids: Sequence[int], cur_block_idx: int, num_accepted_tokens: int
) -> MambaCopySpec:
    """Do the same for a temporal (SSM) state: ``state`` is [blocks, ...]."""
    return _read(get_temporal_copy_spec, state, block_ids, cur_block_idx, num_accepted_tokens - 1)


@outside_inference_mode
def describe_states(
    kv_cache_config: KVCacheConfig,
    group_ids: Sequence[int],
    forward_context: Mapping[str, Any],
    copy_funcs: CopyFuncs,
) -> list[StateMemory]:
    """Describe every state tensor of the given groups, in the order of groups, layers, states.

    Args:
        kv_cache_config: Names the layers of each group.
        group_ids: The Mamba groups.
        forward_context: The layers by name, each with its state tensors in ``kv_cache``.
        copy_funcs: Of this module's functions, or foreign ones of the same names. A layer may have
            more states than functions: the rest is not copied.

    Raises:
        InvalidArgumentError: A copy function is unknown, a kind of layer has none, a layer has
            fewer states than there are functions, or a block is not contiguous.
    """
    memories = []
    for group, group_id in enumerate(group_ids):
        kv_cache_group = kv_cache_config.kv_cache_groups[group_id]
        for name in kv_cache_group.layer_names:
            states = forward_context[name].kv_cache
            funcs = _funcs_of(copy_funcs, spec_of_layer(kv_cache_group, name))
            if len(states) < len(funcs):
                raise InvalidArgumentError(
                    f"a layer must have a state for each of {len(funcs)} copy functions, "
                    f"got {len(states)} in {name!r}"
                )
            for state, copy_func in zip(states, funcs, strict=False):
                memories.append(_describe(state, copy_func, group))
    return memories


def count_states(
    kv_cache_config: KVCacheConfig, group_ids: Sequence[int], copy_funcs: CopyFuncs | int
) -> int:
    """Return how many states are copied of one request: over all layers of the given groups.

    Args:
        kv_cache_config: Names the layers of each group.
        group_ids: The Mamba groups.
        copy_funcs: As in ``describe_states``, or how many each layer has.

    Raises:
        InvalidArgumentError: A kind of layer has no copy functions.
    """
    groups = [kv_cache_config.kv_cache_groups[group_id] for group_id in group_ids]
    layers = [(group, name) for group in groups for name in group.layer_names]
    if isinstance(copy_funcs, int):
        return len(layers) * copy_funcs
    return sum(len(_funcs_of(copy_funcs, spec_of_layer(*layer))) for layer in layers)


def validate_mamba_state_copy_funcs(
    mamba_groups: Mapping[Any, Sequence[int]], copy_funcs: CopyFuncs
) -> None:
    """Check that every kind of layer has functions, and no more of them than states.

    Args:
        mamba_groups: As ``get_mamba_groups`` returns them.
        copy_funcs: To be checked.

    Raises:
        InvalidArgumentError: One has none, or too many.
    """
    for spec in mamba_groups:
        count = len(_funcs_of(copy_funcs, spec))
        if not 0 < count <= len(spec.shapes):
            raise InvalidArgumentError(
                f"a layer with {len(spec.shapes)} states must have from 1 to as many copy "
                f"functions, got {count}"
            )


def _funcs_of(copy_funcs: CopyFuncs, spec: Any) -> Sequence[Callable[..., Any]]:
    if not isinstance(copy_funcs, Mapping):
        return copy_funcs
    if spec.mamba_type not in copy_funcs:
        raise InvalidArgumentError(
            f"copy functions of layers of the kind {spec.mamba_type} are required, "
            f"got those of {list(copy_funcs)}"
        )
    return copy_funcs[spec.mamba_type]


def _read(
    copy_func: Callable[..., Any],
    state: torch.Tensor,
    block_ids: Sequence[int],
    column: int,
    bias: int,
) -> MambaCopySpec:
    memory = _describe(state, copy_func, 0)
    return memory.copy_spec(block_ids[memory.source_column(column, bias)], bias)


def _describe(state: torch.Tensor, copy_func: Callable[..., Any], group: int) -> StateMemory:
    kind = _kind(copy_func)
    is_conv = kind != "get_temporal_copy_spec"
    # The function says which axis holds the tokens, the strides say how they lie in memory.
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
    rows = as_bytes.view(len(blocks), num_rows, tokens, token_bytes)
    return StateMemory(rows, width, state.element_size(), group)


def _kind(copy_func: Callable[..., Any]) -> str:
    """Return which of this module's functions a function stands for."""
    kind = getattr(copy_func, "__name__", repr(copy_func))
    if kind not in _KINDS:
        raise InvalidArgumentError(f"a copy function must be one of {_KINDS}, got {kind}")
    # vLLM has one function for both layouts, and a setting for all of its windows beside it.
    module = sys.modules.get(copy_func.__module__)
    is_dim_first = getattr(module, "is_conv_state_dim_first", None)
    if kind == "get_conv_copy_spec" and is_dim_first is not None and is_dim_first():
        return "get_conv_copy_spec_ds"
    return kind
