"""The store tier: an entry reported as stored is stored, and loads equal puts."""

import re
import sys
import threading
from itertools import product

import pytest
from clocks import ManualClock
from disk_rig import SECRET, Answer, buffer_for, facts_of, name_of, payload_of
from faulty_store import FaultyStore, Trouble
from memory_store import MemoryStore
from remote_rig import CHUNK_BYTES, PATIENCE, Bench, wait_until

from mamba_cache.stores import StoreFault
from mamba_cache.tiers import Refusal, lower
from mamba_cache.tiers.entry import HEADER_BYTES, EntryKind, EntryMacs
from mamba_cache.tiers.lower import Job, LowerTier, Verb

KV, STATE = EntryKind.KV, EntryKind.STATE


@pytest.fixture
def bench(monkeypatch):
    made = Bench(monkeypatch)
    yield made
    made.faulty.heal()
    made.check()
    made.tier.close()


def calls_of(bench):
    """Record the calls of the store from now on, with their keys."""
    calls = []
    for name in ("exists_many", "put_many", "get_many_into", "remove"):
        original = getattr(bench.memory, name)

        def call(keys, *rest, name=name, original=original):
            if keys:
                calls.append((name, list(keys)))
            return original(keys, *rest)

        setattr(bench.memory, name, call)
    return calls


def test_a_put_entry_is_loaded_in_another_process(bench, monkeypatch) -> None:
    for kind in EntryKind:
        assert bench.put(1, kind) is None
        assert bench.load(1, kind) == bytes(payload_of(1, kind))
    other = Bench(store=bench.memory)
    assert other.ask(1, 2) == [True, False]
    assert other.load(1) == bytes(payload_of(1))
    assert other.load(2) is Refusal.MISSING
    stats = other.tier.stats()
    assert (stats.loads, stats.restored, dict(stats.refused)) == (2, 1, {"missing": 1})
    assert stats.read_bytes == len(payload_of(1))
    other.tier.close()


def test_an_entry_is_stored_in_this_order(bench) -> None:
    """Put chunks, check them, put the header, check it; only then the entry counts as stored."""
    calls, key = calls_of(bench), str(facts_of(1).key)
    chunks = [f"{key}/{index}" for index in range(5)]
    assert bench.put(1) is None
    assert calls == [
        ("exists_many", [key]),
        ("put_many", chunks),
        ("exists_many", chunks),
        ("put_many", [key]),
        ("exists_many", [key]),
    ]
    assert [len(bench.memory._blobs[chunk]) for chunk in chunks] == [2048] * 4 + [9000 - 4 * 2048]
    del calls[:]
    assert bench.load(1) == bytes(payload_of(1))
    assert calls[0] == ("get_many_into", [key])
    assert sorted(name for _, names in calls[1:] for name in names) == chunks
    assert {call for call, _ in calls} == {"get_many_into"}
    assert bench.tier.has_many([facts_of(1).key, facts_of(2).key]) == [True, False]


def test_an_entry_that_is_there_is_not_put_again(bench) -> None:
    """This process remembers the entry for a minute, then asks the store, as others do at once."""
    assert bench.put(1) is None
    calls = calls_of(bench)
    assert bench.put(1) is None
    assert calls == []
    bench.turn(60)
    assert bench.tier.has_many([facts_of(1).key]) == [False]
    assert bench.put(1) is None
    other = Bench(store=bench.memory)
    assert other.put(1) is None
    assert calls == [("exists_many", [str(facts_of(1).key)])] * 2
    assert (other.tier.stats().found_stored, other.tier.stats().stored) == (1, 0)
    other.tier.close()


def damaged(blob, what):
    return {
        "bit": blob[:200] + bytes([blob[200] ^ 1]) + blob[201:],
        "shorter": blob[:-1],
        "longer": blob + b"x",
        "zero": bytes(len(blob)),
        "empty": b"x",
        "lost": None,
    }[what]


