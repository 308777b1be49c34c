"""Wrong entries: not found again, even if a copy is under way."""

import pytest
from disk_rig import Answer, Gate, buffer_for, facts_of, load, open_tier, payload_of, put
from faulty_store import Trouble
from remote_rig import Bench, wait_until

from mamba_cache.stores import StoreFault
from mamba_cache.tiers import Refusal
from mamba_cache.tiers.disk import DiskStore
from mamba_cache.tiers.lower import Verb

WRONG, OTHER = facts_of(1), facts_of(2)


# On disk.


@pytest.mark.parametrize("is_taken", [True, False], ids=["written", "queued"])
def test_a_wrong_entry_that_is_just_written_is_not_stored(tmp_path, monkeypatch, is_taken) -> None:
    """Neither this process nor the next one finds the entry; it is computed and rewritten."""
    disk = open_tier(tmp_path)
    gate = Gate(monkeypatch, DiskStore, "_write")
    answers = {facts: Answer() for facts in ((WRONG,) if is_taken else (OTHER, WRONG))}
    for number, (facts, answer) in enumerate(answers.items(), 1):
        payload = payload_of(1 if facts is WRONG else 2)
        assert disk.put(facts, payload, answer)
        gate.wait_for(1)
        assert sum(not job.is_begun for job in disk._jobs[Verb.PUT]) == number - 1
    disk.remove(WRONG.key)
    gate.open()
    assert answers.pop(WRONG).get() is Refusal.ABORTED
    assert all(answer.get() is None for answer in answers.values())
    assert disk.flush(60)
    disk.check_invariants()
    assert disk.has_many([WRONG.key]) == [False]
    assert disk.stats().dropped == {"aborted": 1}
    disk.close()
    again = open_tier(tmp_path)
    assert (again.stats().recovered, again.has_many([WRONG.key])) == (len(answers), [False])
    assert put(again, 1) is None
    assert load(again, 1) == payload_of(1)
    again.close()


def test_a_wrong_entry_that_is_just_read_does_not_arrive(tmp_path, monkeypatch) -> None:
    disk = open_tier(tmp_path)
    assert put(disk, 1) is None
    gate = Gate(monkeypatch, DiskStore, "_read", lambda *args: args[2] is not None)
    answer = Answer()
    assert disk.load(WRONG, buffer_for(WRONG), answer)
    gate.wait_for(1)
    disk.remove(WRONG.key)
    gate.open()
    assert answer.get() is Refusal.ABORTED
    assert disk.flush(60)
    disk.check_invariants()
    assert disk.stats().refused == {"aborted": 1}
    disk.close()


def test_a_wrong_entry_is_removed_from_a_paused_disk(tmp_path) -> None:
    """Otherwise the entry would be found when the disk is used again."""
    disk = open_tier(tmp_path)
    assert put(disk, 1) is None
    disk._paused_until = 1e9
    assert not disk.is_healthy
    disk.remove(WRONG.key)
    disk._paused_until = 0.0
    assert disk.has_many([WRONG.key]) == [False]
    disk.close()
    again = open_tier(tmp_path)
    assert again.stats().recovered == 0
    again.close()


# In a store.


@pytest.fixture
def bench(monkeypatch):
    made = Bench(monkeypatch, num_threads=2)
    yield made
    made.faulty.heal()
    made.check()
    made.tier.close()


@pytest.mark.parametrize("is_taken", [True, False], ids=["written", "queued"])
@pytest.mark.parametrize("call", ["exists_many", "put_many"])
def test_a_wrong_entry_that_is_just_put_is_not_stored(bench, call, is_taken) -> None:
    bench.faulty.inject(call, Trouble.HANG, times=1)
    answers = {facts: Answer() for facts in ((WRONG,) if is_taken else (OTHER, WRONG))}
    for facts, answer in answers.items():
        assert bench.tier.put(facts, payload_of(1 if facts is WRONG else 2), answer)
        wait_until(lambda: bench.faulty.injected[call, Trouble.HANG] == 1)
    bench.tier.remove(WRONG.key)
    wait_until(lambda: not bench.tier._queues[Verb.REMOVE])
    bench.faulty.release()
    assert answers.pop(WRONG).get() is Refusal.ABORTED
    assert all(answer.get() is None for answer in answers.values())
    bench.end()
    assert not any(name.startswith(str(WRONG.key)) for name in bench.names())
    assert bench.tier.has_many([WRONG.key]) == bench.ask(1) == [False]
    assert bench.load(1) is Refusal.MISSING
    assert bench.put(1) is None
    assert bench.load(1) == bytes(payload_of(1))


def test_a_wrong_entry_that_is_just_got_does_not_arrive(bench, monkeypatch) -> None:
    bench.put(1)
    last = f"{WRONG.key}/4"
    gate = Gate(monkeypatch, bench.memory, "get_many_into", lambda keys, _: last in keys)
    answer = Answer()
    assert bench.tier.load(WRONG, buffer_for(WRONG), answer)
    gate.wait_for(1)
    bench.tier.remove(WRONG.key)
    gate.open()
    assert answer.get() is Refusal.ABORTED
    assert bench.tier.has_many([WRONG.key]) == bench.ask(1) == [False]


@pytest.mark.parametrize("is_open", [False, True], ids=["leased", "left alone"])
def test_a_wrong_entry_that_cannot_be_removed_is_not_found_again_later(bench, is_open) -> None:
    """A store may lease a just-read entry for some seconds, or not answer at that moment."""
    bench.put(1)
    bench.faulty.inject("remove", Trouble.FAIL, fault=StoreFault.LEASED)
    if is_open:
        bench.faulty.inject("get_many_into", Trouble.FAIL)
        assert [bench.load(1), bench.load(1)] == [Refusal.IO_ERROR] * 2
        assert not bench.tier.is_healthy
    bench.tier.remove(WRONG.key)
    bench.end()
    bench.faulty.heal()
    bench.turn(5.1)
    wait_until(lambda: bench.tier.is_healthy)
    bench.end()
    bench.turn(3600)
    assert bench.ask(1) == [False]
    assert bench.load(1) is Refusal.MISSING
    assert bench.put(1) is None
    assert bench.load(1) == bytes(payload_of(1))
