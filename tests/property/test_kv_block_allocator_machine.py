"""KVBlockAllocator compared with a plain-Python model, over random forests of prefixes."""

from collections import Counter

import numpy as np
import pytest
from example_counts import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mamba_cache.cache import (
    AdaptiveSlotPolicy,
    BlockHasher,
    KVBlockAllocator,
    SlotPool,
    compute_block_hashes,
    kv_block_allocator,
)
from mamba_cache.config import EvictionPolicy
from mamba_cache.errors import (
    BlockCapacityError,
    DoubleFreeError,
    UnknownBlockError,
)
from mamba_cache.events import Removed, Stored

POOL_SIZE = 9
HASHER = BlockHasher(secret=b"fixed")
# Few different tokens, one a block, so that prefixes often meet, branch and collide.
SEQUENCES = st.lists(st.integers(0, 1), max_size=5).map(tuple)
BLOCKS = st.integers(0, POOL_SIZE - 2)


class Model:
    """The expected allocator, by full scans. A prefix stands for its hash."""

    def __init__(self):
        self.refs = [0] * (POOL_SIZE - 1)
        self.used_at = [0] * (POOL_SIZE - 1)
        self.block_of = {}  # prefix -> block
        self.clock = 0
        self.states = set()  # blocks with a state, if the policy considers states

    @property
    def prefix_of(self):
        return {block: prefix for prefix, block in self.block_of.items()}

    def free(self):
        return [b for b, refs in enumerate(self.refs) if not refs and b not in self.prefix_of]

    def leaves(self):
        """Return cached blocks without cached children, in order of eviction.

        Blocks whose children are in use by requests with their own copy go last. Blocks with a
        state go just before, the lowest first.
        """
        cached = {prefix: b for prefix, b in self.block_of.items() if not self.refs[b]}
        parents = {prefix[:-1] for prefix in self.block_of}
        parents_of_cached = {prefix[:-1] for prefix in cached}
        leaves = [
            (1, 0, block)
            if block in self.states
            else (2 * (prefix in parents), self.used_at[block], block)
            for prefix, block in cached.items()
            if prefix not in parents_of_cached
        ]
        return [block for _, _, block in sorted(leaves)]

    def victims(self):
        """Return all evictable blocks, in order of eviction."""
        trial = Model()
        trial.refs, trial.used_at = self.refs, self.used_at
        trial.block_of, trial.states = dict(self.block_of), self.states
        order = []
        while leaves := trial.leaves():
            order.append(leaves[0])
            del trial.block_of[trial.prefix_of[leaves[0]]]
        return order

    def below(self, blocks):
        """Return the prefixes removed with blocks: all that begin with a prefix of the blocks."""
        gone = [p for p, b in self.block_of.items() if b in set(blocks)]
        return {
            prefix: block
            for prefix, block in self.block_of.items()
            if any(prefix[: len(above)] == above for above in gone)
        }

    def touch(self, blocks):
        self.clock += 1
        for block in blocks:
            self.used_at[block] = self.clock


