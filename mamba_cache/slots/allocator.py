"""The allocator of slots with the tensors of their states, and Megatron Core's scratch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from mamba_cache._checks import INT64_MAX, as_ids, as_ints, check_int, check_kind
from mamba_cache._guard import guarded, outside
from mamba_cache._torch import PAD_SLOT_ID, outside_inference_mode, to_device
from mamba_cache.cache.placement import (
    CheckpointPlacement,
    PlacementFacts,
    check_placement,
    placed_positions,
)
from mamba_cache.cache.policies import SlotEvictionPolicy, as_host_array, policy_named
from mamba_cache.cache.rows import NONE
from mamba_cache.cache.slot_pool import SlotPool, check_same_length
from mamba_cache.config import MAX_INTERMEDIATE_OFFSETS_PER_REQUEST
from mamba_cache.errors import (
    InvalidArgumentError,
    InvariantError,
    MambaCacheError,
    MambaSlotCapacityError,
    MissingStateError,
)
from mamba_cache.events import Stored
from mamba_cache.protocols import SlotContext
from mamba_cache.states import (
    RowIndices,
    SlotQuantization,
    StateCopier,
    StatePool,
    StateSpec,
    quantize_states,
)

__all__ = ["MambaSlotAllocator", "check_model", "checkpoint_alignment", "num_scratch_rows"]


class MambaSlotAllocator(SlotPool):
    """Slots with the tensors of their states: a drop-in for Megatron Core's class of this name.

    Copies are enqueued on the current stream, and the host does not wait for the device. States are
    saved in one of two ways. If the forward writes checkpoints to a scratch, call
    ``compute_and_store_offsets`` before it and ``commit_intermediate_states`` after it. If the
    layers write straight to slots, call ``reserve_slots`` before the forward, and
    ``commit_reserved`` or ``cancel_reserved`` after it; reserved states are not findable.

    After an exception of another package during a change, every call raises ``PoisonedError`` until
    ``reset``, as in ``SlotPool``.

    Args:
        context: The embedding context, with the fields of ``SlotContext``. Each field is read when
            it is needed.
        max_slots: Number of slots for saved states, >= 0.
        num_mamba_layers: Number of Mamba layers of the model, or of this pipeline stage.
        conv_states_shape: Shape of one layer's conv state.
        ssm_states_shape: Shape of one layer's SSM state.
        conv_states_dtype: Dtype of the live conv states.
        ssm_states_dtype: Dtype of the live SSM states.
        policy: Decides which slots are evicted. Default: the policy that the context's
            ``prefix_caching_eviction_policy`` names, else "lru".
        placement: Decides where checkpoints are. Default: ``MegatronPlacement``.
        quantization: The tensors that slots store in int8; None: all are stored unchanged.

    Attributes:
        context: As given.
        num_mamba_layers: Number of layers with a state, of all kinds.
        placement: Decides where checkpoints are.
        quantization: As given.
        free_slots: [max_slots] int32 tensor, CPU. A stack: entries below ``free_count`` are free.
        block_to_slot: [pool_size] int32 tensor, CPU. -1: the block has no slot.
        slot_to_block: [max_slots] int32 tensor, CPU. -1: the slot is free or reserved. An embedder
            may write these three tables by index.
        hash_to_block_id: For an embedder whose KV blocks are no ``KVBlockAllocator``: the block of
            each hash id; its state is found once the block has a slot.
        states: The saved states of all kinds, by name [num_layers, max_slots, *shape].
        conv_states: [num_mamba_layers, max_slots, *conv] on the device. All conv and SSM attributes
            are None if states are of other kinds.
        ssm_states: [num_mamba_layers, max_slots, *ssm] on the device; int8 if quantised.
        ssm_scales: [num_mamba_layers, max_slots, heads, state_dim] float32 if quantised, else None.
        max_intermediate_count: Number of states that the scratch has room for.
        intermediate_conv_out: [num_mamba_layers, max_intermediate_count, *conv]: the scratch.
        intermediate_ssm_out: [num_mamba_layers, max_intermediate_count, *ssm]: the scratch.

    Raises:
        InvalidArgumentError: A size, shape, dtype or setting is out of range, or the model is not
            supported.
    """

    @outside_inference_mode
    def __init__(  # noqa: PLR0917 (embedders pass arguments by position)
        self,
        context: SlotContext,
        max_slots: int,
        num_mamba_layers: int,
        conv_states_shape: Sequence[int],
        ssm_states_shape: Sequence[int],
        conv_states_dtype: torch.dtype,
        ssm_states_dtype: torch.dtype,
        *,
        policy: SlotEvictionPolicy | None = None,
        placement: CheckpointPlacement | None = None,
        quantization: SlotQuantization | None = None,
    ) -> None:
        kinds = (conv_states_shape, ssm_states_shape, conv_states_dtype, ssm_states_dtype)
        spec = StateSpec.mamba(num_mamba_layers, *kinds)
        self._set_up(context, max_slots, spec, policy, placement, quantization)

    @classmethod
    @outside_inference_mode
    def from_spec(
        cls,
        context: SlotContext,
        max_slots: int,
        spec: StateSpec,
        *,
        policy: SlotEvictionPolicy | None = None,
        placement: CheckpointPlacement | None = None,
        quantization: SlotQuantization | None = None,
        evicts_held: bool = False,
    ) -> MambaSlotAllocator:
        """Create an allocator for the states of a spec, with any kinds of layers.

        The scratch, and calls with conv and SSM states, are for ``StateSpec.mamba`` only. States of
        other kinds are read from and written to ``context.live_states``.

        Args:
            context: As for the class.
            max_slots: As for the class.
            spec: The tensors of one state.
            policy: As for the class.
            placement: As for the class.
            quantization: As for the class.
            evicts_held: As for ``SlotPool``.

        Raises:
            InvalidArgumentError: The context has a scratch, and the spec is not one that
                ``StateSpec.mamba`` makes; or as for the class.
        """
        slots = cls.__new__(cls)
        slots._set_up(context, max_slots, spec, policy, placement, quantization, evicts_held)
        return slots

    def embed(self, context: SlotContext) -> None:
        """Use the requests and live states of another context, made later; slots do not change.

        Raises:
            InvalidArgumentError: The context's model is not supported.
        """
        check_model(context)
        self.context = context
        self._make_tables()

    def _set_up(  # noqa: PLR0917 - called by both constructors
        self,
        context: SlotContext,
        max_slots: int,
        spec: StateSpec,
        policy: SlotEvictionPolicy | None,
        placement: CheckpointPlacement | None,
        quantization: SlotQuantization | None,
        evicts_held: bool = False,
    ) -> None:
        check_model(context)
        check_kind("spec", spec, StateSpec)
        placement = check_placement(placement)
        if policy is None:
            policy = policy_named(getattr(context, "prefix_caching_eviction_policy", "lru"))
        self.hash_to_block_id: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}  # the reverse, by block
        SlotPool.__init__(
            self,
            max_slots,
            context.kv_block_allocator,
            policy=policy,
            evicts_held=evicts_held,
            as_tensor=torch.from_numpy,
        )
        self.context = context
        self.num_mamba_layers = sum(kind.num_layers for kind in spec.kinds)
        self.placement = placement
        own_device = getattr(context, "device", None)
        device = torch.device(torch.cuda.current_device() if own_device is None else own_device)
        self.max_intermediate_count = num_scratch_rows(context, spec)
        self.quantization = quantization
        slot_spec = quantization.slot_spec(spec) if quantization else spec
        states = StatePool(slot_spec, self.max_slots, device=device)
        scratch = StatePool(spec, self.max_intermediate_count, device=device)
        self.states, self._scratch = states, scratch
        self._is_mamba = spec.is_mamba
        self._live_storage: Sequence[object] = []
        copied = (list(pool.tensors.values()) for pool in (scratch, states))
        self._scratch_to_slots = StateCopier(*copied)
        self._make_tables()
        # Any: they are not None for conv and SSM states.
        saved, scratched = (pool.tensors if self._is_mamba else {} for pool in (states, scratch))
        self.conv_states: Any = saved.get("conv")
        self.ssm_states: Any = saved.get("ssm")
        self.ssm_scales = saved.get("ssm_scales")
        self.intermediate_conv_out: Any = scratched.get("conv")
        self.intermediate_ssm_out: Any = scratched.get("ssm")

    @outside_inference_mode
    def _make_tables(self) -> None:
        """Make the tables of intermediate offsets and EOS checkpoints: a row for each request.

        The embedder may write the tables on the CPU by index; those on the device are copies.
        """
        rows, device = self.context.max_requests, self.states.device
        wide = rows, MAX_INTERMEDIATE_OFFSETS_PER_REQUEST
        self._intermediate_offsets_cpu = torch.empty(wide, dtype=torch.int32, device="cpu")
        self._intermediate_counts_cpu = torch.empty(rows, dtype=torch.int32, device="cpu")
        self._intermediate_block_ids_cpu = torch.empty(wide, dtype=torch.int32, device="cpu")
        self._eos_cache_block_id_cpu = torch.empty(rows, dtype=torch.int32, device="cpu")
        self._offsets_device = torch.zeros(wide, dtype=torch.int32, device=device)
        self._counts_device = torch.zeros(rows, dtype=torch.int32, device=device)
        self._clear_rows(0, rows)

    def _clear_rows(self, start: int, num_rows: int) -> None:
        rows = slice(start, start + num_rows)
        self._intermediate_offsets_cpu[rows] = 0
        self._intermediate_counts_cpu[rows] = 0
        self._intermediate_block_ids_cpu[rows] = -1
        self._eos_cache_block_id_cpu[rows] = -1
        self._has_intermediates = False

    def live_to_slots(self, rows: RowIndices, slots: RowIndices) -> None:
        """Save live states by their rows, in one launch; skip ``PAD_SLOT_ID``."""
        self._bind_live_states()
        self._live_to_slots.copy(rows, slots)

    def _bind_live_states(self) -> None:
        """Make new copiers if the embedder has replaced the live tensors or their memory."""
        live = list(self._live_states())
        storage = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in live]
        if storage != self._live_storage:
            saved = list(self.states.tensors.values())
            self._live_to_slots = StateCopier(live, saved)
            self._slots_to_live = StateCopier(saved, live)
            self._live_storage = storage

    def _live_states(self) -> Sequence[torch.Tensor]:
        if self._is_mamba:
            return self.context.mamba_conv_states, self.context.mamba_ssm_states
        return [self.context.live_states[tensor.name] for tensor in self._scratch.spec.tensors]

    @guarded(nests=True)
    def allocate_slots_batch(self, block_ids: Iterable[int]) -> list[int]:
        """Give each block a slot: its present slot, else a free slot, else an evicted slot.

        The blocks count as cached at once, so write their states before any read.

        Returns:
            The slot of each block, in order; a block that is named twice has one slot.

        Raises:
            UnknownBlockError: An id is outside the KV pool.
            MambaSlotCapacityError: Too few slots are free or evictable; nothing has changed. Slots
                of the given blocks are not evictable.
        """
        ids = self._block_ids(block_ids)
        slots = dict(zip(ids, self._slots_of(ids), strict=True))
        new = [block_id for block_id, slot in slots.items() if slot < 0]
        if new:
            victims = self._choose_victims(len(new) - self.free_count, protected=ids)
            if len(new) > self.free_count + len(victims):
                raise MambaSlotCapacityError(len(new), self.free_count + len(victims))
            taken = self._take(len(new), victims, num_references=0)
            for slot, block_id in zip(taken, new, strict=True):
                self._slot_at[block_id], self._block_at[slot] = slot, block_id
                slots[block_id] = slot
            self.policy.on_stored(taken)
            self._put(Stored, taken)
            try:
                self.listeners.tell()
            except BaseException:
                # The caller does not get the slots, so their states are never written.
                self.free_states(new)
                raise
        return [slots[block_id] for block_id in ids]

    @guarded(nests=True)
    def _evict_lru_slots_batch(self, num_needed: int, candidate_ids: Any = None) -> list[int]:
        """Evict slots of unreferenced blocks, or of candidates among them, and return the slots."""
        victims = self._choose_victims(num_needed, candidates=candidate_ids)
        if len(victims) < num_needed:
            raise MambaSlotCapacityError(num_needed, len(victims))
        self._evict(victims, num_needed)
        try:
            self.listeners.tell()
        except BaseException:
            self._rows.push(victims)
            raise
        return victims

    @guarded(nests=True)
    def register_block_hashes_batch(self, block_ids: Iterable[int], hashes: Iterable[int]) -> None:
        """Make the blocks' states findable by hash id; ignore hash ids that are not positive.

        A block has one hash id, and a hash id one block: earlier registrations are removed. A block
        may be registered before it has a slot: check ``has_state``.

        Raises:
            UnknownBlockError: A block id is outside the KV pool.
            InvalidArgumentError: The lists differ in length, or a hash id is too large. Nothing was
                registered.
        """
        ids = self._block_ids(block_ids)
        hash_ids = _as_hash_ids(hashes)
        check_same_length(block_ids=ids, hashes=hash_ids)
        self._guard.is_changing = True
        for block_id, hash_id in zip(ids, hash_ids, strict=True):
            if hash_id > 0:
                other = self.hash_to_block_id.pop(hash_id, NONE)
                if self._hash_of.get(other) == hash_id:
                    del self._hash_of[other]
                self._forget_hashes([block_id])
                self.hash_to_block_id[hash_id], self._hash_of[block_id] = block_id, hash_id

    def _forget_hashes(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable by the hash ids registered here and by their present ones."""
        now = as_host_array(self.kv_blocks.block_hashes)
        for block_id in block_ids:
            for hash_id in (self._hash_of.pop(block_id, NONE), now.item(block_id)):
                if self.hash_to_block_id.get(hash_id) == block_id:
                    del self.hash_to_block_id[hash_id]

    @guarded(nests=True)
    def on_kv_blocks_deregistered(
        self, block_ids: Iterable[int], hashes_to_delete: Iterable[int]
    ) -> None:
        """Free the slots of KV blocks that lost their content; an embedder's allocator calls it.

        Args:
            block_ids: The blocks; a list, set, array or tensor.
            hashes_to_delete: Their hash ids. Slots of blocks registered under these are freed, too.

        Raises:
            UnknownBlockError: An id is outside the KV pool; nothing was freed.
            InvalidArgumentError: A hash id is no int, or too large; nothing was freed.
        """
        # Before the checks: the blocks have lost their content, so an interrupt must poison this.
        self._guard.is_changing = True
        ids = self._block_ids(block_ids)
        hash_ids = _as_hash_ids(hashes_to_delete)
        ids += [self.hash_to_block_id[h] for h in hash_ids if h in self.hash_to_block_id]
        self.free_states(ids)
        self._forget_hashes(ids)  # also of blocks that had no slot
        for hash_id in hash_ids:
            self.hash_to_block_id.pop(hash_id, None)
        self.listeners.tell()

    def _unassign(self, slots: Sequence[int]) -> None:
        if self.hash_to_block_id:
            self._forget_hashes([self._block_at[slot] for slot in slots])
        super()._unassign(slots)

    @guarded(nests=True)
    def store_from_tensors(
        self, block_id: int, layer_idx: int, ssm_state: torch.Tensor, conv_state: torch.Tensor
    ) -> None:
        """Write one layer of the state in a block's slot.

        Args:
            block_id: A block with a slot.
            layer_idx: Number of the Mamba layer, from 0.
            ssm_state: [*ssm] of the live states' dtype, on any device.
            conv_state: [*conv] of the live states' dtype, on any device.

        Raises:
            UnknownBlockError: The id is outside the KV pool.
            MissingStateError: The block has no slot.
            InvalidArgumentError: There is no such layer, a state is no tensor of this shape and
                dtype, or the slots' states are not conv and SSM.
        """
        if self.conv_states is None:
            raise InvalidArgumentError(
                f"store_from_tensors takes conv and SSM states, but these slots have the tensors "
                f"{[*self.states.tensors]}: write to slots.states, or restore and save live states"
            )
        slot = self.get_slot(block_id)
        if slot < 0:
            raise MissingStateError(f"block {block_id} has no slot; allocate one first")
        last_layer = self.num_mamba_layers - 1
        layer_idx = check_int("layer_idx", layer_idx, minimum=0, maximum=last_layer)
        for like, state in zip(self._scratch.spec.tensors, (conv_state, ssm_state), strict=True):
            is_tensor = isinstance(state, torch.Tensor)
            if not is_tensor or (state.shape, state.dtype) != (like.shape, like.dtype):
                given = (tuple(state.shape), state.dtype) if is_tensor else type(state).__name__
                raise InvalidArgumentError(
                    f"a layer's state must be a tensor of {like.shape} {like.dtype}, got {given}"
                )
        # Slots must not become part of an autograd graph.
        conv_state, ssm_state = conv_state.detach(), ssm_state.detach()
        states = [conv_state, ssm_state]
        if self.quantization is not None:
            states[1:] = quantize_states(ssm_state)
        self._guard.is_changing = True
        for tensor, state in zip(self.states.tensors.values(), states, strict=True):
            tensor[layer_idx, slot].copy_(state)

    @guarded(nests=True)
    def store_from_live_batch(self, slots: Sequence[int], request_indices: Sequence[int]) -> None:
        """Save the live states of requests, all layers in one launch.

        Args:
            slots: The destinations; if a slot is named twice, the last one counts.
            request_indices: The requests' rows in the context.

        Raises:
            InvalidArgumentError: The lists differ in length, a slot is outside the pool, or a
                request has no live state.
        """
        targets = as_ids("slots", slots, self.max_slots)
        requests = as_ints("request_indices", request_indices)
        check_same_length(slots=targets, request_indices=requests)
        if targets:
            rows = _live_rows(self.context, requests)
            self._guard.is_changing = True  # a findable slot may be written in part
            self.live_to_slots(rows, _last_write_wins(targets))

    @guarded(nests=True)
    def restore_slots(self, sources: RowIndices, rows: RowIndices) -> None:
        """Restore or clear live states by their rows, all layers in one launch.

        Args:
            sources: [n] slots, on the host or the device. ``ZERO_SOURCE`` clears the row;
                ``PAD_SLOT_ID`` is skipped.
            rows: [n] rows of live states, on the same side; ``PAD_SLOT_ID`` is skipped.

        Raises:
            InvalidArgumentError: Lengths, dtypes or devices differ, or, on the host, a row or slot
                is out of range or a row is named twice.
        """
        self._bind_live_states()
        self._slots_to_live.copy(sources, rows)

    @guarded(nests=True)
    def restore_to_live(self, request_idx: int, block_id: int) -> bool:
        """Restore a request's live state from a block's slot.

        Returns:
            False if the block has no slot; the live state is not changed then.

        Raises:
            UnknownBlockError: The id is outside the KV pool.
            InvalidArgumentError: The request has no live state.
        """
        requests = as_ints("request_idx", [request_idx])
        slot = self.get_slot(block_id)
        if slot < 0:
            return False
        self.restore_slots([slot], _live_rows(self.context, requests))
        self.policy.on_consumed([slot])
        return True

    @guarded(nests=True)
    def compute_and_store_offsets(  # noqa: PLR0917 (embedders pass arguments by position)
        self,
        req: Any,
        current_id: int,
        skip_tokens: int,
        prefill_chunk_length: int,
        num_matched_blocks: int,
        matched_block_ids: Sequence[int],
        overall_required_blocks: int,
    ) -> None:
        """Record the checkpoints of a request's prefill chunk.

        Checkpoints for which the scratch has no row left, after those of the step's other requests,
        are dropped and counted in ``skipped_checkpoints_total``.

        Args:
            req: The request: the length of its ``prompt_tokens`` is read, and its
                ``finished_chunk_token_count``, the number of tokens of earlier prefill chunks.
            current_id: The request's row in the context.
            skip_tokens: Number of tokens of the chunk that are not computed.
            prefill_chunk_length: Number of tokens of the chunk, including skipped tokens.
            num_matched_blocks: Number of the prompt's blocks found cached.
            matched_block_ids: Ids of these blocks; not used.
            overall_required_blocks: Number of blocks that the request needs.

        Raises:
            InvalidArgumentError: There is no such row.
        """
        context, size = self.context, self.context.block_size_tokens
        last_row = context.max_requests - 1
        row = check_int("current_id", current_id, minimum=0, maximum=last_row)
        num_tokens = len(req.prompt_tokens)
        start = req.finished_chunk_token_count + skip_tokens
        facts = PlacementFacts(num_tokens, size, num_matched_blocks, overall_required_blocks)
        alignment, num_new = checkpoint_alignment(context), prefill_chunk_length - skip_tokens
        placed = sorted(position - start for position in placed_positions(self.placement, facts))
        fitting = [o for o in placed if 0 < o < num_new and o % alignment == 0]
        counts = self._intermediate_counts_cpu.numpy()
        num_others = int(counts.sum()) - int(counts[row])
        num_left = max(self.max_intermediate_count - num_others, 0)  # rows of the scratch
        num_skipped = max(len(fitting) - min(num_left, MAX_INTERMEDIATE_OFFSETS_PER_REQUEST), 0)
        offsets = fitting[num_skipped:]  # later checkpoints save more tokens
        table = context.request_to_kv_block_ids[row]
        block_ids = [int(table[(start + offset) // size - 1]) for offset in offsets]
        ends_prompt = req.finished_chunk_token_count + prefill_chunk_length >= num_tokens
        has_eos = ends_prompt and num_tokens > 0 and num_tokens % size == 0
        eos_block_id = int(table[num_tokens // size - 1]) if has_eos else -1
        self._guard.is_changing = True
        unused = MAX_INTERMEDIATE_OFFSETS_PER_REQUEST - len(offsets)
        # Through numpy: writing one element of a tensor takes as long as a row of an array.
        self._intermediate_offsets_cpu.numpy()[row] = offsets + [0] * unused
        self._intermediate_block_ids_cpu.numpy()[row] = block_ids + [-1] * unused
        counts[row] = len(offsets)
        self._eos_cache_block_id_cpu.numpy()[row] = eos_block_id
        if offsets or has_eos:
            self._has_intermediates = True
        self.skipped_checkpoints_total += num_skipped

    @guarded(nests=True)
    def get_intermediate_cpu_data(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return the recorded checkpoints of the batch's prefill requests, on the CPU.

        Returns:
            Offsets [prefill_count, 3] and counts [prefill_count], int32: views. (None, None) if
            there are no prefill requests or no checkpoints.
        """
        if not self._has_intermediates:
            return None, None
        start, count = self._prefill_rows()
        rows = slice(start, start + count)
        if not count:
            return None, None
        return self._intermediate_offsets_cpu[rows], self._intermediate_counts_cpu[rows]

    @guarded(nests=True)
    def get_intermediate_gpu_data(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return the recorded checkpoints of the batch's prefill requests, on the device.

        Returns:
            As in ``get_intermediate_cpu_data``, but copied to the device without waiting for it.
        """
        if not self._has_intermediates:
            return None, None
        return self.transfer_intermediate_to_gpu(*self._prefill_rows())

    @guarded(nests=True)
    def transfer_intermediate_to_gpu(
        self, prefill_start: int, prefill_count: int
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Copy recorded rows to the device without waiting for it.

        Returns:
            Offsets [prefill_count, 3] and counts [prefill_count], int32, on the device; the
            addresses depend only on ``prefill_start``. (None, None) for no rows.
        """
        if not prefill_count:
            return None, None
        rows = slice(prefill_start, prefill_start + prefill_count)
        # The device may read after the rows are cleared, so it reads a copy. ``to_device`` pins the
        # copy: the host would wait for a transfer from pageable memory.
        for target, source in (
            (self._offsets_device, self._intermediate_offsets_cpu),
            (self._counts_device, self._intermediate_counts_cpu),
        ):
            target[rows].copy_(to_device(source[rows], target.device), non_blocking=True)
        return self._offsets_device[rows], self._counts_device[rows]

    @guarded(nests=True)
    def commit_intermediate_states(self) -> None:
        """Save the checkpoints of a step whose forward has been enqueued, and publish them.

        Checkpoints that get no slot are dropped and counted in ``skipped_checkpoints_total``. If a
        copy fails, the slots taken for it are freed again.

        The embedder's counts of written scratch rows are trusted. Saved rows are filled with NaN in
        the scratch: a row that the next forward does not write has no other request's state.
        """
        collected = self._collect_commit_data()
        if collected is None:
            return
        bids, offsets, eos_bids, eos_rows, hashes = collected
        num_written = len(offsets)
        block_ids = requested = [*bids, *eos_bids]
        with_slot = {block_id for block_id in requested if self.has_state(block_id)}
        try:
            slots = self.allocate_slots_batch(requested)
        except MambaSlotCapacityError as error:
            new = [b for b in dict.fromkeys(requested) if b not in with_slot]
            kept = with_slot.union(new[: error.available])
            bids, offsets = _only(kept, bids, bids, offsets)
            eos_bids, eos_rows = _only(kept, eos_bids, eos_bids, eos_rows)
            block_ids, hashes = _only(kept, requested, requested, hashes)
            self.skipped_checkpoints_total += len(requested) - len(block_ids)
            if not block_ids:
                self._clear_intermediate_state()
                return
            slots = self.allocate_slots_batch(block_ids)
        try:
            self._copy_intermediate_to_cache(offsets, slots[: len(bids)])
            self.store_from_live_batch(slots[len(bids) :], eos_rows)
            self.register_block_hashes_batch(block_ids, hashes)
        except BaseException as error:
            # An error of the package comes before its copy: earlier states in slots are intact.
            is_whole = isinstance(error, MambaCacheError)
            self._invalidate_blocks_batch(set(block_ids) - (with_slot if is_whole else set()))
            raise
        for tensor in self._scratch.tensors.values():  # 0 for integers, which have no NaN
            tensor[:, :num_written] = math.nan if tensor.is_floating_point() else 0
        self._clear_intermediate_state()

    @guarded(nests=True)
    def _collect_commit_data(
        self,
    ) -> tuple[list[int], list[int], list[int], list[int], list[int]] | None:
        """Return the checkpoints that the step saves; if there are none, clear the records.

        The lists are: blocks, their scratch rows, EOS blocks, their request rows, all hash ids.
        """
        start, num_rows = self._prefill_rows()
        metadata = self.context.mamba_metadata
        written = metadata.per_request_intermediate_counts if metadata.intermediate_count else ()
        written = np.asarray(written[:num_rows], np.int64)
        table = self._intermediate_block_ids_cpu.numpy()[start : start + len(written)]
        blocks = table[np.arange(table.shape[1]) < written[:, None]].tolist()
        eos = self._eos_cache_block_id_cpu.numpy()[start : start + num_rows]
        eos_rows = np.flatnonzero(eos >= 0)
        eos_blocks, eos_rows = eos[eos_rows].tolist(), (eos_rows + start).tolist()
        written_blocks = blocks[: self.max_intermediate_count]  # the scratch has no further rows
        self.skipped_checkpoints_total += len(blocks) - len(written_blocks)
        blocks = written_blocks
        if not blocks and not eos_blocks:
            self._clear_intermediate_state()
            return None
        hashes = as_host_array(self.kv_blocks.block_hashes)[blocks + eos_blocks]
        return blocks, list(range(len(blocks))), eos_blocks, eos_rows, hashes.tolist()

    @guarded(nests=True)
    def _copy_intermediate_to_cache(self, src_offsets: Sequence[int], slots: Sequence[int]) -> None:
        """Copy states from the scratch to slots, all layers in one launch."""
        with outside:  # the caller frees the slots
            self._scratch_to_slots.copy(src_offsets, _last_write_wins(slots))

    @guarded(nests=True)
    def _clear_intermediate_state(self) -> None:
        """Clear the records of the batch's prefill requests."""
        rows = self._prefill_rows()
        self._guard.is_changing = True
        self._clear_rows(*rows)

    def check_invariants(self) -> None:
        """Check that all bookkeeping agrees.

        Raises:
            InvariantError: Two records contradict each other; the message names them.
        """
        super().check_invariants()
        for hash_id, block_id in self.hash_to_block_id.items():
            if self._slot_at[block_id] < 0 and self._hash_of.get(block_id) != hash_id:
                raise InvariantError(f"hash {hash_id} finds block {block_id}, which lost its slot")
        for block_id, hash_id in self._hash_of.items():
            # An embedder may delete a hash id, but no hash id can have two blocks.
            if self.hash_to_block_id.get(hash_id, block_id) != block_id:
                raise InvariantError(
                    f"block {block_id} is registered under hash {hash_id}, which finds another"
                )

    def _prefill_rows(self) -> tuple[int, int]:
        """Return the first row and the number of the batch's prefill requests."""
        batch = self.context.batch_dimensions
        return self.context.paused_request_count + batch.decode_req_count, batch.prefill_req_count

    def _clear(self) -> None:
        super()._clear()
        self.hash_to_block_id.clear()
        self._hash_of.clear()

    def _reset(self) -> None:
        """Return to the initial state: all slots free, no hash ids, all states zero."""
        super()._reset()
        self._clear_rows(0, len(self._intermediate_counts_cpu))
        self.states.zero_()
        self._scratch.zero_()


def _as_hash_ids(values: Iterable[Any]) -> list[int]:
    """Return checked hash ids as ints; an id that is not positive means "none"."""
    return as_ids("hashes", values, INT64_MAX + 1, start=-INT64_MAX - 1)


def _only(kept: Collection[int], block_ids: list[int], *lists: list[int]) -> list[list[int]]:
    """Return the items of each list whose block id at the same index is in ``kept``."""
    return [
        [value for block_id, value in zip(block_ids, values, strict=True) if block_id in kept]
        for values in lists
    ]


def _last_write_wins(destinations: Sequence[int]) -> list[int]:
    """Replace all but the last occurrence of each destination by ``PAD_SLOT_ID``.

    The pairs of one launch run in parallel: two writes to one slot would leave a mixture.
    """
    last = {destination: index for index, destination in enumerate(destinations)}
    return [d if last[d] == index else PAD_SLOT_ID for index, d in enumerate(destinations)]


def num_scratch_rows(context: SlotContext, spec: StateSpec) -> int:
    """Return the number of states that the forward may write to the scratch in one step.

    Megatron Core before 0.19 has no such field, and its forward always writes three rows for each
    of ``max_requests``.
    """
    rows: int | None = getattr(context, "max_mamba_intermediate_states_per_step", None)
    if not spec.is_mamba:
        if rows:
            raise InvalidArgumentError(
                "a scratch holds conv and SSM states (StateSpec.mamba) alone: with states of "
                f"{[tensor.name for tensor in spec.tensors]} "
                f"max_mamba_intermediate_states_per_step must be 0, got {rows}"
            )
        return 0
    if rows is None:
        return MAX_INTERMEDIATE_OFFSETS_PER_REQUEST * context.max_requests
    return rows


def checkpoint_alignment(context: SlotContext) -> int:
    """Return the number of tokens between positions where states can be saved: a chunk's."""
    chunk: int = getattr(context, "mamba_chunk_size", 1)
    alignment: int = getattr(context, "ssm_chunk_alignment", chunk)
    if alignment % chunk:
        raise InvalidArgumentError(
            f"ssm_chunk_alignment must be a multiple of mamba_chunk_size ({chunk}), got {alignment}"
        )
    return alignment


def check_model(context: SlotContext) -> None:
    """Check that the states of the context's model can be saved."""
    num_householder = getattr(context, "gdp_num_householder", 0)
    if num_householder > 0:
        raise InvalidArgumentError(
            f"gdp_num_householder must be 0, got {num_householder}: states of Gated Delta Product "
            "layers are not supported"
        )
    checkpoint_alignment(context)


def _live_rows(context: SlotContext, requests: Sequence[int]) -> list[int]:
    """Return the live-state rows of requests, checked."""
    table = as_host_array(context.mamba_metadata.request_to_mamba_state_idx)
    rows = [int(table[request]) if 0 <= request < len(table) else -1 for request in requests]
    if min(rows) < 0:
        raise InvalidArgumentError(
            f"requests must be in [0, {len(table)}) and have a live state; "
            f"of {list(requests)} the rows of live state are {rows}"
        )
    return rows
