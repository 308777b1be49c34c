"""Batched copies between live states and quantised slots, in either direction."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mamba_cache._inference_mode import outside_inference_mode
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states._backend import CopyBackend, kernels_for
from mamba_cache.states._mover import RowMover, check_devices, check_side, check_tensors
from mamba_cache.states.kernels.plan import plan_copy
from mamba_cache.states.kernels.quantized_plan import QuantizedPlan
from mamba_cache.states.quantization import SlotQuantization

__all__ = ["StateDequantizer", "StateQuantizer"]

_STATE_DIMS = 5


class StateQuantizer(RowMover):
    """Stores live states in quantised slots: all layers of all tensors in one launch.

    As with ``StateCopier`` the tensors must keep their storage.

    Args:
        live: Conv states [num_layers, rows, *conv] and SSM states [num_layers, rows, heads,
            head_dim, state_dim], floating-point, inner axes contiguous.
        slots: Conv states of the same dtype and inner shape, codes [num_layers, slots, heads,
            head_dim, state_dim] int8, and scales [num_layers, slots, heads, state_dim] float32.
        quantization: How to round.
        backend: As in ``StateCopier``.

    Raises:
        InvalidArgumentError: The tensors do not fit each other, or as in ``StateCopier``.
        MissingExtraError: Likewise.
    """

    @outside_inference_mode
    def __init__(
        self,
        live: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
        quantization: SlotQuantization,
        *,
        backend: CopyBackend = "auto",
    ) -> None:
        _check_states(live, slots)
        unchanged = plan_copy(live[:1], slots[:1])
        plan = QuantizedPlan(unchanged, live[1], slots[1], slots[2], quantization.hash_seed)
        kernels = kernels_for(backend, live[0].device)
        super().__init__(live, slots, kernels.quantize_states(plan))


class StateDequantizer(RowMover):
    """Restores live states from quantised slots: all layers of all tensors in one launch.

    Args:
        slots: As in ``StateQuantizer``.
        live: Likewise.
        backend: As in ``StateCopier``.

    Raises:
        InvalidArgumentError: As in ``StateQuantizer``.
        MissingExtraError: Likewise.
    """

    @outside_inference_mode
    def __init__(
        self,
        slots: Sequence[torch.Tensor],
        live: Sequence[torch.Tensor],
        *,
        backend: CopyBackend = "auto",
    ) -> None:
        _check_states(live, slots)
        unchanged = plan_copy(slots[:1], live[:1])
        plan = QuantizedPlan(unchanged, live[1], slots[1], slots[2], hash_seed=None)
        kernels = kernels_for(backend, live[0].device)
        super().__init__(slots, live, kernels.dequantize_states(plan))


def _check_states(live: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
    given = [(str(t.dtype), tuple(t.shape[:1] + t.shape[2:])) for t in (*live, *slots)]
    if (len(live), len(slots)) != (2, 3) or live[1].dim() != _STATE_DIMS:
        raise InvalidArgumentError(
            f"live states must be conv and SSM states, the latter of {_STATE_DIMS} axes, and slots "
            f"conv states, codes and scales, got {given}"
        )
    check_tensors(live[:1], slots[:1])
    check_side("live states", live)
    check_side("slots", slots)
    check_devices(*live, *slots)
    layers, heads, head_dim, state_dim = given[1][1]
    wanted = [
        (str(torch.int8), (layers, heads, head_dim, state_dim)),
        (str(torch.float32), (layers, heads, state_dim)),
    ]
    if given[3:] != wanted or not live[1].dtype.is_floating_point:
        raise InvalidArgumentError(
            f"for floating-point SSM states of {given[1]}, codes and scales must be {wanted}, "
            f"got {given[3:]}"
        )
