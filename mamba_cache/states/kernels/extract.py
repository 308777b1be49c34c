"""Checkpoint states of one layer as one Triton kernel: SSM states and conv windows together.

Either may be absent. States for quantised slots change their dtype in the copy.
"""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, N803, PLR0917

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from mamba_cache.states.kernels._launch import (
    WIDE_BYTES,
    Launcher,
    end_of_real,
    entries_per_program,
    layout_of,
)
from mamba_cache.states.kernels.quantize import (
    STORE_OPTIONS,
    STORED_CODES,
    quantize_tile,
    stored_tile_sizes,
)

__all__ = ["extract_states"]

# As for whole states, small programs come closest to a flat copy. Share of its GB/s (one NVIDIA
# H200, 64 checkpoints of a conv window [10240, 4] bf16 and an SSM state [128, 64, 128]):
#                                 fp32 SSM    bf16 SSM
#   4 KiB, 4 warps                0.98        0.96
#   the same, 32 in one walk      0.90        0.86       7 us and 5 us if all 192 are padding
#   the same, 8 in one walk       0.95        0.94       19 us and 11 us
_COPY_OPTIONS = {"num_warps": 4}
_COPIED_BYTES = 4096
_CHANNELS = 256
_ENTRIES_IN_GRAPH = 32


