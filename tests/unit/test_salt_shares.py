"""A share of slots for each salt: one cannot push out the states of all others."""

import numpy as np
import pytest
from context_rig import BLOCK, VOCAB, generate, make_config, make_context, run_step
from hypothesis import given
from hypothesis import strategies as st
from tier_rig import make_tiered

from mamba_cache.blocks import KVBlockAllocator, compute_block_hashes
from mamba_cache.context import Request
from mamba_cache.errors import InvalidArgumentError, InvariantError
from mamba_cache.slots import (
    AdaptiveSlotPolicy,
    ConsumedSlotPolicy,
    LruSlotPolicy,
    PromptFacts,
    RefZeroSlotPolicy,
    ScoreSlotPolicy,
    SlotPool,
    StateProposal,
)

POLICIES = [
    LruSlotPolicy, RefZeroSlotPolicy, ConsumedSlotPolicy, ScoreSlotPolicy, AdaptiveSlotPolicy,
]  # fmt: skip


def owned(pool, owner):
    return {slot for slot, name in pool._owner_of.items() if name == owner}


@given(
    policy=st.sampled_from(POLICIES),
    share=st.integers(0, 6),
    calls=st.lists(
        st.tuples(st.sampled_from("aab"), st.integers(1, 3), st.sampled_from(["commit", "cancel"])),
        min_size=10,
        max_size=40,
    ),
)
def test_who_has_its_share_evicts_no_slot_of_others(policy, share, calls):
    pool = SlotPool(6, KVBlockAllocator(200), policy=policy())
    pool.max_owned = share
    next_block = 0
    for owner, count, then in calls:
        blocks = list(range(next_block, next_block + count))
        next_block += count
        prompt = pool.begin_request(PromptFacts([1 + b for b in blocks], 16, 0, count))
        proposals = [StateProposal(prompt, n + 1, is_asked=owner == "a") for n in range(count)]
        own, others, num_free = owned(pool, owner), owned(pool, "ab".strip(owner)), pool.free_count
        slots = pool.reserve_slots(blocks, proposals, owner=owner)
        if len(own) + count > share:
            lost = others - owned(pool, "ab".strip(owner))
            assert len(lost) <= max(0, share - len(own))
        taken = [slot for slot in slots if slot is not None]
        assert owned(pool, owner) >= set(taken)
        assert len(owned(pool, owner)) <= max(share, len(own), len(own) + num_free)
        pairs = [(s, b) for s, b in zip(slots, blocks, strict=True) if s is not None]
        if then == "commit":
            pool.commit_reserved(taken, [b for _, b in pairs], [b + 1 for _, b in pairs])
        else:
            pool.cancel_reserved(taken)
        pool.check_invariants()
    pool.reset()
    assert not pool._owner_of


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_of_one_salt_leaves_the_others_their_share(policy, rng):
    config = make_config(num_kv_blocks=2_000, max_slots=8, max_salt_share=0.5)
    context = make_context(config, slot_policy=policy())
    prompts = [rng.integers(0, VOCAB, 2 * BLOCK).tolist() for _ in range(4)]

    def found():
        requests = [Request(request_id=0, prompt_tokens=[*p, 1], cache_salt="b") for p in prompts]
        return sum(context.match(request).skip_tokens == 2 * BLOCK for request in requests)

    for prompt in prompts:
        for _ in range(3):
            generate(context, prompt, 1, cache_salt="b", checkpoint_positions=[2 * BLOCK])
    before = found()
    for _ in range(40):
        flood = rng.integers(0, VOCAB, 3 * BLOCK).tolist()
        generate(context, flood, 1, cache_salt="a", checkpoint_positions=[BLOCK, 2 * BLOCK])
    context.check_invariants()
    num_left = len(owned(context.slot_allocator, "b"))
    assert before == 4
    assert num_left >= 4
    assert len(owned(context.slot_allocator, "a")) in (3, 4)  # it saves up to three at once
    assert found() >= 1


