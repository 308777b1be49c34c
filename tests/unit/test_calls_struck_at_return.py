"""A call of an allocator alone whose result nobody gets: what it changed is known to be in doubt.

What a caller holds the allocator cannot know. So an interrupt as a call returns, or in the middle
of its change, poisons the allocator until it is reset. ``tests/property/test_interrupts.py``
strikes at more moments.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from kv_rig import cache, prefix
from slot_rig import make_allocator, make_pool

from mamba_cache.blocks import KVBlockAllocator
from mamba_cache.config import EvictionPolicy
from mamba_cache.errors import InvalidArgumentError, PoisonedError
from mamba_cache.slots import AdaptiveSlotPolicy, MambaSlotAllocator, PromptFacts, SlotPool


class StruckAtReturn:
    """Interrupts a method of a class as it returns, once."""

    def __init__(self, kind, name):
        function = getattr(kind, name)
        self.code = getattr(function, "__wrapped__", function).__code__
        self.has_struck = False

    def __enter__(self):
        self._previous = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self._previous)

    def _trace(self, frame, event, _):
        if event == "call":
            return self._trace if frame.f_code is self.code else None
        if event == "return" and not self.has_struck:
            self.has_struck = True
            raise KeyboardInterrupt("struck")
        return self._trace


def struck(kind, name, call):
    strike = StruckAtReturn(kind, name)
    with strike, pytest.raises(KeyboardInterrupt, match="struck"):
        call()
    assert strike.has_struck


BLOCK_CALLS = {
    "allocate": ("allocate_memory_blocks", lambda pool, _: pool.allocate_memory_blocks(2)),
    "allocate, evicting": (
        "allocate_memory_blocks",
        lambda pool, _: pool.allocate_memory_blocks(7),
    ),
    "evict": ("_forget", lambda pool, _: pool.allocate_memory_blocks(7)),
    "retain": ("retain_memory_blocks", lambda pool, held: pool.retain_memory_blocks(held["used"])),
    "release": (
        "release_memory_blocks",
        lambda pool, held: pool.release_memory_blocks(held["used"]),
    ),
    "register": (
        "_register_all",
        lambda pool, held: pool.register_kv_block_hashes(held["used"], prefix(7, 8)),
    ),
    "deregister": ("_forget", lambda pool, held: pool.deregister_blocks(held["cached"])),
    "leave": ("begin_leaving", lambda pool, held: pool.begin_leaving(held["cached"])),
    "have left": ("end_leaving", lambda pool, held: pool.end_leaving(held["leaving"])),
    "arrive": ("begin_arriving", lambda pool, _: pool.begin_arriving(1)),
    "have arrived": (
        "_free_or_cache",
        lambda pool, held: pool.complete_arriving(held["arriving"], prefix(9)),
    ),
    "not arrive": ("cancel_arriving", lambda pool, held: pool.cancel_arriving(held["arriving"])),
}


def blocks_in_use(policy, *, is_observed):
    """A pool with blocks of each kind."""
    pool = KVBlockAllocator(13, eviction_policy=policy)
    if is_observed:
        pool.listeners.add(lambda event: None)
    held = {"used": pool.allocate_memory_blocks(2), "arriving": pool.begin_arriving(1)}
    gone = pool.allocate_memory_blocks(1)
    pool.register_kv_block_hashes(gone, prefix(5))
    held["leaving"] = pool.begin_leaving(gone)
    held["cached"] = cache(pool, 1, 2)
    if policy is EvictionPolicy.REF_ZERO:  # so only what has arrived is cached
        copy = pool.begin_arriving(2)
        pool.complete_arriving(copy, prefix(1, 2))
        held["cached"] = list(copy.ids)
    return pool, held


@pytest.mark.parametrize("is_observed", [False, True])
@pytest.mark.parametrize("policy", EvictionPolicy)
@pytest.mark.parametrize("name", BLOCK_CALLS)
def test_a_pool_of_blocks_is_poisoned(name, policy, is_observed):
    method, call = BLOCK_CALLS[name]
    call(*blocks_in_use(policy, is_observed=is_observed))  # as it is meant
    pool, held = blocks_in_use(policy, is_observed=is_observed)
    struck(KVBlockAllocator, method, lambda: call(pool, held))
    with pytest.raises(PoisonedError, match="reset"):
        pool.allocate_memory_blocks(0)
    pool.reset()
    assert len(pool.allocate_memory_blocks(12)) == 12


SLOT_CALLS = {
    "allocate": ("allocate_slots_batch", lambda pool, _: pool.allocate_slots_batch([8])),
    "reserve": ("reserve_slots", lambda pool, _: pool.reserve_slots([8])),
    "evict": ("_evict", lambda pool, _: pool.reserve_slots([8])),
    "commit": (
        "commit_reserved",
        lambda pool, held: pool.commit_reserved(held["reserved"], [1], [21]),
    ),
    "cancel": ("cancel_reserved", lambda pool, held: pool.cancel_reserved(held["reserved"])),
    "register": (
        "register_block_hashes_batch",
        lambda pool, _: pool.register_block_hashes_batch([0], [31]),
    ),
    "leave": ("begin_leaving", lambda pool, _: pool.begin_leaving([pool.get_slot(0)])),
    "have left": ("end_leaving", lambda pool, held: pool.end_leaving(held["leaving"])),
    "arrive": ("begin_arriving", lambda pool, _: pool.begin_arriving([8])),
    "have arrived": (
        "complete_arriving",
        lambda pool, held: pool.complete_arriving(held["arriving"], [3], [23]),
    ),
    "not arrive": ("cancel_arriving", lambda pool, held: pool.cancel_arriving(held["arriving"])),
    "pin": ("pin_slots", lambda pool, _: pool.pin_slots([pool.get_slot(0)])),
    "unpin": ("unpin_slots", lambda pool, held: pool.unpin_slots(held["leases"])),
    "invalidate": ("_invalidate_blocks_batch", lambda pool, _: pool.invalidate_block(0)),
    "deregister": (
        "on_kv_blocks_deregistered",
        lambda pool, _: pool.on_kv_blocks_deregistered([0], [20]),
    ),
    "evict for the caller": ("_evict", lambda pool, _: pool._evict_lru_slots_batch(1)),
}


def slots_in_use(*, is_observed=False):
    """Five slots: one cached, and one each that is reserved, leaving, arriving and pinned."""
    pool = make_pool(5, 9)
    if is_observed:
        pool.listeners.add(lambda event: None)
    held = {"reserved": pool.reserve_slots([1])}
    [gone] = pool.allocate_slots_batch([2])
    held["leaving"] = pool.begin_leaving([gone])
    held["arriving"] = pool.begin_arriving([3])
    held["leases"] = pool.pin_slots(pool.allocate_slots_batch([4]))
    [cached] = pool.allocate_slots_batch([0])
    pool.register_block_hashes_batch([0], [20])
    pool.policy.victims = [cached]
    return pool, held


@pytest.mark.parametrize("is_observed", [False, True])
@pytest.mark.parametrize("name", SLOT_CALLS)
def test_a_pool_of_slots_is_poisoned(name, is_observed):
    method, call = SLOT_CALLS[name]
    call(*slots_in_use(is_observed=is_observed))  # as it is meant
    pool, held = slots_in_use(is_observed=is_observed)
    struck(SlotPool, method, lambda: call(pool, held))
    with pytest.raises(PoisonedError, match="reset"):
        pool.reserve_slots([])
    pool.reset()
    pool.policy.victims = []
    assert len(pool.allocate_slots_batch(range(5))) == 5


STATE_CALLS = {
    "store": ("store_from_tensors", lambda slots: slots.store_from_tensors(0, 0, *states(slots))),
    "record": (
        "compute_and_store_offsets",
        lambda slots: slots.compute_and_store_offsets(
            SimpleNamespace(prompt_tokens=[0] * 4, finished_chunk_token_count=0), 0, 0, 4, 0, [], 1
        ),
    ),
    "forget": ("_clear_intermediate_state", lambda slots: slots._clear_intermediate_state()),
}


def states(slots):
    return slots.ssm_states[0, 0].clone(), slots.conv_states[0, 0].clone()


def slots_with_states():
    slots = make_allocator(
        2,
        block_size_tokens=4,
        mamba_chunk_size=4,
        ssm_chunk_alignment=4,
        max_mamba_intermediate_states_per_step=2,
        request_to_kv_block_ids=torch.zeros(4, 3, dtype=torch.int32),
        batch_dimensions=SimpleNamespace(prefill_req_count=1, decode_req_count=0),
        paused_request_count=0,
    )
    slots.allocate_slots_batch([0])
    return slots


@pytest.mark.parametrize("name", STATE_CALLS)
def test_slots_with_states_are_poisoned(name):
    method, call = STATE_CALLS[name]
    call(slots_with_states())  # as it is meant
    slots = slots_with_states()
    struck(MambaSlotAllocator, method, lambda: call(slots))
    with pytest.raises(PoisonedError, match="reset"):
        slots.reserve_slots([])
    slots.reset()
    assert slots.reserve_slots([]) == []


@pytest.mark.parametrize("name", ["commit", "deregister", "invalidate", "register", "have arrived"])
def test_an_observer_that_raises_leaves_slots_in_order(name):
    """All is done by then: whoever is not observing goes on."""

    def failing(event):
        raise OSError("observed")

    pool, held = slots_in_use()
    pool.listeners.add(failing)
    with pytest.raises(OSError, match="observed"):
        SLOT_CALLS[name][1](pool, held)
    pool.check_invariants()
    assert pool.reserve_slots([]) == []


def test_a_policy_that_breaks_off_while_it_is_told_of_a_request_poisons():
    class BreaksOff(AdaptiveSlotPolicy):
        def on_request(self, facts):
            super().on_request(facts)
            raise InvalidArgumentError("not this one")

    pool = SlotPool(2, KVBlockAllocator(9), policy=BreaksOff())
    with pytest.raises(InvalidArgumentError, match="not this one"):
        pool.begin_request(PromptFacts([1, 2], 4, 0, 2))
    with pytest.raises(PoisonedError, match="begin_request"):
        pool.reserve_slots([0])
