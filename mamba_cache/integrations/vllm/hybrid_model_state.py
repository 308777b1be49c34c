"""``MambaHybridModelState``: bookkeeping that stays on the GPU, for steps prepared ahead."""

# An engine gives these functions all that it has, by position.
# ruff: noqa: PLR0917

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from mamba_cache._inference_mode import outside_inference_mode
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.align_on_gpu import MambaSpecDecodeGPUContext
from mamba_cache.integrations.vllm.column_moves import previous_column
from mamba_cache.integrations.vllm.copy_buffers import CpuGpuBuffer
from mamba_cache.integrations.vllm.copy_specs import CopyFuncs, validate_mamba_state_copy_funcs
from mamba_cache.integrations.vllm.kernels import kernels_for
from mamba_cache.integrations.vllm.mamba_spec import get_mamba_groups, shared_schedule
from mamba_cache.integrations.vllm.protocols import (
    EngineConfig,
    HybridModel,
    KVCacheConfig,
    NewRequest,
    ResidentBatch,
)
from mamba_cache.states import CopyBackend

__all__ = ["MambaHybridAttnMetadata", "MambaHybridModelState"]

_NO_DRAFTS = -1


@dataclass(frozen=True, slots=True)
class MambaHybridAttnMetadata:
    """What a batch's attention and Mamba layers need to know of its requests.

    Attributes:
        num_reqs: Rows, padding included.
        num_tokens: Tokens, padding included.
        max_query_len: Most tokens of one row.
        max_seq_len: Most tokens of one sequence; the longest possible while a graph is captured.
        is_prefilling: [num_reqs] bool on the CPU.
        num_accepted_tokens: [num_reqs] int32 on the device: accepted tokens of the last step, 1 in
            rows without a request.
        num_decode_draft_tokens_cpu: [num_reqs] int32 on the CPU: drafts that a row verifies, -1
            where it does not decode speculatively; None without speculation.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    is_prefilling: torch.Tensor
    num_accepted_tokens: torch.Tensor
    num_decode_draft_tokens_cpu: torch.Tensor | None


class _Prepared(NamedTuple):
    """What ``preprocess_state`` leaves for ``prepare_attn`` of the same batch."""

    input_batch: ResidentBatch
    accepted_by_row: torch.Tensor

    def fits(self, input_batch: ResidentBatch, num_reqs: int) -> bool:
        return self.input_batch is input_batch and num_reqs <= len(self.accepted_by_row)


class MambaHybridModelState:
    """The states of all running requests, by request slot.

    A *request slot* is a request's place while it runs; a batch lists slots in ``idx_mapping``,
    where -1 means that the row is skipped. Nothing here waits for the device, so a step can be
    prepared before the accepted counts of the one before are known.

    vLLM from 0.32 on gives ``initialize_kv_cache`` its block tables by request slot, once. Earlier
    engines gave ``preprocess_state`` those of the batch, at each step.

    Args:
        vllm_config: The engine's configuration.
        model: Says what each kind of state is.
        encoder_cache: Taken for the engine's sake and not read.
        device: Where the states live.
        kv_cache_config: The KV cache groups, if they are known already.
        backend: "torch", "triton", or "auto": the kernels on CUDA, plain Python elsewhere.
        check_columns: As in ``MambaSpecDecodeGPUContext``.

    Attributes:
        num_accepted_tokens_gpu: [max_num_reqs] int32: accepted tokens of each slot's last step.
        max_num_reqs: Request slots.

    Raises:
        InvalidArgumentError: In "align" mode neither ``kv_cache_config`` nor
            ``cache_config.mamba_block_size`` gives the tokens of a column, or the backend is
            unknown or not for the device.
        MissingExtraError: The kernels are asked for and Triton is not installed.
    """

    @outside_inference_mode
    def __init__(
        self,
        vllm_config: EngineConfig,
        model: HybridModel,
        encoder_cache: object,
        device: torch.device | str,
        *,
        kv_cache_config: KVCacheConfig | None = None,
        backend: CopyBackend = "auto",
        check_columns: bool = False,
    ) -> None:
        self._config = vllm_config
        self._model = model
        self.device = torch.device(device)
        self.max_num_reqs: int = vllm_config.scheduler_config.max_num_seqs
        self._backend: CopyBackend = backend
        self._kernels = kernels_for(backend, self.device)
        self._check_columns = check_columns
        self.num_accepted_tokens_gpu = self._per_slot(1)
        self._prepared: _Prepared | None = None
        self._is_aligned = vllm_config.cache_config.mamba_cache_mode == "align"
        if self._is_aligned:
            self._block_size = _column_tokens(vllm_config, kv_cache_config)
            self._mamba_state_idx_gpu = self._per_slot(0)
            self._mamba_src_col_gpu = self._per_slot(-1)
            self._mamba_src_off_gpu = self._per_slot(0)
            self._context: MambaSpecDecodeGPUContext | None = None

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, block_tables: Any) -> None:
        """Take block tables by request slot, to be used from now on.

        Args:
            kv_cache_config: Names the layers of each group.
            block_tables: By KV cache group: ``block_tables[gid].gpu``, [slots, columns], and
                ``input_block_tables[gid]``, the same in batch order. They must keep their storage.

        Raises:
            InvalidArgumentError: States or block tables do not fit.
        """
        if self._is_aligned:
            _check_column_tokens(kv_cache_config, self._block_size)
            group_ids, _ = shared_schedule(kv_cache_config)
            by_slot = [block_tables.block_tables[group_id].gpu for group_id in group_ids]
            by_row = [block_tables.input_block_tables[group_id] for group_id in group_ids]
            self._context = self._make_context(by_slot, kv_cache_config, by_row)

    def add_request(self, req_index: int, new_req_data: NewRequest) -> None:
        """Give a request the slot ``req_index``.

        Args:
            req_index: The slot.
            new_req_data: The request: computed tokens are those whose state is in the block table.

        Raises:
            InvalidArgumentError: There is no such slot. Nothing was changed.
        """
        if not 0 <= req_index < self.max_num_reqs:
            raise InvalidArgumentError(
                f"req_index must be in [0, {self.max_num_reqs}), got {req_index}"
            )
        self._prepared = None
        self.num_accepted_tokens_gpu[req_index].fill_(1)
        if self._is_aligned:
            # By the tokens of a Mamba column, which are not those of an attention block.
            column = previous_column(new_req_data.num_computed_tokens, self._block_size)
            self._mamba_state_idx_gpu[req_index].fill_(column)
            self._mamba_src_col_gpu[req_index].fill_(-1)
            self._mamba_src_off_gpu[req_index].fill_(0)

    def preprocess_state(
        self,
        input_batch: ResidentBatch,
        block_tables: Sequence[torch.Tensor],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """Bring the states to the columns that the forward will read, before ``prepare_attn``.

        Accepted counts become 1 where a state changes its column. Not for dummy batches.

        Args:
            input_batch: The batch.
            block_tables: By KV cache group: [rows, columns] int32 in batch order. Not read after
                ``initialize_kv_cache``.
            kv_cache_config: Names the layers of each group.
            num_computed_tokens: [max_num_reqs] int on the device, by slot: tokens before the step.

        Raises:
            InvalidArgumentError: States or block tables do not fit, or a checked column is out of
                range.
        """
        if not self._is_aligned or not input_batch.num_reqs:
            return
        context = self._bind(block_tables, kv_cache_config)
        num_rows = getattr(input_batch, "num_reqs_after_padding", input_batch.num_reqs)
        accepted_by_row = torch.empty(num_rows, dtype=torch.int32, device=self.device)
        context.run_resident_precopy(
            input_batch.num_reqs,
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            num_computed_tokens,
            self.num_accepted_tokens_gpu,
            self._mamba_state_idx_gpu,
            self._mamba_src_col_gpu,
            self._mamba_src_off_gpu,
            accepted_by_row,
        )
        self._prepared = _Prepared(input_batch, accepted_by_row)

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
        """Return what the layers need to know of a batch, before its forward.

        Args:
            input_batch: The batch: ``num_reqs``, ``num_tokens``, the same ``_after_padding``,
                ``idx_mapping``, ``num_scheduled_tokens`` and ``is_prefilling_np`` [num_reqs],
                ``seq_lens_cpu_upper_bound``, ``num_draft_tokens_per_req`` [num_reqs] or None.
            cudagraph_mode: An enum or its name; "FULL" pads the batch.
            block_tables: Not read, as the three below.
            slot_mappings: Not read.
            attn_groups: Not read.
            kv_cache_config: Not read.
            for_capture: Whether a CUDA graph is captured: lengths are the worst case then.
        """
        is_padded = getattr(cudagraph_mode, "name", cudagraph_mode) == "FULL"
        suffix = "_after_padding" if is_padded else ""
        num_reqs: int = getattr(input_batch, f"num_reqs{suffix}")
        is_prefilling = torch.zeros(num_reqs, dtype=torch.bool, device="cpu")
        is_prefilling[: input_batch.num_reqs] = torch.from_numpy(input_batch.is_prefilling_np)
        max_seq_len = self._config.model_config.max_model_len
        if not for_capture:
            max_seq_len = int(input_batch.seq_lens_cpu_upper_bound[:num_reqs].max())
        return MambaHybridAttnMetadata(
            num_reqs=num_reqs,
            num_tokens=getattr(input_batch, f"num_tokens{suffix}"),
            max_query_len=int(input_batch.num_scheduled_tokens.max()),
            max_seq_len=max_seq_len,
            is_prefilling=is_prefilling,
            num_accepted_tokens=self._accepted_by_row(input_batch, num_reqs),
            num_decode_draft_tokens_cpu=self._drafts_by_row(input_batch, num_reqs),
        )

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor | int,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        """Take the accepted counts of a step and, in "align" mode, save crossed boundaries.

        Args:
            idx_mapping: [num_reqs] int on the device: the slot of each row, -1 to skip it.
            num_sampled: [num_reqs] int on the device, or one int for all: sampled tokens. A chunk
                of a prompt samples none and counts as 1.
            num_computed_tokens: [max_num_reqs] int on the device, by slot: tokens after the step;
                None if nothing is to be saved.

        Raises:
            InvalidArgumentError: A checked column is out of range. Nothing was changed.
        """
        if not len(idx_mapping):
            return
        self._prepared = None
        if isinstance(num_sampled, int):
            num_sampled = torch.full_like(idx_mapping, num_sampled)
        accepted = self.num_accepted_tokens_gpu
        if self._is_aligned and self._context and num_computed_tokens is not None:
            self._context.run_resident_postprocess(
                idx_mapping, num_sampled, accepted, self._mamba_state_idx_gpu, num_computed_tokens
            )
        else:
            self._kernels.accept_tokens(idx_mapping, num_sampled, accepted)

    def _per_slot(self, value: int) -> torch.Tensor:
        return torch.full((self.max_num_reqs,), value, dtype=torch.int32, device=self.device)

    def _bind(
        self, block_tables: Sequence[torch.Tensor], kv_cache_config: KVCacheConfig
    ) -> MambaSpecDecodeGPUContext:
        if self._context is None:
            _check_column_tokens(kv_cache_config, self._block_size)
            group_ids, _ = shared_schedule(kv_cache_config)
            tables = [block_tables[group_id] for group_id in group_ids]
            self._context = self._make_context(tables, kv_cache_config, tables)
            self._context.table.is_by_slot = False
        elif not self._context.table.is_by_slot:
            tables = [block_tables[group_id] for group_id in self._context.mamba_group_ids]
            self._context.table.block_tables.bind(tables)
        return self._context

    def _make_context(
        self,
        block_tables: Sequence[torch.Tensor],
        kv_cache_config: KVCacheConfig,
        index_tables: Sequence[torch.Tensor],
    ) -> MambaSpecDecodeGPUContext:
        copy_funcs = _copy_funcs(self._model, kv_cache_config)
        context = MambaSpecDecodeGPUContext.create(
            self.max_num_reqs,
            kv_cache_config,
            copy_funcs,
            self.device,
            lambda n, *, dtype: CpuGpuBuffer(n, dtype=dtype, device=self.device),
            backend=self._backend,
            check_columns=self._check_columns,
        )
        context.initialize_from_forward_context(
            kv_cache_config,
            self._config.compilation_config.static_forward_context,
            copy_funcs,
            block_tables,
            index_tables,
        )
        return context

    def _accepted_by_row(self, input_batch: ResidentBatch, num_reqs: int) -> torch.Tensor:
        # Most often ``preprocess_state`` has gathered them already, which saves a launch.
        prepared, self._prepared = self._prepared, None
        if prepared and prepared.fits(input_batch, num_reqs):
            return prepared.accepted_by_row[:num_reqs]
        by_row = torch.empty(num_reqs, dtype=torch.int32, device=self.device)
        slots = input_batch.idx_mapping[: input_batch.num_reqs]
        self._kernels.gather_accepted(slots, self.num_accepted_tokens_gpu, by_row)
        return by_row

    def _drafts_by_row(self, input_batch: Any, num_reqs: int) -> torch.Tensor | None:
        if not self._config.num_speculative_tokens:
            return None
        by_row = np.full(num_reqs, _NO_DRAFTS, dtype=np.int32)
        drafts = input_batch.num_draft_tokens_per_req
        if drafts is not None:
            # A row whose prompt is not all computed has more than one token beside its drafts.
            verifies = (drafts > 0) & (input_batch.num_scheduled_tokens == drafts + 1)
            by_row[: input_batch.num_reqs] = np.where(verifies, drafts, _NO_DRAFTS)
        return torch.from_numpy(by_row)


def _copy_funcs(model: Any, kv_cache_config: KVCacheConfig) -> CopyFuncs:
    """Ask a model for its copy functions, by kind of layer where it has more than one."""
    by_kind = getattr(model, "get_mamba_state_copy_funcs", None)
    if by_kind is None:
        funcs: CopyFuncs = model.get_mamba_state_copy_func()
        return funcs
    groups = get_mamba_groups(kv_cache_config)
    funcs = by_kind({spec.mamba_type for spec in groups})
    validate_mamba_state_copy_funcs(groups, funcs)
    return funcs


def _column_tokens(config: EngineConfig, kv_cache_config: KVCacheConfig | None) -> int:
    if kv_cache_config is not None:
        return shared_schedule(kv_cache_config)[1].block_size
    block_size = getattr(config.cache_config, "mamba_block_size", None)
    if not isinstance(block_size, int):
        raise InvalidArgumentError(
            "in 'align' mode kv_cache_config or cache_config.mamba_block_size must give the tokens "
            f"of a Mamba column, got {block_size!r}"
        )
    return block_size


def _check_column_tokens(kv_cache_config: KVCacheConfig, block_size: int) -> None:
    given = shared_schedule(kv_cache_config)[1].block_size
    if given != block_size:
        raise InvalidArgumentError(
            f"the Mamba groups must have columns of {block_size} tokens, by which requests were "
            f"added, got {given}"
        )
