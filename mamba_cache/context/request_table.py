"""The request table: unfinished requests by id, and as rows of arrays with their KV blocks."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from mamba_cache._checks import as_items
from mamba_cache.cache import BlockHashChain, KVBlockAllocator
from mamba_cache.cache.rows import as_rows
from mamba_cache.cache.sequence import TokenArray
from mamba_cache.config import CacheConfig
from mamba_cache.context.requests import ActiveRequest, Chunk, RequestStatus
from mamba_cache.errors import (
    BlockCapacityError,
    InvalidArgumentError,
    InvariantError,
    RequestCapacityError,
    StepOrderError,
    TokenCapacityError,
    UnknownRequestError,
)

__all__ = ["DecodingGroup", "Int64Array", "RequestTable"]

Int64Array: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class DecodingGroup:
    """The decoding requests of a batch, used again from step to step until the set changes."""

    def __init__(self, requests: Sequence[ActiveRequest]) -> None:
        self.requests = tuple(requests)  # in batch order
        self.ids = tuple([active.request_id for active in requests])
        self.rows: Int64Array = np.array([active.row for active in requests], dtype=np.int64)


_ONE: Int64Array = np.array(1)  # adding it takes half the time of adding a Python int
_NO_TOKENS: TokenArray = np.zeros(0, dtype=np.int32)
_NO_REQUESTS = DecodingGroup(())


class RequestTable:
    """Requests by id and by row, and the chunks and decoding rows of the next step.

    A row has all fields that a steady decoding step reads and writes. So such a step is a few
    whole-array operations for any number of requests.
    """

    def __init__(self, kv_blocks: KVBlockAllocator, config: CacheConfig) -> None:
        self._kv_blocks = kv_blocks
        self._max_tokens = config.max_tokens
        self._max_decode_tokens = config.max_decode_tokens
        self.block_size_tokens = config.block_size_tokens
        self._is_cached = config.enable_prefix_caching
        max_requests = config.max_requests
        self.block_tables: np.ndarray[Any, np.dtype[np.int32]] = np.empty(
            (max_requests, config.max_blocks_per_request), dtype=np.int32
        )
        # The other fields of a row, all 0 while the row is free. num_uncollected is the maximum
        # number of tokens that the row gets from an uncollected step.
        self._progress: Int64Array = np.zeros((8, max_requests), dtype=np.int64)
        self.num_blocks, self.num_tokens, self.num_computed = self._progress[:3]
        self.num_uncollected, self.last_tokens, self.next_events = self._progress[3:6]
        self.place_shifts, self._tail_shifts = self._progress[6:]
        # Single elements are read and written several times faster through memoryviews.
        self._num_blocks_at, self._next_event_at = self.num_blocks.data, self.next_events.data
        self.saves_states: np.ndarray[Any, np.dtype[np.bool_]] = np.zeros(max_requests, dtype=bool)
        self.table_stamps: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self.num_releases: Int64Array = np.zeros(max_requests, dtype=np.int64)
        # By row: tokens not yet copied to ``ActiveRequest.generated``, about one block. The token
        # at a position has the index: position + the row's ``_tail_shifts``.
        self._tail_width = self.block_size_tokens + self._max_decode_tokens
        self._tails = np.zeros(max_requests * self._tail_width, dtype=np.int32)
        self.scheduled_chunks: dict[int, Chunk] = {}  # by row
        self.num_scheduled_tokens = self.num_planned_checkpoints = 0  # sums over these chunks
        self.decoding_rows: set[int] = set()  # rows of decoding requests
        self.stamp = 0  # grows whenever a row's table is written
        self._requests: dict[Hashable, ActiveRequest] = {}
        # All decoding requests, and those named last; None once decoding_rows has changed.
        self._group: DecodingGroup | None = None
        self._named: DecodingGroup | None = None
        self.reset()

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(list(self._requests.values()))

    def check_new(self, request_id: Hashable) -> None:
        """Check that an id can be given to a new request."""
        try:
            in_use = request_id in self._requests
        except TypeError:
            raise InvalidArgumentError(
                f"request ids must be hashable, got {type(request_id).__name__}"
            ) from None
        if in_use:
            raise InvalidArgumentError(f"request id {request_id!r} is in use")

    def add(self, *requests: ActiveRequest) -> None:
        """Add requests whose ids ``check_new`` accepted."""
        for active in requests:
            self._requests[active.request_id] = active

    def remove(self, active: ActiveRequest) -> None:
        """Remove a finished request."""
        del self._requests[active.request_id]

    def find(self, request_id: Hashable, *allowed: RequestStatus) -> ActiveRequest:
        """Return the request with an id; check that its status is one of ``allowed``, if given."""
        try:
            active = self._requests[request_id]
        except (KeyError, TypeError):
            raise UnknownRequestError(
                f"there is no request {request_id!r}: it was never added, or it is finished"
            ) from None
        if allowed and active.status not in allowed:
            raise StepOrderError(
                f"request {request_id!r} is {active.status.value}; this call takes one that is "
                f"{' or '.join(status.value for status in allowed)}"
            )
        return active

    def scheduled_requests(self) -> list[ActiveRequest]:
        """Return the requests that have a chunk for the next step, oldest first."""
        scheduled: list[ActiveRequest] = []
        if not self.scheduled_chunks:
            return scheduled
        newest = reversed(self._requests.values())  # all scheduled requests are among these
        while len(scheduled) < len(self.scheduled_chunks):
            active = next(newest)
            if active.status is RequestStatus.SCHEDULED:
                scheduled.append(active)
        return scheduled[::-1]

    def decoding_group(self, request_ids: Iterable[Hashable] | None) -> DecodingGroup:
        """Return the decoding requests with these ids, or all."""
        if request_ids is None:
            if self._group is None:
                self._group = _NO_REQUESTS
                if self.decoding_rows:
                    self._group = DecodingGroup(self._with_status(RequestStatus.DECODING))
            return self._group
        ids = as_items("decode_ids", request_ids, "request ids")
        found = [self.find(request_id, RequestStatus.DECODING) for request_id in ids]
        chosen = tuple(dict.fromkeys(found))
        if self._named is None or chosen != self._named.requests:
            self._named = DecodingGroup(chosen)
        return self._named

    def holding_memory(self) -> list[ActiveRequest]:
        """Return the requests that have a row and blocks."""
        return [a for a in self._requests.values() if a.status is not RequestStatus.PREEMPTED]

    def token_room(self) -> int:
        """Return the number of tokens that the next step still has room for.

        Room for the maximum number of tokens of every decoding request is kept free.
        """
        decoding = len(self.decoding_rows) * self._max_decode_tokens
        return self._max_tokens - self.num_scheduled_tokens - decoding

    @property
    def num_free_rows(self) -> int:
        """Number of requests that could still be added."""
        return len(self._free_rows)

    def take(
        self,
        shared_blocks: Sequence[int],
        num_tokens: int,
        name: object,
    ) -> int:
        """Take a row, and hold cached blocks and allocate new ones for ``num_tokens`` tokens."""
        if not self._free_rows:
            raise RequestCapacityError(1, 0, "finish or preempt a request first")
        shared = as_rows(shared_blocks)
        missing = max(0, -(-num_tokens // self.block_size_tokens) - len(shared))
        assert len(shared) + missing <= self.block_tables.shape[1], "longer than any request"
        if len(shared):
            self._kv_blocks.hold(shared)
        try:
            blocks = self._allocate(missing, [(name, num_tokens)])
        except BaseException:
            if len(shared):
                self._kv_blocks.release(shared)
            raise
        row = heapq.heappop(self._free_rows)
        self.block_tables[row, : len(shared)] = shared
        self._append(row, len(shared), blocks)
        return row

    def fork(
        self, row: int, last_tokens: Int64Array, names: Sequence[object]
    ) -> tuple[list[int], list[int]]:
        """Take rows for forks of the request in ``row``; return the rows and their own blocks."""
        count, num_free = len(names), len(self._free_rows)
        required, room = count * self._max_decode_tokens, self.token_room()
        if self.scheduled_chunks and required > room:
            hint = "chunks are scheduled for it: fork before them, or when it is committed"
            raise TokenCapacityError(required, max(0, room), hint)
        if count > num_free:
            raise RequestCapacityError(count, num_free, "finish or preempt a request first")
        computed = self.num_computed.item(row)
        num_shared, rest = divmod(computed, self.block_size_tokens)
        shared = self.block_tables[row, :num_shared].tolist()
        rows: Int64Array = np.array(heapq.nsmallest(count, self._free_rows), dtype=np.int64)
        own = self._allocate(count, ((name, computed) for name in names)) if rest else []
        try:
            if shared:
                self._kv_blocks.hold(as_rows(shared * count))
        except BaseException:
            self._kv_blocks.release(as_rows(own))
            raise
        for _ in names:
            heapq.heappop(self._free_rows)
        self.block_tables[rows, :num_shared] = self.block_tables[row, :num_shared]
        if own:
            self.block_tables[rows, num_shared] = own
        self._stamp_rows(rows)
        self.num_blocks[rows] = num_shared + bool(own)
        self.start(rows, computed + 1, computed)
        self.last_tokens[rows] = last_tokens
        self.saves_states[rows] = self.saves_states[row]
        return rows.tolist(), own

    def start(self, rows: Any, num_tokens: int, num_computed: int) -> None:
        """Set the numbers of tokens of a row, or of an array of rows, just taken."""
        self.num_tokens[rows], self.num_computed[rows] = num_tokens, num_computed
        self._tail_shifts[rows] = rows * self._tail_width - num_tokens

    def release(self, row: int) -> None:
        """Release a row and its blocks; published blocks stay findable."""
        blocks = self.blocks_of(row).astype(np.intp)
        self.block_tables[row, : len(blocks)] = self._kv_blocks.dummy_block_id
        self._stamp_rows(row)
        self._progress[:, row] = 0
        self.num_releases[row] += 1
        # A heap: the lowest free row is taken next. So a few requests are in the first rows, which
        # an embedder may compute as one batch.
        heapq.heappush(self._free_rows, row)
        self._kv_blocks.release(blocks)

    def grow(self, row: int, num_tokens: int, name: object) -> None:
        """Allocate the blocks that a row lacks for ``num_tokens`` tokens."""
        held = self.num_blocks.item(row)
        missing = -(-num_tokens // self.block_size_tokens) - held
        if missing > 0:
            self._append(row, held, self._allocate(missing, [(name, num_tokens)]))

    def open_blocks(
        self, group: DecodingGroup, ends: Int64Array, due: Int64Array
    ) -> tuple[list[int], list[int]]:
        """Allocate the blocks that decoding requests lack up to ``ends``: at most one each.

        ``due`` are indices of requests that reach their next event in this step. Return those that
        save a state in this step, and those that have tokens beyond their current block.
        """
        size, rows = self.block_size_tokens, group.rows
        events = list(zip(due.tolist(), rows[due].tolist(), ends[due].tolist(), strict=True))
        lacking = [
            (row, (group.ids[place], end))
            for place, row, end in events
            if end > self._num_blocks_at[row] * size
        ]
        if lacking:
            blocks = self._allocate(len(lacking), (named for _, named in lacking))
            for (row, _), block in zip(lacking, blocks, strict=True):
                held = self._num_blocks_at[row]
                self.block_tables[row, held] = block
                self._num_blocks_at[row] = held + 1
                self._stamp_rows(row)
        saving, crossing = [], []
        for place, row, end in events:
            event, computed = self._next_event_at[row], self.num_computed.item(row)
            if computed > event:
                current = computed // size
                self._next_event_at[row] = event = current * size + (size - 1)
                self.place_shifts[row] = (self.block_tables.item(row, current) - current) * size
            # Without drafts the previous step has certainly reached an earlier event.
            is_reached = self._max_decode_tokens == 1 and end > event + 1
            if end > event and self.saves_states[row] and not is_reached:
                saving.append(place)
            if end > event + 1:
                crossing.append(place)
        return saving, crossing

    def shrink(self, row: int, num_tokens: int, min_blocks: int) -> None:
        """Release the blocks after ``num_tokens`` tokens, but keep at least ``min_blocks``."""
        held = max(-(-num_tokens // self.block_size_tokens), min_blocks)
        surplus = self.blocks_of(row)[held:].astype(np.intp)
        self.block_tables[row, held:] = self._kv_blocks.dummy_block_id
        self._stamp_rows(row)
        self.num_blocks[row] = held
        self._kv_blocks.release(surplus)

    def reset(self) -> None:
        """Remove all requests; the owner of the KV blocks resets their allocator."""
        self._requests.clear()
        self._group = self._named = None
        self._free_rows = list(range(len(self.block_tables)))  # a heap
        self.block_tables[:] = self._kv_blocks.dummy_block_id
        self._stamp_rows(np.arange(len(self.block_tables)))
        self._progress.fill(0)
        self.saves_states.fill(False)
        self.scheduled_chunks.clear()
        self.num_scheduled_tokens = self.num_planned_checkpoints = 0
        self.decoding_rows.clear()

    def set_status(self, active: ActiveRequest, status: RequestStatus) -> None:
        """Set the status of a request with a row, and update the records of the next step."""
        active.status, row = status, active.row
        is_decoding = status is RequestStatus.DECODING
        if is_decoding != (row in self.decoding_rows):
            self._group = self._named = None
            (self.decoding_rows.add if is_decoding else self.decoding_rows.discard)(row)
        if (chunk := self.scheduled_chunks.pop(row, None)) is not None:
            self.num_scheduled_tokens -= len(chunk.token_ids)
            self.num_planned_checkpoints -= len(chunk.inside)
        if status is RequestStatus.SCHEDULED:
            chunk = self.scheduled_chunks[row] = active.current_chunk
            self.num_scheduled_tokens += len(chunk.token_ids)
            self.num_planned_checkpoints += len(chunk.inside)

    def collect(self, active: ActiveRequest) -> TokenArray:
        """Move a request's newest tokens from its row, if any, to ``generated``; return them."""
        row = active.row
        if row < 0:
            return _NO_TOKENS
        first, num_tokens = row * self._tail_width, self.num_tokens.item(row)
        tokens: TokenArray = self._tails[first : num_tokens + self._tail_shifts.item(row)]
        active.generated.frombytes(tokens.tobytes())
        self._tail_shifts[row] = first - num_tokens
        return tokens

    def take_over(self, active: ActiveRequest) -> None:
        """Move a request's newest tokens to ``generated``, and hash the blocks they complete."""
        tokens = self.collect(active)
        if self._is_cached:
            chain, num_known = active.chain, active.num_known
            if chain.num_tokens < num_known - len(tokens):  # collect was called by itself before
                tokens = active.tokens(chain.num_tokens, num_known)
            chain.append_checked(tokens)

    def computed_chain(self, active: ActiveRequest) -> BlockHashChain:
        """Return a hash chain of a request's computed tokens only; ``take_over`` comes first."""
        self.take_over(active)
        if not self._is_cached:
            return active.chain
        computed = self.num_computed.item(active.row)
        # The request's own chain may include the last token, which a fork may replace.
        chain = active.chain.copy(computed // self.block_size_tokens)
        chain.append(active.tokens(chain.num_tokens, computed))
        return chain

    def blocks_of(self, row: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the blocks of a row: a view."""
        return self.block_tables[row, : self.num_blocks.item(row)]

    def append_token(self, rows: Int64Array, tokens: Int64Array) -> Int64Array:
        """Append one sampled token to each row; return the number that each row had before."""
        lengths: Int64Array = self.num_tokens[rows]
        # Tokens of the array's own dtype are stored in a third of the time.
        self._tails[lengths + self._tail_shifts[rows]] = tokens.astype(np.int32)
        self.last_tokens[rows] = tokens
        self.num_tokens[rows] = lengths + _ONE
        return lengths

    def append_tokens(self, rows: Int64Array, tokens: Int64Array, counts: Int64Array) -> None:
        """Append to each row the first ``counts`` of its sampled tokens [n, width]."""
        count, width = tokens.shape
        lengths, first = self.num_tokens[rows], np.arange(0, count * width, width)
        # All tokens are written; those not taken lie after the row's end, where there is room.
        places = (lengths + self._tail_shifts[rows] - first).repeat(width)
        places += np.arange(count * width)
        new = tokens.ravel()
        self._tails[places] = new
        last = new[first + (counts - 1)]
        if np.count_nonzero(counts) < count:
            last = np.where(counts > 0, last, self.last_tokens[rows])
        self.last_tokens[rows] = last
        lengths += counts
        self.num_tokens[rows] = lengths

    def check_invariants(self, pinned: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """Check that rows, tables, reference counts and the records of the next step agree."""
        self.check_rows([active.row for active in self.holding_memory()], pinned)
        decoding = {active.row for active in self._with_status(RequestStatus.DECODING)}
        scheduled = self._with_status(RequestStatus.SCHEDULED)
        due = {active.row: active.chunk for active in scheduled}
        if (decoding, due) != (self.decoding_rows, self.scheduled_chunks):
            raise InvariantError(
                f"rows {sorted(decoding)} decode and {due} are scheduled, but "
                f"{self.decoding_rows} and {self.scheduled_chunks} are marked so"
            )
        counted = self.num_scheduled_tokens, self.num_planned_checkpoints
        chunks = self.scheduled_chunks.values()
        total = sum(len(chunk.token_ids) for chunk in chunks), sum(len(c.inside) for c in chunks)
        if counted != total:
            raise InvariantError(
                f"{total} tokens and checkpoints are scheduled, but {counted} are counted"
            )

    def check_request(self, active: ActiveRequest, *, is_in_step: bool) -> None:
        """Check that a request's status, chunk and checkpoint agree."""
        name, status, row = active.request_id, active.status, active.row
        computed = self.num_computed.item(row)
        if status is RequestStatus.DECODING:
            num_tokens = self.num_tokens.item(row)
            # 0: the first token after the prompt is not collected yet.
            if active.chunk is not None or num_tokens - computed not in (0, 1):
                raise InvariantError(
                    f"request {name!r} decodes, with {num_tokens} tokens of which "
                    f"{computed} are computed, and chunk {active.chunk}"
                )
            if active.checkpoint is not None and not (is_in_step or self.num_uncollected[row]):
                raise InvariantError(f"request {name!r} is in no step, but has {active.checkpoint}")
        elif (active.chunk is not None) != (status is RequestStatus.SCHEDULED):
            raise InvariantError(f"request {name!r} is {status.value} with chunk {active.chunk}")
        elif active.chunk is not None and active.chunk.start != computed:
            raise InvariantError(
                f"request {name!r} has computed {computed} tokens, but its chunk begins at "
                f"{active.chunk.start}"
            )

    def check_rows(
        self, rows: Sequence[int], pinned: np.ndarray[Any, np.dtype[np.int32]] | int = 0
    ) -> None:
        """Check that rows, tables and reference counts agree."""
        if sorted([*rows, *self._free_rows]) != list(range(len(self.block_tables))):
            raise InvariantError(f"rows are lost or held twice: {sorted(rows)}")
        references = np.zeros(self._kv_blocks.pool_size, dtype=np.int64) + pinned
        dummy, taken = self._kv_blocks.dummy_block_id, set(rows)
        for row in range(len(self.block_tables)):
            held = self.blocks_of(row)
            rest = self.block_tables[row, len(held) :]
            is_lost = bool(len(held)) and row not in taken
            if is_lost or (held == dummy).any() or (rest != dummy).any():
                raise InvariantError(f"the block table of row {row} is not its blocks")
            np.add.at(references, held, 1)
        self._check_events()
        counts = np.asarray(self._kv_blocks.block_ref_counts)
        if (references[:dummy] != counts[:dummy]).any():
            wrong = np.flatnonzero(references[:dummy] != counts[:dummy]).tolist()
            raise InvariantError(
                f"reference counts of blocks {wrong[:8]} do not match the requests"
            )

    def _check_events(self) -> None:
        """Check the next events of decoding rows, and the shifts from position to KV place."""
        rows: Int64Array = np.array(sorted(self.decoding_rows), dtype=np.int64)
        size, expected = self.block_size_tokens, self.next_events[rows]
        rows, expected = rows[expected > 0], expected[expected > 0]
        blocks = (expected + 1) // size - 1
        places = self.block_tables[rows, blocks].astype(np.int64) * size
        if (
            (self.place_shifts[rows] != places - blocks * size).any()
            or ((expected + 1) % size != 0).any()
            or (self.num_blocks[rows] <= blocks).any()
        ):
            raise InvariantError(f"events of rows {rows.tolist()} are expected at {expected}")

    def _append(self, row: int, held: int, blocks: list[int]) -> None:
        self.block_tables[row, held : held + len(blocks)] = blocks
        self._stamp_rows(row)
        self.num_blocks[row] = held + len(blocks)

    def _stamp_rows(self, rows: Any) -> None:
        """Set new stamps for a row, or an array of rows, whose tables were written."""
        self.stamp += len(self.table_stamps)
        self.table_stamps[rows] = self.stamp + rows

    def _allocate(self, num_blocks: int, needs: Iterable[tuple[object, int]]) -> list[int]:
        """Take KV blocks for requests; ``needs`` has the id of each and its number of tokens."""
        try:
            return self._kv_blocks.take(num_blocks)
        except BlockCapacityError as error:
            names, lengths = zip(*needs, strict=True)
            listed = ", ".join(map(repr, names[:8]))
            listed += " and others" if len(names) > 8 else ""
            raise BlockCapacityError(
                error.required,
                error.available,
                f"for request {listed}, of up to {max(lengths)} tokens; finish or preempt another "
                "request, give this one a shorter chunk if its prompt is still to be computed, or "
                "make the context with more blocks (num_kv_blocks or kv_cache_gb)",
            ) from None

    def _with_status(self, status: RequestStatus) -> list[ActiveRequest]:
        return [active for active in self._requests.values() if active.status is status]
