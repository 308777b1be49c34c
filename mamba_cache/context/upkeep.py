"""What a context does beside its steps: it is put together, reset, counted and proved."""

from __future__ import annotations

import numpy.typing as npt
import torch

from mamba_cache._checks import check_kind
from mamba_cache._guard import CallGuard, exclusive, guarded
from mamba_cache._weak_callback import WeakCallback
from mamba_cache.config import CacheConfig
from mamba_cache.context.admission import Admitter
from mamba_cache.context.checkpoints import CheckpointPlanner, Publisher
from mamba_cache.context.forks import Forker
from mamba_cache.context.invariants import check_requests, check_states_of_blocks
from mamba_cache.context.memory import CacheMemory
from mamba_cache.context.preparation import RequestPreparer
from mamba_cache.context.request_table import RequestTable
from mamba_cache.context.requests import ActiveRequest, RequestStatus
from mamba_cache.context.restore_order import CudaRestoreStreams, SideStream
from mamba_cache.context.scrubbing import scrub_memory
from mamba_cache.context.speculation import Speculation
from mamba_cache.context.stats import CacheStats, StatsCounters, collect_stats
from mamba_cache.context.stepping import StepRunner
from mamba_cache.errors import InvalidArgumentError, StepOrderError
from mamba_cache.slots import CheckpointPlacement, SlotEvictionPolicy
from mamba_cache.slots.fingerprint import fingerprint_of
from mamba_cache.slots.placement import check_placement
from mamba_cache.states import KVCacheSpec, StateSpec

__all__ = ["ContextUpkeep"]


