"""The rows of a tier: bookkeeping without bytes, and their memory."""

import ctypes
import gc
import threading
import weakref
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tier_rig import KV, STATE

from mamba_cache._guard import CallGuard
from mamba_cache.cache import (
    AdaptiveSlotPolicy,
    PromptFacts,
    StateProposal,
    hash_id_of,
)
from mamba_cache.errors import ConcurrentUseError, DoubleFreeError, InvariantError
from mamba_cache.tiers import Refusal
from mamba_cache.tiers import memory as memory_module
from mamba_cache.tiers.entry import EntryFacts, EntryKey
from mamba_cache.tiers.host import HostTier
from mamba_cache.tiers.memory import Pinner, RowMemory, plain_slab
from mamba_cache.tiers.rows import HostRows
from mamba_cache.tiers.transfers import CopyJob, PlainTransfers, RowLayout


def digest(number):
    return bytes([number]) * 16


def facts(number, kind=KV, num_bytes=4096):
    key = EntryKey(bytes(32), bytes(16), kind, digest(number))
    return EntryFacts(key, 8, num_bytes)


SUMS = slice(4000, 4016)


def make_rows(num_rows, slab_bytes=2**28, **options):
    memory = RowMemory(4096, SUMS, num_rows, slab_bytes=slab_bytes)
    return HostRows(memory, Counter(), Counter(), **options)


def grow(rows, count):
    for _ in range(count):
        rows.add_slab(plain_slab(4096))


def ready(num_rows, **options):
    rows = make_rows(num_rows, **options)
    rows.add_slab(plain_slab(4096 * num_rows))
    return rows


def store(pool, *numbers):
    for number in numbers:
        assert pool.complete(pool.reserve(facts(number)))


