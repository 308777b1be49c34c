"""The lower tier: entries on a disk or in a store, verified at each read.

Callers queue *jobs*. A job's *steps* are a generator: each step yields the calls of the store that
it needs, and the next step begins when all of these calls are answered. Worker threads take calls
from the queues and join those that one call of the store can answer. When a job's steps end, the
tier counts the job and calls its ``done``. ``flush`` waits until this is done for all jobs.

The header of an entry is stored after its chunks, so a header implies its chunks. The tier does
not trust a store: ``exists_many`` confirms each put; sizes and MACs verify each read.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mamba_cache.errors import InvariantError
from mamba_cache.stores import BlobStore, StoreFault
from mamba_cache.tiers.disk import DiskStore
from mamba_cache.tiers.entry import (
    HEADER_BYTES,
    EntryFacts,
    EntryKey,
    EntryMacs,
    Refusal,
)
from mamba_cache.tiers.host import TierStats

__all__ = ["Call", "Done", "Job", "LowerTier", "Verb"]

_log = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 5.0
"""Pause after failures, in which the tier does not call its store or disk."""

_FAILURES_TO_PAUSE: Final = 2

_CHUNK_BYTES: Final = 2**21
"""Part of the format: all processes that share a store must use the same size."""

_CHUNKS_AT_ONCE: Final = 8
_CHUNKS_READ_AT_ONCE: Final = 4  # a longer read could miss its deadline in a store that works
_JOBS_AT_ONCE: Final = 64
_MAX_THREADS: Final = 4  # limit of the default for a store
_CONNECT_SECONDS: Final = 30.0
_STORED_TTL_SECONDS: Final = 60.0
_MAX_REMEMBERED: Final = 2**16

_UNDAMAGED: Final = frozenset({Refusal.MISSING, Refusal.IO_ERROR, Refusal.TIMEOUT, Refusal.ABORTED})
"""Refusals that do not show that an entry is damaged."""

Done: TypeAlias = Callable[[Refusal | None], object]
"""Callback of a job: called once, from any thread, with None or the reason of the failure."""

_T = TypeVar("_T")

_Outcome: TypeAlias = tuple[Refusal | None, str]
"""A job's refusal or None, and the count for a put. As the answer of a call, it ends the job."""

_ABORTED: Final = (Refusal.ABORTED, "aborted")

_Steps: TypeAlias = "Generator[list[Call], list[Any], _Outcome]"


class Verb(str, Enum):
    """The kind of a job."""

    ASK = "ask"
    LOAD = "load"
    REMOVE = "remove"
    PUT = "put"


_HEALTH: Final = "health"
_EXISTS: Final = "exists_many"
_PUT: Final = "put_many"
_GET: Final = "get_many_into"
_REMOVE: Final = "remove"


_NOTHING: Final = memoryview(b"")


@dataclass(slots=True, eq=False)
class Call:
    """One blob's share in a call of the store."""

    method: str
    name: str = ""  # key of the blob
    buffer: memoryview = _NOTHING
    read: Callable[[memoryview], bytes] = bytes  # turns the bytes that were read into the answer
    job: Job | None = None  # None for a probe of a paused store
    answer: Any = None

    @property
    def is_failed(self) -> bool:
        """Whether the job can skip the other calls of its step."""
        if self.method == _GET:
            return not isinstance(self.answer, bytes)
        return isinstance(self.answer, tuple) or (self.method == _PUT and self.answer is not None)


@dataclass(slots=True, eq=False)
class Job:
    """A queued job and its progress."""

    verb: Verb
    done: Done | None = None
    facts: EntryFacts | None = None  # of the entry that is loaded or put
    steps: _Steps = field(init=False)
    calls: list[Call] = field(default_factory=list)  # of the current step
    num_left: int = 0  # number of calls without an answer
    is_begun: bool = False
    is_revoked: bool = False  # the entry was found to be wrong: the job ends as aborted


@dataclass(slots=True, eq=False)
class _Worker:
    """A thread and the memory that its calls read and write."""

    verb: Verb | None = None  # kind of the jobs whose calls it makes
    calls: Sequence[Call] = ()  # in progress, as one call of the store
    deadline: float | None = None  # of the call of the store
    memory: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))


class _AbandonedError(Exception):
    """A call was abandoned because it did not return by its deadline."""


