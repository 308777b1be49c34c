"""States in block tables on a GPU: kernels give the states of the plain rules, without waiting."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from align_rig import HostWorld, ResidentWorld, SlotWorld, check_worlds
from align_states import Group, Model, States, models
from gpu_rig import BUSY_CYCLES, waiting_raises
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.integrations.vllm import CpuGpuBuffer, MambaSpecDecodeGPUContext

pytestmark = pytest.mark.gpu

SEEDS = st.integers(0, 2**32 - 1)


class QuietWorld(ResidentWorld):
    """A resident world in which any wait for the device raises."""

    def preprocess(self, num_computed):
        with waiting_raises():
            super().preprocess(num_computed)

    def prepare(self, mode):
        with waiting_raises():
            return super().prepare(mode)

    def postprocess(self, sampled, num_computed):
        with waiting_raises():
            super().postprocess(sampled, num_computed)


WORLDS = [
    partial(HostWorld, device="cuda"),
    partial(HostWorld, device="cuda", decides_on_device=True),
    partial(HostWorld, device="cuda", decides_on_device=True, by_kind=True),
    partial(QuietWorld, device="cuda"),
    partial(SlotWorld, device="cuda"),
]


@given(models(64), SEEDS, st.lists(SEEDS, min_size=1, max_size=8))
def test_kernels_equal_the_rules(model, seed, step_seeds):
    check_worlds(model, seed, step_seeds, WORLDS)


@pytest.mark.parametrize("is_ds", [False, True], ids=["SD", "DS"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_states_of_many_tiles(is_ds, dtype, seed):
    """Shifts of wide windows within one block, which a parallel copy would tear apart."""
    group = Group(3, 5000, dtype, (16, 32, 65), torch.float32)
    model = Model(4, 4, 4, is_ds, (group, Group()), max_requests=16)
    check_worlds(model, seed, range(seed, seed + 12), WORLDS)


def test_a_step_is_prepared_before_the_counts_of_the_last_are_known(seed):
    """Two steps are enqueued while the device is busy with other work; neither waits for it."""
    model = Model(4, 3, 4, False, (Group(), Group()), max_requests=4)
    world = ResidentWorld(model, np.random.default_rng(seed), device="cuda")
    for slot in range(4):
        world.state.add_request(slot, Started(num_computed_tokens=2))
    world.tables[1][:4] = torch.arange(1, 41).view(4, 10)
    world.tables[2][:4] = torch.arange(40, 0, -1).view(4, 10)
    world.batch = Batch(torch.arange(4, dtype=torch.int32, device="cuda"), 4)
    counts = [
        torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([4, 1, 3, 2],) * 3
    ]
    computed = list(itertools.accumulate(counts, initial=torch.full_like(counts[0], 2)))
    world.preprocess(computed[0])
    world.postprocess(counts[0], computed[1])
    ready = torch.cuda.Event()
    with waiting_raises():
        torch.cuda._sleep(BUSY_CYCLES)
        for step in (1, 2):
            world.preprocess(computed[step])
            world.postprocess(counts[step], computed[step + 1])
        ready.record()
        assert not ready.query()
    columns = -(-(computed[2] + 4) // 4) - 1
    assert torch.equal(world.state._mamba_state_idx_gpu, columns)


class Started:
    def __init__(self, num_computed_tokens):
        self.num_computed_tokens = num_computed_tokens


class Batch:
    """Rows of four tokens each."""

    def __init__(self, idx_mapping, length):
        self.num_reqs = len(idx_mapping)
        self.idx_mapping = idx_mapping
        self.query_start_loc = torch.arange(self.num_reqs + 1, dtype=torch.int32, device="cuda")
        self.query_start_loc *= length


def test_all_groups_are_looked_up_without_waiting(seed):
    """The inputs of vLLM's metadata builders equal those of the plain twin bit for bit."""
    rng = np.random.default_rng(seed)
    model = Model(16, 3, 4, False, (Group(), Group(num_layers=1), Group()), max_requests=70)
    config, kinds = model.kv_cache_config(), {"mamba2": model.copy_funcs}
    host = [torch.from_numpy(rng.integers(0, 99, (70, 12))).int() for _ in model.groups]
    lengths = torch.from_numpy(rng.integers(0, 9 * 16, 70)).int()
    found = []
    for device in ("cpu", "cuda"):
        states = States(model, np.random.default_rng(seed), device)
        context = MambaSpecDecodeGPUContext.create(
            70, config, kinds, device, partial(CpuGpuBuffer, device=device)
        )
        tables = [table.to(device) for table in host]
        context.initialize_from_forward_context(config, states.forward_context(), kinds, tables)
        on_device = lengths.to(device)
        if device == "cuda":
            with waiting_raises():
                context.compute_aligned_state_indices(on_device, 67)
        found.append(context.compute_aligned_state_indices(on_device, 67).cpu())
    assert torch.equal(*found)
