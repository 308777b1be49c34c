"""The rows of a tier: which entry each holds, who reads it, and which goes next. No bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mamba_cache.cache.rows import EvictionQueue
from mamba_cache.errors import DoubleFreeError, InvariantError

__all__ = ["RowLease", "RowPool"]


@dataclass(frozen=True, slots=True)
class RowLease:
    """A claim on a row: of who writes it, or of who reads it."""

    row: int
    generation: int  # which of the row's entries it is for
    number: int  # no two leases of a pool have the same
    writes: bool
    facts: Any = None  # what its holder says of the entry
    is_lower: bool = False  # whether a lower tier holds it


class RowPool:
    """Rows that hold one entry each, found by their full digest.

    A row is *free*, *arriving* (being written, not findable), *cached*, or *leaving* (given up
    while somebody still reads or writes it: not findable, and free when the last one has ended). A
    row that is read or written is never given to another entry. Without a policy that knows prompts
    the least recently used goes first, and of those used in one call the last one named.
    """

    def __init__(self, num_rows: int, *, policy: Any = None) -> None:
        self.num_rows = num_rows
        self._policy = policy  # a ``PrefixSlotPolicy``, to which a row is a slot
        self.readers: npt.NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.generations: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self._used_at: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.num_ready = 0
        self.evicted_total = self.refused_total = 0
        self._is_cached: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self._digests: list[bytes] = [b""] * num_rows
        self._row_of: dict[bytes, int] = {}
        self._arriving: dict[int, bytes] = {}
        self._awaited: dict[bytes, int] = {}
        self._leaving: set[int] = set()
        self._free: deque[int] = deque()
        self._queue = EvictionQueue()
        self._leases: dict[int, RowLease] = {}
        self.next_number = 0
        self._clock = 0
        if policy is not None:
            policy.reset(num_rows)

    def __len__(self) -> int:
        """How many entries can be found."""
        return len(self._row_of)

    def __contains__(self, digest: bytes) -> bool:
        """Whether an entry can be found."""
        return digest in self._row_of

    @property
    def leases(self) -> list[RowLease]:
        """All that are not ended: of writers and of readers."""
        return list(self._leases.values())

    def is_awaited(self, digest: bytes) -> bool:
        """Say whether an entry is being written."""
        return digest in self._awaited

    def add_rows(self, count: int) -> None:
        """Say that ``count`` more rows can be used, in the order of their numbers."""
        first, self.num_ready = self.num_ready, self.num_ready + count
        self._free.extend(range(first, self.num_ready))

    @property
    def knows_prompts(self) -> bool:
        """Whether the policy is one that must be told of requests."""
        return self._policy is not None

    def begin_request(self, facts: Any) -> Any:
        """Tell a policy that knows prompts of a request; return what stands for its prompt."""
        return None if self._policy is None else self._policy.on_request(facts)

    def would_admit(self, proposals: Sequence[Any]) -> list[bool]:
        """Ask a policy that knows prompts which states are worth a row now; nothing changes."""
        assert self._policy is not None, "the caller has looked"
        accepted: list[bool]
        accepted, _ = self._policy.admit(proposals, len(self._free), self._evictable())
        self._policy.withdraw()
        return accepted

    def reserve(
        self, digest: bytes, proposal: Any = None, facts: Any = None, *, is_lower: bool = False
    ) -> RowLease | None:
        """Take a row for an entry: a free one, or one that is given up for it."""
        if digest in self._row_of or digest in self._awaited:
            return None
        policy = None if proposal is None else self._policy
        if not (self._free or self._queue):
            return None
        if policy is None:
            if not self._free:
                self._evict()
        elif not self._admit(policy, proposal):
            self.refused_total += 1
            return None
        row = self._free.popleft()
        self.generations[row] += 1
        self._arriving[row] = digest
        self._awaited[digest] = row
        return self._lease(row, facts, writes=True, is_lower=is_lower)

    def complete(self, lease: RowLease, *, hash_id: int = 0, saved_tokens: int = 1) -> bool:
        """Make an entry findable that is written to its end."""
        self._end(lease)
        row = lease.row
        if row in self._leaving:
            self._free_leaving(row)
            return False
        digest = self._arriving.pop(row)
        del self._awaited[digest]
        self._digests[row] = digest
        self._row_of[digest] = row
        self._is_cached[row] = True
        self._use([row])
        if self._policy is not None:
            self._policy.on_published([row], [hash_id], [saved_tokens])
        return True

    def cancel(self, lease: RowLease) -> None:
        """Free the row of an entry that will not be written, once nothing writes it."""
        self._end(lease)
        row = lease.row
        if row in self._leaving:
            self._free_leaving(row)
            return
        del self._awaited[self._arriving.pop(row)]
        self._free.append(row)
        self._release_from_policy(row)

    def read(self, digest: bytes, facts: Any = None, *, is_lower: bool = False) -> RowLease | None:
        """Find an entry and keep it until ``release``; None if it cannot be found."""
        row = self._row_of.get(digest)
        if row is None:
            return None
        self._queue.discard([row])
        self.readers[row] += 1
        return self._lease(row, facts, writes=False, is_lower=is_lower)

    def release(self, lease: RowLease) -> None:
        """End a reader's lease."""
        self._end(lease)
        row = lease.row
        self.readers[row] -= 1
        if self.readers[row]:
            return
        if row in self._leaving:
            self._free_leaving(row)
        else:
            self._queue.push(row, self._used_at.item(row))

    def drop(self, lease: RowLease) -> None:
        """Make an entry that the lease's holder reads unfindable; its readers end as ever."""
        row = lease.row
        if row not in self._leaving:
            self._forget(row)
            self._leaving.add(row)

    def use(self, leases: Iterable[RowLease]) -> None:
        """Record that entries were used by a hit: consecutive ones of a prefix, from its start."""
        rows = [lease.row for lease in leases if lease.row not in self._leaving]
        self._use(rows)
        if self._policy is not None:
            self._policy.on_consumed(rows)

    def is_held(self, lease: RowLease) -> bool:
        """Say whether a lease is not ended."""
        return self._leases.get(lease.number) is lease

    def reset(self, keep: Iterable[RowLease] | None = None) -> None:
        """Make all entries unfindable. What is being read or written is free when that ends."""
        kept = list(self._leases.values() if keep is None else keep)
        self._leases = {lease.number: lease for lease in kept}
        self._leaving = {lease.row for lease in kept}
        self.readers[:] = 0
        for lease in kept:
            self.readers[lease.row] += not lease.writes
        self._row_of.clear()
        self._is_cached[:] = False
        self._arriving.clear()
        self._awaited.clear()
        self._queue.clear()
        self._free = deque(row for row in range(self.num_ready) if row not in self._leaving)
        self.evicted_total = self.refused_total = 0
        if self._policy is not None:
            self._policy.reset(self.num_rows)

    def check_invariants(self) -> None:
        """Prove that the bookkeeping agrees with itself."""
        cached = set(self._row_of.values())
        rows = sorted([*self._free, *self._arriving, *cached, *self._leaving])
        readers = np.zeros(self.num_rows, np.int32)
        writers = [lease.row for lease in self._leases.values() if lease.writes]
        for lease in self._leases.values():
            readers[lease.row] += not lease.writes
        busy = set(np.flatnonzero(readers).tolist())
        statements = {
            "free + arriving + cached + leaving is every row once": (
                rows == list(range(self.num_ready))
            ),
            "each digest finds a row of that digest": all(
                self._digests[row] == digest for digest, row in self._row_of.items()
            ),
            "cached rows are marked": set(np.flatnonzero(self._is_cached).tolist()) == cached,
            "each arriving row is awaited": self._awaited
            == {digest: row for row, digest in self._arriving.items()},
            "nothing is both cached and awaited": not self._awaited.keys() & self._row_of.keys(),
            "readers are counted right": np.array_equal(readers, self.readers),
            "what is written is arriving, or was given up": (
                len(set(writers)) == len(writers)
                and self._arriving.keys() <= set(writers) <= self._arriving.keys() | self._leaving
            ),
            "rows that leave are read or written": self._leaving <= busy.union(writers),
            "the queue holds exactly the cached rows that nobody reads": (
                {row for row in cached if row in self._queue} == cached - busy
                and len(self._queue) == len(cached - busy)
            ),
        }
        breaches = [statement for statement, holds in statements.items() if not holds]
        if breaches:
            raise InvariantError(f"does not hold: {'; '.join(breaches)}")
        if self._policy is not None:
            self._policy.check_invariants([*cached, *self._arriving])

    def _lease(self, row: int, facts: Any, *, writes: bool, is_lower: bool) -> RowLease:
        generation = self.generations.item(row)
        lease = RowLease(row, generation, self.next_number, writes, facts, is_lower)
        self.next_number += 1
        self._leases[lease.number] = lease
        return lease

    def _end(self, lease: RowLease) -> None:
        if self._leases.get(lease.number) is not lease:
            raise DoubleFreeError(f"{lease} was ended already, or is another pool's")
        del self._leases[lease.number]

    def _free_leaving(self, row: int) -> None:
        self._leaving.discard(row)
        self._free.append(row)

    def _use(self, rows: Sequence[int]) -> None:
        """Stamp rows, the first one as the most recent."""
        self._clock += len(rows)
        for age, row in enumerate(rows):
            self._used_at[row] = self._clock - age
            if not self.readers[row]:
                self._queue.push(row, self._clock - age)

    def _evict(self) -> None:
        """Give up an entry; there is one that nobody reads."""
        if self._policy is None:
            row, _ = self._queue.pop()
        else:
            rows = self._evictable()
            [row] = self._policy.choose(1, rows, rows.astype(np.int32), self)
            self._queue.discard([row])
        self._give_up(row)

    def _admit(self, policy: Any, proposal: Any) -> bool:
        """Ask a policy whether a state gets a row, and free one for it."""
        is_accepted: bool
        [is_accepted], victims = policy.admit([proposal], len(self._free), self._evictable())
        for row in victims:
            self._queue.discard([row])
            self._give_up(row)
        policy.on_reserved([self._free[0]] if is_accepted else [])
        return is_accepted

    def _evictable(self) -> npt.NDArray[np.int64]:
        """Return the cached rows that nobody reads, ascending."""
        rows: npt.NDArray[np.int64] = (self._is_cached & (self.readers == 0)).nonzero()[0]
        return rows

    def _give_up(self, row: int) -> None:
        """Free a cached row for another entry."""
        self._forget(row)
        self.evicted_total += 1
        self._free.append(row)

    def _forget(self, row: int) -> None:
        """Make a cached row unfindable."""
        del self._row_of[self._digests[row]]
        self._is_cached[row] = False
        self._release_from_policy(row)

    def _release_from_policy(self, row: int) -> None:
        if self._policy is not None:
            self._policy.on_removed([row])
