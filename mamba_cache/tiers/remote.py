"""The store tier: entries in a store that several processes share, verified whenever they are read.

An entry is stored in chunks, and its manifest last: who finds the manifest finds the chunks. What a
store says is not believed: ``exists`` confirms what was put, sizes and digests what was read.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mamba_cache._checks import check_int, check_number
from mamba_cache.errors import InvalidArgumentError, InvariantError
from mamba_cache.stores import BlobStore, StoreFault
from mamba_cache.tiers.answers import report_error, tell
from mamba_cache.tiers.entry import EntryFacts, EntryKey, Refusal, payload_digest
from mamba_cache.tiers.host import TierStats
from mamba_cache.tiers.manifest import chunk_slices, manifest_bytes, read_manifest, write_manifest
from mamba_cache.tiers.protocols import Done, Found

__all__ = ["RemoteStats", "RemoteTier"]

_CHUNK_BYTES: Final = 2**21
"""Of the format, as the header is: all who share a store have the same."""

_CHUNKS_AT_ONCE: Final = 8
_CHUNKS_READ_AT_ONCE: Final = 4  # a call of more may take so long that a store seems dead
_ENTRIES_AT_ONCE: Final = 16
_FAILURES_TO_OPEN: Final = 2
_PROBE_SECONDS: Final = 5.0
_CONNECT_SECONDS: Final = 30.0
_BELIEVED_SECONDS: Final = 60.0
_MAX_REMEMBERED: Final = 2**16

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStats:
    """What the store tier did since it was made.

    Attributes:
        store: The store's name.
        is_healthy: Whether calls are taken now.
        asks: Questions what the store has.
        loads: Entries asked for.
        hits: Those that were read and verified.
        refused: Those that were not, by reason.
        puts: Entries offered.
        written: Those that were stored, and confirmed.
        found_stored: Those that somebody had stored before.
        not_written: Those that were not, by reason: "first_use", "in_flight", "queue_full",
            "unhealthy", "unconfirmed" (the store said that it has what it has not), "not_removed"
            (a bad entry of the same key is still there), "timed_out", "aborted", "error", or the
            value of a ``StoreFault``.
        faults: What the store answered instead of doing what it was asked, by ``StoreFault``, key
            by key, "missing" not counted; "error" where a call raised.
        given_up: Calls that did not return by their deadline.
        hung: Of these, those that have not returned yet; each keeps a thread and its buffers.
        opened: How often the store was left alone after failures.
        read_bytes: Payloads read.
        written_bytes: Payloads written.
        read_seconds: Time in which threads read and verified, in sum.
        write_seconds: Time in which threads digested and wrote.
    """

    store: str
    is_healthy: bool
    asks: int
    loads: int
    hits: int
    refused: Mapping[str, int]
    puts: int
    written: int
    found_stored: int
    not_written: Mapping[str, int]
    faults: Mapping[str, int]
    given_up: int
    hung: int
    opened: int
    read_bytes: int
    written_bytes: int
    read_seconds: float
    write_seconds: float


@dataclass(slots=True, eq=False)
class _Ask:
    """A question which entries the store has."""

    keys: Sequence[EntryKey]
    done: Found
    found: list[bool] | None = None


@dataclass(slots=True, eq=False)
class _Load:
    """An entry that is to be read."""

    expected: EntryFacts
    into: memoryview
    done: Done


@dataclass(slots=True, eq=False)
class _Put:
    """An entry that is to be written."""

    facts: EntryFacts
    payload: memoryview
    done: Done
    digests: list[bytes]


@dataclass(slots=True, eq=False)
class _Probe:
    """A look whether a store that failed is back; the first one has it connect."""

    is_first: bool = False


@dataclass(slots=True, eq=False)
class _Removal:
    """A bad entry that is to be removed from the store: the keys of its parts, manifest last."""

    names: list[str]


_Job: TypeAlias = "_Ask | _Load | _Put | _Probe | _Removal"


class _Worker:
    """A thread, and the memory that its calls read and write.

    Attributes:
        jobs: What it has taken and not ended.
        deadline: When the call that it is in is given up; None: it is in none.
        reads_since: When that call began, if somebody waits for what it reads.
        is_given_up: Whether it is in a call that was.
        is_writing: Whether it writes to the store.
    """

    def __init__(self) -> None:
        self.jobs: list[_Job] = []
        self.deadline: float | None = None
        self.reads_since: float | None = None
        self.is_given_up = self.is_writing = False
        self.memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.thread: threading.Thread | None = None


class _GivenUp(BaseException):
    """A call returned after its deadline: nobody waits for it, and its buffers are free again."""


class RemoteTier:
    """Entries in a store.

    Nobody who calls waits for the store: threads of this object do, each call with a deadline. A
    call that does not return by it is given up with its thread and the memory that it reads or
    writes, and another thread takes its place; what it brings later is not looked at. After two
    failures in a row the store is left alone, and asked every five seconds whether it is back.

    Whatever is wrong is a counted miss. An entry that is not what its key says is not asked for
    again by this process, and removed from the store. Any thread may call; ``done`` is called from
    threads of this object, or from the caller's when the answer is known at once. In a process that
    was forked it refuses everything.

    Args:
        store: Where the entries are.
        write_on_use: 2: an entry is written when it is offered for the second time; 1: at once.
        num_threads: Threads that call the store; all but one of them may be writing.
        max_queued: Loads that may wait, and likewise puts and questions.
        call_seconds: When one call of the store is given up.
        owns_store: Whether ``close`` closes the store too.
        chunk_bytes: Bytes of one chunk. Who shares a store must have the same.
        verifies: False believes what the store brings: for tests of what verifying prevents.

    Attributes:
        name: "store".
        store: As given.

    Raises:
        InvalidArgumentError: An argument is out of range.
    """

    name = "store"

    def __init__(
        self,
        store: BlobStore,
        *,
        write_on_use: int = 2,
        num_threads: int = 4,
        max_queued: int = 1024,
        call_seconds: float = 2.0,
        owns_store: bool = False,
        chunk_bytes: int = _CHUNK_BYTES,
        verifies: bool = True,
    ) -> None:
        self._write_on_use = check_int("write_on_use", write_on_use, minimum=1, maximum=2)
        self._num_threads = check_int("num_threads", num_threads, minimum=2, maximum=256)
        self._max_queued = check_int("max_queued", max_queued, minimum=1)
        self._call_seconds = check_number("call_seconds", call_seconds, maximum=1e9)
        self._chunk_bytes = check_int("chunk_bytes", chunk_bytes, minimum=1)
        if self._chunk_bytes > store.max_blob_bytes:
            raise InvalidArgumentError(
                f"chunk_bytes={chunk_bytes} is more than {store.name} takes as one blob "
                f"({store.max_blob_bytes})"
            )
        self.store = store
        self._owns_store, self._verifies, self._pid = owns_store, verifies, os.getpid()
        self._lock = threading.RLock()
        self._work_came = threading.Condition(self._lock)
        self._one_over = threading.Condition(self._lock)
        self._call_began = threading.Condition(self._lock)
        self._counts: Counter[str] = Counter()
        self._refused: Counter[Refusal] = Counter()
        self._not_written: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._read_seconds = self._write_seconds = 0.0
        self._asks: deque[_Ask] = deque()
        self._loads: deque[_Load] = deque()
        self._puts: deque[_Put] = deque()
        self._removals: deque[_Removal] = deque()
        # So that no request waits until the store has connected.
        self._connecting: deque[_Probe] = deque([_Probe(is_first=True)])
        self._pending: set[EntryKey] = set()
        self._first_uses: OrderedDict[EntryKey, None] = OrderedDict()
        # What the store had, and what in it was bad, with when that was known.
        self._stored: OrderedDict[EntryKey, float] = OrderedDict()
        self._bad: OrderedDict[EntryKey, float] = OrderedDict()
        self._over: list[_Job] = []  # nobody does them any more, and nobody has been told
        self._failures = self._num_reads = self._num_telling = 0
        self._probes_at: float | None = None
        self._heard_at = self._reads_since = 0.0
        self._is_closing = self._watches_calls = self._probe_is_due = False
        self._workers: set[_Worker] = set()
        self._hung: set[_Worker] = set()
        self._watcher = threading.Thread(target=self._watch, name="mamba-cache-store-watch")
        self._watcher.daemon = True
        with self._lock:
            for _ in range(self._num_threads):
                self._add_worker()
        self._watcher.start()

    @property
    def is_healthy(self) -> bool:
        """Whether it takes calls now: not while the store is left alone after failures."""
        return os.getpid() == self._pid and self._takes_calls

    @property
    def num_queued(self) -> int:
        """Questions, loads and puts that are not over."""
        with self._lock:
            return self._num_queued()

    def silence(self) -> float:
        """Return for how many seconds the store has owed an answer to somebody who reads.

        An answer to one call is no sign of life for another, which may ask a machine that is dead.
        0 if nobody waits for any.
        """
        with self._lock:
            if not self._num_reads:
                return 0.0
            heard_at = max(self._heard_at, self._reads_since)
            calls = [each.reads_since for each in self._workers if each.reads_since is not None]
            return max(0.0, time.monotonic() - min([heard_at, *calls]))

    def has_many(self, keys: Sequence[EntryKey]) -> list[bool]:
        """Say of each key whether this process knows that the store has it, without asking."""
        if not self.is_healthy:
            return [False] * len(keys)
        now = time.monotonic()
        with self._lock:
            return [_is_recent(self._stored, key, now) for key in keys]

    def ask(self, keys: Sequence[EntryKey], found: Found) -> bool:
        """Queue a question which entries the store has.

        Args:
            keys: Of the entries.
            found: Called with True or False for each; False where the store does not say.

        Returns:
            False if it is not taken, and ``found`` not called: as in ``put``.
        """
        if not self.is_healthy:
            return False
        with self._lock:
            if not self._takes_calls or len(self._asks) >= self._max_queued:
                return False
            self._counts["asks"] += 1
            self._asks.append(_Ask(keys, found))
            self._count_read()
        return True

    def put(self, facts: EntryFacts, payload: memoryview, done: Done) -> bool:
        """Queue an entry to be stored.

        Args:
            facts: What it is.
            payload: [``facts.payload_bytes``] bytes, contiguous; not written until ``done``.
            done: Called with None when the store has it and has confirmed that, or with why not.

        Returns:
            False if it is not taken, and ``done`` not called: it is offered for the first time and
            only the second counts, it is on its way, the queue is full, or the store has failed.

        Raises:
            InvalidArgumentError: The payload has another size than the facts say.
        """
        _check_size(facts, payload)
        if not self.is_healthy:
            self._not_written["unhealthy"] += 1
            return False
        key = facts.key
        with self._lock:
            self._counts["puts"] += 1
            is_there = _is_recent(self._stored, key, time.monotonic())
            reason = None if is_there else self._reason_against(key)
            if reason is not None:
                self._not_written[reason] += 1
                return False
            if not is_there:
                self._pending.add(key)
                self._puts.append(_Put(facts, payload, done, []))
                self._work_came.notify()
        if is_there:
            done(None)
        return True

    def load(self, expected: EntryFacts, into: memoryview, done: Done) -> bool:
        """Queue an entry to be read and verified: each field of its manifest, and each chunk.

        Args:
            expected: What the request derived of it.
            into: [``expected.payload_bytes``] bytes, contiguous, to write to until ``done``. They
                hold the entry only if that was called with None.
            done: Called with None when it is there and verified, or with why it is not.

        Returns:
            False if it is not taken, and ``done`` not called: the queue is full, or the store has
            failed.

        Raises:
            InvalidArgumentError: The buffer has another size than the facts say.
        """
        _check_size(expected, into)
        if not self.is_healthy:
            return False
        with self._lock:
            if not self._takes_calls or len(self._loads) >= self._max_queued:
                return False
            self._counts["loads"] += 1
            is_bad = _is_recent(self._bad, expected.key, time.monotonic())
            if is_bad:
                self._refused[Refusal.MISSING] += 1
            else:
                self._loads.append(_Load(expected, into, done))
                self._count_read()
        if is_bad:
            done(Refusal.MISSING)
        return True

    def remove(self, key: EntryKey) -> None:
        """Have an entry that is known to be wrong not found again: its manifest goes.

        Its chunks go before it is written anew, or when the store needs room.
        """
        with self._lock:
            self._stored.pop(key, None)
            _remember(self._bad, key, time.monotonic())
            if self._takes_calls:
                self._removals.append(_Removal([str(key)]))
                self._work_came.notify()

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until what was queued so far is over, and ``done`` has been called for it.

        Args:
            timeout_seconds: How long. Default: until every call has returned or is given up.

        Returns:
            Whether it is.
        """
        with self._lock:
            return self._one_over.wait_for(lambda: not self._num_queued(), timeout_seconds)

    def close(self) -> None:
        """End its threads; what is queued is given up, and ``done`` called for each.

        It waits for calls that are under way, but not longer than until their deadlines.
        """
        if os.getpid() != self._pid:
            return  # the threads, and what they hold, are the parent's
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            queued = self._take_queued()
            for each in (self._work_came, self._call_began):
                each.notify_all()
            workers = list(self._workers)
        self._end_all(queued, Refusal.ABORTED, "aborted")
        for worker in workers:
            assert worker.thread is not None
            worker.thread.join(self._call_seconds)
        with self._lock:
            late = [worker for worker in workers if worker.thread.is_alive()]  # type: ignore[union-attr]
            jobs = [job for worker in late for job in self._give_up(worker)]
        self._end_all(jobs, Refusal.ABORTED, "aborted")
        for worker in workers:
            if worker not in late and len(worker.memory):
                self.store.unregister(worker.memory.data)
        if self._owns_store:
            closing = threading.Thread(target=self.store.close, daemon=True)
            closing.start()
            closing.join(self._call_seconds)

    def stats(self) -> RemoteStats:
        """Return what it did so far."""
        with self._lock:
            return RemoteStats(
                store=self.store.name,
                is_healthy=self.is_healthy,
                asks=self._counts["asks"],
                loads=self._counts["loads"],
                hits=self._counts["hits"],
                refused={each.value: n for each, n in self._refused.items()},
                puts=self._counts["puts"],
                written=self._counts["written"],
                found_stored=self._counts["found_stored"],
                not_written=dict(self._not_written),
                faults=dict(self._faults),
                given_up=self._counts["given_up"],
                hung=len(self._hung),
                opened=self._counts["opened"],
                read_bytes=self._counts["read_bytes"],
                written_bytes=self._counts["written_bytes"],
                read_seconds=self._read_seconds,
                write_seconds=self._write_seconds,
            )

    def tier_stats(self) -> TierStats:
        """Return the same in the form that all tiers have in common; it has no rows of its own."""
        stats = self.stats()
        return TierStats(
            name=self.name,
            entries={},
            rows={},
            ready_rows={},
            row_bytes={},
            stored=stats.written,
            restored=stats.hits,
            evicted=0,
            dropped=stats.not_written,
            refused=stats.refused,
        )

    def check_invariants(self) -> None:
        """Prove that the bookkeeping agrees with itself.

        Raises:
            InvariantError: It does not.
        """
        with self._lock:
            busy = [job for worker in self._workers for job in worker.jobs]
            jobs = [*busy, *self._over, *(job for queue in self._queues for job in queue)]
            reads = sum(isinstance(job, (_Ask, _Load)) for job in jobs)
            writes = [job.facts.key for job in jobs if isinstance(job, _Put)]
            statements = {
                "reads are counted right": reads == self._num_reads,
                "what is pending is queued or being written": sorted(map(str, writes))
                == sorted(map(str, self._pending)),
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
    def _queues(self) -> tuple[deque[Any], ...]:
        return self._connecting, self._asks, self._loads, self._removals, self._puts

    @property
    def _takes_calls(self) -> bool:
        is_left_alone = self._failures >= _FAILURES_TO_OPEN
        return not self._is_closing and not is_left_alone and bool(self._workers)

    def _num_queued(self) -> int:
        jobs = [job for worker in self._workers for job in worker.jobs]
        busy = sum(not isinstance(job, _Probe) or job.is_first for job in jobs)
        over = len(self._over) + self._num_telling
        return busy + sum(len(queue) for queue in self._queues) + over

    def _reason_against(self, key: EntryKey) -> str | None:
        """Say why an entry that is not there is not written now."""
        if not self._takes_calls:
            return "unhealthy"
        if key in self._pending:
            return "in_flight"
        if self._write_on_use > 1 and key not in self._first_uses:
            _remember(self._first_uses, key, None)
            return "first_use"
        if len(self._puts) >= self._max_queued:
            return "queue_full"
        self._first_uses.pop(key, None)
        return None

    def _count_read(self) -> None:
        if not self._num_reads:
            self._reads_since = time.monotonic()
        self._num_reads += 1
        self._work_came.notify()

    def _take_queued(self) -> list[_Job]:
        jobs: list[_Job] = [job for queue in self._queues for job in queue]
        for queue in self._queues:
            queue.clear()
        self._over += jobs
        return jobs

    def _take_jobs(self, worker: _Worker) -> list[_Job]:
        jobs, worker.jobs = worker.jobs, []
        self._over += jobs
        return jobs

    def _add_worker(self) -> None:
        worker = _Worker()
        worker.thread = threading.Thread(
            target=self._work, args=(worker,), name="mamba-cache-store", daemon=True
        )
        self._workers.add(worker)
        worker.thread.start()

    def _give_up(self, worker: _Worker) -> list[_Job]:
        """Take a worker's jobs from it, and have another one in its place; return them."""
        jobs = self._take_jobs(worker)
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
        is_needed = True
        while is_needed:
            is_needed = self._work_once(worker)

    def _work_once(self, worker: _Worker) -> bool:
        """Do some of it; return whether to go on."""
        try:
            jobs = self._next_jobs(worker)
            if jobs:
                self._do(worker, jobs)
            return bool(jobs)
        except _GivenUp:
            return self._come_back(worker)
        except Exception:  # a bug, or a store that breaks its word: it must not end the thread
            report_error()
            with self._lock:
                self._faults["error"] += 1
                jobs = self._take_jobs(worker)
                dropped = self._count_failure()
            self._end_all(jobs, Refusal.IO_ERROR, "error")
            self._end_all(dropped, Refusal.IO_ERROR, "unhealthy")
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

    def _next_jobs(self, worker: _Worker) -> list[_Job]:
        """Wait for jobs of one kind, questions and loads first; none: the tier is closed."""
        with self._lock:
            worker.is_writing = False
            while not self._is_closing:
                taken: list[_Job] = []
                if self._failures >= _FAILURES_TO_OPEN:
                    if self._probe_is_due:
                        self._probe_is_due = False
                        taken = [_Probe()]
                elif self._connecting:
                    taken = [self._connecting.popleft()]
                elif self._asks:
                    taken = [self._asks.popleft()]
                elif self._loads:
                    taken = self._take_loads()
                elif self._removals:
                    taken = [self._removals.popleft()]
                elif self._puts and self._num_writing() < self._num_threads - 1:
                    worker.is_writing = True
                    count = min(len(self._puts), _ENTRIES_AT_ONCE)
                    taken = [self._puts.popleft() for _ in range(count)]
                if taken:
                    worker.jobs = list(taken)
                    return taken
                self._work_came.wait()
            return []

    def _take_loads(self) -> list[_Job]:
        """Take a thread's share of the loads: of different entries, for a call names each once."""
        share = min(-(-len(self._loads) // self._num_threads), _ENTRIES_AT_ONCE)
        taken: dict[EntryKey, _Load] = {}
        while len(taken) < share and self._loads[0].expected.key not in taken:
            load = self._loads.popleft()
            taken[load.expected.key] = load
        return [*taken.values()]

    def _num_writing(self) -> int:
        return sum(worker.is_writing for worker in self._workers)

    def _do(self, worker: _Worker, jobs: Sequence[_Job]) -> None:
        started = time.perf_counter()
        first = jobs[0]
        if isinstance(first, _Ask):
            self._answer(worker, first)
        elif isinstance(first, _Probe):
            self._probe(worker, first)
        elif isinstance(first, _Removal):
            self._remove(worker, first.names)
            self._finish(worker, first, None)
        elif isinstance(first, _Load):
            self._load_all(worker, [job for job in jobs if isinstance(job, _Load)])
            with self._lock:
                self._read_seconds += time.perf_counter() - started
        else:
            self._put_all(worker, [job for job in jobs if isinstance(job, _Put)])
            with self._lock:
                self._write_seconds += time.perf_counter() - started
                self._work_came.notify()  # one less writes

    def _call(
        self, worker: _Worker, call: Callable[[], Sequence[_T]], *, connects: bool = False
    ) -> Sequence[_T]:
        """Call the store, by the deadline; count what it did not do.

        Raises:
            _GivenUp: It returned after its deadline.
        """
        with self._lock:
            seconds = max(self._call_seconds, _CONNECT_SECONDS) if connects else self._call_seconds
            now = time.monotonic()
            worker.deadline = now + seconds
            is_read = any(isinstance(job, (_Ask, _Load)) for job in worker.jobs)
            worker.reads_since = now if is_read else None
            if not self._watches_calls:
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
            dropped: list[_Job] = []
            if any(each.is_of_the_store for each in faults):
                dropped = self._count_failure()
            else:
                self._heard_at = time.monotonic()
                self._failures, self._probes_at, self._probe_is_due = 0, None, False
        self._end_all(dropped, Refusal.IO_ERROR, "unhealthy")
        return answers

    def _count_failure(self) -> list[_Job]:
        """Count a failure; return what is not to be asked of such a store any more."""
        self._failures += 1
        if self._failures < _FAILURES_TO_OPEN:
            return []
        if self._failures == _FAILURES_TO_OPEN:
            self._counts["opened"] += 1
        self._probes_at = time.monotonic() + _PROBE_SECONDS
        self._stored.clear()  # one that comes back may have nothing any more
        self._call_began.notify()  # who watches knows of the probe then
        return self._take_queued()

    def _end_all(self, jobs: Iterable[_Job], refusal: Refusal, reason: str) -> None:
        """Tell that jobs are over which nobody does any more."""
        for job in jobs:
            self._tell(job, refusal, reason)

    def _tell(self, job: _Job, refusal: Refusal | None, reason: str | None = None) -> None:
        """Count what came of a job that is over, and tell who waits for it."""
        with self._lock:
            self._over.remove(job)
            self._num_telling += 1
            if isinstance(job, _Load):
                if refusal is None:
                    self._counts["hits"] += 1
                    self._counts["read_bytes"] += len(job.into)
                else:
                    self._refused[refusal] += 1
            elif isinstance(job, _Put):
                self._pending.discard(job.facts.key)
                if reason is not None:
                    self._not_written[reason] += 1
            if isinstance(job, (_Ask, _Load)):
                self._num_reads -= 1
        if isinstance(job, _Ask):
            try:
                job.done([False] * len(job.keys) if job.found is None else job.found)
            except Exception:
                report_error()
        elif isinstance(job, (_Load, _Put)):
            tell(job.done, refusal)
        with self._lock:
            self._num_telling -= 1
            self._one_over.notify_all()

    def _finish(
        self, worker: _Worker, job: _Job, refusal: Refusal | None, reason: str | None = None
    ) -> None:
        with self._lock:
            worker.jobs.remove(job)
            self._over.append(job)
        self._tell(job, refusal, reason)

    def _watch(self) -> None:
        """Give up calls that do not return, and have a store that failed asked again."""
        while True:
            jobs: list[_Job] = []
            dropped: list[_Job] = []
            with self._lock:
                if self._is_closing:
                    return
                now = time.monotonic()
                for worker in [each for each in self._workers if (each.deadline or now + 1) <= now]:
                    jobs += self._give_up(worker)
                    dropped += self._count_failure()
                if not self._workers:  # all hang: nobody is left to do what is queued
                    dropped += self._take_queued()
                if self._probes_at is not None and now >= self._probes_at:
                    self._probes_at, self._probe_is_due = None, True
                    self._work_came.notify_all()
                if not jobs:
                    moments = [each.deadline for each in self._workers if each.deadline is not None]
                    moments += [] if self._probes_at is None else [self._probes_at]
                    self._watches_calls = bool(moments)
                    self._call_began.wait(min(moments) - now if moments else None)
            self._end_all(jobs, Refusal.TIMEOUT, "timed_out")
            self._end_all(dropped, Refusal.IO_ERROR, "unhealthy")

    def _answer(self, worker: _Worker, ask: _Ask) -> None:
        """Ask the store what it has."""
        names = [str(key) for key in ask.keys]
        answers = self._call(worker, lambda: self.store.exists_many(names)) if names else []
        now = time.monotonic()
        with self._lock:
            ask.found = [
                fault is None and not _is_recent(self._bad, key, now)
                for key, fault in zip(ask.keys, answers, strict=True)
            ]
            for key, is_there in zip(ask.keys, ask.found, strict=True):
                self._know(key, now, is_there=is_there)
        self._finish(worker, ask, None)

    def _probe(self, worker: _Worker, probe: _Probe) -> None:
        """Look whether the store is back."""
        self._call(worker, lambda: [self.store.health().fault], connects=probe.is_first)
        self._finish(worker, probe, None)

    def _know(self, key: EntryKey, now: float, *, is_there: bool) -> None:
        if is_there:
            _remember(self._stored, key, now)
        else:
            self._stored.pop(key, None)

    def _load_all(self, worker: _Worker, loads: Sequence[_Load]) -> None:
        """Read entries: their manifests, and then the chunks of those that match."""
        sizes = [manifest_bytes(each.expected.payload_bytes, self._chunk_bytes) for each in loads]
        buffers = self._buffers(worker, sizes)
        answers = self._get(worker, [str(each.expected.key) for each in loads], buffers)
        chunks: deque[tuple[_Load, int, slice, bytes]] = deque()
        left: Counter[int] = Counter()
        for load, answer, buffer in zip(loads, answers, buffers, strict=True):
            digests = self._digests_in(load, answer, buffer)
            if isinstance(digests, Refusal):
                self._refuse(worker, load, digests, has_manifest=False)
                continue
            slices = chunk_slices(load.expected.payload_bytes, self._chunk_bytes)
            left[id(load)] = len(slices)
            chunks.extend(
                (load, index, part, digest)
                for index, (part, digest) in enumerate(zip(slices, digests, strict=True))
            )
        while chunks:
            taken = [chunks.popleft() for _ in range(min(len(chunks), _CHUNKS_READ_AT_ONCE))]
            taken = [each for each in taken if left[id(each[0])]]  # not of one that was refused
            if not taken:
                continue
            buffers = self._buffers(worker, [part.stop - part.start for _, _, part, _ in taken])
            names = [str(replace(each[0].expected.key, chunk=each[1])) for each in taken]
            answers = self._get(worker, names, buffers)
            for (load, _, part, digest), answer, buffer in zip(
                taken, answers, buffers, strict=True
            ):
                if not left[id(load)]:
                    continue
                refusal = self._refusal(answer, buffer, digest)
                if refusal is not None:
                    left[id(load)] = 0
                    self._refuse(worker, load, refusal, has_manifest=True)
                    continue
                _copy(load.into[part], buffer)
                left[id(load)] -= 1
                if not left[id(load)]:
                    with self._lock:
                        self._know(load.expected.key, time.monotonic(), is_there=True)
                    self._finish(worker, load, None)

    def _get(
        self, worker: _Worker, names: list[str], buffers: list[memoryview]
    ) -> Sequence[int | StoreFault]:
        return self._call(worker, lambda: self.store.get_many_into(names, buffers))

    def _digests_in(
        self, load: _Load, answer: int | StoreFault, buffer: memoryview
    ) -> list[bytes] | Refusal:
        """Read a manifest that the store has brought, or not."""
        if isinstance(answer, StoreFault):
            return _refusal_of(answer)
        if not self._verifies:
            return [b""] * len(chunk_slices(load.expected.payload_bytes, self._chunk_bytes))
        return read_manifest(buffer[:answer], load.expected, self._chunk_bytes)

    def _refusal(
        self, answer: int | StoreFault, buffer: memoryview, digest: bytes
    ) -> Refusal | None:
        """Say what is wrong with a chunk."""
        if isinstance(answer, StoreFault):
            return _refusal_of(answer)
        if not self._verifies:
            return None
        if answer != len(buffer):
            return Refusal.SHORT if answer < len(buffer) else Refusal.PAYLOAD_BYTES
        return None if payload_digest(buffer) == digest else Refusal.PAYLOAD_DIGEST

    def _refuse(
        self, worker: _Worker, load: _Load, refusal: Refusal, *, has_manifest: bool
    ) -> None:
        """End a load that brought nothing, and have what is bad taken out of the store."""
        key, now = load.expected.key, time.monotonic()
        is_bad = refusal not in (Refusal.MISSING, Refusal.IO_ERROR, Refusal.TIMEOUT)
        with self._lock:
            self._stored.pop(key, None)
            if is_bad:
                _remember(self._bad, key, now)
            # Without one of its chunks nobody can use the rest, and nobody would write it anew.
            if is_bad or (has_manifest and refusal is Refusal.MISSING):
                self._removals.append(_Removal(self._names(load.expected)))
                self._work_came.notify()
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

    def _put_all(self, worker: _Worker, puts: Sequence[_Put]) -> None:
        """Write entries: chunks, and manifests when all of them are there; each confirmed."""
        puts = self._without_bad(worker, puts)
        puts = self._without_stored(worker, puts)
        puts = self._put_chunks(worker, puts)
        names = {id(put): self._names(put.facts) for put in puts}
        puts = self._confirm(worker, puts, [names[id(put)][:-1] for put in puts])
        manifests = [write_manifest(put.facts, self._chunk_bytes, put.digests) for put in puts]
        for group in _grouped(list(zip(puts, manifests, strict=True)), _ENTRIES_AT_ONCE):
            buffers = self._buffers(worker, [len(manifest) for _, manifest in group])
            for buffer, (_, manifest) in zip(buffers, group, strict=True):
                buffer[:] = manifest
            keys = [names[id(put)][-1] for put, _ in group]
            answers = self._put(worker, keys, buffers)
            puts = self._but_failed(worker, puts, [put for put, _ in group], answers)
        for put in self._confirm(worker, puts, [names[id(put)][-1:] for put in puts]):
            with self._lock:
                self._counts["written"] += 1
                self._counts["written_bytes"] += len(put.payload)
                self._know(put.facts.key, time.monotonic(), is_there=True)
            self._finish(worker, put, None)

    def _without_bad(self, worker: _Worker, puts: Sequence[_Put]) -> list[_Put]:
        """Remove what was found bad under the keys of entries: a store keeps the first bytes."""
        good = []
        for put in puts:
            if put.facts.key in self._bad and not self._remove(worker, self._names(put.facts)):
                self._finish(worker, put, Refusal.IO_ERROR, "not_removed")
                continue
            with self._lock:
                self._bad.pop(put.facts.key, None)
            good.append(put)
        return good

    def _without_stored(self, worker: _Worker, puts: Sequence[_Put]) -> list[_Put]:
        """End those that somebody has stored meanwhile, or the store does not answer for."""
        if not puts:
            return []
        names = [str(put.facts.key) for put in puts]
        answers = self._call(worker, lambda: self.store.exists_many(names))
        missing = []
        for put, fault in zip(puts, answers, strict=True):
            if fault is StoreFault.MISSING:
                missing.append(put)
            elif fault is not None:
                self._finish(worker, put, _refusal_of(fault), fault.value)
            else:
                with self._lock:
                    self._counts["found_stored"] += 1
                    self._know(put.facts.key, time.monotonic(), is_there=True)
                self._finish(worker, put, None)
        return missing

    def _put_chunks(self, worker: _Worker, puts: Sequence[_Put]) -> list[_Put]:
        """Write the chunks of entries; return those of which all were taken."""
        good = list(puts)
        chunks = [
            (put, index, part)
            for put in puts
            for index, part in enumerate(chunk_slices(put.facts.payload_bytes, self._chunk_bytes))
        ]
        for group in _grouped(chunks, _CHUNKS_AT_ONCE):
            taken = [each for each in group if each[0] in good]
            if not taken:
                continue
            buffers = self._buffers(worker, [part.stop - part.start for _, _, part in taken])
            for (put, _, part), buffer in zip(taken, buffers, strict=True):
                _copy(buffer, put.payload[part])
                put.digests.append(payload_digest(buffer))
            names = [str(replace(put.facts.key, chunk=index)) for put, index, _ in taken]
            answers = self._put(worker, names, buffers)
            good = self._but_failed(worker, good, [put for put, _, _ in taken], answers)
        return good

    def _put(
        self, worker: _Worker, names: list[str], buffers: list[memoryview]
    ) -> Sequence[StoreFault | None]:
        return self._call(worker, lambda: self.store.put_many(names, buffers))

    def _confirm(
        self, worker: _Worker, puts: Sequence[_Put], names: Sequence[list[str]]
    ) -> list[_Put]:
        """Ask whether what was put can be found: that a store took it does not say so."""
        if not puts:
            return []
        keys = [name for each in names for name in each]
        answers = self._call(worker, lambda: self.store.exists_many(keys))
        owners = [put for put, each in zip(puts, names, strict=True) for _ in each]
        return self._but_failed(worker, puts, owners, answers, missing="unconfirmed")

    def _but_failed(
        self,
        worker: _Worker,
        puts: Sequence[_Put],
        owners: Sequence[_Put],
        answers: Sequence[StoreFault | None],
        *,
        missing: str = StoreFault.MISSING.value,
    ) -> list[_Put]:
        """End the puts of which an answer is a fault; return the others."""
        failed: dict[int, StoreFault] = {}
        for owner, fault in zip(owners, answers, strict=True):
            if fault is not None:
                failed.setdefault(id(owner), fault)
        good = []
        for put in puts:
            fault = failed.get(id(put))
            if fault is None:
                good.append(put)
            else:
                reason = missing if fault is StoreFault.MISSING else fault.value
                self._finish(worker, put, _refusal_of(fault), reason)
        return good

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


def _check_size(facts: EntryFacts, payload: memoryview) -> None:
    """Check that a buffer has the size that the facts say.

    Raises:
        InvalidArgumentError: It has not.
    """
    if len(payload) != facts.payload_bytes:
        raise InvalidArgumentError(
            f"{facts.key} has {facts.payload_bytes} bytes, got a buffer of {len(payload)}"
        )
