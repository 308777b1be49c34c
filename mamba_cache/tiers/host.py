"""The host tier: KV blocks and states in host memory, found by their full digest and verified."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from mamba_cache._guard import CallGuard, guarded
from mamba_cache.tiers.entry import EntryKind, Refusal
from mamba_cache.tiers.memory import Pinner, RowMemory, plain_slab
from mamba_cache.tiers.rows import HostRows, RowLease

__all__ = ["HostTier", "TierStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Contents of a tier now, and its counters since it was made, opened or reset.

    A field that a tier does not have is 0 or empty.

    Attributes:
        name: Name of the tier.
        is_healthy: Whether the tier takes calls now.
        entries: Entries that can be found now, by kind: "kv" and "state".
        rows: Number of rows once all memory is there, by kind.
        ready_rows: Rows that can be used now, by kind: memory is pinned slab by slab.
        row_bytes: Bytes of one row or file, by kind.
        loads: Entries requested.
        restored: Entries that were read by a hit and verified.
        refused: Entries that were requested and not restored, by reason.
        puts: Entries offered.
        stored: Entries that were written completely.
        found_stored: Entries offered that another process had stored before.
        dropped: Entries that were not stored, by reason. The host tier has "queue_full" (too many
            copies were under way), "no_row" (each was being read or written), "refused" (to the
            policy the others are worth more), "gone" (the entry left the GPU before its copy was
            done) and "copy_failed" (the copy raised). Disk and store have "first_use", "in_flight",
            "queue_full", "unhealthy", "aborted", "unconfirmed", "not_removed", "timed_out", "error"
            and the values of ``StoreFault``, such as "disk_full".
        evicted: Entries evicted to make room for others.
        read_bytes: Bytes of payloads read.
        written_bytes: Bytes of payloads written.
        disk_bytes: Bytes that the files take on the disk.
        recovered: Entries that were on the disk when it was opened.
        io_errors: Reads, writes and removals that the system refused, a full disk not counted.
        asks: Queries to the store about the entries that it has.
        faults: Faults in the answers of disk or store, one for each key, by ``StoreFault`` without
            "missing"; "error" counts calls that raised.
        given_up: Calls of the store that did not return by their deadline.
        hung: Number of these calls that still run; each holds a thread and its buffers.
        opened: Number of pauses of disk or store after failures.
    """

    name: str
    is_healthy: bool = True
    entries: Mapping[str, int] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)
    ready_rows: Mapping[str, int] = field(default_factory=dict)
    row_bytes: Mapping[str, int] = field(default_factory=dict)
    loads: int = 0
    restored: int
    refused: Mapping[str, int]
    puts: int = 0
    stored: int
    found_stored: int = 0
    dropped: Mapping[str, int]
    evicted: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    disk_bytes: int = 0
    recovered: int = 0
    io_errors: int = 0
    asks: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    given_up: int = 0
    hung: int = 0
    opened: int = 0


