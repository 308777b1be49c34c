"""Slots that are reserved, pinned and consumed: what the package's own context asks for."""

import pytest
from fingerprints import fingerprint
from slot_rig import make_allocator

from mamba_cache.cache import RefZeroSlotPolicy, ScoreSlotPolicy
from mamba_cache.errors import (
    DoubleFreeError,
    InvalidArgumentError,
)


def test_what_was_reserved_before_a_reset_is_neither_committed_nor_cancelled_after_it():
    allocator = make_allocator(2)
    old = allocator.reserve_slots([5, 6])
    allocator.reset()
    assert allocator.num_reserved_slots == 0
    with pytest.raises(DoubleFreeError):
        allocator.cancel_reserved(old)
    with pytest.raises(InvalidArgumentError, match="reserved"):
        allocator.commit_reserved(old, [5, 6], [55, 66])
    assert (allocator.num_cached_slots, allocator.hash_to_block_id) == (0, {})
    allocator.check_invariants()


def test_the_policy_hears_of_the_states_that_were_stored_and_of_no_others():
    heard = []

    class Listener(RefZeroSlotPolicy):
        def on_stored(self, slots, saved_tokens):
            heard.extend(zip(slots, saved_tokens, strict=True))

    allocator = make_allocator(4, policy=Listener())
    [housed] = allocator.allocate_slots_batch([0])
    allocator.allocate_slots_batch([0])
    assert heard == [(housed, 1)]
    first, second, third = allocator.reserve_slots([1, 2, 3])
    assert heard == [(housed, 1)]
    allocator.commit_reserved([second, first], [0, 1], [10, 11], saved_tokens=[256, 512])
    assert heard == [(housed, 1), (first, 512)]
    allocator.commit_reserved([third], [3], [13])
    assert heard[2:] == [(third, 1)]


@pytest.mark.parametrize(
    ("saved_tokens", "complaint"),
    [([1, 2], "equally long"), ([-1], r"got \[-1\]"), ([2**31], "got"), ([1.5], "got 1.5")],
)
def test_saved_tokens_are_checked_before_anything_is_committed(saved_tokens, complaint):
    allocator = make_allocator(2, policy=ScoreSlotPolicy())
    slots = allocator.reserve_slots([1])
    before = fingerprint(allocator)
    with pytest.raises(InvalidArgumentError, match=complaint):
        allocator.commit_reserved(slots, [1], [11], saved_tokens=saved_tokens)
    assert fingerprint(allocator) == before
    assert allocator.commit_reserved(slots, [1], [11], saved_tokens=[2**31 - 1]) == slots
