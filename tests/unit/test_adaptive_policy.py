"""The adaptive policy in a pool and in a context: kept states, refused states, learned rates."""

import numpy as np
import pytest
from context_rig import make_config, make_context
from kv_rig import by_id
from slot_rig import save

from mamba_cache.cache import (
    AdaptiveSlotPolicy,
    KVBlockAllocator,
    LruSlotPolicy,
    PromptFacts,
    RefZeroSlotPolicy,
    SlotPool,
    StateProposal,
)
from mamba_cache.cache.adaptive import FORGOTTEN_AT_ONCE, NO_CANDIDATE, CandidateTree
from mamba_cache.errors import InvariantError


class Service:
    """Prompts that come one at a time to a pool whose KV blocks never run out."""

    def __init__(self, max_slots, policy=None):
        self.kv_blocks = KVBlockAllocator(100_000)
        self.policy = policy or AdaptiveSlotPolicy()
        self.pool = SlotPool(max_slots, self.kv_blocks, policy=self.policy)
        self._block_of = {}
        self.skipped = 0

    def ask(self, hash_ids, **hints):
        """Run a prompt of these blocks; return the blocks that it skips."""
        hash_ids = list(hash_ids)
        matched = next(
            (n for n, h in enumerate(hash_ids) if h not in self._block_of), len(hash_ids)
        )
        new = self.kv_blocks.allocate_memory_blocks(len(hash_ids) - matched)
        blocks = [self._block_of[h] for h in hash_ids[:matched]] + new
        hit = self.pool.num_blocks_to_state(blocks[:matched])
        facts = PromptFacts(hash_ids, 16, matched, len(hash_ids), **hints)
        prompt = self.pool.policy.on_request(facts)
        depths = sorted({d for d in (matched, len(hash_ids)) if d > hit})
        kinds = ["end" if depth == len(hash_ids) else "branch" for depth in depths]
        proposals = [StateProposal(prompt, d, kind) for d, kind in zip(depths, kinds, strict=True)]
        slots = self.pool.reserve([blocks[d - 1] for d in depths], proposals)
        kept = [(s, d) for s, d in zip(slots, depths, strict=True) if s is not None]
        if new:
            self.kv_blocks.register_kv_block_hashes(blocks, by_id(*hash_ids))
        self.pool.commit_reserved([s for s, _ in kept], [blocks[d - 1] for _, d in kept])
        if new:
            self.kv_blocks.release_memory_blocks(new)
        self._block_of.update(zip(hash_ids, blocks, strict=True))
        self.skipped += hit
        return hit

    def has_state(self, hash_id):
        return self.pool.has_state(self._block_of[hash_id])


def chat(first, turns):
    """Hash ids of a chat's prompts, one longer than the other."""
    return [range(first, first + 5 * turn + 5) for turn in range(turns)]


def test_states_never_requested_again_are_refused_once_that_is_learned():
    service = Service(4)
    for number in range(700):
        hot = 100 * (number % 4) + 1
        service.ask(range(hot, hot + 10))
        once = 1_000 * number + 1_000
        service.ask(range(once, once + 10))
    pool = service.pool
    pool.check_invariants()
    assert pool.refused_states_total > 500
    assert pool.evicted_slots_total < 350
    assert service.skipped > 0.7 * 700 * 10


def test_a_state_requested_by_its_position_is_not_refused():
    service = Service(1)
    for _ in range(3):
        service.ask(range(1, 9))
    blocks = service.kv_blocks.allocate_memory_blocks(1)
    prompt = service.pool.policy.on_request(PromptFacts([77], 16, 0, 1))
    proposal = StateProposal(prompt, 1, "branch", is_asked=True)
    assert service.pool.reserve(blocks, [proposal]) == [0]
    assert not service.has_state(8)
    service.pool.cancel_reserved([0])
    service.pool.check_invariants()


