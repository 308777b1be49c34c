"""The lower tier: entries on a disk or in a store, verified whenever they are read.

A caller *queues* a job, a thread *takes* it, and when it is *over*, it is counted and its ``done``
is called. ``flush`` waits for all of that.

An entry is stored in chunks, and its header last: who finds the header finds the chunks. What a
store says is not believed: ``exists`` confirms what was put, sizes and MACs what was read.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mamba_cache.errors import InvalidArgumentError, InvariantError
from mamba_cache.stores import BlobStore, StoreFault
from mamba_cache.tiers.disk import DiskStore
from mamba_cache.tiers.entry import (
    HEADER_BYTES,
    EntryFacts,
    EntryKey,
    EntryMacs,
    PayloadMac,
    Refusal,
)
from mamba_cache.tiers.host import TierStats

__all__ = ["Done", "Job", "LoadJob", "LowerTier", "PutJob"]

_log = logging.getLogger(__name__)

_REST_SECONDS: Final = 5.0
"""For so long a tier is left alone after failures."""

_FAILURES_TO_REST: Final = 2

_CHUNK_BYTES: Final = 2**21
"""Part of the format, as the header is: all processes that share a store have the same."""

_CHUNKS_AT_ONCE: Final = 8
_CHUNKS_READ_AT_ONCE: Final = 4  # a call of more may take so long that a store seems dead
_ENTRIES_AT_ONCE: Final = 16
_MAX_THREADS: Final = 4  # for a store, unless more are asked for
_CONNECT_SECONDS: Final = 30.0
_BELIEVED_SECONDS: Final = 60.0
_MAX_REMEMBERED: Final = 2**16

_UNDAMAGED: Final = frozenset({Refusal.MISSING, Refusal.IO_ERROR, Refusal.TIMEOUT, Refusal.ABORTED})
"""Refusals of entries that need not be bad."""

Done: TypeAlias = Callable[[Refusal | None], object]
"""Called once, from any thread, when a put or a load is over: None, or why it failed."""

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Job:
    """Something that a thread is to do."""

    done: Done | None
    is_revoked: bool = field(default=False, kw_only=True)  # the entry is wrong: the job aborts
    num_chunks_left: int = field(default=0, kw_only=True)  # of a load: it waits for their reads


@dataclass(slots=True, eq=False)
class LoadJob(Job):
    """An entry that is to be read, as the request derived it: the header, and then the chunks."""

    expected: EntryFacts
    into: memoryview
    mac: PayloadMac | None = None  # from the header
    macs: dict[int, bytes] = field(default_factory=dict)  # of the chunks that have come
    refusal: Refusal | None = None  # of a chunk
    is_unreadable: bool = False  # so that it is of no use, whatever is in it

    @property
    def name(self) -> str:
        """The name of the header."""
        return str(self.expected.key)


@dataclass(slots=True, eq=False)
class _ReadJob(Job):
    """A chunk of a load that is to be read."""

    load: LoadJob
    name: str
    number: int
    chunk: memoryview


@dataclass(slots=True, eq=False)
class PutJob(Job):
    """An entry that is to be written."""

    facts: EntryFacts
    payload: memoryview


class _Part(NamedTuple):
    """A chunk or the header of an entry that is to be written."""

    put: PutJob
    name: str
    content: memoryview


@dataclass(slots=True, eq=False)
class _RemovalJob(Job):
    """An entry that is known to be wrong: the names of its parts, its header's last."""

    names: list[str]


@dataclass(slots=True, eq=False)
class _AskJob(Job):
    """A question which entries a store has; without keys, whether it is there."""

    keys: Sequence[EntryKey] = ()


_Some = TypeVar("_Some", bound=Job)


@dataclass(slots=True, eq=False)
class _Worker:
    """A thread, and the memory that its calls read and write."""

    jobs: Sequence[Job] = ()
    deadline: float | None = None  # of its call
    memory: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))


class _GivenUpError(Exception):
    """A call did not return by its deadline, and was given up."""


