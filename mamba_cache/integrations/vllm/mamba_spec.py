"""``MambaSpec``, and the KV cache groups that hold Mamba states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.protocols import KVCacheConfig, StateSpecView

__all__ = [
    "MambaSpec",
    "get_mamba_group_ids",
    "get_mamba_groups",
    "shared_schedule",
    "spec_of_layer",
]

_SPEC_FIELDS = ("block_size", "num_speculative_blocks", "shapes", "dtypes", "mamba_cache_mode")
_SHARED_FIELDS = ("block_size", "num_speculative_blocks", "mamba_cache_mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """The states of the layers of one KV cache group.

    Attributes:
        block_size: Tokens of one column of the block table.
        num_speculative_blocks: Drafts that a step may verify: columns after the running one.
        shapes: Shape of each kind of state in one block.
        dtypes: Dtype of each kind of state.
        mamba_cache_mode: "none", "align" or "all".
        mamba_type: The kind of layer, by which copy functions are found where they come as a dict.

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

    A foreign engine's spec is recognised by the attributes of ``MambaSpec``. A group whose layers
    have specs of their own (one with ``kv_cache_specs`` by layer) is listed under each of them.

    Raises:
        InvalidArgumentError: There is no Mamba group.
    """
    groups: dict[Any, list[int]] = {}
    for group_id, spec in _mamba_specs(kv_cache_config):
        group_ids = groups.setdefault(spec, [])
        if group_id not in group_ids[-1:]:
            group_ids.append(group_id)
    return groups


def get_mamba_group_ids(mamba_groups: Mapping[Any, list[int]]) -> list[int]:
    """Return the ids of all Mamba groups in order, each once."""
    return sorted({group_id for group_ids in mamba_groups.values() for group_id in group_ids})


def shared_schedule(kv_cache_config: KVCacheConfig) -> tuple[list[int], StateSpecView]:
    """Return the ids of all Mamba groups, and a spec that tells how the states are scheduled.

    Groups and layers may differ in kind, shapes and dtypes, but not in that.

    Raises:
        InvalidArgumentError: There is no Mamba group, or two differ in ``block_size``,
            ``num_speculative_blocks`` or ``mamba_cache_mode``.
    """
    specs = _mamba_specs(kv_cache_config)
    scheduling: dict[tuple[Any, ...], list[int]] = {}
    for group_id, spec in specs:
        shared = tuple(getattr(spec, field) for field in _SHARED_FIELDS)
        scheduling.setdefault(shared, []).append(group_id)
    if len(scheduling) > 1:
        raise InvalidArgumentError(
            f"all Mamba groups must agree on {', '.join(_SHARED_FIELDS)}, got {scheduling}"
        )
    return list(dict.fromkeys(group_id for group_id, _ in specs)), cast(StateSpecView, specs[0][1])


def spec_of_layer(group: Any, layer_name: str | None) -> Any:
    """Return the spec of a layer of a group, which may have one for each."""
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if by_layer is None:
        return group.kv_cache_spec
    return _first_spec(group.kv_cache_spec) if layer_name is None else by_layer[layer_name]


def _mamba_specs(kv_cache_config: KVCacheConfig) -> list[tuple[int, Any]]:
    """Return the group and spec of each Mamba layer."""
    specs = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        if all(hasattr(_first_spec(group.kv_cache_spec), field) for field in _SPEC_FIELDS):
            # A group may have no layer on this rank of a pipeline, and has a spec all the same.
            names = group.layer_names or [None]
            specs += [(group_id, spec_of_layer(group, name)) for name in names]
    if not specs:
        raise InvalidArgumentError(
            f"a group whose spec has {', '.join(_SPEC_FIELDS)} is required, got "
            f"{[type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]}"
        )
    return specs


def _first_spec(spec: Any) -> Any:
    by_layer = getattr(spec, "kv_cache_specs", None)
    return spec if by_layer is None else next(iter(by_layer.values()), None)
