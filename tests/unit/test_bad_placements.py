"""Placements and policies of an embedder that raise or return invalid values."""

import math

import pytest
from context_rig import (
    BLOCK,
    add,
    assert_same_run,
    generate,
    make_config,
    make_context,
    prepared,
    refused,
    run_step,
    saved_prefix_lengths,
)

from mamba_cache.cache import LruSlotPolicy, PlacementFacts
from mamba_cache.cache.placement import placed_positions
from mamba_cache.context import RequestStatus
from mamba_cache.errors import InvalidArgumentError, MambaCacheError

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]


class Placement:
    """A placement that returns or raises ``given``."""

    def __init__(self):
        self.given = [2 * BLOCK]

    def positions(self, facts):
        if isinstance(self.given, BaseException):
            raise self.given
        if callable(self.given):
            return self.given()
        return self.given


def break_half_way():
    yield BLOCK
    raise OSError("broken")


@pytest.fixture
def placement():
    return Placement()


@pytest.fixture
def context(placement):
    """Return a context with a cached prefix, so that a request begins with a hit."""
    context = make_context(placement=placement)
    generate(context, PROMPT, 1)
    return context


RAISING = [OSError("broken"), KeyboardInterrupt(), break_half_way]
RUBBISH = [None, 5, [None], ["x"], "abc", [math.nan], [1.5], [True], [[8]], object()]


@pytest.mark.parametrize("given", RAISING)
def test_a_placement_that_raises_after_a_hit_holds_nothing(context, placement, given):
    placement.given = given
    with refused(context, (OSError, KeyboardInterrupt)):
        add(context, "a", PROMPT)
    placement.given = [BLOCK]
    assert add(context, "a", PROMPT).skip_tokens == 2 * BLOCK


@pytest.mark.parametrize("given", RUBBISH)
def test_positions_that_are_none_are_refused(context, placement, given):
    placement.given = given
    with refused(context, InvalidArgumentError, "the positions of Placement must be ints"):
        add(context, "a", PROMPT)


@pytest.mark.parametrize("given", [[-8, 10**30, 0], [], (p for p in (BLOCK, BLOCK))])
def test_positions_out_of_range_are_passed_over(context, placement, given):
    placement.given = given
    add(context, "a", PROMPT[::-1])
    run_step(context)
    assert saved_prefix_lengths(context, PROMPT[::-1]) in ([], [1])
    context.check_invariants()


def test_a_position_inside_a_block_is_its_beginning(placement):
    """Regression: without a context, slots found its state as that of the block before."""
    facts = PlacementFacts(26, BLOCK, 0, 4)
    placement.given = [BLOCK + 4, 2 * BLOCK - 1]
    assert placed_positions(placement, facts) == {BLOCK}


class Policy(LruSlotPolicy):
    """A policy that raises ``given`` or chooses these invalid slots."""

    given = None

    def choose(self, num_slots, slots, blocks, kv_blocks):
        if isinstance(self.given, BaseException):
            raise self.given
        chosen = super().choose(num_slots, slots, blocks, kv_blocks)
        return chosen if self.given is None else self.given


@pytest.mark.parametrize(
    "given",
    [OSError("broken"), KeyboardInterrupt(), [99], [-1], [0, 0], [0, 1, 2], "x", 5],
    ids=repr,
)
def test_a_policy_that_raises_or_chooses_wrongly_takes_nothing(given):
    policy = Policy()
    context = make_context(make_config(max_slots=2), slot_policy=policy)
    generate(context, PROMPT[::-1], 1)
    generate(context, PROMPT, 1)
    assert context.stats().free_slots == 0
    policy.given = given
    longer = [*PROMPT[: 3 * BLOCK], *PROMPT[::-1]]
    assert context.match(prepared(context, longer)).skip_tokens == 3 * BLOCK
    with pytest.raises((OSError, KeyboardInterrupt, TypeError, MambaCacheError)):
        add(context, "a", longer)
    assert context.stats().used_blocks == 0
    context.check_invariants()
    policy.given = None
    assert_same_run(generate(context, longer, 2), longer)


def test_a_chunk_that_could_not_be_planned_is_planned_later(placement):
    context = make_context(placement=placement)
    add(context, "x", [5] * 30, chunk_tokens=3, checkpoint_positions=[8])
    run_step(context)
    placement.given = OSError("broken")
    with refused(context, OSError, "broken"):
        context.schedule_prefill("x", checkpoint_positions=[16])
    placement.given = [3 * BLOCK]
    context.schedule_prefill("x")
    run_step(context)
    assert saved_prefix_lengths(context, [5] * 30) == [1, 3]


def test_a_plan_that_cannot_be_made_again_leaves_nothing_of_the_old_one(placement):
    """The slots that the chunk had reserved are released once."""
    context = make_context(placement=placement)
    placement.given = [BLOCK, 2 * BLOCK]
    generate(context, PROMPT[: BLOCK + 1], 1)
    assert add(context, "a", PROMPT[: 2 * BLOCK]).skip_tokens == BLOCK
    [block] = context.match(prepared(context, PROMPT[: BLOCK + 1])).block_ids
    context.slot_allocator.invalidate_block(block)
    placement.given = OSError("broken")
    with pytest.raises(OSError, match="broken"):
        context.begin_step()
    assert context.status("a") is RequestStatus.PREEMPTED
    context.check_invariants()
    assert context.stats().reserved_slots == 0
    placement.given = [BLOCK, 2 * BLOCK]
    context.resume_request("a")
    run_step(context)
    assert context.stats().saved_states == 1 + 2