class RowMachine(RuleBasedStateMachine):
    """Rows compared with a plain model of stored entries, readers and writers."""

    @initialize(
        num_rows=st.integers(0, 5),
        policy=st.sampled_from([None, AdaptiveSlotPolicy]),
    )
    def start(self, num_rows, policy):
        self.pool = make_rows(num_rows, 4096, policy=policy and policy())
        self.stored, self.readers, self.writers = {}, [], []

    @precondition(lambda self: self.pool.rows.num_rows < self.pool.memory.num_rows)
    @rule()
    def grow(self):
        grow(self.pool, 1)

    @rule(numbers=st.sampled_from([(0, 1, 2, 3)]))
    def store_some(self, numbers):
        for number in numbers:
            self.reserve(number)
            if self.writers and self.writers[-1][0] == number:
                _, lease, alive = self.writers.pop()
                assert self.pool.complete(lease) == alive
                if alive:
                    self.stored[number] = lease.row

    @rule(number=st.integers(0, 7))
    def reserve(self, number):
        before = set(self.stored)
        lease = self.pool.reserve(facts(number))
        known = number in before or any(n == number for n, _, alive in self.writers if alive)
        busy = {x.row for _, x in self.readers} | {x.row for _, x, _ in self.writers}
        if known or len(busy) == self.pool.rows.num_rows:
            assert lease is None
            return
        assert lease.row not in busy
        self.stored = {n: row for n, row in self.stored.items() if row != lease.row}
        assert len(before) - len(self.stored) <= 1
        self.writers.append((number, lease, True))

    @precondition(lambda self: self.pool.policy is not None)
    @rule(number=st.integers(0, 7), is_asked=st.booleans(), depth=st.integers(1, 3))
    def propose(self, number, is_asked, depth):
        """Reserve a row with a proposal, for a prompt of ``depth`` blocks."""
        path = [*range(100, 100 + depth - 1), hash_id_of(digest(number))]
        prompt = self.pool.policy.on_request(PromptFacts(path, 8, 0, len(path)))
        proposal = StateProposal(prompt, len(path), "end", is_asked)
        before, refused = dict(self.stored), self.pool._dropped["refused"]
        would = self.pool.would_admit([proposal])
        self.pool.check_invariants()
        lease = self.pool.reserve(facts(number), proposal=proposal)
        self.stored = {n: row for n, row in before.items() if digest(n) in self.pool}
        assert len(before) - len(self.stored) <= (lease is not None)
        if lease is None:
            busy = {x.row for _, x in self.readers} | {x.row for _, x, _ in self.writers}
            known = number in before or digest(number) in self.pool._awaited
            was_refused = self.pool._dropped["refused"] > refused
            assert was_refused or known or len(busy) == self.pool.rows.num_rows
            assert not (was_refused and is_asked)
        else:
            assert would == [True]
            self.writers.append((number, lease, True))

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), is_written=st.booleans())
    def end_writing(self, data, is_written):
        number, lease, alive = self.writers.pop(data.draw(st.integers(0, len(self.writers) - 1)))
        if is_written:
            assert self.pool.complete(lease) == alive
            if alive:
                self.stored[number] = lease.row
        else:
            self.pool.release(lease)
        for end in (self.pool.complete, self.pool.release):
            with pytest.raises(DoubleFreeError):
                end(lease)

    @rule(number=st.integers(0, 4), drops=st.booleans())
    def read(self, number, drops):
        lease = self.pool.read(facts(number))
        assert (lease is Refusal.MISSING) == (number not in self.stored)
        if isinstance(lease, Refusal):
            return
        assert lease.row == self.stored[number]
        if drops:
            for other in [self.pool.read(facts(number)) for _ in range(2)]:
                self.pool.refuse(other, Refusal.PAYLOAD_DIGEST)
            del self.stored[number]
        self.pool.use([lease])
        self.readers.append((number, lease))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def release(self, data):
        _, lease = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        assert self.pool.is_held(lease)
        self.pool.release(lease)
        assert not self.pool.is_held(lease)

    @rule(number=st.integers(0, 4))
    def remove(self, number):
        """Remove an entry; while it is read, its row is freed after the last reader."""
        assert self.pool.remove(digest(number)) == (number in self.stored)
        self.stored.pop(number, None)

    @rule(forgets=st.booleans())
    def reset(self, forgets):
        self.stored = {}
        if forgets:
            kept = [x for _, x in self.readers]
            self.writers = []
            self.pool.reset(kept)
        else:
            self.pool.reset()
            self.writers = [(number, lease, False) for number, lease, _ in self.writers]

    @invariant()
    def agrees(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        assert len(self.pool) == len(self.stored)
        assert sorted(self.pool._row_of) == sorted(map(digest, self.stored))
        assert all(digest(number) in self.pool for number in self.stored)
        assert len(self.pool._awaited) == sum(alive for *_, alive in self.writers)
        held = {x.row for _, x in self.readers} | {x.row for _, x, _ in self.writers}
        busy = held | set(self.stored.values())
        assert self.pool.rows.num_free + len(busy) == self.pool.rows.num_rows


TestRowMachine = RowMachine.TestCase
TestRowMachine.settings = examples(100)


def test_an_entry_that_is_removed_while_it_is_read_leaves_its_row_to_the_reader():
    pool = ready(2)
    store(pool, 0, 1)
    lease = pool.read(facts(0))
    assert pool.remove(digest(0))
    assert pool.remove(digest(1))
    assert pool.rows.num_free == 1
    pool.release(lease)
    assert pool.rows.num_free == 2
    pool.check_invariants()


def test_a_prefix_is_evicted_from_its_end():
    pool = ready(3)
    store(pool, 1, 2, 3)
    leases = [pool.read(facts(number)) for number in (1, 2, 3)]
    pool.use(leases)
    for lease in leases:
        pool.release(lease)
    for number, gone in ((4, 3), (5, 2), (6, 1)):
        store(pool, number)
        assert digest(gone) not in pool
    assert pool.evicted_total == 3


def test_an_entry_that_two_readers_find_wrong_is_dropped_once():
    pool = ready(1)
    store(pool, 1)
    readers = [pool.read(facts(1)), pool.read(facts(1))]
    for reader in readers:
        pool.refuse(reader, Refusal.PAYLOAD_DIGEST)
        assert digest(1) not in pool
    pool.check_invariants()
    assert pool.rows.num_free == 1


def test_a_policy_that_knows_prompts_gets_hash_and_length():
    told = []

    class Recorder(AdaptiveSlotPolicy):
        def on_published(self, slots, hash_ids, prefix_tokens):
            told.append((list(slots), list(hash_ids), list(prefix_tokens)))

    tier = make_tier(state_policy=Recorder())
    lease = tier[STATE].reserve(facts(7, STATE))
    assert lease.rows.complete(lease)
    assert told == [([lease.row], [hash_id_of(digest(7))], [8])]


def test_a_policy_that_knows_prompts_refuses_states_worth_less():
    """Two rows hold states of 50 blocks; a one-block state gets none unless requested."""
    pool = ready(2, policy=AdaptiveSlotPolicy())

    def propose(number, num_blocks, **options):
        path = [*range(1000 * number, 1000 * number + num_blocks - 1), hash_id_of(digest(number))]
        prompt = pool.policy.on_request(PromptFacts(path, 8, 0, num_blocks))
        return StateProposal(prompt, num_blocks, **options)

    for number in (1, 2):
        pool.complete(pool.reserve(facts(number), proposal=propose(number, 50)))
    small = propose(3, 1)
    assert pool.would_admit([small]) == [False]
    for times in (1, 2):
        assert pool.reserve(facts(3), proposal=small) is None
        assert (pool._dropped["refused"], pool.evicted_total, len(pool)) == (times, 0, 2)
    assert pool.reserve(facts(3), proposal=small._replace(is_asked=True)) is not None
    assert (pool._dropped["refused"], pool.evicted_total, len(pool)) == (2, 1, 1)
    pool.check_invariants()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pool: pool.rows.push([0]),
        lambda pool: pool._digests.__setitem__(0, b"x"),
        lambda pool: pool._awaited.update({digest(1): pool._awaited[digest(3)]}),
        lambda pool: pool.rows.refs.__setitem__(1, 1),
        lambda pool: pool._leases.clear(),
        lambda pool: pool._queue.clear(),
        lambda pool: pool._row_of.clear(),
        lambda pool: pool._names.fill(0),
    ],
)
def test_contradictions_are_found(spoil):
    pool = ready(4)
    store(pool, 1, 2)
    pool.reserve(facts(3))
    pool.check_invariants()
    spoil(pool)
    with pytest.raises(InvariantError, match="does not hold"):
        pool.check_invariants()


