"""The jobs of a tier below host memory: what it was asked to do, from the call to the answer.

The disk tier and the store tier have this in common; how a job is done is each tier's own. A caller
*queues* a job, a thread of the tier *takes* it, and when it is *over*, it is counted and who waits
for it is told. ``flush`` waits for all of that.

A caller's thread may be interrupted at any line (Ctrl-C), those of a tier never are. So a caller
changes nothing but by one statement, which puts a whole job into a queue; threads of the tier do
the rest, and end what is still queued when it is closed. What can be summed over jobs is not kept.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeVar

from mamba_cache._checks import check_int
from mamba_cache.errors import InvariantError
from mamba_cache.tiers.entry import EntryFacts, EntryKey, Refusal

__all__ = ["Job", "LoadJob", "PutJob", "TierJobs", "report_error"]

_MAX_FIRST_USES: Final = 2**16
_LOOK_SECONDS: Final = 1.0
"""After which an idle thread looks by itself: an interrupt in ``notify`` may lose the next one."""


@dataclass(slots=True, eq=False)
class Job:
    """Something that a thread of a tier is to do."""

    done: Callable[[Any], object] | None
    is_revoked: bool = field(default=False, kw_only=True)

    def answer(self, refusal: Refusal | None) -> object:
        """Return what ``done`` is called with."""
        return refusal


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


_Some = TypeVar("_Some", bound=Job)


class TierJobs:
    """All jobs of one tier that are not over, and what came of those that are."""

    def __init__(
        self,
        *,
        write_on_use: int,
        max_queued: int,
        threads_are_alike: bool = False,
        queues: Sequence[deque[Any]] = (),
    ) -> None:
        self._write_on_use = check_int("write_on_use", write_on_use, minimum=1, maximum=2)
        self.max_queued = check_int("max_queued", max_queued, minimum=1)
        self.lock = threading.RLock()
        self.load_came = threading.Condition(self.lock)
        self.put_came = self.load_came if threads_are_alike else threading.Condition(self.lock)
        self._one_told = threading.Condition(self.lock)
        self.loads: deque[Any] = deque()
        # Plain dicts, in order as well: an interrupt in a key's hash, which ``OrderedDict`` calls
        # twice, would leave that one broken.
        self.puts: dict[EntryKey, PutJob] = {}
        self._queues = queues
        self.taken: set[Job] = set()
        self._num_telling = 0
        self._first_uses: dict[EntryKey, None] = {}
        self.counts: Counter[str] = Counter()
        self.refused: Counter[Refusal] = Counter()
        self.not_written: Counter[str] = Counter()
        self.read_seconds = self.write_seconds = 0.0
        self.is_closing = False
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked process: without threads, and with a lock that may be held."""
        return os.getpid() != self._pid

    @property
    def num_open(self) -> int:
        """Jobs that are queued, taken, or of which somebody is being told."""
        if self.is_forked:
            return 0
        with self.lock:
            return len(self._queued()) + len(self.taken) + self._num_telling

    def open_jobs(self, kind: type[_Some]) -> list[_Some]:
        """Return the jobs of a kind that are queued or taken."""
        return [job for job in (*self._queued(), *self.taken) if isinstance(job, kind)]

    def _queued(self) -> list[Job]:
        return [job for queue in (*self._queues, self.loads, self.puts.values()) for job in queue]

    # What callers do.

    def add(self, queue: deque[Any], job: Job) -> None:
        """Queue a job that is no put."""
        self.load_came.notify()  # first: interrupted in between, it wakes a thread in vain
        queue.append(job)

    def add_put(self, put: PutJob) -> bool:
        """Queue an entry that is not there to be stored; False, counted, if it is not taken."""
        key = put.facts.key
        reason = self._reason_against(key)
        if reason is not None:
            return self.refuse_put(reason)
        self.put_came.notify()
        self.puts[key] = put
        self._first_uses.pop(key, None)
        return True

    def revoke(self, key: EntryKey) -> None:
        """Have what is under way of an entry that is wrong come to nothing; the lock is held."""
        for load in self.open_jobs(LoadJob):
            load.is_revoked |= load.expected.key == key
        for put in self.open_jobs(PutJob):
            put.is_revoked |= put.facts.key == key

    def refuse_put(self, reason: str) -> bool:
        """Count an entry that is not taken; return False."""
        self.not_written[reason] += 1
        return False

    def _reason_against(self, key: EntryKey) -> str | None:
        """Say why an entry that is not there is not written now."""
        if self.is_closing:
            return "aborted"
        taken = (job.facts.key for job in self.taken if isinstance(job, PutJob))
        if key in self.puts or key in taken:
            return "in_flight"
        if self._write_on_use > 1 and key not in self._first_uses:
            self._first_uses[key] = None
            if len(self._first_uses) > _MAX_FIRST_USES:
                kept = islice(self._first_uses, _MAX_FIRST_USES // 2, None)
                self._first_uses = dict.fromkeys(kept)
            return "first_use"
        return "queue_full" if len(self.puts) >= self.max_queued else None

    def flush(self, timeout_seconds: float | None) -> bool:
        """Wait until all is over, and told; say whether it is."""
        if self.is_forked:
            return True
        with self.lock:
            return self._one_told.wait_for(lambda: not self.num_open, timeout_seconds)

    def close(self) -> None:
        """Have nothing more taken, and wake the threads: they take what is queued, and end it."""
        with self.lock:
            self.load_came.notify_all()
            self.put_came.notify_all()
            self.is_closing = True  # last, as in ``add``

    # What threads of the tier do.

    def wait(self, came: threading.Condition, take: Callable[[], list[Any]]) -> list[Any]:
        """Wait until ``take``, called with the lock held, returns jobs; none: it is closed."""
        with self.lock:
            while not self.is_closing:
                if jobs := take():
                    return jobs
                came.wait(_LOOK_SECONDS)
            return []

    def take(self, queue: deque[Any], count: int = 1) -> list[Any]:
        """Take the oldest jobs of a queue."""
        jobs = [queue.popleft() for _ in range(min(count, len(queue)))]
        self.taken.update(jobs)
        return jobs

    def take_puts(self, count: int) -> list[PutJob]:
        """Take the oldest puts."""
        puts = [self.puts.pop(key) for key in [*islice(self.puts, count)]]
        self.taken.update(puts)
        return puts

    def take_queued(self) -> list[Job]:
        """Take all that is queued: nobody does it any more."""
        with self.lock:
            jobs = self._queued()
            self.taken.update(jobs)
            self.puts.clear()
            for queue in (*self._queues, self.loads):
                queue.clear()
            return jobs

    def end(self, job: Job, refusal: Refusal | None = None, reason: str | None = None) -> None:
        """Count what came of a job that was taken, and tell who waits for it."""
        with self.lock:
            self.taken.remove(job)
            self._num_telling += 1
            if job.is_revoked:
                refusal, reason = Refusal.ABORTED, "aborted"
            if isinstance(job, LoadJob):
                if refusal is None:
                    self.counts["hits"] += 1
                    self.counts["read_bytes"] += len(job.into)
                else:
                    self.refused[refusal] += 1
            elif isinstance(job, PutJob):
                if refusal is not None:
                    self.not_written[str(reason)] += 1
                else:
                    self.counts[reason or "written"] += 1
                    self.counts["written_bytes"] += 0 if reason else len(job.payload)
        if job.done is not None:
            try:
                job.done(job.answer(refusal))
            except Exception:  # the caller's; it must not end the thread that others wait for
                report_error()
        with self.lock:
            self._num_telling -= 1
            self._one_told.notify_all()

    def end_all(self, jobs: Iterable[Job], refusal: Refusal, reason: str) -> None:
        """End jobs that nobody does."""
        for job in jobs:
            self.end(job, refusal, reason)

    def stats(self) -> dict[str, Any]:
        """Return the fields of ``TierStats`` that are counted here; the lock is held."""
        counts, dropped = self.counts, dict(self.not_written)
        stored = counts["known"] + counts["written"] + counts["found_stored"]
        return {
            "loads": counts["hits"] + self.refused.total() + len(self.open_jobs(LoadJob)),
            "restored": counts["hits"],
            "refused": {each.value: count for each, count in self.refused.items()},
            "puts": stored + sum(dropped.values()) + len(self.open_jobs(PutJob)),
            "stored": counts["written"],
            "found_stored": counts["found_stored"],
            "dropped": dropped,
            "read_bytes": counts["read_bytes"],
            "written_bytes": counts["written_bytes"],
            "read_seconds": self.read_seconds,
            "write_seconds": self.write_seconds,
        }

    def check_invariants(self) -> None:
        """Prove that no job is there twice.

        Raises:
            InvariantError: One is.
        """
        with self.lock:
            jobs = [*self._queued(), *self.taken]
            keys = [job.facts.key for job in jobs if isinstance(job, PutJob)]
            if len(set(jobs)) < len(jobs) or len(set(keys)) < len(keys) or self._num_telling < 0:
                raise InvariantError(f"a job is there twice: {jobs}")


def report_error() -> None:
    """Show the exception that is being handled where those of threads are shown."""
    kind, error, trace = sys.exc_info()
    threading.excepthook(threading.ExceptHookArgs((kind, error, trace, threading.current_thread())))
