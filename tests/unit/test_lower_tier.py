"""The jobs of a lower tier: queued, begun, finished, answered; common tests of disk and store."""

import os
import threading

import pytest
from clocks import ManualClock
from disk_rig import SECRET, Answer, buffer_for, facts_of, load, open_tier, payload_of, put
from memory_store import MemoryStore
from remote_rig import Bench, let_see, wait_until

from mamba_cache.errors import InvariantError
from mamba_cache.stores import StoreFault
from mamba_cache.tiers import Refusal, lower
from mamba_cache.tiers.entry import EntryMacs
from mamba_cache.tiers.lower import Call, Job, LowerTier, Verb


class Idle(LowerTier):
    """A tier whose threads do nothing."""

    def _assign_calls(self, worker):
        return []


@pytest.fixture
def idle():
    tier = Idle(MemoryStore(), macs=EntryMacs(SECRET), write_on_use=1, max_queued=2)
    with tier._lock:
        tier._queues[Verb.ASK].clear()
        tier._jobs[Verb.ASK].clear()
    yield tier
    tier.close()


def add_put(tier, number, answer=None):
    put = Job(Verb.PUT, answer or Answer(), facts_of(number))
    with tier._lock:
        return tier._add_put(put, payload_of(number))


def test_an_entry_is_stored_once_at_a_time(idle) -> None:
    """A queued or running put blocks a second one; in its callback the caller may try again."""
    again = []

    assert add_put(idle, 1, lambda refusal: again.append(add_put(idle, 1)))
    assert not add_put(idle, 1)
    with idle._lock:
        calls = LowerTier._assign_calls(idle, idle._workers[0])
        assert not add_put(idle, 1)
        idle._workers[0].calls = ()
        ready = idle._answer(calls, [(Refusal.IO_ERROR, "broken")])
    idle._advance(ready)
    assert again == [True]
    assert idle.stats().dropped == {"in_flight": 2, "broken": 1}
    assert idle.stats().puts == 4


def test_queues_have_an_end(idle) -> None:
    assert [add_put(idle, number) for number in range(3)] == [True, True, False]
    assert idle.stats().dropped == {"queue_full": 1}
    loads = [idle.load(facts_of(1), buffer_for(facts_of(1)), Answer()) for _ in range(3)]
    assert loads == [True, True, False]


def test_a_job_whose_queueing_breaks_off_leaves_nothing(idle, monkeypatch) -> None:
    """The caller is interrupted once the job's calls are queued."""
    queue = idle._queue

    def broken(job, calls):
        queue(job, calls)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(idle, "_queue", broken)
        with pytest.raises(KeyboardInterrupt):
            add_put(idle, 1)
    idle.check_invariants()
    assert idle.num_queued == 0
    assert add_put(idle, 1)


def test_begun_jobs_continue_in_order_before_new_ones(idle) -> None:
    assert [add_put(idle, number) for number in (1, 2)] == [True, True]
    with idle._lock:
        calls = LowerTier._assign_calls(idle, idle._workers[0])
        idle._workers[0].verb, idle._workers[0].calls = None, ()
        ready = idle._answer(calls, [StoreFault.MISSING] * 2)
    idle._max_queued = 3
    assert add_put(idle, 3)
    idle._advance(ready)
    with idle._lock:
        calls = LowerTier._assign_calls(idle, idle._workers[0])
        idle._workers[0].calls = ()
    assert [call.name for call in calls] == [f"{facts_of(number).key}/0" for number in (1, 2)]
    idle._advance(idle._answer(calls, [(Refusal.IO_ERROR, "broken")] * 2))


def breaches_of(tier):
    """Return queued calls and jobs that break each statement of the invariants."""
    load, puts = Job(Verb.LOAD), [Job(Verb.PUT, None, facts_of(1)) for _ in range(2)]
    call = Call("get_many_into", job=load)
    yield "each call is there once", [call, call], []
    yield "an entry is stored once at a time", [], puts
    yield "jobs wait for their calls", [call], [load]


def test_breaches_of_the_invariants_are_noticed(idle) -> None:
    for statement, calls, jobs in breaches_of(idle):
        idle._queues[Verb.LOAD].extend(calls)
        for job in jobs:
            idle._jobs[job.verb].add(job)
        with pytest.raises(InvariantError, match=statement):
            idle.check_invariants()
        idle._queues[Verb.LOAD].clear()
        for job in jobs:
            idle._jobs[job.verb].remove(job)
    idle.check_invariants()