@pytest.mark.parametrize(
    ("what", "chunk"),
    [
        *product(("bit", "shorter", "longer", "zero", "empty"), (None, 0, 4)),
        *product(("lost",), (0, 4)),
    ],
)
def test_damage_is_found_wherever_it_is(bench, what, chunk) -> None:
    """The entry is refused with a reason, removed, not looked up again, and can be rewritten."""
    bench.put(1)
    name = name_of(1, chunk)
    blob = damaged(bench.memory._blobs.pop(name), what)
    if blob is not None:
        bench.memory._blobs[name] = blob
    refusal = bench.load(1)
    bench.end()
    assert isinstance(refusal, Refusal)
    reasons = {
        "shorter": Refusal.SHORT, "empty": Refusal.SHORT, "longer": Refusal.PAYLOAD_BYTES,
        "lost": Refusal.MISSING,
    }  # fmt: skip
    if chunk is not None:
        assert refusal is reasons.get(what, Refusal.MAC)
    assert bench.names() == []
    assert bench.tier.stats().refused == {refusal.value: 1}
    assert bench.load(1) is Refusal.MISSING  # known to be bad: no lookup
    assert bench.ask(1) == [False]
    assert bench.put(1) is None
    assert bench.load(1) == bytes(payload_of(1))


def test_a_bad_entry_that_cannot_be_removed_is_neither_found_nor_rewritten(bench) -> None:
    """A store keeps the first bytes of a key, so putting it again would publish the bad ones."""
    bench.put(1)
    bench.faulty.inject("remove", Trouble.FAIL, fault=StoreFault.LEASED)
    name = name_of(1, 2)
    bench.memory._blobs[name] = damaged(bench.memory._blobs[name], "bit")
    assert bench.load(1) is Refusal.MAC
    bench.end()
    assert bench.ask(1) == [False]
    assert bench.put(1) is Refusal.IO_ERROR
    assert bench.tier.stats().dropped == {"not_removed": 1}
    bench.faulty.heal()
    assert bench.put(1) is None
    assert bench.load(1) == bytes(payload_of(1))


@pytest.mark.parametrize("chunk_bytes", [1800, 3000])  # equally many chunks, or fewer
def test_chunks_of_another_size_are_refused(bench, chunk_bytes) -> None:
    other = Bench(store=bench.memory, chunk_bytes=chunk_bytes)
    assert other.put(1) is None
    other.tier.close()
    assert bench.load(1) is (Refusal.SHORT if chunk_bytes < CHUNK_BYTES else Refusal.PAYLOAD_BYTES)


@pytest.mark.parametrize("lost", [None, 0])
@pytest.mark.parametrize("trouble", [Trouble.DROP, Trouble.LOSE])
def test_a_successful_put_is_verified(bench, lost, trouble) -> None:
    """A chunk or the header is missing though the put returned 0."""
    name = name_of(1, lost)
    bench.faulty.inject("put_many", trouble, matches=lambda key: key == name)
    assert bench.put(1) is Refusal.MISSING
    assert bench.tier.stats().dropped == {"unconfirmed": 1}
    assert name not in bench.names()
    assert str(facts_of(1).key) not in bench.names()
    assert bench.ask(1) == [False]
    bench.faulty.heal()
    assert bench.put(1) is None


@pytest.mark.parametrize(
    "fault", [each for each in StoreFault if each is not StoreFault.MISSING], ids=str
)
def test_every_fault_is_counted_by_its_name(bench, fault) -> None:
    bench.put(1)
    bench.faulty.inject("put_many", Trouble.FAIL, fault=fault, times=1)
    assert bench.put(2) is not None
    bench.faulty.heal()
    bench.faulty.inject("get_many_into", Trouble.FAIL, fault=fault, times=1)
    assert isinstance(bench.load(1), Refusal)
    bench.faulty.heal()
    stats = bench.tier.stats()
    assert stats.dropped == {fault.value: 1}
    assert stats.faults[fault.value] == 2
    assert sum(stats.refused.values()) == 1


