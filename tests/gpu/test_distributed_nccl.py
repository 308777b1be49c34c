"""Ranks as processes with one GPU each that communicate through NCCL."""

import pytest
import torch
import torch.distributed as dist
from shard_rig import assert_joined, run_alone, run_shard, spawn

from mamba_cache.integrations.distributed import agree_on_num_slots

pytestmark = pytest.mark.gpu

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
NUM_STEPS = 50


@needs_two
def test_shards_on_two_gpus_decide_and_join_as_one_process(tmp_path, seed):
    reports = spawn(run_shard, 2, tmp_path, seed, NUM_STEPS, "nccl")
    fingerprints, snapshots = run_alone(seed, NUM_STEPS)
    assert [report["fingerprints"] for report in reports] == [fingerprints] * 2
    assert_joined(reports, snapshots)
    assert [report["num_slots"] for report in reports] == [10, 10]


@pytest.fixture
def alone(tmp_path):
    """A process group of this process and its GPU only."""
    dist.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path}/rendezvous",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )
    yield
    dist.destroy_process_group()


def test_the_smallest_number_of_slots_travels_through_a_gpu(alone):
    assert agree_on_num_slots(7) == 7
