"""A real vLLM on the CPU, with its own copies of states and with this package's.

tests/engines/vllm.sh makes an environment for it.
"""

import importlib
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import vllm_rig
from align_states import Group, Model, States
from drawn_traces import draw_scan
from vllm_rig import DRAFTS, MODELS, TIGHT, Engine, patched, save_model, serve, serve_drafts

from mamba_cache.integrations import vllm as ours
from mamba_cache.integrations.vllm import CpuGpuBuffer, MambaSpecDecodeGPUContext

# Warnings of vLLM's own code and its dependencies.
pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS = "vllm.model_executor.layers.mamba.mamba_utils"
HITS = [("hit", 0), ("branch", 0), ("mixed", 0), ("mixed", 3)]
"""Requests that skip tokens: later ones may find them evicted."""


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request, tmp_path_factory):
    """A tiny model of one family: its name and folder."""
    folder = tmp_path_factory.mktemp(request.param)
    save_model(request.param, folder)
    return request.param, folder


@pytest.fixture(autouse=True)
def served_on_a_cpu(monkeypatch):
    vllm_rig.without_checkpoints_in_prefills(monkeypatch)


@pytest.fixture(scope="module")
def utils():
    return importlib.import_module("vllm.v1.worker.mamba_utils")


def test_tokens_are_those_of_vllms_own_copies(saved):
    name, folder = saved
    with Engine(folder, name, **TIGHT) as engine:
        own = serve(engine)
        assert engine.counted("num_preemptions") > 0
        assert not isinstance(engine.runner._mamba_bufs, ours.MambaBuffers)
    with patched(), Engine(folder, name, **TIGHT) as engine:
        found = serve(engine)
        assert engine.counted("num_preemptions") > 0
        assert isinstance(engine.runner._mamba_bufs, ours.MambaBuffers)
    assert found == own
    assert all(own.cached[request] > 0 for request in HITS)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """Makes engines over a Qwen3-Next with n-gram drafts; and the answers without a cache."""
    folder = tmp_path_factory.mktemp("drafting")
    save_model("qwen3_next", folder, counts=True)

    def make(**options):
        # All prompts fit in one step: other chunks may change the last bit in bf16.
        options = {"speculative_config": DRAFTS, "max_num_batched_tokens": 2048, **options}
        return Engine(folder, "qwen3_next", **options)

    with make(enable_prefix_caching=False) as engine:
        return make, serve_drafts(engine)


def test_drafts_with_prefix_caching_where_there_is_no_triton(drafting):
    make, uncached = drafting
    with patched(), make() as engine:
        found = serve_drafts(engine)
        assert engine.counted("spec_decode_num_accepted_tokens") > 0
    assert found.tokens == uncached.tokens
    assert found.cached["again", 0] > 0


