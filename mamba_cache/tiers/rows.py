"""The rows of host memory of one kind: which entry each holds, who reads it, which goes next."""

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
    """A claim on a row: of who writes it, or of who reads it."""

    row: int
    generation: int  # which of the row's entries it is for
    facts: EntryFacts  # of the entry, as the holder derived them
    writes: bool
    is_lower: bool  # whether a lower tier holds it
    rows: HostRows = field(repr=False)  # that it is of


class HostRows:
    """Rows that hold one entry each, found by their full digest, with headers and bytes.

    An entry is written by ``reserve``, a copy and ``complete``, and read by ``read``, a copy and
    ``release``. Whoever copies compares the bytes with the checksums that stand behind them in the
    row; this class holds every field of the entry's header, and those checksums, to what a request
    derived.

    A row that is held is *awaited* (being written, not findable), read, or *leaving* (given up
    while somebody still reads or writes it: not findable, and free when the last one has ended). A
    row that is read or written is never given to another entry. Without a policy that knows prompts
    the least recently used goes first, and of those used in one call the last one named.
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
        self.policy = policy  # a ``PrefixSlotPolicy``, to which a row is a slot
        self._dropped, self._refused = dropped, refused  # why entries got no row, or did not match
        self.generations: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self._used_at: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        # A row that can be found is its own name.
        self._names: npt.NDArray[np.int64] = np.full(num_rows, NONE, np.int64)
        self.rows = Rows("row", num_rows, self._names)
        self.rows.num_rows = self.rows.num_free = 0  # of those that are there already
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
        """Become a part of what ``guard`` guards."""
        self._guard = guard

    def __len__(self) -> int:
        """How many entries can be found."""
        return len(self._row_of)

    def __contains__(self, digest: bytes) -> bool:
        """Whether an entry can be found."""
        return digest in self._row_of

    @property
    def leases(self) -> list[RowLease]:
        """All that are not ended: of writers and of readers."""
        return list(self._leases)

    def add_slab(self, slab: torch.Tensor) -> None:
        """Take the next memory, [bytes] uint8: its rows can be used, in their order."""
        first = self.rows.num_rows
        self.rows.num_rows = first + self.memory.add_slab(slab)
        self.rows.push([*reversed(range(first, self.rows.num_rows))])

    @guarded(nests=True, changes=True)
    def begin_request(self, facts: Any) -> Any:
        """Tell the policy of a request; return what stands for its prompt in proposals."""
        return None if self.policy is None else self.policy.on_request(facts)

    @guarded(nests=True, changes=True)
    def would_admit(self, proposals: Sequence[Any]) -> list[bool]:
        """Ask a policy that knows prompts which states are worth a row now; nothing changes."""
        assert self.policy is not None, "the caller has looked"
        accepted: list[bool]
        accepted, _ = self.policy.admit(proposals, self.rows.num_free, self._evictable())
        self.policy.withdraw()
        return accepted

    @guarded(nests=True, changes=True)
    def reserve(
        self, facts: EntryFacts, *, proposal: Any = None, for_lower: bool = False
    ) -> RowLease | None:
        """Take a row for an entry that is to be written: a free one, or one given up for it.

        None: none can be had, which is counted, or the entry is there or awaited. A state with a
        ``proposal`` may be refused, as by ``would_admit``.
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
        """Make an entry findable whose bytes, and the checksums behind them, are in its row."""
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
        """Find an entry and keep it until ``release``; what does not match is dropped.

        All is compared but its bytes, which whoever copies them compares with the checksums.
        """
        digest = facts.key.digest
        row = self._row_of.get(digest, NONE)
        refusal = Refusal.MISSING if row == NONE else self._refusal(row, facts)
        if refusal is not None:
            self.remove(digest)
            self._refused[refusal.value] += 1
            return refusal
        self._queue.discard(self.rows.hold(as_rows([row])))
        return self._lease(row, facts, writes=False, is_lower=for_lower)

    @guarded(nests=True, changes=True)
    def release(self, lease: RowLease, reason: str | None = None) -> None:
        """End a lease: of a reader, or of an entry that will not come, once nothing writes it.

        ``reason`` is what that counts as.
        """
        row, digest = lease.row, lease.facts.key.digest
        if lease not in self._leases:
            raise DoubleFreeError(f"{lease} was ended already, or is another kind's")
        del self._leases[lease]
        if self._awaited.get(digest) is lease:
            del self._awaited[digest]
            self._release_from_policy(row)
        if self.rows.release(as_rows([row])):  # nobody else reads it
            self._queue.push(row, self._used_at.item(row))
        if reason is not None:
            self._dropped[reason] += 1

    @guarded(nests=True, changes=True)
    def refuse(self, lease: RowLease, refusal: Refusal) -> None:
        """End the lease of a reader who found other bytes than there should be; drop the entry."""
        if self._names[lease.row] != NONE:
            self._forget(lease.row)
        self._refused[refusal.value] += 1
        self.release(lease)

    @guarded(nests=True, changes=True)
    def remove(self, digest: bytes) -> bool:
        """Make an entry unfindable; say whether it was there. Its readers end as ever."""
        row = self._row_of.get(digest)
        if row is None:
            return False
        self._queue.discard([row])
        self._forget(row)
        if not self.rows.refs[row]:
            self.rows.push([row])
        return True

    def use(self, leases: Iterable[RowLease]) -> None:
        """Record that entries were used by a hit: consecutive ones of a prefix, from its start."""
        rows = [lease.row for lease in leases if self._names[lease.row] != NONE]
        self._use(rows)
        if self.policy is not None:
            self.policy.on_consumed(rows)

    def is_held(self, lease: RowLease) -> bool:
        """Say whether a lease is not ended."""
        return lease in self._leases

    def buffer(self, lease: RowLease) -> memoryview:
        """Return the bytes of a row, checksums included, for the lease's holder."""
        return self.memory.array(lease.row).data

    def reset(self, keep: Iterable[RowLease] | None = None) -> None:
        """Make all entries unfindable. What is being read or written is free when that ends."""
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
        """Prove that the bookkeeping agrees with itself."""
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
            "what is awaited is written": all(
                lease in self._leases and lease.writes for lease in self._awaited.values()
            ),
            "the queue holds exactly the cached rows that nobody reads": (
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
        """Say what of a row is not what it should be, but for its bytes."""
        header = EntryHeader.read(self.headers[row].data, facts)
        if isinstance(header, Refusal):
            return header
        if header.generation != self.generations[row]:
            return Refusal.GENERATION
        is_same = header.payload_tag == self._digest_of_checksums(row)
        return None if is_same else Refusal.PAYLOAD_DIGEST

    def _digest_of_checksums(self, row: int) -> bytes:
        """Return what binds a row's checksums to its header."""
        return payload_digest(self.memory.array(row)[self.memory.checksums])

    def _use(self, rows: Sequence[int]) -> None:
        """Stamp rows, the first one as the most recent."""
        self._clock += len(rows)
        for age, row in enumerate(rows):
            self._used_at[row] = self._clock - age
            if not self.rows.refs[row]:
                self._queue.push(row, self._clock - age)

    def _evict(self) -> None:
        """Give up an entry; there is one that nobody reads."""
        if self.policy is None:
            row, _ = self._queue.pop()
        else:
            rows = self._evictable()
            [row] = self.policy.choose(1, rows, rows.astype(np.int32), self)
        self._give_up(row)

    def _admit(self, policy: Any, proposal: Any) -> bool:
        """Ask a policy whether a state gets a row, and free one for it."""
        is_accepted: bool
        [is_accepted], victims = policy.admit([proposal], self.rows.num_free, self._evictable())
        for row in victims:
            self._give_up(row)
        return is_accepted

    def _evictable(self) -> npt.NDArray[np.int64]:
        """Return the cached rows that nobody reads, ascending."""
        rows: npt.NDArray[np.int64]
        [rows] = ((self._names != NONE) & (self.rows.refs == 0)).nonzero()
        return rows

    def _give_up(self, row: int) -> None:
        """Free a cached row for another entry."""
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