def test_a_state_that_another_request_is_about_to_save_needs_no_second_slot():
    pool = SlotPool(4, KVBlockAllocator(20), policy=AdaptiveSlotPolicy())
    facts = PromptFacts([1, 2], 16, 0, 2)
    one, other = pool.policy.on_request(facts), pool.policy.on_request(facts)
    assert pool.reserve([3], [StateProposal(one, 2)]) == [3]
    assert pool.reserve([5], [StateProposal(other, 2)]) == [None]
    assert (pool.refused_states_total, pool.skipped_checkpoints_total) == (1, 0)
    pool.cancel_reserved([3])
    assert pool.reserve([5], [StateProposal(other, 2)]) == [3]
    pool.check_invariants()


def test_states_without_a_slot_because_all_are_held_are_skipped_not_refused():
    pool = SlotPool(1, KVBlockAllocator(20), policy=AdaptiveSlotPolicy())
    facts = PromptFacts([1, 2, 3], 16, 0, 3)
    prompt = pool.policy.on_request(facts)
    assert pool.reserve([3], [StateProposal(prompt, 1)]) == [0]
    proposals = [StateProposal(prompt, 2), StateProposal(prompt, 3, is_asked=True)]
    assert pool.reserve([4, 5], proposals) == [None, None]
    assert (pool.refused_states_total, pool.skipped_checkpoints_total) == (0, 2)
    pool.check_invariants()