class AllocatorMachine(RuleBasedStateMachine):
    policy = EvictionPolicy.LRU
    few = kv_block_allocator._FEW

    @initialize()
    def start(self):
        kv_block_allocator._FEW = self.few
        self.pool = KVBlockAllocator(POOL_SIZE, eviction_policy=self.policy)
        self.model = Model()
        self.requests = []
        self.removed = []
        self.evicted = 0
        self.known = {}  # digest -> prefix
        self.index = {}  # digest -> block, as derived from events only
        self.pool.listeners.add(self.on_event, Stored, Removed)

    def hashes(self, prefix):
        hashes = compute_block_hashes(prefix, 1, hasher=HASHER)
        self.known.update((d, tuple(prefix[: i + 1])) for i, d in enumerate(hashes.digests))
        return hashes

    def on_event(self, event):
        if isinstance(event, Removed):
            if event.block_ids:
                self.removed.append(dict(zip(event.block_ids, event.digests, strict=True)))
            for block, digest in zip(event.block_ids, event.digests, strict=True):
                assert self.index.pop(digest) == block
            assert not (event.is_reset and self.index)
            return
        prefixes = [self.known[digest] for digest in event.digests]
        assert event.tokens.tolist() == [prefix[-1] for prefix in prefixes]
        assert (event.tokens.dtype, event.block_size_tokens) == (np.int32, 1)
        parent = prefixes[0][:-1]
        assert self.known.get(event.parent_digest, ()) == (parent if self.has(parent) else ())
        for prefix, before in zip(prefixes[1:], prefixes, strict=False):
            assert prefix[:-1] == before
        assert self.index.keys().isdisjoint(event.digests)
        self.index.update(zip(event.digests, event.block_ids, strict=True))

    def has(self, prefix):
        return bool(prefix) and self.hashes(prefix).digests[-1] in self.index

    def forget(self, blocks):
        """Remove the blocks' hashes from the model, and expect an event."""
        gone = {b: self.hashes(p).digests[-1] for p, b in self.model.below(blocks).items()}
        self.model.block_of = {p: b for p, b in self.model.block_of.items() if b not in gone}
        self.model.states -= gone.keys()
        assert self.removed == ([gone] if gone else [])
        self.removed.clear()

    @rule(num_blocks=st.integers(0, POOL_SIZE))
    def allocate(self, num_blocks):
        self.take(num_blocks)

    def take(self, num_blocks):
        """Allocate, and return the blocks or None."""
        free, victims = self.model.free(), self.model.victims()
        if num_blocks > len(free) + len(victims):
            with pytest.raises(BlockCapacityError) as caught:
                self.pool.allocate_memory_blocks(num_blocks)
            assert caught.value.available == len(free) + len(victims)
            return None
        taken = self.pool.allocate_memory_blocks(num_blocks)
        evicted = victims[: max(num_blocks - len(free), 0)]
        below = self.model.below(evicted).values()  # blocks removed with them are free, too
        freed = [block for block in below if not self.model.refs[block]]
        assert set(taken) <= {*free, *freed}
        assert [block for block in taken if block in evicted] == evicted
        assert len(set(taken)) == len(taken) == num_blocks
        self.evicted += len(freed)
        self.forget(evicted)
        self.model.touch(taken)
        for block in taken:
            self.model.refs[block] = 1
        return taken

    @rule(blocks=st.lists(BLOCKS, max_size=3), times=st.sampled_from([1, 1, 5]))
    def retain(self, blocks, times=1):
        blocks = blocks * times
        if set(blocks) & {*self.model.free()}:
            with pytest.raises(UnknownBlockError):
                self.pool.retain_memory_blocks(blocks)
            return
        self.pool.retain_memory_blocks(blocks)
        self.model.touch(blocks)
        for block in blocks:
            self.model.refs[block] += 1

    @rule(prefix=SEQUENCES, looks_first=st.booleans())
    def start_request(self, prefix, looks_first):
        """Start without a match if another request of the same step computes the prefix."""
        matched = self.pool.match_prefix(self.hashes(prefix))
        assert matched == self.expected_match(prefix)
        matched = matched if looks_first else []
        self.retain(matched)
        taken = self.take(len(prefix) - len(matched))
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
        is_lost = start and prefix[:start] not in self.model.block_of
        expected = [
            None if is_lost else self.model.block_of.setdefault(prefix[:end], block)
            for block, end in zip(blocks, ends, strict=True)
        ]
        for _ in range(2):
            canonical = self.pool.register_kv_block_hashes(
                blocks,
                hashes[start:],
                parent_digest=hashes.digests[start - 1] if start else None,
                tokens=prefix[start:],
            )
            assert canonical == expected

    @rule(blocks=st.lists(BLOCKS, max_size=3))
    def deregister(self, blocks):
        self.pool.deregister_blocks(blocks)
        self.forget(blocks)

    @rule()
    def reset(self):
        gone = {b: self.hashes(p).digests[-1] for b, p in self.model.prefix_of.items()}
        self.pool.reset()
        assert self.removed == ([gone] if gone else [])
        self.removed.clear()
        self.model, self.requests, self.evicted = Model(), [], 0

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
            assert pool.find_block(digest) == block
        assert pool.block_hashes.tolist() == hashes.tolist()
        used = sum(refs > 0 for refs in model.refs)
        cached = POOL_SIZE - 1 - used - len(model.free())
        assert pool.num_free_blocks == len(model.free())
        assert sorted(pool._rows.free[: pool.num_free_blocks].tolist()) == model.free()
        assert self.index == {
            self.hashes(prefix).digests[-1]: block for prefix, block in model.block_of.items()
        }
        assert (pool.num_used_blocks, pool.num_cached_blocks) == (used, cached)
        assert pool.evicted_blocks_total == self.evicted

    def teardown(self):
        kv_block_allocator._FEW = AllocatorMachine.few


class RefZeroMachine(AllocatorMachine):
    policy = EvictionPolicy.REF_ZERO


class WholeArraysMachine(AllocatorMachine):
    """Blocks are counted by whole arrays, as otherwise only for many blocks."""

    few = 0


class LowestFirst(AdaptiveSlotPolicy):
    """Evicts the state of the lowest block."""

    def least_loss(self, slots):
        return int(self.slot_to_block[slots].argmin())


class FollowsStatesMachine(AllocatorMachine):
    """Blocks with a state are evicted after those without, in the order of the slot policy."""

    @initialize()
    def start(self):
        super().start()
        policy = LowestFirst()
        self.slots = SlotPool(4, self.pool, policy=policy)
        policy.slot_to_block = self.slots.slot_to_block

    def on_event(self, event):
        if event.kind == "block":
            super().on_event(event)

    @rule(prefixes=st.lists(SEQUENCES, min_size=2, max_size=3), data=st.data())
    def a_full_cache_makes_room(self, prefixes, data):
        """Cache prompts admitted together, except one that still runs; some blocks get states."""
        for prefix in prefixes:
            self.start_request(prefix, looks_first=data.draw(st.booleans()))
        while len(self.requests) > 1:
            self.release(self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1))))
        for block in sorted({*self.model.block_of.values()} - self.model.states):
            [slot] = self.slots.reserve_slots([block]) if data.draw(st.booleans()) else [None]
            if slot is not None:
                self.slots.commit_reserved([slot], [block])
        self.model.states = {block for block in self.slots.slot_to_block.tolist() if block >= 0}
        self.everything_agrees()
        self.release(self.take(data.draw(st.integers(0, POOL_SIZE))) or [])

    @precondition(lambda self: self.model.states)
    @rule(data=st.data())
    def lose_a_state(self, data):
        block = data.draw(st.sampled_from(sorted(self.model.states)))
        self.slots.invalidate_block(block)
        self.model.states.discard(block)

    @invariant()
    def states_agree(self):
        self.slots.check_invariants()
        found = [block for block in self.slots.slot_to_block.tolist() if block >= 0]
        assert sorted(found) == sorted(self.model.states)


TestLru = AllocatorMachine.TestCase
TestFollowsStates = FollowsStatesMachine.TestCase
TestFollowsStates.settings = examples(400)
TestRefZero = RefZeroMachine.TestCase
TestWholeArrays = WholeArraysMachine.TestCase
