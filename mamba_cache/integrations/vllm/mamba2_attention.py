"""Attention metadata of Mamba2 layers, built from an engine's batch metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from mamba_cache._checks import INT32_MAX, check_int
from mamba_cache._torch import to_device
from mamba_cache.integrations.vllm.copies import IntArray
from mamba_cache.metadata import compute_chunk_metadata

__all__ = [
    "CommonAttentionMetadata",
    "Mamba2AttentionBackend",
    "Mamba2AttentionMetadata",
    "Mamba2AttentionMetadataBuilder",
]


class CommonAttentionMetadata(Protocol):
    """An engine's batch, with decodes first and prefills last."""

    num_reqs: int
    query_start_loc: torch.Tensor
    """[num_reqs + 1] int on the device: first token of each request, then the number of tokens."""
    query_start_loc_cpu: torch.Tensor
    """``query_start_loc`` on the CPU."""
    num_computed_tokens_cpu: torch.Tensor
    """[num_reqs] int on the CPU: tokens of each request before the batch. An engine may have
    ``seq_lens_cpu`` instead."""
    seq_lens: torch.Tensor
    """[num_reqs] int on the device: tokens of each request after the batch."""
    block_table_tensor: torch.Tensor
    """[num_reqs, columns] int32 on the device: physical state blocks. An engine that verifies
    drafts also has ``is_prefilling``, [num_reqs] bool on the CPU: requests whose prompt was not
    fully computed before the batch."""


