"""Plans: what requests are given for their steps, and what of it becomes findable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mamba_cache._checks import check_int
from mamba_cache.cache import BlockHashes, SlotLease
from mamba_cache.cache.sequence import Checkpoint, MissReason, PrefixIndex, PrefixMatch
from mamba_cache.config import CacheConfig
from mamba_cache.context.request_table import RequestTable
from mamba_cache.context.requests import (
    ActiveRequest,
    Admission,
    Chunk,
    PlannedLoad,
    RequestStatus,
)
from mamba_cache.context.tiering import NoTiers, Tiering
from mamba_cache.errors import SequenceLengthError, TokenCapacityError
from mamba_cache.slots import MambaSlotAllocator

__all__ = ["Planner"]


class Planner:
    """Matches requests, plans their chunks and checkpoints, and publishes what steps wrote.

    States lie at block boundaries only, which lie on the SSM chunk grid: the settings say so.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        rows: RequestTable,
        index: PrefixIndex,
        slots: MambaSlotAllocator,
        counters: Counter[str],
        tiering: Tiering | NoTiers,
    ) -> None:
        self._config = config
        self._rows = rows
        self._index = index
        self._slots = slots
        self._counters = counters
        self._tiering = tiering
        self._block_size = config.block_size_tokens
        # States that hits have used, by slot, so that there are never more than slots.
        self._consumed: dict[int, SlotLease] = {}

    def match(self, hashes: BlockHashes, num_tokens: int) -> PrefixMatch:
        """Find how much of a sequence is cached; nothing changes."""
        return self._tiering.find(self._match_on_gpu(hashes, num_tokens), hashes)

    def _match_on_gpu(self, hashes: BlockHashes, num_tokens: int) -> PrefixMatch:
        if not self._config.enable_prefix_caching:
            return PrefixMatch(num_tokens, (), 0, 0, MissReason.CACHE_DISABLED)
        return self._index.match(hashes, num_tokens, self._config.min_computed_tokens)

    def admit(self, active: ActiveRequest, chunk_tokens: int | None) -> Admission:
        """Match a request, give it memory, and plan its first chunk for the next step."""
        self._rows.take_over(active)  # of a request that is resumed
        num_tokens, hashes = active.num_known, active.hashes
        if num_tokens > self._config.max_sequence_length:
            raise SequenceLengthError(
                f"request {active.request_id!r} has {num_tokens} tokens; "
                f"max_sequence_length is {self._config.max_sequence_length}: finish it"
            )
        match = self._match_on_gpu(hashes, num_tokens)
        found, load = self._tiering.resume(active, match)
        try:
            admission = self._enter(active, found, chunk_tokens, load)
        except BaseException:
            if load is not None:
                self._tiering.cancel(load)
            raise
        active.state_position = match.skip_tokens
        self._tiering.offer_used(active, found.state_matched_blocks)
        return admission

    def _enter(
        self,
        active: ActiveRequest,
        match: PrefixMatch,
        chunk_tokens: int | None,
        load: PlannedLoad | None,
    ) -> Admission:
        """Give a matched request memory, and plan its first chunk."""
        left = match.prompt_tokens - match.skip_tokens
        num_tokens = self._chunk_tokens(active, left, chunk_tokens)
        lease = None
        if load is None:
            lease = self._pin(match.block_ids, match.state_matched_blocks)
        try:
            end = match.skip_tokens + num_tokens
            row = self._rows.take(match.block_ids, end, active.request_id)
        except BaseException:
            self._unpin(lease)
            raise
        active.row = row
        self._rows.num_tokens[row] = match.prompt_tokens
        self._rows.num_computed[row] = match.skip_tokens
        found = {name: getattr(match, name) for name in PrefixMatch.__slots__}
        admission = Admission(**found, request_id=active.request_id, chunk_tokens=num_tokens)
        active.admission = admission
        active.num_initial, active.num_published = match.prompt_tokens, match.kv_matched_blocks
        # What is loaded is written by the load, and by nothing else.
        active.num_shared_blocks = match.kv_matched_blocks + match.loaded_blocks
        chunk = self._chunk(active, match.skip_tokens, num_tokens, is_first=True, lease=lease)
        active.chunk = chunk
        try:
            if load is not None:
                first = load.first_block
                load.blocks = self._blocks_between(active, first, first + load.num_blocks)
                # The policy hears of the prompt when its chunk is planned: it refuses nothing yet.
                [[reserved]] = self._reserve([(active, [match.skip_tokens])])
                load.checkpoint = reserved._replace(is_loaded=True)
                chunk.load = load
            self._plan(active, chunk, is_new=True)
        except BaseException:
            self.release(active)
            raise
        self._rows.set_status(active, RequestStatus.SCHEDULED)
        return admission

    def schedule(
        self,
        active: ActiveRequest,
        chunk_tokens: int | None,
        wanted_boundaries: frozenset[int],
    ) -> None:
        """Plan the next chunk of a request that is between two."""
        start, wanted = self._rows.num_computed.item(active.row), active.wanted_boundaries
        left = active.num_known - start
        num_tokens = self._chunk_tokens(active, left, chunk_tokens)
        self._rows.grow(active.row, start + num_tokens, active.request_id)
        try:
            active.wanted_boundaries |= wanted_boundaries
            chunk = self._chunk(active, start, num_tokens)
            self._plan(active, chunk)
        except BaseException:
            active.wanted_boundaries = wanted
            self._rows.shrink(active.row, start, active.num_shared_blocks)
            raise
        active.chunk = chunk
        self._rows.set_status(active, RequestStatus.SCHEDULED)

    def plan_again(self, active: ActiveRequest) -> None:
        """Plan a chunk again that cannot resume from the state which it was planned with.

        It starts at the farthest state that is left among the matched blocks, or at the prompt's
        beginning, and computes as many tokens as it was to, from there.
        """
        num_tokens = active.current_chunk.num_tokens
        self._drop_chunk(active)
        self._rows.set_status(active, RequestStatus.PREFILLING)
        admission = active.admission
        assert admission is not None, "only a first chunk resumes"
        active.num_shared_blocks = active.num_published  # blocks to be loaded are not
        shared = self._blocks_between(active, 0, active.num_shared_blocks)
        state_blocks = self._slots.num_blocks_to_state(shared[: admission.state_matched_blocks])
        start = state_blocks * self._block_size
        lease = self._pin(shared, state_blocks)
        self._rows.num_computed[active.row] = active.state_position = start
        chunk = self._chunk(active, start, num_tokens, is_first=True, lease=lease)
        active.chunk = chunk
        active.admission = replace(
            admission,
            state_matched_blocks=state_blocks,
            skip_tokens=start,
            miss_reason=None if start else MissReason.NO_STATE,
            loaded_blocks=0,
            loads_state=False,
        )
        self._plan(active, chunk)
        self._rows.set_status(active, RequestStatus.SCHEDULED)

    def release(self, active: ActiveRequest) -> None:
        """Take back everything that a request holds, what was planned for it included."""
        self._drop_chunk(active)
        self._rows.set_status(active, RequestStatus.PREEMPTED)
        self.cancel_decode(active)
        active.prompt_seen = None  # it may have grown since; its next admission tells of it anew
        active.num_shared_blocks = 0
        self._rows.collect(active)
        row, active.row = active.row, -1
        self._rows.give_back(row)

    def _drop_chunk(self, active: ActiveRequest) -> None:
        """Take back what is planned for a request's next chunk, if it has one."""
        chunk, active.chunk = active.chunk, None
        if chunk is not None:
            self._index.cancel(chunk.checkpoints)
            self._unpin(chunk.lease)
            if chunk.load is not None:
                self._tiering.cancel(chunk.load)

    def publish_decoded(self, decoded: Sequence[tuple[ActiveRequest, Checkpoint | None]]) -> None:
        """Publish the blocks that decoding requests have filled, and the states that they saved."""
        written: list[tuple[ActiveRequest, Sequence[Checkpoint]]] = []
        for active, checkpoint in decoded:
            self._rows.take_over(active)
            if checkpoint is not None:
                active.checkpoint = None
                written.append((active, (checkpoint,)))
            elif self._config.reuse_answers:
                written.append((active, ()))
        self._publish(written)
        saved = [(active, states[0]) for active, states in written if states]
        if saved:
            self._supersede_decode_states(saved)

    def end_chunks(self, prefills: Sequence[ActiveRequest]) -> None:
        """Publish what computed chunks wrote, and say what their requests do next."""
        chunks = [active.current_chunk for active in prefills]
        for chunk in chunks:
            self._rows.num_computed[chunk.row] = chunk.end
            if chunk.lease is not None:
                self._consumed[chunk.lease.slot] = chunk.lease
                self._slots.note_consumed([chunk.lease.slot])
        self._publish([(a, c.checkpoints) for a, c in zip(prefills, chunks, strict=True)])
        for active, chunk in zip(prefills, chunks, strict=True):
            self._unpin(chunk.lease)  # it may be evicted from now on
            active.chunk = None
            status = RequestStatus.DECODING if chunk.samples else RequestStatus.PREFILLING
            self._rows.set_status(active, status)
            if chunk.samples:
                config = self._config
                wants = config.save_decode_states or bool(active.wanted_boundaries)
                saves = config.enable_prefix_caching and config.reuse_answers and wants
                self._rows.saves_states[active.row] = saves

    def drop_inside(self, active: ActiveRequest) -> None:
        """Give up the states inside a request's chunk."""
        inside = active.current_chunk.inside
        self._index.cancel(inside)
        active.chunk = replace(active.current_chunk, inside=())
        self._rows.set_status(active, RequestStatus.SCHEDULED)
        self._counters["unwritten_states"] += len(inside)

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

    def _chunk_tokens(
        self, active: ActiveRequest, num_tokens: int, chunk_tokens: int | None
    ) -> int:
        """Return how many tokens a chunk has of those that are left."""
        token_room = self._rows.token_room()
        if chunk_tokens is not None:
            num_tokens = min(check_int("chunk_tokens", chunk_tokens, minimum=1), num_tokens)
        if num_tokens > token_room:
            raise TokenCapacityError(
                num_tokens, token_room, f"give {active.request_id!r} a shorter chunk"
            )
        return num_tokens

    def _pin(self, blocks: tuple[int, ...] | list[int], state_blocks: int) -> SlotLease | None:
        if not state_blocks:
            return None
        return self._slots.pin_slots([self._slots.get_slot(blocks[state_blocks - 1])])[0]

    def _unpin(self, lease: SlotLease | None) -> None:
        if lease is not None:
            self._slots.unpin_slots([lease])

    def _plan(self, active: ActiveRequest, chunk: Chunk, *, is_new: bool = False) -> None:
        """Plan the checkpoints of a chunk."""
        if not self._config.enable_prefix_caching:
            return
        end = chunk.end
        wanted = self._index.positions(active)
        positions = sorted([p for p in wanted if chunk.start < p <= end])
        # After the placement, which may be an embedder's and raise: a policy cannot forget again.
        if is_new:
            max_skipped = active.num_known - self._config.min_computed_tokens
            self._index.announce(active, max_skipped)
        if not positions:
            return
        room = self._config.checkpoints_per_step - self._rows.num_planned_checkpoints
        without_room = max(0, len(positions) - (positions[-1] == end) - room)
        self._slots.skipped_checkpoints_total += without_room
        # The later ones save more, so they are kept when the buffers are short.
        [kept] = self._reserve([(active, positions[without_room:])])
        if kept and kept[-1].position == end:
            chunk.boundary = kept.pop()
        chunk.inside = tuple(kept)

    def plan_decodes(
        self, requests: Sequence[ActiveRequest], places: Sequence[int]
    ) -> dict[int, Checkpoint]:
        """Plan the checkpoints of those decoding requests that may end a block in the next step.

        Return the checkpoints that there are now, by the places of their requests in the batch.
        """
        wanted: list[tuple[ActiveRequest, Sequence[int]]] = []
        for active in map(requests.__getitem__, places):
            # Two steps are shorter than a block: there is one boundary at most.
            computed = self._rows.num_computed.item(active.row)
            position = (computed // self._block_size + 1) * self._block_size
            is_wanted = self._config.save_decode_states or position in active.wanted_boundaries
            if is_wanted and active.checkpoint is None:
                wanted.append((active, [position]))
        for (active, _), kept in zip(wanted, self._reserve(wanted), strict=True):
            active.checkpoint = kept[0] if kept else None
        planned = ((place, requests[place].checkpoint) for place in places)
        return {place: checkpoint for place, checkpoint in planned if checkpoint is not None}

    def _reserve(
        self, wanted: Sequence[tuple[ActiveRequest, Sequence[int]]]
    ) -> list[list[Checkpoint]]:
        """Reserve slots for states of requests, as far as they can be had."""
        tables, size = self._rows.block_tables, self._block_size
        return self._index.reserve(
            [(a, where, [tables.item(a.row, p // size - 1) for p in where]) for a, where in wanted]
        )

    def cancel_decode(self, active: ActiveRequest) -> None:
        """Give back the checkpoint of a decoding request, if it has one."""
        checkpoint, active.checkpoint = active.checkpoint, None
        if checkpoint is not None:
            self._index.cancel((checkpoint,))

    def _publish(self, written: Sequence[tuple[ActiveRequest, Sequence[Checkpoint]]]) -> None:
        """Publish blocks that requests have filled, and the states that a step saved."""
        filled: list[tuple[ActiveRequest, list[int], Sequence[Checkpoint]]] = []
        for active, states in written:
            end = self._rows.num_computed.item(active.row) // self._block_size
            end = min(end, len(active.hashes))
            blocks = self._blocks_between(active, active.num_published, end)
            filled.append((active, blocks, states))
        self._index.publish(filled)

    def _supersede_decode_states(self, saved: Sequence[tuple[ActiveRequest, Checkpoint]]) -> None:
        """Free the states that requests saved one block earlier while decoding.

        The next turn of a conversation resumes from the newest, so one slot does for an answer of
        any length. States that somebody asked for by position stay, and so do those that other
        requests have used or are about to.
        """
        newest = self._slots.leases_of([checkpoint.slot for _, checkpoint in saved])
        superseded: list[SlotLease] = []
        for (active, checkpoint), lease in zip(saved, newest, strict=True):
            if checkpoint.position in active.wanted_boundaries:
                continue
            # None if another request had saved it before.
            old, active.decode_lease = active.decode_lease, lease
            if old is not None and self._consumed.get(old.slot) != old:
                superseded.append(old)
        if superseded:
            self._slots.free_unread(superseded)
