"""Ranks that hold shards of the same states, as processes that talk through gloo."""

import pytest
import torch
import torch.distributed as dist
from shard_rig import assert_joined, run_alone, run_shard, spawn

from mamba_cache.errors import InvalidArgumentError, StepOrderError
from mamba_cache.integrations.distributed import GroupAgreement, agree_on_num_slots

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


@pytest.fixture(scope="module")
def reports(stream_seed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return spawn(run_shard, 2, folder, stream_seed, NUM_STEPS, "gloo")


def test_all_ranks_decide_as_one_process_does(reports, single):
    assert len(set(single[0])) == NUM_STEPS
    for report in reports:
        assert report["fingerprints"] == single[0]


def test_shards_join_to_the_states_of_one_process(reports, single):
    assert_joined(reports, single[1])


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


@pytest.mark.parametrize("given", [-1, 2.0, True])
def test_bad_arguments_are_refused(alone, given):
    with pytest.raises(InvalidArgumentError, match=f"must be an int >= 0, got {given}"):
        agree_on_num_slots(given)


def test_a_rank_alone_agrees_with_itself(alone):
    assert GroupAgreement().largest([1.0, 0.0, float("inf")]) == [1.0, 0.0, float("inf")]


def test_ranks_agree_under_another_default_device(alone):
    with torch.device("meta"):
        assert agree_on_num_slots(7) == 7
        assert GroupAgreement().largest([1.0]) == [1.0]


def test_an_agreement_needs_a_process_group():
    for call in (lambda: agree_on_num_slots(3), GroupAgreement):
        with pytest.raises(StepOrderError, match="init_process_group first"):
            call()