def test_rows_lie_in_slabs():
    memory = RowMemory(4096, SUMS, 5, slab_bytes=8192)
    assert memory.num_slabs == 3
    assert [memory.slab_bytes(i) for i in range(3)] == [8192, 8192, 4096]
    for index in range(3):
        memory.add_slab(plain_slab(memory.slab_bytes(index)))
    assert memory.num_ready == 5
    for row in range(5):
        memory.row(row).fill_(row + 1)
    assert [memory.array(row)[4095] for row in range(5)] == [1, 2, 3, 4, 5]
    memory.array(3)[0] = 9
    assert memory.row(3)[0] == 9
    assert RowMemory(4096, SUMS, 0).num_slabs == 0


def make_tier(num_rows=3, **options):
    memory = [RowMemory(4096, SUMS, num_rows) for _ in range(2)]
    return HostTier(*memory, **options)


class Gate:
    """Pins memory once the test opens the gate."""

    def __init__(self, fails=False):
        self.opened = threading.Event()
        self.pinned, self.unpinned, self.fails = [], [], fails

    def pin(self, address, num_bytes):
        self.opened.wait(30)
        if self.fails:
            raise MemoryError
        self.pinned.append((address, num_bytes))

    def unpin(self, address):
        self.unpinned.append(address)


@pytest.mark.parametrize("is_closed", [True, False])
def test_pinned_memory_comes_in_the_background_and_goes_with_the_tier(is_closed):
    """No caller waits for pinned memory: until then entries get no row, and are counted."""
    gate = Gate()
    tier = make_tier(pinner=Pinner(gate.pin, gate.unpin))
    assert tier[KV].reserve(facts(1)) is None
    assert tier.dropped == {"no_row": 1}
    tier.poll()
    assert tier.stats().ready_rows == {"kv": 0, "state": 0}
    gate.opened.set()
    tier.wait_for_memory()
    assert tier.stats().ready_rows == {"kv": 3, "state": 3}
    lease = tier[KV].reserve(facts(1))
    lease.rows.buffer(lease)[:] = b"\1" * 4096
    assert lease.rows.complete(lease)
    tier.check_invariants()
    assert all(address % 2**21 == 0 and size == 3 * 4096 for address, size in gate.pinned)
    if is_closed:
        tier.close()
    gone = weakref.ref(tier)
    del tier
    gc.collect()
    assert gone() is None
    assert sorted(gate.unpinned) == sorted(address for address, _ in gate.pinned)
    make_tier().close()


