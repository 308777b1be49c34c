"""PyTorch twins: rows of a batch, their pieces, windows of convolutions, and their order."""

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
    """Take one piece out of each row, the same of several tensors.

    Args:
        values: [rows, tokens, ...] floats each.
        fills: The value of each tensor's padding, behind the tokens of a row.
        bounds: [rows, pieces + 1] int64, ascending: piece n of a row is [bounds[n], bounds[n + 1]).
        number: Which piece.
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
    """Put pieces back to where ``take_piece`` took them from.

    Args:
        pieces: [rows, width, ...] each.
        numbers: Which piece of the rows each is, ascending.
        bounds: As for ``take_piece``.
        num_tokens: Tokens of the result.

    Returns:
        [rows, num_tokens, ...], zeros where there is no piece.
    """
    token, column = torch.arange(num_tokens, device=bounds.device), 0
    place = token.expand(len(bounds), -1)  # of each token in the pieces, one behind the other
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
    """Copy the last inputs of a convolution before a token of each row.

    Args:
        full: [rows, channels, window + tokens] inputs: the window before the first token first.
        ends: [rows] int64, in tokens.
        windows: [any, channels, window], which is written, of the dtype of ``full``.
        owners: [n] int64 rows whose windows are copied. None: all in order.
        to: [n] int64 where in ``windows`` each goes; rows that go to one place are equal.
            None: the first places.
    """
    rows = torch.arange(len(full), device=full.device) if owners is None else owners
    width = windows.shape[-1]
    at = ends[rows][:, None, None] + torch.arange(width, device=full.device)
    found = full[rows].gather(-1, at.expand(-1, full.shape[1], -1))
    windows[: len(found) if to is None else None][slice(None) if to is None else to] = found


def join_window(window: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Put the last inputs of a convolution before new ones.

    Args:
        window: [rows, channels, width] floats.
        new: [rows, channels, tokens] of the same dtype; the channels of a token lie together.

    Returns:
        [rows, channels, width + tokens], laid out as ``new``.
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
        target: [layers, any, *inner], likewise, which is written; of any floating dtype.
        owners: [n] int64 rows of ``source``. None: all in order.
        to: [n] int64 rows of ``target``; those that go to one row are equal. None: the first ones.
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
