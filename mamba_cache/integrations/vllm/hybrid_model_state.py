"""``MambaHybridModelState``: align mode's bookkeeping on the GPU, for steps prepared ahead."""

# These signatures are vLLM's, which passes all arguments by position.
# ruff: noqa: PLR0917

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from mamba_cache._torch import outside_inference_mode
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.copies import StateTable, align_kernels_for
from mamba_cache.integrations.vllm.mamba_spec import (
    CopyFuncs,
    get_mamba_groups,
    shared_schedule,
)
from mamba_cache.integrations.vllm.mamba_utils import CpuGpuBuffer
from mamba_cache.integrations.vllm.protocols import KVCacheConfig, RequestState
from mamba_cache.states import CopyBackend

__all__ = ["MambaHybridAttnMetadata", "MambaHybridModelState"]

_NO_DRAFTS = -1


@dataclass(frozen=True, slots=True)
class MambaHybridAttnMetadata:
    """Metadata of a batch's requests for attention and Mamba layers.

    Attributes:
        num_reqs: Rows, including padding.
        num_tokens: Tokens, including padding.
        max_query_len: Maximum number of tokens of a row.
        max_seq_len: Length of the longest sequence; the longest possible while a graph is captured.
        is_prefilling: [num_reqs] bool on the CPU.
        num_accepted_tokens: [num_reqs] int32 on the device: accepted tokens of the last step, 1 in
            rows without a request.
        num_decode_draft_tokens_cpu: [num_reqs] int32 on the CPU: drafts that a decoding row
            verifies, -1 in other rows; None without speculation.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    is_prefilling: torch.Tensor
    num_accepted_tokens: torch.Tensor
    num_decode_draft_tokens_cpu: torch.Tensor | None


class MambaHybridModelState:
    """The states of all running requests, by request slot.

    A *request slot* is a request's index while it runs. A batch lists slots in ``idx_mapping``; -1
    skips the row. No method waits for the device, so a step can be prepared before the accepted
    counts of the previous step are known.

    vLLM from 0.32 on passes block tables by request slot to ``initialize_kv_cache``, once. Earlier
    engines pass block tables in batch order to ``preprocess_state``, at each step.

    Args:
        vllm_config: Has ``cache_config.mamba_cache_mode`` and, without a KV cache config,
            ``mamba_block_size``; ``scheduler_config.max_num_seqs``; ``model_config.max_model_len``;
            ``compilation_config.static_forward_context``; ``num_speculative_tokens``.
        model: Has ``get_mamba_state_copy_funcs(mamba_types)``, which returns the copy functions by
            kind of layer, or ``get_mamba_state_copy_func()`` as before vLLM 0.32.
        encoder_cache: Not read; part of vLLM's signature.
        device: Device of the states.
        kv_cache_config: The KV cache groups, if known already.
        backend: "torch", "triton", or "auto": the kernels on CUDA, plain Python elsewhere.

    Attributes:
        num_accepted_tokens_gpu: [max_num_reqs] int32: accepted tokens of each slot's last step.
        max_num_reqs: Number of request slots.

    Raises:
        InvalidArgumentError: In "align" mode neither ``kv_cache_config`` nor
            ``cache_config.mamba_block_size`` gives the tokens of a column, or the backend is
            unknown or not for the device.
        MissingExtraError: The kernels are requested and Triton is not installed.
    """

    def __init__(
        self,
        vllm_config: Any,
        model: Any,
        encoder_cache: object,
        device: torch.device | str,
        *,
        kv_cache_config: KVCacheConfig | None = None,
        backend: CopyBackend = "auto",
    ) -> None:
        self._config = vllm_config
        self._model = model
        self.device = torch.device(device)
        self.max_num_reqs: int = vllm_config.scheduler_config.max_num_seqs
        self._backend: CopyBackend = backend
        align_kernels_for(backend, self.device)
        # One entry more: writes for skipped rows go to entry -1.
        self._accepted = self._filled(self.max_num_reqs + 1, 1)
        self.num_accepted_tokens_gpu = self._accepted[:-1]
        self._is_aligned = vllm_config.cache_config.mamba_cache_mode == "align"
        if self._is_aligned:
            block_size = getattr(vllm_config.cache_config, "mamba_block_size", None)
            if kv_cache_config is not None:
                block_size = shared_schedule(kv_cache_config)[1].block_size
            if not isinstance(block_size, int):
                raise InvalidArgumentError(
                    "in 'align' mode kv_cache_config or cache_config.mamba_block_size must give "
                    f"the tokens of a Mamba column, got {block_size!r}"
                )
            self._block_size = block_size
            self._mamba_state_idx_gpu = self._filled(self.max_num_reqs, 0)
            self._mamba_src_col_gpu = self._filled(self.max_num_reqs, -1)
            self._mamba_src_off_gpu = self._filled(self.max_num_reqs, 0)
            self._table: StateTable | None = None

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, block_tables: Any) -> None:
        """Use these block tables, by request slot, from now on.

        By KV cache group ``block_tables.block_tables[gid].gpu`` is [slots, columns] int32. The
        tables must keep their storage.

        Raises:
            InvalidArgumentError: States or block tables do not fit.
        """
        if self._is_aligned:
            table, by_slot = self._make_table(kv_cache_config), block_tables.block_tables
            table.bind_block_tables([by_slot[group_id].gpu for group_id in table.group_ids])
            self._table = table

    def add_request(self, req_index: int, new_req_data: RequestState) -> None:
        """Assign slot ``req_index`` to a request; its computed tokens must have a state.

        Raises:
            InvalidArgumentError: There is no such slot. Nothing was changed.
        """
        if not 0 <= req_index < self.max_num_reqs:
            raise InvalidArgumentError(
                f"req_index must be in [0, {self.max_num_reqs}), got {req_index}"
            )
        self.num_accepted_tokens_gpu[req_index].fill_(1)
        if self._is_aligned:
            # In Mamba columns, whose size may differ from that of attention blocks.
            column = (new_req_data.num_computed_tokens - 1) // self._block_size
            self._mamba_state_idx_gpu[req_index].fill_(column)
            self._mamba_src_col_gpu[req_index].fill_(-1)
            self._mamba_src_off_gpu[req_index].fill_(0)

    def preprocess_state(
        self,
        input_batch: Any,
        block_tables: Sequence[torch.Tensor],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """Copy the states to the columns that the forward will read, before ``prepare_attn``.

        Accepted counts become 1 where a state changes its column. Do not call for dummy batches.

        Args:
            input_batch: The batch: ``num_reqs``; ``idx_mapping`` [num_reqs] int on the device, the
                slot of each row, -1 to skip it; ``query_start_loc`` [num_reqs + 1] int on the
                device, the first token of each row, then the number of tokens.
            block_tables: By KV cache group: [rows, columns] int32 in batch order. Not read after
                ``initialize_kv_cache``.
            kv_cache_config: The KV cache groups.
            num_computed_tokens: [max_num_reqs] int on the device, by slot: tokens before the step.

        Raises:
            InvalidArgumentError: States or block tables do not fit, or without a GPU a column or
                block is out of range.
        """
        if not self._is_aligned or not input_batch.num_reqs:
            return
        if self._table is None:
            self._table = self._make_table(kv_cache_config)
            self._table.is_by_slot = False
        if not self._table.is_by_slot:
            group_ids = self._table.group_ids
            self._table.bind_block_tables([block_tables[group_id] for group_id in group_ids])
        columns = self._mamba_state_idx_gpu, self._mamba_src_col_gpu, self._mamba_src_off_gpu
        batch = input_batch.num_reqs, input_batch.idx_mapping
        inputs = input_batch.query_start_loc, num_computed_tokens, self.num_accepted_tokens_gpu
        self._table.run("plan_precopy", *batch, *columns, *inputs)

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any = None,
        block_tables: Any = None,
        slot_mappings: Any = None,
        attn_groups: Any = None,
        kv_cache_config: Any = None,
        for_capture: bool = False,
    ) -> MambaHybridAttnMetadata:
        """Return the metadata of a batch for its layers, before the forward.

        The batch has ``num_reqs``, ``num_tokens``, both also with the suffix ``_after_padding``,
        ``idx_mapping``, ``num_scheduled_tokens`` [num_reqs], ``is_prefilling_np`` [num_reqs],
        ``seq_lens_cpu_upper_bound``, ``num_draft_tokens_per_req`` [num_reqs] or None and, from vLLM
        0.32 on, ``prefill_runs_as_decode_np`` [num_reqs] or None: prompt ends that run as decodes
        with placeholder drafts. Rows are padded if ``cudagraph_mode`` (an enum or a name) is
        "FULL". ``for_capture`` of a CUDA graph uses maximum lengths. Other arguments are not read.
        """
        is_padded = getattr(cudagraph_mode, "name", cudagraph_mode) == "FULL"
        suffix = "_after_padding" if is_padded else ""
        num_reqs: int = getattr(input_batch, f"num_reqs{suffix}")
        are_prefilling = input_batch.is_prefilling_np
        if (as_decodes := getattr(input_batch, "prefill_runs_as_decode_np", None)) is not None:
            are_prefilling = are_prefilling & ~as_decodes
        is_prefilling = torch.zeros(num_reqs, dtype=torch.bool, device="cpu")
        is_prefilling[: input_batch.num_reqs] = torch.from_numpy(are_prefilling)
        accepted = self._filled(num_reqs, 1)
        slots = input_batch.idx_mapping[: input_batch.num_reqs].long()
        accepted[: input_batch.num_reqs] = torch.where(slots >= 0, self._accepted[slots], 1)
        max_seq_len = self._config.model_config.max_model_len
        if not for_capture:
            max_seq_len = int(input_batch.seq_lens_cpu_upper_bound[:num_reqs].max())
        return MambaHybridAttnMetadata(
            num_reqs=num_reqs,
            num_tokens=getattr(input_batch, f"num_tokens{suffix}"),
            max_query_len=int(input_batch.num_scheduled_tokens.max()),
            max_seq_len=max_seq_len,
            is_prefilling=is_prefilling,
            num_accepted_tokens=accepted,
            num_decode_draft_tokens_cpu=self._drafts_by_row(input_batch, are_prefilling, num_reqs),
        )

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor | int,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        """Record a step's accepted counts; in "align" mode save states at crossed boundaries.

        Args:
            idx_mapping: [num_reqs] int on the device: the slot of each row, -1 to skip it.
            num_sampled: [num_reqs] int on the device, or one int for all: sampled tokens. A prompt
                chunk samples none and counts as 1.
            num_computed_tokens: [max_num_reqs] int on the device, by slot: tokens after the step;
                None to save no states.

        Raises:
            InvalidArgumentError: Without a GPU a column or block is out of range. Nothing was
                changed.
        """
        if not len(idx_mapping):
            return
        if isinstance(num_sampled, int):
            num_sampled = torch.full_like(idx_mapping, num_sampled)
        if self._is_aligned and self._table and num_computed_tokens is not None:
            accepted, columns = self.num_accepted_tokens_gpu, self._mamba_state_idx_gpu
            inputs = accepted, accepted, columns, num_computed_tokens, None, None, num_sampled
            batch = len(idx_mapping), idx_mapping
            self._table.run("plan_postcopy", *batch, *inputs)
        else:
            self._accepted[idx_mapping.long()] = num_sampled.clamp(min=1).int()

    @outside_inference_mode
    def _filled(self, count: int, value: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=self.device)

    def _make_table(self, kv_cache_config: KVCacheConfig) -> StateTable:
        """Create the table of states and bind the model's states."""
        make_buffer = partial(CpuGpuBuffer, device=self.device)
        table = StateTable(kv_cache_config, self.max_num_reqs, make_buffer, self._backend)
        if table.block_size != self._block_size:
            raise InvalidArgumentError(
                f"the Mamba groups must have columns of {self._block_size} tokens, by which "
                f"requests were added, got {table.block_size}"
            )
        by_kind = getattr(self._model, "get_mamba_state_copy_funcs", None)
        if by_kind is None:
            copy_funcs: CopyFuncs = self._model.get_mamba_state_copy_func()
        else:
            copy_funcs = by_kind({spec.mamba_type for spec in get_mamba_groups(kv_cache_config)})
        layers = self._config.compilation_config.static_forward_context
        table.bind_states(layers, copy_funcs)
        return table

    def _drafts_by_row(
        self, input_batch: Any, are_prefilling: Any, num_reqs: int
    ) -> torch.Tensor | None:
        if not self._config.num_speculative_tokens:
            return None
        by_row = np.full(num_reqs, _NO_DRAFTS, dtype=np.int32)
        drafts, lengths = input_batch.num_draft_tokens_per_req, input_batch.num_scheduled_tokens
        drafts = np.zeros_like(lengths) if drafts is None else drafts
        # A decode without drafts also reads its state after the last accepted draft.
        max_length = 1 + self._config.num_speculative_tokens
        decodes = ~are_prefilling & (lengths > 0) & (lengths <= max_length)
        by_row[: input_batch.num_reqs] = np.where(decodes, drafts, _NO_DRAFTS)
        return torch.from_numpy(by_row)
