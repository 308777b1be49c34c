"""PyTorch twins of the kernels over rows: pieces, windows of convolutions, copies, and sorting."""

# As many arguments as the kernel has tensors.
# ruff: noqa: PLR0917

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = [
    "copy_rows",
    "copy_windows",
    "join_pieces",
    "join_window",
    "sort_by_row",
    "take_piece",
]


def take_piece(
    values: Sequence[torch.Tensor],
    fills: Sequence[float],
    bounds: torch.Tensor,
    number: int,
    width: int,
) -> list[torch.Tensor]:
    """Copy one piece of each row, from each of several tensors.

    Args:
        values: [rows, tokens, ...] floats each.
        fills: Each tensor's value for padding, after the tokens of a row's piece.
        bounds: [rows, pieces + 1] int64, ascending: piece n of a row is [bounds[n], bounds[n + 1]).
        number: The index of the piece.
        width: Tokens of the result; no row's piece is longer.

    Returns:
        [rows, width, ...] each.
    """
    own = bounds[:, number, None] + torch.arange(width, device=bounds.device)
    is_padding = own >= bounds[:, number + 1, None]
    rows = torch.arange(len(bounds), device=bounds.device)[:, None]
    taken = []
    for each, fill in zip(values, fills, strict=True):
        padding = is_padding.view(*own.shape, *(1,) * (each.dim() - 2))
        taken.append(each[rows, own.clamp(max=each.shape[1] - 1)].masked_fill_(padding, fill))
    return taken


def join_pieces(
    pieces: Sequence[torch.Tensor], numbers: Sequence[int], bounds: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Join pieces at the positions from which ``take_piece`` copied them.

    Args:
        pieces: [rows, width, ...] each.
        numbers: The index of each piece in the rows, ascending.
        bounds: As for ``take_piece``.
        num_tokens: Tokens of the result.

    Returns:
        [rows, num_tokens, ...], zeros where there is no piece.
    """
    token, column = torch.arange(num_tokens, device=bounds.device), 0
    place = token.expand(len(bounds), -1)  # index of each token in the concatenated pieces
    for piece, number in zip(pieces, numbers, strict=True):
        begin = bounds[:, number, None]
        place = torch.where(token >= begin, token - begin + column, place)
        column += piece.shape[1]
    rows = torch.arange(len(bounds), device=bounds.device)[:, None]
    whole = torch.cat(list(pieces), dim=1)
    joined = whole[rows, place.clamp(max=whole.shape[1] - 1)]
    is_padding = (token >= bounds[:, numbers[-1] + 1, None]).view(
        len(bounds), num_tokens, *(1,) * (joined.dim() - 2)
    )
    return joined.masked_fill_(is_padding, 0)


def copy_windows(
    full: torch.Tensor,
    ends: torch.Tensor,
    windows: torch.Tensor,
    owners: torch.Tensor | None = None,
    to: torch.Tensor | None = None,
) -> None:
    """Copy the last inputs of a convolution before token ``ends`` of each row.

    Args:
        full: [rows, channels, window + tokens] inputs: first the window before the first token.
        ends: [rows] int64, in tokens.
        windows: [any, channels, window] target, of the dtype of ``full``.
        owners: [n] int64 rows whose windows are copied. None: all in order.
        to: [n] int64 index of each in ``windows``; rows with the same index have equal windows.
            None: the first indices in order.
    """
    rows = torch.arange(len(full), device=full.device) if owners is None else owners
    width = windows.shape[-1]
    at = ends[rows][:, None, None] + torch.arange(width, device=full.device)
    found = full[rows].gather(-1, at.expand(-1, full.shape[1], -1))
    windows[: len(found) if to is None else None][slice(None) if to is None else to] = found


def join_window(window: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Concatenate the last inputs of a convolution and new ones.

    Args:
        window: [rows, channels, width] floats.
        new: [rows, channels, tokens] of the same dtype; the channels of a token are contiguous.

    Returns:
        [rows, channels, width + tokens], in the memory layout of ``new``.
    """
    width, (rows, channels, tokens) = window.shape[-1], new.shape
    full: torch.Tensor = new.new_empty(rows, width + tokens, channels).mT
    full[..., :width].copy_(window)
    full[..., width:].copy_(new)
    return full


def copy_rows(
    source: torch.Tensor,
    target: torch.Tensor,
    owners: torch.Tensor | None = None,
    to: torch.Tensor | None = None,
) -> None:
    """Copy rows of every layer.

    Args:
        source: [layers, rows, *inner], inner axes contiguous.
        target: [layers, any, *inner], inner axes contiguous, written to; of any floating dtype.
        owners: [n] int64 rows of ``source``. None: all in order.
        to: [n] int64 rows of ``target``; sources of the same row are equal. None: the first rows.
    """
    rows = source if owners is None else source.index_select(1, owners)
    if to is None:
        target[:, : rows.shape[1]].copy_(rows)
    else:
        target.index_copy_(1, to, rows.to(target.dtype))


def sort_by_row(
    rows_of_places: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    num_rows: int,
    dummy_slot: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort arrays from the order of the step to the order of live rows.

    Args:
        rows_of_places: [places] int32 or int64 live row of the request at each index in the step,
            any stride; -1: no request. No row comes twice.
        token_ids: [at least places] ints, the token at each index.
        positions: [at least places] ints, the token's position.
        kv_slots: [at least places] ints, index of its key and value in the pool; negative: none.
        num_rows: Rows of the batch; requests in rows beyond it are left out.
        dummy_slot: The slot of rows without one.

    Returns:
        Places, tokens, positions and slots, [num_rows] int64 each. Rows without a request have
        place -1, token 0 and position 0.
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