class HostTier:
    """Entries in host memory: ``tier[kind]`` is the ``HostRows`` of a kind.

    Only the thread that uses the context may use its host tier. Threads of lower tiers end their
    leases by ``end_later``, which takes effect in ``poll``.
    """

    def __init__(
        self,
        kv: RowMemory,
        states: RowMemory,
        *,
        state_policy: Any = None,
        pinner: Pinner | None = None,
    ) -> None:
        self._guard = CallGuard(self)
        self._pinner = pinner
        self.dropped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.restored_total = 0
        counters = self.dropped, self.refused
        self._rows = {
            EntryKind.KV: HostRows(kv, *counters),
            EntryKind.STATE: HostRows(states, *counters, policy=state_policy),
        }
        self.join(self._guard)
        self._slabs_to_come: dict[EntryKind, deque[Future[torch.Tensor]]] = {
            kind: deque() for kind in self._rows
        }
        self._inbox: deque[tuple[RowLease, Refusal | None]] = deque()
        # Make all slabs now, or begin to pin them: one of each kind in turn.
        for index in range(max(rows.memory.num_slabs for rows in self._rows.values())):
            for kind, rows in self._rows.items():
                if index >= rows.memory.num_slabs:
                    continue
                num_bytes = rows.memory.slab_bytes(index)
                if pinner is None:
                    rows.add_slab(plain_slab(num_bytes))
                else:
                    self._slabs_to_come[kind].append(pinner.make(num_bytes))

    def join(self, guard: CallGuard) -> None:
        """Share the guard of the object that this tier is part of."""
        self._guard = guard
        for rows in self._rows.values():
            rows.join(guard)

    def __getitem__(self, kind: EntryKind) -> HostRows:
        """Return the rows of a kind."""
        return self._rows[kind]

    @property
    def memory(self) -> dict[EntryKind, RowMemory]:
        """The bytes of the rows of each kind."""
        return {kind: rows.memory for kind, rows in self._rows.items()}

    @property
    def leases(self) -> dict[EntryKind, list[RowLease]]:
        """All open leases, except those of lower tiers, by kind."""
        return {
            kind: [lease for lease in rows.leases if not lease.is_lower]
            for kind, rows in self._rows.items()
        }

    @property
    def lower_leases(self) -> list[RowLease]:
        """The open leases of lower tiers."""
        leases = [lease for rows in self._rows.values() for lease in rows.leases]
        return [lease for lease in leases if lease.is_lower]

    @guarded(nests=True, changes=True)
    def wait_for_memory(self) -> None:
        """Wait until all rows have memory, or as many as the system grants."""
        for futures in self._slabs_to_come.values():
            wait(futures)
        self.poll()

    @guarded(nests=True, changes=True)
    def poll(self) -> None:
        """Add the rows that are ready, and end leases as lower tiers asked; does not wait."""
        for kind, futures in self._slabs_to_come.items():
            while futures and futures[0].done():
                if futures[0].cancelled() or futures[0].exception() is not None:
                    # No more memory can be allocated or pinned: the tier stays at this size.
                    futures.clear()
                else:
                    self._rows[kind].add_slab(futures[0].result())
                    futures.popleft()
        while self._inbox:
            lease, refusal = self._inbox[0]
            if lease.rows.is_held(lease):  # it may have ended since
                if lease.writes and refusal is None:
                    lease.rows.complete(lease)
                else:
                    lease.rows.release(lease)
            self._inbox.popleft()

    @guarded(nests=True, changes=True)
    def use(self, leases: Sequence[RowLease]) -> None:
        """Record that a hit used the entries that it reads, in the order of their prefix."""
        for rows in self._rows.values():
            rows.use([each for each in leases if each.rows is rows])

    @guarded(nests=True, changes=True)
    def end_lower(self) -> None:
        """End all leases of lower tiers, whose jobs must be finished."""
        self.poll()
        for lease in self.lower_leases:
            lease.rows.release(lease)

    def end_later(self, lease: RowLease, refusal: Refusal | None) -> None:
        """End a lower tier's lease at the next ``poll``. Any thread may call it."""
        self._inbox.append((lease, refusal))

    @guarded(nests=True, changes=True, renews=True)
    def reset(self) -> None:
        """Forget all entries, all counts, and all leases except those of lower tiers.

        Only a lower tier may still read or write rows.
        """
        with self._guard.ending(renews=True):
            for rows in self._rows.values():
                rows.reset([lease for lease in rows.leases if lease.is_lower])
                rows.stored_total = 0
            self.dropped.clear()
            self.refused.clear()
            self.restored_total = 0

    @guarded(nests=True, changes=True)
    def clear(self) -> None:
        """Make all entries unfindable; reads and writes under way go on."""
        for rows in self._rows.values():
            rows.reset()

    def close(self) -> None:
        """Free the memory. Nothing may read or write it, or use the tier again."""
        if self._pinner is not None:
            self._pinner.close()

    def stats(self, name: str = "host") -> TierStats:
        """Return the tier's contents and counters. Any thread may call it."""
        rows = {kind.name.lower(): each for kind, each in self._rows.items()}
        return TierStats(
            name=name,
            entries={kind: len(each) for kind, each in rows.items()},
            rows={kind: each.memory.num_rows for kind, each in rows.items()},
            ready_rows={kind: each.rows.num_rows for kind, each in rows.items()},
            row_bytes={kind: each.memory.row_bytes for kind, each in rows.items()},
            stored=sum(each.stored_total for each in rows.values()),
            restored=self.restored_total,
            evicted=sum(each.evicted_total for each in rows.values()),
            dropped=dict(self.dropped.copy()),
            refused=dict(self.refused.copy()),
        )

    def check_invariants(self) -> None:
        """Check that the bookkeeping is consistent."""
        for rows in self._rows.values():
            rows.check_invariants()
