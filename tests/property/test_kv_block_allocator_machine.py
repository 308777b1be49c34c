"""KVBlockAllocator against a plain-Python model, over random forests of prefixes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mamba_cache.blocks import (
    BlockHasher,
    BlockHashes,
    KVBlockAllocator,
    compute_block_hashes,
    prefix_tree,
)
from mamba_cache.blocks.leaves import NOBODY
from mamba_cache.config import EvictionPolicy
from mamba_cache.errors import (
    BlockCapacityError,
    DoubleFreeError,
    InvalidArgumentError,
    UnknownBlockError,
)
from mamba_cache.events import Removed, Stored

POOL_SIZE = 9
HASHER = BlockHasher(secret=b"fixed")
# Few tokens and one of them a block, so that prefixes meet, branch and collide all the time.
SEQUENCES = st.lists(st.integers(0, 1), max_size=5).map(tuple)
BLOCKS = st.integers(0, POOL_SIZE - 2)


def owner_of(prefix):
    """All blocks of a prefix belong to one, as to a salt."""
    return f"salt {prefix[0]}" if prefix else NOBODY


class Model:
    """What the allocator should do, by scanning everything. A prefix stands for its hash."""

    def __init__(self, max_owned=None):
        self.max_owned = max_owned
        self.over = []  # owners that have more than the share, in the order in which they came to
        self.refs = [0] * (POOL_SIZE - 1)
        self.used_at = [0] * (POOL_SIZE - 1)
        self.block_of = {}  # prefix -> block
        self.in_flight = set()
        self.clock = 0

    @property
    def prefix_of(self):
        return {block: prefix for prefix, block in self.block_of.items()}

    def free(self):
        held = {*self.prefix_of, *self.in_flight}
        return [b for b, refs in enumerate(self.refs) if not refs and b not in held]

    def leaves(self):
        """Cached blocks without cached children, the first to evict in front.

        Those with used children, of requests with a copy of their own, go last.
        """
        cached = {prefix: b for prefix, b in self.block_of.items() if not self.refs[b]}
        parents = {prefix[:-1] for prefix in self.block_of}
        parents_of_cached = {prefix[:-1] for prefix in cached}
        leaves = [
            (prefix in parents, self.used_at[block], block)
            for prefix, block in cached.items()
            if prefix not in parents_of_cached
        ]
        return [block for _, _, block in sorted(leaves)]

    def victims(self, owner=NOBODY, num_new=0):
        """All that could be evicted, in order, if an owner wants blocks."""
        trial = Model()
        trial.refs, trial.used_at = self.refs, self.used_at
        trial.block_of, trial.in_flight = dict(self.block_of), self.in_flight
        excess = self.excess(owner, num_new)
        order = []
        while leaves := trial.leaves():
            chosen = leaves[0]
            while excess:
                name = next(iter(excess))
                own = [b for b in leaves if owner_of(trial.prefix_of[b]) == name]
                if own and excess[name]:
                    excess[name] -= 1
                    chosen = own[0]
                    break
                del excess[name]
            order.append(chosen)
            del trial.block_of[trial.prefix_of[chosen]]
        return order

    def excess(self, owner, num_new):
        """How many blocks go first of each who has more than the share."""
        if self.max_owned is None:
            return {}
        counts = Counter(map(owner_of, self.block_of))
        own = counts[owner] + num_new - self.max_owned
        excess = {owner: own} if owner is not NOBODY and own > 0 else {}
        return excess | {o: counts[o] - self.max_owned for o in self.over if o not in excess}

    def count_owner(self, prefix):
        """Say that blocks of a prefix were registered; of none, that some were forgotten."""
        if self.max_owned is None:
            return
        counts = Counter(map(owner_of, self.block_of))
        self.over = [name for name in self.over if counts[name] > self.max_owned]
        name = owner_of(prefix)
        if counts[name] > self.max_owned and name not in self.over:
            self.over.append(name)

    def touch(self, blocks):
        self.clock += 1
        for block in blocks:
            self.used_at[block] = self.clock


class AllocatorMachine(RuleBasedStateMachine):
    policy = EvictionPolicy.LRU
    few = prefix_tree.FEW
    max_owned = None

    @initialize()
    def start(self):
        prefix_tree.FEW = self.few
        self.pool = KVBlockAllocator(
            POOL_SIZE, eviction_policy=self.policy, max_owned=self.max_owned
        )
        self.model = Model(self.max_owned)
        self.requests = []
        self.told = []
        self.evicted = 0
        self.leaving, self.arriving, self.ended, self.before_reset = [], [], [], []
        self.known = {}  # digest -> prefix
        self.index = {}  # digest -> block, as somebody knows it who only hears of events
        self.pool.listeners.add(self.hear, Stored, Removed)

    def hashes(self, prefix):
        hashes = compute_block_hashes(prefix, 1, hasher=HASHER)
        self.known.update((d, tuple(prefix[: i + 1])) for i, d in enumerate(hashes.digests))
        return hashes

    def hear(self, event):
        assert [*event.hash_ids] == [*BlockHashes(event.digests)]
        if isinstance(event, Removed):
            if event.block_ids:
                self.told.append(dict(zip(event.block_ids, event.hash_ids, strict=True)))
            for block, digest in zip(event.block_ids, event.digests, strict=True):
                assert self.index.pop(digest) == block
            assert not (event.is_reset and self.index)
            return
        prefixes = [self.known[digest] for digest in event.digests]
        assert event.tokens.tolist() == [prefix[-1] for prefix in prefixes]
        assert (event.tokens.dtype, event.block_size_tokens) == (np.int32, 1)
        parent = prefixes[0][:-1]
        assert self.known.get(event.parent_digest, ()) == (parent if self.has(parent) else ())
        assert event.parent_hash == (self.hashes(parent)[-1] if parent else None)
        for prefix, before in zip(prefixes[1:], prefixes, strict=False):
            assert prefix[:-1] == before
        assert self.index.keys().isdisjoint(event.digests)
        self.index.update(zip(event.digests, event.block_ids, strict=True))

    def has(self, prefix):
        return bool(prefix) and self.hashes(prefix).digests[-1] in self.index

    def forget(self, blocks):
        """Take the blocks' hashes from the model, and expect that observers are told."""
        gone = {b: self.hashes(p)[-1] for b, p in self.model.prefix_of.items() if b in set(blocks)}
        self.model.block_of = {p: b for p, b in self.model.block_of.items() if b not in gone}
        self.model.count_owner(())
        assert self.told == ([gone] if gone else [])
        self.told.clear()

    @rule(
        num_blocks=st.integers(0, POOL_SIZE),
        owner=st.sampled_from([NOBODY, "salt 0", "salt 1", "salt of nothing"]),
    )
    def allocate(self, num_blocks, owner):
        self.take(num_blocks, owner)

    def take(self, num_blocks, owner):
        """Allocate, and return the blocks or None."""
        free, victims = self.model.free(), self.model.victims(owner, num_blocks)
        if num_blocks > len(free) + len(victims):
            with pytest.raises(BlockCapacityError) as caught:
                self.pool.allocate_memory_blocks(num_blocks, owner=owner)
            assert caught.value.available == len(free) + len(victims)
            return None
        taken = self.pool.allocate_memory_blocks(num_blocks, owner=owner)
        evicted = victims[: max(num_blocks - len(free), 0)]
        assert set(taken) <= set(free) | set(evicted)
        assert taken[len(taken) - len(evicted) :] == evicted
        assert len(set(taken)) == len(taken) == num_blocks
        self.forget(evicted)
        self.evicted += len(evicted)
        self.model.touch(taken)
        for block in taken:
            self.model.refs[block] = 1
        return taken

    @rule(blocks=st.lists(BLOCKS, max_size=3), times=st.sampled_from([1, 1, 2, 5]))
    def retain(self, blocks, times=1):
        if set(blocks) & {*self.model.free(), *self.model.in_flight}:
            with pytest.raises(UnknownBlockError):
                self.pool.retain_memory_blocks(blocks, times)
            return
        self.pool.retain_memory_blocks(blocks, times)
        self.model.touch(blocks)
        for block in blocks:
            self.model.refs[block] += times

    @rule(prefix=SEQUENCES, looks_first=st.booleans())
    def start_request(self, prefix, looks_first):
        """Without a look, as when another request of the same step computes the prefix too."""
        matched = self.pool.match_prefix(self.hashes(prefix))
        assert matched == self.expected_match(prefix)
        matched = matched if looks_first else []
        self.retain(matched)
        taken = self.take(len(prefix) - len(matched), owner_of(prefix))
        if taken is None:
            self.release(matched)
            return
        self.register(taken, prefix, len(matched))
        self.requests.append(matched + taken)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish_request(self, data):
        self.release(self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1))))

    @rule(blocks=st.lists(BLOCKS, max_size=3))
    def release(self, blocks):
        counts = Counter(blocks)
        if any(self.model.refs[block] < count for block, count in counts.items()):
            with pytest.raises(DoubleFreeError):
                self.pool.release_memory_blocks(blocks)
            return
        self.pool.release_memory_blocks(blocks)
        self.model.touch(counts)
        for block, count in counts.items():
            self.model.refs[block] -= count
        if self.policy is EvictionPolicy.REF_ZERO:
            self.forget([block for block in counts if not self.model.refs[block]])

    def register(self, blocks, prefix, start):
        """Register what follows the first ``start`` blocks of ``prefix``; twice changes nothing."""
        hashes = self.hashes(prefix)
        ends = range(start + 1, len(prefix) + 1)
        expected = [
            self.model.block_of.setdefault(prefix[:end], block)
            for block, end in zip(blocks, ends, strict=True)
        ]
        for _ in range(2):
            canonical = self.pool.register_kv_block_hashes(
                blocks,
                hashes[start:],
                parent_hash=hashes[start - 1] if start else None,
                tokens=prefix[start:],
                owner=owner_of(prefix),
            )
            assert canonical == expected
        self.model.count_owner(prefix)

    @rule(blocks=st.lists(BLOCKS, max_size=3))
    def deregister(self, blocks):
        self.pool.deregister_blocks(blocks)
        self.forget(blocks)

    # Copies in flight.

    @rule(blocks=st.lists(BLOCKS, max_size=3))
    def begin_leaving(self, blocks):
        model = self.model
        cached = [b for b in model.prefix_of if not model.refs[b]]
        may_go = all(model.refs[b] == 1 or b in cached for b in blocks)
        if not may_go or len(set(blocks)) < len(blocks):
            with pytest.raises(InvalidArgumentError, match="blocks that leave must be"):
                self.pool.begin_leaving(blocks)
            return
        copy = self.pool.begin_leaving(blocks)
        assert copy.ids == tuple(blocks)
        self.forget(blocks)
        for block in blocks:
            model.refs[block] = 0
        model.in_flight.update(blocks)
        self.requests = [r for r in self.requests if not set(r) & set(blocks)]
        self.leaving.append(copy)

    @rule(num_blocks=st.integers(0, 4))
    def begin_arriving(self, num_blocks):
        free, victims = self.model.free(), self.model.victims()
        if num_blocks > len(free) + len(victims):
            with pytest.raises(BlockCapacityError):
                self.pool.begin_arriving(num_blocks)
            return
        copy = self.pool.begin_arriving(num_blocks)
        evicted = victims[: max(num_blocks - len(free), 0)]
        assert set(copy.ids) <= set(free) | set(evicted)
        assert len(set(copy.ids)) == num_blocks
        self.forget(evicted)
        self.evicted += len(evicted)
        self.model.in_flight.update(copy.ids)
        self.arriving.append(copy)

    def draw_copy(self, data, copies):
        copy = copies.pop(data.draw(st.integers(0, len(copies) - 1)))
        self.model.in_flight -= set(copy.ids)
        self.ended.append(copy)
        return copy

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def end_leaving(self, data):
        self.pool.end_leaving(self.draw_copy(data, self.leaving))

    @precondition(lambda self: self.arriving)
    @rule(data=st.data())
    def cancel_arriving(self, data):
        self.pool.cancel_arriving(self.draw_copy(data, self.arriving))

    @precondition(lambda self: self.arriving)
    @rule(data=st.data(), start=SEQUENCES)
    def complete_arriving(self, data, start):
        copy = self.draw_copy(data, self.arriving)
        num_blocks = len(copy.ids)
        rest = data.draw(st.lists(st.integers(0, 1), min_size=num_blocks, max_size=num_blocks))
        prefix, hashes = (*start, *rest), self.hashes((*start, *rest))
        expected, model = [], self.model
        for index, block in enumerate(copy.ids):
            holder = model.block_of.setdefault(prefix[: len(start) + index + 1], block)
            expected.append(holder)
        stored = [block for block in copy.ids if block in expected]
        parent = hashes[len(start) - 1] if start else None
        options = {"parent_hash": parent, "tokens": rest, "owner": owner_of(prefix)}
        if num_blocks:
            with pytest.raises(InvalidArgumentError, match="of one length"):
                self.pool.complete_arriving(copy, hashes[len(start) + 1 :], **options)
        got = self.pool.complete_arriving(copy, hashes[len(start) :], **options)
        assert got == expected
        model.touch(stored)
        model.count_owner(prefix)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def end_a_copy_again(self, data):
        copy = data.draw(st.sampled_from(self.ended))
        ends = [self.pool.end_leaving]
        if copy.way == "arriving":
            with pytest.raises(InvalidArgumentError, match="what begin_leaving returned"):
                self.pool.end_leaving(copy)
            ends = [
                self.pool.cancel_arriving,
                lambda ended: self.pool.complete_arriving(ended, [1] * len(ended.ids)),
            ]
        for end in ends:
            if copy in self.before_reset:
                assert end(copy) in (None, [None] * len(copy.ids))
            else:
                with pytest.raises(DoubleFreeError, match="was ended already"):
                    end(copy)

    @rule()
    def reset(self):
        gone = {b: self.hashes(p)[-1] for b, p in self.model.prefix_of.items()}
        self.pool.reset()
        assert self.told == ([gone] if gone else [])
        self.told.clear()
        self.ended += self.leaving + self.arriving
        self.before_reset = list(self.ended)
        self.model, self.requests, self.evicted = Model(self.max_owned), [], 0
        self.leaving, self.arriving = [], []

    def expected_match(self, prefix):
        matched = []
        for end in range(1, len(prefix) + 1):
            if prefix[:end] not in self.model.block_of:
                break
            matched.append(self.model.block_of[prefix[:end]])
        return matched

    @invariant()
    def everything_agrees(self):
        self.pool.check_invariants()
        model, pool = self.model, self.pool
        assert pool.block_ref_counts.tolist() == [*model.refs, 0]
        assert pool.block_timestamps.tolist() == [*model.used_at, 0]
        hashes = np.full(POOL_SIZE, -1)
        for prefix, block in model.block_of.items():
            hashes[block] = self.hashes(prefix)[-1]
            digest = self.hashes(prefix).digests[-1]
            assert pool.find_block(int(hashes[block]), digest) == block
        assert pool.block_hashes.tolist() == hashes.tolist()
        used = sum(refs > 0 for refs in model.refs)
        cached = POOL_SIZE - 1 - used - len(model.free()) - len(model.in_flight)
        assert pool.num_free_blocks == len(model.free())
        assert sorted(pool.free_block_ids) == model.free()
        leaving = sorted(block for copy in self.leaving for block in copy.ids)
        arriving = sorted(block for copy in self.arriving for block in copy.ids)
        assert (pool.num_leaving_blocks, pool.num_arriving_blocks) == (len(leaving), len(arriving))
        assert sorted([*leaving, *arriving]) == sorted(model.in_flight)
        assert self.index == {
            self.hashes(prefix).digests[-1]: block for prefix, block in model.block_of.items()
        }
        assert (pool.num_used_blocks, pool.num_cached_blocks) == (used, cached)
        assert (pool.evicted_blocks_total, pool.hash_collisions_total) == (self.evicted, 0)

    def teardown(self):
        prefix_tree.FEW = AllocatorMachine.few


class RefZeroMachine(AllocatorMachine):
    policy = EvictionPolicy.REF_ZERO


class WholeArraysMachine(AllocatorMachine):
    """Blocks are counted by whole arrays, as otherwise only many of them are."""

    few = 0


class SharesMachine(AllocatorMachine):
    """Who has more than the share gives up their own blocks first."""

    max_owned = 2


class NoShareMachine(WholeArraysMachine):
    max_owned = 0


TestLru = AllocatorMachine.TestCase
TestRefZero = RefZeroMachine.TestCase
TestWholeArrays = WholeArraysMachine.TestCase
TestShares = SharesMachine.TestCase
TestNoShare = NoShareMachine.TestCase