@pytest.mark.parametrize(
    ("num_cpus", "num_threads"), [(None, 1), (1, 1), (2, 1), (3, 1), (4, 2), (14, 12), (64, 12)]
)
def test_pages_are_touched_by_as_many_threads_as_there_are_cpus_to_spare(
    monkeypatch, num_cpus, num_threads
):
    monkeypatch.setattr(memory_module.os, "cpu_count", lambda: num_cpus)
    pinner = Pinner(lambda *_: None, lambda _: None)
    assert pinner._touching._max_workers == num_threads
    pinner.close()


def test_memory_that_cannot_be_pinned_is_done_without():
    gate = Gate(fails=True)
    gate.opened.set()
    tier = make_tier(pinner=Pinner(gate.pin, gate.unpin))
    tier.wait_for_memory()
    assert not any(tier._slabs_to_come.values())
    assert tier.stats().ready_rows == {"kv": 0, "state": 0}
    tier.check_invariants()


def test_lower_tiers_end_their_copies_later():
    """Lower tiers report from their threads; the next poll ends the copies."""
    tier = make_tier()
    for refusal, is_kept in ((None, True), (Refusal.SHORT, False)):
        lease = tier[STATE].reserve(facts(1, STATE), for_lower=True)
        assert tier[STATE].reserve(facts(1, STATE)) is None
        assert tier.dropped == {}, "the entry is being loaded"
        assert not any(tier.leases.values())
        lease.rows.buffer(lease)[:] = b"\1" * 4096
        thread = threading.Thread(target=tier.end_later, args=(lease, refusal))
        thread.start()
        thread.join()
        assert digest(1) not in tier[STATE]
        tier.poll()
        assert (digest(1) in tier[STATE]) == is_kept
        if is_kept:
            assert tier[STATE].reserve(facts(1, STATE)) is None
            assert tier.dropped == {}, "the entry is stored"
        tier.check_invariants()
        tier.clear()
    own = tier[KV].reserve(facts(2))
    own.rows.complete(own)
    read = tier[KV].read(facts(2), for_lower=True)
    tier.end_later(read, None)
    tier.poll()
    tier.check_invariants()
    assert tier.lower_leases == []


def test_a_reset_leaves_lower_tiers_their_rows():
    tier = make_tier(num_rows=1)
    late = tier[KV].reserve(facts(1), for_lower=True)
    tier.reset()
    assert tier[KV].reserve(facts(2)) is None
    tier.end_later(late, None)
    tier.end_later(late, None)  # a second call does nothing
    tier.poll()
    assert digest(1) not in tier[KV]
    assert tier[KV].reserve(facts(2)) is not None
    tier.check_invariants()


def test_rows_that_are_lost_are_noticed():
    other = make_tier()
    other[KV].memory.num_ready -= 1
    with pytest.raises(InvariantError, match="each row that can be used has memory"):
        other.check_invariants()


def test_a_tier_belongs_to_a_guard():
    tier = make_tier()
    guard = CallGuard(tier.check_invariants)
    tier.join(guard)
    assert tier._guard is guard
    assert tier[KV].read(facts(1)) is Refusal.MISSING
    assert tier.refused == {"missing": 1}


def test_a_tier_without_a_context_is_used_by_one_thread_at_a_time():
    refused = []

    class Meeting(AdaptiveSlotPolicy):
        def on_published(self, *given):
            """Let another thread call in the middle of a call."""
            with ThreadPoolExecutor(1) as other:
                refused.append(other.submit(tier.poll).exception())

    tier = make_tier(state_policy=Meeting())
    assert tier[STATE].complete(tier[STATE].reserve(facts(1, STATE)))
    assert [type(each) for each in refused] == [ConcurrentUseError]


