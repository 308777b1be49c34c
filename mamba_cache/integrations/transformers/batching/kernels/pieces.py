"""Triton kernels over rows of a batch: pieces, windows of convolutions, copies, and sorting."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0917

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

__all__ = [
    "copy_rows",
    "copy_windows",
    "join_pieces",
    "join_window",
    "sort_by_row",
    "take_piece",
]

_MAX_TAKEN = 6
"""Maximum number of tensors in one launch of ``take_piece``: a scan has five or six inputs."""
_MAX_JOINED = 4
"""Maximum number of pieces in one launch of ``join_pieces``: a row has up to three checkpoints."""
_TOKENS, _VALUES = 32, 64
_TILE = 1024
_CHANNELS = 128
_ROW_TILE = 2048
_SORTED_ROWS = 16
_INPUT_TOKENS, _INPUT_CHANNELS = 8, 512


@triton.jit  # type: ignore[untyped-decorator]
def _take(  # type: ignore[no-untyped-def]
    value, taken, row_stride, token_stride, inner_stride, size, fill,
    bounds, bounds_stride, number, width, tile, TOKENS: tl.constexpr, VALUES: tl.constexpr,
) -> None:  # fmt: skip
    """Copy a tile of one row's piece of one tensor, filled where the piece has no tokens."""
    if (tile >= 0) & (tile * VALUES < size):
        row = tl.program_id(0).to(tl.int64)
        bound = bounds + row * bounds_stride + number
        column = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS))[:, None].to(tl.int64)
        offset = (tile * VALUES + tl.arange(0, VALUES))[None, :].to(tl.int64)
        token = tl.load(bound) + column
        is_inside = (column < width) & (offset < size)
        source = value + row * row_stride + token * token_stride + offset * inner_stride
        is_own = is_inside & (token < tl.load(bound + 1))
        found = tl.load(source, mask=is_own, other=fill)
        tl.store(taken + (row * width + column) * size + offset, found, mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _take_kernel(  # type: ignore[no-untyped-def]
    bounds, bounds_stride, number, width,
    value_0, taken_0, row_0, token_0, inner_0, size_0, fill_0,
    value_1, taken_1, row_1, token_1, inner_1, size_1, fill_1,
    value_2, taken_2, row_2, token_2, inner_2, size_2, fill_2,
    value_3, taken_3, row_3, token_3, inner_3, size_3, fill_3,
    value_4, taken_4, row_4, token_4, inner_4, size_4, fill_4,
    value_5, taken_5, row_5, token_5, inner_5, size_5, fill_5,
    COUNT: tl.constexpr,
    TOKENS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:  # fmt: skip
    """Take a tile of one row's piece out of one of up to six tensors, whose tiles are counted."""
    tile = tl.program_id(2)
    _take(value_0, taken_0, row_0, token_0, inner_0, size_0, fill_0,
          bounds, bounds_stride, number, width, tile, TOKENS, VALUES)  # fmt: skip
    if COUNT > 1:
        tile -= tl.cdiv(size_0, VALUES)
        _take(value_1, taken_1, row_1, token_1, inner_1, size_1, fill_1,
              bounds, bounds_stride, number, width, tile, TOKENS, VALUES)  # fmt: skip
    if COUNT > 2:
        tile -= tl.cdiv(size_1, VALUES)
        _take(value_2, taken_2, row_2, token_2, inner_2, size_2, fill_2,
              bounds, bounds_stride, number, width, tile, TOKENS, VALUES)  # fmt: skip
    if COUNT > 3:
        tile -= tl.cdiv(size_2, VALUES)
        _take(value_3, taken_3, row_3, token_3, inner_3, size_3, fill_3,
              bounds, bounds_stride, number, width, tile, TOKENS, VALUES)  # fmt: skip
    if COUNT > 4:
        tile -= tl.cdiv(size_3, VALUES)
        _take(value_4, taken_4, row_4, token_4, inner_4, size_4, fill_4,
              bounds, bounds_stride, number, width, tile, TOKENS, VALUES)  # fmt: skip
    if COUNT > 5:
        tile -= tl.cdiv(size_4, VALUES)
        _take(value_5, taken_5, row_5, token_5, inner_5, size_5, fill_5,
              bounds, bounds_stride, number, width, tile, TOKENS, VALUES)  # fmt: skip


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    value, piece, bound, number, width, row, token, offset, is_inside, size
):
    """Return the values of a token: those of a piece if it has the token, else ``value``."""
    begin, end = tl.load(bound + number), tl.load(bound + number + 1)
    is_own = (token >= begin) & (token < end)
    source = piece + (row * width + token - begin) * size + offset
    return tl.where(is_own, tl.load(source, mask=is_inside & is_own, other=0), value)


@triton.jit  # type: ignore[untyped-decorator]
def _join_kernel(  # type: ignore[no-untyped-def]
    bounds, bounds_stride, joined, num_tokens, size,
    piece_0, number_0, width_0,
    piece_1, number_1, width_1,
    piece_2, number_2, width_2,
    piece_3, number_3, width_3,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Put a part of one token together."""
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offset = tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_inside, bound = offset < size, bounds + row * bounds_stride
    value = tl.zeros([TILE], dtype=joined.dtype.element_ty)
    value = _join(value, piece_0, bound, number_0, width_0, row, token, offset, is_inside, size)
    if COUNT > 1:
        value = _join(value, piece_1, bound, number_1, width_1, row, token, offset, is_inside, size)
    if COUNT > 2:
        value = _join(value, piece_2, bound, number_2, width_2, row, token, offset, is_inside, size)
    if COUNT > 3:
        value = _join(value, piece_3, bound, number_3, width_3, row, token, offset, is_inside, size)
    tl.store(joined + (row * num_tokens + token) * size + offset, value, mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _window_kernel(  # type: ignore[no-untyped-def]
    full, ends, windows, owners, to,
    num_channels, width, end_stride, owner_stride, to_stride,
    full_row, full_channel, full_token, window_row, window_channel, window_token,
    HAS_OWNERS: tl.constexpr,
    HAS_TO: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the windows of some channels of one row."""
    place = tl.program_id(0).to(tl.int64)
    row = place
    if HAS_OWNERS:
        row = tl.load(owners + place * owner_stride)
    if HAS_TO:
        place = tl.load(to + place * to_stride)
    end = tl.load(ends + row * end_stride)
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[:, None].to(tl.int64)
    token = tl.arange(0, WIDTH)[None, :]
    is_inside = (channel < num_channels) & (token < width)
    source = full + row * full_row + channel * full_channel + (end + token) * full_token
    goal = windows + place * window_row + channel * window_channel + token * window_token
    tl.store(goal, tl.load(source, mask=is_inside), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _inputs_kernel(  # type: ignore[no-untyped-def]
    window, new, full, num_channels, width, num_tokens,
    window_row, window_channel, window_token, new_row, new_token,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Copy some channels of some tokens of one row: those before the first new one, and behind."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOKENS
    token = (first + tl.arange(0, TOKENS))[:, None].to(tl.int64)
    channel = (tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    is_inside = (token < width + num_tokens) & (channel < num_channels)
    source = new + row * new_row + (token - width) * new_token + channel
    value = tl.load(source, mask=is_inside & (token >= width))
    if first < width:
        before = window + row * window_row + channel.to(tl.int64) * window_channel
        is_before = is_inside & (token < width)
        old = tl.load(before + token * window_token, mask=is_before)
        value = tl.where(token < width, old, value)
    goal = full + (row * (width + num_tokens) + token) * num_channels + channel
    tl.store(goal, value, mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rows_kernel(  # type: ignore[no-untyped-def]
    source, target, owners, to, size, owner_stride, to_stride,
    source_layer, source_row, target_layer, target_row,
    HAS_OWNERS: tl.constexpr,
    HAS_TO: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Copy a tile of one row of one layer."""
    row = tl.program_id(1).to(tl.int64)
    place, layer = row, tl.program_id(2).to(tl.int64)
    if HAS_OWNERS:
        row = tl.load(owners + row * owner_stride)
    if HAS_TO:
        place = tl.load(to + place * to_stride)
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(source + layer * source_layer + row * source_row + offset, mask=offset < size)
    goal = target + layer * target_layer + place * target_row + offset
    tl.store(goal, value.to(target.dtype.element_ty), mask=offset < size)


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


def take_piece(
    values: Sequence[torch.Tensor],
    fills: Sequence[float],
    bounds: torch.Tensor,
    number: int,
    width: int,
) -> list[torch.Tensor]:
    """Compute the twin's function in one launch for every six tensors."""
    # Usually views, because the inner axes are contiguous.
    flat = [value.flatten(2) for value in values]
    taken = [value.new_empty(len(bounds), width, value.shape[2]) for value in flat]
    for first in range(0, len(flat), _MAX_TAKEN):
        part = slice(first, first + _MAX_TAKEN)
        groups = [
            (value, to, *value.stride(), value.shape[2], float(fill))
            for value, to, fill in zip(flat[part], taken[part], fills[part], strict=True)
        ]
        arguments = [each for group in (groups + groups[:1] * _MAX_TAKEN)[:_MAX_TAKEN]
                     for each in group]  # fmt: skip
        num_tiles = sum(triton.cdiv(value.shape[2], _VALUES) for value in flat[part])
        _take_kernel[(len(bounds), triton.cdiv(width, _TOKENS), num_tiles)](
            bounds, bounds.stride(0), number, width, *arguments,
            COUNT=len(groups), TOKENS=_TOKENS, VALUES=_VALUES, num_warps=4,
        )  # fmt: skip
    return [to.view(*to.shape[:2], *value.shape[2:])
            for to, value in zip(taken, values, strict=True)]  # fmt: skip


def join_pieces(
    pieces: Sequence[torch.Tensor], numbers: Sequence[int], bounds: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Compute the twin's function in one launch for up to four pieces."""
    if len(pieces) > _MAX_JOINED:  # the result of one launch is the first piece of the next
        tokens = torch.zeros_like(bounds[:, 0])
        whole = join_pieces(pieces[:_MAX_JOINED], numbers[:_MAX_JOINED], bounds, num_tokens)
        behind = numbers[_MAX_JOINED]
        merged = torch.cat([tokens[:, None], bounds[:, behind:]], dim=1)
        rest = [number - behind + 1 for number in numbers[_MAX_JOINED:]]
        return join_pieces([whole, *pieces[_MAX_JOINED:]], [0, *rest], merged, num_tokens)
    first, rows = pieces[0], len(pieces[0])
    size = first[0, 0].numel()
    joined = first.new_empty(rows, num_tokens, *first.shape[2:])
    groups = [
        (piece.contiguous(), number, piece.shape[1])
        for piece, number in zip(pieces, numbers, strict=True)
    ]
    arguments = [each for group in (groups + groups[:1] * _MAX_JOINED)[:_MAX_JOINED]
                 for each in group]  # fmt: skip
    tile = min(_TILE, triton.next_power_of_2(size))
    _join_kernel[(rows, num_tokens, triton.cdiv(size, tile))](
        bounds, bounds.stride(0), joined, num_tokens, size, *arguments,
        COUNT=len(groups), TILE=tile, num_warps=4,
    )  # fmt: skip
    return joined


def copy_windows(
    full: torch.Tensor,
    ends: torch.Tensor,
    windows: torch.Tensor,
    owners: torch.Tensor | None = None,
    to: torch.Tensor | None = None,
) -> None:
    """Compute the twin's function in one launch."""
    count, width = len(full if owners is None else owners), windows.shape[-1]
    _window_kernel[(count, triton.cdiv(full.shape[1], _CHANNELS))](
        full, ends, windows, ends if owners is None else owners, ends if to is None else to,
        full.shape[1], width, ends.stride(0),
        0 if owners is None else owners.stride(0), 0 if to is None else to.stride(0),
        *full.stride(), *windows.stride(),
        HAS_OWNERS=owners is not None, HAS_TO=to is not None,
        CHANNELS=_CHANNELS, WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


def join_window(window: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Compute the twin's function in one launch."""
    rows, num_channels, num_tokens = new.shape
    width = window.shape[-1]
    full = new.new_empty(rows, width + num_tokens, num_channels).mT
    tiles = triton.cdiv(width + num_tokens, _INPUT_TOKENS)
    _inputs_kernel[(rows, tiles, triton.cdiv(num_channels, _INPUT_CHANNELS))](
        window, new, full, num_channels, width, num_tokens,
        *window.stride(), new.stride(0), new.stride(2),
        TOKENS=_INPUT_TOKENS, CHANNELS=_INPUT_CHANNELS, num_warps=4,
    )  # fmt: skip
    return full


def copy_rows(
    source: torch.Tensor,
    target: torch.Tensor,
    owners: torch.Tensor | None = None,
    to: torch.Tensor | None = None,
) -> None:
    """Compute the twin's function in one launch."""
    count = next((len(rows) for rows in (owners, to) if rows is not None), source.shape[1])
    size = target[0, 0].numel()
    _rows_kernel[(triton.cdiv(size, _ROW_TILE), count, len(source))](
        source, target, source if owners is None else owners, source if to is None else to, size,
        0 if owners is None else owners.stride(0), 0 if to is None else to.stride(0),
        *source.stride()[:2], *target.stride()[:2],
        HAS_OWNERS=owners is not None, HAS_TO=to is not None, TILE=_ROW_TILE, num_warps=4,
    )  # fmt: skip


def sort_by_row(
    rows_of_places: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    num_rows: int,
    dummy_slot: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the twin's function in one launch; its grid depends on shapes alone."""
    num_places = len(rows_of_places)
    sorted_ = torch.empty((4, num_rows), dtype=torch.int64, device=rows_of_places.device)
    places, tokens, new_positions, slots = sorted_.unbind()
    _sort_kernel[(triton.cdiv(num_rows, _SORTED_ROWS),)](
        rows_of_places, token_ids, positions, kv_slots, places, tokens, new_positions, slots,
        num_places, num_rows, rows_of_places.stride(0), dummy_slot,
        ROWS=_SORTED_ROWS, PLACES_PAD=triton.next_power_of_2(num_places), num_warps=4,
    )  # fmt: skip
    return places, tokens, new_positions, slots
