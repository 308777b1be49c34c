"""The packed batch of a step: where its tokens, windows and chunks lie, for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mamba_cache.metadata.step import StepMetadata
from mamba_cache.reference.conv import place_windows
from mamba_cache.reference.model_config import HybridModelConfig
from mamba_cache.reference.ssd import ChunkLayout

__all__ = ["DecodeLayout", "PackedBatch"]


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """The decoding part as a rectangle, a row for each request: its last token and its drafts.

    A request with fewer tokens than others repeats its last one, and ``join`` drops what that gave.

    Attributes:
        tokens: [num_decodes, max_decode_len] int64. The packed token in each place.
        places: [num_decode_tokens] int64. Where each packed token lies in the flattened rectangle.
        state_rows: [num_decodes, 1 + max_decode_len] int64. The live-state row of each request's
            state before the step, then those of its state after each of its tokens.
    """

    tokens: Tensor
    places: Tensor
    state_rows: Tensor

    @classmethod
    def build(cls, metadata: StepMetadata) -> DecodeLayout:
        """Lay out the decoding requests of one step."""
        num_decodes, longest = metadata.num_decodes, metadata.max_decode_len
        bounds = metadata.query_start_loc[: num_decodes + 1].long()
        starts, ends = bounds[:-1], bounds[1:].contiguous()
        offsets = torch.arange(longest, device=bounds.device)
        packed = torch.arange(metadata.num_decode_tokens, device=bounds.device)
        requests = torch.searchsorted(ends, packed, right=True)
        return cls(
            tokens=torch.minimum(starts[:, None] + offsets, ends[:, None] - 1),
            places=requests * longest + packed - starts[requests],
            state_rows=metadata.decode_state_rows[:num_decodes, : 1 + longest].long(),
        )

    def split(self, packed: Tensor) -> Tensor:
        """Bring [num_tokens, ...] to [num_decodes, max_decode_len, ...]."""
        return packed[self.tokens]

    def join(self, rectangle: Tensor) -> Tensor:
        """Undo ``split``: [num_decodes, max_decode_len, ...] to [num_decode_tokens, ...]."""
        return rectangle.flatten(0, 1)[self.places]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One step's metadata, cut to the rows in use and turned into indices.

    Building it reads nothing back from the device: every size is an int of the metadata.

    Attributes:
        metadata: What it was built from.
        decodes: The decoding part.
        state_rows: [num_prefills] int64. Row of each prefill request in the live states.
        windows: Inputs of the prefill part's convolution: see ``place_windows``.
        chunks: Chunks of the prefill part.
    """

    metadata: StepMetadata
    decodes: DecodeLayout
    state_rows: Tensor
    windows: tuple[Tensor, Tensor]
    chunks: ChunkLayout

    @classmethod
    def build(cls, metadata: StepMetadata, config: HybridModelConfig) -> PackedBatch:
        """Lay out one step for a model."""
        num_tokens, num_chunks = metadata.num_prefill_tokens, metadata.num_chunks
        num_decodes, num_requests = metadata.num_decodes, metadata.num_requests
        starts = metadata.query_start_loc[num_decodes : num_requests + 1].long()
        starts = starts - metadata.num_decode_tokens
        return cls(
            metadata,
            DecodeLayout.build(metadata),
            metadata.state_rows[num_decodes:num_requests].long(),
            place_windows(starts, num_tokens, config.conv_kernel),
            ChunkLayout.build(
                metadata.cu_chunk_seqlens[: num_chunks + 1].long(),
                metadata.chunk_seq_idx[:num_chunks].long(),
                metadata.last_chunk_indices[: metadata.num_prefills].long(),
                config.ssm_chunk_size,
                num_tokens,
            ),
        )
