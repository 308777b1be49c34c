"""The tensors that a step's kernels read, at addresses that never change."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mamba_cache._torch import PAD_SLOT_ID

__all__ = ["PAD_SLOT_ID", "StepMetadata"]


@dataclass(slots=True, eq=False)  # each step makes one, and a frozen one takes three times as long
class StepMetadata:
    """What the model's layers need to know of one step.

    The batch is packed without padding: the tokens of each decoding request (the last sampled one
    and its drafts), then the prefill chunks, one after the other. Row ``i`` of every per-request
    tensor is the batch's ``i``-th request; rows past ``num_requests`` are padding. Every tensor
    keeps its address and its size from step to step, so that a captured CUDA graph can read it.

    Attributes:
        num_decodes: Requests that decode; they come first in the batch.
        num_prefills: Requests that compute a chunk of their prompt; they come last.
        num_tokens: Tokens of the whole batch.
        num_decode_tokens: Tokens of the decoding part: one for each request, and its drafts.
        max_decode_len: Tokens of the decoding request that has the most.
        num_chunks: SSM chunks of the prefill part.
        chunk_size: Tokens that an SSM chunk has at most.
        num_checkpoints: Checkpoints inside this step's prefill chunks.
        max_seq_len: How far attention looks back at most: the largest of ``seq_lens``, or more
            where the device alone knows how many drafts of the last step were accepted.
        token_ids: [max_tokens] int64. Input tokens; padding is 0.
        positions: [max_tokens] int64. Position of each token in its sequence; padding is 0.
        kv_slot_mapping: [max_tokens] int64. Where a token's key and value go, as block id *
            block size + offset; ``PAD_SLOT_ID``: not written, because the block is shared and
            filled already, or the row is padding.
        query_start_loc: [max_requests + 1] int32. First packed token of each request; padding
            repeats ``num_tokens``.
        num_computed_tokens: [max_requests] int32. Tokens whose effect is in the live state before
            this step; padding is 0.
        seq_lens: [max_requests] int32. ``num_computed_tokens`` plus this step's tokens.
        request_rows: [max_requests] int32. Row of each request in the context's tables; padding is
            ``PAD_SLOT_ID``.
        state_rows: [max_requests] int32. Row of each request in the live states: where its state
            is read from, and where a prefill writes it; padding is ``PAD_SLOT_ID``.
        decode_state_rows: [max_requests, 1 + most tokens of a decode] int32. For each decoding
            request the live-state row that is read, then the one that the state after each of its
            tokens is written to. All columns can be written. Without speculation both columns are
            the same row. Other requests and padding: ``PAD_SLOT_ID``.
        cu_chunk_seqlens: [max_chunks + 1] int32. First token of each SSM chunk, counted from the
            prefill part's first token; padding repeats the number of prefill tokens.
        chunk_seq_idx: [max_chunks] int32. Which prefill request (0 = the first) a chunk belongs
            to; padding is -1.
        last_chunk_indices: [max_requests] int32. Last chunk of each prefill request; padding is -1.
        checkpoint_chunks: [max_checkpoints] int32. The chunk at whose end the state is saved;
            padding is -1.
        checkpoint_conv_ends: [max_checkpoints] int32. The packed prefill token after the
            checkpoint: the conv window saved is the inputs before it; padding is -1.
        checkpoint_seq_starts: [max_checkpoints] int32. The first packed prefill token of the same
            request; inputs before it come from the live conv state. Padding is -1.
        checkpoint_rows: [max_checkpoints] int32. The request's row in the live states; padding
            is ``PAD_SLOT_ID``.
        checkpoint_slots: [max_checkpoints] int32. The reserved slot; padding is ``PAD_SLOT_ID``.
        restore_sources: [max_requests] int32. Slots to restore from in this step; ``ZERO_SOURCE``
            of ``mamba_cache.states`` clears instead; padding is ``PAD_SLOT_ID``.
        restore_rows: [max_requests] int32. Live-state rows to restore into; padding likewise.
        boundary_rows: [max_requests] int32. Live-state rows that are saved at commit; padding is
            ``PAD_SLOT_ID``. With speculation commit decides those of decoding requests.
        boundary_slots: [max_requests] int32. The reserved slots that they are saved to.
        boundary_entries: [max_requests] int32. Which entry of the two a request has; none: -1.
        boundary_positions: [max_requests] int32. The boundary of each request, in tokens from the
            sequence's start; none: -1.
        block_tables: [max_requests, max_blocks] int32. KV block ids of each request; entries past
            a request's last block are the dummy block. Rows past ``num_requests`` are not
            written anew, so a kernel must skip them by ``state_rows`` or ``seq_lens``.
    """

    num_decodes: int
    num_prefills: int
    num_tokens: int
    num_decode_tokens: int
    max_decode_len: int
    num_chunks: int
    chunk_size: int
    num_checkpoints: int
    max_seq_len: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    num_computed_tokens: torch.Tensor
    seq_lens: torch.Tensor
    request_rows: torch.Tensor
    state_rows: torch.Tensor
    decode_state_rows: torch.Tensor
    cu_chunk_seqlens: torch.Tensor
    chunk_seq_idx: torch.Tensor
    last_chunk_indices: torch.Tensor
    checkpoint_chunks: torch.Tensor
    checkpoint_conv_ends: torch.Tensor
    checkpoint_seq_starts: torch.Tensor
    checkpoint_rows: torch.Tensor
    checkpoint_slots: torch.Tensor
    restore_sources: torch.Tensor
    restore_rows: torch.Tensor
    boundary_rows: torch.Tensor
    boundary_slots: torch.Tensor
    boundary_entries: torch.Tensor
    boundary_positions: torch.Tensor
    block_tables: torch.Tensor

    @property
    def num_requests(self) -> int:
        """Requests in the batch."""
        return self.num_decodes + self.num_prefills

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the prefill part."""
        return self.num_tokens - self.num_decode_tokens
