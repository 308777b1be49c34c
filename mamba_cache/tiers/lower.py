"""The lower tier: entries on a disk or in a store, verified whenever they are read.

A caller queues a *job*. Its *steps* are written as a generator: each gives the calls of the store
that it needs, and goes on when all of them are answered. Threads take calls from the queues,
together those that one call of the store can answer. When the steps end, the job is counted, and
its ``done`` is called. ``flush`` waits for all of that.

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

_REST_SECONDS: Final = 5.0
"""For so long a tier is left alone after failures."""

_FAILURES_TO_REST: Final = 2

_CHUNK_BYTES: Final = 2**21
"""Part of the format, as the header is: all processes that share a store have the same."""

_CHUNKS_AT_ONCE: Final = 8
_CHUNKS_READ_AT_ONCE: Final = 4  # a call of more may take so long that a store seems dead
_JOBS_AT_ONCE: Final = 64
_MAX_THREADS: Final = 4  # for a store, unless more are asked for
_CONNECT_SECONDS: Final = 30.0
_BELIEVED_SECONDS: Final = 60.0
_MAX_REMEMBERED: Final = 2**16

_UNDAMAGED: Final = frozenset({Refusal.MISSING, Refusal.IO_ERROR, Refusal.TIMEOUT, Refusal.ABORTED})
"""Refusals of entries that need not be bad."""

Done: TypeAlias = Callable[[Refusal | None], object]
"""Called once, from any thread, when a put or a load is over: None, or why it failed."""

_T = TypeVar("_T")

_Outcome: TypeAlias = tuple[Refusal | None, str]
"""Why a job brought nothing, and what a put is counted as. As the answer of a call: it has none."""

_ABORTED: Final = (Refusal.ABORTED, "aborted")

_Steps: TypeAlias = "Generator[list[Call], list[Any], _Outcome]"


class Verb(str, Enum):
    """What a job does."""

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
    """What a job needs of one blob."""

    method: str
    name: str = ""  # of the blob
    buffer: memoryview = _NOTHING
    read: Callable[[memoryview], bytes] = bytes  # makes the answer of what was read
    job: Job | None = None  # of a probe nobody waits for the answer
    answer: Any = None

    @property
    def is_failed(self) -> bool:
        """Whether the job need not do the rest of its step."""
        if self.method == _GET:
            return not isinstance(self.answer, bytes)
        return isinstance(self.answer, tuple) or (self.method == _PUT and self.answer is not None)


@dataclass(slots=True, eq=False)
class Job:
    """What was queued, and how far it is."""

    verb: Verb
    done: Done | None = None
    facts: EntryFacts | None = None  # of what is loaded or put
    steps: _Steps = field(init=False)
    calls: list[Call] = field(default_factory=list)  # of its present step
    num_left: int = 0  # of these, those without an answer
    is_begun: bool = False
    is_revoked: bool = False  # the entry is wrong: the job aborts


@dataclass(slots=True, eq=False)
class _Worker:
    """A thread, and the memory that its calls read and write."""

    verb: Verb | None = None  # of the jobs that it works for
    calls: Sequence[Call] = ()  # that it makes
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
            self._max_jobs, num_chunks, num_read_chunks = 1, sys.maxsize, 1
        else:
            # Mooncake's reads of a dead machine keep a processor busy each.
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
        self._job_came = threading.Condition(self._lock)
        self._one_told = threading.Condition(self._lock)
        self._call_began = threading.Condition(self._lock)
        # Calls of jobs that have begun, which come first, and of those that have not.
        self._begun: dict[Verb, deque[Call]] = {verb: deque() for verb in Verb}
        self._queues: dict[Verb, deque[Call]] = {verb: deque() for verb in Verb}
        self._jobs: dict[Verb, set[Job]] = {verb: set() for verb in Verb}  # that are not over
        self._storing: set[EntryKey] = set()  # an entry is stored once at a time
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
        self._watches_until = math.inf  # the earliest deadline that the watcher has seen
        self._has_answered = self._is_told = self._is_closing = self._is_closed = False
        self._num_hung = 0
        self._pid = os.getpid()
        self._workers: list[_Worker] = []
        with self._lock:
            if self._disk is None:  # so that no request waits until a store has connected
                self._add(Job(Verb.ASK), self._ask())
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
        """Jobs that are not over, or whose ``done`` runs."""
        if self._is_forked:
            return 0
        with self._lock:
            return len(self._open_jobs(*Verb)) + self._num_telling

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
            if not self._takes_calls or len(self._jobs[Verb.ASK]) >= self._max_queued:
                return False
            self._counts["asks"] += 1
            self._add(Job(Verb.ASK, done), self._ask(keys))
        return True

    def put(self, facts: EntryFacts, payload: memoryview, done: Done) -> bool:
        """Queue an entry to be stored; ``payload`` must not change before ``done`` is called.

        False: it is not taken, which is counted, and ``done`` is not called.
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

        ``into`` holds it only if ``done`` is called with None. False: it is not taken.
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
        """Make an entry unfindable that is known to be wrong, for other processes too.

        What is under way of it comes to nothing. It is gone after ``flush``. Its chunks in a store
        go when the entry is written anew or evicted.
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
            ready = self._drop(self._queues)
            self._job_came.notify_all()
        self._go_on(ready)
        with self._lock:
            self._one_told.wait_for(lambda: not self._is_busy, self._call_seconds)
            self._is_closed = True
            self._call_began.notify()
            self._job_came.notify_all()
            self._one_told.wait_for(lambda: not self._workers)
        self._watcher.join(self._call_seconds)

    def stats(self) -> TierStats:
        """Return what it did so far and what it holds now."""
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
        """Prove that the bookkeeping agrees with itself.

        In a forked process nothing is proved: the fork may have come in the middle of a change.
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
        return self._is_usable and not self._is_closing

    @property
    def _is_usable(self) -> bool:
        """Whether what is under way goes on."""
        return bool(self._workers) and not self._is_left_alone and not self._is_closed

    @property
    def _is_left_alone(self) -> bool:
        return self._has_failed if self._disk is None else self._rest_left is not None

    @property
    def _is_busy(self) -> bool:
        """Whether something is under way, or owed."""
        return self._owes_removals or any(job.is_begun for job in self._open_jobs(*Verb))

    @property
    def _owes_removals(self) -> bool:
        """Whether entries of a disk are to be removed: the next process would find them."""
        return self._disk is not None and self._has_calls(Verb.REMOVE)

    def _find(self, keys: Sequence[EntryKey]) -> list[bool]:
        """Say of each key whether this process knows that it is there, without asking a store."""
        if self._disk is not None:
            faults = self._disk.exists_many([str(key) for key in keys])
            pairs = zip(keys, faults, strict=True)
            return [fault is None and key not in self._bad for key, fault in pairs]
        now = time.monotonic()
        # What was learnt does not hold for ever: others use the store, too.
        return [now - self._stored.get(key, -math.inf) < _BELIEVED_SECONDS for key in keys]

    def _open_jobs(self, *verbs: Verb) -> list[Job]:
        """Return the jobs of some kinds that are not over."""
        return [job for verb in verbs for job in self._jobs[verb]]

    def _add(self, job: Job, steps: _Steps) -> None:
        """Queue a job; nothing of it is left if an interrupt comes to the caller's thread."""
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
        """Forget a job that is over, and what it holds: the caller's buffer."""
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
        """Queue an entry that is not there to be stored; False, counted, if it is not taken."""
        assert put.facts is not None, "it is a put"
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

    def _give_up_late(self) -> list[Job]:
        """Give up all calls that are late; return the jobs that end so."""
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
        """Make no call of some queues, but what a disk owes; return the jobs that end so."""
        failure = _ABORTED if self._is_closing else (Refusal.IO_ERROR, "unhealthy")
        calls: list[Call] = []
        for verb in Verb:
            for queue in queues if self._disk is None or verb is not Verb.REMOVE else ():
                calls += queue[verb]
                queue[verb].clear()
        return self._answer(calls, [failure] * len(calls))

    def _answer(self, calls: Sequence[Call], answers: Sequence[Any]) -> list[Job]:
        """Answer calls; return the jobs that wait for no others, which are to go on."""
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

    def _count_over(self, job: Job, refusal: Refusal | None, reason: str) -> Refusal | None:
        """Count what came of a job; return what it is to be told."""
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
        self._num_telling += 1
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
                    self._watches_until = min(deadlines, default=math.inf)
                    left = self._watches_until - time.monotonic() if deadlines else None
                    self._call_began.wait(left)
                ready = self._give_up_late()
                if not self._is_closing:
                    with suppress(RuntimeError):  # no thread can be had: fewer go on
                        self._replace_hung()
            self._go_on(ready)
            self._end_unwanted()
        with self._lock:
            self._one_told.wait_for(lambda: not self._workers)
        if self._owns_store:
            self.store.close()

    def _work(self, worker: _Worker) -> None:
        """Do what is queued, until the tier is closed or a call was given up."""
        is_lost = False
        while not is_lost and (calls := self._wait(worker)):
            answers: Sequence[Any] = [(Refusal.IO_ERROR, "error")] * len(calls)
            try:
                answers = self._make(worker, calls)
            except _GivenUpError:
                answers = [_ABORTED] * len(calls)
            except Exception:  # a bug, or a store that breaks its word: it must not end the thread
                self._count_error()
            with self._lock:
                is_lost = worker not in self._workers  # and the calls are answered
                ready = [] if is_lost else self._answer(calls, answers)
                worker.calls = ()
            self._go_on(ready)
            del calls, answers, ready  # they hold the caller's buffer
            self._end_unwanted()
        self._end_unwanted()
        if len(worker.memory):
            try:
                self.store.unregister(worker.memory.data)
            except Exception:  # the store breaks its word
                _report_error()
        with self._lock:
            if is_lost:
                self._num_hung -= 1
                self._call_began.notify()  # another one may take its place
            else:
                self._workers.remove(worker)
                self._one_told.notify_all()

    def _count_error(self) -> None:
        """Show the exception that is being handled, and count it as a failure."""
        _report_error()
        with self._lock:
            self._faults["error"] += 1
            self._count_failure()

    def _wait(self, worker: _Worker) -> Sequence[Call]:
        """Wait until a worker has calls to make; none: the tier is closed."""
        with self._lock:
            worker.verb = None  # one less reads or writes
            while not self._is_closing or (self._is_busy and not self._is_closed):
                rest = self._rest_left  # before the look: so its end is not overslept
                if calls := self._take_some(worker):
                    self._wake_one()
                    return calls
                self._job_came.wait(rest)
            return []

    def _take_some(self, worker: _Worker) -> Sequence[Call]:
        """Have a worker take calls of one kind, or ask a store that was left alone for a while."""
        worker.verb = self._next_verb()
        if worker.verb is not None:
            worker.calls = self._take(worker.verb)
        elif self._is_left_alone and self._rest_left is None:
            self._rest()
            worker.calls = [Call(_HEALTH)]
        else:
            worker.calls = []
        return worker.calls

    def _wake_one(self) -> None:
        """Wake a thread if there are calls that it can make; it wakes the next one."""
        if self._next_verb() is not None:
            self._job_came.notify()

    def _next_verb(self) -> Verb | None:
        """Say of which jobs calls can be made now: of questions and loads first."""
        if self._owes_removals or self._is_left_alone:
            return Verb.REMOVE if self._owes_removals else None
        if self._has_calls(Verb.ASK):
            return Verb.ASK
        if self._has_calls(Verb.LOAD) and self._has_room(self._num_threads - 1, Verb.LOAD):
            return Verb.LOAD
        if self._has_calls(Verb.REMOVE):
            return Verb.REMOVE
        if self._has_calls(Verb.PUT) and self._has_room(self._max_writers, Verb.PUT, Verb.REMOVE):
            return Verb.PUT  # after removals
        return None

    def _has_room(self, most: int, *verbs: Verb) -> bool:
        """Say whether one more thread may do jobs of some kinds: one is left for all else."""
        return sum(each.verb in verbs for each in self._workers) < most

    def _take(self, verb: Verb) -> list[Call]:
        """Take calls that one call of the store can answer, which has each key once."""
        queue = self._begun[verb] or self._queues[verb]
        method, most, num_bytes = queue[0].method, len(queue), 0
        if verb is Verb.LOAD:  # a thread's share
            most = -(-most // (self._num_threads - 1))
        calls: dict[str, Call] = {}
        jobs: set[Job | None] = set()
        while len(calls) < most:
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

    def _end_unwanted(self) -> None:
        """End what is queued if nobody does it, and warn once of a store that does not answer."""
        with self._lock:
            if self._is_usable and not self._failures:
                return
            ready = [] if self._is_usable else self._drop(self._begun, self._queues)
            # It has never answered, or fails again and again.
            has_failed = self._counts["opened"] or (self._failures and not self._has_answered)
            is_news = bool(has_failed) and not self._is_told and not self._is_closing
            self._is_told |= is_news
            faults = ", ".join(self._faults) or "timed_out"
        self._go_on(ready)
        if is_news:
            _log.warning(
                "%s: %s does not answer (%s). Requests go on without it, and it is asked again%s",
                self.name,
                self.store.name,
                faults,
                "; open_store(URL).health() says what is wrong" if self._disk is None else "",
            )

    def _make(self, worker: _Worker, calls: Sequence[Call]) -> Sequence[Any]:
        """Make calls, all of one method; return their answers."""
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
            answers = [self._take_over(*each) for each in triples]
        return answers

    def _take_over(self, call: Call, answer: int | StoreFault, buffer: memoryview) -> Any:
        """Take over what was read; the reader of a chunk makes its MAC."""
        if answer != len(call.buffer):
            return answer
        # What was copied is verified: a store may still write to the buffer.
        _copy(call.buffer, buffer)
        return call.read(call.buffer)

    def _go_on(self, jobs: Sequence[Job]) -> None:
        """Do what follows the answers of jobs; count those that are over, and call their ``done``.

        No lock is held.
        """
        num_told = 0
        for job in jobs:
            calls, outcome = self._next_step(job)
            with self._lock:
                if outcome is None:
                    self._queue(job, calls)
                    continue
                refusal = self._count_over(job, *outcome)
            if job.done is not None:
                try:
                    job.done(refusal)
                except Exception:  # the caller's; it must not end the thread that others wait for
                    _report_error()
            num_told += 1
        if num_told:
            with self._lock:
                self._num_telling -= num_told
                self._one_told.notify_all()

    def _next_step(self, job: Job) -> tuple[list[Call], _Outcome | None]:
        """Return the calls that a job needs next, or what came of it."""
        answers = [call.answer for call in job.calls]
        for answer in answers:
            if isinstance(answer, tuple):
                return [], answer
        try:
            calls = job.steps.send(answers)
            assert calls, "a step calls the store"
        except StopIteration as ended:
            return [], ended.value
        except Exception:  # a bug: it must not end the thread
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
        """Call the store, by the deadline; count what it did not do."""
        with self._lock:
            if self._is_closed:
                raise _GivenUpError
            began = time.monotonic()
            if self._call_seconds is not None:
                worker.deadline = began + max(seconds, self._call_seconds)
                if worker.deadline < self._watches_until:
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

    # The steps of jobs. No lock is held.

    def _ask(self, keys: Sequence[EntryKey] = ()) -> _Steps:
        """Ask which entries a store has; without keys, whether it is there."""
        answers = yield [Call(_EXISTS, str(key)) for key in keys] or [Call(_HEALTH)]
        for key, fault in zip(keys, answers, strict=False):
            self._know(key, is_there=fault is None)
        return None, ""

    def _load(self, expected: EntryFacts, into: memoryview) -> _Steps:
        """Read the header of an entry, and its chunks if it matches; have what is bad removed."""
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
            self._know(key, is_there=True)
            return None, ""
        else:
            refusal = Refusal.MAC
        # What a disk cannot read is of no use, whatever is in it.
        is_unreadable = any(each.answer is StoreFault.IO_ERROR for each in failed)
        is_bad = is_unreadable or refusal not in _UNDAMAGED
        with self._lock:
            if is_bad:
                _remember(self._bad, key, None)
            # Without one of its chunks nobody can use the rest, and nobody would write it anew.
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
        """Write an entry: its chunks, and its header when all of them are there; each confirmed."""
        key = facts.key
        [fault] = yield [Call(_EXISTS, str(key))]
        if fault not in (None, StoreFault.MISSING):
            return _refusal_of(fault), fault.value
        names = self._names(facts)
        if key in self._bad:  # a store keeps the first bytes
            fault, outcome = StoreFault.MISSING, (yield from self._remove(names))
            if outcome[0] is not None:
                return outcome
        with self._lock:
            if put.is_revoked:
                return _ABORTED
            self._bad.pop(key, None)
        if fault is None:  # somebody has stored it meanwhile
            self._know(key, is_there=True)
            return None, "found_stored"
        chunks = self._chunks(names, payload)
        header = self._macs.seal(facts, [chunk for _, chunk in chunks])
        parts = [*chunks, (names[0], memoryview(header))]
        # A disk writes the whole file at once.
        for some in [parts] if self._disk else [parts[:-1], parts[-1:]]:
            outcome = yield from self._write(some)
            if outcome[0] is not None:
                return outcome
        self._know(key, is_there=True)
        if put.is_revoked:
            yield from self._remove(names)
        return None, "written"

    def _write(self, parts: Sequence[tuple[str, memoryview]]) -> _Steps:
        """Put parts of an entry.

        That a store took them does not say that they can be found: so it is asked.
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
        """Return the chunks of an entry, with their names."""
        starts = range(0, len(payload), self._chunk_bytes)
        chunks = [payload[start : start + self._chunk_bytes] for start in starts]
        return list(zip(names[1:], chunks, strict=True))

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