def test_a_flood_of_one_salt_leaves_the_others_their_blocks():
    """Of 41 blocks one is nobody's, and 20 are half."""
    context = make_context(make_config(num_kv_blocks=41, max_slots=8, max_salt_share=0.5))
    mine = [[first, *range(1, 2 * BLOCK)] for first in range(10)]
    for prompt in mine:
        generate(context, [token % VOCAB for token in prompt], 1, cache_salt="b")
    for first in range(40):
        flood = [(first * (i + 3) + i * i) % VOCAB for i in range(3 * BLOCK)]
        generate(context, flood, 1, cache_salt="a")
    requests = [
        Request(request_id=0, prompt_tokens=[token % VOCAB for token in prompt], cache_salt="b")
        for prompt in mine
    ]
    assert sum(context.match(request).kv_matched_blocks for request in requests) >= 18


def blocks_of(pool, *, owner, seed, count, **options):
    """Caches a prefix of some blocks that belongs to an owner."""
    blocks = pool.allocate_memory_blocks(count, owner=owner)
    tokens = [(seed + 1) * (i + 7) % 1009 for i in range(count)]
    hashes = compute_block_hashes(tokens, 1, cache_salt=f"{owner} {seed}")
    pool.register_kv_block_hashes(blocks, hashes, owner=owner, **options)
    pool.release_memory_blocks(blocks)
    pool.check_invariants()
    return hashes


@given(
    share=st.integers(0, 12),
    calls=st.lists(st.tuples(st.sampled_from("aabc"), st.integers(1, 4)), min_size=4, max_size=40),
)
def test_cached_blocks_of_who_has_less_than_the_share_go_to_nobody_who_has_more(share, calls):
    pool = KVBlockAllocator(13, max_owned=share)
    cached = {name: [] for name in "abc"}
    for seed, (owner, count) in enumerate(calls):
        had = {name: count_found(pool, cached[name]) for name in "abc"}
        cached[owner].append(blocks_of(pool, owner=owner, seed=seed, count=count))
        for name in "abc".replace(owner, ""):
            lost = had[name] - count_found(pool, cached[name])
            if lost and had[name] <= share:
                assert count_found(pool, cached[owner]) <= max(share, count)
    assert sum(count_found(pool, each) for each in cached.values()) <= 12


def count_found(pool, prefixes):
    return sum(len(pool.match_prefix(hashes)) for hashes in prefixes)


def test_a_flood_of_one_owner_leaves_the_others_their_blocks():
    pool = KVBlockAllocator(21, max_owned=10)
    kept = [blocks_of(pool, owner="b", seed=n, count=4) for n in range(2)]
    for seed in range(30):
        blocks_of(pool, owner="a", seed=seed, count=5)
        assert count_found(pool, kept) == 8
    plain = KVBlockAllocator(21)
    gone = [blocks_of(plain, owner="b", seed=n, count=4) for n in range(2)]
    for seed in range(30):
        blocks_of(plain, owner="a", seed=seed, count=5)
    assert count_found(plain, gone) == 0


def test_who_has_too_many_gives_them_up_to_others_first():
    pool = KVBlockAllocator(11, max_owned=4)
    first = blocks_of(pool, owner="b", seed=0, count=3)
    blocks_of(pool, owner="a", seed=1, count=7)  # free ones anybody may have
    other = blocks_of(pool, owner="c", seed=2, count=3)
    assert count_found(pool, [first, other]) == 6
    blocks_of(pool, owner=None, seed=3, count=2)  # nobody has too many any more: the oldest go
    assert count_found(pool, [other]) == 3
    assert count_found(pool, [first]) == 1


def test_what_runs_has_the_blocks_that_it_needs():
    pool = KVBlockAllocator(11, max_owned=2)
    other = blocks_of(pool, owner="b", seed=0, count=6)
    assert len(pool.allocate_memory_blocks(8, owner="a")) == 8
    assert count_found(pool, [other]) == 2


