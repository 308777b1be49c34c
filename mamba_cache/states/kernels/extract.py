"""Checkpoint states of one layer as one Triton kernel: SSM states and conv windows together."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, N803, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mamba_cache.states.kernels._padding import end_of_real, entries_per_program

__all__ = ["CHANNELS", "ENTRIES_IN_GRAPH", "extract_states", "write_window_tile"]

# As for whole states, small programs come closest to a flat copy (one NVIDIA H200, 64 checkpoints
# of a conv window [10240, 4] bf16 and an SSM state [128, 64, 128]; share of its GB/s):
#                                 fp32 SSM    bf16 SSM
#   4 KiB, 4 warps                0.98        0.96
#   the same, 32 in one walk      0.90        0.86       7 us and 5 us if all 192 are padding
#   the same, 8 in one walk       0.95        0.94       19 us and 11 us
_NUM_WARPS = 4
_TILE_BYTES = 4096

CHANNELS = 256
"""Channels of a convolution window that one program writes."""

ENTRIES_IN_GRAPH = 32
"""Checkpoints that one program walks through in a CUDA graph."""


@triton.jit  # type: ignore[untyped-decorator]
def _copy_state_tile(slot_state, chunk_state, tile, size, TILE: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    elements = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = elements < size
    tl.store(slot_state + elements, tl.load(chunk_state + elements, mask=mask), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def write_window_tile(  # type: ignore[no-untyped-def]
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
    """Writes some channels of a window: the WIDTH inputs before ``end``, newest last."""
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


# Slices of the fields come in any number and at any address.
# Long: a kernel takes its tensors apart, so it has many arguments.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["chunks", "conv_ends", "seq_starts", "rows", "slots", "num_entries"]
)
def _extract_kernel(  # type: ignore[no-untyped-def]
    slot_conv,
    slot_ssm,
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
    live_conv_stride,
    chunk_stride,
    token_stride,
    channel_stride,
    conv_dim,
    state_size,
    WIDTH: tl.constexpr,
    WIDTH_POWER_OF_2: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
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
            row = tl.load(rows + entry).to(tl.int64)
            write_window_tile(
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
        elif slot >= 0:
            chunk = tl.load(chunks + entry).to(tl.int64)
            _copy_state_tile(
                slot_ssm + slot * slot_ssm_stride,
                chunk_states + chunk * chunk_stride,
                tile - num_window_tiles,
                state_size,
                TILE,
            )


# Long: it names what the kernel takes, one a line.
def extract_states(
    slot_conv: torch.Tensor,
    slot_ssm: torch.Tensor,
    live_conv: torch.Tensor,
    chunk_states: torch.Tensor,
    conv_input: torch.Tensor,
    chunks: torch.Tensor,
    conv_ends: torch.Tensor,
    seq_starts: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Writes checked tensors as ``extract_checkpoint_states`` describes."""
    if not len(slots):
        return
    conv_dim, width = slot_conv.shape[1:]
    state_size = slot_ssm.shape[1:].numel()
    tile = _TILE_BYTES // slot_ssm.element_size()
    num_tiles = triton.cdiv(conv_dim, CHANNELS) + triton.cdiv(state_size, tile)
    entries = entries_per_program(len(slots), on_gpu=slots.is_cuda, captured=ENTRIES_IN_GRAPH)
    with torch.cuda.device(slots.get_device()):
        _extract_kernel[num_tiles, triton.cdiv(len(slots), entries)](
            slot_conv,
            slot_ssm,
            live_conv,
            chunk_states,
            conv_input,
            chunks,
            conv_ends,
            seq_starts,
            rows,
            slots,
            len(slots),
            slot_conv.stride(0),
            slot_ssm.stride(0),
            live_conv.stride(0),
            chunk_states.stride(0),
            conv_input.stride(0),
            conv_input.stride(1),
            conv_dim,
            state_size,
            WIDTH=width,
            WIDTH_POWER_OF_2=triton.next_power_of_2(width),
            CHANNELS=CHANNELS,
            TILE=tile,
            ENTRIES=entries,
            num_warps=_NUM_WARPS,
        )