def test_an_entry_is_not_put_if_its_lookup_got_no_answer(bench) -> None:
    bench.faulty.inject("exists_many", Trouble.FAIL, fault=StoreFault.REJECTED, times=1)
    assert bench.put(1) is Refusal.IO_ERROR
    assert bench.tier.stats().dropped == {"rejected": 1}
    assert bench.names() == []


def test_after_two_failures_the_store_is_left_alone_and_asked_again(bench) -> None:
    bench.put(1)
    bench.faulty.inject("get_many_into", Trouble.FAIL)
    bench.faulty.inject("health", Trouble.FAIL)
    assert bench.load(1) is Refusal.IO_ERROR
    assert bench.tier.is_healthy
    assert bench.load(1) is Refusal.IO_ERROR
    assert not bench.tier.is_healthy
    calls = calls_of(bench)
    assert (bench.load(1), bench.put(2), bench.ask(1)) == (False, False, None)
    assert bench.tier.has_many([facts_of(1).key]) == [False]
    bench.tier.remove(facts_of(2).key)
    assert calls == []
    bench.turn(4.75)
    assert bench.faulty.injected["health", Trouble.FAIL] == 0
    bench.turn(0.25)
    wait_until(lambda: bench.faulty.injected["health", Trouble.FAIL] == 1)
    wait_until(lambda: bench.tier._pause_left == 5)
    assert not bench.tier.is_healthy
    bench.faulty.heal()
    bench.turn(5)
    wait_until(lambda: bench.tier.is_healthy)
    assert bench.load(1) == bytes(payload_of(1))
    stats = bench.tier.stats()
    assert (stats.opened, stats.dropped) == (1, {"unhealthy": 1})


def test_a_first_look_that_ends_late_takes_back_no_failure(monkeypatch) -> None:
    clock, store = ManualClock(), FaultyStore(MemoryStore())
    monkeypatch.setattr(lower, "time", clock)
    store.inject("health", Trouble.HANG, times=1)
    store.inject("exists_many", Trouble.FAIL)
    tier = LowerTier(store, macs=EntryMacs(SECRET), write_on_use=1, chunk_bytes=CHUNK_BYTES)
    wait_until(lambda: store.injected["health", Trouble.HANG] == 1)
    clock.now += 1
    for _ in range(2):
        answer = Answer()
        assert tier.ask([facts_of(1).key], answer)
        assert answer.get() is None
        assert tier.has_many([facts_of(1).key]) == [False]
    assert not tier.is_healthy
    store.release()
    assert tier.flush(PATIENCE)
    assert not tier.is_healthy
    tier.close()


def test_jobs_queued_at_a_failing_store_end_at_once(bench) -> None:
    """No caller waits for the calls under way either."""
    bench.put(1)
    bench.faulty.inject("get_many_into", Trouble.HANG, times=2)
    answers = [Answer() for _ in range(5)]
    hanging = [(facts_of(1), buffer_for(facts_of(1))) for _ in range(2)]
    for (facts, into), answer in zip(hanging, answers, strict=False):
        assert bench.tier.load(facts, into, answer)
        count = answers.index(answer) + 1
        wait_until(lambda count=count: bench.faulty.injected[HANGS] == count)
    bench.faulty.inject("exists_many", Trouble.HANG)
    for answer in answers[2:]:
        assert bench.tier.ask([facts_of(1).key], answer)
    wait_until(lambda: bench.faulty.injected["exists_many", Trouble.HANG] == 2)
    bench.turn(2.1)
    assert [answer.get() for answer in answers] == [Refusal.TIMEOUT] * 4 + [Refusal.IO_ERROR]
    assert not bench.tier.is_healthy
    assert bench.tier.stats().given_up == 4


HANGS = ("get_many_into", Trouble.HANG)


