"""The packed batch of a step: where its tokens, windows and chunks lie, for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mamba_cache.metadata.step import StepMetadata
from mamba_cache.reference.conv import ConvLayout
from mamba_cache.reference.model_config import HybridModelConfig
from mamba_cache.reference.ssd import ChunkLayout
from mamba_cache.states import StatePool

__all__ = ["DecodeLayout", "ModelCaches", "PackedBatch"]


class ModelCaches(Protocol):
    """The memory that a model's layers read and write: what the embedder supplies."""

    @property
    def kv_cache(self) -> Tensor | None:
        """[attention layers, 2, blocks, block_size_tokens, num_kv_heads, head_dim]: keys, values.

        The last block is the dummy block, which no request reads. None will do for a model
        without attention.
        """

    @property
    def live_states(self) -> StatePool:
        """The live states, made for ``HybridModelConfig.state_spec``."""

    def extract_checkpoint_states(
        self, layer: int, chunk_states: Tensor, conv_input: Tensor, metadata: StepMetadata
    ) -> None:
        """Write one Mamba layer's checkpoints of this step into their reserved slots.

        Called before the layer writes its live states back, which the conv windows may need.

        Args:
            layer: Index among the Mamba layers.
            chunk_states: [num_chunks, heads, head_dim, state_size]. State at every chunk's end.
            conv_input: [num_prefill_tokens, conv_dim]. The convolution's inputs, packed.
            metadata: Of this step.
        """


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
        conv: Inputs of the prefill part's convolution.
        chunks: Chunks of the prefill part.
    """

    metadata: StepMetadata
    decodes: DecodeLayout
    state_rows: Tensor
    conv: ConvLayout
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
            ConvLayout.build(starts, num_tokens, config.conv_kernel),
            ChunkLayout.build(
                metadata.cu_chunk_seqlens[: num_chunks + 1].long(),
                metadata.chunk_seq_idx[:num_chunks].long(),
                metadata.last_chunk_indices[: metadata.num_prefills].long(),
                config.ssm_chunk_size,
                num_tokens,
            ),
        )