# Every lower tier, with threads.


@pytest.fixture(params=["disk", "store"])
def opened(request, tmp_path, monkeypatch):
    """Return a function that opens a tier of each kind."""
    tiers = []

    def open_one(**options):
        is_disk = request.param == "disk"
        tiers.append(
            open_tier(tmp_path, **options) if is_disk else Bench(monkeypatch, **options).tier
        )
        return tiers[0]

    open_one.__name__ = request.param
    yield open_one
    tiers[0].check_invariants()
    tiers[0].close()


@pytest.fixture
def tier(opened):
    return opened()


def has(tier, *numbers):
    return tier.has_many([facts_of(number).key for number in numbers])


def test_an_entry_is_written_at_its_second_use(opened) -> None:
    tier = opened(write_on_use=2)
    assert (put(tier, 1), has(tier, 1)) == (False, [False])
    assert (put(tier, 1), has(tier, 1)) == (None, [True])
    assert put(tier, 1) is None  # it is stored already
    stats = tier.stats()
    assert (stats.puts, stats.stored, stats.dropped) == (3, 1, {"first_use": 1})


def test_first_uses_are_forgotten_when_there_are_many(opened, monkeypatch) -> None:
    monkeypatch.setattr("mamba_cache.tiers.lower._MAX_REMEMBERED", 2)
    tier = opened(write_on_use=2)
    assert [put(tier, number) for number in (1, 2, 3)] == [False] * 3
    assert [put(tier, 1), put(tier, 3)] == [False, None]


def test_the_facts_of_the_request_are_compared(tier) -> None:
    """A colliding digest is refused; an entry that does not match is not found again."""
    assert put(tier, 1) is None
    assert load(tier, 1, prefix_tokens=1) is Refusal.PREFIX_TOKENS
    assert tier.flush(60)
    assert has(tier, 1) == [False]
    assert [load(tier, 1), load(tier, 1)] == [Refusal.MISSING] * 2
    assert tier.stats().refused == {"prefix_tokens": 1, "missing": 2}
    assert put(tier, 1) is None
    assert load(tier, 1) == payload_of(1)


def test_removed_entries_are_not_found_again(tier) -> None:
    assert [put(tier, number) for number in (1, 2)] == [None, None]
    for number in (1, 3):
        tier.remove(facts_of(number).key)
    assert has(tier, 1, 2) == [False, True]
    assert load(tier, 1) is Refusal.MISSING
    assert tier.flush(60)
    assert load(tier, 2) == payload_of(2)
    assert put(tier, 1) is None
    assert load(tier, 1) == payload_of(1)


def test_an_error_of_the_callers_is_shown_and_ends_nothing(tier, monkeypatch) -> None:
    shown = []
    monkeypatch.setattr(threading, "excepthook", shown.append)

    def broken(refusal):
        raise ZeroDivisionError(refusal)

    assert tier.put(facts_of(1), payload_of(1), broken)
    assert tier.flush()
    assert tier.load(facts_of(1), buffer_for(facts_of(1)), broken)
    assert tier.flush()
    assert [each.exc_type for each in shown] == [ZeroDivisionError] * 2
    assert load(tier, 1) == payload_of(1)


def test_an_error_of_the_tiers_own_ends_a_job_and_no_thread(tier, monkeypatch) -> None:
    shown = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    with monkeypatch.context() as patch:
        patch.setattr(tier._macs, "seal", None)
        assert put(tier, 1) is Refusal.IO_ERROR
    assert [each.exc_type for each in shown] == [TypeError]
    assert (tier.stats().faults, tier.stats().dropped) == ({"error": 1}, {"error": 1})
    tier.check_invariants()
    assert put(tier, 1) is None
    assert load(tier, 1) == payload_of(1)