def test_a_hanging_call_times_out_and_its_memory_is_never_used_before_it_returns(
    bench,
) -> None:
    bench.put(1)
    bench.put(2)
    bench.faulty.inject("get_many_into", Trouble.HANG, times=1)
    answer, into = Answer(), buffer_for(facts_of(1))
    assert bench.tier.load(facts_of(1), into, answer)
    wait_until(lambda: bench.faulty.injected[HANGS] == 1)
    [memory] = [each.memory for each in bench.tier._workers if each.calls]
    bench.turn(1.75)
    assert not answer.calls
    bench.turn(0.25)
    assert answer.get() is Refusal.TIMEOUT
    assert bench.tier.stats().hung == 1
    assert not bench.tier.is_healthy  # one overdue answer is enough
    bench.tier.check_invariants()
    bench.recover()
    for number in (1, 2, 1):  # other threads continue, with other memory
        assert bench.load(number) == bytes(payload_of(number))
    others = [worker.memory for worker in bench.tier._workers]
    assert all(memory is not other for other in others)
    memory[:] = 0xDD
    before = bytes(memory.data)
    into[:] = b"\xee" * len(into)  # the row is another entry's by now
    bench.faulty.release()
    wait_until(lambda: not bench.tier._num_hung)
    bench.check()
    assert bytes(memory.data) != before  # the call did write, long after
    assert bytes(into) == b"\xee" * len(into)
    assert answer.calls == [Refusal.TIMEOUT]
    stats = bench.tier.stats()
    assert (stats.given_up, stats.hung, dict(stats.refused)) == (1, 0, {"timeout": 1})


def test_a_hanging_put_times_out(bench) -> None:
    bench.faulty.inject("put_many", Trouble.HANG, times=1)
    answer, payload = Answer(), memoryview(bytearray(payload_of(1)))
    assert bench.tier.put(facts_of(1), payload, answer)
    wait_until(lambda: bench.faulty.injected["put_many", Trouble.HANG] == 1)
    assert bench.put(1) is False
    bench.turn(2.1)
    assert answer.get() is Refusal.TIMEOUT
    payload[:] = bytes(len(payload))  # the row is another entry's by now
    bench.recover()
    assert bench.put(1) is None
    bench.faulty.release()
    wait_until(lambda: not bench.tier._num_hung)
    assert bench.load(1) == bytes(payload_of(1))
    assert bench.tier.stats().dropped == {"in_flight": 1, "timed_out": 1}


def test_loads_leave_one_thread_for_all_else(bench) -> None:
    """A store whose reads hang still answers lookups and accepts puts."""
    assert bench.put(1) is None
    bench.faulty.inject("get_many_into", Trouble.HANG)
    answers = [bench.begin_load(1) for _ in range(5)]
    wait_until(lambda: bench.faulty.injected[HANGS] == 3)
    assert bench.ask(1) == [True]
    assert bench.put(2) is None
    assert bench.faulty.injected[HANGS] == 3
    bench.faulty.heal()
    assert [answer.get() for answer in answers] == [None] * 5
    bench.check()


def test_threads_that_hang_are_replaced_but_not_without_end(bench) -> None:
    """Hung threads keep their memory. When they return they are used again, or end."""
    bench.put(1)
    bench.faulty.inject("health", Trouble.HANG)
    bench.faulty.inject("get_many_into", Trouble.HANG)
    bench.faulty.inject("exists_many", Trouble.HANG)
    answers, asked = [Answer() for _ in range(3)], Answer()
    for answer in answers:
        assert bench.tier.load(facts_of(1), buffer_for(facts_of(1)), answer)
    assert bench.tier.ask([facts_of(1).key], asked)
    wait_until(lambda: bench.faulty.injected[HANGS] == 3)
    wait_until(lambda: bench.faulty.injected["exists_many", Trouble.HANG] == 1)
    bench.turn(2.1)
    assert [answer.get() for answer in answers] == [Refusal.TIMEOUT] * 3
    assert asked.get() is Refusal.TIMEOUT
    for count in range(1, 5):
        wait_until(lambda count=count: len(bench.tier._workers) == 5 - count)
        bench.turn(5.1)
        wait_until(lambda count=count: bench.faulty.injected["health", Trouble.HANG] == count)
        bench.turn(2.1)
        wait_until(lambda count=count: bench.tier.stats().hung == 4 + count)
    assert bench.tier._workers == []
    bench.turn(5.1)
    assert not bench.tier.is_healthy
    assert bench.tier.stats().given_up == 8
    bench.tier.check_invariants()
    bench.faulty.heal()
    wait_until(lambda: not bench.tier._num_hung)
    bench.turn(5.1)
    wait_until(lambda: bench.tier.is_healthy)
    wait_until(lambda: len(bench.tier._workers) == 4)
    assert bench.load(1) == bytes(payload_of(1))


