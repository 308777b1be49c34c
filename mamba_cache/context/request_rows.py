"""Requests as rows of arrays: what every step needs of each, and its KV blocks."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from mamba_cache.blocks import KVBlockAllocator
from mamba_cache.errors import BlockCapacityError, InvariantError, RequestCapacityError

__all__ = ["Int64Array", "RequestRows"]

Int64Array: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class RequestRows:
    """The rows and KV blocks of requests.

    A row holds what a steady decoding step reads and writes, so that such a step is a handful of
    operations on whole arrays, however many requests there are.

    Args:
        kv_blocks: Where blocks come from.
        max_requests: Rows.
        max_blocks: KV blocks that one request can have.
        block_size_tokens: Tokens of a block.
        max_decode_tokens: Tokens of one decoding request in one step.

    Attributes:
        block_size_tokens: As given.
        block_tables: [max_requests, max_blocks] int32, CPU: the KV blocks of the request in each
            row; unused entries name the dummy block.
        table_stamps: [max_requests] int64: a number for each row of ``block_tables``, another one
            whenever it is written.
        num_blocks: [max_requests] int64: blocks that each row has.
        num_tokens: [max_requests] int64: tokens known so far, the prompt's included.
        num_computed: [max_requests] int64: tokens whose effect is in the live state.
        num_in_doubt: [max_requests] int64: tokens that were computed in a step of which the device
            alone knows how many became part of the sequence.
        last_tokens: [max_requests] int64: the token that a decoding request computes next.
        next_events: [max_requests] int64: a step that leaves a decoding request with no more tokens
            computed than this needs no block for it, ends none, and saves no state of it.
        saves_states: [max_requests] bool: whether a state of a decoding request may be saved where
            it ends a block.
        place_shifts: [max_requests] int64: what to add to a position to have where its key and
            value go, as block id * block size + offset; up to ``next_events``.
        num_releases: [max_requests] int64: how often each row was given back: what a step sampled
            for its request before counts no longer.
        scheduled: Rows whose requests have a chunk for the next step, with its tokens.
        num_scheduled_tokens: Tokens of those chunks together.
        decoding: Rows whose requests decode.
        num_changes: How often ``decoding`` has changed.
    """

    def __init__(
        self,
        kv_blocks: KVBlockAllocator,
        *,
        max_requests: int,
        max_blocks: int,
        block_size_tokens: int,
        max_decode_tokens: int = 1,
    ) -> None:
        self._kv_blocks = kv_blocks
        self.block_size_tokens = block_size_tokens
        self.block_tables: np.ndarray[Any, np.dtype[np.int32]] = np.empty(
            (max_requests, max_blocks), dtype=np.int32
        )

        def zeros() -> Int64Array:
            return np.zeros(max_requests, dtype=np.int64)

        self.table_stamps, self.num_blocks = zeros(), zeros()
        self.num_tokens, self.num_computed, self.num_in_doubt = zeros(), zeros(), zeros()
        self.last_tokens, self.next_events, self.place_shifts = zeros(), zeros(), zeros()
        self.num_releases = zeros()
        self.saves_states: np.ndarray[Any, np.dtype[np.bool_]] = np.zeros(max_requests, dtype=bool)
        # The newest tokens by position: of the unfinished block, and those that end it.
        self._tail_width = block_size_tokens + max_decode_tokens
        self._tails = np.zeros((max_requests, self._tail_width), dtype=np.int32)
        self.scheduled: dict[int, int] = {}
        self.num_scheduled_tokens = 0
        self.decoding: set[int] = set()
        self.num_changes = 0
        self._stamp = 0
        self.reset()

    @property
    def num_free_rows(self) -> int:
        """Requests that could still be added."""
        return len(self._free_rows)

    def check_row_available(self) -> None:
        """Check that a request can be added.

        Raises:
            RequestCapacityError: No row is free.
        """
        if not self._free_rows:
            raise RequestCapacityError(1, 0, "finish or preempt a request first")

    def take(self, shared_blocks: Sequence[int], num_tokens: int, name: object) -> int:
        """Take a row with cached blocks and new ones.

        Args:
            shared_blocks: Cached blocks of the prompt, from its start.
            num_tokens: Tokens of the sequence that must have room.
            name: Of the request, for the message.

        Returns:
            The row, of which nothing but the blocks is set.

        Raises:
            RequestCapacityError: No row is free.
            BlockCapacityError: Not enough KV blocks; nothing is held then.
        """
        self.check_row_available()
        shared = list(shared_blocks)
        missing = max(0, self._blocks_for(num_tokens) - len(shared))
        held = len(shared) + missing
        assert held <= self.block_tables.shape[1], "longer than any request"
        if shared:
            self._kv_blocks.retain_memory_blocks(shared)
        try:
            blocks = self._allocate(missing, [name], num_tokens)
        except BaseException:
            if shared:
                self._kv_blocks.release_memory_blocks(shared)
            raise
        row = self._free_rows.pop()
        self._append(row, 0, shared + blocks)
        return row

    def fork(
        self, row: int, last_tokens: Int64Array, names: Sequence[object]
    ) -> tuple[list[int], list[int]]:
        """Take rows for requests that go on from where that of another row stands.

        Args:
            row: Of a request that decodes. They share the blocks that it has filled.
            last_tokens: [n] the token that each of them computes next.
            names: Of the n requests, for the message.

        Returns:
            The rows; and for each the block that it has of its own, in the place of the one that
            ``row`` has filled in part, or none at all if ``row`` stands at a block boundary.

        Raises:
            RequestCapacityError: Not enough rows are free.
            BlockCapacityError: Not enough KV blocks; nothing is held then.
        """
        count, num_free = len(names), len(self._free_rows)
        if count > num_free:
            raise RequestCapacityError(count, num_free, "finish or preempt a request first")
        computed = self.num_computed.item(row)
        num_shared, rest = divmod(computed, self.block_size_tokens)
        shared = self.block_tables[row, :num_shared].tolist()
        rows: Int64Array = np.array(self._free_rows[: -count - 1 : -1])
        own = self._allocate(count, names, computed) if rest else []
        try:
            if shared:
                self._kv_blocks.retain_memory_blocks(shared, count)
        except BaseException:
            self._kv_blocks.release_memory_blocks(own)
            raise
        del self._free_rows[-count:]
        self.block_tables[rows, :num_shared] = self.block_tables[row, :num_shared]
        if own:
            self.block_tables[rows, num_shared] = own
        self._stamp_rows(rows)
        self.num_blocks[rows] = num_shared + bool(own)
        self.num_tokens[rows], self.num_computed[rows] = computed + 1, computed
        self.last_tokens[rows] = last_tokens
        self.saves_states[rows] = self.saves_states[row]
        return rows.tolist(), own

    def give_back(self, row: int) -> None:
        """Take a row and its blocks back; cached blocks stay findable."""
        blocks = self.blocks_of(row).tolist()
        self.block_tables[row, : len(blocks)] = self._kv_blocks.dummy_block_id
        self._stamp_rows(row)
        for array in (
            self.num_blocks, self.num_tokens, self.num_computed, self.num_in_doubt,
            self.next_events,
        ):  # fmt: skip
            array[row] = 0
        self.num_releases[row] += 1
        # The lowest comes next, so that few requests lie in the first rows, which an embedder may
        # compute as one batch.
        bisect.insort(self._free_rows, row, key=operator.neg)
        self._kv_blocks.release_memory_blocks(blocks)

    def grow(self, row: int, num_tokens: int, name: object) -> None:
        """Give one row the blocks that it lacks.

        Args:
            row: The row.
            num_tokens: Tokens of its sequence that must have room.
            name: Of the request, for the message.

        Raises:
            BlockCapacityError: Not enough KV blocks; it has those that it had.
        """
        held = self.num_blocks.item(row)
        missing = self._blocks_for(num_tokens) - held
        if missing > 0:
            self._append(row, held, self._allocate(missing, [name], num_tokens))

    def grow_by_one(self, rows: Int64Array, num_tokens: int, names: Iterable[object]) -> None:
        """Give each of several rows one block more, or none of them any.

        Args:
            rows: Rows that need another block.
            num_tokens: Tokens of the longest of their sequences.
            names: Of their requests, for the message.

        Raises:
            BlockCapacityError: Not enough KV blocks for all.
        """
        blocks = self._allocate(len(rows), names, num_tokens)
        held = self.num_blocks[rows]
        self.block_tables[rows, held] = blocks
        self._stamp_rows(rows)
        self.num_blocks[rows] = held + 1

    def grow_few_by_one(self, rows: list[int], num_tokens: int, names: Iterable[object]) -> None:
        """Do the same for a few rows, one after the other once there are blocks for all."""
        blocks = self._allocate(len(rows), names, num_tokens)
        for row, block in zip(rows, blocks, strict=True):
            self._append(row, self.num_blocks.item(row), [block])

    def num_tokens_held(self, row: int) -> int:
        """Count the tokens that a row's blocks hold when they are full."""
        return self.num_blocks.item(row) * self.block_size_tokens

    def shrink(self, row: int, num_tokens: int, least: int) -> None:
        """Take back the blocks past those that ``num_tokens`` tokens fill, but for ``least``."""
        held = max(self._blocks_for(num_tokens), least)
        surplus = self.blocks_of(row)[held:].tolist()
        self.block_tables[row, held:] = self._kv_blocks.dummy_block_id
        self._stamp_rows(row)
        self.num_blocks[row] = held
        self._kv_blocks.release_memory_blocks(surplus)

    def reset(self) -> None:
        """Forget all requests; the KV blocks' allocator is reset by its owner."""
        self._free_rows = list(range(len(self.block_tables)))[::-1]
        self.block_tables[:] = self._kv_blocks.dummy_block_id
        self._stamp_rows(np.arange(len(self.block_tables)))
        for array in (
            self.num_blocks, self.num_tokens, self.num_computed, self.num_in_doubt,
            self.next_events, self.place_shifts, self.saves_states, self.last_tokens, self._tails,
        ):  # fmt: skip
            array[:] = 0
        self.scheduled.clear()
        self.num_scheduled_tokens = 0
        self.decoding.clear()
        self.num_changes += 1

    def mark(self, row: int, *, num_due: int, is_decoding: bool) -> None:
        """Say what the request of a row does in the next step.

        Args:
            row: The row.
            num_due: Tokens of its scheduled chunk; 0: it has none.
            is_decoding: Whether it decodes.
        """
        if is_decoding != (row in self.decoding):
            self.num_changes += 1
        (self.decoding.add if is_decoding else self.decoding.discard)(row)
        self.num_scheduled_tokens += num_due - self.scheduled.pop(row, 0)
        if num_due:
            self.scheduled[row] = num_due

    def blocks_of(self, row: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the blocks of a row: a view."""
        return self.block_tables[row, : self.num_blocks.item(row)]

    def expect_events(self, rows: Int64Array) -> None:
        """Set ``next_events`` and ``place_shifts`` of decoding rows that have all their blocks."""
        size = self.block_size_tokens
        blocks = self.num_computed[rows] // size
        first = blocks * size
        self.next_events[rows] = first + (size - 1)
        self.place_shifts[rows] = self.block_tables[rows, blocks].astype(np.int64) * size - first

    def expect_event(self, row: int) -> int:
        """Do the same for one row, if its last event is over; return its next one."""
        event, computed = self.next_events.item(row), self.num_computed.item(row)
        if computed <= event:
            return event
        size = self.block_size_tokens
        block = computed // size
        event = block * size + (size - 1)
        self.next_events[row] = event
        self.place_shifts[row] = (self.block_tables.item(row, block) - block) * size
        return event

    def append_token(self, rows: Int64Array, tokens: Int64Array) -> Int64Array:
        """Append one sampled token to each row; return how many it had before."""
        lengths: Int64Array = self.num_tokens[rows]
        self._tails[rows, lengths % self._tail_width] = tokens
        self.last_tokens[rows] = tokens
        self.num_tokens[rows] = lengths + 1
        return lengths

    def append_tokens(self, rows: Int64Array, tokens: Int64Array, counts: Int64Array) -> None:
        """Append sampled tokens.

        Args:
            rows: [n] rows.
            tokens: [n, k] tokens, k at most ``max_decode_tokens``.
            counts: [n] how many of them each row takes, from 0 to k.
        """
        count, most = tokens.shape
        lengths, first = self.num_tokens[rows], np.arange(0, count * most, most)
        # What is not taken lies beyond the end, where there is room for as many. Flat indices of
        # 64 bits are looked up several times as fast as pairs.
        columns = (lengths - first).repeat(most)
        columns += np.arange(count * most)
        columns %= self._tail_width
        columns += (rows * self._tail_width).repeat(most)
        new = tokens.ravel()
        self._tails.reshape(-1)[columns] = new
        last = new[first + (counts - 1)]
        if np.count_nonzero(counts) < count:
            last = np.where(counts > 0, last, self.last_tokens[rows])
        self.last_tokens[rows] = last
        lengths += counts
        self.num_tokens[rows] = lengths

    def newest_tokens(self, row: int, start: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the sampled tokens of a row from a position on, which is in its last block."""
        end = self.num_tokens.item(row)
        width = self._tail_width
        tail: np.ndarray[Any, np.dtype[np.int32]] = self._tails[row]
        if start >= end:
            return tail[:0]
        first, last = start % width, (end - 1) % width + 1
        if first < last:
            return tail[first:last]
        return np.concatenate((tail[first:], tail[:last]))

    def scrub(self) -> None:
        """Clear tokens that no step needs; requests have taken over their newest ones before."""
        self._tails[:] = 0
        decoding = sorted(self.decoding)
        kept = self.last_tokens[decoding]
        self.last_tokens[:] = 0
        self.last_tokens[decoding] = kept

    def check_invariants(self, rows: Sequence[int]) -> None:
        """Prove that rows, tables and reference counts agree.

        Args:
            rows: Those of the requests that hold memory.

        Raises:
            InvariantError: They do not.
        """
        if sorted([*rows, *self._free_rows]) != list(range(len(self.block_tables))):
            raise InvariantError(f"rows are lost or held twice: {sorted(rows)}")
        references = np.zeros(self._kv_blocks.pool_size, dtype=np.int64)
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
        """Prove that no event of a decoding row would be missed, nor a place be another's.

        Raises:
            InvariantError: One would.
        """
        rows: Int64Array = np.array(sorted(self.decoding), dtype=np.int64)
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
        """Say that the tables of a row, or of an array of rows, were written."""
        self._stamp += len(self.table_stamps)
        self.table_stamps[rows] = self._stamp + rows

    def _allocate(self, num_blocks: int, names: Iterable[object], num_tokens: int) -> list[int]:
        """Take KV blocks.

        Args:
            num_blocks: How many.
            names: Of the requests that need them.
            num_tokens: Tokens of the longest sequence among theirs that must have room.

        Raises:
            BlockCapacityError: There are not enough; it says for whom, and what to do.
        """
        try:
            return self._kv_blocks.allocate_memory_blocks(num_blocks)
        except BlockCapacityError as error:
            requests = list(names)
            listed = ", ".join(map(repr, requests[:8]))
            listed += " and others" if len(requests) > 8 else ""
            raise BlockCapacityError(
                error.required,
                error.available,
                f"for request {listed}, of up to {num_tokens} tokens; finish or preempt another "
                "request, give this one a shorter chunk if its prompt is still to be computed, or "
                "make the context with more blocks (num_kv_blocks or kv_cache_gb)",
            ) from None

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size_tokens)
