"""The jobs of a lower tier: queued, taken, over, told; and counted whatever interrupts a caller."""

from collections import deque

import pytest
from disk_rig import Answer, buffer_for, facts_of, payload_of

from mamba_cache.errors import InvariantError
from mamba_cache.tiers import Refusal
from mamba_cache.tiers.jobs import LoadJob, PutJob, TierJobs


@pytest.fixture
def jobs():
    return TierJobs(write_on_use=1, max_queued=2, queues=[deque()])


def put_of(number, answer=None):
    return PutJob(answer or Answer(), facts_of(number), payload_of(number))


def load_of(number, answer=None):
    facts = facts_of(number)
    return LoadJob(answer or Answer(), facts, buffer_for(facts))


def test_a_job_is_open_until_it_is_told(jobs) -> None:
    seen = []
    put = put_of(1, lambda refusal: seen.append((refusal, jobs.num_open, jobs.flush(0))))
    with jobs.lock:
        assert jobs.add_put(put)
    assert (jobs.num_open, jobs.flush(0)) == (1, False)
    assert jobs.take_puts(9) == [put]
    assert (jobs.num_open, jobs.flush(0)) == (1, False)
    jobs.end(put)
    assert seen == [(None, 1, False)]
    assert (jobs.num_open, jobs.flush(0)) == (0, True)


def test_an_entry_is_stored_once_at_a_time(jobs) -> None:
    """Queued or taken; but not any more while it is told, when the caller may try again."""
    again = []

    def try_again(refusal):
        with jobs.lock:
            again.append(jobs.add_put(put_of(1)))

    put = put_of(1, try_again)
    with jobs.lock:
        assert jobs.add_put(put)
        assert not jobs.add_put(put_of(1))
        jobs.take_puts(1)
        assert not jobs.add_put(put_of(1))
    jobs.end(put, Refusal.IO_ERROR, "broken")
    assert again == [True]
    assert jobs.stats()["dropped"] == {"in_flight": 2, "broken": 1}
    assert jobs.stats()["puts"] == 4


def test_what_is_queued_is_taken_at_once_when_nobody_does_it(jobs) -> None:
    answers = [Answer() for _ in range(2)]
    with jobs.lock:
        jobs.add(jobs.loads, load_of(1, answers[0]))
        jobs.add_put(put_of(2, answers[1]))
    queued = jobs.take_queued()
    assert len(queued) == jobs.num_open == 2
    assert jobs.take_queued() == []
    jobs.end_all(queued, Refusal.ABORTED, "aborted")
    assert [answer.get() for answer in answers] == [Refusal.ABORTED] * 2
    stats = jobs.stats()
    assert (stats["refused"], stats["dropped"]) == ({"aborted": 1}, {"aborted": 1})
    assert (stats["loads"], stats["puts"]) == (1, 1)


def test_threads_wait_until_it_is_closed(jobs) -> None:
    assert jobs.wait(jobs.load_came, lambda: [1]) == [1]
    jobs.close()
    assert jobs.wait(jobs.load_came, lambda: [1]) == []
    with jobs.lock:
        assert not jobs.add_put(put_of(1))
    assert jobs.not_written == {"aborted": 1}


def test_a_job_that_is_there_twice_is_noticed(jobs) -> None:
    load = load_of(1)
    jobs.loads.append(load)
    jobs.check_invariants()
    jobs.taken.add(load)
    with pytest.raises(InvariantError, match="there twice"):
        jobs.check_invariants()
    jobs.loads.clear()
    jobs.taken = {put_of(1), put_of(1)}
    with pytest.raises(InvariantError, match="there twice"):
        jobs.check_invariants()


def test_a_job_ends_once(jobs) -> None:
    with jobs.lock:
        jobs.add(jobs.loads, load_of(1))
        [load] = jobs.take(jobs.loads)
    jobs.end(load)
    with pytest.raises(KeyError):
        jobs.end(load)
    assert jobs.stats()["restored"] == jobs.stats()["loads"] == 1
