"""The store tier: entries in a store that several processes share, verified whenever they are read.

An entry is stored in chunks, and its header last: who finds the header finds the chunks. What a
store says is not believed: ``exists`` confirms what was put, sizes and MACs what was read.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from mamba_cache.errors import InvalidArgumentError, InvariantError
from mamba_cache.stores import BlobStore, StoreFault
from mamba_cache.tiers.entry import (
    HEADER_BYTES,
    EntryFacts,
    EntryKey,
    EntryMacs,
    PayloadMac,
    Refusal,
)
from mamba_cache.tiers.jobs import (
    Done,
    Job,
    LoadJob,
    PutJob,
    QueuedTier,
    RemovalJob,
    report_error,
)

__all__ = ["RemoteTier"]

_log = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 2**21
"""Of the format, as the header is: all who share a store have the same."""

_CHUNKS_AT_ONCE: Final = 8
_CHUNKS_READ_AT_ONCE: Final = 4  # a call of more may take so long that a store seems dead
_ENTRIES_AT_ONCE: Final = 16
_MAX_THREADS: Final = 4  # unless more are asked for
_CONNECT_SECONDS: Final = 30.0
_BELIEVED_SECONDS: Final = 60.0
_MAX_REMEMBERED: Final = 2**16

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Ask(Job):
    """A question which entries the store has."""

    keys: Sequence[EntryKey]


class _Part(NamedTuple):
    """A chunk or the header of an entry."""

    job: Any  # that of the entry
    name: str
    payload: memoryview
    number: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    """A thread, and the memory that its calls read and write."""

    jobs: Sequence[Job] = ()
    deadline: float | None = None  # of its call
    memory: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))


class _GivenUpError(Exception):
    """A call did not return by its deadline: nobody waits for it any more."""


class RemoteTier(QueuedTier):
    """Entries in a store.

    A call of the store that does not return by its deadline is given up with its thread and the
    memory that it reads or writes, and another thread takes its place. After such a call, or two
    failures in a row, the store is left alone, and asked every five seconds whether it is back.

    An entry that is not what its key says is not asked for again by this process until it has put
    it anew, and removed from the store.
    """

    name = "store"

    def __init__(
        self,
        store: BlobStore,
        *,
        secret: bytes,
        write_on_use: int = 2,
        num_threads: int | None = None,
        max_queued: int = 1024,
        call_seconds: float = 2.0,
        owns_store: bool = False,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self._asks: deque[_Ask] = deque()
        # So that no request waits until the store has connected.
        self._connecting = deque([Job(None)])
        super().__init__(
            write_on_use=write_on_use,
            max_queued=max_queued,
            queues=[self._connecting, self._asks],
        )
        if num_threads is None:  # Mooncake's reads of a dead machine keep a processor busy each
            num_threads = max(2, min(_MAX_THREADS, os.cpu_count() or _MAX_THREADS))
        self._num_threads = num_threads
        self._call_seconds = call_seconds
        self._chunk_bytes = chunk_bytes
        if chunk_bytes > store.max_blob_bytes:
            raise InvalidArgumentError(
                f"chunk_bytes={chunk_bytes} is more than {store.name} takes as one blob "
                f"({store.max_blob_bytes})"
            )
        self.store = store
        self._macs = EntryMacs(secret)
        self._owns_store = owns_store
        self._put_came = self._load_came  # its threads are alike
        self._call_began = threading.Condition(self._lock)
        self._faults: Counter[str] = Counter()
        # What the store had, with when that was known, and what in it was bad.
        self._stored: OrderedDict[EntryKey, float] = OrderedDict()
        self._bad: OrderedDict[EntryKey, None] = OrderedDict()
        self._failed_at = 0.0
        self._has_answered = self._is_told = self._is_closed = False
        self._num_hung = 0
        self._workers: list[_Worker] = []
        with self._lock:
            self._replace_hung()
        [self._watcher] = self._start(self._watch)

    def ask(self, keys: Sequence[EntryKey], done: Done) -> bool:
        """Queue a question which entries the store has; ``has_many`` knows when ``done`` is called.

        False: it is not taken.
        """
        if not self.is_healthy:
            return False
        with self._lock:
            if not self._takes_calls or len(self._asks) >= self._max_queued:
                return False
            self._counts["asks"] += 1
            self._add(self._asks, _Ask(done, keys))
        return True

    def _find(self, keys: Sequence[EntryKey]) -> list[bool]:
        """Say of each key whether this process knows that the store has it, without asking."""
        now = time.monotonic()
        # What was learnt does not hold for ever: others use the store, too.
        return [now - self._stored.get(key, -math.inf) < _BELIEVED_SECONDS for key in keys]

    def _absence(self, key: EntryKey) -> Refusal | None:
        return Refusal.MISSING if key in self._bad else None

    def _remove_soon(self, key: EntryKey) -> None:
        """Have a header removed; its chunks go when the entry is written anew or evicted."""
        self._stored.pop(key, None)
        _remember(self._bad, key, None)
        if self._takes_calls:
            self._add(self._removals, RemovalJob(None, [str(key)]))

    def _check_size(self, facts: EntryFacts, payload: memoryview) -> None:
        if len(payload) != facts.payload_bytes:
            raise InvalidArgumentError(
                f"{facts.key} has {facts.payload_bytes} bytes, got a buffer of {len(payload)}"
            )

    def _join(self) -> None:
        """Wait for calls that are under way, but not for ever."""
        with self._lock:
            if self._is_closed:
                return
            self._one_told.wait_for(lambda: not self._taken, self._call_seconds)
            self._is_closed = True
            self._call_began.notify()
            self._one_told.wait_for(lambda: not self._workers)
        self._watcher.join(self._call_seconds)

    def _own_stats(self) -> dict[str, Any]:
        return {
            "asks": self._counts["asks"],
            "faults": dict(self._faults),
            "given_up": self._counts["given_up"],
            "hung": self._num_hung,
            "opened": self._counts["opened"],
        }

    def check_invariants(self) -> None:
        """Prove that the bookkeeping agrees with itself."""
        with self._lock:
            super().check_invariants()
            busy = [job for worker in self._workers for job in worker.jobs]
            statements = {
                "each job is one thread's": len(set(busy)) == len(busy),
                "what is taken is done by a thread": self._taken <= set(busy),
                "threads are lost to nothing but a store that hangs": self._num_hung >= 0,
            }
        breaches = [statement for statement, holds in statements.items() if not holds]
        if breaches:
            raise InvariantError(f"does not hold: {'; '.join(breaches)}")

    # Bookkeeping. The lock is held.

    @property
    def _takes_calls(self) -> bool:
        return bool(self._workers) and not self._has_failed and not self._is_closing

    def _replace_hung(self) -> None:
        """Start threads in the place of those that hang, but not without end."""
        while len(self._workers) < min(self._num_threads, 2 * self._num_threads - self._num_hung):
            worker = _Worker()
            self._start(partial(self._work, worker))
            self._workers.append(worker)

    def _give_up_late(self) -> list[tuple[Job, Refusal | None]]:
        """Give up all calls that are late; return their jobs, of which nobody is told yet."""
        now = time.monotonic()
        over: list[tuple[Job, Refusal | None]] = []
        for worker in list(self._workers):
            if worker.deadline is not None and (self._is_closed or worker.deadline <= now):
                self._workers.remove(worker)
                self._counts["given_up"] += 1
                self._num_hung += 1
                self._count_failure(is_overdue=True)
                jobs = self._still_taken(worker.jobs)
                if self._is_closed:
                    over += self._count_over(jobs, Refusal.ABORTED, "aborted")
                else:
                    over += self._count_over(jobs, Refusal.TIMEOUT, "timed_out")
        return over

    # What threads do.

    def _watch(self) -> None:
        """Give up calls that are late until the tier is closed, and close what it owns."""
        is_closed = False
        while not is_closed:
            with self._lock:
                is_closed = self._is_closed
                if not is_closed:
                    deadlines = [w.deadline for w in self._workers if w.deadline is not None]
                    left = min(deadlines) - time.monotonic() if deadlines else None
                    self._call_began.wait(left)
                over = self._give_up_late()
                if not self._is_closing:
                    with suppress(RuntimeError):  # no thread can be had: fewer go on
                        self._replace_hung()
            self._tell(over)
            self._end_unwanted()
        with self._lock:
            self._one_told.wait_for(lambda: not self._workers)
        if self._owns_store:
            self.store.close()

    def _work(self, worker: _Worker) -> None:
        """Do what is queued, until the tier is closed or a call was given up."""
        is_lost, take = False, partial(self._take_some, worker)
        while not is_lost and (jobs := self._wait(self._load_came, take)):
            refusal, reason = Refusal.IO_ERROR, "error"
            try:
                self._do(worker, jobs)
            except _GivenUpError:
                refusal, reason = Refusal.ABORTED, "aborted"
            except Exception:  # a bug, or a store that breaks its word: it must not end the thread
                report_error()
                with self._lock:
                    self._faults["error"] += 1
                    self._count_failure()
            with self._lock:
                over = self._count_over(self._still_taken(jobs), refusal, reason)
                worker.jobs = ()
                is_lost = worker not in self._workers
                self._load_came.notify()  # one less reads or writes
            self._tell(over)
            self._end_unwanted()
        self._end_unwanted()
        if len(worker.memory):
            self.store.unregister(worker.memory.data)
        with self._lock:
            if is_lost:
                self._num_hung -= 1
                self._call_began.notify()  # another one may take its place
            else:
                self._workers.remove(worker)
                self._one_told.notify_all()

    def _end_unwanted(self) -> None:
        """End what is queued if nobody does it, and warn once of a store that does not answer."""
        with self._lock:
            jobs = [] if self._takes_calls else self._take_queued()
            # It has never answered, or fails again and again.
            has_failed = self._counts["opened"] or (self._failures and not self._has_answered)
            is_news = bool(has_failed) and not self._is_told and not self._is_closing
            self._is_told |= is_news
            faults = ", ".join(self._faults) or "timed_out"
            if self._is_closing:
                over = self._count_over(jobs, Refusal.ABORTED, "aborted")
            else:
                over = self._count_over(jobs, Refusal.IO_ERROR, "unhealthy")
        self._tell(over)
        if is_news:
            _log.warning(
                "store: %s does not answer (%s). Requests go on without it, and it is asked "
                "again; open_store(URL).health() says what is wrong",
                self.store.name,
                faults,
            )

    def _take_some(self, worker: _Worker) -> list[Any]:
        """Have a worker take jobs of one kind, questions and loads first."""
        jobs: list[Any] = []
        if self._has_failed:
            if self._rest_left is None:
                self._rest()
                return [Job(None)]  # for which nobody waits: no job of the worker's
        elif self._connecting or self._asks:
            jobs = self._take(self._connecting) or self._take(self._asks)
        elif self._loads and self._has_room(LoadJob):
            jobs = self._take_loads()
        elif self._removals:
            jobs = self._take(self._removals)
        elif self._has_room(PutJob):
            jobs = self._take_puts(_ENTRIES_AT_ONCE)
        worker.jobs = jobs
        return jobs

    def _has_room(self, kind: type[Job]) -> bool:
        """Say whether one more thread may do jobs of a kind: one is left for all else."""
        busy = sum(isinstance(each.jobs[0], kind) for each in self._workers if each.jobs)
        return busy < self._num_threads - 1

    def _take_loads(self) -> list[Any]:
        """Take a thread's share of the loads: of different entries, for a call names each once."""
        loads = self._loads
        share = min(-(-len(loads) // (self._num_threads - 1)), _ENTRIES_AT_ONCE)
        keys: set[EntryKey] = set()
        while len(keys) < share and loads[len(keys)].expected.key not in keys:
            keys.add(loads[len(keys)].expected.key)
        return self._take(loads, len(keys))

    def _do(self, worker: _Worker, jobs: Sequence[Any]) -> None:
        first = jobs[0]
        if isinstance(first, _Ask):
            self._answer(worker, first)
        elif isinstance(first, RemovalJob):
            self._remove(worker, first.entry)
            self._end(first)
        elif isinstance(first, LoadJob):
            self._load_all(worker, jobs)
        elif isinstance(first, PutJob):
            self._put_all(worker, jobs)
        else:
            self._probe(worker, first)

    def _call(
        self,
        worker: _Worker,
        call: Callable[..., Sequence[_T]],
        names: list[str],
        *buffers: Sequence[memoryview],
        seconds: float = 0.0,
    ) -> Sequence[_T]:
        """Call the store, by the deadline; count what it did not do. It is not asked of nothing."""
        if not names:
            return []
        with self._lock:
            if self._is_closed:
                raise _GivenUpError
            began = time.monotonic()
            worker.deadline = began + max(seconds, self._call_seconds)
            self._call_began.notify()
        try:
            answers = call(names, *buffers)
        finally:
            with self._lock:
                worker.deadline = None
                if worker not in self._workers:
                    raise _GivenUpError
        with self._lock:
            faults = [answer for answer in answers if isinstance(answer, StoreFault)]
            self._faults.update(each.value for each in faults if each is not StoreFault.MISSING)
            if any(each.is_of_the_store for each in faults):
                self._count_failure()
            else:
                self._has_answered = True
                if began >= self._failed_at:  # a call that began before says nothing of what came
                    self._count_success()
        return answers

    def _count_failure(self, *, is_overdue: bool = False) -> None:
        had_failed = self._has_failed
        super()._count_failure(is_overdue=is_overdue)
        self._failed_at = time.monotonic()
        if self._has_failed:
            self._counts["opened"] += not had_failed
            self._stored.clear()  # one that comes back may have nothing any more
            self._load_came.notify_all()  # who waits is to wake when the rest is over

    def _answer(self, worker: _Worker, ask: _Ask) -> None:
        """Ask the store what it has."""
        names = [str(key) for key in ask.keys]
        answers = self._call(worker, self.store.exists_many, names)
        for key, fault in zip(ask.keys, answers, strict=True):
            self._know(key, is_there=fault is None)
        self._end(ask)

    def _probe(self, worker: _Worker, probe: Job) -> None:
        """Look whether the store is there."""
        is_first = bool(worker.jobs)
        seconds = _CONNECT_SECONDS if is_first else 0.0
        self._call(worker, lambda _: [self.store.health().fault], ["health"], seconds=seconds)
        if is_first:
            self._end(probe)

    def _know(self, key: EntryKey, *, is_there: bool) -> None:
        with self._lock:
            if is_there and key not in self._bad:
                _remember(self._stored, key, time.monotonic())
            else:
                self._stored.pop(key, None)

    def _load_all(self, worker: _Worker, loads: Sequence[LoadJob]) -> None:
        """Read entries: their headers, and then the chunks of those that match."""
        readings = self._read_headers(worker, loads)
        chunks = [part for load in readings for part in self._parts(load, load.expected, load.into)]
        for group in _grouped(chunks, _CHUNKS_READ_AT_ONCE):
            taken = [each for each in group if each.job in self._taken]  # not of a refused one
            buffers = self._buffers(worker, [len(chunk.payload) for chunk in taken])
            names = [chunk.name for chunk in taken]
            answers = self._call(worker, self.store.get_many_into, names, buffers)
            for chunk, answer, buffer in zip(taken, answers, buffers, strict=True):
                load = chunk.job
                if load not in self._taken:
                    continue
                size, (mac, macs) = len(chunk.payload), readings[load]
                if answer != size:
                    self._refuse(load, _refusal_of(answer, size), has_header=True)
                    continue
                # What was copied is verified: a store may still write to the buffer.
                _copy(chunk.payload, buffer)
                macs.append(mac.part(chunk.number, chunk.payload))
                if len(macs) < self._num_chunks(load.expected):
                    continue
                if mac.vouches_for(macs):
                    self._know(load.expected.key, is_there=True)
                    self._end(load)
                else:
                    self._refuse(load, Refusal.MAC, has_header=True)

    def _read_headers(
        self, worker: _Worker, loads: Sequence[LoadJob]
    ) -> dict[LoadJob, tuple[PayloadMac, list[bytes]]]:
        """Read the headers of entries, and refuse those that do not match."""
        buffers = self._buffers(worker, [HEADER_BYTES] * len(loads))
        names = [str(each.expected.key) for each in loads]
        answers = self._call(worker, self.store.get_many_into, names, buffers)
        readings: dict[LoadJob, tuple[PayloadMac, list[bytes]]] = {}
        for load, answer, buffer in zip(loads, answers, buffers, strict=True):
            mac: PayloadMac | Refusal = _refusal_of(answer, HEADER_BYTES)
            if answer == HEADER_BYTES:
                mac = self._macs.open(buffer, load.expected)
            if isinstance(mac, Refusal):
                self._refuse(load, mac, has_header=False)
            else:
                readings[load] = mac, []  # and the MACs of the chunks that have come
        return readings

    def _refuse(self, load: LoadJob, refusal: Refusal, *, has_header: bool) -> None:
        """End a load that brought nothing, and have what is bad taken out of the store."""
        key = load.expected.key
        is_bad = refusal not in (Refusal.MISSING, Refusal.IO_ERROR, Refusal.TIMEOUT)
        with self._lock:
            self._stored.pop(key, None)
            if is_bad:
                _remember(self._bad, key, None)
            # Without one of its chunks nobody can use the rest, and nobody would write it anew.
            if is_bad or (has_header and refusal is Refusal.MISSING):
                self._add(self._removals, RemovalJob(None, self._names(load.expected)))
        self._end(load, refusal)

    def _remove(self, worker: _Worker, names: list[str]) -> bool:
        """Remove an entry's parts, its header first; say whether they are gone."""
        answers = [
            *self._call(worker, self.store.remove, names[-1:]),
            *self._call(worker, self.store.remove, names[:-1]),
        ]
        return not any(answer not in (None, StoreFault.MISSING) for answer in answers)

    def _num_chunks(self, facts: EntryFacts) -> int:
        return -(-facts.payload_bytes // self._chunk_bytes)

    def _names(self, facts: EntryFacts) -> list[str]:
        """Return the keys of an entry's chunks and, last, of its header."""
        chunks = range(self._num_chunks(facts))
        return [*(str(replace(facts.key, chunk=index)) for index in chunks), str(facts.key)]

    def _parts(self, job: Job, facts: EntryFacts, payload: memoryview) -> list[_Part]:
        """Return the chunks of an entry."""
        chunks = _grouped(payload, self._chunk_bytes)
        return [
            _Part(job, name, chunk, number)
            for number, (name, chunk) in enumerate(zip(self._names(facts), chunks, strict=False))
        ]

    def _put_all(self, worker: _Worker, puts: Sequence[PutJob]) -> None:
        """Write entries: chunks, and headers when all of them are there; each confirmed.

        Those that end on the way, for one reason or another, are taken no more.
        """
        self._end_bad(worker, puts)
        self._end_stored(worker, [put for put in puts if put in self._taken])
        chunks, headers = [], []
        for put in puts:
            if put in self._taken:
                parts = self._parts(put, put.facts, put.payload)
                header = self._macs.seal(put.facts, [part.payload for part in parts])
                chunks += parts
                headers.append(_Part(put, str(put.facts.key), memoryview(header)))
        self._write(worker, chunks, _CHUNKS_AT_ONCE)
        self._write(worker, headers, _ENTRIES_AT_ONCE)
        for put in puts:
            if put in self._taken:
                self._know(put.facts.key, is_there=True)
                if put.is_revoked:
                    self._remove(worker, self._names(put.facts))
                self._end(put)

    def _end_bad(self, worker: _Worker, puts: Sequence[PutJob]) -> None:
        """Remove what was found bad under the keys of entries: a store keeps the first bytes."""
        for put in puts:
            key = put.facts.key
            is_gone = key not in self._bad or self._remove(worker, self._names(put.facts))
            with self._lock:
                goes_on = is_gone and not put.is_revoked
                if goes_on:
                    self._bad.pop(key, None)
            if not goes_on:
                self._end(put, Refusal.IO_ERROR, "not_removed")

    def _end_stored(self, worker: _Worker, puts: Sequence[PutJob]) -> None:
        """End those that somebody has stored meanwhile, or the store does not answer for."""
        names = [str(put.facts.key) for put in puts]
        answers = self._call(worker, self.store.exists_many, names)
        for put, fault in zip(puts, answers, strict=True):
            if fault is None:
                self._know(put.facts.key, is_there=True)
                self._end(put, None, "found_stored")
            elif fault is not StoreFault.MISSING:
                self._end(put, _refusal_of(fault), fault.value)

    def _write(self, worker: _Worker, parts: Sequence[_Part], at_once: int) -> None:
        """Put parts of entries, but none of one that has ended.

        That a store took them does not say that they can be found: so it is asked.
        """
        for group in _grouped(parts, at_once):
            taken = [part for part in group if part.job in self._taken]
            buffers = self._buffers(worker, [len(part.payload) for part in taken])
            for part, buffer in zip(taken, buffers, strict=True):
                _copy(buffer, part.payload)
            names = [part.name for part in taken]
            answers = self._call(worker, self.store.put_many, names, buffers)
            self._end_failed(taken, answers, StoreFault.MISSING.value)
        taken = [part for part in parts if part.job in self._taken]
        answers = self._call(worker, self.store.exists_many, [part.name for part in taken])
        self._end_failed(taken, answers, "unconfirmed")

    def _end_failed(
        self, parts: Sequence[_Part], answers: Sequence[StoreFault | None], missing: str
    ) -> None:
        """End the puts of parts of which an answer is a fault."""
        for part, fault in zip(parts, answers, strict=True):
            if fault is not None and part.job in self._taken:
                reason = missing if fault is StoreFault.MISSING else fault.value
                self._end(part.job, _refusal_of(fault), reason)

    def _buffers(self, worker: _Worker, sizes: Sequence[int]) -> list[memoryview]:
        """Return memory of a worker's own for a call, one buffer behind the other."""
        needed = sum(sizes)
        if needed > len(worker.memory):
            if len(worker.memory):
                self.store.unregister(worker.memory.data)
            size = max(needed, min(_CHUNKS_AT_ONCE * self._chunk_bytes, 4 * needed))
            worker.memory = np.empty(size, np.uint8)
            self.store.register(worker.memory.data)
        ends = np.cumsum(sizes).tolist()
        whole = worker.memory.data
        return [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _copy(into: memoryview, source: memoryview) -> None:
    """Copy bytes, and let other threads run meanwhile, as an assignment to a slice does not."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def _grouped(items: Any, count: int) -> list[Any]:
    return [items[first : first + count] for first in range(0, len(items), count)]


def _refusal_of(answer: int | StoreFault, num_bytes: int = 0) -> Refusal:
    """Say why what should have so many bytes was not read, or why it was not stored."""
    if not isinstance(answer, StoreFault):
        return Refusal.SHORT if answer < num_bytes else Refusal.PAYLOAD_BYTES
    if answer is StoreFault.MISSING:
        return Refusal.MISSING
    if answer is StoreFault.SHORT:  # the blob is longer than it can be
        return Refusal.PAYLOAD_BYTES
    return Refusal.TIMEOUT if answer is StoreFault.TIMED_OUT else Refusal.IO_ERROR


def _remember(known: OrderedDict[EntryKey, Any], key: EntryKey, value: object) -> None:
    """Put a key last, and forget the oldest ones beyond what is kept."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > _MAX_REMEMBERED:
        known.popitem(last=False)
