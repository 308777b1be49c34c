"""What the disk tier and the store tier share: jobs, from a caller's call to the answer.

A caller *queues* a job, a thread of the tier *takes* it, and when it is *over*, it is counted and
its ``done`` is called. ``flush`` waits for all of that. How a job is done is each tier's own.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

from mamba_cache.errors import InvariantError
from mamba_cache.tiers.entry import EntryFacts, EntryKey, Refusal
from mamba_cache.tiers.host import TierStats

__all__ = [
    "REST_SECONDS",
    "Done",
    "Job",
    "LoadJob",
    "PutJob",
    "QueuedTier",
    "RemovalJob",
    "report_error",
]

REST_SECONDS: Final = 5.0
"""For so long a tier is left alone after failures."""

_FAILURES_TO_REST: Final = 2

_MAX_FIRST_USES: Final = 2**16

Done: TypeAlias = Callable[[Refusal | None], object]
"""Called once, from any thread, when a put or a load is over: None, or why it failed."""


@dataclass(slots=True, eq=False)
class Job:
    """Something that a thread of a tier is to do, for an entry that may turn out to be wrong."""

    done: Done | None
    is_revoked: bool = field(default=False, kw_only=True)  # the entry is wrong: the job aborts


@dataclass(slots=True, eq=False)
class LoadJob(Job):
    """An entry that is to be read, as the request derived it."""

    expected: EntryFacts
    into: memoryview


@dataclass(slots=True, eq=False)
class PutJob(Job):
    """An entry that is to be written."""

    facts: EntryFacts
    payload: memoryview


@dataclass(slots=True, eq=False)
class RemovalJob(Job):
    """An entry that is known to be wrong: its key, or the names of its parts in a store."""

    entry: Any


_Some = TypeVar("_Some", bound=Job)


class QueuedTier(ABC):
    """A place for entries below host memory, whose threads do what callers queue.

    No call waits for input or output but ``flush`` and ``close``, and none raises because of it:
    what goes wrong is a ``Refusal``, which the tier counts too. A tier that is slow, full or broken
    refuses at once, and in a process that was forked it refuses everything. Any thread may call;
    ``done`` is called from threads of this object, or from the caller's when the answer is known.

    Subclasses say which entries they have (``_absence``), and have threads that ``_wait`` for jobs
    and ``_end`` each. The lock is held by whoever reads or changes anything of the tier.
    """

    name: str

    def __init__(
        self,
        *,
        write_on_use: int,
        max_queued: int,
        queues: Sequence[deque[Any]] = (),
    ) -> None:
        self._write_on_use, self._max_queued = write_on_use, max_queued
        self._lock = threading.RLock()
        self._load_came = threading.Condition(self._lock)
        self._put_came = threading.Condition(self._lock)
        self._one_told = threading.Condition(self._lock)
        self._loads: deque[Any] = deque()
        self._puts: dict[EntryKey, PutJob] = {}  # by key: an entry is stored once at a time
        self._removals: deque[RemovalJob] = deque()
        self._queues = (*queues, self._removals, self._loads)
        self._taken: set[Job] = set()
        self._num_telling = 0
        self._first_uses: dict[EntryKey, None] = {}
        self._counts: Counter[str] = Counter()
        self._refused: Counter[Refusal] = Counter()  # loads that brought nothing
        self._not_written: Counter[str] = Counter()  # puts that stored nothing
        self._failures = 0  # in a row
        self._rests_until = 0.0
        self._is_closing = False
        self._pid = os.getpid()

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

    def put(self, facts: EntryFacts, payload: memoryview, done: Done) -> bool:
        """Queue an entry to be stored; nobody changes ``payload`` until ``done`` is called.

        False: it is not taken, which is counted, and ``done`` is not called.
        """
        self._check_size(facts, payload)
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
            refusal = self._absence(expected.key)
            if refusal is None:
                self._add(self._loads, LoadJob(done, expected, into))
                return True
            self._refused[refusal] += 1
        done(refusal)
        return True

    def remove(self, key: EntryKey) -> None:
        """Make an entry unfindable that is known to be wrong, for other processes too.

        What is under way of it comes to nothing. It is gone after ``flush``.
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
            self._remove_soon(key)

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until what was queued so far is over, and ``done`` has been called for it."""
        if self._is_forked:
            return True
        with self._lock:
            return self._one_told.wait_for(lambda: not self.num_queued, timeout_seconds)

    def close(self) -> None:
        """End its threads; what is queued is given up, and ``done`` called for each."""
        if self._is_forked:
            return  # the threads, and what they hold, are the parent's
        with self._lock:
            self._is_closing = True
            self._load_came.notify_all()
            self._put_came.notify_all()
        self._join()

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
                **self._own_stats(),
            )

    def check_invariants(self) -> None:
        """Prove that the bookkeeping agrees with itself."""
        with self._lock:
            jobs = [*self._queued(), *self._taken]
            keys = [job.facts.key for job in jobs if isinstance(job, PutJob)]
            if len(set(jobs)) < len(jobs) or len(set(keys)) < len(keys) or self._num_telling < 0:
                raise InvariantError(f"a job is there twice: {jobs}")

    # What each tier says of itself. The lock is held, but for ``_check_size`` and ``_join``.

    @property
    def _takes_calls(self) -> bool:
        """Whether jobs are queued now."""
        return not self._is_closing

    @abstractmethod
    def _find(self, keys: Sequence[EntryKey]) -> list[bool]:
        """Say of each key whether it is there; those that are count as used."""

    @abstractmethod
    def _absence(self, key: EntryKey) -> Refusal | None:
        """Say why an entry cannot be loaded; None: a thread must look."""

    @abstractmethod
    def _remove_soon(self, key: EntryKey) -> None:
        """Queue the removal of an entry that is wrong."""

    @abstractmethod
    def _check_size(self, facts: EntryFacts, payload: memoryview) -> None:
        """Check that facts and buffer have the size of an entry here."""

    @abstractmethod
    def _own_stats(self) -> dict[str, Any]:
        """Return the fields of ``TierStats`` that only this tier has."""

    @abstractmethod
    def _join(self) -> None:
        """Wait until the threads have ended, and give back what they used."""

    # What callers do; the lock is held.

    def _queued(self) -> list[Job]:
        return [job for queue in (*self._queues, self._puts.values()) for job in queue]

    def _open_jobs(self, kind: type[_Some]) -> list[_Some]:
        """Return the jobs of a kind that are queued or taken."""
        return [job for job in (*self._queued(), *self._taken) if isinstance(job, kind)]

    def _add(self, queue: deque[Any], job: Job) -> None:
        """Queue a job that is no put."""
        self._load_came.notify()
        queue.append(job)

    def _add_put(self, put: PutJob) -> bool:
        """Queue an entry that is not there to be stored; False, counted, if it is not taken."""
        key = put.facts.key
        reason = self._reason_against(key)
        if reason is not None:
            return self._refuse_put(reason)
        self._put_came.notify()
        self._puts[key] = put
        self._first_uses.pop(key, None)
        return True

    def _refuse_put(self, reason: str) -> bool:
        """Count an entry that is not taken; return False."""
        self._not_written[reason] += 1
        return False

    def _reason_against(self, key: EntryKey) -> str | None:
        """Say why an entry that is not there is not written now."""
        taken = (job.facts.key for job in self._taken if isinstance(job, PutJob))
        if key in self._puts or key in taken:
            return "in_flight"
        if self._write_on_use > 1 and key not in self._first_uses:
            self._first_uses[key] = None
            if len(self._first_uses) > _MAX_FIRST_USES:
                kept = islice(self._first_uses, _MAX_FIRST_USES // 2, None)
                self._first_uses = dict.fromkeys(kept)
            return "first_use"
        return "queue_full" if len(self._puts) >= self._max_queued else None

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
        self._failures += _FAILURES_TO_REST if is_overdue else 1
        if self._has_failed:
            self._rest()

    def _rest(self) -> None:
        self._rests_until = time.monotonic() + REST_SECONDS

    def _count_success(self) -> None:
        self._failures, self._rests_until = 0, 0.0

    # What threads do.

    def _start(self, *targets: Callable[[], None]) -> list[threading.Thread]:
        """Start threads that do not keep a process from ending."""
        name = f"mamba-cache-{self.name}"
        threads = [threading.Thread(target=each, name=name, daemon=True) for each in targets]
        for thread in threads:
            thread.start()
        return threads

    def _wait(self, came: threading.Condition, take: Callable[[], list[Any]]) -> list[Any]:
        """Wait until ``take``, called with the lock held, returns jobs; none: it is closed."""
        with self._lock:
            while not self._is_closing:
                rest = self._rest_left  # before the look: so its end is not overslept
                if jobs := take():
                    return jobs
                came.wait(rest)
            return []

    def _take(self, queue: deque[Any], count: int = 1) -> list[Any]:
        """Take the oldest jobs of a queue."""
        jobs = [queue.popleft() for _ in range(min(count, len(queue)))]
        self._taken.update(jobs)
        return jobs

    def _take_puts(self, count: int) -> list[PutJob]:
        """Take the oldest puts."""
        puts = [self._puts.pop(key) for key in [*islice(self._puts, count)]]
        self._taken.update(puts)
        return puts

    def _take_queued(self) -> list[Job]:
        """Take all that is queued: nobody does it any more."""
        with self._lock:
            jobs = self._queued()
            self._taken.update(jobs)
            self._puts.clear()
            for queue in self._queues:
                queue.clear()
            return jobs

    def _end(self, job: Job, refusal: Refusal | None = None, reason: str | None = None) -> None:
        """Count what came of a job that was taken, and call its ``done``."""
        with self._lock:
            over = self._count_over([job], refusal, reason)
        self._tell(over)

    def _still_taken(self, jobs: Iterable[Job]) -> list[Job]:
        """Return those jobs that are not over."""
        return [job for job in jobs if job in self._taken]

    def _count_over(
        self, jobs: Iterable[Job], refusal: Refusal | None = None, reason: str | None = None
    ) -> list[tuple[Job, Refusal | None]]:
        """Count what came of jobs that were taken; the lock is held. They are to be told.

        ``refusal`` says why they brought nothing, ``reason`` what a put is counted as.
        """
        over = []
        for job in jobs:
            self._taken.remove(job)
            own, counted_as = (Refusal.ABORTED, "aborted") if job.is_revoked else (refusal, reason)
            if isinstance(job, LoadJob):
                if own is None:
                    self._counts["hits"] += 1
                    self._counts["read_bytes"] += len(job.into)
                else:
                    self._refused[own] += 1
            elif isinstance(job, PutJob):
                if own is not None:
                    self._not_written[str(counted_as)] += 1
                else:
                    self._counts[counted_as or "written"] += 1
                    self._counts["written_bytes"] += 0 if counted_as else len(job.payload)
            over.append((job, own))
        self._num_telling += len(over)
        return over

    def _tell(self, over: Iterable[tuple[Job, Refusal | None]]) -> None:
        """Call ``done`` of jobs that are over; without the lock."""
        for job, refusal in over:
            if job.done is not None:
                try:
                    job.done(refusal)
                except Exception:  # the caller's; it must not end the thread that others wait for
                    report_error()
            with self._lock:
                self._num_telling -= 1
                self._one_told.notify_all()


def report_error() -> None:
    """Show the exception that is being handled where those of threads are shown."""
    kind, error, trace = sys.exc_info()
    threading.excepthook(threading.ExceptHookArgs((kind, error, trace, threading.current_thread())))