def test_a_choice_that_the_pool_cannot_follow_is_taken_back(monkeypatch):
    service = Service(1)
    service.ask(range(1, 4))
    prompt = service.pool.policy.on_request(PromptFacts([70], 16, 0, 1))
    [block] = service.kv_blocks.allocate_memory_blocks(1)
    monkeypatch.setattr(service.pool, "_take", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        service.pool.reserve([block], [StateProposal(prompt, 1, is_asked=True)])
    assert service.pool.slot_to_block.tolist() == [2]
    service.policy.check_invariants([0])


def test_the_state_of_an_unfinished_block_takes_its_hash_when_it_is_known():
    pool = SlotPool(3, KVBlockAllocator(20), policy=AdaptiveSlotPolicy())
    prompt = pool.policy.on_request(PromptFacts([1, 2], 16, 0, 2))
    growing = StateProposal(prompt, 4, hash_ids=[1, 2, 3])
    assert pool.reserve([7], [growing]) == [2]
    pool.kv_blocks.block_hashes[7] = 4
    pool.commit_reserved([2], [7])
    assert pool.reserve([8], [growing]) == [1]  # for the state of another answer
    pool.cancel_reserved([1])
    pool.check_invariants()
    again = pool.policy.on_request(PromptFacts([1, 2, 3, 4], 16, 4, 3))
    assert pool.reserve([9], [StateProposal(again, 4)]) == [None]  # the state is saved already


@pytest.mark.parametrize("is_late", [False, True])
def test_two_requests_that_save_the_same_answer_have_one_candidate(is_late):
    """The second save finds the first one's hash, even if a request came before the saves."""
    pool = SlotPool(3, KVBlockAllocator(20), policy=AdaptiveSlotPolicy())
    prompt = pool.policy.on_request(PromptFacts([1, 2], 16, 0, 2))
    growing = StateProposal(prompt, 4, hash_ids=[1, 2, 3])
    slots = pool.reserve([7, 8], [growing, growing])
    assert slots == [1, 2]
    if is_late:
        pool.policy.on_request(PromptFacts([9], 16, 0, 1))
    for block, slot in zip([7, 8], slots, strict=True):
        pool.kv_blocks.block_hashes[block] = 4
        pool.commit_reserved([slot], [block])
        pool.check_invariants()
        tree, node = pool.policy._tree, pool.policy._candidate_at[slot]
        assert tree._last_use_at[node] == tree._clock, "a state counts as used when it is saved"
    for block in (7, 8):
        pool.invalidate_block(block)
    pool.check_invariants()
    again = pool.policy.on_request(PromptFacts([1, 2, 3, 4], 16, 4, 4))
    assert again.near != 0, "the request used the joint candidate"


def test_states_of_unknown_prompts_are_kept_by_age():
    pool = SlotPool(2, KVBlockAllocator(20), policy=AdaptiveSlotPolicy())
    for block in (1, 2):
        pool.commit(pool.reserve_slots([block]), [block], [64])
    for _ in range(30):
        pool.policy.on_request(PromptFacts([1], 16, 1, 1))
    both = np.arange(2)
    assert sorted(pool.policy.choose(2, both, pool.slot_to_block, None)) == [0, 1]
    assert save(pool, 5) == [pool.get_slot(5)]
    assert pool.num_cached_slots == 2
    pool.check_invariants()
    pool.reset()
    pool.check_invariants()


def test_a_state_of_one_block_of_an_unknown_prompt_goes_before_one_of_two():
    pool = SlotPool(2, KVBlockAllocator(20), policy=AdaptiveSlotPolicy())
    pool.policy.on_request(PromptFacts([1], 16, 0, 1))
    for block, tokens in ((2, 32), (1, 16)):
        pool.commit(pool.reserve_slots([block]), [block], [tokens])
    assert pool.policy.choose(1, np.arange(2), pool.slot_to_block, None) == [pool.get_slot(1)]


def test_a_slot_written_from_outside_goes_first():
    service = Service(2)
    service.ask(range(1, 4))
    pool = service.pool
    slot = int(pool.free_slots[pool.free_count - 1])
    pool.free_count -= 1
    pool.slot_to_block[slot], pool.block_to_slot[50] = 50, slot
    evictable = np.array([0, 1])
    assert service.policy.choose(1, evictable, pool.slot_to_block[evictable], None) == [slot]
    assert service.policy.least_loss(evictable) == slot
    prompt = pool.policy.on_request(PromptFacts([60], 16, 0, 1))
    assert service.policy.admit([StateProposal(prompt, 1)], 0, evictable).victims == [slot]
    service.policy.withdraw()
    assert service.has_state(3)


def test_for_kv_blocks_the_state_goes_that_is_worth_least_for_each_of_them():
    """The one-block state also serves a ghost: worth two one-block states, it holds one block."""
    service = Service(4)
    service.ask(range(10, 21))
    service.ask([1])
    longer = service.policy.on_request(PromptFacts([1, 2], 16, 1, 2))
    [block] = service.kv_blocks.allocate_memory_blocks(1)
    service.pool.cancel_reserved(service.pool.reserve([block], [StateProposal(longer, 2)]))
    slots = [service.pool.get_slot(service._block_of[last]) for last in (1, 20)]
    assert service.policy.choose(1, np.array(slots), None, None) == slots[:1]
    assert service.policy.least_loss(np.array(slots)) == 1


def test_invariants_notice_unreported_slots():
    service = Service(2)
    service.ask(range(1, 4))
    service.policy.check_invariants([0, 1])
    with pytest.raises(InvariantError, match="are stray"):
        service.policy.check_invariants([])
    prompt = service.pool.policy.on_request(PromptFacts([60], 16, 0, 1))
    service.policy.admit([StateProposal(prompt, 1)], 1, np.empty(0, np.int64))
    with pytest.raises(InvariantError, match="are kept"):
        service.policy.check_invariants([0, 1])
    service.policy.withdraw()
    tree = service.policy._tree
    tree._num_children_at[0] += 1
    with pytest.raises(InvariantError, match="contradict each other: children"):
        service.pool.check_invariants()
    tree._num_children_at[0] -= 1
    tree._gains[np.array(tree.num_kept_at) > 0] += 1
    with pytest.raises(InvariantError, match="contradict each other: values"):
        service.pool.check_invariants()


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, AdaptiveSlotPolicy),
        ({"slot_policy": "lru"}, LruSlotPolicy),
        ({"eviction_policy": "ref_zero"}, RefZeroSlotPolicy),
        ({"eviction_policy": "ref_zero", "slot_policy": "adaptive"}, AdaptiveSlotPolicy),
    ],
)
def test_settings_name_a_contexts_policy(settings, kind):
    assert type(make_context(make_config(**settings)).slot_allocator.policy) is kind


