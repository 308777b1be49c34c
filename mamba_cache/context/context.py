"""The inference context: admits requests, gives them memory, and runs steps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from weakref import finalize

import numpy as np
import torch

from mamba_cache._checks import (
    INT32_MAX,
    as_items,
    check_choice,
    check_clock,
    check_int,
    check_kind,
    check_number,
    check_room,
)
from mamba_cache._guard import CallGuard, guarded, outside, query, weak_callback
from mamba_cache._torch import check_device_room, outside_inference_mode, to_device
from mamba_cache.cache import (
    CheckpointPlacement,
    SlotEvictionPolicy,
    SlotLease,
)
from mamba_cache.cache.placement import check_placement
from mamba_cache.cache.sequence import (
    Checkpoint,
    PrefixMatch,
    Request,
    check_positions,
)
from mamba_cache.config import CacheConfig
from mamba_cache.context.memory import CacheMemory, CacheStats, Pin
from mamba_cache.context.prefetch import Prefetch
from mamba_cache.context.request_table import Int64Array, RequestTable
from mamba_cache.context.requests import (
    ActiveRequest,
    Admission,
    Chunk,
    PlannedLoad,
    PreparedRequest,
    RequestPreparer,
    RequestStatus,
)
from mamba_cache.context.speculation import (
    DeviceTokens,
    Speculation,
    check_sampled,
    send_to_host,
)
from mamba_cache.context.step import (
    CapturedExtractions,
    Drafts,
    Forks,
    NewTokens,
    Sampled,
    Step,
    check_accepted,
    plan_decodes,
    read_sampled,
)
from mamba_cache.context.step_buffers import StepBuffers
from mamba_cache.context.tier_memory import identity_of, with_secret
from mamba_cache.context.tiering import NoTiers, Tiering, make_tiering
from mamba_cache.context.verification import (
    HitToVerify,
    PrefixContent,
    VerificationStats,
)
from mamba_cache.errors import (
    InvalidArgumentError,
    SequenceLengthError,
    StepOrderError,
    TokenCapacityError,
    UnwrittenStateWarning,
)
from mamba_cache.events import Admitted
from mamba_cache.metadata import StepMetadata
from mamba_cache.protocols import RankAgreement, SlotContext
from mamba_cache.states import (
    KVCacheSpec,
    StateCopier,
    StatePool,
    StateSpec,
    as_device,
    plan_extraction,
)
from mamba_cache.tiers import LoadPlanner, ModelIdentity, TierStats
from mamba_cache.tiers.host import HostTier
from mamba_cache.tiers.lower import LowerTier

__all__ = ["DynamicInferenceContext"]


_FIELDS_OF_MATCH = attrgetter(*PrefixMatch.__slots__)


class _Uncollected(NamedTuple):
    """A step whose tokens are not on the host yet, with its requests in batch order."""

    requests: tuple[ActiveRequest, ...]  # decoding requests, then requests with chunks
    num_decodes: int
    rows: Int64Array  # [n] row of each request
    lengths: Int64Array  # [n] maximum number of new tokens of each request
    num_releases: Int64Array  # [n] how often each row had been released at the commit
    planned: dict[int, Checkpoint]
    sampled: DeviceTokens  # [n, k] sampled tokens on the device
    tokens: torch.Tensor  # [n, k] their copy on the host
    counts: torch.Tensor | None  # copy of the counts on the host
    arrived: torch.Event | None  # end of both copies; None: they have ended


class DynamicInferenceContext:
    """Runs requests over a KV cache and live states; requests reuse cached prefixes.

    One step of an embedding engine::

        context.add_request(request)             # match, reserve, plan
        step = context.begin_step()              # restore or clear live states, send the metadata
        logits = model(step.metadata, context)   # the layers write checkpoints into their slots
        context.commit_step(next_tokens)         # publish the written blocks and states

    A call that raises an error of this package leaves the context unchanged, except the recency
    of matched blocks. One thread uses a context at a time: a call during another call raises
    ``ConcurrentUseError``. Any thread may read ``stats``. After an exception of another package
    while bookkeeping changed, every later call raises ``PoisonedError`` until ``reset``.

    The context has every field of ``protocols.SlotContext``.

    Args:
        config: Settings.
        state_spec: Tensors of one state, for one kind of layers or several.
        kv_spec: Shape and dtype of one token's keys and values. None: the embedder stores keys and
            values, in ``config.num_kv_blocks`` blocks.
        device: Device of states, keys and values.
        slot_policy: Decides which states are evicted first. Default: the policy that
            ``config.slot_policy`` names.
        placement: Decides where states are saved. Default: Megatron's three positions.
        load_planner: Decides whether to load from the host tier or to compute. Default: whichever
            is faster by its measurements.
        identity: The model's identity, by which processes share entries. Default: none are shared.
        clock: Returns the time in seconds, by which pins expire; never goes back. Ranks of one
            model need clocks with equal readings, or pins without an expiry.
        shared: Memory of another owner, made with the same settings; its policy and clock are used
            instead of ``slot_policy`` and ``clock``. Default: the context makes its own memory.
        agreement: Agreement with the other ranks of the model, which tiers need
            (``integrations.distributed.GroupAgreement``). Default: the model has one rank.

    Attributes:
        agreement: As given.
        config: Settings.
        device: Device of the tensors.
        kv_block_allocator: Bookkeeping of KV blocks.
        listeners: Receivers of the events of ``mamba_cache.events``.
        slot_allocator: Bookkeeping of slots, and the saved states.
        bytes_per_slot: Size of one slot in bytes.
        request_table: The unfinished requests: by id, and as rows of arrays with their KV blocks.
        step_buffers: The tensors of a step's metadata.
        kv_cache: [num_layers, 2, pool_size, block_size_tokens, num_kv_heads, head_dim], keys then
            values; None without ``kv_spec``. The last block is the dummy block.
        live_states: States that running requests read and write, ``config.live_rows_per_request``
            rows for each request.

    Raises:
        BudgetError: A budget is too small for one block or one slot, or the settings need more
            memory than there is.
        InvalidArgumentError: The settings contradict each other, or an argument has a wrong type.
    """

    @outside_inference_mode
    def __init__(
        self,
        config: CacheConfig,
        state_spec: StateSpec,
        kv_spec: KVCacheSpec | None = None,
        *,
        device: torch.device | str = "cpu",
        slot_policy: SlotEvictionPolicy | None = None,
        placement: CheckpointPlacement | None = None,
        load_planner: LoadPlanner | None = None,
        identity: ModelIdentity | None = None,
        clock: Callable[[], float] = time.monotonic,
        shared: CacheMemory | None = None,
        agreement: RankAgreement | None = None,
    ) -> None:
        check_kind("config", config, CacheConfig)
        check_kind("state_spec", state_spec, StateSpec)
        if kv_spec is not None:
            check_kind("kv_spec", kv_spec, KVCacheSpec)
        placement = check_placement(placement)
        if str(device) == "meta":
            raise InvalidArgumentError("device 'meta' cannot be used: its tensors hold nothing")
        check_clock(clock)
        if agreement is not None and not callable(getattr(agreement, "largest", None)):
            raise InvalidArgumentError(
                f"agreement must be a RankAgreement, got {agreement!r}: GroupAgreement is one"
            )
        config = with_secret(config, identity, agreement)
        self.config = config
        self.device = as_device(device)
        # A row of blocks and the newest tokens of each request; a number for each position.
        columns = config.max_blocks_per_request + config.block_size_tokens
        num_bytes = 4 * config.max_requests * columns + 8 * config.max_sequence_length
        rows = {name: getattr(config, name) for name in ("max_requests", "max_sequence_length")}
        check_room(num_bytes, rows)
        memory = self._memory = shared or CacheMemory(
            config,
            state_spec,
            kv_spec,
            device=self.device,
            policy=slot_policy,
            placement=placement,
            clock=clock,
        )
        self.slot_allocator, self.kv_block_allocator = memory.allocator, memory.kv_blocks
        self.kv_cache, self.bytes_per_slot = memory.kv_cache, memory.bytes_per_slot
        self._index, self._pins, self._counters = memory.index, memory.pins, memory.counters
        self.listeners = self.kv_block_allocator.listeners
        # The owner of shared memory sends events, verifies hits, and has the tiers.
        self._has_owner = shared is not None
        live_rows = config.max_requests * config.live_rows_per_request
        num_bytes = live_rows * state_spec.bytes_per_slot
        check_device_room(num_bytes, {"max_requests": config.max_requests}, self.device)
        self.live_states = StatePool(state_spec, live_rows, device=self.device)
        self.request_table = RequestTable(self.kv_block_allocator, config)
        self.step_buffers = StepBuffers(self.request_table, config, self.device)
        self._set_slot_fields()
        self._guard = CallGuard(self)
        self._ending = self._guard.ending(self.listeners)
        self._tiering: Tiering | NoTiers = NoTiers()
        if shared is None:
            memory.join(self._guard)
            self._tiering = self._index.tiers = make_tiering(
                config,
                kv_blocks=self.kv_block_allocator,
                slots=self.slot_allocator,
                kv_cache=self.kv_cache,
                planner=load_planner,
                identity=identity_of(identity, config, state_spec, kv_spec, self.device),
                agreement=agreement,
            )
        self.agreement = agreement
        if isinstance(self._tiering, Tiering):
            self._tiering.host.join(self._guard)
        # A context that is never closed must not leave threads and a lock behind.
        self._closes_lower = finalize(self, self._tiering.abandon)
        self._make_parts()
        self.slot_allocator.before_reset = weak_callback(self._require_no_slots_reserved)
        self.kv_block_allocator.before_reset = weak_callback(self._require_no_blocks_held)

    def _set_slot_fields(self) -> None:
        """Set the other fields of ``protocols.SlotContext``, and hand all fields to the slots."""
        config = self.config
        self.max_requests = config.max_requests
        self.block_size_tokens = config.block_size_tokens
        self.prefix_caching_eviction_policy = config.eviction_policy
        self.mamba_chunk_size = config.ssm_chunk_size
        self.ssm_chunk_alignment = config.ssm_chunk_size
        self.max_mamba_intermediate_states_per_step = 0  # checkpoints go straight to their slots
        self.request_to_kv_block_ids = torch.from_numpy(self.request_table.block_tables)
        rows = torch.arange(config.max_requests, dtype=torch.int32, device="cpu")
        if config.num_speculative_tokens:
            rows.fill_(-1)  # a request has several live-state rows
        self.mamba_metadata = SimpleNamespace(
            request_to_mamba_state_idx=rows,
            intermediate_count=0,
            per_request_intermediate_counts=(),
        )
        live_states = self.live_states.tensors if self.live_states.spec.is_mamba else {}
        self.mamba_conv_states = live_states.get("conv")
        self.mamba_ssm_states = live_states.get("ssm")
        self.batch_dimensions = SimpleNamespace(prefill_req_count=0, decode_req_count=0)
        self.paused_request_count = 0
        # The slots get the fields, not the context: a cycle would keep all tensors until a
        # garbage collection.
        names = *SlotContext.__annotations__, "kv_block_allocator", "device"
        fields = SimpleNamespace(**{name: getattr(self, name) for name in names})
        self.slot_allocator.embed(cast(SlotContext, fields))

    def _make_parts(self) -> None:
        """Create the copiers, the speculation and the records that steps use."""
        config, slots = self.config, self.slot_allocator
        self._preparer = RequestPreparer(config)
        live, saved = ([*pool.tensors.values()] for pool in (self.live_states, slots.states))
        self._live_to_slots = StateCopier(live, saved)
        self._slots_to_live = StateCopier(saved, live)
        self._live_to_live = StateCopier(live, live)
        kv = [] if self.kv_cache is None else [self.kv_cache.flatten(0, 1)]
        self._kv_to_kv = StateCopier(kv, kv) if kv else None
        # States that hits have used, by slot: at most one for each slot.
        self._consumed: dict[int, SlotLease] = {}
        self._speculation: Speculation | None = None
        if config.num_speculative_tokens:
            arrays = self.step_buffers.host_arrays
            self._speculation = Speculation(config, self.device, arrays)
        # By kind: numbers of its layers, counted over all kinds, and names of its tensors in a
        # layer and in the pools.
        self._layers: dict[str, tuple[range, dict[str, str]]] = {}
        self._layer_labels: list[int | str] = []  # name of each layer in messages
        for kind in self.live_states.spec.kinds:
            first, layers = len(self._layer_labels), range(kind.num_layers)
            self._layer_labels += [f"{kind.name} {n}" if kind.name else n for n in layers]
            names = {name: kind.name_in_pool(name) for name in kind.names}
            self._layers[kind.name] = range(first, len(self._layer_labels)), names
        self._captured: CapturedExtractions | None = None
        self._has_warned = False
        # The step in flight, and the previous step while its tokens are not collected.
        self._step: Step | None = None
        self._uncollected: _Uncollected | None = None

    def prepare(self, request: Request) -> PreparedRequest:
        """Check a request's tokens and hash its blocks, once for several matches.

        Args:
            request: The request; the context keeps no record of it.

        Raises:
            InvalidArgumentError: The prompt is empty, not 1-D, or has an item that is no token id.
            SequenceLengthError: The prompt is longer than ``max_sequence_length``.
        """
        return PreparedRequest(*self._preparer.read(request), self._preparer)

    @guarded()
    def match(self, request: Request | PreparedRequest) -> PrefixMatch:
        """Find how much of a request is cached now. No block or state is held.

        Raises:
            InvalidArgumentError: As in ``prepare``, or another context prepared the request.
            SequenceLengthError: As in ``prepare``.
        """
        _, tokens, chain = self._preparer.read(request)
        # A match in the host tier records loads that have ended.
        self._guard.is_changing = self._tiering.host is not None
        match = self._index.match(chain.digests, len(tokens), self.config.min_computed_tokens)
        return self._tiering.find(match, chain.hashes)

    @guarded()
    def prefetch(
        self, request: Request | PreparedRequest, *, timeout_seconds: float | None = None
    ) -> Prefetch:
        """Begin loads of a request's prefix from disk and store to the host tier; do not wait.

        Args:
            request: The request, prepared or not. Add it when the handle is done.
            timeout_seconds: Seconds after which the handle is done, whether or not all entries
                arrived. Default: no limit.

        Returns:
            A handle; done at once if there is nothing to load, or neither disk nor store.

        Raises:
            InvalidArgumentError: As in ``prepare``, another context prepared the request, or
                ``timeout_seconds`` is no number >= 0.
            SequenceLengthError: As in ``prepare``.
        """
        if timeout_seconds is not None:
            timeout_seconds = check_number("timeout_seconds", timeout_seconds, maximum=1e9)
        own, tokens, chain = self._preparer.read(request)
        self._guard.is_changing = True
        match = self._index.match(chain.digests, len(tokens), self.config.min_computed_tokens)
        match = self._tiering.find(match, chain.hashes)
        entries = self._tiering.entries(chain.hashes, own.cache_salt)
        handle = self._tiering.prefetch(own.request_id, match, entries, timeout_seconds)
        handle.go_on = weak_callback(self.poll_tiers)
        return handle

    @guarded(changes=True)
    def poll_tiers(self) -> None:
        """Record the loads and spills of tiers that have ended since the last call; do not wait.

        Other calls record them too. An engine with nothing to run calls this until its prefetches
        are done. With several ranks the ranks agree here which prefetches are done, so every
        engine that uses prefetches with several ranks must call it.
        """
        self._tiering.poll()
        self._tiering.agree()

    @guarded()
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
            chunk_tokens: Number of tokens to compute in the next step. Default: all that are left.
            checkpoint_positions: Further positions, added to those of the request.

        Raises:
            InvalidArgumentError: The request is malformed or was prepared by another context, its
                id is in use, or ``chunk_tokens`` is not an int >= 1.
            SequenceLengthError: The prompt is longer than ``max_sequence_length``.
            RequestCapacityError: No row is free.
            TokenCapacityError: The step's token buffers cannot hold the chunk beside the other
                chunks and the tokens of each decoding request.
            BlockCapacityError: Not enough KV blocks are free or evictable.
            StepOrderError: A step is in flight.
        """
        self._require_none()
        if self._pins.held:
            self._pins.expire()
        own, tokens, chain = self._preparer.read(request)
        self.request_table.check_new(own.request_id)
        active = ActiveRequest(
            own,
            tokens,
            chain if own is request else chain.copy(),  # the caller may add it again
            self._boundaries(checkpoint_positions, own.checkpoint_positions),
        )
        self._guard.is_changing = True
        admission = self._admit(active, chunk_tokens)
        self.request_table.add(active)
        if not self._has_owner and self.listeners.wants(Admitted):
            digests, size = active.hashes.digests, self.block_size_tokens
            hint, salt = own.will_continue, own.cache_salt
            self.listeners.put(Admitted(own.request_id, len(tokens), digests, size, hint, salt))
            try:
                self.listeners.tell()
            except BaseException:
                self._end(active)
                raise
        return admission

    def _boundaries(self, given: Sequence[int], checked: Sequence[int] = ()) -> frozenset[int]:
        """Check ``given``; return the last block boundary at or before each of all positions."""
        positions, size = tuple(checked), self.block_size_tokens
        if type(given) is not tuple or given:
            positions += check_positions(given)
        return frozenset([p // size * size for p in positions]) if positions else frozenset()

    @guarded()
    def resume_request(self, request_id: Hashable, *, chunk_tokens: int | None = None) -> Admission:
        """Admit a preempted request again; its generated tokens count as prompt now.

        Args:
            request_id: A preempted request.
            chunk_tokens: As in ``add_request``.

        Raises:
            UnknownRequestError: There is no such request.
            InvalidArgumentError: ``chunk_tokens`` is not an int >= 1.
            RequestCapacityError: No row is free.
            TokenCapacityError: The step's token buffers cannot hold the chunk.
            BlockCapacityError: Not enough KV blocks are free or evictable.
            SequenceLengthError: The request is longer than ``max_sequence_length``; finish it.
            StepOrderError: The request is not preempted, or a step is in flight.
        """
        self._require_none()
        self._pins.expire()
        active = self.request_table.find(request_id, RequestStatus.PREEMPTED)
        self._guard.is_changing = True
        self.request_table.take_over(active)
        longest = self.config.max_sequence_length
        if active.num_known > longest:
            raise SequenceLengthError(
                f"request {active.request_id!r} has {active.num_known} tokens; "
                f"max_sequence_length is {longest}: finish it"
            )
        return self._admit(active, chunk_tokens)

    def _admit(
        self, active: ActiveRequest, chunk_tokens: int | None, *, loads: bool = True
    ) -> Admission:
        """Match a request, reserve its memory, and plan its first chunk for the next step."""
        table, num_known = self.request_table, active.num_known
        least = self.config.min_computed_tokens
        on_gpu = self._index.match(active.chain.digests, num_known, least)
        match, load = self._tiering.resume(active, on_gpu) if loads else (on_gpu, None)
        start, lease = match.skip_tokens, None
        try:
            num_tokens = self._chunk_tokens(active, num_known - start, chunk_tokens)
            if load is None and match.state_matched_blocks:
                state_block = match.block_ids[match.state_matched_blocks - 1]
                lease = self.slot_allocator.pin(self.slot_allocator.slot_of(state_block))
            row = table.take(match.block_ids, start + num_tokens, active.request_id)
        except BaseException:
            self._release_source(lease, load)
            raise
        active.row = row
        table.start(row, num_known, start)
        admission = Admission(
            *_FIELDS_OF_MATCH(match), request_id=active.request_id, chunk_tokens=num_tokens
        )
        active.admission = admission
        active.num_initial, active.num_published = num_known, len(match.block_ids)
        # The load writes the loaded blocks; the chunk must not write them.
        active.num_shared_blocks = len(match.block_ids) + match.loaded_blocks
        end = start + num_tokens
        chunk = active.chunk = Chunk(
            row,
            start,
            active.tokens(start, end),
            active.num_shared_blocks * self.block_size_tokens,
            is_first=True,
            samples=end == num_known,
            lease=lease,
            load=load,
        )
        try:
            if load is not None:
                first = load.first_block
                load.blocks = table.block_tables[row, first : first + load.num_blocks].tolist()
                # The policy gets the prompt only in _plan: before that it refuses no slot.
                [reserved] = self._reserve(active, [start])
                assert reserved is not None, "can_reserve said so"
                load.checkpoint = reserved._replace(is_loaded=True)
            self._plan(active, chunk, is_new=True)
        except BaseException:
            self._release(active)
            raise
        table.set_status(active, RequestStatus.SCHEDULED)
        self._tiering.offer_used(active, match.state_matched_blocks)
        return admission

    def _chunk_tokens(self, active: ActiveRequest, num_left: int, chunk_tokens: int | None) -> int:
        """Return the number of tokens of a chunk; check that the step has room for them."""
        num_tokens, room = num_left, self.request_table.token_room()
        if chunk_tokens is not None:
            num_tokens = min(check_int("chunk_tokens", chunk_tokens, minimum=1), num_left)
        if num_tokens > room:
            hint = f"give {active.request_id!r} a shorter chunk"
            raise TokenCapacityError(num_tokens, room, hint)
        return num_tokens

    def _plan(self, active: ActiveRequest, chunk: Chunk, *, is_new: bool = False) -> None:
        """Plan the checkpoints of a chunk."""
        if not self.config.enable_prefix_caching:
            return
        end = chunk.end
        positions = sorted([p for p in self._index.positions(active) if chunk.start < p <= end])
        # After the placement: an embedder's may raise, and a policy cannot take a prompt back.
        if is_new:
            self._index.announce(active, active.num_initial - self.config.min_computed_tokens)
        if not positions:
            return
        room = self.config.checkpoints_per_step - self.request_table.num_planned_checkpoints
        without_room = max(0, len(positions) - (positions[-1] == end) - room)
        self.slot_allocator.skipped_checkpoints_total += without_room
        # Later checkpoints save more tokens, so the earliest are skipped for want of room.
        reserved = self._reserve(active, positions[without_room:])
        if positions[-1] == end:
            chunk.boundary = reserved.pop()
        chunk.inside = tuple([checkpoint for checkpoint in reserved if checkpoint is not None])

    def _reserve(self, active: ActiveRequest, positions: Sequence[int]) -> list[Checkpoint | None]:
        """Reserve slots for states of a request at positions; None where there is no slot."""
        table, size = self.request_table.block_tables[active.row], self.block_size_tokens
        blocks = [table.item(position // size - 1) for position in positions]
        return self._index.reserve([(active, positions, blocks)])

    def _release_source(self, lease: SlotLease | None, load: PlannedLoad | None) -> None:
        """Release the slot, or cancel the load, that a first chunk resumes from."""
        if lease is not None:
            self.slot_allocator.unpin(lease)
        if load is not None:
            self._tiering.cancel(load)

    def _plan_again(self, active: ActiveRequest) -> None:
        """Plan a chunk again whose state or load is no longer available.

        The chunk starts at the deepest state that is left on the GPU, or at the prompt's beginning.
        Its number of tokens stays the same.
        """
        num_tokens = len(active.current_chunk.token_ids)
        self._release(active)
        self._admit(active, num_tokens, loads=False)

    def _release(self, active: ActiveRequest) -> None:
        """Release everything that a request holds, and cancel its chunk and checkpoints."""
        if active.row < 0:  # the request is preempted already
            return
        table, chunk, active.chunk = self.request_table, active.chunk, None
        if chunk is not None:
            self._index.cancel(chunk.checkpoints)
            self._release_source(chunk.lease, chunk.load)
        table.set_status(active, RequestStatus.PREEMPTED)
        if active.checkpoint is not None:
            self._cancel_decode(active)
        active.prompt_seen = None  # the next admission announces the prompt again, perhaps longer
        table.collect(active)
        row, active.row = active.row, -1
        table.release(row)

    @guarded()
    def schedule_prefill(
        self,
        request_id: Hashable,
        *,
        chunk_tokens: int | None = None,
        checkpoint_positions: Sequence[int] = (),
    ) -> int:
        """Schedule the next chunk of a request whose prompt is not yet fully computed.

        Args:
            request_id: A request between two chunks.
            chunk_tokens: Number of tokens to compute in the next step. Default: all that are left.
            checkpoint_positions: Further positions at which to save a state.

        Returns:
            The number of tokens that will be computed: ``chunk_tokens``, or all that are left.

        Raises:
            UnknownRequestError: There is no such request.
            InvalidArgumentError: ``chunk_tokens`` is not an int >= 1.
            TokenCapacityError: The step's token buffers cannot hold the chunk.
            BlockCapacityError: Not enough KV blocks are free or evictable.
            StepOrderError: The request has no chunk to schedule, or a step is in flight.
        """
        self._require_none()
        active = self.request_table.find(request_id, RequestStatus.PREFILLING)
        table, wanted = self.request_table, active.requested_boundaries
        boundaries = self._boundaries(checkpoint_positions)
        self._guard.is_changing = True
        start = table.num_computed.item(active.row)
        num_tokens = self._chunk_tokens(active, active.num_known - start, chunk_tokens)
        table.grow(active.row, start + num_tokens, active.request_id)
        try:
            active.requested_boundaries |= boundaries
            end = start + num_tokens
            chunk = Chunk(
                active.row,
                start,
                active.tokens(start, end),
                active.num_shared_blocks * self.block_size_tokens,
                samples=end == active.num_known,
            )
            self._plan(active, chunk)
        except BaseException:
            active.requested_boundaries = wanted
            table.shrink(active.row, start, active.num_shared_blocks)
            raise
        active.chunk = chunk
        table.set_status(active, RequestStatus.SCHEDULED)
        return num_tokens

    @guarded()
    def begin_step(
        self, decode_ids: Iterable[Hashable] | None = None, *, drafts: Drafts | None = None
    ) -> Step:
        """Begin a step with all scheduled chunks and with decoding requests.

        One launch on the current stream restores or clears the live states of new requests. The
        metadata is copied to the device. The host does not wait for the device.

        If the call fails after it began to change bookkeeping, the step's requests are preempted.
        An embedder's slot policy may cause this: it raises, or chooses slots that it may not.

        Args:
            decode_ids: The decoding requests of this step. Default: all.
            drafts: Draft tokens that the forward computes as well, up to
                ``num_speculative_tokens`` for each decoding request. A mapping from request ids to
                tokens; a numpy array or list [num decoding, k] in the order of the decoding
                requests; or, if the tokens are on the device, a tensor
                [max_requests, num_speculative_tokens] int32 or int64, by request row. A negative
                item is no token.

        Raises:
            UnknownRequestError: There is no such request.
            StepOrderError: A step is in flight, one of ``decode_ids`` does not decode, or there
                is nothing to compute.
            SequenceLengthError: A decoding request has reached ``max_sequence_length``; finish it.
            InvalidArgumentError: ``decode_ids`` is no collection, or the drafts are too many, for
                requests that do not decode in this step, or no token ids.
            TokenCapacityError: The step's token buffers do not hold the decoding requests' tokens.
            BlockCapacityError: Not enough KV blocks for the decoding requests; preempt one.
        """
        self._require_none()
        if self._pins.held:
            self._pins.expire()
        table = self.request_table
        group, prefills = table.decoding_group(decode_ids), table.scheduled_requests()
        if not group.ids and not prefills:
            raise StepOrderError("there is nothing to compute: add, schedule or resume a request")
        work = plan_decodes(
            table,
            group,
            drafts,
            is_uncollected=self._uncollected is not None,
            config=self.config,
            preparer=self._preparer,
            device=self.device,
        )
        # Only decoding requests can exceed it: token_room keeps room for them beside chunks.
        if work.num_tokens > self.config.max_tokens:
            hint = "let fewer requests decode, or without drafts"
            raise TokenCapacityError(work.num_tokens, self.config.max_tokens, hint)
        self._guard.is_changing = True
        saving: Sequence[int] = ()
        due = (work.ends > table.next_events[group.rows]).nonzero()[0]
        if len(due):
            saving, crossing = table.open_blocks(group, work.ends, due)
            if crossing:
                work = work._replace(crossing=crossing)
        self.batch_dimensions.prefill_req_count = len(prefills)
        self.batch_dimensions.decode_req_count = len(group.ids)
        try:
            planned = self._plan_decodes(group.requests, saving) if saving else {}
            chunks = self._begin_chunks(prefills) if prefills else []
            with outside:
                metadata = self.step_buffers.fill(work, chunks, [*planned.items()])
                if self._speculation is not None:
                    on_device = drafts if isinstance(drafts, torch.Tensor) else None
                    is_exact = on_device is None and self._uncollected is None
                    self._speculation.describe(metadata, on_device, is_exact=is_exact)
                elif self._uncollected is not None:
                    self._write_sampled(self._uncollected, group.rows, metadata)
                # Without the padding: a kernel would read each entry of it.
                if chunks and (restores := self.step_buffers.entries("restores")):
                    self._slots_to_live.copy_own(*restores)
            self._tiering.begin_forward(metadata.num_tokens - work.num_tokens)
        except BaseException:
            for active in (*group.requests, *prefills):
                self._release(active)
            raise
        num_layers = len(self._layer_labels) if metadata.num_checkpoints else 0
        self._step = Step(work, prefills, chunks, planned, metadata, layers=range(num_layers))
        return self._step

    def _write_sampled(self, last: _Uncollected, rows: Int64Array, metadata: StepMetadata) -> None:
        """Write the uncollected step's sampled tokens into this step's ids, on the device."""
        table, own = self.request_table, metadata.token_ids[: len(rows)]
        # True where the request's next token is known on the device only.
        is_late = table.num_tokens[rows] == table.num_computed[rows] + table.num_uncollected[rows]
        places = np.zeros(self.config.max_requests, dtype=np.int64)
        places[last.rows] = np.arange(len(last.rows))
        tokens = torch.cat((last.sampled.tokens[:, 0], own))
        sources = np.where(is_late, places[rows], len(last.rows) + np.arange(len(rows)))
        at = to_device(torch.from_numpy(sources), self.device)
        torch.index_select(tokens, 0, at, out=own)

    def _begin_chunks(self, prefills: Sequence[ActiveRequest]) -> list[Chunk]:
        """Begin the loads of chunks; plan chunks again that cannot resume; return all chunks."""
        chunks = self.request_table.scheduled_chunks
        for active in prefills:
            lease = chunks[active.row].lease
            if lease is not None and not self.slot_allocator.is_current(lease):
                self._plan_again(active)
        for active in self._tiering.begin(prefills):  # requests whose load cannot begin
            self._plan_again(active)
        return [chunks[active.row] for active in prefills]

    def _plan_decodes(
        self, requests: Sequence[ActiveRequest], places: Sequence[int]
    ) -> dict[int, Checkpoint]:
        """Plan the checkpoints of the decoding requests at ``places`` of the batch.

        These may end a block in the next step. Return all planned checkpoints by place.
        """
        table, size = self.request_table, self.block_size_tokens
        requested: list[tuple[ActiveRequest, Sequence[int], Sequence[int]]] = []
        for place in places:
            active = requests[place]
            # The tokens of two steps are fewer than a block: they cross one boundary at most.
            block = table.num_computed.item(active.row) // size
            position = (block + 1) * size
            saves = self.config.save_decode_states or position in active.requested_boundaries
            if saves and active.checkpoint is None:
                requested.append((active, [position], [table.block_tables.item(active.row, block)]))
        if requested:
            checkpoints = self._index.reserve(requested)
            for (active, *_), reserved in zip(requested, checkpoints, strict=True):
                active.checkpoint = reserved
        found = ((place, requests[place].checkpoint) for place in places)
        return {place: checkpoint for place, checkpoint in found if checkpoint is not None}

    def _cancel_decode(self, active: ActiveRequest) -> None:
        """Cancel the checkpoint of a decoding request."""
        checkpoint, active.checkpoint = active.checkpoint, None
        assert checkpoint is not None, f"{active.request_id!r} saves no state"
        self._index.cancel((checkpoint,))

    @guarded()
    def commit_step(
        self,
        new_tokens: NewTokens | DeviceTokens,
        counts: Int64Array | torch.Tensor | Sequence[int] | None = None,
    ) -> tuple[Hashable, ...]:
        """End a step whose forward is enqueued: publish the blocks and states that it wrote.

        Args:
            new_tokens: The sampled token of each request in ``Step.sampling_ids``: a mapping from
                ids to tokens; or [n] ints in the order of these ids, as a numpy array, a tensor on
                the CPU or a list, which is fastest. For a request with drafts: the accepted drafts
                and the token sampled after them, as a list or tuple in the mapping, or as a row of
                an [n, k] array. The tokens of a request may be cut anywhere. With
                ``num_speculative_tokens`` >= 1 a request may have no token: it does not advance.
                Or ``DeviceTokens``, for which the host does not wait: the step is then uncollected,
                and the next step may begin before ``collect_step`` gets the tokens.
            counts: With an [n, k] array: the number of tokens that each request takes of its row.

        Returns:
            Requests of the step that resumed from a tier with damaged bytes; none without a tier.
            They are preempted, and their tokens and blocks are discarded. ``resume_request`` admits
            them again, without the damaged entries.

        Raises:
            StepOrderError: No step is in flight, the previous step is uncollected, or an earlier
                commit of this step failed after the device had recorded its tokens.
            InvalidArgumentError: A token is missing, not expected, or no token id, or the accepted
                tokens are not the drafts. The step is still in flight then.
        """
        step = self._require_step()
        work, prefills, table = step._work, step._actives, self.request_table
        sampled = self._read_sampled(step, new_tokens, counts)
        if step._missing:
            self._drop_unwritten(step)
        damaged = self._tiering.verify(prefills) if prefills else []
        if self._speculation is not None:
            if step._is_advanced:
                raise StepOrderError(
                    "an interrupted commit_step has recorded the step's tokens on the device: "
                    "abort_step takes the step back"
                )
            step._is_advanced = True
            self._speculation.advance(step.metadata, sampled)
        # step._planned, not active.checkpoint: the previous step may have reached it by now.
        saves = step._planned or prefills
        if saves and (boundaries := self.step_buffers.entries("boundaries")):
            self._live_to_slots.copy_own(*boundaries)
        sent = None
        if isinstance(sampled, DeviceTokens):
            sent = sampled, *send_to_host(sampled)
        with self._ending:
            self._step = None
            requests, rows, count = step._requests, work.group.rows, len(work.group.ids)
            if prefills:
                rows = np.concatenate((rows, [active.row for active in prefills]))
            if sent is not None:
                lengths: Int64Array = np.ones(len(rows), dtype=np.int64)
                lengths[:count] = table.num_uncollected[work.group.rows] = (
                    work.ends - work.max_starts
                )
                lengths[count:] = [chunk.samples for chunk in step._chunks]
                releases = table.num_releases[rows]
                self._uncollected = _Uncollected(
                    requests, count, rows, lengths, releases, step._planned, *sent
                )
            else:
                tokens, taken = cast(Sampled, sampled)
                if damaged:  # the tokens of these requests are discarded
                    is_fine = [active not in damaged for active in requests]
                    taken = np.where(is_fine, 1 if taken is None else taken, 0)
                self._take(requests, count, rows, tokens, taken, planned=step._planned)
                self._counters["computed_tokens"] += work.num_tokens
            for active in damaged:
                self._release(active)
            if damaged:
                prefills = [active for active in prefills if active not in damaged]
            if prefills:
                self._end_chunks(prefills)
        self._guard.is_changing = True
        self._tiering.end_step()
        return tuple([active.request_id for active in damaged]) if damaged else ()

    def _read_sampled(
        self, step: Step, new_tokens: object, counts: object
    ) -> Sampled | DeviceTokens:
        """Return the sampled tokens of all requests of a step in batch order, checked."""
        if self._uncollected is not None:
            raise StepOrderError("the last step is uncollected: call collect_step first")
        num_requests = len(step._requests)
        if isinstance(new_tokens, DeviceTokens):
            check_sampled(new_tokens, num_requests, self.config, self.device)
            return new_tokens
        ids = step.sampling_ids
        sampled = read_sampled(new_tokens, counts, ids, self._preparer)
        if sampled[1] is not None:
            may_stay = self._speculation is not None
            check_accepted(step._work, sampled[0], sampled[1], ids, may_stay=may_stay)
        if len(ids) == num_requests:
            return sampled
        tokens, taken = sampled
        samples = [chunk.samples for chunk in step._chunks]
        places = np.flatnonzero([*[True] * step.metadata.num_decodes, *samples])
        all_tokens = np.zeros((num_requests, tokens.shape[1]), dtype=np.int64)
        all_taken = np.zeros(num_requests, dtype=np.int64)
        all_tokens[places], all_taken[places] = tokens, 1 if taken is None else taken
        return all_tokens, all_taken

    def _drop_unwritten(self, step: Step) -> None:
        """Cancel the states inside chunks: not every layer has handed over its tensors.

        An unwritten slot holds an older state, perhaps of another salt. The warning is issued
        before any change: if a filter makes it an error, the step is still in flight.
        """
        lacking = [active for active in step._actives if active.current_chunk.inside]
        if not self._has_warned:
            where = ", ".join(
                f"{active.request_id!r} at {[c.position for c in active.current_chunk.inside]}"
                for active in lacking[:8]
            )
            layers = [self._layer_labels[layer] for layer in sorted(step._missing)]
            warning = UnwrittenStateWarning(
                f"The layers {layers} have not handed over their states in this step, so states of "
                f"requests {where} tokens are not published, and later requests compute these "
                "tokens again. Every Mamba layer must call context.extract_checkpoint_states in "
                "every step with prefill chunks, layers of other kinds context.extract_states, and "
                "the engine context.count_extractions where it replays a CUDA graph. Further cases "
                "are only counted, in stats().unwritten_states"
            )
            warnings.warn(warning, stacklevel=4)
            self._has_warned = True
        with self._guard.ending():
            for active in lacking:
                inside = active.current_chunk.inside
                self._index.cancel(inside)
                active.chunk = replace(active.current_chunk, inside=())
                self.request_table.set_status(active, RequestStatus.SCHEDULED)
                self._counters["unwritten_states"] += len(inside)

    def _take(
        self,
        requests: Sequence[ActiveRequest],
        num_decodes: int,
        rows: Int64Array,
        tokens: Int64Array,
        counts: Int64Array | None,
        *,
        planned: Mapping[int, Checkpoint],
    ) -> None:
        """Append sampled tokens to rows, and publish the blocks that decoding requests filled."""
        table = self.request_table
        if counts is None:
            after = table.append_token(rows, tokens[:, 0])
        else:
            table.append_tokens(rows, tokens, counts)
            after = table.num_computed[rows] + counts
        if not num_decodes:
            return
        rows, after = rows[:num_decodes], after[:num_decodes]
        table.num_computed[rows] = after
        events = (after > table.next_events[rows]).nonzero()[0]
        if len(events) or planned:
            places = sorted({*events.tolist(), *planned})
            self._end_blocks(requests, places, after, counts, planned)

    def _end_blocks(
        self,
        requests: Sequence[ActiveRequest],
        places: Sequence[int],
        after: Int64Array,
        counts: Int64Array | None,
        planned: Mapping[int, Checkpoint],
    ) -> None:
        """Publish blocks that decoding requests have filled, and states that were ``planned``.

        ``after`` is the number of tokens that each request of the batch has computed.
        """
        in_flight = () if self._step is None else self._step._planned.values()
        written: list[tuple[ActiveRequest, Sequence[Checkpoint]]] = []
        for index in places:
            active, checkpoint = requests[index], planned.get(index)
            self.request_table.take_over(active)
            saved: tuple[Checkpoint, ...] = ()
            # Where the two differ, the previous step has reached the checkpoint.
            if checkpoint is not None and checkpoint is active.checkpoint:
                end = after.item(index)
                start = end - (1 if counts is None else counts.item(index))
                if start < checkpoint.position <= end:
                    active.checkpoint, saved = None, (checkpoint,)
                elif checkpoint not in in_flight:
                    self._cancel_decode(active)
            if saved or self.config.reuse_answers:
                written.append((active, saved))
        self._publish(written)
        self._supersede_decode_states(written)

    def _publish(self, written: Sequence[tuple[ActiveRequest, Sequence[Checkpoint]]]) -> None:
        """Publish blocks that requests have filled, and the states that a step saved."""
        table = self.request_table
        filled: list[tuple[ActiveRequest, list[int], Sequence[Checkpoint]]] = []
        for active, states in written:
            end = table.num_computed.item(active.row) // self.block_size_tokens
            end = min(end, len(active.chain.digests))
            blocks = table.block_tables[active.row, active.num_published : end].tolist()
            if blocks or states:
                filled.append((active, blocks, states))
        if filled:
            self._index.publish(filled)

    def _supersede_decode_states(
        self, written: Sequence[tuple[ActiveRequest, Sequence[Checkpoint]]]
    ) -> None:
        """Free the states that requests saved one block earlier while decoding.

        The next turn of a conversation resumes from the newest state, so one slot is enough for an
        answer of any length. A state stays if its position was requested by the caller, or if
        another request has used it or is about to.
        """
        superseded: list[SlotLease] = []
        for active, saved in written:
            if not saved or saved[0].position in active.requested_boundaries:
                continue
            # The slot is empty if another request had saved this state before.
            lease = self.slot_allocator.lease_of(saved[0].slot)
            old, active.decode_lease = active.decode_lease, lease
            if old is not None and self._consumed.get(old.slot) != old:
                superseded.append(old)
        if superseded:
            self.slot_allocator.free_unread(superseded)

    def _end_chunks(self, prefills: Sequence[ActiveRequest]) -> None:
        """Publish the blocks and states of computed chunks, and set the requests' next status."""
        config, table = self.config, self.request_table
        chunks = [table.scheduled_chunks[active.row] for active in prefills]
        for chunk in chunks:
            self._counters["computed_tokens"] += len(chunk.token_ids)
            table.num_computed[chunk.row] = chunk.end
            if chunk.lease is not None:
                self._consumed[chunk.lease.slot] = chunk.lease
                self.slot_allocator.policy.on_consumed([chunk.lease.slot])
        self._publish([(a, c.checkpoints) for a, c in zip(prefills, chunks, strict=True)])
        for active, chunk in zip(prefills, chunks, strict=True):
            if chunk.lease is not None:
                self.slot_allocator.unpin(chunk.lease)  # the state may be evicted from now on
            active.chunk = None
            status = RequestStatus.DECODING if chunk.samples else RequestStatus.PREFILLING
            table.set_status(active, status)
            if chunk.samples:
                saves = config.save_decode_states or bool(active.requested_boundaries)
                saves = config.enable_prefix_caching and config.reuse_answers and saves
                table.saves_states[active.row] = saves
            admission, active.admission = active.admission, None
            if admission is not None:  # this was the request's first chunk
                self._index.count(active, admission)

    @guarded()
    def collect_step(self) -> dict[Hashable, list[int]]:
        """Wait for the tokens of a step committed with ``DeviceTokens``, and append them.

        Blocks and states of its decoding requests are published.

        Returns:
            The new tokens of each request that sampled, without requests that were preempted,
            aborted or finished since. A preempted request computes the tokens again.

        Raises:
            StepOrderError: No step is uncollected.
            InvalidArgumentError: A token is no token id. Finish its request and collect again.
        """
        if self._uncollected is None:
            raise StepOrderError("no step is uncollected: commit_step with DeviceTokens makes one")
        table = self.request_table
        requests, count, rows, lengths, num_releases, planned, _, sent, taken, arrived = (
            self._uncollected
        )
        if arrived is not None:  # pragma: no cover - tests/gpu run it
            arrived.synchronize()
        tokens, counts = sent.numpy(), lengths.copy()
        if taken is not None:
            counts[:count] = np.clip(taken.numpy()[:count], 0, lengths[:count])
        kept = ((table.num_releases[rows] == num_releases) & (lengths > 0)).nonzero()[0]
        if len(kept) < len(rows):
            rows, lengths, tokens, counts = rows[kept], lengths[kept], tokens[kept], counts[kept]
            places = kept.tolist()
            requests = tuple([requests[place] for place in places])
            planned = {new: planned[old] for new, old in enumerate(places) if old in planned}
            count = int(np.count_nonzero(kept < count))
        self._preparer.read_tokens(tokens[np.arange(tokens.shape[1]) < counts[:, None]])
        with self._ending:
            table.num_uncollected[rows[:count]] = 0
            self._take(requests, count, rows, tokens, counts, planned=planned)
            self._counters["computed_tokens"] += int(lengths[:count].sum())
            self._uncollected = None
        self._guard.is_changing = True
        self._tiering.pump()
        lists = zip(requests, tokens.tolist(), counts.tolist(), strict=True)
        return {active.request_id: new[:number] for active, new, number in lists}

    @guarded()
    def abort_step(self) -> tuple[Hashable, ...]:
        """Abort a step: nothing that it wrote is published, and its requests are preempted.

        A forward that stopped half-way has overwritten some live states. So no request of the step
        can continue from them: each resumes from a state that was cached before.

        Returns:
            The ids of the step's requests, to resume or to finish.

        Raises:
            StepOrderError: No step is in flight.
        """
        step = self._require_step()
        with self._ending:
            self._abort(step)
        return step.request_ids

    def _abort(self, step: Step) -> None:
        for active in step._requests:
            self._release(active)
        self._step = None
        self._counters["aborted_steps"] += 1

    def _require_step(self) -> Step:
        """Return the step in flight."""
        if self._step is None:
            raise StepOrderError("no step is in flight: call begin_step first")
        return self._step

    def _require_none(self) -> None:
        """Check that no step is in flight."""
        if self._step is not None:
            raise StepOrderError("a step is in flight: commit_step or abort_step ends it")

    @guarded()
    def fork(
        self,
        request_id: Hashable,
        new_ids: Iterable[Hashable],
        *,
        last_tokens: Sequence[int] | Int64Array | torch.Tensor | None = None,
    ) -> Forks:
        """Create requests that continue from the position of a decoding request; all, or none.

        A fork has the same prompt and the same answer so far, and is otherwise an ordinary request.
        Full KV blocks are shared. The unfinished block and the live state are copied on the current
        stream, each in one launch for all forks. The host does not wait for the device.

        The last token of a decoding request is sampled, but not computed. So each fork may have a
        different last token, as several answers and beams need.

        Args:
            request_id: A decoding request without uncollected tokens.
            new_ids: Ids of the forks, none of them in use.
            last_tokens: The last token of each fork, instead of the last token of ``request_id``.
                Default: the same token.

        Returns:
            The rows and KV blocks that were copied. An embedder that stores keys and values, or
            other data by row, copies the same rows and blocks.

        Raises:
            UnknownRequestError: There is no such request.
            StepOrderError: The request does not decode, its last tokens are not collected, or a
                step is in flight.
            InvalidArgumentError: An id is in use, comes twice or is not hashable, or the tokens are
                no token ids, or not one for each new id.
            RequestCapacityError: Not enough rows are free.
            BlockCapacityError: Not enough KV blocks are free or evictable.
            TokenCapacityError: Scheduled chunks leave no room for the forks in the next step.
        """
        self._require_none()
        active = self.request_table.find(request_id, RequestStatus.DECODING)
        ids = self._read_new_ids(new_ids)
        table, row = self.request_table, active.row
        computed = table.num_computed.item(row)
        if table.num_uncollected[row] or table.num_tokens.item(row) == computed:
            raise StepOrderError(
                f"the last tokens of request {active.request_id!r} are still on the device: "
                "call collect_step before fork"
            )
        tokens = self._read_last_tokens(active, last_tokens, len(ids))
        if not ids:
            return Forks((), row, (), None, ())
        self._guard.is_changing = True
        rows, blocks = table.fork(row, tokens, ids)
        forks: list[ActiveRequest] = []
        try:
            chain = table.computed_chain(active)
            for name, token, new_row in zip(ids, tokens.tolist(), rows, strict=True):
                fork = active.fork(name, chain, [*active.generated[:-1], token])
                fork.row = new_row
                forks.append(fork)
            source_block = None
            if blocks:
                source_block = table.block_tables.item(row, computed // table.block_size_tokens)
            made = Forks(tuple(ids), row, tuple(rows), source_block, tuple(blocks))
            with outside:
                self._copy_to_forks(made, tokens)
            for fork in forks:
                table.set_status(fork, RequestStatus.DECODING)
            table.add(*forks)
        except BaseException:
            for fork in forks:
                table.set_status(fork, RequestStatus.PREEMPTED)
            for new_row in reversed(rows):
                table.release(new_row)
            raise
        self._counters["forks"] += len(forks)
        return made

    def _copy_to_forks(self, made: Forks, tokens: Int64Array) -> None:
        """Enqueue the copies of the live state and of the unfinished block."""
        row, rows = made.source_row, list(made.rows)
        if self._speculation is None:
            self._live_to_live.copy([row] * len(rows), rows)
        else:
            self._live_to_live.copy(*self._speculation.fork(row, rows, tokens))
        if self._kv_to_kv is not None and made.source_block is not None:
            self._kv_to_kv.copy([made.source_block] * len(rows), list(made.blocks))

    def _read_new_ids(self, new_ids: Any) -> list[Hashable]:
        """Return checked ids for new requests."""
        if isinstance(new_ids, (str, bytes)):  # iterable, but one id
            raise InvalidArgumentError(f"new_ids must be several ids, got one: {new_ids!r}")
        ids: list[Hashable] = as_items("new_ids", new_ids, "request ids")
        for request_id in ids:
            self.request_table.check_new(request_id)
        if len(set(ids)) < len(ids):
            raise InvalidArgumentError(f"new_ids must be different, got {ids}")
        return ids

    def _read_last_tokens(self, active: ActiveRequest, last_tokens: Any, count: int) -> Int64Array:
        """Return the checked last token of each fork."""
        if last_tokens is None:
            return np.full(count, self.request_table.last_tokens.item(active.row), dtype=np.int64)
        tokens = self._preparer.read_tokens(last_tokens)
        if len(tokens) != count:
            raise InvalidArgumentError(
                f"last_tokens must be one token for each of the {count} new ids, got {len(tokens)}"
            )
        return tokens.astype(np.int64)

    @guarded()
    def preempt(self, request_id: Hashable) -> None:
        """Release a request's row and blocks; ``resume_request`` admits it again.

        Args:
            request_id: A request that holds memory.

        Raises:
            UnknownRequestError: There is no such request.
            StepOrderError: The request is preempted already, or a step is in flight.
        """
        self._require_none()
        holding = [status for status in RequestStatus if status is not RequestStatus.PREEMPTED]
        active = self.request_table.find(request_id, *holding)
        with self._ending:
            self._release(active)
            self._counters["preemptions"] += 1

    @guarded()
    def finish(self, request_id: Hashable) -> list[int]:
        """Finish a request in any status; its published blocks and states stay cached.

        Args:
            request_id: The request.

        Returns:
            The generated tokens that are collected.

        Raises:
            UnknownRequestError: There is no such request.
            StepOrderError: A step is in flight.
        """
        self._require_none()
        active = self.request_table.find(request_id)
        with self._ending:
            self._end(active)
        return active.generated.tolist()

    @guarded()
    def pin(self, request: Request | PreparedRequest, *, ttl_seconds: float | None = None) -> Pin:
        """Pin a cached prompt: its KV blocks and the slot of its last state are not evicted.

        ``CacheConfig.max_pinned_share`` limits the share of blocks, and of slots, that pins hold. A
        pin ends if its blocks or slot are invalidated or deregistered by id, or if the slots are
        reset. ``reset(preserve_prefix_cache=True)`` keeps pins.

        Args:
            request: The prompt, with its salt and other keys; it is not run. Only its cached part
                is pinned, so run it before, with ``checkpoint_positions`` at its end: a state is
                saved there.
            ttl_seconds: Seconds until the pin expires, by the context's clock. Default: never.

        Returns:
            The pin, for ``unpin``. Its ``num_tokens`` is the length of the pinned prefix.

        Raises:
            InvalidArgumentError: As in ``prepare``, another context prepared the request, or
                ``ttl_seconds`` is no number from 0 to 10**9.
            SequenceLengthError: As in ``prepare``.
            MissingStateError: No state of the prompt is cached.
            BlockCapacityError: Pins would hold more than their share of KV blocks.
            MambaSlotCapacityError: Pins would hold more than their share of slots.
            StepOrderError: A step is in flight.
        """
        self._require_none()
        _, _, chain = self._preparer.read(request)
        blocks = self.kv_block_allocator.match_prefix(chain.hashes)
        num_blocks = self.slot_allocator.num_blocks_to_state(blocks)
        return self._pins.add(blocks[:num_blocks], num_blocks * self.block_size_tokens, ttl_seconds)

    @guarded()
    def unpin(self, pin: Pin) -> None:
        """End a pin; a pin that has ended already is ignored.

        Raises:
            InvalidArgumentError: ``pin`` is no ``Pin``.
            StepOrderError: A step is in flight.
        """
        self._require_none()
        self._pins.remove(pin)

    @property
    def pins(self) -> tuple[Pin, ...]:
        """The pins that have not ended, oldest first."""
        self._guard.tidy()
        return self._pins.current

    @query
    def status(self, request_id: Hashable) -> RequestStatus:
        """Return the status of a request.

        Raises:
            UnknownRequestError: There is no such request.
        """
        return self.request_table.find(request_id).status

    @query
    def statuses(self) -> dict[Hashable, RequestStatus]:
        """Return the status of each unfinished request, oldest first."""
        return {active.request_id: active.status for active in self.request_table}

    @query
    def output(self, request_id: Hashable, start: int = 0) -> list[int]:
        """Return the generated tokens of a request that are collected.

        Args:
            request_id: The request.
            start: Number of tokens to leave out at the beginning.

        Raises:
            UnknownRequestError: There is no such request.
            InvalidArgumentError: ``start`` is not an int >= 0.
        """
        active = self.request_table.find(request_id)
        self.request_table.collect(active)
        return active.generated[check_int("start", start, minimum=0) :].tolist()

    def extract_checkpoint_states(
        self,
        layer: int,
        chunk_states: torch.Tensor,
        conv_input: torch.Tensor,
        metadata: StepMetadata,
    ) -> None:
        """Write one Mamba layer's states at the step's checkpoints straight into their slots.

        Call this in every Mamba layer of every step, before the layer overwrites its live conv
        state. ``commit_step`` publishes a state only if every layer has handed over its tensors. In
        a step without checkpoints inside its chunks the call returns at once, and the tensors are
        not checked. Layers of other kinds than that of ``StateSpec.mamba`` call ``extract_states``.

        Args:
            layer: Number of the Mamba layer, from 0.
            chunk_states: [num_chunks, *ssm] SSM state at the end of each chunk, on the device.
            conv_input: [num_prefill_tokens, conv_dim] inputs of the convolution, on the device.
                Within ``capture_extractions`` both have room for the longest step to be replayed.
            metadata: ``Step.metadata`` of the step in flight.

        Raises:
            StepOrderError: No step is in flight, or a CUDA graph is captured outside of
                ``capture_extractions``.
            InvalidArgumentError: There is no such layer, the metadata are another step's, the
                tensors are not as long as the step, or their shape or dtype differs from the
                states', or the model's states are not conv and SSM.
        """
        if self.mamba_conv_states is None:
            raise InvalidArgumentError(
                "extract_checkpoint_states takes conv and SSM states (StateSpec.mamba): layers of "
                f"the kinds {[kind.name for kind in self.live_states.spec.kinds]} call "
                "extract_states"
            )
        self.extract_states("", layer, {"ssm": chunk_states}, {"conv": conv_input}, metadata)

    def extract_states(
        self,
        kind: str,
        layer: int,
        chunk_states: Mapping[str, torch.Tensor],
        window_inputs: Mapping[str, torch.Tensor],
        metadata: StepMetadata,
    ) -> None:
        """Write the states of one layer of any kind at the step's checkpoints into their slots.

        This is ``extract_checkpoint_states`` for other layers. Each state tensor of the layer is
        given in one of two ways: as its values at the ends of the step's chunks; or, if it holds
        the last inputs of a convolution or a token shift, as these inputs.

        Args:
            kind: Name of the layer's kind in the spec.
            layer: Number of the layer within its kind, from 0.
            chunk_states: By the tensor's name within a layer, [num_chunks, *shape] values at the
                ends of the chunks that ``metadata.cu_chunk_seqlens`` bounds, on the device.
            window_inputs: By name, [num_prefill_tokens, channels] inputs. The tensor itself is
                [channels, width] with the newest input last, or [channels], the newest input only.
            metadata: ``Step.metadata`` of the step in flight.

        Raises:
            StepOrderError: As in ``extract_checkpoint_states``.
            InvalidArgumentError: There is no such kind or layer, a tensor of the layer is missing,
                unknown or given twice, or as in ``extract_checkpoint_states``.
        """
        captured, step = self._captured, self._step
        if captured is None:
            step = self._require_step()
            if metadata is not step.metadata:
                another = " of another step" if isinstance(metadata, StepMetadata) else ""
                raise InvalidArgumentError(
                    "metadata must be Step.metadata of the step in flight, "
                    f"got {type(metadata).__name__}{another}"
                )
            if not metadata.num_checkpoints:
                return
        numbers, names = self._layers[check_choice("kind", kind, self._layers)]
        layer = check_int("layer", layer, minimum=0, maximum=len(numbers) - 1)
        _check_names(names, chunk_states, window_inputs)
        num_chunks = [*map(len, chunk_states.values())]
        num_tokens = [*map(len, window_inputs.values())]
        if captured is None:
            needed = metadata.num_chunks, metadata.num_prefill_tokens
            if {*num_chunks} - {needed[0]} or {*num_tokens} - {needed[1]}:
                raise InvalidArgumentError(
                    f"layer {self._layer_labels[numbers[layer]]} handed over {num_chunks} "
                    f"chunk_states and {num_tokens} tokens of conv_input, but the step has "
                    f"{needed[0]} chunks and {needed[1]} prefill tokens: hand over just these, "
                    "without those of decoding requests and without padding"
                )
            if self.device.type == "cuda":  # pragma: no cover - tests/gpu run it
                _check_not_capturing()
        launches = self._plan_extraction(layer, names, chunk_states, window_inputs)
        for launch in launches:  # all tensors are checked before the first write
            launch()
        if captured is not None:  # the shortest tensor limits the steps that can be replayed
            shortest = min(num_chunks, default=INT32_MAX), min(num_tokens, default=INT32_MAX)
            captured.lengths[numbers[layer]] = shortest
        else:
            assert step is not None, "it was checked above"
            step._missing.discard(numbers[layer])

    def _plan_extraction(
        self,
        layer: int,
        names: Mapping[str, str],
        chunk_states: Mapping[str, torch.Tensor],
        window_inputs: Mapping[str, torch.Tensor],
    ) -> list[Callable[[], None]]:
        """Return the launches that extract a layer's tensors, each up to a state and a window."""
        buffers, step = self.step_buffers, self._step
        if self._captured is not None or step is None:
            fields = buffers.checkpoint_fields(None)
        else:
            # Sliced once a step: in each layer the slices would cost more than all checks.
            step._fields = step._fields or buffers.checkpoint_fields(step.metadata.num_checkpoints)
            fields = step._fields
        saved, live = self.slot_allocator.states.tensors, self.live_states.tensors
        quantization = self.slot_allocator.quantization
        launches = []
        for state, window in zip_longest(chunk_states, window_inputs):
            scales = quantization.scales_of(names[state]) if quantization and state else None
            launches.append(
                plan_extraction(
                    None if window is None else saved[names[window]][layer],
                    None if state is None else saved[names[state]][layer],
                    None if window is None else live[names[window]][layer],
                    None if state is None else chunk_states[state],
                    None if window is None else window_inputs[window],
                    fields=fields,
                    slot_scales=None if scales is None else saved[scales][layer],
                )
            )
        return launches

    @contextmanager
    def capture_extractions(self) -> Iterator[CapturedExtractions]:
        """Record calls of ``extract_checkpoint_states`` while a CUDA graph is captured.

        A replay runs no Python, so the engine reports the recorded calls at each replay::

            with context.capture_extractions() as captured, torch.cuda.graph(graph):
                model(...)
            ...
            graph.replay()
            context.count_extractions(captured)

        Within the block the calls cover the maximum number of checkpoints of a step. They do not
        count as handed over for a step in flight. Run warm-ups within the block, too.

        Raises:
            StepOrderError: On entry: another capture has not ended.
        """
        if self._captured is not None:
            raise StepOrderError("capture_extractions was called within capture_extractions")
        self._captured = CapturedExtractions()
        try:
            yield self._captured
        finally:
            self._captured = None

    def count_extractions(self, captured: CapturedExtractions) -> None:
        """Mark the layers of a replayed CUDA graph as handed over in the step in flight.

        Call this at every replay, once the replay is enqueued.

        Args:
            captured: The result of ``capture_extractions`` from the graph's capture.

        Raises:
            StepOrderError: No step is in flight.
            InvalidArgumentError: ``captured`` is something else, has a layer that does not exist,
                or was captured with shorter tensors than the step needs. Nothing was marked.
        """
        step = self._require_step()
        if not isinstance(captured, CapturedExtractions):
            raise InvalidArgumentError(
                "captured must be the object that capture_extractions gave, "
                f"got {type(captured).__name__}"
            )
        needed = step.metadata.num_chunks, step.metadata.num_prefill_tokens
        for layer, (num_chunks, num_tokens) in captured.lengths.items():
            check_int("layer", layer, minimum=0, maximum=len(self._layer_labels) - 1)
            if step._missing and (num_chunks < needed[0] or num_tokens < needed[1]):
                raise InvalidArgumentError(
                    f"layer {self._layer_labels[layer]} was captured with {num_chunks} "
                    f"chunk_states and {num_tokens} tokens of conv_input, but the step has "
                    f"{needed[0]} chunks and {needed[1]} prefill tokens: capture with tensors for "
                    "the longest step"
                )
        step._missing.difference_update(captured.lengths)

    @guarded(renews=True)
    def reset(self, *, preserve_prefix_cache: bool = False) -> None:
        """Finish all requests, and abort a step in flight.

        Args:
            preserve_prefix_cache: Keep cached blocks and states, and the counters. If False, the
                context is as new, even after a ``PoisonedError``.

        Raises:
            InvalidArgumentError: ``preserve_prefix_cache`` is no bool.
        """
        check_kind("preserve_prefix_cache", preserve_prefix_cache, bool)
        if preserve_prefix_cache:
            self._guard.check()
            self._pins.expire_due()
        with self._guard.ending(self.listeners, renews=not preserve_prefix_cache):
            self._uncollected = None
            if preserve_prefix_cache:
                if self._step is not None:
                    self._abort(self._step)
                for active in self.request_table:
                    self._end(active)
            else:
                self._step = None
                self.request_table.reset()
                self._memory.clear()
                self._tiering.reset()

    def verify_pending(
        self,
        compute: Callable[[HitToVerify], PrefixContent | None],
        max_hits: int | None = None,
    ) -> int:
        """Compare sampled hits with results that the model computes without the cache.

        With ``CacheConfig.verify_hits`` a sample of the hits is queued for this call. A hit that
        differs by more than ``RELATIVE_BOUNDS`` is counted, logged in ``mamba_cache.verification``,
        and removed from the cache and its tiers. The call waits for the device.

        Args:
            compute: Computes the tokens of a hit without the cache, and returns the states and
                KV after them. It may return None if it cannot, which is counted.
            max_hits: Maximum number of hits to compare. Default: all that are queued.

        Returns:
            The number of hits compared.

        Raises:
            InvalidArgumentError: ``max_hits`` is not an int >= 1, or the computed tensors do not
                match the cached ones.
            StepOrderError: A step is in flight.
        """
        self._require_none()
        return self._memory.verifier.verify(compute, max_hits)

    def verification_stats(self) -> VerificationStats:
        """Return the results of ``CacheConfig.verify_hits``; any thread may call this."""
        return self._memory.verifier.stats()

    def stats(self) -> CacheStats:
        """Return counters of the cache and its present contents."""
        self._guard.tidy()
        return self._memory.stats()

    @property
    def host_tier(self) -> HostTier | None:
        """Entries in host memory; None without such a tier."""
        return self._tiering.host

    def tier_stats(self) -> tuple[TierStats, ...]:
        """Return contents and counters of each tier, from the top down; empty without tiers."""
        self._guard.tidy()
        return self._tiering.stats()

    @property
    def disk_tier(self) -> LowerTier | None:
        """Entries on disk; None without such a tier."""
        return self._tiering.disk

    @property
    def store_tier(self) -> LowerTier | None:
        """Entries in a store that other processes share; None without such a tier."""
        return self._tiering.store

    def close(self) -> None:
        """Close disk and store: finish queued writes, end threads, release the folder's lock.

        The context can be used without them afterwards. A context that is garbage collected, or
        alive at the end of the process, closes them too, but discards queued writes.
        """
        self._tiering.close()
        self._closes_lower.detach()

    @guarded(changes=True)
    def wait_for_tiers(self) -> None:
        """Wait until all spills have ended, and all memory of tiers is allocated.

        For tests, benchmarks and a clean shutdown. No step needs it.
        """
        self._tiering.wait()
        self._tiering.flush()

    def check_invariants(self) -> None:
        """Check that all bookkeeping agrees. It costs nothing unless called.

        Raises:
            InvariantError: Two records contradict each other: a bug of this package.
        """
        self._guard.tidy()  # a pin that expires between two reads would look like a contradiction
        self.kv_block_allocator.check_invariants()
        self.slot_allocator.check_invariants()
        requests = list(self.request_table)
        in_step = set(() if self._step is None else self._step._requests)
        chunks = [a.chunk for a in requests if a.chunk is not None]
        for active in requests:
            self.request_table.check_request(active, is_in_step=active in in_step)
        leases = [*self._pins.leases, *(c.lease for c in chunks if c.lease is not None)]
        leases += self._tiering.pins
        planned = [checkpoint.slot for active in requests for checkpoint in active.checkpoints]
        self.slot_allocator.check_uses(planned, leases)
        self.request_table.check_invariants(self._pins.references)
        self._pins.check_invariants()
        self._tiering.check_invariants([c.load for c in chunks if c.load is not None])

    def _require_no_blocks_held(self) -> None:
        """Check that no request and no pin holds blocks."""
        holding = self.request_table.holding_memory()
        if holding:
            raise StepOrderError(
                f"requests {[active.request_id for active in holding[:8]]} hold KV blocks: finish "
                "or preempt them first, or reset the context, which ends them"
            )
        if self._pins.held:
            raise StepOrderError(
                f"{len(self._pins.held)} pins hold KV blocks: unpin them first, or reset the "
                "context"
            )

    def _require_no_slots_reserved(self) -> None:
        """Check that no step is in flight and no request has reserved slots."""
        self._require_none()
        reserving = [a.request_id for a in self.request_table if a.checkpoints]
        if reserving:
            raise StepOrderError(
                f"requests {reserving[:8]} have reserved slots: finish or preempt them first, or "
                "reset the context, which ends them"
            )

    def _end(self, active: ActiveRequest) -> None:
        self._release(active)
        self.request_table.remove(active)


def _check_names(
    names: Mapping[str, str],
    chunk_states: Mapping[str, torch.Tensor],
    window_inputs: Mapping[str, torch.Tensor],
) -> None:
    """Check that a layer's call has each of its tensors once."""
    if not isinstance(chunk_states, Mapping) or not isinstance(window_inputs, Mapping):
        raise InvalidArgumentError(
            "chunk_states and window_inputs must map names to tensors, "
            f"got {type(chunk_states).__name__} and {type(window_inputs).__name__}"
        )
    given = [*chunk_states, *window_inputs]
    if len(given) != len(names) or set(given) != names.keys():
        raise InvalidArgumentError(
            f"a layer of this kind must hand over each of {[*names]} once, as chunk_states "
            f"or as window_inputs, got {[*chunk_states]} and {[*window_inputs]}"
        )
    tensors = [*chunk_states.values(), *window_inputs.values()]
    if not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in tensors):
        raise InvalidArgumentError(
            "chunk_states and window_inputs must be tensors, one row for each chunk and each "
            f"prefill token, got {tensors!r}"
        )


def _check_not_capturing() -> None:  # pragma: no cover - tests/gpu run it
    if torch.cuda.is_current_stream_capturing():
        raise StepOrderError(
            "states were handed over while a CUDA graph was captured: capture it within "
            "context.capture_extractions(), and pass its result to "
            "context.count_extractions() at each replay"
        )
