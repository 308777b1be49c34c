"""Use in and out of PyTorch's inference mode, and under another default device of PyTorch.

Contexts used in and out of the mode: tests/support/context_machine.py.

Engines turn the mode on for a step and off between steps, and set a device while they load a model.

A tensor made in the mode can never be written outside of it. Found by trying: a context
whose first step ran in the mode could not restore a state outside of it.
"""

from contextlib import nullcontext
from functools import partial
from itertools import permutations, product
from types import SimpleNamespace

import align_rig
import context_rig
import numpy as np
import pytest
import slot_rig
import torch
from align_rig import HostWorld, ResidentWorld, check_worlds, engine_config
from align_states import Model
from context_rig import (
    BLOCK,
    MODEL,
    MODEL_CONFIG,
    generate,
    make_config,
    make_context,
)

from mamba_cache import DeviceTokens
from mamba_cache._torch import to_device
from mamba_cache.cache import EveryNthBlock
from mamba_cache.integrations.vllm import (
    CpuGpuBuffer,
    MambaBuffers,
    MambaHybridModelState,
    MambaSpecDecodeGPUContext,
)
from mamba_cache.reference import HybridModel
from mamba_cache.states import StatePool

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
SPEC, KV_SPEC = MODEL_CONFIG.state_spec(torch.float32), MODEL_CONFIG.kv_spec(torch.float32)
MODES = {"in": torch.inference_mode, "out": nullcontext}

# Modes of construction, first use and later use: lazily made objects must work in both modes.
CHANGES = [(made, *used) for made, used in product(MODES, permutations(MODES))]

every_change = pytest.mark.parametrize("modes", CHANGES, ids=", ".join)


@every_change
def test_slots_alone_may_be_made_and_used_in_and_out_of_the_mode(modes, generator):
    made, first, second = (MODES[mode] for mode in modes)
    context = slot_rig.make_context()
    slot_rig.add_live_states(context, generator)
    with made():
        allocator = slot_rig.make_allocator(4, context=context)
    for block, mode in enumerate((first, second)):
        with mode():
            [slot] = allocator.allocate_slots_batch([block])
            allocator.store_from_live_batch([slot], [0])
            saved = slot_rig.slot_bits(allocator, slot)
            assert allocator.restore_to_live(1, block)
            allocator.store_from_live_batch([slot], [1])
            assert slot_rig.slot_bits(allocator, slot) == saved
            allocator.block_to_slot[3] = -1
    allocator.check_invariants()


class EveryOther:
    """A world that makes every other call in the mode."""

    def __init__(self, world, is_in):
        self.world, self.is_in = world, is_in

    def __getattr__(self, name):
        return getattr(self.world, name)

    def before(self, step):
        self.call(self.world.before, step)

    def after(self, step):
        self.call(self.world.after, step)

    def call(self, method, step):
        with torch.inference_mode(self.is_in):
            method(step)
        self.is_in = not self.is_in


class EnginesBuffer:
    """A buffer that an engine made outside of the mode."""

    def __init__(self, n, *, dtype, device):
        self.cpu = torch.zeros(n, dtype=dtype)
        self.gpu = torch.zeros(n, dtype=dtype, device=device)
        self.np = self.cpu.numpy()

    def copy_to_gpu(self, n=None):
        return self.gpu[:n].copy_(self.cpu[:n])


@pytest.fixture(params=MODES)
def made(request, monkeypatch):
    """Make the package's objects of a world in the mode, or outside of it."""
    in_mode = torch.inference_mode(request.param == "in")
    makers = SimpleNamespace(create=in_mode(MambaBuffers.create))
    monkeypatch.setattr(align_rig, "MambaBuffers", makers)
    new = partial(type.__call__, MambaHybridModelState)  # a class itself cannot be decorated
    monkeypatch.setattr(align_rig, "MambaHybridModelState", in_mode(new))


WORLDS = [HostWorld, partial(HostWorld, decides_on_device=True), ResidentWorld]

every_world = pytest.mark.parametrize("world", WORLDS, ids=["host", "device", "resident"])


@every_world
@pytest.mark.parametrize("starts_in", [False, True])
def test_states_in_block_tables_may_be_copied_in_and_out_of_the_mode(made, world, starts_in):
    def make(model, rng):
        return EveryOther(world(model, rng), starts_in)

    check_worlds(Model(8, max_requests=4), 3, range(20), [make])


@every_world
def test_kernels_may_use_an_engines_buffers_in_and_out_of_the_mode(made, world, monkeypatch):
    """Through Triton's interpreter."""
    monkeypatch.setattr(align_rig, "CpuGpuBuffer", EnginesBuffer)

    def make(model, rng):
        return EveryOther(world(model, rng, backend="triton"), is_in=True)

    check_worlds(Model(8, max_requests=4), 3, range(3), [make])


def make_state_table():
    config, make_buffer = Model().kv_cache_config(), partial(CpuGpuBuffer, device="cpu")
    return MambaSpecDecodeGPUContext.create(2, config, 2, "cpu", make_buffer)


