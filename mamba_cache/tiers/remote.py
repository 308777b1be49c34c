"""The store tier: entries in a store that several processes share, verified whenever they are read.

An entry is stored in chunks, and its manifest last: who finds the manifest finds the chunks. What a
store says is not believed: ``exists`` confirms what was put, sizes and MACs what was read.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import struct
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
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
    EntryHeader,
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
_MOST_THREADS: Final = 4  # unless more are asked for
_CONNECT_SECONDS: Final = 30.0
_BELIEVED_SECONDS: Final = 60.0
_MAX_REMEMBERED: Final = 2**16

_MAC_BYTES: Final = 16
_SIZES: Final = struct.Struct("<QI")  # bytes of a chunk, and how many there are

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Ask(Job):
    """A question which entries the store has."""

    keys: Sequence[EntryKey]


class _Part(NamedTuple):
    """A chunk or the manifest of an entry, and the MAC that it must have if it is read."""

    job: Any  # that of the entry
    name: str
    payload: memoryview
    number: int = 0
    payload_mac: Any = None
    mac: bytes = b""


@dataclass(slots=True, eq=False)
class _Worker:
    """A thread, and the memory that its calls read and write."""

    call_ended: threading.Condition
    jobs: Sequence[Job] = ()
    deadline: float | None = None  # of its call; None: there is none, or it is late
    memory: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))


class _GivenUpError(Exception):
    """A call did not return by its deadline: nobody waits for it any more."""


class RemoteTier(QueuedTier):
    """Entries in a store.

    Nobody who calls waits for the store: threads of this object do, and others make its calls, each
    with a deadline. A call that does not return by it is given up with its thread and the memory
    that it reads or writes, and another thread takes its place; what it brings later is not looked
    at. After such a call, or two failures in a row, the store is left alone, and asked every five
    seconds whether it is back.

    Whatever is wrong is a counted miss. An entry that is not what its key says is not asked for
    again by this process until it has put it anew, and removed from the store. Any thread may call;
    ``done`` is called from threads of this object, or from the caller's when the answer is known at
    once. In a process that was forked it refuses everything.
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
            num_threads = max(2, min(_MOST_THREADS, os.cpu_count() or _MOST_THREADS))
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
        self._faults: Counter[str] = Counter()
        # What the store had, with when that was known, and what in it was bad.
        self._stored: OrderedDict[EntryKey, float] = OrderedDict()
        self._bad: OrderedDict[EntryKey, None] = OrderedDict()
        self._failed_at = 0.0
        self._has_answered = self._is_told = self._is_closed = False
        self._num_callers = self._num_hung = 0
        self._workers = [_Worker(threading.Condition(self._lock)) for _ in range(num_threads)]
        for _ in self._workers:
            self._add_caller()
        self._threads = self._start(*[partial(self._work, each) for each in self._workers])

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
        """Have a manifest removed; its chunks go when the entry is written anew or evicted."""
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
            self._find_late()
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            self._give_back(worker.memory)
        if self._owns_store:
            wait([self._submit(self.store.close)], self._call_seconds)
        for _ in range(self._num_callers):
            self._calls.put(None)

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
                "calls are lost to nothing but a store that hangs": (
                    0 <= self._num_hung <= self._num_callers
                ),
            }
        breaches = [statement for statement, holds in statements.items() if not holds]
        if breaches:
            raise InvariantError(f"does not hold: {'; '.join(breaches)}")

    # Bookkeeping. The lock is held.

    @property
    def _takes_calls(self) -> bool:
        is_alive = not self._has_failed and self._num_hung < self._most_callers
        return is_alive and not self._is_closing

    @property
    def _most_callers(self) -> int:
        """Threads that hang keep their memory, so they are not replaced without end."""
        return 2 * len(self._workers)

    def _add_caller(self) -> None:
        self._num_callers += 1
        self._start(self._make_calls)

    def _give_up(self, worker: _Worker, call: Future[Any]) -> None:
        """Leave a call that is late to its thread, with the worker's memory."""
        if call.cancel():  # no thread has begun it
            return
        self._counts["given_up"] += 1
        self._num_hung += 1
        memory, worker.memory = worker.memory, np.empty(0, np.uint8)
        call.add_done_callback(lambda _: self._come_back(memory))
        if self._num_callers < self._most_callers:
            self._add_caller()

    def _come_back(self, memory: npt.NDArray[np.uint8]) -> None:
        """Take a thread back whose call returned too late, or have one end that is not needed."""
        with self._lock:
            self._num_hung -= 1
            if self._num_callers > len(self._workers):
                self._num_callers -= 1
                self._calls.put(None)
        self._give_back(memory)

    def _give_back(self, memory: npt.NDArray[np.uint8]) -> None:
        if len(memory):
            self.store.unregister(memory.data)

    def _find_late(self) -> None:
        """Find all calls that are late, before the thread of one of them takes another job."""
        now = time.monotonic()
        for worker in self._workers:
            if worker.deadline is not None and (self._is_closed or worker.deadline <= now):
                worker.deadline = None
                worker.call_ended.notify()
                self._count_failure(is_overdue=True)

    # What threads do.

    def _work(self, worker: _Worker) -> None:
        """Do what is queued, until the tier is closed."""
        while jobs := self._wait(self._load_came, partial(self._take_some, worker)):
            refusal, reason = Refusal.IO_ERROR, "error"
            try:
                self._do(worker, jobs)
            except _GivenUpError:
                refusal, reason = Refusal.TIMEOUT, "timed_out"
                if self._is_closing:
                    refusal, reason = Refusal.ABORTED, "aborted"
            except Exception:  # a bug, or a store that breaks its word: it must not end the thread
                report_error()
                with self._lock:
                    self._faults["error"] += 1
                    self._count_failure()
            with self._lock:
                left = [job for job in jobs if job in self._taken]
                worker.jobs = ()
                self._load_came.notify()  # one less reads or writes
            self._end_all(left, refusal, reason)
            self._end_unwanted()
        self._end_unwanted()

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
            self._end_all(jobs, Refusal.ABORTED, "aborted")
        else:
            self._end_all(jobs, Refusal.IO_ERROR, "unhealthy")
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
        return busy < len(self._workers) - 1

    def _take_loads(self) -> list[Any]:
        """Take a thread's share of the loads: of different entries, for a call names each once."""
        loads = self._loads
        share = min(-(-len(loads) // (len(self._workers) - 1)), _ENTRIES_AT_ONCE)
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
        connects: bool = False,
    ) -> Sequence[_T]:
        """Call the store, by the deadline; count what it did not do. It is not asked of nothing."""
        if not names:
            return []
        with self._lock:
            seconds = max(self._call_seconds, _CONNECT_SECONDS) if connects else self._call_seconds
            began = time.monotonic()
            worker.deadline = began + seconds
            future = self._submit(partial(call, names, *buffers))
            future.add_done_callback(lambda _: self._tell(worker))
            while not future.done() and worker.deadline is not None:
                if not worker.call_ended.wait(seconds):
                    worker.deadline = began  # so it is late by any clock
                if not future.done():
                    self._find_late()
            is_late = worker.deadline is None
            worker.deadline = None
            if is_late:
                self._give_up(worker, future)
                raise _GivenUpError
        answers: Sequence[_T] = future.result()
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

    def _tell(self, worker: _Worker) -> None:
        with self._lock:
            worker.call_ended.notify()

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
        self._call(worker, lambda _: [self.store.health().fault], ["health"], connects=is_first)
        if is_first:
            self._end(probe)

    def _know(self, key: EntryKey, *, is_there: bool) -> None:
        with self._lock:
            if is_there and key not in self._bad:
                _remember(self._stored, key, time.monotonic())
            else:
                self._stored.pop(key, None)

    def _load_all(self, worker: _Worker, loads: Sequence[LoadJob]) -> None:
        """Read entries: their manifests, and then the chunks of those that match."""
        sizes = [_manifest_bytes(each.expected.payload_bytes, self._chunk_bytes) for each in loads]
        buffers = self._buffers(worker, sizes)
        names = [str(each.expected.key) for each in loads]
        answers = self._call(worker, self.store.get_many_into, names, buffers)
        chunks: list[_Part] = []
        for load, answer, buffer in zip(loads, answers, buffers, strict=True):
            manifest = self._manifest_in(load, answer, buffer)
            if isinstance(manifest, Refusal):
                self._refuse(load, manifest, has_manifest=False)
                continue
            payload_mac, chunk_macs = manifest
            parts = self._parts(load, load.expected, load.into)
            chunks += [
                part._replace(payload_mac=payload_mac, mac=mac)
                for part, mac in zip(parts, chunk_macs, strict=True)
            ]
        left = Counter(chunk.job for chunk in chunks)
        for group in _grouped(chunks, _CHUNKS_READ_AT_ONCE):
            taken = [each for each in group if each.job in self._taken]  # not of a refused one
            buffers = self._buffers(worker, [len(chunk.payload) for chunk in taken])
            names = [chunk.name for chunk in taken]
            answers = self._call(worker, self.store.get_many_into, names, buffers)
            for chunk, answer, buffer in zip(taken, answers, buffers, strict=True):
                load = chunk.job
                if load not in self._taken:
                    continue
                # What was copied is verified: a store may still write to the buffer.
                _copy(chunk.payload, buffer)
                refusal = self._refusal(answer, chunk)
                if refusal is not None:
                    self._refuse(load, refusal, has_manifest=True)
                    continue
                left[load] -= 1
                if not left[load]:
                    self._know(load.expected.key, is_there=True)
                    self._end(load)

    def _manifest_in(
        self, load: LoadJob, answer: int | StoreFault, buffer: memoryview
    ) -> tuple[PayloadMac, list[bytes]] | Refusal:
        """Read a manifest that the store has brought, or not."""
        if isinstance(answer, StoreFault):
            return _refusal_of(answer)
        return _read_manifest(buffer[:answer], load.expected, self._chunk_bytes, self._macs)

    def _refusal(self, answer: int | StoreFault, chunk: _Part) -> Refusal | None:
        """Say what is wrong with a chunk."""
        if isinstance(answer, StoreFault):
            return _refusal_of(answer)
        if answer != len(chunk.payload):
            return Refusal.SHORT if answer < len(chunk.payload) else Refusal.PAYLOAD_BYTES
        found = chunk.payload_mac.part(chunk.number, chunk.payload)
        return None if hmac.compare_digest(found, chunk.mac) else Refusal.MAC

    def _refuse(self, load: LoadJob, refusal: Refusal, *, has_manifest: bool) -> None:
        """End a load that brought nothing, and have what is bad taken out of the store."""
        key = load.expected.key
        is_bad = refusal not in (Refusal.MISSING, Refusal.IO_ERROR, Refusal.TIMEOUT)
        with self._lock:
            self._stored.pop(key, None)
            if is_bad:
                _remember(self._bad, key, None)
            # Without one of its chunks nobody can use the rest, and nobody would write it anew.
            if is_bad or (has_manifest and refusal is Refusal.MISSING):
                self._add(self._removals, RemovalJob(None, self._names(load.expected)))
        self._end(load, refusal)

    def _remove(self, worker: _Worker, names: list[str]) -> bool:
        """Remove an entry's parts, its manifest first; say whether they are gone."""
        answers = [
            *self._call(worker, self.store.remove, names[-1:]),
            *self._call(worker, self.store.remove, names[:-1]),
        ]
        return not any(answer not in (None, StoreFault.MISSING) for answer in answers)

    def _names(self, facts: EntryFacts) -> list[str]:
        """Return the keys of an entry's chunks and, last, of its manifest."""
        count = -(-facts.payload_bytes // self._chunk_bytes)
        return [*(str(replace(facts.key, chunk=index)) for index in range(count)), str(facts.key)]

    def _parts(self, job: Job, facts: EntryFacts, payload: memoryview) -> list[_Part]:
        """Return the chunks of an entry."""
        chunks = _grouped(payload, self._chunk_bytes)
        return [
            _Part(job, name, chunk, number)
            for number, (name, chunk) in enumerate(zip(self._names(facts), chunks, strict=False))
        ]

    def _put_all(self, worker: _Worker, puts: Sequence[PutJob]) -> None:
        """Write entries: chunks, and manifests when all of them are there; each confirmed.

        Those that end on the way, for one reason or another, are taken no more.
        """
        self._end_bad(worker, puts)
        self._end_stored(worker, [put for put in puts if put in self._taken])
        chunks, manifests = [], []
        for put in puts:
            if put in self._taken:
                parts = self._parts(put, put.facts, put.payload)
                payload_mac = self._macs.payload_mac(put.facts.key.identity)
                macs = [payload_mac.part(part.number, part.payload) for part in parts]
                manifest = _write_manifest(
                    put.facts, self._chunk_bytes, macs, self._macs, payload_mac
                )
                chunks += parts
                manifests.append(_Part(put, str(put.facts.key), memoryview(manifest)))
        self._write(worker, chunks, _CHUNKS_AT_ONCE)
        self._write(worker, manifests, _ENTRIES_AT_ONCE)
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


def _refusal_of(fault: StoreFault) -> Refusal:
    if fault is StoreFault.MISSING:
        return Refusal.MISSING
    if fault is StoreFault.SHORT:  # the blob is longer than it can be
        return Refusal.PAYLOAD_BYTES
    return Refusal.TIMEOUT if fault is StoreFault.TIMED_OUT else Refusal.IO_ERROR


def _remember(known: OrderedDict[EntryKey, Any], key: EntryKey, value: object) -> None:
    """Put a key last, and forget the oldest ones beyond what is kept."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > _MAX_REMEMBERED:
        known.popitem(last=False)


def _manifest_bytes(payload_bytes: int, chunk_bytes: int) -> int:
    """Return the bytes of the manifest of an entry of so many."""
    return HEADER_BYTES + _SIZES.size + _MAC_BYTES * -(-payload_bytes // chunk_bytes)


def _write_manifest(
    facts: EntryFacts,
    chunk_bytes: int,
    chunk_macs: Sequence[bytes],
    macs: EntryMacs,
    payload_mac: PayloadMac,
) -> bytes:
    """Return the manifest of an entry: its header, the size of chunks, and their MACs.

    The header's payload tag is that of what follows it, so that it vouches for every chunk.
    """
    table = _SIZES.pack(chunk_bytes, len(chunk_macs)) + b"".join(chunk_macs)
    header = EntryHeader(payload_mac.tag_of_table(table), nonce=payload_mac.nonce)
    return header.to_bytes(facts, macs.header_key(facts.key.identity)) + table


def _read_manifest(
    data: memoryview, expected: EntryFacts, chunk_bytes: int, macs: EntryMacs
) -> tuple[PayloadMac, list[bytes]] | Refusal:
    """Read a manifest, and compare every field with what the request derived."""
    header = EntryHeader.read(data, expected, macs.header_key(expected.key.identity))
    if isinstance(header, Refusal):
        return header
    table = bytes(data[HEADER_BYTES:])
    payload_mac = macs.payload_mac(expected.key.identity, header.nonce)
    if not hmac.compare_digest(payload_mac.tag_of_table(table), header.payload_tag):
        return Refusal.MAC
    if len(data) != _manifest_bytes(expected.payload_bytes, chunk_bytes):
        return Refusal.CHUNK
    size, count = _SIZES.unpack_from(table)
    if size != chunk_bytes or count != -(-expected.payload_bytes // chunk_bytes):
        return Refusal.CHUNK
    chunk_macs = table[_SIZES.size :]
    ends = range(0, len(chunk_macs), _MAC_BYTES)
    return payload_mac, [chunk_macs[at : at + _MAC_BYTES] for at in ends]