class LowerTier:
    """A place for entries below host memory, whose threads do what callers queue.

    No call waits for input or output but ``flush`` and ``close``, and none raises because of it:
    what goes wrong is a ``Refusal``, which the tier counts too. A tier that is slow, full or broken
    refuses at once, and in a process that was forked it refuses everything. Any thread may call;
    ``done`` is called from threads of this object, or from the caller's when the answer is known.

    A call of a store that does not return by its deadline is given up with its thread and the
    memory that it reads or writes, and another thread takes its place. After such a call, or two
    failures in a row, a store is left alone, and asked every five seconds whether it is back.
    A disk reads and writes the callers' buffers and says at once what it has; so its calls have no
    deadline, and after two failures it is used again five seconds later.

    An entry that is not what its key says is not asked for again by this process until it has put
    it anew, and removed.
    """

    def __init__(
        self,
        store: BlobStore,
        *,
        macs: EntryMacs,
        write_on_use: int = 2,
        num_threads: int | None = None,
        max_queued: int = 1024,
        call_seconds: float = 2.0,
        owns_store: bool = False,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self._disk = store if isinstance(store, DiskStore) else None
        self._call_seconds: float | None = call_seconds
        num_cpus = os.cpu_count() or _MAX_THREADS
        if self._disk is not None:
            self.name, self._call_seconds, chunk_bytes = "disk", None, self._disk.chunk_bytes
            default_threads = 1 + max(8, min(16, num_cpus))  # readers make MACs as well
            self._max_loads_at_once = self._max_reads_at_once = self._max_puts_at_once = 1
        else:
            # Mooncake's reads of a dead machine keep a processor busy each.
            self.name, default_threads = "store", max(2, min(_MAX_THREADS, num_cpus))
            self._max_loads_at_once = self._max_puts_at_once = _ENTRIES_AT_ONCE
            self._max_reads_at_once = _CHUNKS_READ_AT_ONCE
        if chunk_bytes > store.max_blob_bytes:
            raise InvalidArgumentError(
                f"chunk_bytes={chunk_bytes} is more than {store.name} takes as one blob "
                f"({store.max_blob_bytes})"
            )
        self.store, self._owns_store = store, owns_store
        self._macs = macs
        self._write_on_use, self._max_queued = write_on_use, max_queued
        self._num_threads = default_threads if num_threads is None else num_threads
        self._max_writers = 1 if self._disk is not None else self._num_threads - 1
        self._chunk_bytes = chunk_bytes
        self._lock = threading.RLock()
        self._job_came = threading.Condition(self._lock)
        self._one_told = threading.Condition(self._lock)
        self._call_began = threading.Condition(self._lock)
        # The first one has a store connect, so that no request waits until it has.
        self._asks = deque([_AskJob(None)] if self._disk is None else [])
        self._reads: deque[_ReadJob] = deque()
        self._loads: deque[LoadJob] = deque()
        self._removals: deque[_RemovalJob] = deque()
        self._puts: dict[EntryKey, PutJob] = {}  # by key: an entry is stored once at a time
        self._taken: set[Job] = set()
        self._num_telling = 0
        self._first_uses: OrderedDict[EntryKey, None] = OrderedDict()
        # What a store had, with when that was known, and what was bad.
        self._stored: OrderedDict[EntryKey, float] = OrderedDict()
        self._bad: OrderedDict[EntryKey, None] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._refused: Counter[Refusal] = Counter()  # loads that brought nothing
        self._not_written: Counter[str] = Counter()  # puts that stored nothing
        self._faults: Counter[str] = Counter()
        self._failures = 0  # in a row
        self._failed_at = self._rests_until = 0.0
        self._has_answered = self._is_told = self._is_closing = self._is_closed = False
        self._num_hung = 0
        self._pid = os.getpid()
        self._workers: list[_Worker] = []
        with self._lock:
            self._replace_hung()
        self._watcher = self._start(self._watch)

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked process: without threads, and with a lock that may be held."""
        return os.getpid() != self._pid

    @property
    def is_healthy(self) -> bool:
        """Whether it takes calls now: not for some seconds after failures, nor once closed."""
        return not self._is_forked and self._takes_calls

    @property
    def num_queued(self) -> int:
        """Jobs that are queued, taken, or whose ``done`` runs."""
        if self._is_forked:
            return 0
        with self._lock:
            return len(self._queued()) + len(self._taken) + self._num_telling

    def has_many(self, keys: Sequence[EntryKey]) -> list[bool]:
        """Say of each key whether it is likely to be there; ``load`` alone knows."""
        if not self.is_healthy:
            return [False] * len(keys)
        with self._lock:
            return self._find(keys)

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
            self._add(self._asks, _AskJob(done, keys))
        return True

    def put(self, facts: EntryFacts, payload: memoryview, done: Done) -> bool:
        """Queue an entry to be stored; ``payload`` must not change before ``done`` is called.

        False: it is not taken, which is counted, and ``done`` is not called.
        """
        self._check_size(facts, payload)
        if not self._is_own(facts.key):
            raise InvalidArgumentError(f"{facts.key} is of another identity than the disk cache's")
        if self._is_forked:  # without the lock, which a fork may have left held
            return self._refuse_put("unhealthy")
        with self._lock:
            if not self._takes_calls:
                return self._refuse_put("unhealthy")
            if not all(self._find([facts.key])):
                return self._add_put(PutJob(done, facts, payload))
            self._counts["known"] += 1
        done(None)
        return True

    def load(self, expected: EntryFacts, into: memoryview, done: Done) -> bool:
        """Queue an entry to be read and verified: each field of its header, and its MAC.

        ``into`` holds it only if ``done`` is called with None. False: it is not taken.
        """
        self._check_size(expected, into)
        if self._is_forked:
            return False
        with self._lock:
            if not self._takes_calls or len(self._loads) >= self._max_queued:
                return False
            is_own = self._is_own(expected.key)
            if is_own and expected.key not in self._bad:
                self._add(self._loads, LoadJob(done, expected, into))
                return True
            refusal = Refusal.MISSING if is_own else Refusal.IDENTITY
            self._refused[refusal] += 1
        done(refusal)
        return True

    def remove(self, key: EntryKey) -> None:
        """Make an entry unfindable that is known to be wrong, for other processes too.

        What is under way of it comes to nothing. It is gone after ``flush``. Its chunks in a store
        go when the entry is written anew or evicted.
        """
        if self._is_forked:
            return
        with self._lock:
            if self._is_closing:
                return
            for load in self._open_jobs(LoadJob):
                load.is_revoked |= load.expected.key == key
            for put in self._open_jobs(PutJob):
                put.is_revoked |= put.facts.key == key
            self._stored.pop(key, None)
            _remember(self._bad, key, None)
            if self._takes_calls or self._disk is not None:
                self._add(self._removals, _RemovalJob(None, [str(key)]))

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until what was queued so far is over, and ``done`` has been called for it."""
        if self._is_forked:
            return True
        with self._lock:
            return self._one_told.wait_for(lambda: not self.num_queued, timeout_seconds)

    def close(self) -> None:
        """End its threads; what is queued is given up, and ``done`` called for each.

        It waits for a store's calls that are under way, but not for ever.
        """
        if self._is_forked:
            return  # the threads, and what they hold, are the parent's
        with self._lock:
            if self._is_closed:
                return
            self._is_closing = True
            self._job_came.notify_all()
            self._one_told.wait_for(
                lambda: not self._taken and not self._owes_removals, self._call_seconds
            )
            self._is_closed = True
            self._call_began.notify()
            self._one_told.wait_for(lambda: not self._workers)
        self._watcher.join(self._call_seconds)

    def stats(self) -> TierStats:
        """Return what it did so far and what it holds now."""
        with self._lock:
            counts, dropped = self._counts, dict(self._not_written)
            stored = counts["known"] + counts["written"] + counts["found_stored"]
            return TierStats(
                name=self.name,
                is_healthy=self.is_healthy,
                loads=counts["hits"] + self._refused.total() + len(self._open_jobs(LoadJob)),
                restored=counts["hits"],
                refused={each.value: count for each, count in self._refused.items()},
                puts=stored + sum(dropped.values()) + len(self._open_jobs(PutJob)),
                stored=counts["written"],
                found_stored=counts["found_stored"],
                dropped=dropped,
                read_bytes=counts["read_bytes"],
                written_bytes=counts["written_bytes"],
                asks=counts["asks"],
                faults=dict(self._faults),
                io_errors=self._faults[StoreFault.IO_ERROR.value],
                given_up=counts["given_up"],
                hung=self._num_hung,
                opened=counts["opened"],
                **({} if self._disk is None else self._disk.stats()),
            )

    def check_invariants(self) -> None:
        """Prove that the bookkeeping agrees with itself."""
        with self._lock:
            jobs = [*self._queued(), *self._taken]
            puts = [job.facts.key for job in jobs if isinstance(job, PutJob)]
            busy = [job for worker in self._workers for job in worker.jobs]
            loads = [job for job in self._taken if job.num_chunks_left]
            reads = Counter(job.load for job in jobs if isinstance(job, _ReadJob))
            statements = {
                "each job is there once": len(set(jobs)) == len(jobs),
                "an entry is stored once at a time": len(set(puts)) == len(puts),
                "each job is one thread's": len(set(busy)) == len(busy),
                "what is taken is done by a thread": self._taken <= {*busy, *loads},
                "loads wait for their chunks": (
                    reads == {load: load.num_chunks_left for load in loads}
                ),
                "each job is told of once": self._num_telling >= 0,
                "threads are lost to nothing but a store that hangs": self._num_hung >= 0,
            }
        if self._disk is not None:
            self._disk.check_invariants()
        breaches = [statement for statement, holds in statements.items() if not holds]
        if breaches:
            raise InvariantError(f"does not hold: {'; '.join(breaches)}")

    # Bookkeeping. The lock is held.

    @property
    def _takes_calls(self) -> bool:
        return bool(self._workers) and not self._is_left_alone and not self._is_closing

    @property
    def _is_left_alone(self) -> bool:
        return self._has_failed if self._disk is None else self._rest_left is not None

    @property
    def _owes_removals(self) -> bool:
        """Whether entries of a disk are to be removed: the next process would find them."""
        return self._disk is not None and bool(self._removals)

    def _find(self, keys: Sequence[EntryKey]) -> list[bool]:
        """Say of each key whether this process knows that it is there, without asking a store."""
        if self._disk is not None:
            faults = self._disk.exists_many([str(key) for key in keys])
            pairs = zip(keys, faults, strict=True)
            return [fault is None and key not in self._bad for key, fault in pairs]
        now = time.monotonic()
        # What was learnt does not hold for ever: others use the store, too.
        return [now - self._stored.get(key, -math.inf) < _BELIEVED_SECONDS for key in keys]

    def _is_own(self, key: EntryKey) -> bool:
        return self._disk is None or self._disk.is_own(key)

    def _check_size(self, facts: EntryFacts, payload: memoryview) -> None:
        if len(payload) != facts.payload_bytes:
            raise InvalidArgumentError(
                f"{facts.key} has {facts.payload_bytes} bytes, got a buffer of {len(payload)}"
            )
        if self._disk is not None:
            self._disk.check_size(facts)

    @property
    def _queues(self) -> tuple[deque[Any], ...]:
        return self._asks, self._reads, self._loads, self._removals

    def _queued(self) -> list[Job]:
        return [job for queue in (*self._queues, self._puts.values()) for job in queue]

    def _open_jobs(self, kind: type[_Some]) -> list[_Some]:
        """Return the jobs of a kind that are queued or taken."""
        return [job for job in (*self._queued(), *self._taken) if isinstance(job, kind)]

    def _add(self, queue: deque[Any], job: Job) -> None:
        """Queue a job that is no put."""
        self._job_came.notify()
        queue.append(job)

    def _add_put(self, put: PutJob) -> bool:
        """Queue an entry that is not there to be stored; False, counted, if it is not taken."""
        key = put.facts.key
        taken = (job.facts.key for job in self._taken if isinstance(job, PutJob))
        if key in self._puts or key in taken:
            return self._refuse_put("in_flight")
        if self._write_on_use > 1 and key not in self._first_uses:
            _remember(self._first_uses, key, None)
            return self._refuse_put("first_use")
        if len(self._puts) >= self._max_queued:
            return self._refuse_put("queue_full")
        self._job_came.notify()
        self._puts[key] = put
        self._first_uses.pop(key, None)
        return True

    def _refuse_put(self, reason: str) -> bool:
        """Count an entry that is not taken; return False."""
        self._not_written[reason] += 1
        return False

    @property
    def _rest_left(self) -> float | None:
        """For how many seconds yet the tier is left alone after failures; None: it is not."""
        left = self._rests_until - time.monotonic()
        return left if left > 0 else None

    @property
    def _has_failed(self) -> bool:
        """Whether it failed again and again, and was not asked since with success."""
        return self._failures >= _FAILURES_TO_REST

    def _count_failure(self, *, is_overdue: bool = False) -> None:
        """Count a failure; an answer that is overdue counts as enough of them."""
        had_failed = self._has_failed
        self._failures += _FAILURES_TO_REST if is_overdue else 1
        self._failed_at = time.monotonic()
        if self._has_failed:
            self._rest()
            self._counts["opened"] += not had_failed
            self._stored.clear()  # one that comes back may have nothing any more
            self._job_came.notify_all()  # waiting threads wake when the rest is over

    def _rest(self) -> None:
        self._rests_until = time.monotonic() + _REST_SECONDS

    def _replace_hung(self) -> None:
        """Start threads in the place of those that hang, but not without end."""
        while len(self._workers) < min(self._num_threads, 2 * self._num_threads - self._num_hung):
            worker = _Worker()
            self._start(partial(self._work, worker))
            self._workers.append(worker)

    def _give_up_late(self) -> list[tuple[Job, Refusal | None]]:
        """Give up all calls that are late; return their jobs, whose callers are not told yet."""
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

    def _still_taken(self, jobs: Iterable[Job]) -> list[Job]:
        """Return those jobs that a thread has not done."""
        return [job for job in jobs if job in self._taken and not job.num_chunks_left]

    def _count_over(
        self, jobs: Iterable[Job], refusal: Refusal | None = None, reason: str | None = None
    ) -> list[tuple[Job, Refusal | None]]:
        """Count what came of jobs that were taken; the lock is held. They are to be told.

        ``refusal`` says why they brought nothing, ``reason`` what a put is counted as.
        """
        over: list[tuple[Job, Refusal | None]] = []
        for job in jobs:
            self._taken.remove(job)
            if isinstance(job, _ReadJob):
                load = job.load
                load.num_chunks_left -= 1
                load.refusal = load.refusal or refusal
                if not load.num_chunks_left:
                    over += self._count_over([load], load.refusal)
                continue
            own, counted_as = (Refusal.ABORTED, "aborted") if job.is_revoked else (refusal, reason)
            if isinstance(job, LoadJob):
                own = self._end_load(job, own)
            elif isinstance(job, PutJob):
                if own is not None:
                    self._not_written[str(counted_as)] += 1
                else:
                    self._counts[counted_as or "written"] += 1
                    self._counts["written_bytes"] += 0 if counted_as else len(job.payload)
            self._num_telling += 1
            over.append((job, own))
        return over

    def _end_load(self, load: LoadJob, refusal: Refusal | None) -> Refusal | None:
        """Verify a load that was not refused, and count it; have what is bad removed."""
        key, mac = load.expected.key, load.mac
        if refusal is None:
            assert mac is not None, "its header was read"
            if mac.vouches_for([load.macs[number] for number in range(len(load.macs))]):
                self._know(key, is_there=True)
                self._counts["hits"] += 1
                self._counts["read_bytes"] += len(load.into)
                return None
            refusal = Refusal.MAC
        self._refused[refusal] += 1
        self._stored.pop(key, None)
        is_bad = load.is_unreadable or refusal not in _UNDAMAGED
        if is_bad:
            _remember(self._bad, key, None)
        # Without one of its chunks nobody can use the rest, and nobody would write it anew.
        if is_bad or (mac is not None and refusal is Refusal.MISSING):
            self._add(self._removals, _RemovalJob(None, self._names(load.expected)))
        return refusal

    # What threads do.

    def _start(self, target: Callable[[], None]) -> threading.Thread:
        """Start a thread that does not keep a process from ending."""
        thread = threading.Thread(target=target, name=f"mamba-cache-{self.name}", daemon=True)
        thread.start()
        return thread

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
        is_lost = False
        while not is_lost and (jobs := self._wait(worker)):
            refusal, reason = Refusal.IO_ERROR, "error"
            try:
                self._do(worker, jobs)
            except _GivenUpError:
                refusal, reason = Refusal.ABORTED, "aborted"
            except Exception:  # a bug, or a store that breaks its word: it must not end the thread
                _report_error()
                with self._lock:
                    self._faults["error"] += 1
                    self._count_failure()
            with self._lock:
                over = self._count_over(self._still_taken(worker.jobs), refusal, reason)
                worker.jobs = ()
                is_lost = worker not in self._workers
                self._job_came.notify()  # one less reads or writes
            self._tell(over)
            del jobs, over  # they hold the caller's buffer
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

    def _wait(self, worker: _Worker) -> list[Any]:
        """Wait until a worker has jobs; none: the tier is closed."""
        with self._lock:
            while not self._is_closing or self._owes_removals:
                rest = self._rest_left  # before the look: so its end is not overslept
                if jobs := self._take_some(worker):
                    return jobs
                self._job_came.wait(rest)
            return []

    def _take_some(self, worker: _Worker) -> list[Any]:
        """Have a worker take jobs of one kind, questions and loads first."""
        jobs: list[Any] = []
        if self._owes_removals:
            jobs = self._take(self._removals)
        elif self._is_left_alone:
            if self._rest_left is None:
                self._rest()
                return [_AskJob(None)]  # for which nobody waits: no job of the worker's
        elif self._asks:
            jobs = self._take(self._asks)
        elif (self._reads or self._loads) and self._has_room(
            self._num_threads - 1, LoadJob, _ReadJob
        ):
            jobs = self._take_share(self._reads, self._max_reads_at_once)
            jobs = jobs or self._take_share(self._loads, self._max_loads_at_once)
        elif self._removals:
            jobs = self._take(self._removals)
        elif self._has_room(self._max_writers, PutJob, _RemovalJob):  # puts come after removals
            keys = [*islice(self._puts, self._max_puts_at_once)]
            jobs = [self._puts.pop(key) for key in keys]
            self._taken.update(jobs)
        worker.jobs = jobs
        return jobs

    def _has_room(self, most: int, *kinds: type[Job]) -> bool:
        """Say whether one more thread may do jobs of some kinds: one is left for all else."""
        return sum(isinstance(each.jobs[0], kinds) for each in self._workers if each.jobs) < most

    def _take_share(self, queue: deque[Any], most: int) -> list[Any]:
        """Take a thread's share of a queue: of different names, for a call has each once."""
        share = min(-(-len(queue) // (self._num_threads - 1)), most)
        names: set[str] = set()
        while len(names) < share and queue[len(names)].name not in names:
            names.add(queue[len(names)].name)
        return self._take(queue, len(names))

    def _take(self, queue: deque[Any], count: int = 1) -> list[Any]:
        """Take the oldest jobs of a queue."""
        jobs = [queue.popleft() for _ in range(min(count, len(queue)))]
        self._taken.update(jobs)
        return jobs

    def _end(self, job: Job, refusal: Refusal | None = None, reason: str | None = None) -> None:
        """Count what came of a job that was taken, and call its ``done``."""
        with self._lock:
            over = self._count_over([job], refusal, reason)
        self._tell(over)

    def _tell(self, over: Iterable[tuple[Job, Refusal | None]]) -> None:
        """Call ``done`` of jobs that are over; without the lock."""
        for job, refusal in over:
            if job.done is not None:
                try:
                    job.done(refusal)
                except Exception:  # the caller's; it must not end the thread that others wait for
                    _report_error()
            with self._lock:
                self._num_telling -= 1
                self._one_told.notify_all()

    def _end_unwanted(self) -> None:
        """End what is queued if nobody does it, and warn once of a store that does not answer."""
        with self._lock:
            if self._takes_calls and not self._failures:
                return
            jobs: list[Job] = []
            if not self._takes_calls:
                kept = list(self._removals) if self._owes_removals else []
                jobs = [job for job in self._queued() if job not in kept]
                self._puts.clear()
                for queue in self._queues:
                    queue.clear()
                self._removals.extend(kept)
                self._taken.update(jobs)
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
                "%s: %s does not answer (%s). Requests go on without it, and it is asked again%s",
                self.name,
                self.store.name,
                faults,
                "; open_store(URL).health() says what is wrong" if self._disk is None else "",
            )

    def _do(self, worker: _Worker, jobs: Sequence[Any]) -> None:
        first = jobs[0]
        if isinstance(first, _ReadJob):
            self._read_chunks(worker, jobs)
        elif isinstance(first, LoadJob):
            self._read_headers(worker, jobs)
        elif isinstance(first, PutJob):
            self._put_all(worker, jobs)
        elif isinstance(first, _RemovalJob):
            self._remove(worker, first.names)
            self._end(first)
        elif first.keys:
            names = [str(key) for key in first.keys]
            answers = self._call(worker, self.store.exists_many, names)
            for key, fault in zip(first.keys, answers, strict=True):
                self._know(key, is_there=fault is None)
            self._end(first)
        else:
            is_first = bool(worker.jobs)
            seconds = _CONNECT_SECONDS if is_first else 0.0
            self._call(worker, lambda _: [self.store.health().fault], ["health"], seconds=seconds)
            if is_first:
                self._end(first)

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
            if self._call_seconds is not None:
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
                return answers
            self._has_answered = True
            # Only bytes that were moved say that the next ones will be; and of a store that is left
            # alone any answer. A call that began before the failure says nothing of what came.
            is_back = bool(buffers) or (self._has_failed and self._disk is None)
            if is_back and began >= self._failed_at:
                self._failures, self._rests_until = 0, 0.0
        return answers

    def _know(self, key: EntryKey, *, is_there: bool) -> None:
        """Remember whether a store has an entry; a disk knows."""
        with self._lock:
            if is_there and key not in self._bad and self._disk is None:
                _remember(self._stored, key, time.monotonic())
            else:
                self._stored.pop(key, None)

    def _read_headers(self, worker: _Worker, loads: Sequence[LoadJob]) -> None:
        """Read the headers of entries; refuse those that do not match, have the others read."""
        headers = [memoryview(bytearray(HEADER_BYTES)) for _ in loads]
        names, buffers = [load.name for load in loads], self._buffers(worker, headers)
        answers = self._call(worker, self.store.get_many_into, names, buffers)
        for load, answer, buffer in zip(loads, answers, buffers, strict=True):
            mac: PayloadMac | Refusal = _refusal_of(answer, HEADER_BYTES)
            if answer == HEADER_BYTES:
                mac = self._macs.open(buffer, load.expected)
            if isinstance(mac, Refusal):
                load.is_unreadable = answer is StoreFault.IO_ERROR
                self._end(load, mac)
                continue
            chunks = enumerate(self._chunks(load.expected, load.into))
            reads = [_ReadJob(None, load, name, number, chunk) for number, (name, chunk) in chunks]
            with self._lock:
                load.mac, load.num_chunks_left = mac, len(reads)
                self._reads.extend(reads)
                self._job_came.notify(len(reads) - 1)
        with self._lock:
            worker.jobs = reads = self._take_share(self._reads, self._max_reads_at_once)
        self._read_chunks(worker, reads)

    def _read_chunks(self, worker: _Worker, reads: Sequence[_ReadJob]) -> None:
        """Read chunks, but none of a refused load; the reader of a chunk makes its MAC."""
        for read in reads:
            if read.load.refusal is not None:
                self._end(read)
        reads = [read for read in reads if read in self._taken]
        names = [read.name for read in reads]
        buffers = self._buffers(worker, [read.chunk for read in reads])
        answers = self._call(worker, self.store.get_many_into, names, buffers)
        for read, answer, buffer in zip(reads, answers, buffers, strict=True):
            load, chunk = read.load, read.chunk
            if answer != len(chunk):
                load.is_unreadable |= answer is StoreFault.IO_ERROR
                self._end(read, _refusal_of(answer, len(chunk)))
                continue
            assert load.mac is not None, "its header was read"
            # What was copied is verified: a store may still write to the buffer.
            _copy(chunk, buffer)
            load.macs[read.number] = load.mac.part(read.number, chunk)
            self._end(read)

    def _remove(self, worker: _Worker, names: list[str]) -> bool:
        """Remove an entry's parts, its header first; say whether they are gone."""
        answers = [
            *self._call(worker, self.store.remove, names[-1:]),
            *self._call(worker, self.store.remove, names[:-1]),
        ]
        return not any(answer not in (None, StoreFault.MISSING) for answer in answers)

    def _names(self, facts: EntryFacts) -> list[str]:
        """Return the names of an entry's chunks and, last, of its header."""
        chunks = range(-(-facts.payload_bytes // self._chunk_bytes))
        return [*(str(replace(facts.key, chunk=index)) for index in chunks), str(facts.key)]

    def _chunks(self, facts: EntryFacts, payload: memoryview) -> list[tuple[str, memoryview]]:
        """Return the chunks of an entry, with their names."""
        chunks = _grouped(payload, self._chunk_bytes)
        return list(zip(self._names(facts), chunks, strict=False))

    def _put_all(self, worker: _Worker, puts: Sequence[PutJob]) -> None:
        """Write entries: chunks, and headers when all of them are there; each confirmed.

        Those that end on the way, for one reason or another, are taken no more.
        """
        self._end_bad(worker, puts)
        self._end_stored(worker, [put for put in puts if put in self._taken])
        chunks, headers = [], []
        for put in puts:
            if put in self._taken:
                own = [_Part(put, *chunk) for chunk in self._chunks(put.facts, put.payload)]
                header = self._macs.seal(put.facts, [chunk.content for chunk in own])
                chunks += own
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
            taken = [part for part in group if part.put in self._taken]
            buffers = self._buffers(worker, [part.content for part in taken])
            for part, buffer in zip(taken, buffers, strict=True):
                _copy(buffer, part.content)
            names = [part.name for part in taken]
            answers = self._call(worker, self.store.put_many, names, buffers)
            self._end_failed(taken, answers, StoreFault.MISSING.value)
        taken = [part for part in parts if part.put in self._taken]
        answers = self._call(worker, self.store.exists_many, [part.name for part in taken])
        self._end_failed(taken, answers, "unconfirmed")

    def _end_failed(
        self, parts: Sequence[_Part], answers: Sequence[StoreFault | None], missing: str
    ) -> None:
        """End the puts of parts of which an answer is a fault."""
        for part, fault in zip(parts, answers, strict=True):
            if fault is not None and part.put in self._taken:
                reason = missing if fault is StoreFault.MISSING else fault.value
                self._end(part.put, _refusal_of(fault), reason)

    def _buffers(self, worker: _Worker, payloads: list[memoryview]) -> list[memoryview]:
        """Return what a call reads or writes: a disk the payloads, a store a worker's own memory.

        There one buffer lies behind the other.
        """
        if self._disk is not None:
            return payloads
        sizes = [len(payload) for payload in payloads]
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
    if into is not source:
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


def _report_error() -> None:
    """Show the exception that is being handled where those of threads are shown."""
    kind, error, trace = sys.exc_info()
    threading.excepthook(threading.ExceptHookArgs((kind, error, trace, threading.current_thread())))