def test_a_store_that_raises_ends_no_thread(bench, monkeypatch) -> None:
    """Two exceptions in a row count as two failures."""
    errors = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_value))
    bench.put(1)
    bench.faulty.inject("put_many", Trouble.RAISE, times=1)
    assert bench.put(2) is Refusal.IO_ERROR
    assert bench.load(1) == bytes(payload_of(1))
    bench.faulty.inject("get_many_into", Trouble.RAISE, times=2)
    assert [bench.load(1), bench.load(1), bench.load(1)] == [Refusal.IO_ERROR] * 2 + [False]
    assert bench.tier.stats().faults["error"] == len(errors) == 3
    assert bench.tier.stats().dropped == {"error": 1}


def test_a_store_that_raises_as_memory_is_taken_back_is_closed(monkeypatch) -> None:
    """Regression: closing waited for ever for the thread that the exception had ended."""
    errors = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_value))
    bench = Bench(monkeypatch)
    bench.put(1)

    def unregister(memory):
        raise OSError("no such memory")

    bench.faulty.unregister = unregister
    closing = threading.Thread(target=bench.tier.close, daemon=True)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert {type(error) for error in errors} == {OSError}


def test_an_interrupt_of_a_caller_leaves_nothing_queued(bench) -> None:
    """Regression: a registered job without a queued call was waited for without end.

    A signal may come wherever a function begins.
    """
    bench.put(1)
    facts = facts_of(2)
    for call in (
        lambda: bench.tier.load(facts_of(1), buffer_for(facts_of(1)), Answer()),
        lambda: bench.tier.ask([facts.key], Answer()),
        lambda: bench.tier.put(facts, payload_of(2), Answer()),
    ):
        number = 0
        while was_interrupted(call, number):
            bench.tier.check_invariants()
            bench.end()
            number += 1
        assert number > 5
        bench.end()
    assert bench.load(2) == bytes(payload_of(2))


def was_interrupted(call, number):
    """Call, and interrupt after ``number`` functions of the tier have begun."""
    num_entered = 0  # a count, as frames would form cycles

    def trace(frame, event, _):
        nonlocal num_entered
        if frame.f_code.co_filename == lower.__file__:
            num_entered += 1
            if num_entered == number + 1:
                raise KeyboardInterrupt

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False


def test_an_entry_that_is_asked_for_twice_is_read_twice(bench) -> None:
    """A store call names each key once; after a reset the first flight is forgotten."""
    bench.put(1)
    gate, exists = threading.Event(), bench.memory.exists_many
    bench.memory.exists_many = lambda keys: gate.wait(60) and exists(keys)
    for _ in range(4):  # all threads are busy
        assert bench.tier.ask([facts_of(1).key], lambda _: None)
    answers, buffers = [Answer() for _ in range(9)], [buffer_for(facts_of(1)) for _ in range(9)]
    for answer, into in zip(answers, buffers, strict=True):
        assert bench.tier.load(facts_of(1), into, answer)
    gate.set()
    assert [answer.get() for answer in answers] == [None] * 9
    assert {bytes(into) for into in buffers} == {bytes(payload_of(1))}


