"""The packed batch of a step: where its tokens, windows and chunks lie, for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mamba_cache.metadata import StepMetadata
from mamba_cache.reference.model_config import HybridModelConfig
from mamba_cache.reference.ssd import ChunkLayout

__all__ = ["PackedBatch", "place_windows"]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One step's metadata, cut to the rows in use and turned into indices.

    Building it reads nothing back from the device: every size is an int of the metadata. The
    decoding part is a rectangle, a row for each request: its last token and its drafts. A request
    with fewer tokens than others repeats its last one, and ``join_decodes`` drops what that gave.
    """

    metadata: StepMetadata
    decode_tokens: Tensor  # [num_decodes, max_decode_len] int64, the packed token in each place
    decode_places: Tensor  # [num_decode_tokens] int64, the place of each packed token
    # [num_decodes, 1 + max_decode_len] int64, the live-state row of each decoding request's state
    # before the step, then those of its state after each of its tokens.
    decode_rows: Tensor
    state_rows: Tensor  # [num_prefills] int64, of each prefill request in the live states
    windows: tuple[Tensor, Tensor]  # of the prefill part: see ``place_windows``
    chunks: ChunkLayout  # of the prefill part

    @classmethod
    def build(cls, metadata: StepMetadata, config: HybridModelConfig) -> PackedBatch:
        """Lay out one step for a model."""
        num_tokens, num_chunks = metadata.num_prefill_tokens, metadata.num_chunks
        num_decodes, num_requests = metadata.num_decodes, metadata.num_requests
        longest, bounds = metadata.max_decode_len, metadata.query_start_loc.long()
        starts, ends = bounds[:num_decodes], bounds[1 : num_decodes + 1].contiguous()
        offsets = torch.arange(longest, device=bounds.device)
        packed = torch.arange(metadata.num_decode_tokens, device=bounds.device)
        requests = torch.searchsorted(ends, packed, right=True)
        prefills = bounds[num_decodes : num_requests + 1] - metadata.num_decode_tokens
        return cls(
            metadata,
            decode_tokens=torch.minimum(starts[:, None] + offsets, ends[:, None] - 1),
            decode_places=requests * longest + packed - starts[requests],
            decode_rows=metadata.decode_state_rows[:num_decodes, : 1 + longest].long(),
            state_rows=metadata.state_rows[num_decodes:num_requests].long(),
            windows=place_windows(prefills, num_tokens, config.conv_kernel),
            chunks=ChunkLayout.build(
                metadata.cu_chunk_seqlens[: num_chunks + 1].long(),
                metadata.chunk_seq_idx[:num_chunks].long(),
                metadata.last_chunk_indices[: metadata.num_prefills].long(),
                config.ssm_chunk_size,
                num_tokens,
            ),
        )

    def split_decodes(self, packed: Tensor) -> Tensor:
        """Bring [num_tokens, ...] to [num_decodes, max_decode_len, ...]."""
        return packed[self.decode_tokens]

    def join_decodes(self, rectangle: Tensor) -> Tensor:
        """Undo ``split_decodes``: return [num_decode_tokens, ...]."""
        return rectangle.flatten(0, 1)[self.decode_places]


def place_windows(
    query_start_loc: Tensor, num_tokens: int, conv_kernel: int
) -> tuple[Tensor, Tensor]:
    """Return where the inputs of every output lie: the same for all layers of a step.

    Indices count rows of the *extended* input, all windows followed by all packed tokens. The first
    tensor, [K, num_tokens], has the input that tap k of each output reads; the second one,
    [num_sequences, K - 1], the last inputs of each sequence. Both are int64.
    """
    device, width = query_start_loc.device, conv_kernel - 1
    starts, ends = query_start_loc[:-1], query_start_loc[1:].contiguous()
    num_sequences = len(starts)

    def row(sequence: Tensor, token: Tensor) -> Tensor:
        offset = token - starts[sequence]
        in_window = (sequence + 1) * width + offset
        return torch.where(offset < 0, in_window, num_sequences * width + token)

    tokens = torch.arange(num_tokens, device=device)
    back = torch.arange(width, -1, -1, device=device)
    taps = row(torch.searchsorted(ends, tokens, right=True), tokens - back[:, None])
    sequences = torch.arange(num_sequences, device=device)
    return taps, row(sequences[:, None], ends[:, None] - back[:-1])