def test_blocks_with_states_of_who_has_too_many_go_as_their_policy_says(rng):
    """And one whose state has gone meanwhile goes first."""
    states = {}

    class States:
        def has_state(self, block):
            return block in states

        def have_states(self, blocks):
            return np.isin(blocks, [*states])

        def first_to_go(self, blocks):
            return min(blocks.tolist(), key=states.get)

    pool = KVBlockAllocator(9, max_owned=2)
    pool.ask_states(States)
    names = [blocks_of(pool, owner=o, seed=n, count=1) for n, o in enumerate("aaaabbbb")]
    [worst, best] = [pool.find_block(names[n][0]) for n in (2, 1)]
    states.update({best: 9, worst: 1})
    pool.release_memory_blocks(pool.allocate_memory_blocks(1, owner="a"))
    assert [count_found(pool, [each]) for each in names] == [0, 1, 1, 1, 1, 1, 1, 1]
    pool.allocate_memory_blocks(2, owner="c")
    assert [count_found(pool, [each]) for each in names] == [0, 1, 1, 0, 1, 1, 1, 1]
    pool.allocate_memory_blocks(1, owner="a")
    assert [count_found(pool, [each]) for each in names] == [0, 1, 0, 0, 1, 1, 1, 1]
    pool.check_invariants()


def test_owners_are_counted_and_proved():
    pool = KVBlockAllocator(9, max_owned=2)
    blocks_of(pool, owner="a", seed=0, count=3)
    pool._shares._num_owned["a"] = 1
    with pytest.raises(InvariantError, match="owners are counted right"):
        pool.check_invariants()
    pool.reset()
    pool.check_invariants()
    for call in (
        lambda: pool.allocate_memory_blocks(1, owner=[]),
        lambda: pool.register_kv_block_hashes([], [], owner=[]),
    ):
        with pytest.raises(InvalidArgumentError, match=r"an owner must be hashable, got \[\]"):
            call()
    for bad in (-1, 0.5):
        with pytest.raises(InvalidArgumentError, match="max_owned must be an int"):
            KVBlockAllocator(9, max_owned=bad)


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_a_flood_of_one_salt_leaves_the_others_their_keys_and_values(policy, rng):
    """KV blocks are short here, and take the states along where they go."""
    found = {}
    prompts = [rng.integers(0, VOCAB, 3 * BLOCK).tolist() for _ in range(3)]
    for share in (1.0, 0.5):
        context = make_context(
            make_config(num_kv_blocks=24, max_slots=64, max_salt_share=share, slot_policy=policy)
        )
        for prompt in prompts:
            for _ in range(2):
                generate(context, [*prompt, 1], 1, cache_salt="b")
        for _ in range(20):
            generate(context, rng.integers(0, VOCAB, 4 * BLOCK).tolist(), 3, cache_salt="a")
            context.check_invariants()
        requests = [Request(request_id=0, prompt_tokens=[*p, 1], cache_salt="b") for p in prompts]
        found[share] = sum(context.match(request).kv_matched_blocks for request in requests)
    assert found == {1.0: 0, 0.5: 9}


def test_salts_show_in_the_fingerprint_but_not_their_names():
    def pool(*owners):
        made = SlotPool(4, KVBlockAllocator(9))
        made.max_owned = 2
        for block, owner in enumerate(owners):
            made.reserve_slots([block], owner=owner)
        return made.fingerprint()

    assert pool("x", "y") == pool("p", "q") != pool("x", "x")


def test_owners_of_nothing_are_found():
    pool = SlotPool(4, KVBlockAllocator(9))
    pool.max_owned = 2
    [slot] = pool.reserve_slots([1], owner="x")
    pool._owner_of[slot - 1] = "x"
    with pytest.raises(InvariantError, match="have an owner, but no state"):
        pool.check_invariants()


def test_a_share_is_a_number_up_to_1():
    with pytest.raises(InvalidArgumentError, match="max_salt_share must be a number in"):
        make_config(max_salt_share=np.nan)
    assert make_context(make_config()).slot_allocator.max_owned is None