@pytest.fixture(scope="module")
def interpreted(utils):
    """A second copy of vLLM's module, whose kernels run in Triton's interpreter."""
    stand_in = ModuleType("vllm.triton_utils")
    stand_in.triton, stand_in.tl = triton, triton.language
    own = sys.modules["vllm.triton_utils"]
    sys.modules["vllm.triton_utils"] = stand_in
    try:
        spec = importlib.util.spec_from_file_location("interpreted_mamba_utils", utils.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.modules["vllm.triton_utils"] = own
    module._TEMPORAL_TILES = 2  # programs per state: the interpreter runs them one by one
    assert "Interpreted" in type(module.precopy_mamba_align_fused_kernel).__name__
    return module


class Copies:
    """A context over random states whose tables are by request slot, in vLLM's own classes."""

    SLOTS = 6

    def __init__(self, make_context, utils, model, seed):
        rng = np.random.default_rng(seed)
        self.states = States(model, rng)
        layers = importlib.import_module(LAYERS)
        kind = utils.MambaSpec.__dataclass_fields__["mamba_type"].default
        self.by_kind = {kind: (layers.get_conv_copy_spec, layers.get_temporal_copy_spec)}
        groups = []
        for number, group in enumerate(model.groups):
            names = [f"mamba.{number}.{layer}" for layer in range(group.num_layers)]
            spec = utils.MambaSpec(
                block_size=model.block_size,
                shapes=(model.conv_shape(group), group.ssm_shape),
                dtypes=(group.conv_dtype, group.ssm_dtype),
                mamba_cache_mode="align",
                num_speculative_blocks=model.num_drafts,
            )
            if number:  # layers of one kind of memory, with a spec for each
                specs = dict.fromkeys(names, spec)
                spec = utils.UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs=specs)
            groups.append(SimpleNamespace(layer_names=names, kv_cache_spec=spec))
        self.config = SimpleNamespace(kv_cache_groups=groups)
        self.context = make_context(
            self.SLOTS, self.config, self.by_kind, torch.device("cpu"),
            partial(CpuGpuBuffer, device="cpu"),
        )  # fmt: skip
        shape = len(model.groups), self.SLOTS, 10
        blocks = 1 + rng.permuted(np.tile(np.arange(60), (shape[0], 1)), axis=1).reshape(shape)
        self.tables = list(torch.from_numpy(blocks).int())
        self.by_row = [table.flip(0).contiguous() for table in self.tables]  # vLLM has the address
        self.context.initialize_from_forward_context(
            self.config, self.states.forward_context(), self.by_kind, self.tables, self.by_row
        )


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("is_ds", [False, True], ids=["SD", "DS"])
@pytest.mark.parametrize("gap", [0, 16])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_kernels_leave_what_vllms_kernels_leave(
    utils, interpreted, monkeypatch, is_ds, gap, backend, seed
):
    """Tables by request slot, rows to skip, gaps between blocks, and counts written in place."""
    for module in (importlib.import_module(LAYERS), interpreted):
        monkeypatch.setattr(module, "is_conv_state_dim_first", lambda: is_ds)
    model = Model(4, 3, 4, is_ds, (Group(1, gap=gap), Group(1, 5, ssm_shape=(7,))), max_requests=6)
    create = partial(MambaSpecDecodeGPUContext.create, backend=backend)
    makers = interpreted.MambaSpecDecodeGPUContext.create, create
    worlds = [Copies(make, utils, model, seed) for make in makers]
    rng = np.random.default_rng(seed)
    for _ in range(3):
        mapping = ints(np.where(rng.random(6) < 0.3, -1, rng.permutation(6)))
        columns = ints(rng.integers(0, 6, 6)), ints(rng.integers(-1, 6, 6))
        bias, accepted = ints(rng.integers(0, 4, 6)), ints(rng.integers(1, 5, 6))
        computed = ints(rng.integers(4, 24, 6))
        running = (computed - accepted) // 4
        rows = ints(rng.integers(0, 2, 6)), ints(rng.integers(4, 20, 6)), ints([0] * 6)
        left = []
        for world in worlds:
            counts = accepted.clone()
            world.context.run_fused_precopy(6, *columns, bias, mapping)
            world.context.run_fused_precopy(6, *columns, bias, None)
            world.context.run_fused_postprocess_align(6, counts, running, computed, mapping)
            world.context.run_fused_postprocess(6, accepted, running, *rows)
            out = world.context.num_accepted_tokens_out.clone()
            left.append([*world.states.bits(), counts, out])
        for theirs, own in zip(*left, strict=True):
            assert torch.equal(theirs, own)

    seq_lens = ints(rng.integers(0, 24, 6))
    theirs, own = (world.context for world in worlds)
    interpreted.get_aligned_state_indices_multi_group_kernel[(1,)](
        theirs.aligned_index_block_table_ptrs, seq_lens, theirs.aligned_state_indices,
        theirs.block_table_stride_req, 1, *theirs.aligned_state_indices.stride(), 5,
        CACHE_BLOCK_SIZE=4, NUM_GROUPS=2, BLOCK_GROUPS=2, NUM_STATE_SLOTS=4, BLOCK_STATE_SLOTS=4,
        BLOCK_ROWS=32,
    )  # fmt: skip
    found = own.compute_aligned_state_indices(seq_lens, 5)
    assert torch.equal(found, theirs.aligned_state_indices[:, :5])
    assert found.data_ptr() == own.aligned_state_indices.data_ptr()