def test_loads_do_not_wait_for_puts(monkeypatch) -> None:
    """One thread never writes."""
    bench = Bench(monkeypatch, num_threads=2)
    bench.put(1)
    bench.faulty.inject("put_many", Trouble.HANG)
    for number in range(2, 40):
        assert bench.tier.put(facts_of(number), payload_of(number), lambda _: None)
    wait_until(lambda: bench.faulty.injected["put_many", Trouble.HANG] == 1)
    assert bench.load(1) == bytes(payload_of(1))
    bench.faulty.heal()
    bench.end()
    assert bench.tier.stats().stored == 39
    bench.tier.close()


def test_close_ends_queued_jobs_and_does_not_wait_for_ever(monkeypatch) -> None:
    bench = Bench(monkeypatch, num_threads=2, call_seconds=0.05, owns_store=True)
    bench.put(1)
    bench.faulty.inject("get_many_into", Trouble.HANG)
    bench.faulty.inject("put_many", Trouble.HANG)
    answers = [bench.begin_load(1) for _ in range(4)]
    put = Answer()
    assert bench.tier.put(facts_of(2), payload_of(2), put) or True
    wait_until(lambda: bench.faulty.injected[HANGS] == 1)
    wait_until(lambda: bench.faulty.injected["put_many", Trouble.HANG] == 1)
    bench.tier.close()
    bench.tier.close()
    assert {answer.get() for answer in answers} == {Refusal.ABORTED}
    assert put.get() is Refusal.ABORTED
    assert bench.memory._is_closed
    assert not bench.tier.is_healthy
    assert (bench.load(1), bench.put(1), bench.ask(1)) == (False, False, None)
    bench.faulty.heal()
    wait_until(lambda: not bench.tier._num_hung)


def test_a_store_is_not_called_any_more_when_its_tier_is_closed(monkeypatch) -> None:
    """A thread is between two calls when the tier closes."""
    bench = Bench(monkeypatch, call_seconds=0.05)
    copy, began = lower._copy, threading.Event()

    def late(into, source):
        began.set()
        wait_until(lambda: bench.tier._is_closed)
        copy(into, source)

    monkeypatch.setattr(lower, "_copy", late)
    put = Answer()
    assert bench.tier.put(facts_of(1), payload_of(1), put)
    assert began.wait(PATIENCE)
    bench.tier.close()
    assert put.get() is Refusal.ABORTED
    assert bench.names() == []
    assert bench.tier.stats().hung == 0


def test_a_store_that_was_given_is_not_closed(bench) -> None:
    other = Bench(store=bench.memory)
    other.tier.close()
    assert not bench.memory._is_closed


def test_of_many_puts_a_thread_takes_some(bench) -> None:
    """Other threads share the puts, so no caller waits for all of them."""
    bench.tier._max_jobs = 2
    bench.faulty.inject("exists_many", Trouble.HANG)
    bench.faulty.inject("put_many", Trouble.HANG)
    answers = [Answer() for _ in range(9)]
    with bench.tier._lock:
        for number, answer in enumerate(answers):
            bench.tier._add_put(Job(Verb.PUT, answer, facts_of(number)), payload_of(number))
    wait_until(lambda: sum(bool(each.calls) for each in bench.tier._workers) == 3)
    assert sorted(len(each.calls) for each in bench.tier._workers) == [0, 2, 2, 2]
    bench.faulty.heal()
    assert [answer.get() for answer in answers] == [None] * 9


def test_of_an_entry_that_failed_no_more_chunks_are_put(monkeypatch) -> None:
    """The entry has 18 chunks; a call moves eight, and one thread writes."""
    bench = Bench(monkeypatch, chunk_bytes=512, num_threads=2)
    first = f"{facts_of(1).key}/0"
    bench.faulty.inject("put_many", Trouble.FAIL, fault=StoreFault.FULL, matches=first.__eq__)
    calls = calls_of(bench)
    assert bench.put(1) is Refusal.IO_ERROR
    assert [name for name, _ in calls] == ["exists_many", "put_many"]
    bench.tier.close()


