"""``MambaSpec``, and the KV cache groups that hold Mamba states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.protocols import KVCacheConfig, StateSpecView

__all__ = ["MambaSpec", "get_mamba_groups"]

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

    Raises:
        InvalidArgumentError: A field is out of range, or shapes and dtypes differ in number.
    """

    block_size: int
    num_speculative_blocks: int = 0
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mamba_cache_mode: str = "none"

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


def get_mamba_groups(kv_cache_config: KVCacheConfig) -> tuple[list[int], StateSpecView]:
    """Return the ids of all Mamba groups, and the spec of the first.

    A foreign engine's spec is recognised by the attributes of ``MambaSpec``. Groups may differ in
    shapes and dtypes, but not in how their states are scheduled.

    Raises:
        InvalidArgumentError: There is no Mamba group, or two differ in ``block_size``,
            ``num_speculative_blocks`` or ``mamba_cache_mode``.
    """
    specs: dict[int, Any] = {
        group_id: group.kv_cache_spec
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        if all(hasattr(group.kv_cache_spec, field) for field in _SPEC_FIELDS)
    }
    if not specs:
        raise InvalidArgumentError(
            f"a group whose spec has {', '.join(_SPEC_FIELDS)} is required, got "
            f"{[type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]}"
        )
    scheduling = {
        group_id: tuple(getattr(spec, field) for field in _SHARED_FIELDS)
        for group_id, spec in specs.items()
    }
    if len(set(scheduling.values())) > 1:
        raise InvalidArgumentError(
            f"all Mamba groups must agree on {', '.join(_SHARED_FIELDS)}, got {scheduling}"
        )
    return list(specs), cast(StateSpecView, next(iter(specs.values())))