@dataclass(slots=True)
class Mamba2AttentionMetadata:
    """Metadata of a batch for Mamba2 layers.

    Tensors are int32 on the device unless stated otherwise. Tensors whose names end in ``_p`` are
    for prefills only, and None without prefills.

    Attributes:
        num_prefills: Requests from the first prefill on. A prefill has more tokens than a decode
            with its drafts, or no state before it, or several tokens of its prompt.
        num_prefill_tokens: Tokens of the prefills.
        num_decodes: Requests before the prefills.
        num_decode_tokens: Tokens of the decodes.
        num_reqs: All requests.
        has_initial_states_p: [num_prefills] bool: whether tokens were computed before the batch.
        query_start_loc_p: [num_prefills + 1], first token of each prefill, counted from the first.
        num_computed_tokens_p: [num_prefills], tokens before the batch.
        state_indices_tensor: The state blocks of each request: in "all" mode its row of the block
            table; in "align" mode the running column and the columns of its drafts, [num_reqs]
            without drafts; otherwise the first column, [num_reqs].
        block_idx_last_scheduled_token: [num_reqs], last column to write. None outside "all" mode,
            like the next two.
        block_idx_first_scheduled_token_p: [num_prefills], first column to write.
        block_idx_last_computed_token: [num_reqs], column to read.
        nums_dict: None: the convolution's kernel computes it.
        batch_ptr: None: the convolution's kernel computes it.
        token_chunk_offset_ptr: None: the convolution's kernel computes it.
        prep_initial_states: Whether any prefill has an initial state.
        chunk_size: Maximum number of tokens in a chunk.
        seq_idx_p: [num_chunks], the prefill of each chunk.
        cu_chunk_seqlen_p: [num_chunks + 1], first token of each chunk, then the number of tokens.
        last_chunk_indices_p: [num_prefills], last chunk of each prefill, -1 without a chunk.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_reqs: int
    has_initial_states_p: torch.Tensor | None
    query_start_loc_p: torch.Tensor | None
    num_computed_tokens_p: torch.Tensor | None
    state_indices_tensor: torch.Tensor
    block_idx_last_scheduled_token: torch.Tensor | None
    block_idx_first_scheduled_token_p: torch.Tensor | None
    block_idx_last_computed_token: torch.Tensor | None
    nums_dict: dict[int, Any] | None = None
    batch_ptr: torch.Tensor | None = None
    token_chunk_offset_ptr: torch.Tensor | None = None
    prep_initial_states: bool = False
    chunk_size: int = 0
    seq_idx_p: torch.Tensor | None = None
    cu_chunk_seqlen_p: torch.Tensor | None = None
    last_chunk_indices_p: torch.Tensor | None = None


class Mamba2AttentionMetadataBuilder:
    """Builds ``Mamba2AttentionMetadata``, without waiting for the device.

    Args:
        kv_cache_spec: ``block_size``, ``num_speculative_blocks`` and ``mamba_cache_mode`` of the
            layers' states.
        layer_names: The names of the layers.
        vllm_config: The engine's configuration: ``model_config.get_mamba_chunk_size()``.
        device: Device of the metadata.

    Raises:
        InvalidArgumentError: The model has no chunk size, or one below 1.
    """

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: Sequence[str],
        vllm_config: Any,
        device: torch.device | str,
    ) -> None:
        chunk_size = check_int(
            "the chunk size of a Mamba2 model's configuration",
            vllm_config.model_config.get_mamba_chunk_size(),
            minimum=1,
            maximum=INT32_MAX,
        )
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.device = torch.device(device)
        self.chunk_size = chunk_size

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Mamba2AttentionMetadata:
        """Return the metadata of a batch; the other arguments are not read.

        Raises:
            InvalidArgumentError: The batch's starts or computed tokens are not as described.
        """
        batch = common_attn_metadata
        starts = batch.query_start_loc_cpu.numpy()
        computed, lengths = _computed_on_host(batch), np.diff(starts)
        num_decodes = self._num_decodes(batch, computed, lengths)
        num_prefills, num_decode_tokens = batch.num_reqs - num_decodes, int(starts[num_decodes])
        metadata = Mamba2AttentionMetadata(
            num_prefills=num_prefills,
            num_prefill_tokens=int(starts[-1]) - num_decode_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_reqs=batch.num_reqs,
            has_initial_states_p=None,
            query_start_loc_p=None,
            num_computed_tokens_p=None,
            state_indices_tensor=self._state_indices(batch),
            block_idx_last_scheduled_token=None,
            block_idx_first_scheduled_token_p=None,
            block_idx_last_computed_token=None,
            chunk_size=self.chunk_size,
        )
        if self.kv_cache_spec.mamba_cache_mode == "all":
            block_size = self.kv_cache_spec.block_size
            last = np.maximum(-(-(computed + lengths) // block_size) - 1, 0)
            read = np.maximum(-(-computed // block_size) - 1, 0)
            metadata.block_idx_last_scheduled_token = self._to_device(last)
            metadata.block_idx_last_computed_token = self._to_device(read)
            if num_prefills:
                first = self._to_device(computed[num_decodes:] // block_size)
                metadata.block_idx_first_scheduled_token_p = first
        if num_prefills:
            computed = computed[num_decodes:]
            cu_chunk_seqlen, seq_idx, last_chunk_indices = compute_chunk_metadata(
                starts[num_decodes:] - num_decode_tokens, computed, self.chunk_size
            )
            starts_p = batch.query_start_loc[-num_prefills - 1 :] - num_decode_tokens
            metadata.query_start_loc_p = starts_p.to(self.device, torch.int32, non_blocking=True)
            metadata.num_computed_tokens_p = self._to_device(computed)
            metadata.has_initial_states_p = metadata.num_computed_tokens_p > 0
            metadata.prep_initial_states = bool((computed > 0).any())
            metadata.cu_chunk_seqlen_p = self._to_device(cu_chunk_seqlen)
            metadata.seq_idx_p = self._to_device(seq_idx)
            metadata.last_chunk_indices_p = self._to_device(last_chunk_indices)
        return metadata

    def _compute_chunk_metadata(
        self,
        num_prefills: int,
        num_computed_tokens_p_cpu: torch.Tensor,
        query_start_loc_p_cpu: torch.Tensor,
    ) -> tuple[list[int], list[int], list[int]]:
        """Cut prefills at multiples of the chunk size, counted from each sequence's start.

        Returns:
            First token of each chunk, then the number of tokens; the sequence of each chunk; the
            last chunk of each sequence, -1 without a chunk.
        """
        cu_chunk_seqlen, seq_idx, last_chunk_indices = compute_chunk_metadata(
            query_start_loc_p_cpu[: num_prefills + 1].numpy(),
            num_computed_tokens_p_cpu[:num_prefills].numpy(),
            self.chunk_size,
        )
        return cu_chunk_seqlen.tolist(), seq_idx.tolist(), last_chunk_indices.tolist()

    def _state_indices(self, batch: CommonAttentionMetadata) -> torch.Tensor:
        table, spec = batch.block_table_tensor, self.kv_cache_spec
        if spec.mamba_cache_mode == "all":
            return table
        if spec.mamba_cache_mode != "align":
            return table[:, 0]
        running = (batch.seq_lens.long() - 1).clamp(min=0) // spec.block_size
        drafts = torch.arange(1 + spec.num_speculative_blocks, device=table.device)
        indices = table.gather(1, running[:, None] + drafts)
        return indices if spec.num_speculative_blocks else indices[:, 0]

    def _num_decodes(
        self,
        batch: CommonAttentionMetadata,
        computed: IntArray,
        lengths: IntArray,
    ) -> int:
        """Return the number of requests before the first prefill."""
        # A decode reads a state, so a first token would continue another request's state.
        are_prompts = computed == 0
        is_prefilling = getattr(batch, "is_prefilling", None)
        if is_prefilling is not None:
            # Run as drafts, several prompt tokens would leave the state after the first token.
            are_prompts = is_prefilling[: len(computed)].numpy() & (are_prompts | (lengths > 1))
        is_long = lengths > 1 + self.kv_cache_spec.num_speculative_blocks
        prefills = np.flatnonzero(is_long | (are_prompts & (lengths > 0)))
        return int(prefills[0]) if len(prefills) else len(lengths)

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return to_device(torch.from_numpy(array.astype(np.int32)), self.device)


class Mamba2AttentionBackend:
    """Returns the builder class, for an engine that looks it up by layer."""

    @staticmethod
    def get_builder_cls() -> type[Mamba2AttentionMetadataBuilder]:
        """Return the class that builds the metadata."""
        return Mamba2AttentionMetadataBuilder


def _computed_on_host(batch: CommonAttentionMetadata) -> IntArray:
    computed = getattr(batch, "num_computed_tokens_cpu", None)
    if computed is None:
        # Engines without it have ``seq_lens_cpu``; without both, wait for the device.
        seq_lens = getattr(batch, "seq_lens_cpu", None)
        seq_lens = batch.seq_lens.cpu() if seq_lens is None else seq_lens
        computed = seq_lens[: batch.num_reqs] - batch.query_start_loc_cpu.diff()
    on_host: IntArray = computed[: batch.num_reqs].numpy()
    return on_host
