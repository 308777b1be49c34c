"""Another policy takes over while slots are in use."""

import pytest
from fingerprints import fingerprint
from slot_rig import make_allocator

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.slots import (
    AdaptiveSlotPolicy,
    ConsumedSlotPolicy,
    LruSlotPolicy,
    RefZeroSlotPolicy,
    ScoreSlotPolicy,
)


@pytest.fixture
def allocator():
    """Blocks 0 to 3 have all four slots; they were used in the order 2, 0, 3, 1."""
    made = make_allocator(4)
    made.allocate_slots_batch([0, 1, 2, 3])
    for time, block in enumerate([2, 0, 3, 1]):
        made.context.kv_block_allocator.block_timestamps[block] = time
    return made


def victims(allocator):
    """Who loses a slot for each further block, in order."""
    lost = []
    for newcomer in range(4, 8):
        before = [block for block in range(4) if allocator.has_state(block)]
        allocator.allocate_slots_batch([newcomer])
        allocator.context.kv_block_allocator.block_ref_counts[newcomer] = 1
        lost += [block for block in before if not allocator.has_state(block)]
    return lost


@pytest.mark.parametrize("policy", [ConsumedSlotPolicy, ScoreSlotPolicy])
def test_the_new_policy_goes_on_in_the_order_of_the_old_one(allocator, policy):
    allocator.change_policy(policy())
    allocator.check_invariants()
    assert victims(allocator) == [2, 0, 3, 1]


def test_the_new_policy_forgets_what_it_knew(allocator):
    new = ConsumedSlotPolicy()
    new.reset(4)
    new.on_stored([allocator.get_slot(2)], [1])
    allocator.change_policy(new)
    assert victims(allocator) == [2, 0, 3, 1]


def test_a_consumed_state_is_the_last_to_go_under_the_new_policy(allocator):
    allocator.change_policy(ScoreSlotPolicy())
    allocator.note_consumed([allocator.get_slot(2)])
    assert victims(allocator) == [0, 3, 1, 2]


def test_no_slot_changes_hands(allocator):
    allocator.invalidate_block(1)
    [reserved] = allocator.reserve_slots([5])
    [lease] = allocator.pin_slots([allocator.get_slot(0)])
    told = []

    class Listener(RefZeroSlotPolicy):
        def on_stored(self, slots, saved_tokens):
            told.append((slots, saved_tokens))

    allocator.change_policy(Listener())
    assert told == [([allocator.get_slot(block)], [1]) for block in (2, 0, 3)]
    assert allocator.is_current(lease)
    assert allocator.is_pinned(lease.slot)
    assert allocator.commit_reserved([reserved], [5], [11]) == [reserved]
    assert told[-1] == ([reserved], [1])


def test_an_empty_pool_can_change_too():
    allocator = make_allocator(4, policy=RefZeroSlotPolicy())
    allocator.change_policy(ConsumedSlotPolicy())
    assert allocator.allocate_slots_batch([0, 1, 2, 3]) == [0, 1, 2, 3]
    assert allocator.policy._last_use.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("given", [None, "lru", ScoreSlotPolicy, object()])
def test_what_is_no_policy_is_refused(allocator, given):
    before = fingerprint(allocator)
    with pytest.raises(InvalidArgumentError, match="methods of SlotEvictionPolicy"):
        allocator.change_policy(given)
    assert isinstance(allocator.policy, LruSlotPolicy)
    assert fingerprint(allocator) == before
    if given is not None:
        with pytest.raises(InvalidArgumentError, match="methods of SlotEvictionPolicy"):
            make_allocator(4, policy=given)


def test_the_present_policy_would_forget_what_it_is_told_by(allocator):
    allocator.change_policy(ConsumedSlotPolicy())
    before = fingerprint(allocator)
    with pytest.raises(InvalidArgumentError, match="another than the present"):
        allocator.change_policy(allocator.policy)
    assert fingerprint(allocator) == before


def test_a_policy_that_raises_does_not_take_over(allocator):
    class Failing(ConsumedSlotPolicy):
        def on_stored(self, slots, saved_tokens):
            if self._clock == 2:
                raise OSError("broken")
            super().on_stored(slots, saved_tokens)

    before = fingerprint(allocator)
    with pytest.raises(OSError, match="broken"):
        allocator.change_policy(Failing())
    assert fingerprint(allocator) == before
    assert victims(allocator) == [2, 0, 3, 1]


def test_whether_prompts_are_told_goes_with_the_policy(allocator):
    for policy, knows in ((AdaptiveSlotPolicy(), True), (LruSlotPolicy(), False)):
        allocator.change_policy(policy)
        assert allocator.knows_prompts is knows
        allocator.check_invariants()
