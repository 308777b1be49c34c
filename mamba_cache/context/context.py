"""The inference context: requests, their memory, and the step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy.typing as npt
import torch

from mamba_cache.config import CacheConfig
from mamba_cache.context.admission import Admitter
from mamba_cache.context.checkpoints import CheckpointPlanner, Publisher
from mamba_cache.context.matching import PrefixMatch
from mamba_cache.context.memory import BatchCounts, CacheMemory
from mamba_cache.context.preparation import RequestPreparer
from mamba_cache.context.request_table import RequestTable
from mamba_cache.context.requests import (
    ActiveRequest,
    Admission,
    PreparedRequest,
    Request,
    RequestStatus,
    check_positions,
)
from mamba_cache.context.stats import CacheStats, StatsCounters, collect_stats
from mamba_cache.context.step import Step
from mamba_cache.context.stepping import StepRunner
from mamba_cache.errors import InvariantError, StepOrderError
from mamba_cache.slots import (
    CheckpointPlacement,
    MegatronPlacement,
    SlotEvictionPolicy,
)
from mamba_cache.slots.fingerprint import fingerprint_of
from mamba_cache.states import KVCacheSpec, StateSpec

__all__ = ["DynamicInferenceContext"]


class DynamicInferenceContext(CacheMemory):
    """Runs requests over a KV cache and live states, and reuses the prefixes that they share.

    One step of an embedding engine::

        context.add_request(request)             # match, reserve, plan
        step = context.begin_step()              # restore or clear live states, send the metadata
        logits = model(step.metadata, context)   # the layers write checkpoints into their slots
        context.commit_step(next_tokens)         # what was written becomes findable

    A call that raises an error of this package leaves the context as it was, but for the recency
    of blocks that it looked at. One thread uses a context at a time. ``CacheMemory`` describes what
    it holds for the model, such as ``kv_cache`` and ``live_states``.

    Args:
        config: Settings.
        state_spec: What one state holds.
        kv_spec: What one token's keys and values hold. None: the embedder keeps them itself, and
            ``config.num_kv_blocks`` says how many blocks it has.
        device: Where states, keys and values are.
        slot_policy: Which states are given up first. Default: the one that belongs to
            ``config.eviction_policy``.
        placement: Where states are saved. Default: Megatron's three positions.

    Raises:
        BudgetError: A budget is too small for one block, or for one slot.
        InvalidArgumentError: The settings do not fit each other.
    """

    def __init__(
        self,
        config: CacheConfig,
        state_spec: StateSpec,
        kv_spec: KVCacheSpec | None = None,
        *,
        device: torch.device | str = "cpu",
        slot_policy: SlotEvictionPolicy | None = None,
        placement: CheckpointPlacement | None = None,
    ) -> None:
        super().__init__(config, state_spec, kv_spec, device=device, slot_policy=slot_policy)
        self._counters = StatsCounters()
        self._preparer = RequestPreparer(config)
        self._requests = RequestTable(
            max_tokens=config.max_tokens, max_sequence_length=config.max_sequence_length
        )
        kv_blocks, slots, counters = self.kv_block_allocator, self.slot_allocator, self._counters
        self._planner = CheckpointPlanner(
            slots,
            MegatronPlacement() if placement is None else placement,
            counters,
            block_size_tokens=config.block_size_tokens,
            max_inside=config.checkpoints_per_step,
            save_prompt_states=config.enable_prefix_caching,
            save_decode_states=config.enable_prefix_caching and config.save_decode_states,
        )
        publisher = Publisher(
            kv_blocks, slots, counters, block_size_tokens=config.block_size_tokens
        )
        self._admitter = Admitter(config, kv_blocks, slots, self.request_memory, self._planner)
        self._runner = StepRunner(
            buffers=self.step_buffers,
            slots=slots,
            planner=self._planner,
            admitter=self._admitter,
            publisher=publisher,
            counters=counters,
        )

    def prepare(self, request: Request) -> PreparedRequest:
        """Check a request's tokens and hash its blocks, so that it can be matched many times.

        Args:
            request: The request; the context keeps nothing of it.

        Raises:
            InvalidArgumentError: The prompt is empty, not 1-D, or holds what is no token id.
            SequenceLengthError: The prompt is longer than ``max_sequence_length``.
        """
        return self._preparer.prepare(request)

    def match(self, request: Request | PreparedRequest) -> PrefixMatch:
        """Find how much of a request is cached now. Nothing changes, and nothing is promised.

        Raises:
            InvalidArgumentError: As in ``prepare``, or another context prepared the request.
            SequenceLengthError: As in ``prepare``.
        """
        prepared = self._prepared(request)
        chain = prepared.chain_for(self._preparer)
        return self._admitter.match(chain, len(prepared.tokens))

    def add_request(
        self,
        request: Request | PreparedRequest,
        *,
        chunk_tokens: int | None = None,
        checkpoint_positions: Sequence[int] = (),
    ) -> Admission:
        """Admit a request to the next step: match it, reserve its memory, plan its first chunk.

        Args:
            request: The request, prepared or not.
            chunk_tokens: Tokens to compute in the next step. Default: all that are left.
            checkpoint_positions: As in ``Request``, for engines that learn of branch points late.

        Raises:
            InvalidArgumentError: The request is malformed or was prepared by another context, its
                id is in use, or ``chunk_tokens`` is not an int >= 1.
            SequenceLengthError: The prompt is longer than ``max_sequence_length``.
            RequestCapacityError: No row is free.
            TokenCapacityError: The step's token buffers cannot hold the chunk beside the other
                chunks and a token of each decoding request.
            BlockCapacityError: Not enough KV blocks are free or evictable.
            StepOrderError: A step is in flight.
        """
        self._runner.require_none()
        prepared = self._prepared(request)
        self._requests.check_new(prepared.request.request_id)
        active = ActiveRequest(
            prepared.request,
            prepared.tokens,
            prepared.chain_for(self._preparer).copy(),
            is_cached=self.config.enable_prefix_caching,
        )
        active.want_checkpoints(prepared.request.checkpoint_positions)
        active.want_checkpoints(checkpoint_positions)
        self._admitter.admit(active, chunk_tokens, self._requests.token_room())
        self._requests.add(active)
        return active.current_admission

    def resume_request(self, request_id: Hashable, *, chunk_tokens: int | None = None) -> Admission:
        """Bring a preempted request on again; what it generated counts as its prompt now.

        Args:
            request_id: A preempted request.
            chunk_tokens: As in ``add_request``.

        Raises:
            UnknownRequestError: There is no such request.
            InvalidArgumentError: ``chunk_tokens`` is not an int >= 1.
            RequestCapacityError: No row is free.
            TokenCapacityError: The step's token buffers cannot hold the chunk.
            BlockCapacityError: Not enough KV blocks are free or evictable.
            SequenceLengthError: It has more than ``max_sequence_length`` tokens; finish it.
            StepOrderError: The request is not preempted, or a step is in flight.
        """
        self._runner.require_none()
        active = self._requests.find(request_id, RequestStatus.PREEMPTED)
        self._admitter.admit(active, chunk_tokens, self._requests.token_room())
        return active.current_admission

    def schedule_prefill(
        self,
        request_id: Hashable,
        *,
        chunk_tokens: int | None = None,
        checkpoint_positions: Sequence[int] = (),
    ) -> int:
        """Schedule the next chunk of a request whose prompt is not computed to its end.

        Args:
            request_id: A request between two chunks.
            chunk_tokens: Tokens to compute in the next step. Default: all that are left.
            checkpoint_positions: Further positions at which to save a state.

        Returns:
            How many tokens will be computed: ``chunk_tokens``, or what is left.

        Raises:
            UnknownRequestError: There is no such request.
            InvalidArgumentError: ``chunk_tokens`` is not an int >= 1.
            TokenCapacityError: The step's token buffers cannot hold the chunk.
            BlockCapacityError: Not enough KV blocks are free or evictable.
            StepOrderError: The request has no chunk to schedule, or a step is in flight.
        """
        self._runner.require_none()
        active = self._requests.find(request_id, RequestStatus.PREFILLING)
        check_positions(checkpoint_positions)
        self._admitter.schedule(
            active, chunk_tokens, self._requests.token_room(), checkpoint_positions
        )
        return active.current_chunk.num_tokens

    def begin_step(self, decode_ids: Iterable[Hashable] | None = None) -> Step:
        """Begin a step with all scheduled chunks and with the requests that decode.

        Live states of new requests are restored or cleared on the current stream, in one launch,
        and the metadata is copied to the device. Nothing waits for the device.

        Args:
            decode_ids: Which of the decoding requests take part. Default: all.

        Raises:
            UnknownRequestError: There is no such request.
            StepOrderError: A step is in flight, one of ``decode_ids`` does not decode, or there
                is nothing to compute.
            SequenceLengthError: A decoding request has reached ``max_sequence_length``; finish it.
            InvalidArgumentError: ``decode_ids`` is no collection.
            BlockCapacityError: Not enough KV blocks for the decoding requests; preempt one.
        """
        self._runner.require_none()
        decodes, prefills = self._requests.decoding(decode_ids), self._requests.scheduled()
        if not decodes and not prefills:
            raise StepOrderError("there is nothing to compute: add, schedule or resume a request")
        self.request_memory.grow([(active, active.num_computed + 1) for active in decodes])
        self.batch_dimensions = BatchCounts(len(prefills), len(decodes))
        return self._runner.begin(decodes, prefills)

    def commit_step(self, new_tokens: Mapping[Hashable, int]) -> None:
        """End a step whose forward is enqueued: what it wrote becomes findable.

        Args:
            new_tokens: The sampled token of each request in ``Step.sampling_ids``.

        Raises:
            StepOrderError: No step is in flight.
            InvalidArgumentError: A token is missing, not expected, or no token id. The step is
                still in flight then.
        """
        self._runner.check_tokens(new_tokens)
        ids = list(new_tokens)
        tokens = self._preparer.check_tokens([new_tokens[request_id] for request_id in ids])
        self._runner.commit(dict(zip(ids, tokens.tolist(), strict=True)))

    def abort_step(self) -> tuple[Hashable, ...]:
        """Take a step back: nothing that it wrote is findable, and its requests are preempted.

        A forward that stopped half-way has overwritten some of the live states, so no request of
        the step can go on from there; each resumes from what was cached before.

        Returns:
            The ids of the step's requests, to resume or to finish.

        Raises:
            StepOrderError: No step is in flight.
        """
        return self._runner.abort()

    def preempt(self, request_id: Hashable) -> None:
        """Take a request's row and blocks back; ``resume_request`` brings it on again.

        Args:
            request_id: A request that holds memory.

        Raises:
            UnknownRequestError: There is no such request.
            StepOrderError: It is preempted already, or a step is in flight.
        """
        self._runner.require_none()
        holding = set(RequestStatus) - {RequestStatus.PREEMPTED}
        active = self._requests.find(request_id, *sorted(holding, key=lambda status: status.value))
        self._admitter.release(active)
        self._counters.preemptions += 1

    def finish(self, request_id: Hashable) -> list[int]:
        """End a request in any state; what it cached stays findable.

        Args:
            request_id: The request.

        Returns:
            The tokens that it generated.

        Raises:
            UnknownRequestError: There is no such request.
            StepOrderError: A step is in flight.
        """
        self._runner.require_none()
        active = self._requests.find(request_id)
        if active.status is not RequestStatus.PREEMPTED:
            self._admitter.release(active)
        self._requests.remove(active)
        return active.generated

    def status(self, request_id: Hashable) -> RequestStatus:
        """Return where a request stands.

        Raises:
            UnknownRequestError: There is no such request.
        """
        return self._requests.find(request_id).status

    def reset(self, *, preserve_prefix_cache: bool = False) -> None:
        """End all requests, and a step in flight with them.

        Args:
            preserve_prefix_cache: Keep cached blocks and states, and the counters. If False,
                everything is as it was when the context was made.
        """
        if preserve_prefix_cache:
            self._runner.drop()
            for active in self._requests:
                self.finish(active.request_id)
            return
        self._runner.forget()
        self._requests.clear()
        self.request_memory.reset()
        self.kv_block_allocator.reset()
        self.slot_allocator.reset()
        self._planner.reset()
        self._counters.reset()

    def stats(self) -> CacheStats:
        """Return what the cache did so far and what it holds now."""
        return collect_stats(
            self._counters, self.kv_block_allocator, self.slot_allocator, self.bytes_per_slot
        )

    def fingerprint(self) -> int:
        """Digest what decides the next step: slots, rows, block tables, and requests' progress.

        Ranks that run the same requests over shards of the same model must have equal ones after
        every call, given equal settings and ``hash_secret``. Linear in slots and block tables.

        Returns:
            From 0 to 2**63 - 1.
        """
        kv_blocks = self.kv_block_allocator
        parts: list[npt.ArrayLike] = []
        for active in self._requests:
            hashes, end = active.chain.hashes, active.num_tokens
            # The last hash names all blocks before; without prefix caching the last tokens must do.
            start = max(len(hashes) * self.block_size_tokens, end - self.block_size_tokens)
            parts += [(active.row, active.num_computed, *hashes[-1:]), active.tokens(start, end)]
        return fingerprint_of(
            self.slot_allocator.fingerprint(),
            self.request_memory.block_tables,
            (kv_blocks.num_free_blocks, kv_blocks.num_cached_blocks),
            *parts,
        )

    def check_invariants(self) -> None:
        """Prove that all bookkeeping agrees. Costs nothing when it is not called.

        Raises:
            InvariantError: It does not: a bug of this package.
        """
        self.kv_block_allocator.check_invariants()
        self.slot_allocator.check_invariants()
        self.request_memory.check_invariants(self._requests.holding_memory())
        self._planner.check_invariants(self._requests.chunks())
        chunks = [c for c in self._requests.chunks() if c.epoch == self.slot_allocator.epoch]
        planned = {checkpoint.slot for chunk in chunks for checkpoint in chunk.checkpoints}
        reserved = self.slot_allocator.pool.reserved.keys()
        if planned != reserved:
            raise InvariantError(
                f"slots {sorted(reserved)} are reserved, but chunks plan for {sorted(planned)}"
            )

    def _prepared(self, request: Request | PreparedRequest) -> PreparedRequest:
        return request if isinstance(request, PreparedRequest) else self.prepare(request)
