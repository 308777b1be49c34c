"""States: their specs, the tensors that hold them, and the kernels that copy them."""

from mamba_cache._torch import PAD_SLOT_ID, ZERO_SOURCE
from mamba_cache.states.copier import RowIndices, StateCopier
from mamba_cache.states.extraction import CHECKPOINT_FIELDS, plan_extraction
from mamba_cache.states.kernels import CopyBackend, kernels_for
from mamba_cache.states.kernels.twins import dequantize_states, quantize_states
from mamba_cache.states.pool import StatePool, as_device
from mamba_cache.states.spec import (
    KVCacheSpec,
    LayerKind,
    SlotQuantization,
    StateSpec,
    StateTensorSpec,
    slots_in_budget,
)

__all__ = [
    "CHECKPOINT_FIELDS",
    "PAD_SLOT_ID",
    "ZERO_SOURCE",
    "CopyBackend",
    "KVCacheSpec",
    "LayerKind",
    "RowIndices",
    "SlotQuantization",
    "StateCopier",
    "StatePool",
    "StateSpec",
    "StateTensorSpec",
    "as_device",
    "dequantize_states",
    "kernels_for",
    "plan_extraction",
    "quantize_states",
    "slots_in_budget",
]