def test_whether_a_slot_can_be_had_is_known_before():
    """A state is loaded only if it can: whoever has no share gets free slots alone."""
    pool = SlotPool(2, KVBlockAllocator(20))
    pool.max_owned = 0
    for block in (0, 1):
        assert pool.can_reserve(block, [], owner="b")
        pool.commit_reserved(pool.reserve_slots([block], owner="b"), [block], [block + 1])
    assert not pool.can_reserve(2, [], owner="a")
    assert pool.reserve_slots([2], owner="a") == [None]
    assert pool.can_reserve(2, [], owner="b")  # by evicting its own
    assert pool.reserve_slots([2], owner="b") != [None]


def test_up_to_its_share_a_salt_takes_slots_of_others():
    pool = SlotPool(4, KVBlockAllocator(20))
    pool.max_owned = 2
    pool.commit_reserved(pool.reserve_slots([0], owner="a"), [0], [1])
    for block in (1, 2, 3):
        pool.commit_reserved(pool.reserve_slots([block], owner="b"), [block], [block + 1])
    first = owned(pool, "a")
    [second] = pool.reserve_slots([4], owner="a")
    assert owned(pool, "a") == first | {second}
    assert len(owned(pool, "b")) == 2
    pool.commit_reserved([second], [4], [5])
    assert {*pool.reserve_slots([5], owner="a")} < first | {second}  # one more is one of its own
    assert len(owned(pool, "b")) == 2


def test_a_load_asks_for_the_share_of_its_own_salt():
    """Whoever has none may evict others' states; this one's share is being written."""
    context = make_tiered(max_slots=2, max_salt_share=0.5)
    prompt = [1 + (5 * i) % 12 for i in range(2 * BLOCK + 1)]
    generate(context, prompt, 1, request_id="a", cache_salt="a")
    context.wait_for_tiers()
    allocator = context.slot_allocator
    allocator.invalidate_block(int(allocator.pool._slot_to_block.max()))
    for others in (prompt[::-1], prompt[1:]):
        generate(context, others, 1, request_id="b", cache_salt="b")
        if allocator.free_count == 1:
            break
    running = Request(request_id="running", prompt_tokens=[9] * (BLOCK + 1), cache_salt="a")
    context.add_request(running)
    assert allocator.free_count == 0
    again = Request(request_id="again", prompt_tokens=prompt, cache_salt="a")
    assert context.add_request(again).skip_tokens == 0
    run_step(context)
    context.check_invariants()


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_a_prompt_whose_salt_has_no_share_left_is_computed_rather_than_loaded(policy):
    context = make_tiered(max_slots=1, max_salt_share=0.0, slot_policy=policy)
    prompt = [1 + (5 * i) % 12 for i in range(3 * BLOCK + 1)]
    first = generate(context, prompt, 1, request_id="a", cache_salt="a")
    context.wait_for_tiers()
    # Its state is on the host alone then, and another's takes its slot.
    context.slot_allocator.invalidate_block(int(context.slot_allocator.pool._slot_to_block[0]))
    generate(context, prompt[::-1], 1, request_id="b", cache_salt="b")
    assert context.slot_allocator.free_count == 0
    again = generate(context, prompt, 1, request_id="again", cache_salt="a")
    assert again[2].skip_tokens == 0
    assert again[0] == first[0]
    context.check_invariants()


def test_blocks_of_nobody_count_in_no_share():
    """Where owners have shares, too: they are cached and evicted as ever."""
    blocks = KVBlockAllocator(4, max_owned=1)
    taken = blocks.allocate_memory_blocks(3)
    blocks.register_kv_block_hashes(taken, [11, 12, 13], digests=[b"a", b"b", b"c"])
    blocks.release_memory_blocks(taken)
    assert blocks.num_cached_blocks == 3
    blocks.check_invariants()
    assert sorted(blocks.allocate_memory_blocks(3)) == sorted(taken)
    assert blocks.num_cached_blocks == 0
    blocks.check_invariants()
