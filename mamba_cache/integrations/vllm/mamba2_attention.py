"""Attention metadata of Mamba2 layers, built from an engine's own batch metadata."""

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
    """What is read of an engine's batch: decodes come first, prefills last."""

    num_reqs: int
    query_start_loc: torch.Tensor
    """[num_reqs + 1] int on the device: first token of each request, then their number."""
    query_start_loc_cpu: torch.Tensor
    """The same on the CPU."""
    num_computed_tokens_cpu: torch.Tensor
    """[num_reqs] int on the CPU: tokens of each request before the batch. An engine may have
    ``seq_lens_cpu`` instead."""
    seq_lens: torch.Tensor
    """[num_reqs] int on the device: tokens of each request after the batch."""
    block_table_tensor: torch.Tensor
    """[num_reqs, columns] int32 on the device: physical state blocks. An engine that verifies
    drafts has ``is_prefilling`` as well, [num_reqs] bool on the CPU: whether a request's prompt was
    not computed to its end before the batch."""


@dataclass(slots=True)
class Mamba2AttentionMetadata:
    """What Mamba2 layers need to know of a batch.

    Tensors are int32 on the device unless stated otherwise. Those whose names end in ``_p`` are of
    the prefills alone, and None if there are none.

    Attributes:
        num_prefills: Requests from the first that is no decode: it has more tokens than a decode
            and its drafts, or there is no state before it, or several tokens of its prompt.
        num_prefill_tokens: Their tokens.
        num_decodes: The requests before them.
        num_decode_tokens: Their tokens.
        num_reqs: All requests.
        has_initial_states_p: [num_prefills] bool: whether anything was computed before.
        query_start_loc_p: [num_prefills + 1], first token of each, counted from the first prefill.
        num_computed_tokens_p: [num_prefills], tokens before the batch.
        state_indices_tensor: The state blocks of each request: in "all" mode its row of the block
            table; in "align" mode the running column and those of its drafts, [num_reqs] if there
            are no drafts; otherwise the first column, [num_reqs].
        block_idx_last_scheduled_token: [num_reqs], last column that is written. As the two below,
            None outside "all" mode.
        block_idx_first_scheduled_token_p: [num_prefills], first column that is written.
        block_idx_last_computed_token: [num_reqs], column that is read.
        nums_dict: Left to the convolution's kernel, as the two below.
        batch_ptr: Left to the convolution's kernel.
        token_chunk_offset_ptr: Left to the convolution's kernel.
        prep_initial_states: Whether any prefill has an initial state.
        chunk_size: Most tokens of a chunk.
        seq_idx_p: [num_chunks], the prefill of each chunk.
        cu_chunk_seqlen_p: [num_chunks + 1], first token of each chunk, then their number.
        last_chunk_indices_p: [num_prefills], the last chunk of each, -1 if it has none.
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
        layer_names: The layers.
        vllm_config: The engine's configuration: ``model_config.get_mamba_chunk_size()``.
        device: Where the kernels read.

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
        """Cut prefills at multiples of the chunk size counted from each sequence's own start.

        Returns:
            First token of each chunk, then the number of tokens; the sequence of each chunk; the
            last chunk of each sequence, -1 if it has none.
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
        """Return how many requests come before the first that is no decode."""
        # A decode reads its state, so a first token would go on from what another request left.
        are_prompts = computed == 0
        is_prefilling = getattr(batch, "is_prefilling", None)
        if is_prefilling is not None:
            # As drafts, tokens of a prompt would leave the state after the first of them.
            are_prompts = is_prefilling[: len(computed)].numpy() & (are_prompts | (lengths > 1))
        is_long = lengths > 1 + self.kv_cache_spec.num_speculative_blocks
        prefills = np.flatnonzero(is_long | (are_prompts & (lengths > 0)))
        return int(prefills[0]) if len(prefills) else len(lengths)

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return to_device(torch.from_numpy(array.astype(np.int32)), self.device)


class Mamba2AttentionBackend:
    """Names the builder, for an engine that looks it up by layer."""

    @staticmethod
    def get_builder_cls() -> type[Mamba2AttentionMetadataBuilder]:
        """Return the class that builds the metadata."""
        return Mamba2AttentionMetadataBuilder


def _computed_on_host(batch: CommonAttentionMetadata) -> IntArray:
    computed = getattr(batch, "num_computed_tokens_cpu", None)
    if computed is None:
        # Engines without the one have the other; only one with neither is waited for.
        seq_lens = getattr(batch, "seq_lens_cpu", None)
        seq_lens = batch.seq_lens.cpu() if seq_lens is None else seq_lens
        computed = seq_lens[: batch.num_reqs] - batch.query_start_loc_cpu.diff()
    on_host: IntArray = computed[: batch.num_reqs].numpy()
    return on_host