@pytest.mark.parametrize("job", ["load", "put"])
def test_flush_waits_until_the_caller_has_been_answered(tier, job) -> None:
    """After a flush, the caller finds all its answers."""
    is_told, goes_on = threading.Event(), threading.Event()

    def done(_answer):
        is_told.set()
        assert goes_on.wait(60)

    assert put(tier, 1) is None
    if job == "load":
        assert tier.load(facts_of(1), buffer_for(facts_of(1)), done)
    else:
        assert tier.put(facts_of(2), payload_of(2), done)
    assert is_told.wait(60)
    tier.check_invariants()
    assert not tier.flush(0.01)
    goes_on.set()
    assert tier.flush(60)


def test_known_results_are_answered_at_once(tier) -> None:
    """The caller's thread answers, though disk or store is busy."""
    assert [put(tier, 1), put(tier, 2)] == [None, None]
    tier.remove(facts_of(2).key)
    told, here = [], threading.get_ident()

    def done(answer):
        told.append((answer, threading.get_ident()))

    assert tier.load(facts_of(2), buffer_for(facts_of(2)), done)
    assert tier.put(facts_of(1), payload_of(1), done)
    assert told == [(Refusal.MISSING, here), (None, here)]
    assert tier.flush(60)


def test_a_forked_process_uses_nothing_of_it(tier, monkeypatch) -> None:
    """Another thread may have held the lock at the moment of the fork."""
    assert put(tier, 1) is None
    assert tier.flush(60)
    held = threading.Lock()
    held.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        patch.setattr(tier, "_lock", held)
        if tier.name == "disk":
            patch.setattr(tier.store, "_lock", held)
        assert not tier.is_healthy
        assert (tier.stats().stored, tier.stats().is_healthy) == (1, False)
        tier.check_invariants()
        assert tier.has_many([facts_of(1).key]) == [False]
        assert (load(tier, 1), put(tier, 2)) == (False, False)
        tier.remove(facts_of(1).key)
        assert tier.flush()
        assert tier.num_queued == 0
        tier.close()
    assert load(tier, 1) == payload_of(1)


@pytest.mark.parametrize(
    ("opened", "num_cpus", "num_threads"),
    [
        *[("disk", *numbers) for numbers in ((None, 9), (2, 9), (12, 13), (64, 17))],
        *[("store", *numbers) for numbers in ((None, 4), (1, 2), (2, 2), (3, 3), (64, 4))],
    ],
    indirect=["opened"],
)
def test_threads_are_as_many_as_processors_can_feed(
    opened, num_cpus, num_threads, monkeypatch
) -> None:
    """A disk needs many reads, each computing MACs; each store thread may keep a CPU busy."""
    monkeypatch.setattr(os, "cpu_count", lambda: num_cpus)
    tier = opened(**{"num_readers" if opened.__name__ == "disk" else "num_threads": None})
    assert len(tier._workers) == num_threads
    mine = [each for each in threading.enumerate() if each.name == f"mamba-cache-{tier.name}"]
    assert mine
    assert all(each.daemon for each in mine), "an unclosed tier must not keep the process alive"


def test_after_two_failures_a_tier_is_paused(tier, monkeypatch) -> None:
    """The result of removing the entry in between does not count for reads."""
    clock = ManualClock()
    monkeypatch.setattr(lower, "time", clock)
    assert [put(tier, number) for number in (0, 1)] == [None, None]
    with monkeypatch.context() as patch:
        patch.setattr(tier.store, "get_many_into", lambda *_: [StoreFault.IO_ERROR])
        assert load(tier, 0) is Refusal.IO_ERROR
        assert tier.flush()
        assert tier.is_healthy
        assert load(tier, 1) is Refusal.IO_ERROR
    assert not tier.is_healthy
    assert has(tier, 0, 1) == [False, False]
    assert (load(tier, 0), put(tier, 2)) == (False, False)
    stats = tier.stats()
    assert (stats.dropped, stats.io_errors, stats.opened) == ({"unhealthy": 1}, 2, 1)
    for seconds in (4.75, 0.25):
        assert not tier.is_healthy
        clock.now += seconds
        let_see(tier)
    wait_until(lambda: tier.is_healthy)
    assert put(tier, 2) is None
    assert load(tier, 2) == payload_of(2)


# Chunks: a state has three, of a page, a page, and the rest.


