"""Ranks that hold shards of the same states, as processes that talk through gloo."""

import context_rig
import numpy as np
import pytest
import torch
import torch.distributed as dist
from shard_rig import (
    EVERY,
    assert_joined,
    assert_noticed,
    assert_resumed_alike,
    run_alone,
    run_shard,
    run_stored,
    run_tiered,
    run_undecided,
    spawn,
)
from slot_rig import full, make_allocator

from mamba_cache.errors import InvalidArgumentError, StepOrderError
from mamba_cache.integrations.distributed import (
    DivergenceGuard,
    GroupAgreement,
    agree_on_num_slots,
)
from mamba_cache.slots import ConsumedSlotPolicy
from mamba_cache.slots.fingerprint import fingerprint_of

NUM_STEPS = 200


@pytest.fixture(scope="module")
def stream_seed(request):
    """One stream for all tests of this file, new in each run."""
    seed = request.config.option.seed
    print(f"repeat with: pytest {request.node.nodeid} --seed={seed}")
    return seed


@pytest.fixture(scope="module")
def single(stream_seed):
    """Fingerprints and states of one process that holds everything."""
    return run_alone(stream_seed, NUM_STEPS)


@pytest.fixture(scope="module", params=[2, 4])
def reports(request, stream_seed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return spawn(run_shard, request.param, folder, stream_seed, NUM_STEPS, "gloo")


def test_all_ranks_decide_as_one_process_does(reports, single):
    assert len(set(single[0])) == NUM_STEPS
    for report in reports:
        assert report["fingerprints"] == single[0]


def test_shards_join_to_the_states_of_one_process(reports, single):
    assert_joined(reports, single[1])


@pytest.mark.parametrize("every", EVERY)
def test_every_rank_reports_a_divergence_in_time(reports, every):
    assert_noticed(reports, every)


def test_all_ranks_take_the_smallest_number_of_slots(reports):
    offered = [10 + (rank * 7 + 3) % 5 for rank in range(len(reports))]
    assert len(set(offered)) > 1
    assert [report["num_slots"] for report in reports] == [min(offered)] * len(reports)


@pytest.fixture
def alone(tmp_path):
    """A group of this process alone."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


class Counting:
    """Something to watch that counts how often it is asked."""

    asked = 0

    def fingerprint(self):
        self.asked += 1
        return self.asked


@pytest.mark.parametrize(("every", "asked"), [(1, 32), (2, 32), (5, 8), (17, 2)])
def test_only_the_steps_that_are_due_cost_a_fingerprint(alone, every, asked):
    watched = Counting()
    guard = DivergenceGuard(watched, every=every)
    for _ in range(32):
        guard.check()
    assert watched.asked == asked


def test_tiers_of_ranks_that_do_not_agree_are_refused(tmp_path, stream_seed):
    """They would resume at different boundaries: each at what has arrived in its own tier."""
    for said in spawn(run_undecided, 2, tmp_path, stream_seed, 0, "gloo"):
        assert list(said) == ["tiers"]
        assert "several ranks have tiers (host) and do not agree" in said["tiers"]
        assert "agreement=GroupAgreement(group)" in said["tiers"]


@pytest.mark.parametrize("run", [run_tiered, run_stored])
def test_ranks_resume_alike_from_tiers_that_hold_other_things(run, tmp_path, stream_seed):
    assert_resumed_alike(spawn(run, 2, tmp_path, stream_seed, 60, "gloo"))


def test_tiers_of_one_rank_are_none_of_the_guards_business(alone):
    config = context_rig.make_config(num_host_blocks=4, num_host_states=2)
    DivergenceGuard(context_rig.make_context(config))


@pytest.mark.parametrize("given", [0, -1, 2.0, True])
def test_bad_arguments_are_refused(alone, given):
    with pytest.raises(InvalidArgumentError, match=f"every must be an int >= 1, got {given}"):
        DivergenceGuard(Counting(), every=given)
    if given != 0:
        with pytest.raises(InvalidArgumentError, match=f"must be an int >= 0, got {given}"):
            agree_on_num_slots(given)


def test_a_rank_alone_agrees_with_itself(alone):
    assert GroupAgreement().largest([1.0, 0.0, float("inf")]) == [1.0, 0.0, float("inf")]


def test_ranks_agree_under_another_default_device(alone):
    watched = Counting()
    with torch.device("meta"):
        guard = DivergenceGuard(watched, every=1)
        for _ in range(3):
            guard.check()
    assert watched.asked == 3


def test_without_a_group_there_is_nobody_to_agree_with():
    calls = lambda: DivergenceGuard(Counting()), lambda: agree_on_num_slots(3), GroupAgreement
    for call in calls:
        with pytest.raises(StepOrderError, match="init_process_group first"):
            call()


def swap_free_slots(allocator):
    allocator.free_slots[[0, 1]] = allocator.free_slots[[1, 0]].clone()


def exchange_slots(allocator):
    slots = [allocator.get_slot(0), allocator.get_slot(1)]
    allocator.block_to_slot[[1, 0]] = torch.tensor(slots, dtype=torch.int32)
    allocator.slot_to_block[slots] = torch.tensor([1, 0], dtype=torch.int32)
    allocator.check_invariants()


def reserve_for_another(allocator):
    [slot] = allocator.pool.reserved
    allocator.pool.reserved[slot] = 9


CHANGES = {
    "two blocks exchange their slots": exchange_slots,
    "a slot is reserved for another block": reserve_for_another,
    "a slot is freed": lambda a: a.invalidate_block(0),
    "a slot is given": lambda a: a.allocate_slots_batch([9]),
    "a slot is reserved": lambda a: a.reserve_slots([9]),
    "a slot is read": lambda a: a.pin_slots([a.get_slot(1)]),
    "a hash is gone": lambda a: a.hash_to_block_id.pop(101),
    "a hash finds another block": lambda a: a.hash_to_block_id.update({101: 2}),
    "the policy remembers a use": lambda a: a.note_consumed([a.get_slot(1)]),
    "free slots are in another order": swap_free_slots,
    "a block points elsewhere": lambda a: a.block_to_slot.__setitem__(1, -1),
}


def prepared():
    allocator = full(slots=6, policy=ConsumedSlotPolicy())
    allocator._invalidate_blocks_batch([3, 4, 5])
    allocator.reserve_slots([8])
    return allocator


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_decides_shows_in_the_fingerprint(change):
    allocator = prepared()
    before = allocator.fingerprint()
    assert before == prepared().fingerprint()
    change(allocator)
    assert allocator.fingerprint() != before
    allocator.reset()
    assert allocator.fingerprint() == make_allocator(6, policy=ConsumedSlotPolicy()).fingerprint()


def test_the_order_of_dicts_does_not_show_in_the_fingerprint():
    one, other = prepared(), prepared()
    for allocator in (one, other):
        allocator.reserve_slots([9])
    for table in (other.hash_to_block_id, other.pool.reserved):
        pairs = list(table.items())
        table.clear()
        table.update(reversed(pairs))
    assert list(one.pool.reserved) != list(other.pool.reserved)
    assert one.fingerprint() == other.fingerprint()


def test_numbers_of_two_parts_are_not_those_of_one():
    assert len({fingerprint_of([1, 2]), fingerprint_of([1], [2]), fingerprint_of([1, 2], [])}) == 3


def test_fingerprints_fit_the_tensors_that_carry_them():
    for seed in range(50):
        allocator = make_allocator(3)
        allocator.register_block_hashes_batch([0], [np.random.default_rng(seed).integers(1, 2**62)])
        assert 0 <= allocator.fingerprint() < 2**63


def two_steps(token=3, prompt=range(10), request_id="any name", **changes):
    """A context after a prefill and one decode."""
    config = context_rig.make_config(hash_secret=b"the same", **changes)
    context = context_rig.make_context(config)
    context_rig.add(context, request_id, list(prompt))
    for sampled in (token, 5):
        step = context.begin_step()
        context_rig.MODEL.forward(step.metadata, context)
        context.commit_step({request_id: sampled})
    return context


@pytest.mark.parametrize("cached", [True, False])
def test_a_contexts_fingerprint_is_that_of_its_requests(cached):
    changes = {"enable_prefix_caching": cached, "max_slots": 0}
    expected = two_steps(**changes).fingerprint()
    assert two_steps(request_id="another name", **changes).fingerprint() == expected
    assert two_steps(token=4, **changes).fingerprint() != expected
    # Far back, a hash tells; without hashes, the last block's tokens do.
    other = [7, *range(1, 10)] if cached else range(1, 11)
    assert two_steps(prompt=other, **changes).fingerprint() != expected
    assert two_steps(prompt=range(11), **changes).fingerprint() != expected


def test_a_contexts_fingerprint_covers_its_slots_and_blocks():
    expected = two_steps().fingerprint()
    context = two_steps()
    context.slot_allocator.reset()
    assert context.fingerprint() != expected
    context = two_steps()
    context.kv_block_allocator.allocate_memory_blocks(1)
    assert context.fingerprint() != expected


def test_a_preemption_shows_in_a_contexts_fingerprint():
    one, other = two_steps(), two_steps()
    assert one.fingerprint() == other.fingerprint()
    one.preempt("any name")
    assert one.fingerprint() != other.fingerprint()
    other.preempt("any name")
    assert one.fingerprint() == other.fingerprint()
