"""Admission: match requests, reserve their memory, plan their chunks, take all of it back."""

from __future__ import annotations

from dataclasses import replace

from mamba_cache._checks import check_int
from mamba_cache.blocks import BlockHashes, KVBlockAllocator
from mamba_cache.config import CacheConfig
from mamba_cache.context.checkpoints import Checkpoints
from mamba_cache.context.matching import MissReason, PrefixMatch, find_prefix
from mamba_cache.context.request_table import RequestTable
from mamba_cache.context.requests import (
    ActiveRequest,
    Admission,
    PlannedLoad,
    RequestStatus,
)
from mamba_cache.context.tiering import Tiering
from mamba_cache.errors import SequenceLengthError, TokenCapacityError
from mamba_cache.slots import MambaSlotAllocator, SlotLease

__all__ = ["Admitter"]


class Admitter:
    """The way of requests into the next step, and out of it."""

    def __init__(
        self,
        config: CacheConfig,
        kv_blocks: KVBlockAllocator,
        slots: MambaSlotAllocator,
        rows: RequestTable,
        checkpoints: Checkpoints,
        *,
        tiering: Tiering | None = None,
    ) -> None:
        self._tiering = tiering
        self._config = config
        self._kv_blocks = kv_blocks
        self._slots = slots
        self._rows = rows
        self._checkpoints = checkpoints

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
            block_size_tokens=self._config.block_size_tokens,
            min_computed_tokens=self._config.min_computed_tokens,
        )

    def admit(
        self,
        active: ActiveRequest,
        chunk_tokens: int | None,
        token_room: int,
    ) -> None:
        """Match a request, give it memory, and plan its first chunk for the next step."""
        num_tokens, hashes = active.num_tokens, active.hashes
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
        active.enter_row(row, num_tokens=match.prompt_tokens, num_computed=match.skip_tokens)
        active.admission = admission
        active.state_position = match.skip_tokens if state_position is None else state_position
        active.num_published = match.kv_matched_blocks
        # What is loaded is written by the load, and by nothing else.
        active.num_shared_blocks = match.kv_matched_blocks + match.loaded_blocks
        active.chunk = active.chunk_from(match.skip_tokens, num_tokens, is_first=True, lease=lease)
        active.status = RequestStatus.SCHEDULED
        try:
            if load is not None:
                load.checkpoint = self._checkpoints.reserve_for_load(active, match.skip_tokens)
                active.chunk.load = load
            self._checkpoints.plan(active, active.chunk, hashes)
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
        start, positions = active.num_computed, active.checkpoint_positions
        left = active.num_tokens - start
        num_tokens = self._chunk_tokens(active, left, chunk_tokens, token_room)
        self._rows.grow(active.row, start + num_tokens, active.request_id)
        try:
            active.checkpoint_positions += checkpoint_positions
            chunk = active.chunk_from(start, num_tokens)
            self._checkpoints.plan(active, chunk)
            active.chunk = chunk
        except BaseException:
            active.checkpoint_positions = positions
            self._rows.shrink(active.row, start, active.num_shared_blocks)
            raise
        active.status = RequestStatus.SCHEDULED

    def renew_restore(self, active: ActiveRequest) -> None:
        """Plan a chunk again if the state that it resumes from is gone."""
        lease = active.current_chunk.lease
        if lease is not None and not self._slots.is_current(lease):
            self.plan_again(active)

    def plan_again(self, active: ActiveRequest) -> None:
        """Plan a chunk again that cannot resume from the state which it was planned with.

        It starts at the farthest state that is left among the matched blocks, or at the prompt's
        beginning, and computes as many tokens as it was to, from there.
        """
        chunk = active.current_chunk
        self._checkpoints.cancel(chunk)
        # If what follows fails, nothing of the old plan may be taken back twice.
        load = chunk.load
        chunk = replace(chunk, lease=None, load=None, inside=(), boundary=None)
        active.chunk = chunk
        self._cancel_load(load)
        admission = active.current_admission
        active.num_shared_blocks = active.num_published  # blocks to be loaded are not
        shared = active.block_ids[: active.num_shared_blocks]
        state_blocks = self._slots.num_blocks_to_state(shared[: admission.state_matched_blocks])
        start = state_blocks * self._config.block_size_tokens
        lease = self._pin(shared, state_blocks)
        active.num_computed = active.state_position = start
        active.chunk = active.chunk_from(start, chunk.num_tokens, is_first=True, lease=lease)
        active.admission = replace(
            admission,
            state_matched_blocks=state_blocks,
            skip_tokens=start,
            miss_reason=None if start else MissReason.NO_STATE,
            loaded_blocks=0,
            loads_state=False,
        )
        self._checkpoints.plan(active, active.chunk)

    def end_chunk(self, active: ActiveRequest) -> None:
        """End a committed chunk: its source may be evicted from now on."""
        chunk = active.current_chunk
        self._checkpoints.end(chunk)
        self._unpin(chunk.lease)
        active.chunk = None

    def release(self, active: ActiveRequest) -> None:
        """Take back everything that a request holds, what was planned for it included."""
        chunk, active.chunk = active.chunk, None
        active.status = RequestStatus.PREEMPTED
        if chunk is not None:
            self._checkpoints.cancel(chunk)
            self._unpin(chunk.lease)
            self._cancel_load(chunk.load)
        self._checkpoints.cancel_decode(active)
        active.prompt_seen = None  # it may have grown since; its next admission tells of it anew
        active.num_shared_blocks = 0
        self._rows.give_back(active.leave_row())

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
