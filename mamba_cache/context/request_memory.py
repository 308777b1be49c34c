"""The memory of running requests: rows of live state and KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mamba_cache.blocks import KVBlockAllocator
from mamba_cache.context.requests import ActiveRequest
from mamba_cache.errors import BlockCapacityError, InvariantError, RequestCapacityError

__all__ = ["RequestMemory"]


class RequestMemory:
    """Gives requests their rows and KV blocks, and takes them back.

    Args:
        kv_blocks: Where blocks come from.
        max_requests: Rows.
        max_blocks: KV blocks that one request can have.
        block_size_tokens: Tokens of a block.

    Attributes:
        block_tables: [max_requests, max_blocks] int32, CPU: the KV blocks of the request in each
            row; unused entries name the dummy block.
    """

    def __init__(
        self,
        kv_blocks: KVBlockAllocator,
        *,
        max_requests: int,
        max_blocks: int,
        block_size_tokens: int,
    ) -> None:
        self._kv_blocks = kv_blocks
        self._block_size = block_size_tokens
        self._free_rows = list(range(max_requests))[::-1]
        self.block_tables: np.ndarray[Any, np.dtype[np.int32]] = np.full(
            (max_requests, max_blocks), kv_blocks.dummy_block_id, dtype=np.int32
        )

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

    def admit(self, active: ActiveRequest, shared_blocks: Sequence[int], num_tokens: int) -> None:
        """Give a request a row, the cached blocks that it shares, and new blocks.

        Args:
            active: The request; its row, blocks and shared blocks are set.
            shared_blocks: Cached blocks of its prompt, from the start.
            num_tokens: Tokens of the sequence that must have room.

        Raises:
            RequestCapacityError: No row is free.
            BlockCapacityError: Not enough KV blocks; nothing is held then.
        """
        self.check_row_available()
        shared = list(shared_blocks)
        missing = max(0, self._blocks_for(num_tokens) - len(shared))
        assert len(shared) + missing <= self.block_tables.shape[1], "longer than any request"
        self._kv_blocks.retain_memory_blocks(shared)
        try:
            blocks = self._allocate(missing, [active], num_tokens)
        except BaseException:
            self._kv_blocks.release_memory_blocks(shared)
            raise
        active.row = self._free_rows.pop()
        active.block_ids = shared + blocks
        active.num_shared_blocks = len(shared)
        active.num_shared_tokens = len(shared) * self._block_size
        self.block_tables[active.row, : len(active.block_ids)] = active.block_ids

    def grow(self, needs: Sequence[tuple[ActiveRequest, int]]) -> None:
        """Give several requests the blocks that they lack, or none of them any.

        Args:
            needs: Pairs (request, tokens of its sequence that must have room).

        Raises:
            BlockCapacityError: Not enough KV blocks for all.
        """
        missing = [max(0, self._blocks_for(n) - len(active.block_ids)) for active, n in needs]
        if not any(missing):
            return
        short = [active for (active, _), count in zip(needs, missing, strict=True) if count]
        blocks = iter(self._allocate(sum(missing), short, max(n for _, n in needs)))
        for (active, _), count in zip(needs, missing, strict=True):
            held = len(active.block_ids)
            active.block_ids += [next(blocks) for _ in range(count)]
            self.block_tables[active.row, held : held + count] = active.block_ids[held:]

    def shrink(self, active: ActiveRequest, num_tokens: int) -> None:
        """Take back the blocks past those that ``num_tokens`` tokens fill."""
        held = max(self._blocks_for(num_tokens), active.num_shared_blocks)
        surplus, active.block_ids = active.block_ids[held:], active.block_ids[:held]
        self.block_tables[active.row, held:] = self._kv_blocks.dummy_block_id
        self._kv_blocks.release_memory_blocks(surplus)

    def reset(self) -> None:
        """Forget all requests; the KV blocks' allocator is reset by its owner."""
        self._free_rows = list(range(len(self.block_tables)))[::-1]
        self.block_tables[:] = self._kv_blocks.dummy_block_id

    def release(self, active: ActiveRequest) -> None:
        """Take a request's row and blocks back; cached blocks stay findable."""
        blocks, row = active.block_ids, active.row
        active.block_ids, active.row = [], -1
        active.num_shared_blocks = active.num_shared_tokens = 0
        self.block_tables[row] = self._kv_blocks.dummy_block_id
        self._free_rows.append(row)
        self._kv_blocks.release_memory_blocks(blocks)

    def check_invariants(self, requests: Sequence[ActiveRequest]) -> None:
        """Prove that rows, tables and reference counts agree with ``requests``.

        Raises:
            InvariantError: They do not.
        """
        rows = sorted([active.row for active in requests] + self._free_rows)
        if rows != list(range(len(self.block_tables))):
            raise InvariantError(f"rows are lost or held twice: {rows}")
        references = np.zeros(self._kv_blocks.pool_size, dtype=np.int64)
        dummy = self._kv_blocks.dummy_block_id
        for active in requests:
            table = self.block_tables[active.row]
            held = len(active.block_ids)
            if table[:held].tolist() != active.block_ids or (table[held:] != dummy).any():
                raise InvariantError(f"the block table of {active.request_id!r} is not its blocks")
            np.add.at(references, active.block_ids, 1)
        counts = np.asarray(self._kv_blocks.block_ref_counts)
        if (references[:dummy] != counts[:dummy]).any():
            wrong = np.flatnonzero(references[:dummy] != counts[:dummy]).tolist()
            raise InvariantError(
                f"reference counts of blocks {wrong[:8]} do not match the requests"
            )

    def _allocate(
        self, num_blocks: int, requests: Sequence[ActiveRequest], num_tokens: int
    ) -> list[int]:
        """Take KV blocks.

        Args:
            num_blocks: How many.
            requests: Who needs them.
            num_tokens: Tokens of the longest sequence among theirs that must have room.

        Raises:
            BlockCapacityError: There are not enough; it says for whom, and what to do.
        """
        try:
            return self._kv_blocks.allocate_memory_blocks(num_blocks)
        except BlockCapacityError as error:
            names = ", ".join(repr(active.request_id) for active in requests[:8])
            names += " and others" if len(requests) > 8 else ""
            raise BlockCapacityError(
                error.required,
                error.available,
                f"for request {names}, of up to {num_tokens} tokens; finish or preempt another "
                "request, give this one a shorter chunk if its prompt is still to be computed, or "
                "make the context with more blocks (num_kv_blocks or kv_cache_gb)",
            ) from None

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
