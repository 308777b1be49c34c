"""The rows of host memory of one kind: their entries, leases and eviction order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache._checks import require_all
from mamba_cache._guard import CallGuard, guarded
from mamba_cache.cache import hash_id_of
from mamba_cache.cache.rows import NONE, EvictionQueue, Rows, as_rows
from mamba_cache.errors import DoubleFreeError
from mamba_cache.tiers.entry import (
    HEADER_BYTES,
    EntryFacts,
    EntryHeader,
    Refusal,
    payload_digest,
)
from mamba_cache.tiers.memory import RowMemory

__all__ = ["HostRows", "RowLease"]


@dataclass(frozen=True, slots=True, eq=False)
class RowLease:
    """A reader's or a writer's claim on a row."""

    row: int
    generation: int  # of the row: each new entry raises it
    facts: EntryFacts  # of the entry, as the holder derived them
    writes: bool
    is_lower: bool  # whether a lower tier holds the lease
    rows: HostRows = field(repr=False)  # that the row belongs to


class HostRows:
    """Rows of one entry each, with its header and bytes; entries are found by their full digest.

    An entry is written by ``reserve``, a copy and ``complete``, and read by ``read``, a copy and
    ``release``. The copy's caller compares the bytes with the checksums behind them in the row.
    This class compares every header field with the request's facts, and the checksums with the
    header.

    A held row is *awaited* (being written, not findable), read, or *leaving* (removed during a read
    or write: not findable, and free when the last lease ends). A row that is read or written never
    gets another entry. Without a policy that knows prompts the least recently used entry is
    evicted first; of entries used in one call, the last one named.
    """

    def __init__(
        self,
        memory: RowMemory,
        dropped: Counter[str],
        refused: Counter[str],
        *,
        policy: Any = None,
    ) -> None:
        self._guard = CallGuard(self)
        self.memory, num_rows = memory, memory.num_rows
        self.headers: npt.NDArray[np.uint8] = np.zeros((num_rows, HEADER_BYTES), np.uint8)
        self.policy = policy  # a ``PrefixSlotPolicy``: its slots are rows here
        self._dropped, self._refused = dropped, refused  # entries without a row; mismatches
        self.generations: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self._used_at: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        # The row itself where its entry can be found, else NONE.
        self._names: npt.NDArray[np.int64] = np.full(num_rows, NONE, np.int64)
        self.rows = Rows("row", num_rows, self._names)
        self.rows.num_rows = self.rows.num_free = 0  # rows appear with their slabs
        self.evicted_total = self.stored_total = 0
        self._digests: list[bytes] = [b""] * num_rows
        self._row_of: dict[bytes, int] = {}
        self._awaited: dict[bytes, RowLease] = {}
        self._queue = EvictionQueue()
        self._leases: dict[RowLease, None] = {}
        self._clock = 0
        if policy is not None:
            policy.reset(num_rows)

    def join(self, guard: CallGuard) -> None:
        """Share the guard of the object that these rows are part of."""
        self._guard = guard

    def __len__(self) -> int:
        """Number of entries that can be found."""
        return len(self._row_of)

    def __contains__(self, digest: bytes) -> bool:
        """Whether an entry can be found."""
        return digest in self._row_of

    @property
    def leases(self) -> list[RowLease]:
        """All open leases, of writers and of readers."""
        return list(self._leases)

    def add_slab(self, slab: torch.Tensor) -> None:
        """Add the next slab of memory, [bytes] uint8; its rows become free, in their order."""
        first = self.rows.num_rows
        self.rows.num_rows = first + self.memory.add_slab(slab)
        self.rows.push([*reversed(range(first, self.rows.num_rows))])

    @guarded(nests=True, changes=True)
    def begin_request(self, facts: Any) -> Any:
        """Pass a request to the policy; return the handle of its prompt for proposals."""
        return None if self.policy is None else self.policy.on_request(facts)

    @guarded(nests=True, changes=True)
    def would_admit(self, proposals: Sequence[Any]) -> list[bool]:
        """Ask a policy that knows prompts which states are worth a row now, without a change."""
        assert self.policy is not None, "the caller has checked"
        accepted: list[bool]
        accepted, _ = self.policy.admit(proposals, self.rows.num_free, self._evictable())
        self.policy.withdraw()
        return accepted

    @guarded(nests=True, changes=True)
    def reserve(
        self, facts: EntryFacts, *, proposal: Any = None, for_lower: bool = False
    ) -> RowLease | None:
        """Lease a row to write an entry: a free row, or one whose entry is evicted.

        Return None if the entry is there or awaited, or, counted, if no row can be had. The policy
        may refuse a state with a ``proposal``, as in ``would_admit``.
        """
        digest = facts.key.digest
        if digest in self._row_of or digest in self._awaited:
            return None
        policy = None if proposal is None else self.policy
        if not (self.rows.num_free or self._queue):
            self._dropped["no_row"] += 1
            return None
        if policy is None:
            if not self.rows.num_free:
                self._evict()
        elif not self._admit(policy, proposal):
            self._dropped["refused"] += 1
            policy.on_reserved([])
            return None
        [row] = self.rows.take(1).tolist()
        if policy is not None:
            policy.on_reserved([row])
        self.generations[row] += 1
        lease = self._awaited[digest] = self._lease(row, facts, writes=True, is_lower=for_lower)
        return lease

    @guarded(nests=True, changes=True)
    def complete(self, lease: RowLease) -> bool:
        """Publish an entry whose bytes and checksums are in its row; return whether it is kept."""
        row, digest = lease.row, lease.facts.key.digest
        is_kept = self._awaited.get(digest) is lease
        if is_kept:
            header = EntryHeader(self._digest_of_checksums(row), lease.generation)
            self.headers[row] = np.frombuffer(header.to_bytes(lease.facts), np.uint8)
            del self._awaited[digest]
            self._digests[row] = digest
            self._row_of[digest] = self._names[row] = row
        self.release(lease)
        self.stored_total += is_kept
        if is_kept:
            self._use([row])
            if self.policy is not None:
                self.policy.on_published([row], [hash_id_of(digest)], [lease.facts.prefix_tokens])
        return is_kept

    @guarded(nests=True, changes=True)
    def read(self, facts: EntryFacts, *, for_lower: bool = False) -> RowLease | Refusal:
        """Find an entry and hold its row until ``release``; remove an entry that does not match.

        This compares everything but the bytes. The copy's caller compares those.
        """
        digest = facts.key.digest
        row = self._row_of.get(digest, NONE)
        refusal = Refusal.MISSING if row == NONE else self._refusal(row, facts)
        if refusal is not None:
            self.remove(digest)
            self._refused[refusal.value] += 1
            return refusal
        self._queue.discard(self.rows.hold(as_rows([row])).tolist())
        return self._lease(row, facts, writes=False, is_lower=for_lower)

    @guarded(nests=True, changes=True)
    def release(self, lease: RowLease, reason: str | None = None) -> None:
        """End a reader's lease, or a writer's that failed, once nothing writes the row.

        ``reason`` is the name under which a failed write is counted.
        """
        row, digest = lease.row, lease.facts.key.digest
        if lease not in self._leases:
            raise DoubleFreeError(f"{lease} has ended already, or belongs to other rows")
        del self._leases[lease]
        if self._awaited.get(digest) is lease:
            del self._awaited[digest]
            self._release_from_policy(row)
        if len(self.rows.release(as_rows([row]))):  # no other lease, and the entry can be found
            self._queue.push(row, self._used_at.item(row))
        if reason is not None:
            self._dropped[reason] += 1

    @guarded(nests=True, changes=True)
    def refuse(self, lease: RowLease, refusal: Refusal) -> None:
        """End the lease of a reader that found damaged bytes; remove the entry."""
        if self._names[lease.row] != NONE:
            self._forget(lease.row)
        self._refused[refusal.value] += 1
        self.release(lease)

    @guarded(nests=True, changes=True)
    def remove(self, digest: bytes) -> bool:
        """Make an entry unfindable; return whether it was there. Its readers keep their leases."""
        row = self._row_of.get(digest)
        if row is None:
            return False
        self._queue.discard([row])
        self._forget(row)
        if not self.rows.refs[row]:
            self.rows.push([row])
        return True

    def use(self, leases: Iterable[RowLease]) -> None:
        """Record that a hit used entries: consecutive ones of a prefix, from its start."""
        rows = [lease.row for lease in leases if self._names[lease.row] != NONE]
        self._use(rows)
        if self.policy is not None:
            self.policy.on_consumed(rows)

    def is_held(self, lease: RowLease) -> bool:
        """Return whether a lease is open."""
        return lease in self._leases

    def buffer(self, lease: RowLease) -> memoryview:
        """Return the bytes of a row, checksums included, for the lease's holder."""
        return self.memory.array(lease.row).data

    def reset(self, keep: Iterable[RowLease] | None = None) -> None:
        """Make all entries unfindable. Rows being read or written are freed when that ends."""
        self._leases = dict.fromkeys(self._leases if keep is None else keep)
        self._row_of.clear()
        self._awaited.clear()
        self._queue.clear()
        self._names.fill(NONE)
        self.rows.refs[:] = self._references()
        self.rows.num_free = 0
        self.rows.push((self.rows.refs[: self.rows.num_rows] == 0).nonzero()[0][::-1].tolist())
        self.evicted_total = 0
        if self.policy is not None:
            self.policy.reset(self.memory.num_rows)

    def check_invariants(self) -> None:
        """Check that the bookkeeping is consistent."""
        cached = set((self._names != NONE).nonzero()[0].tolist())
        unread = set(self._evictable().tolist())
        awaited = {lease.row for lease in self._awaited.values()}
        statements = {
            "each digest finds a row of that digest": (
                all(self._digests[row] == digest for digest, row in self._row_of.items())
                and sorted(self._row_of.values()) == sorted(cached)
            ),
            "nothing is both cached and awaited": (
                not self._awaited.keys() & self._row_of.keys() and not awaited & cached
            ),
            "each row that can be used has memory": self.rows.num_rows == self.memory.num_ready,
            "references are those of leases": np.array_equal(self._references(), self.rows.refs),
            "each awaited entry has a writer": all(
                lease in self._leases and lease.writes for lease in self._awaited.values()
            ),
            "the queue holds exactly the cached rows without a lease": (
                all(row in self._queue for row in unread) and len(self._queue) == len(unread)
            ),
        }
        require_all(statements | self.rows.statements())
        if self.policy is not None:
            self.policy.check_invariants([*cached, *awaited])

    def _references(self) -> npt.NDArray[np.intp]:
        """Count the leases of each row."""
        return np.bincount([lease.row for lease in self._leases], minlength=self.memory.num_rows)

    def _lease(self, row: int, facts: EntryFacts, *, writes: bool, is_lower: bool) -> RowLease:
        lease = RowLease(row, self.generations.item(row), facts, writes, is_lower, self)
        self._leases[lease] = None
        return lease

    def _refusal(self, row: int, facts: EntryFacts) -> Refusal | None:
        """Return the first mismatch between a row and the facts, bytes not compared."""
        header = EntryHeader.read(self.headers[row].data, facts)
        if isinstance(header, Refusal):
            return header
        if header.generation != self.generations[row]:
            return Refusal.GENERATION
        is_same = header.payload_tag == self._digest_of_checksums(row)
        return None if is_same else Refusal.PAYLOAD_DIGEST

    def _digest_of_checksums(self, row: int) -> bytes:
        """Return the digest of a row's checksums, which its header holds."""
        return payload_digest(self.memory.array(row)[self.memory.checksums])

    def _use(self, rows: Sequence[int]) -> None:
        """Stamp rows, the first one as the most recent."""
        self._clock += len(rows)
        for age, row in enumerate(rows):
            self._used_at[row] = self._clock - age
            if not self.rows.refs[row]:
                self._queue.push(row, self._clock - age)

    def _evict(self) -> None:
        """Evict the entry that is worth least; there is one without a lease."""
        if self.policy is None:
            row, _ = self._queue.pop()
        else:
            rows = self._evictable()
            [row] = self.policy.choose(1, rows, rows.astype(np.int32), self)
        self._evict_row(row)

    def _admit(self, policy: Any, proposal: Any) -> bool:
        """Return whether a policy grants a state a row, and evict entries for it."""
        is_accepted: bool
        [is_accepted], victims = policy.admit([proposal], self.rows.num_free, self._evictable())
        for row in victims:
            self._evict_row(row)
        return is_accepted

    def _evictable(self) -> npt.NDArray[np.int64]:
        """Return the cached rows without a lease, ascending."""
        rows: npt.NDArray[np.int64]
        [rows] = ((self._names != NONE) & (self.rows.refs == 0)).nonzero()
        return rows

    def _evict_row(self, row: int) -> None:
        """Evict the entry of a row."""
        self.remove(self._digests[row])
        self.evicted_total += 1

    def _forget(self, row: int) -> None:
        """Make a cached row unfindable."""
        del self._row_of[self._digests[row]]
        self._names[row] = NONE
        self._release_from_policy(row)

    def _release_from_policy(self, row: int) -> None:
        if self.policy is not None:
            self.policy.on_removed([row])