@pytest.fixture
def chunked(opened):
    """Return a function that opens a tier with four states, whose readers read chunk by chunk."""

    def open_one(num_readers):
        if opened.__name__ == "disk":
            tier = opened(chunk_bytes=4096, num_readers=num_readers)
        else:
            tier = opened(chunk_bytes=4096, num_threads=num_readers + 1)
        tier._max_bytes[Verb.LOAD] = 1
        assert [put(tier, number) for number in range(4)] == [None] * 4
        return tier

    return open_one


def reading(patch, tier, read_chunk):
    """Read chunks by ``read_chunk(number, read)``, given a chunk's number and the original call."""
    read = tier.store.get_many_into

    def call(keys, buffers):
        _, _, number = keys[0].partition(f"/{facts_of(0).key.rank}/")
        if not number:
            return read(keys, buffers)
        return [read_chunk(int(number), lambda: read(keys, buffers)[0])]

    patch.setattr(tier.store, "get_many_into", call)


def test_the_chunks_of_an_entry_are_read_at_once(chunked, monkeypatch) -> None:
    """Each read waits until all three have begun; they end in reverse order."""
    tier, all_there, seen = chunked(4), threading.Barrier(3), []
    ended = [threading.Event() for _ in range(4)]
    ended[3].set()

    def together(number, read):
        seen.append(number)
        all_there.wait(60)
        assert ended[number + 1].wait(60)
        num_bytes = read()
        ended[number].set()
        return num_bytes

    reading(monkeypatch, tier, together)
    assert load(tier, 0) == payload_of(0)
    assert sorted(seen) == [0, 1, 2]


def test_the_entries_of_a_prefix_share_the_readers(chunked, monkeypatch) -> None:
    """There are never more reads at once than readers; all readers are used."""
    tier, all_there = chunked(4), threading.Barrier(4)
    lock, now, most = threading.Lock(), [], []

    def counted(number, read):
        with lock:
            now.append(number)
            most.append(len(now))
        all_there.wait(60)  # 12 reads, by fours
        num_bytes = read()
        with lock:
            now.remove(number)
        return num_bytes

    reading(monkeypatch, tier, counted)
    answers = [Answer() for _ in range(4)]
    buffers = [buffer_for(facts_of(number)) for number in range(4)]
    for number, (answer, into) in enumerate(zip(answers, buffers, strict=True)):
        assert tier.load(facts_of(number), into, answer)
    assert [answer.get() for answer in answers] == [None] * 4
    assert buffers == [payload_of(number) for number in range(4)]
    assert (len(most), max(most)) == (12, 4)
    assert tier.flush()


@pytest.mark.parametrize("failing", range(3))
@pytest.mark.parametrize("answer", [0, StoreFault.IO_ERROR])
def test_a_fault_in_one_chunk_fails_the_entry_once(chunked, monkeypatch, failing, answer) -> None:
    """The caller is answered when the other chunks are finished."""
    tier, failed, told = chunked(4), threading.Event(), threading.Event()
    under_way, calls, lock = [], [], threading.Lock()

    def one_fails(number, read):
        with lock:
            under_way.append(number)
        try:
            if number == failing:
                failed.set()
                return answer
            assert failed.wait(60)
            told.wait(0.1)  # times out: the answer must wait for this read
            return read()
        finally:
            with lock:
                under_way.remove(number)

    def done(refusal):
        calls.append((refusal, list(under_way)))
        told.set()

    with monkeypatch.context() as patch:
        reading(patch, tier, one_fails)
        assert tier.load(facts_of(0), buffer_for(facts_of(0)), done)
        assert tier.flush()
    reason = Refusal.IO_ERROR if answer else Refusal.SHORT
    assert calls == [(reason, [])]
    stats = tier.stats()
    assert (stats.refused, stats.io_errors) == ({reason.value: 1}, int(bool(answer)))
    assert has(tier, 0) == [False]
    assert load(tier, 1) == payload_of(1)
    assert put(tier, 0) is None
    assert load(tier, 0) == payload_of(0)


def test_chunks_of_an_entry_that_failed_are_not_read(chunked, monkeypatch) -> None:
    """The tier has one reader, and the first read fails."""
    tier, begun = chunked(1), []
    with monkeypatch.context() as patch:
        reading(patch, tier, lambda number, _: begun.append(number) or StoreFault.IO_ERROR)
        assert load(tier, 0) is Refusal.IO_ERROR
    assert begun == [0]
    assert load(tier, 1) == payload_of(1)