@triton.jit  # type: ignore[untyped-decorator]
def _copy_state_tile(  # type: ignore[no-untyped-def]
    chunk_state, slot_state, tile, SIZE: tl.constexpr, TILE: tl.constexpr
) -> None:
    elements = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = elements < SIZE
    tl.store(slot_state + elements, tl.load(chunk_state + elements, mask=mask), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _write_window_tile(  # type: ignore[no-untyped-def]
    slot_window,
    live_window,
    conv_input,
    start,
    end,
    tile,
    token_stride,
    channel_stride,
    conv_dim,
    WIDTH: tl.constexpr,
    WIDTH_POWER_OF_2: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Write some channels of a window: the WIDTH inputs before ``end``, newest last."""
    channels = tile.to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    columns = tl.arange(0, WIDTH_POWER_OF_2)[None, :]
    mask = (channels < conv_dim) & (columns < WIDTH)
    tokens = end - WIDTH + columns
    is_new = tokens >= start
    inputs = conv_input + tokens * token_stride + channels * channel_stride
    new = tl.load(inputs, mask=mask & is_new, other=0)
    # The live window ends where the request's tokens of this step begin.
    live = live_window + channels * WIDTH + (WIDTH + tokens - start)
    old = tl.load(live, mask=mask & (tokens < start), other=0)
    tl.store(slot_window + channels * WIDTH + columns, tl.where(is_new, new, old), mask=mask)


# Fields have any length and address; the alignment of slots is a constant of the kernel.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "slot_ssm", "chunks", "conv_ends", "seq_starts", "rows", "slots", "num_entries",
        "slot_ssm_stride",
    ]
)  # fmt: skip
def _extract_kernel(  # type: ignore[no-untyped-def]
    slot_conv,
    slot_ssm,
    slot_scales,
    live_conv,
    chunk_states,
    conv_input,
    chunks,
    conv_ends,
    seq_starts,
    rows,
    slots,
    num_entries,
    slot_conv_stride,
    slot_ssm_stride,
    slot_scales_stride,
    live_conv_stride,
    chunk_stride,
    token_stride,
    channel_stride,
    conv_dim,
    WIDTH: tl.constexpr,
    WIDTH_POWER_OF_2: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOT_ALIGNMENT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> None:
    num_window_tiles = tl.cdiv(conv_dim, CHANNELS)
    tile = tl.program_id(0)
    first = tl.program_id(1) * ENTRIES
    end = first + 1
    if ENTRIES > 1:
        end = end_of_real(slots, first, num_entries, ENTRIES)
    for entry in range(first, end):
        slot = tl.load(slots + entry).to(tl.int64)
        if (slot >= 0) & (tile < num_window_tiles):
            if slot_conv is not None:
                row = tl.load(rows + entry).to(tl.int64)
                _write_window_tile(
                    slot_conv + slot * slot_conv_stride,
                    live_conv + row * live_conv_stride,
                    conv_input,
                    tl.load(seq_starts + entry).to(tl.int64),
                    tl.load(conv_ends + entry).to(tl.int64),
                    tile,
                    token_stride,
                    channel_stride,
                    conv_dim,
                    WIDTH,
                    WIDTH_POWER_OF_2,
                    CHANNELS,
                )
        elif slot >= 0:  # noqa: SIM102 - the other condition is decided when it is compiled
            if slot_ssm is not None:
                chunk = tl.load(chunks + entry).to(tl.int64)
                chunk_state = chunk_states + chunk * chunk_stride
                slot_state = tl.multiple_of(slot_ssm + slot * slot_ssm_stride, SLOT_ALIGNMENT)
                state_tile = tile - num_window_tiles
                if slot_scales is None:
                    _copy_state_tile(chunk_state, slot_state, state_tile, STATE_DIM, COLUMNS)
                else:
                    quantize_tile(
                        chunk_state, slot_state, slot_scales + slot * slot_scales_stride,
                        chunk, state_tile, HEAD_DIM, STATE_DIM, ROWS, COLUMNS,
                    )  # fmt: skip


_launch = Launcher(_extract_kernel)


def extract_states(
    slot_conv: torch.Tensor | None,
    slot_ssm: torch.Tensor | None,
    slot_scales: torch.Tensor | None,
    live_conv: torch.Tensor | None,
    chunk_states: torch.Tensor | None,
    conv_input: torch.Tensor | None,
    chunks: torch.Tensor,
    conv_ends: torch.Tensor,
    seq_starts: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write checked tensors as ``plan_extraction`` describes.

    Slots without ``slot_scales`` are not quantised.
    """
    if not len(slots):
        return
    # Number of tiles of one state; HEAD_DIM, STATE_DIM, ROWS and COLUMNS.
    num_tiles, tile_sizes = 0, (1, 1, 1, 1)
    widest, options = WIDE_BYTES, _COPY_OPTIONS
    if chunk_states is not None and slot_scales is None:
        size, tile = chunk_states.shape[1:].numel(), _COPIED_BYTES // chunk_states.element_size()
        num_tiles, tile_sizes = triton.cdiv(size, tile), (1, size, 1, tile)
    elif chunk_states is not None:
        heads, head_dim, state_dim = chunk_states.shape[1:]
        tile_rows, columns = stored_tile_sizes(head_dim, state_dim)
        num_tiles = heads * triton.cdiv(state_dim, columns)
        tile_sizes = head_dim, state_dim, tile_rows, columns
        widest, options = STORED_CODES, STORE_OPTIONS
    device = slots.get_device()
    entries = entries_per_program(len(slots), on_gpu=device >= 0, captured=_ENTRIES_IN_GRAPH)
    tensors = (slot_conv, slot_ssm, slot_scales, live_conv, chunk_states, conv_input)
    fields = (chunks, conv_ends, seq_starts, rows, slots)
    conv_dim, width = (0, 1) if slot_conv is None else slot_conv.shape[1:]
    strides = tuple(0 if tensor is None else tensor.stride(0) for tensor in tensors)
    sizes = (*strides, 0 if conv_input is None else conv_input.stride(1), conv_dim)
    alignment = 1
    if slot_ssm is not None:
        slot_bytes = strides[1] * slot_ssm.element_size()
        alignment = math.gcd(widest, slot_ssm.data_ptr(), slot_bytes)
    constants = (
        width,
        triton.next_power_of_2(width),
        _CHANNELS,
        alignment,
        *tile_sizes,
        entries,
    )
    _launch(
        device,
        (layout_of(*tensors, *fields), sizes, constants),
        (triton.cdiv(conv_dim, _CHANNELS) + num_tiles, triton.cdiv(len(slots), entries), 1),
        *tensors,
        *fields,
        len(slots),
        *sizes,
        *constants,
        **options,
    )
