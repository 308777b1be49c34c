"""MambaSlotAllocator compared with a model of plain dicts, with random writes of an embedder.

The model keeps the bits of every saved state, so a lost, mixed or misplaced state is noticed.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slot_rig import (
    LastUsedPolicy,
    add_live_states,
    bookkeeping,
    live_bits,
    make_allocator,
    make_context,
    randomize,
    slot_bits,
    state_bits,
)

from mamba_cache.cache import (
    AdaptiveSlotPolicy,
    LruSlotPolicy,
    PromptFacts,
    RefZeroSlotPolicy,
    StateProposal,
)
from mamba_cache.errors import (
    DoubleFreeError,
    InvalidArgumentError,
    MambaSlotCapacityError,
    UnknownBlockError,
)
from mamba_cache.states import PAD_SLOT_ID, ZERO_SOURCE

NUM_BLOCKS, NUM_REQUESTS = 10, 3
blocks = st.integers(0, NUM_BLOCKS - 1)
requests = st.integers(0, NUM_REQUESTS - 1)
POLICIES = LruSlotPolicy, RefZeroSlotPolicy, LastUsedPolicy, AdaptiveSlotPolicy


class MambaSlotAllocatorMachine(RuleBasedStateMachine):
    """The model: slot -> block, slot -> bits, hash -> block, and each slot's last use."""

    @initialize(
        max_slots=st.integers(0, 5), policy=st.sampled_from(POLICIES), seed=st.integers(0, 2**32)
    )
    def make(self, max_slots, policy, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.context = make_context(
            NUM_BLOCKS,
            NUM_REQUESTS,
            max_mamba_intermediate_states_per_step=3,
            paused_request_count=0,
        )
        add_live_states(self.context, self.generator)
        self.allocator = make_allocator(max_slots, context=self.context, policy=policy())
        for tensor in (self.allocator.conv_states, self.allocator.ssm_states):
            randomize(tensor, self.generator)  # poison: unsaved slots must not be read
        self.max_slots = max_slots
        self.kv_blocks = self.context.kv_block_allocator
        self.kv_blocks.block_hashes[:] = torch.arange(NUM_BLOCKS) + 1
        self.cached, self.reserved, self.bits = {}, {}, {}
        self.found, self.hash_of, self.leases, self.old_leases = {}, {}, [], []
        self.last_use, self.clock = {}, 0
        self.skipped = self.evicted = self.refused = 0

    # Derived facts of the model.

    @property
    def slot_of(self):
        return {block: slot for slot, block in self.cached.items()}

    @property
    def num_free(self):
        return self.max_slots - len(self.cached) - len(self.reserved)

    def victims(self, protected):
        """Return evictable slots in order of eviction."""
        held = {lease.slot for lease in self.leases}
        evictable = [
            slot
            for slot, block in sorted(self.cached.items())
            if slot not in held and block not in protected
            if self.kv_blocks.block_ref_counts[block] == 0
        ]
        if type(self.allocator.policy) is LruSlotPolicy:
            evictable.sort(key=lambda slot: int(self.kv_blocks.block_timestamps[self.cached[slot]]))
        elif isinstance(self.allocator.policy, AdaptiveSlotPolicy):
            # Other tests cover the policy's choice; this one, that the pool follows it.
            slots = np.array(evictable, np.int64)
            of_slots = self.allocator.slot_to_block.numpy()[slots]
            evictable = self.allocator.policy.choose(len(slots), slots, of_slots, self.kv_blocks)
        elif isinstance(self.allocator.policy, LastUsedPolicy):
            evictable.sort(key=lambda slot: self.last_use.get(slot, 0))
        return evictable

    # Changes of the model.

    def vacate(self, slot):
        block = self.cached.pop(slot)
        self.bits.pop(slot, None)
        self.old_leases += [lease for lease in self.leases if lease.slot == slot]
        self.leases = [lease for lease in self.leases if lease.slot != slot]
        self.forget(block)
        if self.found.get(block + 1) == block:  # as in the owner of KV blocks
            del self.found[block + 1]

    def forget(self, block):
        hash_id = self.hash_of.pop(block, None)
        if self.found.get(hash_id) == block:
            del self.found[hash_id]

    def publish(self, block, hash_id):
        if hash_id > 0:
            self.forget(block)
            self.hash_of[block] = hash_id
            self.found[hash_id] = block

    def touch(self, slots):
        self.clock += 1
        self.last_use.update(dict.fromkeys(slots, self.clock))

    def evict(self, slots):
        self.evicted += len(slots)
        for slot in slots:
            self.vacate(slot)

    def row_bits(self, request):
        row = int(self.context.mamba_metadata.request_to_mamba_state_idx[request])
        return live_bits(self.context, row)

    def save(self, slots, of):
        """Save live states and keep their bits in the model."""
        self.bits.update({slot: self.row_bits(r) for slot, r in zip(slots, of, strict=True)})
        self.allocator.store_from_live_batch(slots, of)

    # Calls of the embedder.

    @rule(data=st.data())
    def embedder_writes(self, data):
        block = data.draw(blocks)
        self.kv_blocks.block_ref_counts[block] = data.draw(st.integers(0, 1))
        self.kv_blocks.block_timestamps[block] = data.draw(st.integers(-3, 3))

    @rule()
    def a_step_runs(self):
        randomize(self.context.mamba_conv_states, self.generator)
        randomize(self.context.mamba_ssm_states, self.generator)

    @rule()
    def live_states_are_replaced(self):
        add_live_states(self.context, self.generator)

    # Saving.

    @rule(wanted=st.lists(blocks, max_size=5), data=st.data())
    def allocate_and_save(self, wanted, data):
        new = [b for b in dict.fromkeys(wanted) if b not in self.slot_of]
        victims = self.victims(wanted)
        short = max(len(new) - self.num_free, 0)
        if short > len(victims):
            before = bookkeeping(self.allocator)
            with pytest.raises(MambaSlotCapacityError) as caught:
                self.allocator.allocate_slots_batch(wanted)
            assert caught.value.required == len(new)
            assert caught.value.available == self.num_free + len(victims)
            assert bookkeeping(self.allocator) == before
            return
        slots = self.allocator.allocate_slots_batch(wanted)
        self.evict(victims[:short])
        self.cached.update((s, b) for s, b in zip(slots, wanted, strict=True) if b in new)
        self.touch([self.slot_of[b] for b in new])
        assert slots == [self.slot_of[b] for b in wanted]
        self.save(slots, [data.draw(requests) for _ in slots])

    @rule(wanted=st.lists(blocks, max_size=4))
    def reserve(self, wanted):
        new = [
            b
            for b in dict.fromkeys(wanted)
            if b not in self.slot_of
            if b not in self.reserved.values()
        ]
        victims = self.victims(wanted)
        kept = new[: self.num_free + len(victims)]
        short = max(len(kept) - self.num_free, 0)
        got = self.allocator.reserve_slots(wanted)
        self.evict(victims[:short])
        self.skipped += len(new) - len(kept)
        taken = {b: s for b, s in zip(wanted, got, strict=True) if s is not None}
        assert [*taken] == kept
        assert len([s for s in got if s is not None]) == len(kept)
        self.reserved.update((slot, block) for block, slot in taken.items())

    @precondition(lambda self: self.allocator.prompt_policy is not None)
    @rule(
        wanted=st.lists(blocks, min_size=1, max_size=3, unique=True),
        length=st.integers(3, 6),
        first=st.integers(1, 4),
        is_asked=st.booleans(),
    )
    def reserve_for_a_prompt(self, wanted, length, first, is_asked):
        """The policy may refuse unrequested states; each of its victims must be evictable."""
        pool = self.allocator
        hash_ids = [10 * first + n for n in range(length)]
        prompt = pool.policy.on_request(PromptFacts(hash_ids, 16, 0, length))
        proposals = [
            StateProposal(prompt, length - n, "inside" if n else "end", is_asked)
            for n in range(len(wanted))
        ]
        could_go, cached = self.victims(wanted), dict(self.cached)
        pending = {*self.cached.values(), *self.reserved.values()}
        new = [b for b in wanted if b not in pending]
        refused, num_free = pool.refused_states_total, self.num_free
        got = self.allocator.reserve(wanted, proposals)
        taken = {b: s for b, s in zip(wanted, got, strict=True) if s is not None}
        assert set(taken) <= set(new)
        now = pool.slot_to_block.tolist()
        gone = [slot for slot, block in cached.items() if now[slot] != block]
        assert set(gone) <= set(could_go)
        assert len(gone) <= max(len(new) - num_free, 0)
        self.evict(gone)
        self.refused += pool.refused_states_total - refused
        self.skipped = self.allocator.skipped_checkpoints_total
        assert len(new) - len(taken) >= pool.refused_states_total - refused
        if is_asked:
            assert len(taken) == min(len(new), num_free + len(could_go))
        self.reserved.update((slot, block) for block, slot in taken.items())

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def write_and_commit(self, data):
        slots = data.draw(
            st.lists(st.sampled_from(sorted(self.reserved)), min_size=1, max_size=3, unique=True)
        )
        named = [data.draw(st.just(self.reserved[slot]) | blocks) for slot in slots]
        writers = [data.draw(requests) for _ in slots]
        rows = self.context.mamba_metadata.request_to_mamba_state_idx[writers].tolist()
        self.allocator.live_to_slots([PAD_SLOT_ID, *rows], [slots[0], *slots])
        housing = self.allocator.commit_reserved(slots, named)
        stored = []
        for slot, block, request in zip(slots, named, writers, strict=True):
            del self.reserved[slot]
            if block not in self.slot_of:
                self.cached[slot], self.bits[slot] = block, self.row_bits(request)
                stored.append(slot)
        assert housing == [self.slot_of[block] for block in named]
        if stored:
            self.touch(stored)

    def keep(self, wanted):
        """Return the entries of a batch that fit, as (index, block) pairs."""
        room, kept, new = self.num_free + len(self.victims(wanted)), [], set()
        for index, block in enumerate(wanted):
            if block not in self.slot_of and block not in new:
                if len(new) == room:
                    continue
                new.add(block)
            kept.append((index, block))
        return kept, new

    @rule(rows=st.lists(st.tuples(blocks, blocks | st.just(-1)), min_size=1, max_size=3))
    def commit_a_scratch(self, rows):
        """Each prefill request has one state in the scratch, and perhaps an EOS checkpoint."""
        allocator, metadata = self.allocator, self.context.mamba_metadata
        randomize(allocator.intermediate_conv_out, self.generator)
        randomize(allocator.intermediate_ssm_out, self.generator)
        self.context.batch_dimensions = SimpleNamespace(
            decode_req_count=0, prefill_req_count=len(rows)
        )
        metadata.intermediate_count = len(rows)
        metadata.per_request_intermediate_counts = [1] * len(rows)
        wanted, bits = [block for block, _ in rows], []
        scratch = (allocator.intermediate_conv_out, allocator.intermediate_ssm_out)
        for index, (block, eos) in enumerate(rows):
            allocator._intermediate_block_ids_cpu[index, 0] = block
            allocator._eos_cache_block_id_cpu[index] = eos
            bits.append(state_bits(*scratch, index))
        for index, (_, eos) in enumerate(rows):
            if eos >= 0:
                wanted.append(eos)
                bits.append(self.row_bits(index))
        allocator._has_intermediates = True
        kept, new = self.keep(wanted)
        blocks_kept = [block for _, block in kept]
        self.skipped += len(wanted) - len(kept)
        victims = self.victims(blocks_kept)[: max(len(new) - self.num_free, 0)]
        allocator.commit_intermediate_states()
        self.evict(victims)
        self.cached.update((allocator.get_slot(block), block) for block in new)
        if new:
            self.touch([self.slot_of[block] for block in new])
        for index, block in kept:
            self.bits[self.slot_of[block]] = bits[index]
            self.publish(block, block + 1)
        assert not allocator._has_intermediates

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def abort(self, data):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.reserved)), unique=True))
        self.allocator.cancel_reserved(slots)
        for slot in slots:
            del self.reserved[slot]
        if slots:
            self.is_refused(DoubleFreeError, self.allocator.cancel_reserved, slots)

    @rule(data=st.data())
    def register(self, data):
        for block in data.draw(st.lists(blocks, max_size=2)):
            if block in self.slot_of:
                hash_id = data.draw(st.integers(-1, 15))
                self.allocator.register_block_hashes_batch([block], [hash_id])
                self.publish(block, hash_id)

    # Reading.

    @rule(pairs=st.lists(st.tuples(requests, blocks), unique_by=lambda pair: pair[0]))
    def restore(self, pairs):
        before = [self.row_bits(r) for r in range(NUM_REQUESTS)]
        slots = [self.slot_of.get(block) for _, block in pairs]
        done = [self.allocator.restore_to_live(request, block) for request, block in pairs]
        assert done == [slot is not None for slot in slots]
        for (request, _), slot in zip(pairs, slots, strict=True):
            if slot is not None:
                before[request] = self.bits[slot]
        assert [self.row_bits(r) for r in range(NUM_REQUESTS)] == before
        for slot in slots:
            if slot is not None:
                self.touch([slot])

    @rule(data=st.data())
    def restore_or_clear_rows(self, data):
        rows = data.draw(st.permutations(range(NUM_REQUESTS)))
        sources = [
            data.draw(st.sampled_from([ZERO_SOURCE, PAD_SLOT_ID, *sorted(self.cached)]))
            for _ in rows
        ]
        expected = [live_bits(self.context, row) for row in range(NUM_REQUESTS)]
        zeros = [torch.zeros_like(t[:, :1]) for t in self.allocator._live_states()]
        for row, source in zip(rows, sources, strict=True):
            if source == ZERO_SOURCE:
                expected[row] = state_bits(*zeros, 0)
            elif source != PAD_SLOT_ID:
                expected[row] = self.bits[source]
        self.allocator.restore_slots(sources, rows)
        assert [live_bits(self.context, row) for row in range(NUM_REQUESTS)] == expected

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def pin(self, data):
        self.leases.append(self.allocator.pin(data.draw(st.sampled_from(sorted(self.cached)))))

    @precondition(lambda self: self.leases or self.old_leases)
    @rule(data=st.data())
    def unpin(self, data):
        lease = data.draw(st.sampled_from(self.leases + self.old_leases))
        held = self.leases.count(lease)
        self.allocator.unpin(lease)
        (self.leases if held else self.old_leases).remove(lease)
        if held == 1:
            self.is_refused(DoubleFreeError, self.allocator.unpin, lease)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def consume(self, data):
        slot = data.draw(st.sampled_from(sorted(self.cached)))
        self.allocator.policy.on_consumed([slot])
        self.touch([slot])

    # Removing.

    @rule(data=st.data())
    def free_unread(self, data):
        named = [self.allocator.lease_of(slot) for slot in range(self.max_slots)]
        current = [lease.slot for lease in named if self.allocator.is_current(lease)]
        assert current == sorted(self.cached)
        slots = data.draw(st.sets(st.sampled_from(sorted(self.cached)))) if self.cached else ()
        self.allocator.free_unread([named[slot] for slot in slots] + self.old_leases)
        for slot in set(slots) - {lease.slot for lease in self.leases}:
            self.vacate(slot)

    @rule(block=blocks)
    def invalidate(self, block):
        self.allocator.invalidate_block(block)
        if block in self.slot_of:
            self.vacate(self.slot_of[block])

    @rule(gone=st.sets(blocks, max_size=2), hashes=st.sets(st.integers(1, 15), max_size=2))
    def deregister(self, gone, hashes):
        self.allocator.on_kv_blocks_deregistered(gone, hashes)
        for block in gone | {self.found[h] for h in hashes if h in self.found}:
            if block in self.slot_of:
                self.vacate(self.slot_of[block])
        for hash_id in hashes:
            self.found.pop(hash_id, None)

    @rule(num_slots=st.integers(0, 3))
    def take_evicted_slots(self, num_slots):
        victims = self.victims(())
        if num_slots > len(victims):
            with pytest.raises(MambaSlotCapacityError):
                self.allocator._evict_lru_slots_batch(num_slots)
            return
        assert self.allocator._evict_lru_slots_batch(num_slots) == victims[:num_slots]
        self.evict(victims[:num_slots])
        for slot in victims[:num_slots]:
            self.allocator.free_slots[self.allocator.free_count] = slot
            self.allocator.free_count += 1

    @rule()
    def reset(self):
        self.allocator.reset()
        self.old_leases += self.leases
        self.cached, self.reserved, self.bits, self.leases = {}, {}, {}, []
        self.found, self.hash_of, self.last_use = {}, {}, {}
        self.skipped = self.evicted = self.refused = 0

    def is_refused(self, error, call, *arguments):
        before = bookkeeping(self.allocator)
        with pytest.raises(error):
            call(*arguments)
        assert bookkeeping(self.allocator) == before

    @rule(bad=st.sampled_from([-1, NUM_BLOCKS]), block=blocks, data=st.data())
    def misuse(self, bad, block, data):
        for call in (
            self.allocator.allocate_slots_batch,
            self.allocator.reserve_slots,
            self.allocator._invalidate_blocks_batch,
            lambda ids: self.allocator.on_kv_blocks_deregistered(ids, [1]),
            lambda ids: self.allocator.register_block_hashes_batch(ids, [1, 2]),
        ):
            self.is_refused(UnknownBlockError, call, [block, bad])
        slots = data.draw(st.lists(st.integers(-2, self.max_slots + 1), min_size=1, max_size=3))
        if len(slots) > len(set(slots)) or not set(slots) <= set(self.reserved):
            commit, zeros = self.allocator.commit_reserved, [0] * len(slots)
            self.is_refused(InvalidArgumentError, commit, slots, zeros)

    # Invariants.

    @invariant()
    def invariants_hold(self):
        allocator = self.allocator
        allocator.check_invariants()
        assert {
            slot: block for slot, block in enumerate(allocator.slot_to_block.tolist()) if block >= 0
        } == self.cached
        assert allocator.reserved == self.reserved
        assert allocator.hash_to_block_id == self.found
        assert allocator.free_count == self.num_free
        assert allocator.num_reserved_slots == len(self.reserved)
        assert allocator.num_cached_slots == len(self.cached)
        assert allocator.skipped_checkpoints_total == self.skipped
        assert allocator.evicted_slots_total == self.evicted
        assert all(allocator.is_current(lease) for lease in self.leases)
        assert not any(allocator.is_current(lease) for lease in self.old_leases)
        held = allocator.pin_counts.nonzero()[0].tolist()
        pinned = [slot for slot in held if slot not in allocator.reserved]
        assert pinned == sorted({lease.slot for lease in self.leases})

    @invariant()
    def every_saved_state_is_there_to_the_bit(self):
        assert {slot: slot_bits(self.allocator, slot) for slot in self.cached} == self.bits


TestMambaSlotAllocator = MambaSlotAllocatorMachine.TestCase
