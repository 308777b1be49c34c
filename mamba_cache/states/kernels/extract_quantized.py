"""Checkpoint states of one layer into quantised slots, as one Triton kernel."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, N803, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mamba_cache.states.kernels._padding import end_of_real, entries_per_program
from mamba_cache.states.kernels.extract import CHANNELS, ENTRIES_IN_GRAPH, write_window_tile
from mamba_cache.states.kernels.quantize import quantize_tile, tile_sizes

__all__ = ["extract_quantized_states"]

_NUM_WARPS = 2


# Slices of the fields come in any number and at any address.
# Long: a kernel takes its tensors apart, so it has many arguments.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["chunks", "conv_ends", "seq_starts", "rows", "slots", "num_entries", "seed"]
)
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
    seed,
    WIDTH: tl.constexpr,
    WIDTH_POWER_OF_2: tl.constexpr,
    CHANNELS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
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
            quantize_tile(
                chunk_states + chunk * chunk_stride,
                slot_ssm + slot * slot_ssm_stride,
                slot_scales + slot * slot_scales_stride,
                chunk,
                tile - num_window_tiles,
                seed,
                HEAD_DIM,
                STATE_DIM,
                ROWS,
                COLUMNS,
                STOCHASTIC,
            )


# Long: it names what the kernel takes, one a line.
def extract_quantized_states(
    slot_conv: torch.Tensor,
    slot_ssm: torch.Tensor,
    slot_scales: torch.Tensor,
    live_conv: torch.Tensor,
    chunk_states: torch.Tensor,
    conv_input: torch.Tensor,
    chunks: torch.Tensor,
    conv_ends: torch.Tensor,
    seq_starts: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    hash_seed: int | None,
) -> None:
    """Writes checked tensors as ``extract_checkpoint_states`` describes for quantised slots."""
    if not len(slots):
        return
    conv_dim, width = slot_conv.shape[1:]
    heads, head_dim, state_dim = chunk_states.shape[1:]
    sizes = tile_sizes(head_dim, state_dim, is_store=True)
    num_tiles = triton.cdiv(conv_dim, CHANNELS) + heads * triton.cdiv(state_dim, sizes["COLUMNS"])
    entries = entries_per_program(len(slots), on_gpu=slots.is_cuda, captured=ENTRIES_IN_GRAPH)
    with torch.cuda.device(slots.get_device()):
        _extract_kernel[num_tiles, triton.cdiv(len(slots), entries)](
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
            len(slots),
            slot_conv.stride(0),
            slot_ssm.stride(0),
            slot_scales.stride(0),
            live_conv.stride(0),
            chunk_states.stride(0),
            conv_input.stride(0),
            conv_input.stride(1),
            conv_dim,
            hash_seed or 0,
            WIDTH=width,
            WIDTH_POWER_OF_2=triton.next_power_of_2(width),
            CHANNELS=CHANNELS,
            STOCHASTIC=hash_seed is not None,
            ENTRIES=entries,
            num_warps=_NUM_WARPS,
            # The twin rounds after every operation.
            enable_fp_fusion=False,
            **sizes,
        )
