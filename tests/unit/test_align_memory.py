"""Specs of KV cache groups, and descriptions of state tensors."""

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from align_states import Group, Model, States

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm import (
    CpuGpuBuffer,
    MambaSpec,
    MambaSpecDecodeGPUContext,
    get_conv_copy_spec,
    get_conv_copy_spec_ds,
    get_mamba_groups,
    get_temporal_copy_spec,
)
from mamba_cache.integrations.vllm.mamba_spec import describe_states, list_layers, shared_schedule

FIELDS = {"block_size": 8, "shapes": (), "dtypes": ()}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "got 0 and 0"),
        ({"num_speculative_blocks": -1}, "got 8 and -1"),
        ({"mamba_cache_mode": "some"}, "'none', 'align' or 'all', got 'some'"),
        ({"shapes": ((1,),)}, "equally many, got 1 and 0"),
    ],
)
def test_specs_that_make_no_sense(fields, message):
    with pytest.raises(InvalidArgumentError, match=message):
        MambaSpec(**{**FIELDS, **fields})


def make_config(*specs):
    groups = [SimpleNamespace(layer_names=[], kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def test_a_foreign_spec_is_known_by_its_attributes():
    attention = SimpleNamespace(block_size=24, dtype=torch.float16)
    foreign = SimpleNamespace(num_speculative_blocks=0, mamba_cache_mode="none", **FIELDS)
    own = MambaSpec(block_size=8, shapes=((4,),), dtypes=(torch.float16,))
    config = make_config(attention, foreign, attention, own)
    assert shared_schedule(config) == ([1, 3], foreign)


def test_groups_must_be_scheduled_alike():
    specs = MambaSpec(**FIELDS), MambaSpec(**{**FIELDS, "block_size": 16})
    with pytest.raises(InvalidArgumentError, match=r"agree on block_size.*16"):
        MambaSpecDecodeGPUContext.create(1, make_config(*specs), 2, "cpu", None)
    with pytest.raises(InvalidArgumentError, match="got \\['SimpleNamespace'\\]"):
        get_mamba_groups(make_config(SimpleNamespace(block_size=8)))


def test_groups_by_spec_as_in_vllm_0_32():
    """A group may have a spec for each layer, and be listed under several."""
    one = MambaSpec(block_size=8, shapes=((4,),), dtypes=(torch.float16,))
    other = MambaSpec(block_size=8, shapes=((6,),), dtypes=(torch.float16,), mamba_type="gdn")
    mixed = SimpleNamespace(block_size=8, kv_cache_specs={"a": one, "b": other, "c": one})
    config = make_config(SimpleNamespace(block_size=24), one, mixed, other)
    config.kv_cache_groups[2].layer_names = ["a", "b", "c"]
    assert get_mamba_groups(config) == {one: [1, 2], other: [2, 3]}


def test_layers_of_several_kinds_in_one_group():
    """A short convolution has only a window; a layer may have states that are not copied."""
    kinds = {"gdn": (get_conv_copy_spec, get_temporal_copy_spec), "short": (get_conv_copy_spec,)}
    specs = {
        name: MambaSpec(block_size=8, shapes=((3, 4),), dtypes=(torch.float16,), mamba_type=kind)
        for name, kind in (("a", "gdn"), ("b", "short"))
    }
    config = make_config(SimpleNamespace(block_size=8, kv_cache_specs=specs))
    config.kv_cache_groups[0].layer_names = ["a", "b"]
    states = [torch.zeros(5, 3, 4), torch.zeros(5, 7), torch.zeros(5, 9)]
    layers = {name: SimpleNamespace(kv_cache=states) for name in "ab"}
    memories = describe_states(list_layers(config), layers, kinds)
    assert [memory.conv_width for memory in memories] == [3, 0, 3]


def test_a_foreign_function_for_both_layouts_uses_the_setting(monkeypatch):
    """vLLM's own function serves windows of both layouts; a setting beside it selects one."""
    foreign = ModuleType("foreign")
    exec("def get_conv_copy_spec(): ...", vars(foreign))
    monkeypatch.setitem(sys.modules, "foreign", foreign)
    config = make_config(MambaSpec(block_size=8, shapes=((3, 4),), dtypes=(torch.float16,)))
    config.kv_cache_groups[0].layer_names = ["a"]
    layers = {"a": SimpleNamespace(kv_cache=[torch.zeros(5, 3, 4)])}
    for answer, width in ((None, 3), (False, 3), (True, 4)):
        if answer is not None:
            foreign.is_conv_state_dim_first = lambda answer=answer: answer
        memory = describe_states(list_layers(config), layers, (foreign.get_conv_copy_spec,))[0]
        assert memory.conv_width == width


def test_copy_specs_of_a_block():
    state = torch.zeros(5, 4, 6, dtype=torch.bfloat16)
    blocks, at = [3, 0, 2], state.data_ptr()
    spec = get_conv_copy_spec(state, blocks, 0, 2)
    assert (spec.start_addr, spec.num_elements) == (state[3, 1:].data_ptr(), 18)
    spec = get_temporal_copy_spec(state, blocks, 0, 3)
    assert (spec.start_addr, spec.num_elements) == (state[2].data_ptr(), 24)
    spec = get_conv_copy_spec_ds(state, blocks, 1, 3)
    wanted = at + 2 * 2, 4, 4, 6
    assert (spec.start_addr, spec.num_elements, spec.num_rows, spec.row_stride) == wanted
    assert get_conv_copy_spec_ds(state, blocks, 1, 1).num_elements == 24


@pytest.mark.parametrize("copy_func", [get_conv_copy_spec, get_conv_copy_spec_ds])
def test_the_function_gives_the_axis_and_strides_the_layout(copy_func):
    """An engine may show a [dim, W] window as [W, dim]."""
    stored = torch.zeros(5, 4, 6)
    spec = copy_func(stored.transpose(1, 2), [2], 0, 2)
    other = get_conv_copy_spec_ds if copy_func is get_conv_copy_spec else get_conv_copy_spec
    assert spec == other(stored, [2], 0, 2)


@pytest.mark.parametrize("state", [torch.zeros(4, 3, 8)[:, :, ::2], torch.zeros(4)])
def test_blocks_with_holes_are_refused(state):
    with pytest.raises(InvalidArgumentError, match="one block must be contiguous"):
        get_conv_copy_spec(state, [1], 0, 1)


MODEL = Model(8, 2, 4, True, (Group(num_layers=1), Group(1, 3, ssm_shape=(5,), gap=2)))


def make_context(**options):
    make_buffer = partial(CpuGpuBuffer, device="cpu")
    config = MODEL.kv_cache_config()
    return MambaSpecDecodeGPUContext.create(2, config, 2, "cpu", make_buffer, **options)


@pytest.fixture
def bindings(rng):
    table = torch.zeros(2, 10, dtype=torch.int32)
    return {
        "kv_cache_config": MODEL.kv_cache_config(),
        "forward_context": States(MODEL, rng).forward_context(),
        "mamba_state_copy_funcs": MODEL.copy_funcs,
        "block_tables": [table, table.clone()],
    }


def other_func():
    """An unknown copy function."""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mamba_state_copy_funcs": (get_conv_copy_spec, other_func)}, "got other_func"),
        ({"mamba_state_copy_funcs": (get_conv_copy_spec,) * 3}, "each of 3 copy functions, got 2"),
        (
            {"mamba_state_copy_funcs": {"gdn": (get_conv_copy_spec,)}},
            r"of the kind mamba2 are required, got those of \['gdn'\]",
        ),
        ({"block_tables": []}, "each of 2 Mamba groups, got 0"),
        ({"aligned_index_block_tables": [torch.zeros(2, 3).int()]}, "2 Mamba groups, got 1"),
        ({"block_tables": [torch.zeros(2, 3, dtype=torch.int64)] * 2}, "must be .* int32"),
        (
            {"block_tables": [torch.zeros(2, n, dtype=torch.int32) for n in (3, 4)]},
            r"one row stride, got \[3, 4\]",
        ),
    ],
)
def test_refused_arguments_leave_the_context_unchanged(bindings, changed, message):
    context = make_context()
    with pytest.raises(InvalidArgumentError, match=message):
        context.initialize_from_forward_context(**{**bindings, **changed})
    assert not context.is_initialized
    assert not len(context.facts)
    assert context.block_tables == ()


def test_only_the_first_initialisation_counts(bindings):
    """Facts: address, bytes between blocks, bytes of a block and of a token, width and group."""
    context = make_context()
    context.initialize_from_forward_context(**bindings)
    context.initialize_from_forward_context(**{**bindings, "block_tables": []})
    assert context.facts[:, 1:].tolist() == [
        [60, 60, 2, 5, 0], [96, 96, 96, 0, 0], [34, 30, 2, 5, 1], [28, 20, 20, 0, 1],
    ]  # fmt: skip
    layers = bindings["forward_context"].values()
    addresses = [state.data_ptr() for layer in layers for state in layer.kv_cache]
    assert context.facts[:, 0].tolist() == addresses
    assert context.word_bytes == 2


@pytest.mark.parametrize("backend", ["cuda", "TRITON"])
def test_unknown_backends_are_refused(backend):
    with pytest.raises(InvalidArgumentError, match="'auto', 'torch' or 'triton'"):
        make_context(backend=backend)


def test_kernels_need_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InvalidArgumentError, match="needs tensors on a CUDA device, got cpu"):
        make_context(backend="triton")