def hints_skip(told):
    """Return the blocks skipped by 400 pairs of prompts among 1,200 others, with 6 slots."""
    service, rng, waiting = Service(6), np.random.default_rng(5), []
    for number in range(1_600):
        first = 100 * number + 1
        goes_on = rng.random() < 0.25
        service.ask(range(first, first + 10), will_continue=told(goes_on, rng), source="chat")
        if goes_on:
            waiting.append((number + 20, range(first, first + 15)))
        while waiting and waiting[0][0] <= number:
            service.ask(waiting.pop(0)[1], will_continue=told(False, rng), source="chat")
    service.pool.check_invariants()
    return service.skipped


def test_hints_help_as_far_as_they_are_right_and_random_ones_cost_nothing():
    without = hints_skip(lambda truth, rng: None)
    right = hints_skip(lambda truth, rng: truth)
    assert right > 1.5 * without
    assert hints_skip(lambda truth, rng: True) == without
    assert hints_skip(lambda truth, rng: bool(rng.random() < 0.5)) > 0.8 * without


def test_a_position_asked_for_twice_in_a_step_has_two_slots_until_one_is_published():
    pool = SlotPool(4, KVBlockAllocator(20), policy=AdaptiveSlotPolicy())
    prompt = pool.policy.on_request(PromptFacts([1, 2], 16, 0, 2))
    asked = StateProposal(prompt, 2, "branch", is_asked=True)
    assert pool.reserve([3], [asked]) == [3]
    assert pool.reserve([5], [asked]) == [2]
    pool.check_invariants()
    pool.commit_reserved([3], [3])
    pool.commit_reserved([2], [3])  # another request has published the block
    pool.check_invariants()
    assert (pool.num_cached_slots, pool.free_count) == (1, 3)


def test_a_state_that_came_without_its_prompt_may_be_named_later():
    service = Service(4)
    pool = service.pool
    [block] = service.kv_blocks.allocate_memory_blocks(1)
    service.kv_blocks.block_hashes[block] = 3
    pool.commit_reserved(pool.reserve_slots([block]), [block])
    prompt = pool.policy.on_request(PromptFacts([1, 2, 3], 16, 0, 3))
    [other] = service.kv_blocks.allocate_memory_blocks(1)
    [slot] = pool.reserve([other], [StateProposal(prompt, 3)])
    pool.cancel_reserved([slot])
    pool.check_invariants()
    pool.invalidate_block(block)
    for number in range(1, 4_500):  # until both candidates are forgotten
        again = pool.policy.on_request(PromptFacts([10 * number], 16, 0, 1))
        pool.cancel_reserved(pool.reserve([other], [StateProposal(again, 1)]))
    assert len(service.policy._tree.ghosts) <= 4_096 + FORGOTTEN_AT_ONCE
    pool.check_invariants()


def test_states_of_blocks_without_hashes_are_candidates_of_their_own():
    tree = CandidateTree(10)
    first = tree.find_or_add(0, 1)
    named = tree.propose(tree.begin_request(PromptFacts([1], 16, 0, 1)), 1, "end")
    assert tree.rename(named, 2)
    assert tree.find_or_add(0, 1) != first
    tree.check_invariants()


def test_a_candidate_that_was_renamed_is_older_than_those_that_come_after_it():
    tree = CandidateTree(10)
    before = tree.find_or_add(5, 1)
    named = tree.propose(tree.begin_request(PromptFacts([1], 16, 0, 1)), 1, "end")
    assert tree.rename(named, 2)
    after = tree.find_or_add(7, 1)
    assert tree.order_of(before) < tree.order_of(named) < tree.order_of(after)


def test_more_candidates_than_there_is_room_for_make_the_arrays_grow():
    tree = CandidateTree(1)
    prompt = tree.begin_request(PromptFacts(range(1, 601), 16, 0, 600))
    nodes = [tree.propose(prompt, depth, "inside") for depth in range(1, 601)]
    for node in nodes[::2]:
        tree.keep(node)
    tree.check_invariants()
    assert tree.order_of(NO_CANDIDATE) < (0,) <= min(map(tree.order_of, nodes[::2]))
