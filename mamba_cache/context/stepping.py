"""Steps: requests are admitted, computed and published; a step is begun, committed or aborted."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from mamba_cache._checks import as_items, check_int
from mamba_cache._guard import CallGuard, outside
from mamba_cache.cache import (
    BlockHashes,
    CheckpointPlacement,
    KVBlockAllocator,
    PlacementFacts,
    PromptFacts,
    SlotLease,
    StateProposal,
)
from mamba_cache.cache.placement import placed_positions
from mamba_cache.config import CacheConfig
from mamba_cache.context.extractions import StepExtractions
from mamba_cache.context.request_table import DecodingGroup, Int64Array, RequestTable
from mamba_cache.context.requests import (
    ActiveRequest,
    Admission,
    Checkpoint,
    Chunk,
    MissReason,
    PlannedLoad,
    PrefixMatch,
    RequestPreparer,
    RequestStatus,
    find_prefix,
)
from mamba_cache.context.speculation import (
    DeviceTokens,
    Sampled,
    SentTokens,
    Speculation,
    check_accepted,
    read_sampled,
)
from mamba_cache.context.stats import count_admission
from mamba_cache.context.step import NOBODY_DECODES, DecodeWork, Forks, Step
from mamba_cache.context.step_buffers import StepBuffers
from mamba_cache.context.tiering import Tiering
from mamba_cache.errors import (
    InvalidArgumentError,
    InvariantError,
    SequenceLengthError,
    StepOrderError,
    TokenCapacityError,
    UnwrittenStateWarning,
)
from mamba_cache.events import Stored
from mamba_cache.slots import MambaSlotAllocator
from mamba_cache.states import StateCopier, StatePool

__all__ = ["StepRunner"]


class _Uncollected(NamedTuple):
    """A step whose tokens are not on the host yet."""

    group: DecodingGroup  # its requests that decode
    lengths: Int64Array  # [num decoding] tokens that each of them computed
    prefills: list[ActiveRequest]  # its other requests that sample
    places: Int64Array  # [n] where in the batch all of these are
    rows: Int64Array  # [n] their rows
    num_releases: Int64Array  # [n] how often each row had been given back by then
    planned: dict[int, Checkpoint]
    sent: SentTokens  # the tokens on their way


class StepRunner:
    """The way of requests into the next step and out of it, and the step in flight.

    It also chooses, reserves and publishes the states that steps save. Those lie at block
    boundaries only, which lie on the SSM chunk grid because the settings say so. Of the step before
    the one in flight the tokens may not be collected.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        guard: CallGuard,
        preparer: RequestPreparer,
        buffers: StepBuffers,
        rows: RequestTable,
        kv_blocks: KVBlockAllocator,
        kv_cache: torch.Tensor | None,
        slots: MambaSlotAllocator,
        live_states: StatePool,
        placement: CheckpointPlacement,
        counters: Counter[str],
        extractions: StepExtractions,
        tiering: Tiering | None,
        refuses: bool,
        on_admitted: Sequence[Callable[[ActiveRequest, Admission], object]],
    ) -> None:
        self._config = config
        self._guard = guard
        self._preparer = preparer
        self._buffers = buffers
        self._rows = rows
        self._kv_blocks = kv_blocks
        self._kv_cache = kv_cache
        self._slots = slots
        self._live_states = live_states
        self._placement = placement
        self._counters = counters
        self._extractions = extractions
        self._tiering = tiering
        self._refuses = refuses
        self._on_admitted = on_admitted
        self._block_size = config.block_size_tokens
        device = live_states.device
        self._speculation = Speculation(config, device) if config.num_speculative_tokens else None
        self._copiers: tuple[StateCopier, StateCopier | None] | None = None
        self._room = config.checkpoints_per_step
        # States that hits have used, by slot, so that there are never more than slots.
        self._consumed: dict[int, SlotLease] = {}
        self._has_warned = False
        self._work = NOBODY_DECODES
        self._prefills: tuple[ActiveRequest, ...] = ()
        self._step: Step | None = None
        self._planned: dict[int, Checkpoint] = {}
        self._uncollected: _Uncollected | None = None
        self._is_advanced = False

    @property
    def step(self) -> Step:
        """The step in flight."""
        if self._step is None:
            raise StepOrderError("no step is in flight: call begin_step first")
        return self._step

    @property
    def requests(self) -> tuple[ActiveRequest, ...]:
        """The requests of the step in flight; a step that is only half begun is none."""
        return () if self._step is None else (*self._work.group.requests, *self._prefills)

    @property
    def is_uncollected(self) -> bool:
        """Whether the tokens of the last step are not on the host."""
        return self._uncollected is not None

    def require_none(self) -> None:
        """Check that no step is in flight."""
        if self._step is not None:
            raise StepOrderError("a step is in flight: commit_step or abort_step ends it")

    def match(self, hashes: BlockHashes, num_tokens: int) -> PrefixMatch:
        """Find how much of a sequence is cached; nothing changes."""
        if self._tiering is None:
            return self._match_on_gpu(hashes, num_tokens)
        lower = self._tiering.lower
        if lower is not None:
            self._tiering.poll()  # what has arrived from below counts
        match = self._tiering.extend(self._match_on_gpu(hashes, num_tokens), hashes)
        if lower is None:
            return match
        return replace(match, arriving_tokens=lower.arriving_tokens(hashes))

    def _match_on_gpu(self, hashes: BlockHashes, num_tokens: int) -> PrefixMatch:
        if not self._config.enable_prefix_caching:
            return PrefixMatch(num_tokens, (), 0, 0, MissReason.CACHE_DISABLED)
        return find_prefix(
            hashes,
            num_tokens,
            self._kv_blocks,
            self._slots,
            block_size_tokens=self._block_size,
            min_computed_tokens=self._config.min_computed_tokens,
        )

    def admit(
        self,
        active: ActiveRequest,
        chunk_tokens: int | None,
        token_room: int,
    ) -> None:
        """Match a request, give it memory, and plan its first chunk for the next step."""
        self._rows.take_over(active)  # of a request that is resumed
        num_tokens, hashes = active.num_known, active.hashes
        if num_tokens > self._config.max_sequence_length:
            raise SequenceLengthError(
                f"request {active.request_id!r} has {num_tokens} tokens; "
                f"max_sequence_length is {self._config.max_sequence_length}: finish it"
            )
        match = self._match_on_gpu(hashes, num_tokens)
        if self._tiering is None:
            self._enter(active, hashes, match, chunk_tokens, token_room)
            return
        found, load = self._find_below(self._tiering, active, hashes, match)
        try:
            self._enter(active, hashes, found, chunk_tokens, token_room, load, match.skip_tokens)
        except BaseException:
            self._cancel_load(load)
            raise
        self._tiering.offer_used(active, found.state_matched_blocks)

    def _find_below(
        self, tiering: Tiering, active: ActiveRequest, hashes: BlockHashes, match: PrefixMatch
    ) -> tuple[PrefixMatch, PlannedLoad | None]:
        """Find where a request resumes, and keep the rows if it is by loading."""
        tiering.poll()
        refused: PrefixMatch | None = None
        while (extended := tiering.extend(match, hashes)).loads_state:
            assert extended != refused, "what was refused is not found again"
            # Before anything is evicted for it: what raises later must have changed nothing.
            index, blocks = extended.state_matched_blocks - 1, match.block_ids
            block = blocks[index] if index < len(blocks) else None
            if not self._slots.can_reserve(block, blocks):
                break
            load = tiering.read(active, extended)
            if load is not None:
                return extended, load
            refused = extended  # an entry was damaged, and is not found again
            active.was_refused = True
        return match, None

    def _enter(  # noqa: PLR0917 (one admission, part by part)
        self,
        active: ActiveRequest,
        hashes: BlockHashes,
        match: PrefixMatch,
        chunk_tokens: int | None,
        token_room: int,
        load: PlannedLoad | None = None,
        state_position: int | None = None,
    ) -> None:
        """Give a matched request memory, and plan its first chunk; the rest is as in ``admit``."""
        left = match.prompt_tokens - match.skip_tokens
        num_tokens = self._chunk_tokens(active, left, chunk_tokens, token_room)
        end = match.skip_tokens + num_tokens
        admission = Admission(
            prompt_tokens=match.prompt_tokens,
            block_ids=match.block_ids,
            state_matched_blocks=match.state_matched_blocks,
            skip_tokens=match.skip_tokens,
            miss_reason=match.miss_reason,
            loaded_blocks=match.loaded_blocks,
            loads_state=match.loads_state,
            request_id=active.request_id,
            chunk_tokens=num_tokens,
        )
        lease = None
        if load is None:
            lease = self._pin(match.block_ids, match.state_matched_blocks)
        try:
            row = self._rows.take(match.block_ids, end, active.request_id)
        except BaseException:
            self._unpin(lease)
            raise
        active.row = row
        self._rows.num_tokens[row] = match.prompt_tokens
        self._rows.num_computed[row] = match.skip_tokens
        active.admission = admission
        active.state_position = match.skip_tokens if state_position is None else state_position
        active.num_published = match.kv_matched_blocks
        # What is loaded is written by the load, and by nothing else.
        active.num_shared_blocks = match.kv_matched_blocks + match.loaded_blocks
        active.chunk = self._chunk(
            active, match.skip_tokens, num_tokens, is_first=True, lease=lease
        )
        self._rows.set_status(active, RequestStatus.SCHEDULED)
        try:
            if load is not None:
                first = load.first_block
                load.blocks = self._blocks_between(active, first, first + load.num_blocks)
                load.checkpoint = self._reserve_for_load(active, match.skip_tokens)
                active.chunk.load = load
            self._plan(active, active.chunk, hashes)
        except BaseException:
            self.release(active)
            raise

    def schedule(
        self,
        active: ActiveRequest,
        chunk_tokens: int | None,
        token_room: int,
        checkpoint_positions: tuple[int, ...],
    ) -> None:
        """Plan the next chunk of a request that is between two."""
        start, positions = self._rows.num_computed.item(active.row), active.checkpoint_positions
        left = active.num_known - start
        num_tokens = self._chunk_tokens(active, left, chunk_tokens, token_room)
        self._rows.grow(active.row, start + num_tokens, active.request_id)
        try:
            active.checkpoint_positions += checkpoint_positions
            chunk = self._chunk(active, start, num_tokens)
            self._plan(active, chunk)
            active.chunk = chunk
        except BaseException:
            active.checkpoint_positions = positions
            self._rows.shrink(active.row, start, active.num_shared_blocks)
            raise
        self._rows.set_status(active, RequestStatus.SCHEDULED)

    def _plan_again(self, active: ActiveRequest) -> None:
        """Plan a chunk again that cannot resume from the state which it was planned with.

        It starts at the farthest state that is left among the matched blocks, or at the prompt's
        beginning, and computes as many tokens as it was to, from there.
        """
        chunk = active.current_chunk
        self._cancel_planned(chunk)
        # If what follows fails, nothing of the old plan may be taken back twice.
        load = chunk.load
        chunk = replace(chunk, lease=None, load=None, inside=(), boundary=None)
        active.chunk = chunk
        self._cancel_load(load)
        admission = active.current_admission
        active.num_shared_blocks = active.num_published  # blocks to be loaded are not
        shared = self._blocks_between(active, 0, active.num_shared_blocks)
        state_blocks = self._slots.num_blocks_to_state(shared[: admission.state_matched_blocks])
        start = state_blocks * self._block_size
        lease = self._pin(shared, state_blocks)
        self._rows.num_computed[active.row] = active.state_position = start
        active.chunk = self._chunk(active, start, chunk.num_tokens, is_first=True, lease=lease)
        active.admission = replace(
            admission,
            state_matched_blocks=state_blocks,
            skip_tokens=start,
            miss_reason=None if start else MissReason.NO_STATE,
            loaded_blocks=0,
            loads_state=False,
        )
        self._plan(active, active.chunk)

    def release(self, active: ActiveRequest) -> None:
        """Take back everything that a request holds, what was planned for it included."""
        chunk, active.chunk = active.chunk, None
        self._rows.set_status(active, RequestStatus.PREEMPTED)
        if chunk is not None:
            self._cancel_planned(chunk)
            self._unpin(chunk.lease)
            self._cancel_load(chunk.load)
        self._cancel_decode(active)
        active.prompt_seen = None  # it may have grown since; its next admission tells of it anew
        active.num_shared_blocks = 0
        self._rows.collect(active)
        row, active.row = active.row, -1
        active.num_computed = self._rows.num_computed.item(row)
        self._rows.give_back(row)

    def begin(
        self,
        work: DecodeWork,
        saving: Sequence[int],
        prefills: Sequence[ActiveRequest],
        drafts: torch.Tensor | None,
    ) -> Step:
        """Send the metadata and restore live states; on an exception the step is taken back."""
        self._work, self._prefills, self._planned = work, tuple(prefills), {}
        try:
            saved = self._plan_boundaries(work, saving) if saving else []
            for active in prefills:
                lease = active.current_chunk.lease
                if lease is not None and not self._slots.is_current(lease):
                    self._plan_again(active)
            if self._tiering is not None and prefills:
                for active in self._tiering.begin(self._prefills):  # those that cannot load
                    self._plan_again(active)
            chunks = [active.current_chunk for active in prefills]
            with outside:
                metadata = self._buffers.fill(work, chunks, saved)
                self._extractions.begin(metadata)
                if self._speculation is not None:
                    is_exact = drafts is None and self._uncollected is None
                    self._speculation.describe(metadata, drafts, is_exact=is_exact)
                # Without the padding, which a kernel would look at entry by entry.
                if restores := self._buffers.entries("restores"):
                    self._slots.slots_to_live(*restores)
                ids = [active.request_id for active in prefills]
                step = Step(work, [*zip(ids, chunks, strict=True)], metadata)
            if self._tiering is not None:
                self._tiering.begin_forward(sum(chunk.num_tokens for chunk in chunks))
            self._step = step
        except BaseException:
            self._preempt_all()
            raise
        return step

    def _plan_boundaries(
        self, work: DecodeWork, saving: Sequence[int]
    ) -> list[tuple[int, Checkpoint]]:
        """Plan the checkpoints of decoding requests that may end a block; return where."""
        for index in saving:
            active = work.group.requests[index]
            self._plan_decode(active)
            if active.checkpoint is not None:
                self._planned[index] = active.checkpoint
        return [*self._planned.items()]

    def commit(self, new_tokens: object, counts: object) -> tuple[Hashable, ...]:
        """Save boundary states, publish what was written, and append the sampled tokens.

        Tokens that only the device knows are sent to the host, for ``collect``.
        """
        sampled = self._read_sampled(new_tokens, counts)
        self._drop_unwritten()
        tiering = self._tiering
        damaged: Sequence[ActiveRequest] = ()
        if tiering is not None and self._prefills:
            damaged = tiering.verify(self._prefills)
        if self._speculation is not None:
            self._advance(self._speculation, *self._in_batch_order(sampled))
        # As planned: a request loses its checkpoint if the step before has reached it.
        if boundaries := self._buffers.entries("boundaries"):
            self._slots.live_to_slots(*boundaries)
        new = SentTokens(sampled) if isinstance(sampled, DeviceTokens) else sampled
        with self._guard.ending(self._slots.listeners):
            work, num_decodes = self._work, len(self._work.group.ids)
            in_batch = enumerate(self._prefills, num_decodes)
            sampling = [pair for pair in in_batch if pair[1].current_chunk.samples]
            firsts: Iterable[tuple[tuple[int, ActiveRequest], int]] = ()
            if isinstance(new, SentTokens):
                self._await(new, [pair for pair in sampling if pair[1] not in damaged])
            else:
                tokens, counts = new
                if num_decodes:
                    own = None if counts is None else counts[:num_decodes]
                    self._take(work.group, tokens[:num_decodes], own, self._planned, stays=False)
                    self._counters["computed_tokens"] += work.num_tokens
                firsts = zip(sampling, tokens[num_decodes:, 0].tolist(), strict=True)
            preempted = self._preempt_damaged(damaged) if damaged else ()
            for active in self._prefills:
                self._end_chunk(active)
            for (_, active), token in firsts:
                if active not in damaged:
                    self._rows.append_first_token(active.row, token)
            self._end_step()
        if tiering is not None:
            self._guard.is_changing = True
            tiering.end_step()
        return preempted

    def _read_sampled(self, new_tokens: object, counts: object) -> Sampled | DeviceTokens:
        """Return the step's sampled tokens, checked: as arrays if they are on the host."""
        step = self.step
        if self._uncollected is not None:
            raise StepOrderError("the last step is uncollected: collect_step brings its tokens")
        if isinstance(new_tokens, DeviceTokens):
            if self._speculation is None:
                raise InvalidArgumentError(
                    "tokens on the device need num_speculative_tokens of at least 1, got 0"
                )
            self._speculation.check_sampled(new_tokens, step.metadata.num_requests)
            return new_tokens
        ids = step.sampling_ids
        id_set = self._work.group.id_set if ids is self._work.group.ids else frozenset(ids)
        sampled = read_sampled(new_tokens, counts, ids, id_set, self._preparer)
        check_accepted(self._work, sampled, ids)
        return sampled

    def _in_batch_order(
        self, sampled: Sampled | DeviceTokens
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[Int64Array, Int64Array]:
        """Return the tokens of all requests of the step, and counts; some may not have sampled."""
        if isinstance(sampled, DeviceTokens):
            return sampled.tokens, sampled.counts
        tokens, counts = sampled
        if counts is None:
            counts = np.ones(len(tokens), dtype=np.int64)
        if self._prefills:
            samples = [active.current_chunk.samples for active in self._prefills]
            index = np.flatnonzero([*[True] * len(self._work.group.ids), *samples])
            count = len(self._work.group.ids) + len(samples)
            all_tokens = np.zeros((count, tokens.shape[1]), dtype=np.int64)
            all_counts = np.zeros(count, dtype=np.int64)
            all_tokens[index], all_counts[index] = tokens, counts
            tokens, counts = all_tokens, all_counts
        return tokens, counts

    def _drop_unwritten(self) -> None:
        """Give up the states inside chunks unless every layer has handed over its part.

        A warning comes before anything is changed: made an error by a filter, it leaves the step
        in flight.
        """
        layers = self._extractions.missing_layers
        if not layers:
            return
        lacking = [active for active in self._prefills if active.current_chunk.inside]
        if not self._has_warned:
            warnings.warn(_describe_unwritten(layers, lacking), stacklevel=5)
            self._has_warned = True
        for active in lacking:
            inside = active.current_chunk.inside
            self._cancel(inside)
            self._room += len(inside)
            active.chunk = replace(active.current_chunk, inside=())
            self._counters["unwritten_states"] += len(inside)

    def _preempt_damaged(self, damaged: Sequence[ActiveRequest]) -> tuple[Hashable, ...]:
        """Take requests out of the step; what they computed is of no use. Return their ids."""
        self._prefills = tuple(active for active in self._prefills if active not in damaged)
        for active in damaged:
            active.was_refused = True
            self.release(active)
        return tuple(active.request_id for active in damaged)

    def _advance(
        self,
        speculation: Speculation,
        tokens: torch.Tensor | Int64Array,
        counts: torch.Tensor | Int64Array,
    ) -> None:
        if self._is_advanced:
            raise StepOrderError(
                "the device knows the step's tokens since a commit_step that broke off: "
                "abort_step takes the step back"
            )
        self._is_advanced = True
        speculation.advance(self.step.metadata, tokens, counts)

    def _await(self, sent: SentTokens, sampling: Sequence[tuple[int, ActiveRequest]]) -> None:
        """Keep what is needed of a step until its tokens are on the host."""
        group, lengths = self._work.group, self._work.ends - self._work.most
        own: Int64Array = np.array([active.row for _, active in sampling], dtype=np.int64)
        rows = np.concatenate((group.rows, own))
        places = [*range(len(group.ids)), *(place for place, _ in sampling)]
        self._rows.num_in_doubt[group.rows] = lengths
        self._uncollected = _Uncollected(
            group=group,
            lengths=lengths,
            prefills=[active for _, active in sampling],
            places=np.array(places, dtype=np.int64),
            rows=rows,
            num_releases=self._rows.num_releases[rows],
            planned=self._planned,
            sent=sent,
        )

    def _take(
        self,
        group: DecodingGroup,
        tokens: Int64Array,
        counts: Int64Array | None,
        checkpoints: Mapping[int, Checkpoint],
        *,
        stays: bool,
    ) -> None:
        """Make sampled tokens of decoding requests part of their sequences."""
        rows = group.rows
        if counts is None:
            after = self._rows.append_token(rows, tokens[:, 0])
        else:
            self._rows.append_tokens(rows, tokens, counts)
            after = self._rows.num_computed[rows] + counts
        self._rows.num_computed[rows] = after
        events = (after > self._rows.next_events[rows]).nonzero()[0]
        if not len(events) and not checkpoints:
            return
        places = events.tolist()
        if checkpoints:
            places = sorted({*places, *checkpoints})
        for index in places:
            active, end = group.requests[index], after.item(index)
            start = end - (1 if counts is None else counts.item(index))
            checkpoint = checkpoints.get(index)
            if checkpoint is not active.checkpoint:
                checkpoint = None  # the step before has reached it already
            if checkpoint is not None and not start < checkpoint.position <= end:
                if not (stays and checkpoint in self._planned.values()):
                    self._cancel_decode(active)
                checkpoint = None
            self._publish_decoded(active, checkpoint)

    def _publish_decoded(self, active: ActiveRequest, checkpoint: Checkpoint | None) -> None:
        """Publish the blocks that a decoding request has filled, and the state that it saved."""
        self._rows.take_over(active)
        if checkpoint is None:
            if self._config.reuse_answers:
                self._publish_blocks(active)
            return
        active.checkpoint = None
        self._publish(active, (checkpoint,))
        self._supersede_decode_state(active, checkpoint)

    def _end_chunk(self, active: ActiveRequest) -> None:
        chunk = active.current_chunk
        self._rows.num_computed[active.row] = chunk.end
        if chunk.lease is not None:
            self._consumed[chunk.lease.slot] = chunk.lease
            self._slots.note_consumed([chunk.lease.slot])
        self._publish(active, chunk.checkpoints)
        self._counters["computed_tokens"] += chunk.num_tokens
        if active.admission is not None:
            count_admission(self._counters, active.admission)
            for listener in self._on_admitted:
                listener(active, active.admission)
            active.admission = None
        self._room += len(chunk.inside)
        self._unpin(chunk.lease)  # it may be evicted from now on
        active.chunk = None
        status = RequestStatus.DECODING if chunk.samples else RequestStatus.PREFILLING
        self._rows.set_status(active, status)
        if chunk.samples:
            config = self._config
            wants = config.save_decode_states or bool(active.checkpoint_positions)
            saves = config.enable_prefix_caching and config.reuse_answers and wants
            self._rows.saves_states[active.row] = saves

    def collect(self) -> dict[Hashable, list[int]]:
        """Wait for the uncollected step's tokens, and do what needs them."""
        if self._uncollected is None:
            raise StepOrderError("no step is uncollected: commit_step with DeviceTokens makes one")
        group, lengths, prefills, places, rows, num_releases, planned, sent = self._uncollected
        tokens, given = sent.wait()
        count = len(group.ids)
        counts = np.ones(len(rows), dtype=np.int64)
        counts[:count] = np.clip(given[:count], 0, lengths)
        tokens = tokens[places]
        current = (self._rows.num_releases[rows] == num_releases).nonzero()[0]
        if len(current) < len(rows):
            tokens, counts, rows = tokens[current], counts[current], rows[current]
            prefills = [prefills[place - count] for place in current.tolist() if place >= count]
            current = current[current < count]
            lengths, count = lengths[current], len(current)
            kept = current.tolist()
            planned = {new: planned[old] for new, old in enumerate(kept) if old in planned}
            group = DecodingGroup([group.requests[place] for place in kept])
        self._preparer.read_tokens(tokens[np.arange(tokens.shape[1]) < counts[:, None]])
        with self._guard.ending(self._slots.listeners):
            self._rows.num_in_doubt[group.rows] = 0
            self._take(group, tokens[:count], counts[:count], planned, stays=True)
            self._counters["computed_tokens"] += int(lengths.sum())
            self._rows.append_token(rows[count:], tokens[count:, 0])
            self._uncollected = None
        if self._tiering is not None:
            self._guard.is_changing = True
            self._tiering.pump()
        ids = (*group.ids, *(active.request_id for active in prefills))
        lists = zip(ids, tokens.tolist(), counts.tolist(), strict=True)
        return {request_id: new[:number] for request_id, new, number in lists}

    def abort(self) -> tuple[Hashable, ...]:
        """Take the step back, and return the ids of its requests, which are preempted."""
        ids = self.step.request_ids
        with self._guard.ending(self._slots.listeners):
            self._preempt_all()
            self._counters["aborted_steps"] += 1
        return ids

    def drop(self) -> None:
        """Take back the step in flight, if there is one, and forget the uncollected one."""
        if self._step is not None:
            self.abort()
        self._uncollected = None

    def forget(self) -> None:
        """Have no step in flight; what its requests hold is dealt with by the caller."""
        self._end_step()
        self._uncollected = None
        self._room = self._config.checkpoints_per_step

    def _preempt_all(self) -> None:
        for active in (*self._work.group.requests, *self._prefills):
            self.release(active)
        self._end_step()

    def _end_step(self) -> None:
        self._is_advanced = False
        self._extractions.end()
        self._step = None
        self._work, self._prefills, self._planned = NOBODY_DECODES, (), {}

    def _chunk(
        self,
        active: ActiveRequest,
        start: int,
        num_tokens: int,
        *,
        is_first: bool = False,
        lease: SlotLease | None = None,
    ) -> Chunk:
        """Return a chunk of a request, of which no checkpoints are planned yet."""
        end = start + num_tokens
        tokens, samples = active.tokens(start, end), end == active.num_known
        writable = active.num_shared_blocks * self._block_size
        return Chunk(active.row, start, tokens, writable, is_first, samples, lease)

    def _blocks_between(self, active: ActiveRequest, first: int, end: int) -> list[int]:
        """Return KV blocks of a request from the ``first`` to before the ``end``."""
        blocks: list[int] = self._rows.block_tables[active.row, first:end].tolist()
        return blocks

    def _wants_state_at(self, active: ActiveRequest, boundary: int) -> bool:
        """Say whether the caller wants a state at a block boundary."""
        wanted = active.checkpoint_positions and active.wanted_boundaries(self._block_size)
        return bool(wanted) and boundary in wanted

    def _chunk_tokens(
        self, active: ActiveRequest, num_tokens: int, chunk_tokens: int | None, token_room: int
    ) -> int:
        """Return how many tokens a chunk has of those that are left."""
        if chunk_tokens is not None:
            num_tokens = min(check_int("chunk_tokens", chunk_tokens, minimum=1), num_tokens)
        if num_tokens > token_room:
            raise TokenCapacityError(
                num_tokens, token_room, f"give {active.request_id!r} a shorter chunk"
            )
        return num_tokens

    def _cancel_load(self, load: PlannedLoad | None) -> None:
        """Give back the rows that a load reads, if they were not."""
        if load is not None and self._tiering is not None:
            self._tiering.cancel(load)

    def _pin(self, blocks: tuple[int, ...] | list[int], state_blocks: int) -> SlotLease | None:
        if not state_blocks:
            return None
        return self._slots.pin_slots([self._slots.get_slot(blocks[state_blocks - 1])])[0]

    def _unpin(self, lease: SlotLease | None) -> None:
        if lease is not None:
            self._slots.unpin_slots([lease])

    def _plan(self, active: ActiveRequest, chunk: Chunk, hashes: BlockHashes | None = None) -> None:
        """Plan the checkpoints of a chunk."""
        if not self._config.enable_prefix_caching:
            return
        end = chunk.end
        positions = self._positions(active, chunk.start, end)
        # After the placement, which may be an embedder's and raise: a policy cannot forget again.
        if hashes is not None:
            self._tell_policies(active, hashes)
        if not positions:
            return
        without_room = max(0, len(positions) - (positions[-1] == end) - self._room)
        self._slots.skipped_checkpoints_total += without_room
        # The later ones save more, so they are kept when the buffers are short.
        kept = self._reserve(active, positions[without_room:], self._propose)
        if kept and kept[-1].position == end:
            chunk.boundary = kept.pop()
        self._room -= len(kept)
        chunk.inside = tuple(kept)

    def _reserve_for_load(self, active: ActiveRequest, position: int) -> Checkpoint:
        """Reserve a slot for a state that is loaded; one can be had."""
        assert active.prompt_seen is None, "the policy hears of a prompt when its chunk is planned"
        [kept] = self._reserve(active, [position], self._propose)
        return kept._replace(is_loaded=True)

    def _plan_decode(self, active: ActiveRequest) -> None:
        """Plan the checkpoint of a decoding request that may end a block in the next step."""
        # Two steps are shorter than a block: there is one boundary at most.
        computed = self._rows.num_computed.item(active.row)
        position = (computed // self._block_size + 1) * self._block_size
        if not self._config.save_decode_states and not self._wants_state_at(active, position):
            return
        if active.checkpoint is None:
            kept = self._reserve(active, [position], self._propose_unfinished)
            active.checkpoint = kept[0] if kept else None

    def _cancel_decode(self, active: ActiveRequest) -> None:
        """Give back the checkpoint of a decoding request, if it has one."""
        checkpoint, active.checkpoint = active.checkpoint, None
        if checkpoint is not None:
            self._cancel((checkpoint,))

    def _cancel_planned(self, chunk: Chunk) -> None:
        """Give back what was planned for a chunk that will not be committed."""
        self._cancel(chunk.checkpoints)
        self._room += len(chunk.inside)

    def _publish_blocks(self, active: ActiveRequest) -> list[int | None]:
        """Publish a request's complete blocks."""
        first, hashes = active.num_published, active.hashes
        end = min(self._rows.num_computed.item(active.row) // self._block_size, len(hashes))
        if first >= end:
            return []
        parent_hash = hashes[first - 1] if first else None
        blocks, tokens, extra = self._blocks_between(active, first, end), None, None
        if self._kv_blocks.listeners.wants(Stored) and active.request.tells_tokens is not False:
            tokens = active.tokens(first * self._block_size, end * self._block_size)
            extra = active.extra_keys(first, end, self._block_size)
        holders = self._kv_blocks.register_kv_block_hashes(
            blocks,
            hashes[first:end],
            parent_hash=parent_hash,
            tokens=tokens,
            extra_keys=extra,
        )
        active.num_published = end
        if self._tiering is not None:
            self._tiering.offer_blocks(active, first, blocks, holders)
        return holders

    def _publish(self, active: ActiveRequest, checkpoints: Sequence[Checkpoint]) -> None:
        """Publish a request's complete blocks and the states that a step saved.

        A block whose content another request published first stays private, and its state goes to
        that other block if it has none. So a state is findable only beside the keys and values of
        the same prefix.
        """
        holders = self._publish_blocks(active)
        first = active.num_published - len(holders)
        if not checkpoints:
            return
        hashes = active.hashes
        slots, blocks, saved_tokens = [], [], []
        private, computed = [], {}
        for checkpoint in checkpoints:
            num_saved = self._count_saved_tokens(active, checkpoint)
            index = checkpoint.position // self._block_size - 1
            if index >= first:
                block = holders[index - first]
            else:
                block = self._kv_blocks.find_block(hashes[index], hashes.digest(index))
            if block is None:
                private.append(checkpoint.slot)
                continue
            slots.append(checkpoint.slot)
            blocks.append(block)
            saved_tokens.append(num_saved)
            if not checkpoint.is_loaded:
                computed[checkpoint.slot] = checkpoint.position
        if private:
            self._slots.cancel_reserved(private)
        if slots:
            kept = self._slots.commit_reserved(slots, blocks, saved_tokens=saved_tokens)
            stored = [a for a, b in zip(kept, slots, strict=True) if a == b and a in computed]
            self._counters["saved_states"] += len(stored)
            if self._tiering is not None:
                is_decoding = active.status is RequestStatus.DECODING
                propose = self._propose_unfinished if is_decoding else self._propose
                knows_prompts = active.prompt_seen_below is not None
                for slot in stored:
                    position = computed[slot]
                    proposal = propose(active, position) if knows_prompts else None
                    self._tiering.offer_state(active, position, slot, proposal)

    def _supersede_decode_state(self, active: ActiveRequest, boundary: Checkpoint) -> None:
        """Free the state that a request saved one block earlier while decoding.

        The next turn of the conversation resumes from the newest, so one slot does for an answer
        of any length. States that somebody asked for by position stay, and so do those that other
        requests have used or are about to.
        """
        if self._wants_state_at(active, boundary.position):
            return
        old, active.decode_lease = active.decode_lease, self._lease_of(boundary)
        if old is None or not self._slots.is_current(old):
            return
        if self._consumed.get(old.slot) != old and not self._slots.is_pinned(old.slot):
            self._slots.invalidate_block(old.block_id)

    def _count_saved_tokens(self, active: ActiveRequest, checkpoint: Checkpoint) -> int:
        """Return the tokens that a state saves beyond the one before it.

        The later ones count from this one; not from the newest of a decoding request, which the
        next one supersedes.
        """
        saved_tokens = checkpoint.position - active.state_position
        is_decoding = active.status is RequestStatus.DECODING
        if not is_decoding or self._wants_state_at(active, checkpoint.position):
            active.state_position = checkpoint.position
        return saved_tokens

    def _lease_of(self, boundary: Checkpoint) -> SlotLease | None:
        """Name the state that ``boundary`` saved; None if another request had saved it before."""
        if self._slots.slot_to_block[boundary.slot] < 0:
            return None
        lease = self._slots.pin_slots([boundary.slot])[0]
        self._slots.unpin_slots([lease])
        return lease

    def _facts_of(self, active: ActiveRequest, hashes: BlockHashes) -> PromptFacts:
        """Describe a request that was just matched, for a policy that knows prompts."""
        num_tokens, request = active.num_known, active.request
        most_skipped = max(0, num_tokens - self._config.min_computed_tokens)
        return PromptFacts(
            hashes,
            self._block_size,
            active.num_shared_blocks,
            most_skipped // self._block_size,
            request.will_continue,
            request.source,
        )

    def _tell_policies(self, active: ActiveRequest, hashes: BlockHashes) -> None:
        """Tell of a request that was just matched the policies that know prompts."""
        if not self._slots.knows_prompts:  # then no policy of a tier does
            return
        facts = self._facts_of(active, hashes)
        active.prompt_seen = self._slots.begin_request(facts)
        if self._tiering is not None and self._tiering.host.knows_prompts:
            active.prompt_seen_below = self._tiering.host.begin_request(facts)

    def _positions(self, active: ActiveRequest, start: int, end: int) -> list[int]:
        """Return where states of a request are worth saving after ``start`` and up to ``end``."""
        block, num_tokens = self._block_size, active.num_known
        num_required = -(-num_tokens // block)
        facts = PlacementFacts(num_tokens, block, active.num_shared_blocks, num_required)
        wanted = placed_positions(self._placement, facts)
        if active.checkpoint_positions:
            wanted |= active.wanted_boundaries(block)
        return sorted([p for p in wanted if start < p <= end])

    def _propose(self, active: ActiveRequest, position: int) -> StateProposal:
        """Describe a state inside a prompt, or at its end."""
        block, end = self._block_size, active.num_known
        # Of a prompt that ends with a block, the next to last is what the same prompt resumes from.
        if position >= (end - 1) // block * block:
            kind: Literal["end", "branch", "inside"] = "end"
        else:
            kind = "branch" if position == active.num_shared_blocks * block else "inside"
        is_asked = not self._refuses or self._wants_state_at(active, position)
        return StateProposal(active.prompt_seen, position // block, kind, is_asked)

    def _propose_unfinished(self, active: ActiveRequest, position: int) -> StateProposal:
        """Describe the state at the end of a block that a decoding request has begun."""
        depth = position // self._block_size
        is_asked = not self._refuses or self._wants_state_at(active, position)
        return StateProposal(active.prompt_seen, depth, "end", is_asked, active.hashes[: depth - 1])

    def _reserve(
        self,
        active: ActiveRequest,
        positions: Sequence[int],
        propose: Callable[[ActiveRequest, int], StateProposal],
    ) -> list[Checkpoint]:
        proposals = None
        if active.prompt_seen is not None:
            proposals = [propose(active, position) for position in positions]
            if active.prompt_seen_below is not None and self._tiering is not None:
                # What is worth a row but no slot must have one until it is copied.
                wanted = self._tiering.wants(active, proposals)
                proposals = [
                    each._replace(is_asked=True) if is_wanted else each
                    for each, is_wanted in zip(proposals, wanted, strict=True)
                ]
        tables, size = self._rows.block_tables, self._block_size
        blocks = [tables.item(active.row, p // size - 1) for p in positions]
        slots = self._slots.reserve_slots(blocks, proposals)
        pairs = zip(positions, slots, strict=True)
        return [Checkpoint(p, slot) for p, slot in pairs if slot is not None]

    def _cancel(self, checkpoints: Sequence[Checkpoint]) -> None:
        if checkpoints:
            self._slots.cancel_reserved([checkpoint.slot for checkpoint in checkpoints])

    def fork(
        self, active: ActiveRequest, new_ids: Iterable[Hashable], last_tokens: object
    ) -> Forks:
        """Make requests that stand where one that decodes does; all of them, or none.

        Full KV blocks are shared. The unfinished one is copied in one launch for all forks and all
        attention layers, the live state in another one for all recurrent layers.
        """
        ids = self._read_new_ids(new_ids)
        table, row = self._rows, active.row
        computed = table.num_computed.item(row)
        if table.num_in_doubt[row] or table.num_tokens.item(row) == computed:
            raise StepOrderError(
                f"the device alone knows the last tokens of request {active.request_id!r}: "
                "collect_step brings them, then it can be forked"
            )
        tokens = self._read_last_tokens(active, last_tokens, len(ids))
        table.check_forks_fit(len(ids))
        if not ids:
            return Forks((), row, (), None, ())
        copiers = self._make_copiers()
        self._guard.is_changing = True
        rows, blocks = table.fork(row, tokens, ids)
        forks: list[ActiveRequest] = []
        try:
            chain = table.computed_chain(active)
            for request_id, token, new_row in zip(ids, tokens.tolist(), rows, strict=True):
                fork = active.fork(request_id, token, chain)
                fork.row = new_row
                fork.num_shared_blocks = computed // table.block_size_tokens
                forks.append(fork)
            source_block = None
            if blocks:
                source_block = table.block_tables.item(row, computed // table.block_size_tokens)
            made = Forks(tuple(ids), row, tuple(rows), source_block, tuple(blocks))
            with outside:
                self._copy_to_forks(copiers, made, tokens)
            for fork in forks:
                table.set_status(fork, RequestStatus.DECODING)
            table.add_all(forks)
        except BaseException:
            for fork in forks:
                table.set_status(fork, RequestStatus.PREEMPTED)
            for new_row in reversed(rows):
                table.give_back(new_row)
            raise
        self._counters["forks"] += len(forks)
        return made

    def _copy_to_forks(
        self, copiers: tuple[StateCopier, StateCopier | None], made: Forks, tokens: Int64Array
    ) -> None:
        """Enqueue the copies of the live state and of the unfinished block."""
        copy_states, copy_kv = copiers
        row, rows = made.source_row, list(made.rows)
        if self._speculation is None:
            copy_states.copy([row] * len(rows), rows)
        else:
            copy_states.copy(*self._speculation.fork(row, rows, tokens))
        if copy_kv is not None and made.source_block is not None:
            copy_kv.copy([made.source_block] * len(rows), list(made.blocks))

    def _read_new_ids(self, new_ids: Any) -> list[Hashable]:
        """Return ids that new requests can have."""
        if isinstance(new_ids, (str, bytes)):  # whose items are characters
            raise InvalidArgumentError(f"new_ids must be several ids, got one: {new_ids!r}")
        ids: list[Hashable] = as_items("new_ids", new_ids, "request ids")
        for request_id in ids:
            self._rows.check_new(request_id)
        if len(set(ids)) < len(ids):
            raise InvalidArgumentError(f"new_ids must be different, got {ids}")
        return ids

    def _read_last_tokens(self, active: ActiveRequest, last_tokens: Any, count: int) -> Int64Array:
        """Return the token that each fork computes next."""
        if last_tokens is None:
            return np.full(count, self._rows.last_tokens.item(active.row), dtype=np.int64)
        tokens = self._preparer.read_tokens(last_tokens)
        if len(tokens) != count:
            raise InvalidArgumentError(
                f"last_tokens must be one token for each of the {count} new ids, got {len(tokens)}"
            )
        return tokens.astype(np.int64)

    def _make_copiers(self) -> tuple[StateCopier, StateCopier | None]:
        """Make what copies live states, and KV blocks, when they are first needed."""
        if self._copiers is None:
            states = [*self._live_states.tensors.values()]
            copy_kv = None
            if self._kv_cache is not None:
                blocks = [self._kv_cache.flatten(0, 1)]
                copy_kv = StateCopier(blocks, blocks)
            self._copiers = StateCopier(states, states), copy_kv
        return self._copiers

    def check_invariants(self, chunks: Sequence[Chunk]) -> None:
        """Prove that the room left is what the planned chunks leave."""
        planned = sum(len(chunk.inside) for chunk in chunks)
        room = self._config.checkpoints_per_step
        if self._room + planned != room:
            raise InvariantError(
                f"{planned} checkpoints are planned and there is room for {self._room} more, "
                f"but the buffers hold {room}"
            )


def _describe_unwritten(
    layers: Sequence[int | str], requests: Sequence[ActiveRequest]
) -> UnwrittenStateWarning:
    where = ", ".join(
        f"{active.request_id!r} at {[c.position for c in active.current_chunk.inside]}"
        for active in requests[:8]
    )
    return UnwrittenStateWarning(
        f"The layers {list(layers)} have not handed over their states in this step, so those of "
        f"requests {where} tokens are not published, and what could be skipped is computed again. "
        "Every Mamba layer must call context.extract_checkpoint_states in every step with prefill "
        "chunks, those of other kinds context.extract_states, and where a CUDA graph is replayed, "
        "the engine context.count_extractions. Further ones are only counted, in "
        "stats().unwritten_states"
    )
