"""The PyTorch twin of what sorts a decode step by row of the live states."""

# As many arguments as the kernel has tensors.
# ruff: noqa: PLR0917

from __future__ import annotations

import torch

__all__ = ["sort_by_row"]


def sort_by_row(
    rows_of_places: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    num_rows: int,
    dummy_slot: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort what is packed in the step's order by rows of the live states.

    Args:
        rows_of_places: [places] int32 or int64 row of the request at each place in the step, any
            stride; -1: there is none. No row comes twice.
        token_ids: [at least places] ints, the token at each place.
        positions: Likewise its position.
        kv_slots: Likewise where its key and value go, in tokens of the pool; negative: nowhere.
        num_rows: Rows of the batch; requests in rows beyond it are left out.
        dummy_slot: Where the keys and values of rows without a request go.

    Returns:
        Each [num_rows] int64: places, -1 where a row has no request, tokens and positions, 0 there,
        and slots.
    """
    numbers = torch.arange(num_rows, device=rows_of_places.device)
    is_own = rows_of_places[None, :] == numbers[:, None]
    is_known, at = is_own.any(1), is_own.int().argmax(1)
    tokens, new_positions = (
        torch.where(is_known, packed[at].long(), 0) for packed in (token_ids, positions)
    )
    slots = torch.where(is_known, kv_slots[at].long(), -1)
    places = torch.where(is_known, at, -1)
    return places, tokens, new_positions, torch.where(slots < 0, dummy_slot, slots)