KEPT = {
    "states": lambda: [*StatePool(SPEC, 2, device="cpu").tensors.values()],
    "KV cache": lambda: [KV_SPEC.allocate(2, BLOCK, "cpu")],
    "buffer": lambda: vars(CpuGpuBuffer(2, dtype=torch.int32, device="cpu")).values(),
    "step": lambda: vars(make_context().step_buffers).values(),
    "table": lambda: vars(make_state_table()).values(),
    "context": lambda: vars(make_context()).values(),
    "slots": lambda: vars(slot_rig.make_allocator()).values(),
}


@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
def test_kept_tensors_may_be_written_outside_of_the_mode_they_were_made_in(make):
    with torch.inference_mode():
        tensors = [value for value in make() if isinstance(value, torch.Tensor)]
    assert tensors
    for tensor in tensors:
        tensor.fill_(1)


@pytest.fixture
def elsewhere():
    with torch.device("meta"):
        yield


def run_twice(context):
    runs = [generate(context, PROMPT, 3) for _ in range(2)]
    assert runs[1][2].skip_tokens == 3 * BLOCK
    return [(tokens, torch.stack(logits)) for tokens, logits, _ in runs]


def test_a_context_lies_on_its_device():
    wanted = run_twice(make_context())
    with torch.device("meta"):
        got = run_twice(make_context(device="cpu"))
    for (tokens, logits), (wanted_tokens, wanted_logits) in zip(got, wanted, strict=True):
        assert tokens == wanted_tokens
        assert torch.equal(logits, wanted_logits)


def test_the_rows_of_live_states_lie_on_the_host(elsewhere):
    rows = make_context().mamba_metadata.request_to_mamba_state_idx
    assert rows.device.type == "cpu"


def test_tokens_come_and_go_between_host_and_device(elsewhere):
    context = make_context(make_config(num_speculative_tokens=1), device="cpu")
    context_rig.add(context, "a", PROMPT)
    MODEL.forward(context.begin_step().metadata, context)
    context.commit_step({"a": 9})
    sampled = DeviceTokens(
        torch.tensor([[4, 5]], device="cpu"), torch.tensor([2], dtype=torch.int32, device="cpu")
    )
    for commit in ({"a": [4, 5]}, sampled):
        MODEL.forward(context.begin_step(drafts={"a": [4]}).metadata, context)
        context.commit_step(commit)
    assert context.collect_step() == {"a": [4, 5]}
    context.check_invariants()


def test_tokens_are_sent_to_the_device_that_was_named():
    with torch.device("cpu"):
        sent = to_device(torch.tensor([[1, 0], [2, 3]], device="cpu"), torch.device("meta"))
    assert (sent.device.type, sent.shape) == ("meta", (2, 2))


def test_planned_checkpoints_lie_on_the_host():
    context = slot_rig.make_context(
        block_size_tokens=4,
        ssm_chunk_alignment=4,
        paused_request_count=0,
        batch_dimensions=SimpleNamespace(prefill_req_count=1, decode_req_count=0),
        request_to_kv_block_ids=np.arange(3, dtype=np.int32)[None],
    )
    request = SimpleNamespace(prompt_tokens=range(12), finished_chunk_token_count=0)
    with torch.device("meta"):
        slots = slot_rig.make_allocator(context=context, placement=EveryNthBlock(1))
        slots.compute_and_store_offsets(request, 0, 0, 12, 0, [], 3)
        on_host, on_device = slots.get_intermediate_cpu_data(), slots.get_intermediate_gpu_data()
    for offsets, counts in (on_host, on_device):
        assert offsets.tolist() == [[4, 8, 0]]
        assert counts.tolist() == [2]


def test_a_buffer_lies_on_the_host_and_on_the_device(elsewhere):
    buffer = CpuGpuBuffer(3, dtype=torch.int32, device="cpu")
    buffer.np[:] = [4, 5, 6]
    assert buffer.copy_to_gpu().tolist() == [4, 5, 6]


def test_layers_find_on_the_host_which_requests_prefill(elsewhere):
    state = MambaHybridModelState(engine_config(Model(8, max_requests=3), {}), None, None, "cpu")
    batch = SimpleNamespace(
        num_reqs=2,
        num_tokens=2,
        idx_mapping=torch.tensor([2, 0], device="cpu"),
        num_scheduled_tokens=np.array([1, 5]),
        is_prefilling_np=np.array([False, True]),
        prefill_runs_as_decode_np=None,
        seq_lens_cpu_upper_bound=torch.tensor([4, 5], device="cpu"),
        num_draft_tokens_per_req=np.array([0, 0]),
    )
    assert state.prepare_attn(batch).is_prefilling.tolist() == [False, True]


def test_a_models_weights_are_those_of_its_seed(elsewhere):
    model = HybridModel(MODEL_CONFIG, dtype=torch.float64, seed=7, device="cpu")
    assert torch.equal(model.embedding, MODEL.embedding)
