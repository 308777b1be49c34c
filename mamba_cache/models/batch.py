"""What all layers of one step share: where the packed tokens, windows and chunks lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mamba_cache.metadata.step import StepMetadata
from mamba_cache.models.config import HybridModelConfig
from mamba_cache.models.conv import ConvLayout
from mamba_cache.models.ssd import ChunkLayout
from mamba_cache.states import StatePool

__all__ = ["ModelCaches", "PackedBatch"]


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
class PackedBatch:
    """One step's metadata, cut to the rows in use and turned into indices.

    Building it reads nothing back from the device: every size is an int of the metadata.

    Attributes:
        metadata: What it was built from.
        state_rows: [num_requests] int64. Row of each request in the live states.
        conv: Inputs of the prefill part's convolution.
        chunks: Chunks of the prefill part.
    """

    metadata: StepMetadata
    state_rows: Tensor
    conv: ConvLayout
    chunks: ChunkLayout

    @classmethod
    def build(cls, metadata: StepMetadata, config: HybridModelConfig) -> PackedBatch:
        """Lay out one step for a model."""
        num_tokens, num_chunks = metadata.num_prefill_tokens, metadata.num_chunks
        starts = metadata.query_start_loc[metadata.num_decodes : metadata.num_requests + 1]
        return cls(
            metadata,
            metadata.state_rows[: metadata.num_requests].long(),
            ConvLayout.build(starts.long() - metadata.num_decodes, num_tokens, config.conv_kernel),
            ChunkLayout.build(
                metadata.cu_chunk_seqlens[: num_chunks + 1].long(),
                metadata.chunk_seq_idx[:num_chunks].long(),
                metadata.last_chunk_indices[: metadata.num_prefills].long(),
                config.ssm_chunk_size,
                num_tokens,
            ),
        )