def test_resident_plans_move_as_vllms_functions_one_after_the_other(utils, interpreted, seed):
    """The plans of ``MambaHybridModelState`` beside vLLM's kernels."""
    model = Model(4, 3, 4, False, (Group(1), Group(1, 5)), max_requests=6)
    makers = interpreted.MambaSpecDecodeGPUContext.create, MambaSpecDecodeGPUContext.create
    theirs, own = (Copies(make, utils, model, seed) for make in makers)
    rng = np.random.default_rng(seed)

    accepted, columns = ints([1] * 6), ints([0] * 6)
    sources, biases = ints([-1] * 6), ints([0] * 6)
    by_slot = [each.clone() for each in (accepted, columns, sources, biases)]
    computed = ints([1] * 6)

    def run_own(plan, *inputs):
        own.context.run(plan, 4, slots, *inputs)

    for _ in range(5):
        slots = ints(rng.permutation(6)[:4])
        lengths = ints([0, *np.cumsum(rng.integers(1, 4, 4))])
        accepted_own, columns_own, *sources_own = by_slot
        run_own("plan_precopy", columns_own, *sources_own, lengths, computed, accepted_own)
        interpreted.preprocess_mamba_align_fused_kernel[(1,)](
            slots, columns, computed, lengths, accepted, sources, biases, 4, BLOCK_SIZE=4,
            MAMBA_BLOCK_SIZE=4,
        )  # fmt: skip
        theirs.context.run_fused_precopy(4, columns, sources, biases, slots)
        sampled = lengths.diff().clamp(max=3)
        computed[slots.long()] += sampled
        counts = accepted_own, accepted_own
        run_own("plan_postcopy", *counts, columns_own, computed, None, None, sampled)
        accepted[slots.long()] = sampled.clamp(min=1)
        theirs.context.run_fused_postprocess_align(4, accepted, columns, computed, slots)
        assert torch.equal(by_slot[0], accepted)
        assert torch.equal(by_slot[1], columns)
        for one, other in zip(own.states.bits(), theirs.states.bits(), strict=True):
            assert torch.equal(one, other)


def test_the_resident_state_binds_tables_by_slot(utils, seed):
    hybrid = importlib.import_module("vllm.v1.worker.gpu.model_states.mamba_hybrid")
    model = Model(4, 3, 4, False, (Group(1),), max_requests=6)
    world = Copies(MambaSpecDecodeGPUContext.create, utils, model, seed)
    state = object.__new__(hybrid.MambaHybridModelState)
    state._align_mode, state._mamba_spec, state._mamba_state_copy_funcs = True, None, None
    state.max_num_reqs, state.device = 6, torch.device("cpu")
    state.model = SimpleNamespace(get_mamba_state_copy_funcs=lambda kinds: world.by_kind)
    context = SimpleNamespace(static_forward_context=world.states.forward_context())
    state.vllm_config = SimpleNamespace(compilation_config=context)
    tables = SimpleNamespace(
        block_tables=[SimpleNamespace(gpu=world.tables[0])], input_block_tables=world.by_row
    )
    with patched():
        state.initialize_kv_cache(world.config, tables)
    bound = state._mamba_ctx
    assert isinstance(bound, MambaSpecDecodeGPUContext)
    assert bound.is_by_slot
    assert bound.block_tables[0].data_ptr() == world.tables[0].data_ptr()
    assert torch.equal(bound.index_tables[0], world.tables[0].flip(0))


def test_the_value_policy_keeps_prompts_that_come_again():
    """The policy runs in vLLM's own manager, loaded by name from a user's configuration."""
    bench = importlib.import_module("bench_vllm_policy")
    requests = draw_scan(2_000)
    num_chunks = bench.num_chunks_of(requests) // 50
    rates = {
        policy: bench.measure(requests, num_chunks, policy, 8)["token_hit_rate"]
        for policy in ("lru", "arc", "value")
    }
    assert rates["value"] > 1.3 * rates["lru"]  # control: LRU keeps one-time prompts
    assert rates["value"] > rates["arc"] - 0.7
