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
    """What a tier holds, and what it did since it was made, opened or reset.

    What a tier does not have is 0 or empty.

    Attributes:
        name: What the tier is called.
        is_healthy: Whether calls are taken now.
        entries: Entries that can be found now, by kind: "kv" and "state".
        rows: Rows that there may be, by kind.
        ready_rows: Rows that can be used now, by kind: pinned memory grows in time.
        row_bytes: Bytes of one row or file, by kind.
        loads: Entries asked for.
        restored: Entries that were read by a hit and verified.
        refused: Entries that were looked for and not restored, by reason.
        puts: Entries offered.
        stored: Entries that were written to their end.
        found_stored: Entries offered that another process had stored before.
        dropped: Entries that were not stored, by reason. The host tier has "queue_full" (too many
            copies were under way), "no_row" (each was being read or written), "refused" (the policy
            finds the others worth more), "gone" (it left the GPU before its copy was over) and
            "copy_failed" (the copy raised). Disk and store have "first_use", "in_flight",
            "queue_full", "unhealthy", "aborted", "unconfirmed", "not_removed", "timed_out", "error"
            and the values of ``StoreFault``, such as "disk_full".
        evicted: Entries given up for others.
        read_bytes: Payloads read.
        written_bytes: Payloads written.
        disk_bytes: What the files take on the disk.
        recovered: Entries that were there when the disk was opened.
        io_errors: Reads, writes and removals that the system refused, a full disk not counted.
        asks: Questions what the store has.
        faults: What disk or store answered instead of doing what it was asked, by ``StoreFault``,
            key by key, "missing" not counted; "error" where a call raised.
        given_up: Calls of the store that did not return by their deadline.
        hung: Of these, those that have not returned yet; each keeps a thread and its buffers.
        opened: How often disk or store was left alone after failures.
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
    """Entries in host memory: ``tier[kind]`` has the rows of a kind.

    It is used by one thread, as the context that it belongs to. Lower tiers end their copies from
    threads of their own by ``end_later``; ``poll`` does what they asked for.
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
        # All slabs are made, or begun to be made: those of both kinds in turn.
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
        """Become a part of what ``guard`` guards: it is used with the other parts."""
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
        """All leases that are not ended, but those of lower tiers."""
        return {
            kind: [lease for lease in rows.leases if not lease.is_lower]
            for kind, rows in self._rows.items()
        }

    @property
    def lower_leases(self) -> list[RowLease]:
        """The leases of lower tiers that are not ended."""
        leases = [lease for rows in self._rows.values() for lease in rows.leases]
        return [lease for lease in leases if lease.is_lower]

    @guarded(nests=True, changes=True)
    def wait_for_memory(self) -> None:
        """Wait until all rows are there, or as many as can be had."""
        for futures in self._slabs_to_come.values():
            wait(futures)
        self.poll()

    @guarded(nests=True, changes=True)
    def poll(self) -> None:
        """Take over the rows that are ready, and what lower tiers have ended. It does not wait."""
        for kind, futures in self._slabs_to_come.items():
            while futures and futures[0].done():
                if futures[0].cancelled() or futures[0].exception() is not None:
                    # No more memory, or no more that may be pinned: the tier stays as it is.
                    futures.clear()
                else:
                    self._rows[kind].add_slab(futures[0].result())
                    futures.popleft()
        while self._inbox:
            lease, refusal = self._inbox[0]
            if lease.rows.is_held(lease):  # otherwise it was ended since
                if lease.writes and refusal is None:
                    lease.rows.complete(lease)
                else:
                    lease.rows.release(lease)
            self._inbox.popleft()

    @guarded(nests=True, changes=True)
    def use(self, leases: Sequence[RowLease]) -> None:
        """Record that a hit uses entries that it reads: those of one prefix, from its start."""
        for rows in self._rows.values():
            rows.use([each for each in leases if each.rows is rows])

    @guarded(nests=True, changes=True)
    def end_lower(self) -> None:
        """End all leases of lower tiers, which have done what they were handed."""
        self.poll()
        for lease in self.lower_leases:
            lease.rows.release(lease)

    def end_later(self, lease: RowLease, refusal: Refusal | None) -> None:
        """End a lower tier's copy at the next ``poll``. Any thread may call it."""
        self._inbox.append((lease, refusal))

    @guarded(nests=True, changes=True, renews=True)
    def reset(self) -> None:
        """Forget all entries, all counts, and all leases but those of lower tiers.

        Nothing but a lower tier may be reading or writing rows.
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
        """Make all entries unfindable; who reads or writes one goes on."""
        for rows in self._rows.values():
            rows.reset()

    def close(self) -> None:
        """Give the memory back, once nothing reads or writes it; the tier is not used again."""
        if self._pinner is not None:
            self._pinner.close()

    def stats(self, name: str = "host") -> TierStats:
        """Return what the tier holds and did. Any thread may ask."""
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
        """Prove that the bookkeeping agrees with itself."""
        for rows in self._rows.values():
            rows.check_invariants()
