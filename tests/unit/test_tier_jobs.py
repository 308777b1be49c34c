"""The jobs of a lower tier: queued, taken, over, told; and what disk and store do alike."""

import os
import threading

import pytest
from disk_rig import Answer, buffer_for, facts_of, load, make_identity, open_tier, payload_of, put
from remote_rig import Bench

from mamba_cache.errors import InvariantError
from mamba_cache.tiers import Refusal
from mamba_cache.tiers.jobs import LoadJob, PutJob, QueuedTier


class Absent(QueuedTier):
    """A tier without threads, which has no entry and may have any."""

    name = "absent"

    def _find(self, keys):
        return [False] * len(keys)

    def _absence(self, key):
        return None

    def _remove_soon(self, key):
        pass

    def _check_size(self, facts, payload):
        pass

    def _own_stats(self):
        return {}

    def _join(self):
        pass


@pytest.fixture
def jobs():
    return Absent(write_on_use=1, max_queued=2)


def put_of(number, answer=None):
    return PutJob(answer or Answer(), facts_of(number), payload_of(number))


def load_of(number, answer=None):
    facts = facts_of(number)
    return LoadJob(answer or Answer(), facts, buffer_for(facts))


def test_an_entry_is_stored_once_at_a_time(jobs) -> None:
    """Queued or taken; but not any more while it is told, when the caller may try again."""
    again = []

    def try_again(refusal):
        with jobs._lock:
            again.append(jobs._add_put(put_of(1)))

    put = put_of(1, try_again)
    with jobs._lock:
        assert jobs._add_put(put)
        assert not jobs._add_put(put_of(1))
        jobs._take_puts(1)
        assert not jobs._add_put(put_of(1))
    jobs._end(put, Refusal.IO_ERROR, "broken")
    assert again == [True]
    assert jobs.stats().dropped == {"in_flight": 2, "broken": 1}
    assert jobs.stats().puts == 4


def test_queues_have_an_end(jobs) -> None:
    with jobs._lock:
        assert [jobs._add_put(put_of(number)) for number in range(3)] == [True, True, False]
    assert jobs.stats().dropped == {"queue_full": 1}
    loads = [jobs.load(facts_of(1), buffer_for(facts_of(1)), Answer()) for _ in range(3)]
    assert loads == [True, True, False]


def test_a_job_that_is_there_twice_is_noticed(jobs) -> None:
    load = load_of(1)
    jobs._loads.append(load)
    jobs.check_invariants()
    jobs._taken.add(load)
    with pytest.raises(InvariantError, match="there twice"):
        jobs.check_invariants()
    jobs._loads.clear()
    jobs._taken = {put_of(1), put_of(1)}
    with pytest.raises(InvariantError, match="there twice"):
        jobs.check_invariants()


# What every lower tier does, with threads.


@pytest.fixture(params=["disk", "store"])
def opened(request, tmp_path, monkeypatch):
    """Opens a tier of each kind."""
    tiers = []

    def open_one(**options):
        is_disk = request.param == "disk"
        tiers.append(
            open_tier(tmp_path, **options) if is_disk else Bench(monkeypatch, **options).tier
        )
        return tiers[0]

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
    assert put(tier, 1) is None  # it is there
    stats = tier.stats()
    assert (stats.puts, stats.stored, stats.dropped) == (3, 1, {"first_use": 1})


def test_first_uses_are_forgotten_when_there_are_many(opened, monkeypatch) -> None:
    monkeypatch.setattr("mamba_cache.tiers.jobs._MAX_FIRST_USES", 2)
    tier = opened(write_on_use=2)
    assert [put(tier, number) for number in (1, 2, 3)] == [False] * 3
    assert [put(tier, 1), put(tier, 3)] == [False, None]


def test_what_the_request_derived_is_compared(tier) -> None:
    """A digest that collides is refused; what does not match is not found again."""
    assert put(tier, 1) is None
    assert load(tier, 1, prefix_tokens=1) is Refusal.PREFIX_TOKENS
    assert tier.flush(60)
    assert has(tier, 1) == [False]
    assert [load(tier, 1), load(tier, 1)] == [Refusal.MISSING] * 2
    assert tier.stats().refused == {"prefix_tokens": 1, "missing": 2}
    assert put(tier, 1) is None
    assert load(tier, 1) == payload_of(1)


def test_what_is_removed_is_not_found_again(tier) -> None:
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


@pytest.mark.parametrize("job", ["load", "put"])
def test_flush_waits_until_who_asked_has_been_told(tier, job) -> None:
    """A caller who flushes and then looks at its answers finds all of them."""
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


def test_what_is_known_at_once_is_told_at_once(tier) -> None:
    """By the caller's thread, though disk or store is busy."""
    assert [put(tier, 1), put(tier, 2)] == [None, None]
    tier.remove(facts_of(2).key)
    told, here = [], threading.get_ident()

    def done(answer):
        told.append((answer, threading.get_ident()))

    assert tier.load(facts_of(2), buffer_for(facts_of(2)), done)
    assert tier.put(facts_of(1), payload_of(1), done)
    expected = [(Refusal.MISSING, here), (None, here)]
    if tier.name == "disk":  # which has the entries of one identity
        other = facts_of(1, identity=make_identity("other weights"))
        assert tier.load(other, buffer_for(other), done)
        expected.append((Refusal.IDENTITY, here))
    assert told == expected
    assert tier.flush(60)


def test_a_forked_process_uses_nothing_of_it(tier, monkeypatch) -> None:
    """Another thread may have held the lock in the moment of the fork."""
    assert put(tier, 1) is None
    assert tier.flush(60)
    held = threading.Lock()
    held.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        patch.setattr(tier, "_lock", held)
        assert not tier.is_healthy
        assert tier.has_many([facts_of(1).key]) == [False]
        assert (load(tier, 1), put(tier, 2)) == (False, False)
        tier.remove(facts_of(1).key)
        assert tier.flush()
        assert tier.num_queued == 0
        tier.close()
    assert load(tier, 1) == payload_of(1)