class LowerTier:
    """A tier below host memory: its threads do the jobs that callers queue.

    Only ``flush`` and ``close`` wait for input or output. A failure does not raise: it is a
    ``Refusal``, which the tier also counts. A tier that is slow, full or broken refuses at once. In
    a forked process it refuses everything. Any thread may call. ``done`` is called from a thread of
    the tier, or from the caller's thread if the answer is already known.

    A store's call that misses its deadline is abandoned, with its thread and its memory, and
    another thread is started. After such a call, or two failures in a row, the tier pauses: every
    five seconds it asks the store whether it is back. A disk reads and writes the callers' buffers
    and has a list of its entries in memory, so its calls have no deadline. After two failures the
    disk is used again five seconds later.

    An entry that failed verification is removed. This process does not load it again until it has
    put it anew.
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
            default_threads = 1 + max(8, min(16, num_cpus))  # readers compute MACs as well
            self._max_jobs, num_chunks, num_read_chunks = 1, sys.maxsize, 1
        else:
            # Each Mooncake read from a dead machine keeps a processor busy.
            self.name, default_threads = "store", max(2, min(_MAX_THREADS, num_cpus))
            self._max_jobs, num_chunks = _JOBS_AT_ONCE, _CHUNKS_AT_ONCE
            num_read_chunks = _CHUNKS_READ_AT_ONCE
        self.store, self._owns_store = store, owns_store
        self._macs = macs
        self._write_on_use, self._max_queued = write_on_use, max_queued
        self._num_threads = default_threads if num_threads is None else num_threads
        self._max_writers = 1 if self._disk is not None else self._num_threads - 1
        self._chunk_bytes = chunk_bytes
        self._max_bytes = dict.fromkeys(Verb, num_chunks * chunk_bytes)  # of one call
        self._max_bytes[Verb.LOAD] = num_read_chunks * chunk_bytes
        self._lock = threading.RLock()
        self._work_queued = threading.Condition(self._lock)
        self._job_finished = threading.Condition(self._lock)
        self._call_began = threading.Condition(self._lock)
        # Queued calls: those of jobs that have begun are taken first.
        self._begun: dict[Verb, deque[Call]] = {verb: deque() for verb in Verb}
        self._queues: dict[Verb, deque[Call]] = {verb: deque() for verb in Verb}
        self._jobs: dict[Verb, set[Job]] = {verb: set() for verb in Verb}  # unfinished jobs
        self._storing: set[EntryKey] = set()  # entries with an unfinished put: one put each
        self._num_callbacks = 0
        self._first_uses: OrderedDict[EntryKey, None] = OrderedDict()
        # Entries that the store had, with the time of that answer; and entries that are damaged.
        self._stored: OrderedDict[EntryKey, float] = OrderedDict()
        self._bad: OrderedDict[EntryKey, None] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._refused: Counter[Refusal] = Counter()  # failed loads by reason
        self._not_written: Counter[str] = Counter()  # puts that stored nothing, by reason
        self._faults: Counter[str] = Counter()
        self._failures = 0  # in a row
        self._failed_at = self._paused_until = 0.0
        self._next_deadline = math.inf  # the watcher wakes then
        self._has_answered = self._has_warned = self._is_closing = self._is_closed = False
        self._num_hung = 0
        self._pid = os.getpid()
        self._workers: list[_Worker] = []
        with self._lock:
            if self._disk is None:  # connect now, so that no request waits for it
                self._add(Job(Verb.ASK), self._ask())
            self._replace_hung()
        self._watcher = self._start(self._watch)

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a fork: it has no threads, and the lock may be held for ever."""
        return os.getpid() != self._pid

    @property
    def is_healthy(self) -> bool:
        """Whether the tier takes jobs now: not in a pause after failures, nor once closed."""
        return not self._is_forked and self._takes_calls

    @property
    def num_queued(self) -> int:
        """Number of jobs that are unfinished or whose ``done`` is running."""
        if self._is_forked:
            return 0
        with self._lock:
            return len(self._open_jobs(*Verb)) + self._num_callbacks

    def has_many(self, keys: Sequence[EntryKey]) -> list[bool]:
        """Return for each key whether its entry is probably stored; only ``load`` is certain."""
        if not self.is_healthy:
            return [False] * len(keys)
        with self._lock:
            return self._find(keys)

    def ask(self, keys: Sequence[EntryKey], done: Done) -> bool:
        """Ask which entries the store has; after ``done``, ``has_many`` returns the answer.

        Return False if the question is refused.
        """
        if not self.is_healthy:
            return False
        with self._lock:
            if not self._takes_calls or len(self._jobs[Verb.ASK]) >= self._max_queued:
                return False
            self._counts["asks"] += 1
            self._add(Job(Verb.ASK, done), self._ask(keys))
        return True

    def put(self, facts: EntryFacts, payload: memoryview, done: Done) -> bool:
        """Queue an entry to be stored; ``payload`` must not change before ``done`` is called.

        Return False if the entry is refused: the refusal is counted, and ``done`` is not called.
        """
        if self._is_forked:  # without the lock, which a fork may have left held
            return self._refuse_put("unhealthy")
        with self._lock:
            if not self._takes_calls:
                return self._refuse_put("unhealthy")
            if not all(self._find([facts.key])):
                return self._add_put(Job(Verb.PUT, done, facts), payload)
            self._counts["known"] += 1
        done(None)
        return True

    def load(self, expected: EntryFacts, into: memoryview, done: Done) -> bool:
        """Queue an entry to be read and verified: each field of its header, and its MAC.

        ``into`` is valid only if ``done`` is called with None. Return False if the load is refused.
        """
        if self._is_forked:
            return False
        with self._lock:
            if not self._takes_calls or len(self._jobs[Verb.LOAD]) >= self._max_queued:
                return False
            if expected.key not in self._bad:
                self._add(Job(Verb.LOAD, done, expected), self._load(expected, into))
                return True
            self._refused[Refusal.MISSING] += 1
        done(Refusal.MISSING)
        return True

    def remove(self, key: EntryKey) -> None:
        """Remove an entry that is known to be wrong, for other processes too.

        Its unfinished loads and puts fail. ``flush`` waits for the removal. In a store the chunks
        stay until the entry is written anew or evicted.
        """
        if self._is_forked:
            return
        with self._lock:
            if self._is_closing:
                return
            for job in self._open_jobs(Verb.LOAD, Verb.PUT):
                job.is_revoked |= job.facts is not None and job.facts.key == key
            self._stored.pop(key, None)
            _remember(self._bad, key, None)
            if self._takes_calls or self._disk is not None:
                self._add(Job(Verb.REMOVE), self._remove([str(key)]))

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all jobs are finished and ``done`` was called for each; False: timed out."""
        if self._is_forked:
            return True
        with self._lock:
            return self._job_finished.wait_for(lambda: not self.num_queued, timeout_seconds)

    def close(self) -> None:
        """End the threads; cancel queued jobs, and call ``done`` for each.

        Jobs that have begun are waited for; a store's jobs for at most ``call_seconds``.
        """
        if self._is_forked:
            return  # the threads and their store belong to the parent process
        with self._lock:
            if self._is_closed:
                return
            self._is_closing = True
            ready = self._drop(self._queues)
            self._work_queued.notify_all()
        self._advance(ready)
        with self._lock:
            self._job_finished.wait_for(lambda: not self._is_busy, self._call_seconds)
            self._is_closed = True
            self._call_began.notify()
            self._work_queued.notify_all()
            self._job_finished.wait_for(lambda: not self._workers)
        self._watcher.join(self._call_seconds)

    def stats(self) -> TierStats:
        """Return the tier's counters and its present contents."""
        with nullcontext() if self._is_forked else self._lock:
            counts, dropped = self._counts, dict(self._not_written)
            stored = counts["known"] + counts["written"] + counts["found_stored"]
            return TierStats(
                name=self.name,
                is_healthy=self.is_healthy,
                loads=counts["hits"] + self._refused.total() + len(self._jobs[Verb.LOAD]),
                restored=counts["hits"],
                refused={each.value: count for each, count in self._refused.items()},
                puts=stored + sum(dropped.values()) + len(self._jobs[Verb.PUT]),
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
        """Check that the bookkeeping is consistent.

        A forked process skips the check: the fork may have come in the middle of a change.
        """
        if self._is_forked:
            return
        with self._lock:
            jobs = self._open_jobs(*Verb)
            calls = [call for verb in Verb for call in (*self._begun[verb], *self._queues[verb])]
            calls += [call for worker in self._workers for call in worker.calls]
            left = Counter(call.job for call in calls if call.job is not None)
            puts = [job.facts.key for job in self._jobs[Verb.PUT] if job.facts is not None]
            statements = {
                "each call is there once": len(set(calls)) == len(calls),
                "an entry is stored once at a time": (
                    len(puts) == len(self._storing) and self._storing.issuperset(puts)
                ),
                "jobs wait for their calls": (
                    left == {job: job.num_left for job in jobs if job.num_left}
                ),
                "each callback ends once": self._num_callbacks >= 0,
                "each thread that hung ends once": self._num_hung >= 0,
            }
        if self._disk is not None:
            self._disk.check_invariants()
        breaches = [statement for statement, holds in statements.items() if not holds]
        if breaches:
            raise InvariantError(f"does not hold: {'; '.join(breaches)}")

    # Bookkeeping. The lock is held.

    @property
    def _takes_calls(self) -> bool:
        return self._is_usable and not self._is_closing

    @property
    def _is_usable(self) -> bool:
        """Whether jobs under way can go on."""
        return bool(self._workers) and not self._is_paused and not self._is_closed

    @property
    def _is_paused(self) -> bool:
        return self._has_failed if self._disk is None else self._pause_left is not None

    @property
    def _is_busy(self) -> bool:
        """Whether a job has begun, or a disk has removals left."""
        return self._has_disk_removals or any(job.is_begun for job in self._open_jobs(*Verb))

    @property
    def _has_disk_removals(self) -> bool:
        """Whether a disk has removals left: the next process would find the entries."""
        return self._disk is not None and self._has_calls(Verb.REMOVE)

    def _find(self, keys: Sequence[EntryKey]) -> list[bool]:
        """Return for each key whether its entry is known to be stored, without asking a store."""
        if self._disk is not None:
            faults = self._disk.exists_many([str(key) for key in keys])
            pairs = zip(keys, faults, strict=True)
            return [fault is None and key not in self._bad for key, fault in pairs]
        now = time.monotonic()
        # Answers expire, because other processes use the store, too.
        return [now - self._stored.get(key, -math.inf) < _STORED_TTL_SECONDS for key in keys]

    def _open_jobs(self, *verbs: Verb) -> list[Job]:
        """Return the unfinished jobs of some kinds."""
        return [job for verb in verbs for job in self._jobs[verb]]

    def _add(self, job: Job, steps: _Steps) -> None:
        """Queue a job; an interrupt in the caller's thread undoes this."""
        job.steps, calls = steps, next(steps)
        try:
            self._jobs[job.verb].add(job)
            if job.verb is Verb.PUT and job.facts is not None:
                self._storing.add(job.facts.key)
            self._queue(job, calls)
        except BaseException:
            queue = self._queues[job.verb]
            self._queues[job.verb] = deque([each for each in queue if each.job is not job])
            self._forget(job)
            raise

    def _forget(self, job: Job) -> None:
        """Forget a finished job and release the caller's buffer."""
        job.steps.close()
        job.calls = []
        self._jobs[job.verb].discard(job)
        if job.verb is Verb.PUT and job.facts is not None:
            self._storing.discard(job.facts.key)

    def _has_calls(self, verb: Verb) -> bool:
        return bool(self._begun[verb] or self._queues[verb])

    def _queue(self, job: Job, calls: list[Call]) -> None:
        """Queue the calls of a job's step."""
        job.calls, job.num_left = calls, len(calls)
        for call in calls:
            call.job = job
        queue = (self._begun if job.is_begun else self._queues)[job.verb]
        is_first = not queue
        queue.extend(calls)
        if is_first:
            self._wake_one()

    def _add_put(self, put: Job, payload: memoryview) -> bool:
        """Queue the put of an entry that is not stored; return False, and count it, if refused."""
        assert put.facts is not None, "a put has facts"
        key = put.facts.key
        if key in self._storing:
            return self._refuse_put("in_flight")
        if self._write_on_use > 1 and key not in self._first_uses:
            _remember(self._first_uses, key, None)
            return self._refuse_put("first_use")
        if len(self._storing) >= self._max_queued:
            return self._refuse_put("queue_full")
        self._add(put, self._put(put, put.facts, payload))
        self._first_uses.pop(key, None)
        return True

    def _refuse_put(self, reason: str) -> bool:
        """Count a put that is refused; return False."""
        self._not_written[reason] += 1
        return False

    @property
    def _pause_left(self) -> float | None:
        """Seconds until the pause after failures ends; None without a pause."""
        left = self._paused_until - time.monotonic()
        return left if left > 0 else None

    @property
    def _has_failed(self) -> bool:
        """Whether the last calls all failed, often enough for a pause."""
        return self._failures >= _FAILURES_TO_PAUSE

    def _count_failure(self, *, is_overdue: bool = False) -> None:
        """Count a failure; one overdue answer is enough for a pause."""
        had_failed = self._has_failed
        self._failures += _FAILURES_TO_PAUSE if is_overdue else 1
        self._failed_at = time.monotonic()
        if self._has_failed:
            self._pause()
            self._counts["opened"] += not had_failed
            self._stored.clear()  # a store that comes back may be empty
            self._work_queued.notify_all()  # waiting threads take the pause as their timeout

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def _replace_hung(self) -> None:
        """Start threads in place of those that hang, up to twice ``num_threads`` in all."""
        while len(self._workers) < min(self._num_threads, 2 * self._num_threads - self._num_hung):
            worker = _Worker()
            self._start(partial(self._work, worker))
            self._workers.append(worker)

    def _abandon_overdue(self) -> list[Job]:
        """Abandon all overdue calls; return the jobs that this ends."""
        now = time.monotonic()
        ready: list[Job] = []
        for worker in list(self._workers):
            if worker.deadline is not None and (self._is_closed or worker.deadline <= now):
                self._workers.remove(worker)
                self._counts["given_up"] += 1
                self._num_hung += 1
                self._count_failure(is_overdue=True)
                failure = _ABORTED if self._is_closed else (Refusal.TIMEOUT, "timed_out")
                ready += self._answer(worker.calls, [failure] * len(worker.calls))
        return ready

    def _drop(self, *queues: dict[Verb, deque[Call]]) -> list[Job]:
        """Drop queued calls, except a disk's removals; return the jobs that this ends."""
        failure = _ABORTED if self._is_closing else (Refusal.IO_ERROR, "unhealthy")
        calls: list[Call] = []
        for verb in Verb:
            for queue in queues if self._disk is None or verb is not Verb.REMOVE else ():
                calls += queue[verb]
                queue[verb].clear()
        return self._answer(calls, [failure] * len(calls))

    def _answer(self, calls: Sequence[Call], answers: Sequence[Any]) -> list[Job]:
        """Set the answers of calls; return the jobs without open calls, for ``_advance``."""
        ready = []
        for call, answer in zip(calls, answers, strict=True):
            call.answer, job = answer, call.job
            if job is not None:
                job.num_left -= 1
                if call.is_failed and job.num_left:
                    queue = self._begun[job.verb]
                    for other in [each for each in queue if each.job is job]:
                        queue.remove(other)
                        job.num_left -= 1
                if not job.num_left:
                    ready.append(job)
        return ready

    def _count_finished(self, job: Job, refusal: Refusal | None, reason: str) -> Refusal | None:
        """Count a finished job by its outcome; return the refusal for its ``done``."""
        if job.is_revoked:
            refusal, reason = _ABORTED
        self._forget(job)
        if job.facts is not None:
            key, num_bytes = job.facts.key, job.facts.payload_bytes
            if job.verb is Verb.PUT:
                if refusal is not None:
                    self._not_written[reason] += 1
                else:
                    self._counts[reason] += 1
                    self._counts["written_bytes"] += num_bytes if reason == "written" else 0
            elif refusal is not None:
                self._refused[refusal] += 1
                self._stored.pop(key, None)
            else:
                self._counts["hits"] += 1
                self._counts["read_bytes"] += num_bytes
        self._num_callbacks += 1
        return refusal

    # The threads.

    def _start(self, target: Callable[[], None]) -> threading.Thread:
        """Start a daemon thread."""
        thread = threading.Thread(target=target, name=f"mamba-cache-{self.name}", daemon=True)
        thread.start()
        return thread

    def _watch(self) -> None:
        """Abandon overdue calls until the tier is closed, then close a store that it owns."""
        is_closed = False
        while not is_closed:
            with self._lock:
                is_closed = self._is_closed
                if not is_closed:
                    deadlines = [w.deadline for w in self._workers if w.deadline is not None]
                    self._next_deadline = min(deadlines, default=math.inf)
                    left = self._next_deadline - time.monotonic() if deadlines else None
                    self._call_began.wait(left)
                ready = self._abandon_overdue()
                if not self._is_closing:
                    with suppress(RuntimeError):  # no thread can be started: fewer go on
                        self._replace_hung()
            self._advance(ready)
            self._handle_outage()
        with self._lock:
            self._job_finished.wait_for(lambda: not self._workers)
        if self._owns_store:
            self.store.close()

    def _work(self, worker: _Worker) -> None:
        """Make queued calls until the tier is closed or a call of this worker was abandoned."""
        is_lost = False
        while not is_lost and (calls := self._wait(worker)):
            answers: Sequence[Any] = [(Refusal.IO_ERROR, "error")] * len(calls)
            try:
                answers = self._run(worker, calls)
            except _AbandonedError:
                answers = [_ABORTED] * len(calls)
            except Exception:  # a bug here or in the store: the thread must go on
                self._count_error()
            with self._lock:
                is_lost = worker not in self._workers  # then its calls are answered already
                ready = [] if is_lost else self._answer(calls, answers)
                worker.calls = ()
            self._advance(ready)
            del calls, answers, ready  # they would keep the caller's buffer alive
            self._handle_outage()
        self._handle_outage()
        if len(worker.memory):
            try:
                self.store.unregister(worker.memory.data)
            except Exception:  # a bug in the store
                _report_error()
        with self._lock:
            if is_lost:
                self._num_hung -= 1
                self._call_began.notify()  # the watcher may start another thread
            else:
                self._workers.remove(worker)
                self._job_finished.notify_all()

    def _count_error(self) -> None:
        """Report the current exception, and count it as a failure."""
        _report_error()
        with self._lock:
            self._faults["error"] += 1
            self._count_failure()

    def _wait(self, worker: _Worker) -> Sequence[Call]:
        """Wait for calls that a worker can make; return none once the tier is closed."""
        with self._lock:
            worker.verb = None  # makes room for another reader or writer
            while not self._is_closing or (self._is_busy and not self._is_closed):
                pause = self._pause_left  # read first: a pause that ends now is not missed
                if calls := self._assign_calls(worker):
                    self._wake_one()
                    return calls
                self._work_queued.wait(pause)
            return []

    def _assign_calls(self, worker: _Worker) -> Sequence[Call]:
        """Assign calls of one kind to a worker, or the probe of a store after a pause."""
        worker.verb = self._next_verb()
        if worker.verb is not None:
            worker.calls = self._take_batch(worker.verb)
        elif self._is_paused and self._pause_left is None:
            self._pause()
            worker.calls = [Call(_HEALTH)]
        else:
            worker.calls = []
        return worker.calls

    def _wake_one(self) -> None:
        """Wake one thread if it can make calls; that thread wakes the next one."""
        if self._next_verb() is not None:
            self._work_queued.notify()

    def _next_verb(self) -> Verb | None:
        """Return the kind of jobs whose calls can be made now: questions and loads first."""
        if self._has_disk_removals or self._is_paused:
            return Verb.REMOVE if self._has_disk_removals else None
        if self._has_calls(Verb.ASK):
            return Verb.ASK
        if self._has_calls(Verb.LOAD) and self._has_room(self._num_threads - 1, Verb.LOAD):
            return Verb.LOAD
        if self._has_calls(Verb.REMOVE):
            return Verb.REMOVE
        if self._has_calls(Verb.PUT) and self._has_room(self._max_writers, Verb.PUT, Verb.REMOVE):
            return Verb.PUT
        return None

    def _has_room(self, max_threads: int, *verbs: Verb) -> bool:
        """Return whether one more thread may do jobs of some kinds."""
        return sum(each.verb in verbs for each in self._workers) < max_threads

    def _take_batch(self, verb: Verb) -> list[Call]:
        """Take calls that one call of the store can answer: of one method, each key once."""
        queue = self._begun[verb] or self._queues[verb]
        method, max_calls, num_bytes = queue[0].method, len(queue), 0
        if verb is Verb.LOAD:  # leave a share for each other thread
            max_calls = -(-max_calls // (self._num_threads - 1))
        calls: dict[str, Call] = {}
        jobs: set[Job | None] = set()
        while len(calls) < max_calls:
            call = queue[0]
            jobs.add(call.job)
            num_bytes += len(call.buffer)
            has_room = len(jobs) <= self._max_jobs and num_bytes <= self._max_bytes[verb]
            if calls and (call.method != method or call.name in calls or not has_room):
                break
            assert call.job is not None, "a probe is not queued"
            call.job.is_begun = True
            calls[call.name] = queue.popleft()
        return list(calls.values())

    def _handle_outage(self) -> None:
        """Drop queued calls if the tier is unusable; warn once of a store that does not answer."""
        with self._lock:
            if self._is_usable and not self._failures:
                return
            ready = [] if self._is_usable else self._drop(self._begun, self._queues)
            # A pause began, or the first calls failed.
            has_failed = self._counts["opened"] or (self._failures and not self._has_answered)
            should_warn = bool(has_failed) and not self._has_warned and not self._is_closing
            self._has_warned |= should_warn
            faults = ", ".join(self._faults) or "timed_out"
        self._advance(ready)
        if should_warn:
            _log.warning(
                "%s: %s does not answer (%s). Requests go on without it, and it is tried again%s",
                self.name,
                self.store.name,
                faults,
                "; open_store(URL).health() shows the cause" if self._disk is None else "",
            )

    def _run(self, worker: _Worker, calls: Sequence[Call]) -> Sequence[Any]:
        """Make calls of one method; return their answers."""
        method, names = calls[0].method, [call.name for call in calls]
        if method == _HEALTH:
            seconds = 0.0 if calls[0].job is None else _CONNECT_SECONDS
            return self._call(worker, lambda _: [self.store.health().fault], names, seconds=seconds)
        call_store = getattr(self.store, method)
        if method in (_EXISTS, _REMOVE):
            return self._call(worker, call_store, names)
        buffers = self._buffers(worker, [call.buffer for call in calls])
        if method == _PUT:
            for call, buffer in zip(calls, buffers, strict=True):
                _copy(buffer, call.buffer)
        answers = self._call(worker, call_store, names, buffers)
        if method == _GET:
            triples = zip(calls, answers, buffers, strict=True)
            answers = [self._copy_out(*each) for each in triples]
        return answers

    def _copy_out(self, call: Call, answer: int | StoreFault, buffer: memoryview) -> Any:
        """Copy a blob to the job's buffer; return its answer: for a chunk, the MAC."""
        if answer != len(call.buffer):
            return answer
        # The MAC is of the copy, because a store may still write to its own buffer.
        _copy(call.buffer, buffer)
        return call.read(call.buffer)

    def _advance(self, jobs: Sequence[Job]) -> None:
        """Queue the next calls of jobs; count finished jobs and call their ``done``.

        The lock is not held.
        """
        num_finished = 0
        for job in jobs:
            calls, outcome = self._next_step(job)
            with self._lock:
                if outcome is None:
                    self._queue(job, calls)
                    continue
                refusal = self._count_finished(job, *outcome)
            if job.done is not None:
                try:
                    job.done(refusal)
                except Exception:  # a bug of the caller: this thread must go on
                    _report_error()
            num_finished += 1
        if num_finished:
            with self._lock:
                self._num_callbacks -= num_finished
                self._job_finished.notify_all()

    def _next_step(self, job: Job) -> tuple[list[Call], _Outcome | None]:
        """Return a job's next calls, or its outcome if it is finished."""
        answers = [call.answer for call in job.calls]
        for answer in answers:
            if isinstance(answer, tuple):
                return [], answer
        try:
            calls = job.steps.send(answers)
            assert calls, "a step calls the store"
        except StopIteration as ended:
            return [], ended.value
        except Exception:  # a bug: the thread must go on
            self._count_error()
            return [], (Refusal.IO_ERROR, "error")
        return calls, None

    def _call(
        self,
        worker: _Worker,
        call: Callable[..., Sequence[_T]],
        names: list[str],
        *buffers: Sequence[memoryview],
        seconds: float = 0.0,
    ) -> Sequence[_T]:
        """Call the store with a deadline; count the faults that it answers."""
        with self._lock:
            if self._is_closed:
                raise _AbandonedError
            began = time.monotonic()
            if self._call_seconds is not None:
                worker.deadline = began + max(seconds, self._call_seconds)
                if worker.deadline < self._next_deadline:
                    self._call_began.notify()
        try:
            answers = call(names, *buffers)
        finally:
            with self._lock:
                worker.deadline = None
                if worker not in self._workers:
                    raise _AbandonedError
        with self._lock:
            faults = [answer for answer in answers if isinstance(answer, StoreFault)]
            self._faults.update(each.value for each in faults if each is not StoreFault.MISSING)
            if any(each.is_of_the_store for each in faults):
                self._count_failure()
                return answers
            self._has_answered = True
            # A call that moved bytes clears the failures; for a paused store any answer does.
            # A call that began before the last failure clears nothing.
            is_back = bool(buffers) or (self._has_failed and self._disk is None)
            if is_back and began >= self._failed_at:
                self._failures, self._paused_until = 0, 0.0
        return answers

    def _set_stored(self, key: EntryKey, *, is_there: bool) -> None:
        """Remember whether a store has an entry; a disk has records of its own."""
        with self._lock:
            if is_there and key not in self._bad and self._disk is None:
                _remember(self._stored, key, time.monotonic())
            else:
                self._stored.pop(key, None)

    # The steps of jobs. The lock is not held.

    def _ask(self, keys: Sequence[EntryKey] = ()) -> _Steps:
        """Ask which entries a store has; without keys, whether it answers."""
        answers = yield [Call(_EXISTS, str(key)) for key in keys] or [Call(_HEALTH)]
        for key, fault in zip(keys, answers, strict=False):
            self._set_stored(key, is_there=fault is None)
        return None, ""

    def _load(self, expected: EntryFacts, into: memoryview) -> _Steps:
        """Read an entry's header and, if it matches, its chunks; queue removal of a bad entry."""
        key, macs = expected.key, list[bytes]()
        header = Call(_GET, str(key), memoryview(bytearray(HEADER_BYTES)))
        reads = [header]
        yield reads
        mac = Refusal.MISSING if header.is_failed else self._macs.open(header.answer, expected)
        if not isinstance(mac, Refusal):
            pairs = enumerate(self._chunks(self._names(expected), into))
            reads = [
                Call(_GET, name, chunk, partial(mac.part, number))
                for number, (name, chunk) in pairs
            ]
            macs = yield reads
        failed = [each for each in reads if each.is_failed and each.answer is not None]
        if failed:
            refusal = _refusal_of(failed[0].answer, len(failed[0].buffer))
        elif isinstance(mac, Refusal):
            refusal = mac
        elif mac.vouches_for(macs):
            self._set_stored(key, is_there=True)
            return None, ""
        else:
            refusal = Refusal.MAC
        # A file that the disk cannot read is useless, damaged or not.
        is_unreadable = any(each.answer is StoreFault.IO_ERROR for each in failed)
        is_bad = is_unreadable or refusal not in _UNDAMAGED
        with self._lock:
            if is_bad:
                _remember(self._bad, key, None)
            # An entry that lacks a chunk is useless, and its header keeps it from being rewritten.
            if is_bad or (header not in reads and refusal is Refusal.MISSING):
                self._add(Job(Verb.REMOVE), self._remove(self._names(expected)))
        return refusal, ""

    def _remove(self, names: Sequence[str]) -> _Steps:
        """Remove an entry's parts, its header first."""
        answers = yield [Call(_REMOVE, name) for name in names]
        if any(answer not in (None, StoreFault.MISSING) for answer in answers):
            return Refusal.IO_ERROR, "not_removed"
        return None, ""

    def _put(self, put: Job, facts: EntryFacts, payload: memoryview) -> _Steps:
        """Write an entry: its chunks, then its header; the store must confirm each part."""
        key = facts.key
        [fault] = yield [Call(_EXISTS, str(key))]
        if fault not in (None, StoreFault.MISSING):
            return _refusal_of(fault), fault.value
        names = self._names(facts)
        if key in self._bad:  # a store does not overwrite
            fault, outcome = StoreFault.MISSING, (yield from self._remove(names))
            if outcome[0] is not None:
                return outcome
        with self._lock:
            if put.is_revoked:
                return _ABORTED
            self._bad.pop(key, None)
        if fault is None:  # another process has stored the entry
            self._set_stored(key, is_there=True)
            return None, "found_stored"
        chunks = self._chunks(names, payload)
        header = self._macs.seal(facts, [chunk for _, chunk in chunks])
        parts = [*chunks, (names[0], memoryview(header))]
        # A disk writes the whole file at once.
        for some in [parts] if self._disk else [parts[:-1], parts[-1:]]:
            outcome = yield from self._write(some)
            if outcome[0] is not None:
                return outcome
        self._set_stored(key, is_there=True)
        if put.is_revoked:
            yield from self._remove(names)
        return None, "written"

    def _write(self, parts: Sequence[tuple[str, memoryview]]) -> _Steps:
        """Put parts of an entry, then ask the store for each part.

        A put that succeeds does not prove that the part can be found.
        """
        puts = [Call(_PUT, name, content) for name, content in parts]
        asks = [Call(_EXISTS, name) for name, _ in parts]
        for calls, missing in ((puts, StoreFault.MISSING.value), (asks, "unconfirmed")):
            faults = yield calls
            for fault in filter(None, faults):
                return _refusal_of(fault), missing if fault is StoreFault.MISSING else fault.value
        return None, ""

    def _names(self, facts: EntryFacts) -> list[str]:
        """Return the names of an entry's header and of its chunks."""
        header, num_chunks = str(facts.key), -(-facts.payload_bytes // self._chunk_bytes)
        return [header, *(f"{header}/{number}" for number in range(num_chunks))]

    def _chunks(self, names: Sequence[str], payload: memoryview) -> list[tuple[str, memoryview]]:
        """Return the chunks of an entry with their names."""
        starts = range(0, len(payload), self._chunk_bytes)
        chunks = [payload[start : start + self._chunk_bytes] for start in starts]
        return list(zip(names[1:], chunks, strict=True))

    def _buffers(self, worker: _Worker, payloads: list[memoryview]) -> list[memoryview]:
        """Return the buffers of a call: a disk's are the payloads, a store's the worker's memory.

        In that memory one buffer follows the other.
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
    """Copy bytes without holding the GIL; an assignment to a slice would hold it."""
    if into is not source:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def _refusal_of(answer: int | StoreFault, num_bytes: int = 0) -> Refusal:
    """Return why a blob of ``num_bytes`` was not read, or why a blob was not stored."""
    if not isinstance(answer, StoreFault):
        return Refusal.SHORT if answer < num_bytes else Refusal.PAYLOAD_BYTES
    if answer is StoreFault.MISSING:
        return Refusal.MISSING
    if answer is StoreFault.SHORT:  # the blob is longer than the buffer
        return Refusal.PAYLOAD_BYTES
    return Refusal.TIMEOUT if answer is StoreFault.TIMED_OUT else Refusal.IO_ERROR


def _remember(known: OrderedDict[EntryKey, Any], key: EntryKey, value: object) -> None:
    """Put a key last; forget the oldest one beyond ``_MAX_REMEMBERED``."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > _MAX_REMEMBERED:
        known.popitem(last=False)


def _report_error() -> None:
    """Pass the current exception to ``threading.excepthook``."""
    kind, error, trace = sys.exc_info()
    threading.excepthook(threading.ExceptHookArgs((kind, error, trace, threading.current_thread())))
