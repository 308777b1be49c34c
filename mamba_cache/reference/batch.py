"""The packed batch of a step: indices of its tokens, windows and chunks, for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mamba_cache.metadata import StepMetadata
from mamba_cache.reference.model_config import HybridModelConfig
from mamba_cache.reference.ssd import ChunkLayout

__all__ = ["PackedBatch", "place_taps"]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One step's metadata, cut to the rows in use and converted to indices.

    ``build`` reads nothing back from the device: every size is an int of the metadata. Each token
    of a decoding request is a separate chunk, so that the state after each token is kept.
    """

    metadata: StepMetadata
    taps: Tensor  # see ``place_taps``
    state_rows: Tensor  # [num_requests] int64, live-state row that each request reads
    # [num_decode_tokens + num_prefills] int64: tokens after which the state is kept (each token of
    # a decode, the last token of a prefill), and the live-state rows for these states.
    kept_tokens: Tensor
    kept_rows: Tensor
    decodes: ChunkLayout
    prefills: ChunkLayout

    @classmethod
    def build(cls, metadata: StepMetadata, config: HybridModelConfig) -> PackedBatch:
        """Build the batch of one step for a model."""
        num_decodes, num_decode_tokens = metadata.num_decodes, metadata.num_decode_tokens
        bounds = metadata.query_start_loc[: metadata.num_requests + 1].long()
        rows = metadata.state_rows[: metadata.num_requests].long()
        decode_rows = metadata.decode_state_rows[:num_decodes].long()
        tokens = torch.arange(num_decode_tokens + 1, device=bounds.device)
        owners = torch.searchsorted(bounds[1 : num_decodes + 1], tokens[:-1], right=True)
        written = decode_rows[owners, 1 + tokens[:-1] - bounds[owners]]
        num_chunks = metadata.num_chunks
        return cls(
            metadata,
            place_taps(bounds, metadata.num_tokens, config.conv_kernel),
            state_rows=torch.cat([decode_rows[:, 0], rows[num_decodes:]]),
            kept_tokens=torch.cat([tokens[:-1], bounds[num_decodes + 1 :] - 1]),
            kept_rows=torch.cat([written, rows[num_decodes:]]),
            decodes=ChunkLayout.build(
                tokens,
                owners,
                tokens[:-1],
                1,
                num_decode_tokens,
                is_chained=metadata.max_decode_len > 1,
            ),
            prefills=ChunkLayout.build(
                metadata.cu_chunk_seqlens[: num_chunks + 1].long(),
                metadata.chunk_seq_idx[:num_chunks].long(),
                metadata.last_chunk_indices[: metadata.num_prefills].long(),
                config.ssm_chunk_size,
                metadata.num_prefill_tokens,
            ),
        )

    @property
    def parts(self) -> list[tuple[ChunkLayout, slice, slice]]:
        """Chunks, tokens and requests of the decodes and of the prefills; empty parts left out."""
        num_decodes, num_decode_tokens = self.metadata.num_decodes, self.metadata.num_decode_tokens
        decodes = self.decodes, slice(num_decode_tokens), slice(num_decodes)
        prefills = self.prefills, slice(num_decode_tokens, None), slice(num_decodes, None)
        return [part for part in (decodes, prefills) if len(part[0].sequences)]


def place_taps(query_start_loc: Tensor, num_tokens: int, conv_kernel: int) -> Tensor:
    """Return the indices of every output's inputs, the same for all layers of a step.

    Indices are rows of the *extended* input: all windows, then all packed tokens. Entry [k, t] of
    the result, [K, num_tokens] int64, is the input that tap k of output t reads.
    """
    device, width = query_start_loc.device, conv_kernel - 1
    starts, ends = query_start_loc[:-1], query_start_loc[1:].contiguous()
    tokens = torch.arange(num_tokens, device=device)
    sequences = torch.searchsorted(ends, tokens, right=True)
    inputs = tokens - torch.arange(width, -1, -1, device=device)[:, None]
    offsets = inputs - starts[sequences]
    in_window = (sequences + 1) * width + offsets
    return torch.where(offsets < 0, in_window, len(starts) * width + inputs)