class ContextUpkeep(CacheMemory):
    """The parts of a context and the calls that concern all of it.

    ``DynamicInferenceContext`` adds those that concern requests and steps, and says what the
    arguments are.

    Raises:
        BudgetError: A budget is too small for one block, or for one slot.
        InvalidArgumentError: The settings do not fit each other, or one is of a wrong kind.
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
        check_kind("config", config, CacheConfig)
        check_kind("state_spec", state_spec, StateSpec)
        if kv_spec is not None:
            check_kind("kv_spec", kv_spec, KVCacheSpec)
        placement = check_placement(placement)
        super().__init__(config, state_spec, kv_spec, device=device, slot_policy=slot_policy)
        self._guard = CallGuard(self.check_invariants)
        self.kv_block_allocator.join(self._guard)
        self.slot_allocator.join(self._guard)
        self._counters = StatsCounters()
        self._preparer = RequestPreparer(config)
        self._requests = RequestTable(
            self.request_rows,
            max_tokens=config.max_tokens,
            max_decode_tokens=config.max_decode_tokens,
            max_sequence_length=config.max_sequence_length,
        )
        kv_blocks, slots, counters = self.kv_block_allocator, self.slot_allocator, self._counters
        self._planner = self._make_planner(placement)
        publisher = Publisher(
            kv_blocks, slots, counters, block_size_tokens=config.block_size_tokens
        )
        self._admitter = Admitter(config, kv_blocks, slots, self.request_rows, self._planner)
        speculation = Speculation(config, self.device) if config.num_speculative_tokens else None
        self._runner = StepRunner(
            buffers=self.step_buffers,
            rows=self.request_rows,
            slots=slots,
            planner=self._planner,
            admitter=self._admitter,
            publisher=publisher,
            counters=counters,
            speculation=speculation,
            side_stream=self._side_stream(),
            extractions=self._extractions,
        )
        self._forker = Forker(
            self,
            self._requests,
            preparer=self._preparer,
            runner=self._runner,
            speculation=speculation,
        )
        self.slot_allocator.before_reset = WeakCallback(self._runner.require_none)
        kv_blocks.before_reset = WeakCallback(self._require_no_blocks_held)

    def reset(self, *, preserve_prefix_cache: bool = False) -> None:
        """End all requests, and a step in flight with them.

        Args:
            preserve_prefix_cache: Keep cached blocks and states, and the counters. If False,
                everything is as it was when the context was made, whatever happened to it.

        Raises:
            InvalidArgumentError: ``preserve_prefix_cache`` is no bool.
        """
        if not isinstance(preserve_prefix_cache, bool):
            raise InvalidArgumentError(
                f"preserve_prefix_cache must be a bool, got {preserve_prefix_cache!r}"
            )
        if preserve_prefix_cache:
            self._reset_requests()
        else:
            self._reset_everything()

    @guarded(trusts=())
    def _reset_requests(self) -> None:
        self._runner.drop()
        for active in self._requests:
            self._end(active)

    @guarded(renews=True)
    def _reset_everything(self) -> None:
        self._runner.forget()
        self._requests.clear()
        self.request_rows.reset()
        # Before the KV blocks, which tell the slots: books that contradict each other are not read.
        self.slot_allocator.reset()
        self.kv_block_allocator.reset()
        self._planner.reset()
        self._counters.reset()

    @exclusive
    def scrub(self) -> None:
        """Zero all memory but cached prefixes and what running requests have computed.

        Memory that is given back keeps its content until it is written again: a block that another
        request has taken in the part that this one has not computed yet, a reserved slot until its
        step. After this, nothing is left of requests that are finished and of blocks that were
        deregistered, evicted or reset: no states, keys, values or tokens in tensors of the context.
        It takes as long as writing that memory does, and may wait for the device.

        Raises:
            StepOrderError: A step is in flight or uncollected.
        """
        self._runner.require_none()
        self._runner.require_collected()
        requests = self._requests.holding_memory()
        # A request whose first chunk is due gets its live state when its step begins.
        rows = [a.row for a in requests if a.chunk is None or not a.chunk.is_first]
        scrub_memory(self, requests, rows, self._runner.cursors)
        for active in requests:
            active.collect_tokens()
        self.request_rows.scrub()
        self._runner.scrub([a.row for a in requests if a.status is RequestStatus.DECODING])

    def stats(self) -> CacheStats:
        """Return what the cache did so far and what it holds now."""
        return collect_stats(
            self._counters, self.kv_block_allocator, self.slot_allocator, self.bytes_per_slot
        )

    def fingerprint(self) -> int:
        """Digest what decides the next step: slots, rows, block tables, progress and due chunks.

        Ranks that run the same requests over shards of the same model must have equal ones after
        every call, given equal settings, ``hash_secret``, and names and dtypes of states (a kind of
        layers that a rank has none of has 0 layers there). Linear in slots and block tables.

        Returns:
            From 0 to 2**63 - 1.
        """
        kv_blocks = self.kv_block_allocator
        parts: list[npt.ArrayLike] = []
        for active in self._requests:
            hashes, end = active.hashes, active.num_tokens
            # The last hash names all blocks before; without prefix caching the last tokens must do.
            start = max(len(hashes) * self.block_size_tokens, end - self.block_size_tokens)
            due = active.chunk.num_tokens if active.chunk else 0
            progress = active.row, active.num_computed, active.most_computed, due
            parts += [(*progress, *hashes[-1:]), active.tokens(start, end)]
        parts += self._runner.progress
        return fingerprint_of(
            self._kinds_fingerprint,
            self.slot_allocator.fingerprint(),
            self.request_rows.block_tables,
            (kv_blocks.num_free_blocks, kv_blocks.num_cached_blocks),
            *parts,
        )

    def check_invariants(self) -> None:
        """Prove that all bookkeeping agrees. Costs nothing when it is not called.

        Raises:
            InvariantError: It does not: a bug of this package.
        """
        self._runner.check_invariants()
        self.kv_block_allocator.check_between_calls()
        self.slot_allocator.check_invariants()
        check_states_of_blocks(self.slot_allocator)
        self.request_rows.check_invariants([a.row for a in self._requests.holding_memory()])
        self._planner.check_invariants([a.chunk for a in self._requests if a.chunk is not None])
        check_requests(list(self._requests), self._runner.requests, self.slot_allocator)
        self._requests.check_invariants()

    def _require_no_blocks_held(self) -> None:
        """Check that no request would lose its blocks.

        Raises:
            StepOrderError: One would.
        """
        holding = self._requests.holding_memory()
        if holding:
            raise StepOrderError(
                f"requests {[active.request_id for active in holding[:8]]} hold KV blocks: finish "
                "or preempt them first, or reset the context, which ends them"
            )

    def _make_planner(self, placement: CheckpointPlacement) -> CheckpointPlanner:
        config = self.config
        return CheckpointPlanner(
            self.slot_allocator,
            placement,
            block_size_tokens=config.block_size_tokens,
            max_inside=config.checkpoints_per_step,
            save_prompt_states=config.enable_prefix_caching,
            save_decode_states=config.enable_prefix_caching and config.save_decode_states,
        )

    def _side_stream(self) -> SideStream | None:
        if not self.config.restore_on_side_stream or self.device.type != "cuda":
            return None
        streams = CudaRestoreStreams(self.device)  # pragma: no cover - tests/gpu run it
        return SideStream(self.slot_allocator, self.config, streams)  # pragma: no cover

    def _end(self, active: ActiveRequest) -> None:
        if active.status is not RequestStatus.PREEMPTED:
            self._admitter.release(active)
        self._requests.remove(active)