def test_the_oldest_remembered_keys_are_forgotten(bench, monkeypatch) -> None:
    monkeypatch.setattr(lower, "_MAX_REMEMBERED", 2)
    for number in range(3):
        assert bench.put(number) is None
    keys = [facts_of(number).key for number in range(3)]
    assert bench.tier.has_many(keys) == [False, True, True]


@pytest.mark.parametrize(
    ("num_bytes", "refusal"), [(HEADER_BYTES, Refusal.MAGIC), (CHUNK_BYTES, Refusal.MAC)]
)
def test_writes_of_a_store_after_its_answer_are_noticed(
    bench, monkeypatch, num_bytes, refusal
) -> None:
    """This holds also between comparison and copy."""
    bench.put(1)
    copy = lower._copy

    def late(into, source):
        source[0] ^= len(source) == num_bytes
        copy(into, source)

    monkeypatch.setattr(lower, "_copy", late)
    assert bench.load(1) is refusal


def test_its_own_store_is_closed_also_as_the_interpreter_ends(monkeypatch) -> None:
    """From Python 3.12 on, no thread can start at interpreter shutdown."""
    bench = Bench(monkeypatch, owns_store=True)

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    bench.tier.close()
    assert bench.memory._is_closed


class Registering(MemoryStore):
    """A store that records its registered memory."""

    def __init__(self):
        super().__init__()
        self.registered, self.num_taken_back = [], 0

    def register(self, memory):
        self.registered.append(memory)

    def unregister(self, memory):
        self.registered.remove(memory)
        self.num_taken_back += 1


def test_memory_is_registered_with_the_store_and_taken_back(monkeypatch) -> None:
    """RDMA requires that a call's buffers lie in registered memory."""
    bench = Bench(monkeypatch, store=Registering(), num_threads=2)
    bench.put(1, KV)
    bench.load(1, KV)
    bench.put(1)  # needs more memory
    bench.load(1)
    assert bench.memory.registered
    bench.tier.close()
    assert bench.memory.registered == []


def test_a_thread_keeps_its_memory_while_it_is_enough(monkeypatch) -> None:
    """A put of eight chunks uses all the memory; registering memory for RDMA is slow."""
    bench = Bench(monkeypatch, store=Registering(), num_threads=2, chunk_bytes=1024)
    for number in range(3):  # one of the two threads writes for the second time
        bench.put(number)
    assert {len(memory) for memory in bench.memory.registered} == {8 * 1024}
    assert bench.memory.num_taken_back == 0
    bench.tier.close()


def test_closing_leaves_memory_registered_that_a_call_still_uses(monkeypatch) -> None:
    """The store may write to it until the call returns."""
    bench = Bench(monkeypatch, store=Registering(), num_threads=2, call_seconds=0.05)
    bench.put(1)
    bench.faulty.inject("get_many_into", Trouble.HANG)
    assert bench.tier.load(facts_of(1), buffer_for(facts_of(1)), lambda _: None)
    wait_until(lambda: bench.faulty.injected[HANGS] == 1)
    [memory] = [each.memory for each in bench.tier._workers if each.calls]
    bench.tier.close()
    assert bench.memory.registered == [memory.data]
    bench.faulty.heal()
    wait_until(lambda: not bench.memory.registered)


def test_a_store_that_never_answered_is_reported_once(monkeypatch, caplog) -> None:
    faulty = FaultyStore(MemoryStore())
    faulty.inject("health", Trouble.FAIL)
    faulty.inject("exists_many", Trouble.FAIL)
    tier = LowerTier(faulty, macs=EntryMacs(SECRET))
    wait_until(lambda: caplog.messages)
    for _ in range(2):
        answer = Answer()
        tier.ask([facts_of(1).key], answer)
    wait_until(lambda: not tier.is_healthy)
    tier.close()
    [message] = caplog.messages
    assert re.match(r"store: \w+ does not answer \(.+\)\. Requests go on without it", message)
