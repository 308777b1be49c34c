"""Copies of states between live rows, slots and the scratch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mamba_cache._checks import check_int
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states import (
    PAD_SLOT_ID,
    RowIndices,
    SlotQuantization,
    StateCopier,
    StatePool,
    StateTensorSpec,
    quantize_states,
)

__all__ = ["StateTransfers", "last_write_wins"]


class StateTransfers:
    """Copies of whole states, one launch for all layers and all pairs of a call.

    The live tensors belong to the embedder, who may replace them; they are asked for at each call.
    """

    def __init__(
        self,
        slots: StatePool,
        scratch: StatePool,
        live_states: Callable[[], Sequence[torch.Tensor]],
        quantization: SlotQuantization | None = None,
    ) -> None:
        self._slots = list(slots.tensors.values())
        self._live_states = live_states
        self._live_places: list[tuple[int, int]] = []
        self._live_storage: tuple[object, ...] = ()
        self._layer_states = scratch.spec.tensors
        self._quantization = quantization
        self._scratch = list(scratch.tensors.values())
        self._scratch_to_slots = StateCopier(self._scratch, self._slots)

    def store_layer(self, layer: int, slot: int, states: Sequence[torch.Tensor]) -> None:
        """Write one layer of one slot's state."""
        layer = check_int("layer_idx", layer, minimum=0, maximum=len(self._slots[0]) - 1)
        for wanted, state in zip(self._layer_states, states, strict=True):
            _check_fits(state, wanted)
        states = [state.detach() for state in states]  # slots are no part of a graph of autograd
        if self._quantization is not None:
            conv, ssm = states  # which alone are stored so
            states = (conv, *quantize_states(ssm))
        for tensor, state in zip(self._slots, states, strict=True):
            tensor[layer, slot].copy_(state)

    def live_to_slots(self, rows: RowIndices, slots: RowIndices) -> None:
        """Save live states."""
        self._bind_live_states()
        self._live_to_slots.copy(rows, slots)

    def slots_to_live(self, sources: RowIndices, rows: RowIndices) -> None:
        """Restore live states."""
        self._bind_live_states()
        self._slots_to_live.copy(sources, rows)

    def scratch_to_slots(self, rows: RowIndices, slots: RowIndices) -> None:
        """Save states that the forward left in the scratch."""
        self._scratch_to_slots.copy(rows, slots)

    def spoil_scratch(self, num_rows: int) -> None:
        """Fill the first rows of the scratch with what is no state: NaN, or 0 for integers."""
        for tensor in self._scratch:
            if num_rows:
                tensor[:, :num_rows] = math.nan if tensor.is_floating_point() else 0

    def _bind_live_states(self) -> None:
        """Make the copiers anew if the embedder has put other tensors in place, or other memory."""
        live = list(self._live_states())
        # Of the same tensors at the same memory the rest is the same, and takes longer to ask for.
        places = [(id(tensor), tensor.data_ptr()) for tensor in live]
        if places == self._live_places:
            return
        storage = tuple((t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in live)
        if storage != self._live_storage:
            self._live_to_slots = StateCopier(live, self._slots)
            self._slots_to_live = StateCopier(self._slots, live)
            self._live_storage = storage
        # The tensors are kept so that no others get their ids.
        self._live, self._live_places = live, places


def last_write_wins(destinations: Sequence[int]) -> list[int]:
    """Turn all but the last mention of each destination into ``PAD_SLOT_ID``.

    The pairs of one launch run side by side: two that write to one slot would leave a mixture.
    """
    last = {destination: index for index, destination in enumerate(destinations)}
    return [d if last[d] == index else PAD_SLOT_ID for index, d in enumerate(destinations)]


def _check_fits(state: object, wanted: StateTensorSpec) -> None:
    if not isinstance(state, torch.Tensor):
        given = type(state).__name__
    elif state.shape != wanted.shape or state.dtype != wanted.dtype:
        given = f"{tuple(state.shape)} {state.dtype}"
    else:
        return
    raise InvalidArgumentError(
        f"a layer's state must be a tensor of {wanted.shape} {wanted.dtype}, got {given}"
    )