def test_entries_lie_in_rows_to_the_bit():
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(2, 4, 3, generator=generator),
        torch.randint(-9, 9, (1, 4, 5), generator=generator, dtype=torch.int8),
        torch.randn(3, 4, 2, 2, generator=generator, dtype=torch.float64),
    ]
    layout = RowLayout(tensors)
    assert layout.row_bytes % 4096 == 0
    assert RowLayout([]).payload_bytes == 0
    assert RowLayout([torch.zeros(1, 2, 70_000)], sums_chunks=True).checksums == slice(
        280064, 280064 + 40
    )
    memory = RowMemory(layout.row_bytes, layout.checksums, 2)
    memory.add_slab(plain_slab(memory.slab_bytes(0)))
    transfers = PlainTransfers({KV: layout}, {KV: memory})
    before = [tensor.clone() for tensor in tensors]
    ticket = transfers.spill([CopyJob(KV, 1, 0), CopyJob(KV, 3, 1)])
    assert ticket.is_done()
    ticket.wait()
    assert ticket.num_bytes == 2 * layout.row_bytes
    assert isinstance(ticket.seconds(), float)
    loaded = transfers.load([CopyJob(KV, 0, 1), CopyJob(KV, 2, 0)])
    assert loaded.damaged() == []
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old[:, [3, 1, 1, 3]])
    memory.row(1)[layout.payload_bytes - 1] ^= 1
    assert transfers.load([CopyJob(KV, 0, 0), CopyJob(KV, 1, 1)]).damaged() == [1]
    transfers.wait()
    mark = transfers.mark()
    assert transfers.seconds_between(mark, mark + 1) == 1


def test_pages_are_touched_before_they_are_pinned(monkeypatch):
    """Several threads touch all pages; the last part is shorter than the others."""
    monkeypatch.setattr(memory_module, "_TOUCHED_BYTES", 2 * 4096)
    resident = []

    def pin(address, num_bytes):
        pages = (ctypes.c_ubyte * (num_bytes // 4096))()
        libc = ctypes.CDLL(None, use_errno=True)
        assert not libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages)
        resident.extend(pages)

    pinner = Pinner(pin, lambda address: None)
    slab = pinner.make(5 * 4096).result()
    assert slab.dtype == torch.uint8
    assert len(slab) == 5 * 4096
    assert not np.any(slab.numpy())
    assert resident == [1] * 5
    pinner.close()


def test_closing_waits_for_memory_that_is_being_pinned():
    """Otherwise the memory would stay pinned for ever, without an owner."""
    gate = Gate()
    pinner = Pinner(gate.pin, gate.unpin)
    slab = pinner.make(4096)
    while not slab.running():
        pass
    opens = threading.Timer(0.05, gate.opened.set)
    opens.start()
    pinner.close()
    assert len(gate.pinned) == len(gate.unpinned) == 1
    opens.join()


def test_closing_cancels_memory_that_is_not_being_pinned_yet(monkeypatch):
    """Otherwise a tier closed at its start would wait until all its memory is pinned."""
    monkeypatch.setattr(memory_module, "_PINNING_THREADS", 1)
    gate = Gate()
    pinner = Pinner(gate.pin, gate.unpin)
    slabs = [pinner.make(4096)]
    while not slabs[0].running():
        pass
    closing = threading.Thread(target=pinner.close)
    closing.start()
    with suppress(RuntimeError):  # until the pinner refuses
        while True:
            slabs.append(pinner.make(4096))
    gate.opened.set()
    closing.join()
    assert [slab.cancelled() for slab in slabs] == [False, *[True] * (len(slabs) - 1)]
    assert len(gate.pinned) == len(gate.unpinned) == 1


def test_slabs_are_touched_while_others_are_pinned(monkeypatch):
    """A pin that never ends blocks no other slab."""
    monkeypatch.setattr(memory_module, "_PINNING_THREADS", 2)
    gate, first = Gate(), threading.Event()

    def pin(address, num_bytes):
        if not first.is_set():
            first.set()
            gate.pin(address, num_bytes)

    pinner = Pinner(pin, gate.unpin)
    slabs = [pinner.make(4096) for _ in range(3)]
    done, held = wait(slabs, 30, FIRST_COMPLETED)
    assert done
    assert held
    gate.opened.set()
    assert len({slab.result().data_ptr() for slab in slabs}) == 3
    pinner.close()
    assert len(gate.unpinned) == 3
