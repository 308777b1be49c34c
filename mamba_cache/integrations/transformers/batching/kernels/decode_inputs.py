"""The inputs of a decode step by row of the live states, in Triton."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, N803, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["sort_by_row"]

_ROWS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _sort_kernel(  # type: ignore[no-untyped-def]
    rows_of_places,
    token_ids,
    positions,
    kv_slots,
    places_out,
    tokens_out,
    positions_out,
    slots_out,
    num_places,
    num_rows,
    place_stride,
    dummy_slot,
    ROWS: tl.constexpr,
    PLACES_PAD: tl.constexpr,
) -> None:
    """Find the place in the step of each of some rows, and read what is packed there."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, PLACES_PAD)
    owner = tl.load(rows_of_places + place * place_stride, mask=place < num_places, other=-1)
    is_own = owner[None, :] == row[:, None]
    own = tl.max(tl.where(is_own, place[None, :], -1), 1)
    is_row, is_known = row < num_rows, own >= 0
    at = tl.where(is_known, own, 0)
    token = tl.load(token_ids + at, mask=is_row & is_known, other=0)
    position = tl.load(positions + at, mask=is_row & is_known, other=0)
    slot = tl.load(kv_slots + at, mask=is_row & is_known, other=-1).to(tl.int64)
    tl.store(places_out + row, own.to(tl.int64), mask=is_row)
    tl.store(tokens_out + row, token.to(tl.int64), mask=is_row)
    tl.store(positions_out + row, position.to(tl.int64), mask=is_row)
    tl.store(slots_out + row, tl.where(slot < 0, dummy_slot, slot), mask=is_row)


def sort_by_row(
    rows_of_places: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    num_rows: int,
    dummy_slot: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what the twin does, in one launch whose grid depends on shapes alone."""
    num_places = len(rows_of_places)
    sorted_ = torch.empty((4, num_rows), dtype=torch.int64, device=rows_of_places.device)
    places, tokens, new_positions, slots = sorted_.unbind()
    _sort_kernel[(triton.cdiv(num_rows, _ROWS),)](
        rows_of_places, token_ids, positions, kv_slots, places, tokens, new_positions, slots,
        num_places, num_rows, rows_of_places.stride(0), dummy_slot,
        ROWS=_ROWS, PLACES_PAD=triton.next_power_of_2(num_places), num_warps=4,
    )  # fmt: skip
    return places, tokens, new_positions, slots
