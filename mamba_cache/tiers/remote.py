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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    Found,
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
_FAILURES_TO_OPEN: Final = 2
_PROBE_SECONDS: Final = 5.0
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
    found: list[bool] | None = None

    def answer(self, refusal: Refusal | None) -> list[bool]:
        """Return what was found, nothing if the question was not asked."""
        return [False] * len(self.keys) if self.found is None else self.found


class _Part(NamedTuple):
    """A chunk or the manifest of an entry, and the MAC that it must have if it is read."""

    job: Any  # that of the entry
    number: int
    name: str
    payload: memoryview
    payload_mac: Any = None
    mac: bytes = b""


class _Worker:
    """A thread, and the memory that its calls read and write."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.deadline: float | None = None
        self.reads_since: float | None = None
        self.is_given_up = self.is_loading = self.is_writing = False
        self.memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.thread: threading.Thread


class _GivenUp(BaseException):
    """A call returned after its deadline: nobody waits for it, and its buffers are free again."""


class RemoteTier(QueuedTier):
    """Entries in a store.

    Nobody who calls waits for the store: threads of this object do, each call with a deadline. A
    call that does not return by it is given up with its thread and the memory that it reads or
    writes, and another thread takes its place; what it brings later is not looked at. After two
    failures in a row the store is left alone, and asked every five seconds whether it is back.

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
        self._num_threads, self._call_seconds = num_threads, call_seconds
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
        self._failures = 0
        self._probes_at: float | None = None
        self._heard_at = self._failed_at = self._reads_since = 0.0
        self._probe_is_due = False
        self._looks_at = math.inf  # when who watches wakes by itself
        self._workers: set[_Worker] = set()
        self._hung: set[_Worker] = set()
        self._watcher = threading.Thread(target=self._watch, name="mamba-cache-store-watch")
        self._watcher.daemon = True
        with self._lock:
            for _ in range(self._num_threads):
                self._add_worker()
        self._watcher.start()

    def silence(self) -> float:
        """Return for how many seconds the store has owed an answer to somebody who reads.

        An answer to one call is no sign of life for another, which may ask a machine that is dead.
        0 if nobody waits for any.
        """
        with self._lock:
            if not self._owes_reads():
                return 0.0
            heard_at = max(self._heard_at, self._reads_since)
            calls = [each.reads_since for each in self._workers if each.reads_since is not None]
            return max(0.0, time.monotonic() - min([heard_at, *calls]))

    def ask(self, keys: Sequence[EntryKey], found: Found) -> bool:
        """Queue a question which entries the store has; what cannot be known counts as absent."""
        if not self.is_healthy:
            return False
        with self._lock:
            if not self._takes_calls or len(self._asks) >= self._max_queued:
                return False
            self._counts["asks"] += 1
            self._add(self._asks, _Ask(found, keys))
        return True

    def _find(self, keys: Sequence[EntryKey]) -> list[bool]:
        """Say of each key whether this process knows that the store has it, without asking."""
        now = time.monotonic()
        return [_is_recent(self._stored, key, now) for key in keys]

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
        """Wait for calls that are under way, but not longer than until their deadlines."""
        with self._lock:
            self._call_began.notify_all()
        self._watcher.join()  # which ends the others

    def _own_stats(self) -> dict[str, Any]:
        return {
            "asks": self._counts["asks"],
            "faults": dict(self._faults),
            "given_up": self._counts["given_up"],
            "hung": len(self._hung),
            "opened": self._counts["opened"],
        }

    def check_invariants(self) -> None:
        """Prove that the bookkeeping agrees with itself."""
        with self._lock:
            super().check_invariants()
            busy = [job for worker in self._workers for job in worker.jobs]
            statements = {
                "each job is one thread's": len(set(busy)) == len(busy),
                "what a thread does was taken": self._taken.issuperset(busy),
                "a call that was given up has no jobs": not any(each.jobs for each in self._hung),
                "threads are lost to nothing but calls": self._is_closing
                or bool(self._hung)
                or len(self._workers) == self._num_threads,
            }
        breaches = [statement for statement, holds in statements.items() if not holds]
        if breaches:
            raise InvariantError(f"does not hold: {'; '.join(breaches)}")

    # Bookkeeping. The lock is held.

    @property
    def _takes_calls(self) -> bool:
        is_left_alone = self._failures >= _FAILURES_TO_OPEN
        return not self._is_closing and not is_left_alone and bool(self._workers)

    def _add(self, queue: deque[Any], job: Job) -> None:
        if isinstance(job, (_Ask, LoadJob)) and not self._owes_reads():
            self._reads_since = time.monotonic()
        super()._add(queue, job)

    def _owes_reads(self) -> bool:
        """Say whether somebody waits for what the store says or brings."""
        is_queued = self._asks or self._loads
        return bool(is_queued) or any(isinstance(j, (_Ask, LoadJob)) for j in self._taken)

    def _add_worker(self) -> None:
        worker = _Worker()
        worker.thread = threading.Thread(
            target=self._work, args=(worker,), name="mamba-cache-store", daemon=True
        )
        self._workers.add(worker)
        worker.thread.start()

    def _give_up(self, worker: _Worker) -> list[Job]:
        """Take a worker's jobs from it, and have another one in its place; return them."""
        jobs, worker.jobs = worker.jobs, []
        worker.is_given_up, worker.deadline = True, None
        self._workers.discard(worker)
        self._hung.add(worker)
        self._counts["given_up"] += 1
        # Hung threads keep their memory, so they are not replaced without end.
        if not self._is_closing and len(self._hung) <= self._num_threads:
            self._add_worker()
        return jobs

    # What threads do.

    def _work(self, worker: _Worker) -> None:
        """Do what is queued, until the tier is closed, or others do it."""
        while self._work_once(worker):
            pass

    def _work_once(self, worker: _Worker) -> bool:
        """Do some of it; return whether to go on."""
        try:
            jobs = self._wait(self._load_came, partial(self._take_some, worker))
            if jobs:
                self._do(worker, jobs)
            return bool(jobs)
        except _GivenUp:
            return self._come_back(worker)
        except Exception:  # a bug, or a store that breaks its word: it must not end the thread
            report_error()
            with self._lock:
                self._faults["error"] += 1
                jobs, worker.jobs = worker.jobs, []
                self._count_failure()
            self._end_all(jobs, Refusal.IO_ERROR, "error")
            return True

    def _come_back(self, worker: _Worker) -> bool:
        """Take a thread back whose call returned too late; return whether it is needed."""
        with self._lock:
            self._hung.discard(worker)
            if not self._is_closing and len(self._workers) < self._num_threads:
                worker.is_given_up = worker.is_writing = False
                self._workers.add(worker)
                return True
        if len(worker.memory):
            self.store.unregister(worker.memory.data)
        return False

    def _take_some(self, worker: _Worker) -> list[Any]:
        """Have a worker take jobs of one kind, questions and loads first."""
        worker.is_loading = worker.is_writing = False
        jobs: list[Any] = []
        if self._failures >= _FAILURES_TO_OPEN:
            if self._probe_is_due:
                self._probe_is_due = False
                return [Job(None)]  # for which nobody waits: no job of the worker's
        elif self._connecting or self._asks:
            jobs = self._take(self._connecting) or self._take(self._asks)
        elif self._loads and self._has_room(sum(each.is_loading for each in self._workers)):
            jobs = self._take_loads()
            worker.is_loading = True
        elif self._removals:
            jobs = self._take(self._removals)
        elif self._has_room(sum(each.is_writing for each in self._workers)):
            jobs = self._take_puts(_ENTRIES_AT_ONCE)
            worker.is_writing = bool(jobs)
        worker.jobs = list(jobs)
        return jobs

    def _has_room(self, num_busy: int) -> bool:
        """Say whether one more thread may do what so many do: one is left for all else."""
        return num_busy < self._num_threads - 1

    def _take_loads(self) -> list[Any]:
        """Take a thread's share of the loads: of different entries, for a call names each once."""
        loads = self._loads
        share = min(-(-len(loads) // (self._num_threads - 1)), _ENTRIES_AT_ONCE)
        keys: set[EntryKey] = set()
        while len(keys) < share and loads[len(keys)].expected.key not in keys:
            keys.add(loads[len(keys)].expected.key)
        return self._take(loads, len(keys))

    def _do(self, worker: _Worker, jobs: Sequence[Job]) -> None:
        first = jobs[0]
        if isinstance(first, _Ask):
            self._answer(worker, first)
        elif type(first) is Job:  # a look whether the store is there
            self._probe(worker, first)
        elif isinstance(first, RemovalJob):
            self._remove(worker, first.entry)
            self._finish(worker, first)
        elif isinstance(first, LoadJob):
            self._load_all(worker, [job for job in jobs if isinstance(job, LoadJob)])
            with self._lock:
                worker.is_loading = False
                self._load_came.notify()  # one less reads
        else:
            self._put_all(worker, [job for job in jobs if isinstance(job, PutJob)])
            with self._lock:
                worker.is_writing = False
                self._load_came.notify()  # one less writes

    def _call(
        self, worker: _Worker, call: Callable[[], Sequence[_T]], *, connects: bool = False
    ) -> Sequence[_T]:
        """Call the store, by the deadline; count what it did not do."""
        with self._lock:
            seconds = max(self._call_seconds, _CONNECT_SECONDS) if connects else self._call_seconds
            now = time.monotonic()
            worker.deadline = now + seconds
            is_read = any(isinstance(job, (_Ask, LoadJob)) for job in worker.jobs)
            worker.reads_since = now if is_read else None
            if worker.deadline < self._looks_at:
                self._call_began.notify()
        answers: Sequence[_T] | None = None
        try:
            answers = call()
        finally:
            with self._lock:
                worker.reads_since = None
                if worker.is_given_up:
                    raise _GivenUp
                worker.deadline = None
        with self._lock:
            faults = [answer for answer in answers if isinstance(answer, StoreFault)]
            self._faults.update(each.value for each in faults if each is not StoreFault.MISSING)
            if any(each.is_of_the_store for each in faults):
                self._count_failure()
            else:
                self._heard_at = time.monotonic()
                if now >= self._failed_at:  # a call that began before says nothing of what came
                    self._failures, self._probes_at, self._probe_is_due = 0, None, False
        return answers

    def _count_failure(self) -> None:
        self._failures += 1
        self._failed_at = time.monotonic()
        self._call_began.notify()  # the watcher ends what is queued, probes, and warns once
        if self._failures < _FAILURES_TO_OPEN:
            return
        if self._failures == _FAILURES_TO_OPEN:
            self._counts["opened"] += 1
        self._probes_at = time.monotonic() + _PROBE_SECONDS
        self._stored.clear()  # one that comes back may have nothing any more

    def _finish(
        self, worker: _Worker, job: Job, refusal: Refusal | None = None, reason: str | None = None
    ) -> None:
        with self._lock:
            worker.jobs.remove(job)
        self._end(job, refusal, reason)

    def _watch(self) -> None:
        """Give up calls that do not return, and have a store that failed asked again."""
        is_told = False
        while True:
            jobs: list[Job] = []
            with self._lock:
                if self._is_closing:
                    break
                now = time.monotonic()
                for worker in [each for each in self._workers if (each.deadline or now + 1) <= now]:
                    jobs += self._give_up(worker)
                    self._count_failure()
                dropped = [] if self._takes_calls else self._take_queued()
                if self._probes_at is not None and now >= self._probes_at:
                    self._probes_at, self._probe_is_due = None, True
                    self._load_came.notify_all()
                # It has never answered, or fails again and again.
                has_failed = self._counts["opened"] or (self._failures and not self._heard_at)
                if has_failed and not is_told:
                    faults = ", ".join(self._faults) or "timed_out"
                elif not jobs and not dropped:
                    moments = [each.deadline for each in self._workers if each.deadline is not None]
                    moments += [] if self._probes_at is None else [self._probes_at]
                    self._looks_at = min(moments, default=math.inf)
                    self._call_began.wait(self._looks_at - now if moments else None)
            self._end_all(jobs, Refusal.TIMEOUT, "timed_out")
            self._end_all(dropped, Refusal.IO_ERROR, "unhealthy")
            if has_failed and not is_told:
                is_told = True
                _log.warning(
                    "store: %s does not answer (%s). Requests go on without it, and it is asked "
                    "again; `mamba-cache doctor --store URL` says what is wrong",
                    self.store.name,
                    faults,
                )
        self._end_threads()

    def _end_threads(self) -> None:
        """End what is queued, and wait for calls that are under way until their deadlines."""
        self._end_all(self._take_queued(), Refusal.ABORTED, "aborted")
        with self._lock:
            workers = list(self._workers)
        for worker in workers:
            worker.thread.join(self._call_seconds)
        with self._lock:
            late = [worker for worker in workers if worker.thread.is_alive()]
            jobs = [job for worker in late for job in self._give_up(worker)]
        self._end_all(jobs, Refusal.ABORTED, "aborted")
        for worker in workers:
            if worker not in late and len(worker.memory):
                self.store.unregister(worker.memory.data)
        if self._owns_store:
            closing = threading.Thread(target=self.store.close, daemon=True)
            try:
                closing.start()
            except RuntimeError:  # an interpreter that ends starts no thread any more
                self.store.close()
            else:
                closing.join(self._call_seconds)

    def _answer(self, worker: _Worker, ask: _Ask) -> None:
        """Ask the store what it has."""
        names = [str(key) for key in ask.keys]
        answers = self._call(worker, lambda: self.store.exists_many(names)) if names else []
        with self._lock:
            ask.found = [
                fault is None and key not in self._bad
                for key, fault in zip(ask.keys, answers, strict=True)
            ]
            for key, is_there in zip(ask.keys, ask.found, strict=True):
                self._know(key, is_there=is_there)
        self._finish(worker, ask)

    def _probe(self, worker: _Worker, probe: Job) -> None:
        """Look whether the store is there."""
        is_first = probe in worker.jobs
        self._call(worker, lambda: [self.store.health().fault], connects=is_first)
        if is_first:
            self._finish(worker, probe)

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
        answers = self._get(worker, [str(each.expected.key) for each in loads], buffers)
        chunks: list[_Part] = []
        for load, answer, buffer in zip(loads, answers, buffers, strict=True):
            manifest = self._manifest_in(load, answer, buffer)
            if isinstance(manifest, Refusal):
                self._refuse(worker, load, manifest, has_manifest=False)
                continue
            payload_mac, chunk_macs = manifest
            parts = self._parts(load.expected, load.into)
            chunks += [
                _Part(load, *part, payload_mac, mac)
                for part, mac in zip(parts, chunk_macs, strict=True)
            ]
        left = Counter(chunk.job for chunk in chunks)
        for group in _grouped(chunks, _CHUNKS_READ_AT_ONCE):
            taken = [each for each in group if each.job in worker.jobs]  # not of a refused one
            if not taken:
                continue
            buffers = self._buffers(worker, [len(chunk.payload) for chunk in taken])
            answers = self._get(worker, [chunk.name for chunk in taken], buffers)
            for chunk, answer, buffer in zip(taken, answers, buffers, strict=True):
                load = chunk.job
                if load not in worker.jobs:
                    continue
                # What was copied is verified: a store may still write to the buffer.
                _copy(chunk.payload, buffer)
                refusal = self._refusal(answer, chunk)
                if refusal is not None:
                    self._refuse(worker, load, refusal, has_manifest=True)
                    continue
                left[load] -= 1
                if not left[load]:
                    self._know(load.expected.key, is_there=True)
                    self._finish(worker, load)

    def _get(
        self, worker: _Worker, names: list[str], buffers: list[memoryview]
    ) -> Sequence[int | StoreFault]:
        return self._call(worker, lambda: self.store.get_many_into(names, buffers))

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

    def _refuse(
        self, worker: _Worker, load: LoadJob, refusal: Refusal, *, has_manifest: bool
    ) -> None:
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
        self._finish(worker, load, refusal)

    def _remove(self, worker: _Worker, names: list[str]) -> bool:
        """Remove an entry's parts, its manifest first; say whether they are gone."""
        answers = [
            *self._call(worker, lambda: self.store.remove(names[-1:])),
            *self._call(worker, lambda: self.store.remove(names[:-1])),
        ]
        return not any(answer not in (None, StoreFault.MISSING) for answer in answers)

    def _names(self, facts: EntryFacts) -> list[str]:
        """Return the keys of an entry's chunks and, last, of its manifest."""
        count = -(-facts.payload_bytes // self._chunk_bytes)
        return [*(str(replace(facts.key, chunk=index)) for index in range(count)), str(facts.key)]

    def _parts(self, facts: EntryFacts, payload: memoryview) -> list[tuple[int, str, memoryview]]:
        """Return the number of each of an entry's chunks, its key, and its bytes."""
        parts = [payload[part] for part in _chunk_slices(facts.payload_bytes, self._chunk_bytes)]
        return list(zip(range(len(parts)), self._names(facts)[:-1], parts, strict=True))

    def _put_all(self, worker: _Worker, puts: Sequence[PutJob]) -> None:
        """Write entries: chunks, and manifests when all of them are there; each confirmed.

        Those that end on the way, for one reason or another, leave the worker's jobs.
        """
        self._end_bad(worker, puts)
        self._end_stored(worker, [put for put in puts if put in worker.jobs])
        chunks = [
            _Part(put, *each)
            for put in puts
            if put in worker.jobs
            for each in self._parts(put.facts, put.payload)
        ]
        payload_macs = {put: self._macs.payload_mac(put.facts.key.identity) for put in puts}
        chunk_macs = self._write(worker, chunks, _CHUNKS_AT_ONCE, payload_macs)
        manifests = []
        for put in puts:
            if put in worker.jobs:
                *names, name = self._names(put.facts)
                own = [chunk_macs[each] for each in names]
                manifest = _write_manifest(
                    put.facts, self._chunk_bytes, own, self._macs, payload_macs[put]
                )
                manifests.append(_Part(put, 0, name, memoryview(manifest)))
        self._write(worker, manifests, _ENTRIES_AT_ONCE)
        for put in puts:
            if put in worker.jobs:
                self._know(put.facts.key, is_there=True)
                if put.is_revoked:
                    self._remove(worker, self._names(put.facts))
                self._finish(worker, put)

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
                self._finish(worker, put, Refusal.IO_ERROR, "not_removed")

    def _end_stored(self, worker: _Worker, puts: Sequence[PutJob]) -> None:
        """End those that somebody has stored meanwhile, or the store does not answer for."""
        if not puts:
            return
        names = [str(put.facts.key) for put in puts]
        answers = self._call(worker, lambda: self.store.exists_many(names))
        for put, fault in zip(puts, answers, strict=True):
            if fault is None:
                self._know(put.facts.key, is_there=True)
                self._finish(worker, put, None, "found_stored")
            elif fault is not StoreFault.MISSING:
                self._finish(worker, put, _refusal_of(fault), fault.value)

    def _write(
        self,
        worker: _Worker,
        parts: Sequence[_Part],
        at_once: int,
        payload_macs: Mapping[PutJob, PayloadMac] | None = None,
    ) -> dict[str, bytes]:
        """Put parts of entries, but none of one that has ended; return the MACs of chunks by key.

        That a store took them does not say that they can be found: so it is asked.
        """
        macs = {}
        for group in _grouped(parts, at_once):
            taken = [part for part in group if part.job in worker.jobs]
            if not taken:
                continue
            buffers = self._buffers(worker, [len(part.payload) for part in taken])
            for part, buffer in zip(taken, buffers, strict=True):
                _copy(buffer, part.payload)
                if payload_macs is not None:
                    macs[part.name] = payload_macs[part.job].part(part.number, buffer)
            names = [part.name for part in taken]
            answers = self._call(worker, partial(self.store.put_many, names, buffers))
            self._end_failed(worker, taken, answers, StoreFault.MISSING.value)
        taken = [part for part in parts if part.job in worker.jobs]
        if taken:
            names = [part.name for part in taken]
            answers = self._call(worker, partial(self.store.exists_many, names))
            self._end_failed(worker, taken, answers, "unconfirmed")
        return macs

    def _end_failed(
        self,
        worker: _Worker,
        parts: Sequence[_Part],
        answers: Sequence[StoreFault | None],
        missing: str,
    ) -> None:
        """End the puts of parts of which an answer is a fault."""
        for part, fault in zip(parts, answers, strict=True):
            if fault is not None and part.job in worker.jobs:
                reason = missing if fault is StoreFault.MISSING else fault.value
                self._finish(worker, part.job, _refusal_of(fault), reason)

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


def _grouped(items: Sequence[_T], count: int) -> list[Sequence[_T]]:
    return [items[first : first + count] for first in range(0, len(items), count)]


def _refusal_of(fault: StoreFault) -> Refusal:
    if fault is StoreFault.MISSING:
        return Refusal.MISSING
    if fault is StoreFault.SHORT:  # the blob is longer than it can be
        return Refusal.PAYLOAD_BYTES
    return Refusal.TIMEOUT if fault is StoreFault.TIMED_OUT else Refusal.IO_ERROR


def _is_recent(known: Mapping[EntryKey, float], key: EntryKey, now: float) -> bool:
    """Say whether something was learnt of a key that holds still: others use the store, too."""
    known_at = known.get(key)
    return known_at is not None and now - known_at < _BELIEVED_SECONDS


def _remember(known: OrderedDict[EntryKey, Any], key: EntryKey, value: object) -> None:
    """Put a key last, and forget the oldest ones beyond what is kept."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > _MAX_REMEMBERED:
        known.popitem(last=False)


def _chunk_slices(payload_bytes: int, chunk_bytes: int) -> list[slice]:
    """Return where the chunks of a payload lie in it; the last one may be shorter."""
    starts = range(0, payload_bytes, chunk_bytes)
    return [slice(start, min(start + chunk_bytes, payload_bytes)) for start in starts]


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
