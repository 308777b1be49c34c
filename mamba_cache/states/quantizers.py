"""Batched copies between live states and quantised slots, in either direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mamba_cache._inference_mode import outside_inference_mode
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states._backend import CopyBackend, kernels_for
from mamba_cache.states.copier import (
    RowMover,
    check_are_tensors,
    check_devices,
    check_side,
    check_tensors,
)
from mamba_cache.states.kernels import quantize_torch
from mamba_cache.states.kernels.plan import CopyPlan, QuantizedPlan, RowCopy, plan_copy
from mamba_cache.states.quantization import SlotQuantization

__all__ = ["StateDequantizer", "StateQuantizer"]

_KERNELS = "mamba_cache.states.kernels.quantize"
_STATE_DIMS = 5


class StateQuantizer(RowMover):
    """Stores live states in quantised slots: all layers of all tensors in one launch.

    Where several tensors are quantised, each takes a launch of its own; the first of them moves
    also all that is kept as it is. As with ``StateCopier`` the tensors must keep their storage.

    Args:
        live: At least one, each [num_layers, rows, *inner], inner axes contiguous.
        slots: For each of them one of the same dtype and inner shape; or, for floating-point
            states [num_layers, rows, heads, head_dim, state_dim], two in a row: codes [num_layers,
            slots, heads, head_dim, state_dim] int8, and scales [num_layers, slots, heads,
            state_dim] float32. So ``SlotQuantization.slot_spec`` orders them.
        quantization: How to round.
        backend: As in ``StateCopier``.

    Raises:
        InvalidArgumentError: The tensors do not fit each other, none is quantised, or as in
            ``StateCopier``.
        MissingExtraError: As in ``StateCopier``.
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
        (sources, targets), quantized = _match(live, slots)
        plans = _plans(plan_copy(sources, targets, device=live[0].device), quantized)
        kernels = kernels_for(backend, live[0].device, kernels=_KERNELS, twins=quantize_torch)
        launches = [
            kernels.quantize_states(QuantizedPlan(*plan, quantization.hash_seed)) for plan in plans
        ]
        takes_lists = kernels is quantize_torch
        super().__init__(live, slots, _one_after_another(launches), takes_lists=takes_lists)


class StateDequantizer(RowMover):
    """Restores live states from quantised slots: in as many launches as ``StateQuantizer``.

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
        (targets, sources), quantized = _match(live, slots)
        plans = _plans(plan_copy(sources, targets, device=live[0].device), quantized)
        kernels = kernels_for(backend, live[0].device, kernels=_KERNELS, twins=quantize_torch)
        launches = [kernels.dequantize_states(QuantizedPlan(*plan, None)) for plan in plans]
        takes_lists = kernels is quantize_torch
        super().__init__(slots, live, _one_after_another(launches), takes_lists=takes_lists)


_Tensors = list[torch.Tensor]
_Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Live states, codes and scales."""


def _plans(
    unchanged: CopyPlan, quantized: Sequence[_Quantized]
) -> list[tuple[CopyPlan, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return what each launch copies: the first one also what is kept as it is."""
    nothing = plan_copy([], [], device=unchanged.chunks.device)
    return [(nothing if i else unchanged, *tensors) for i, tensors in enumerate(quantized)]


def _one_after_another(launches: Sequence[RowCopy]) -> RowCopy:
    if len(launches) == 1:
        return launches[0]

    def copy(source_rows: Any, destination_rows: Any, num_pairs: int) -> None:
        for launch in launches:
            launch(source_rows, destination_rows, num_pairs)

    return copy


def _match(
    live: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]
) -> tuple[tuple[_Tensors, _Tensors], list[_Quantized]]:
    """Check tensors, and tell those that are kept as they are from those that are quantised."""
    check_are_tensors("live states", live)
    check_are_tensors("slots", slots)
    left = list(slots)
    unchanged: tuple[_Tensors, _Tensors] = ([], [])
    quantized: list[_Quantized] = []
    for state in live:
        is_quantized = state.is_floating_point() and left and left[0].dtype == torch.int8
        if is_quantized and len(left) > 1:
            quantized.append((state, left.pop(0), left.pop(0)))
        elif left:
            unchanged[0].append(state)
            unchanged[1].append(left.pop(0))
        else:
            break
    if left or not quantized or len(unchanged[0]) + len(quantized) < len(live):
        given = [(str(t.dtype), tuple(t.shape[:1] + t.shape[2:])) for t in (*live, *slots)]
        raise InvalidArgumentError(
            "slots must hold one tensor for each of the live states, or codes in int8 and their "
            f"scales, and those of at least one state, got {given}"
        )
    if unchanged[0]:
        check_tensors(*unchanged)
    check_side("live states", live)
    check_side("slots", slots)
    check_devices(*live, *slots)
    for tensors in quantized:
        _check_quantized(*tensors)
    return unchanged, quantized


def _check_quantized(states: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    given = [(str(t.dtype), tuple(t.shape[:1] + t.shape[2:])) for t in (states, codes, scales)]
    if states.dim() != _STATE_DIMS:
        raise InvalidArgumentError(
            f"quantised states must have {_STATE_DIMS} axes, got {tuple(states.shape)}"
        )
    layers, heads, head_dim, state_dim = given[0][1]
    wanted = [
        (str(torch.int8), (layers, heads, head_dim, state_dim)),
        (str(torch.float32), (layers, heads, state_dim)),
    ]
    if given[1:] != wanted:
        raise InvalidArgumentError(
            f"for floating-point states of {given[0]}, codes and scales must be {wanted}, "
            f"got {given[1:]}"
        )
