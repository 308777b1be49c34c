"""Specs of groups, and how state tensors are described."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from align_states import Group, Model, States

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm import (
    MambaSpec,
    MambaSpecDecodeGPUContext,
    get_conv_copy_spec,
    get_conv_copy_spec_ds,
    get_mamba_group_ids,
    get_mamba_groups,
    get_temporal_copy_spec,
    validate_mamba_state_copy_funcs,
)
from mamba_cache.integrations.vllm.copy_specs import count_states, describe_states
from mamba_cache.integrations.vllm.mamba_spec import shared_schedule
from mamba_cache.integrations.vllm.state_table import CHUNK_FIELDS

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
    groups = get_mamba_groups(config)
    assert groups == {one: [1, 2], other: [2, 3]}
    assert get_mamba_group_ids(groups) == [1, 2, 3]


@pytest.mark.parametrize(
    ("funcs", "message"),
    [
        (
            {"gdn": (get_conv_copy_spec,)},
            r"of the kind mamba2 are required, got those of \['gdn'\]",
        ),
        ({"mamba2": ()}, "with 1 states must have from 1 to as many .*, got 0"),
        ({"mamba2": (get_conv_copy_spec,) * 2}, "with 1 states must have .*, got 2"),
    ],
)
def test_every_kind_of_layer_has_its_functions(funcs, message):
    groups = {MambaSpec(block_size=8, shapes=((4,),), dtypes=(torch.float16,)): [0]}
    validate_mamba_state_copy_funcs(groups, {"mamba2": (get_temporal_copy_spec,)})
    with pytest.raises(InvalidArgumentError, match=message):
        validate_mamba_state_copy_funcs(groups, funcs)


def test_layers_of_several_kinds_in_one_group():
    """A short convolution has a window alone; a layer may have states that are not copied."""
    kinds = {"gdn": (get_conv_copy_spec, get_temporal_copy_spec), "short": (get_conv_copy_spec,)}
    specs = {
        name: MambaSpec(block_size=8, shapes=((3, 4),), dtypes=(torch.float16,), mamba_type=kind)
        for name, kind in (("a", "gdn"), ("b", "short"))
    }
    config = make_config(SimpleNamespace(block_size=8, kv_cache_specs=specs))
    config.kv_cache_groups[0].layer_names = ["a", "b"]
    states = [torch.zeros(5, 3, 4), torch.zeros(5, 7), torch.zeros(5, 9)]
    layers = {name: SimpleNamespace(kv_cache=states) for name in "ab"}
    memories = describe_states(config, [0], layers, kinds)
    assert [memory.conv_width for memory in memories] == [3, 0, 3]
    assert count_states(config, [0], kinds) == 3
    assert count_states(config, [0], 2) == 4


def test_a_foreign_function_for_both_layouts_says_which_one_is_set(monkeypatch):
    """vLLM's own function serves windows of both layouts; a setting beside it says which."""
    foreign = ModuleType("foreign")
    exec("def get_conv_copy_spec(): ...", vars(foreign))
    monkeypatch.setitem(sys.modules, "foreign", foreign)
    config = make_config(MambaSpec(block_size=8, shapes=((3, 4),), dtypes=(torch.float16,)))
    config.kv_cache_groups[0].layer_names = ["a"]
    layers = {"a": SimpleNamespace(kv_cache=[torch.zeros(5, 3, 4)])}
    for answer, width in ((None, 3), (False, 3), (True, 4)):
        if answer is not None:
            foreign.is_conv_state_dim_first = lambda answer=answer: answer
        memory = describe_states(config, [0], layers, (foreign.get_conv_copy_spec,))[0]
        assert memory.conv_width == width


def test_what_is_read_of_a_block():
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
def test_the_function_says_which_axis_and_the_strides_how_it_lies(copy_func):
    """An engine may show a [dim, W] window as [W, dim]."""
    stored = torch.zeros(5, 4, 6)
    spec = copy_func(stored.transpose(1, 2), [2], 0, 2)
    other = get_conv_copy_spec_ds if copy_func is get_conv_copy_spec else get_conv_copy_spec
    assert spec == other(stored, [2], 0, 2)


@pytest.mark.parametrize("state", [torch.zeros(4, 3, 8)[:, :, ::2], torch.zeros(4)])
def test_blocks_with_holes_are_refused(state):
    with pytest.raises(InvalidArgumentError, match="one block must be contiguous"):
        get_conv_copy_spec(state, [1], 0, 1)


def test_facts_of_each_state(rng):
    model = Model(8, 2, 4, True, (Group(num_layers=1), Group(1, 3, ssm_shape=(5,), gap=2)))
    states = States(model, rng)
    memories = describe_states(
        model.kv_cache_config(), [1, 2], states.forward_context(), model.copy_funcs
    )
    facts = [(m.conv_width, m.block_bytes, m.element_size, m.group) for m in memories]
    assert facts == [(5, 60, 2, 0), (0, 96, 4, 0), (5, 30, 2, 1), (0, 20, 4, 1)]
    assert memories[3].blocks.stride(0) == (5 + 2) * 4


def make_context(model):
    return MambaSpecDecodeGPUContext.create(
        2, model.kv_cache_config(), 2, "cpu", lambda n, dtype: SimpleNamespace(np=[0] * n)
    )


@pytest.fixture
def bindings(rng):
    model = Model(groups=(Group(), Group(num_layers=1)))
    table = torch.zeros(2, 10, dtype=torch.int32)
    return {
        "kv_cache_config": model.kv_cache_config(),
        "forward_context": States(model, rng).forward_context(),
        "mamba_state_copy_funcs": model.copy_funcs,
        "block_tables": [table, table.clone()],
    }


def other_func():
    """A copy function that is not known."""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mamba_state_copy_funcs": (get_conv_copy_spec, other_func)}, "got other_func"),
        ({"mamba_state_copy_funcs": (get_conv_copy_spec,) * 3}, "each of 3 copy functions, got 2"),
        ({"mamba_state_copy_funcs": (get_conv_copy_spec,)}, "table has 6 states.*got 3"),
        ({"block_tables": []}, "each of 2 Mamba groups, got 0"),
        ({"block_tables": [torch.zeros(2, 3, dtype=torch.int64)] * 2}, "must be .* int32"),
        (
            {"block_tables": [torch.zeros(2, n, dtype=torch.int32) for n in (3, 4)]},
            r"one row stride, got \[3, 4\]",
        ),
    ],
)
def test_what_does_not_fit_leaves_the_context_as_it_was(bindings, changed, message):
    context = make_context(Model(groups=(Group(), Group(num_layers=1))))
    with pytest.raises(InvalidArgumentError, match=message):
        context.initialize_from_forward_context(**{**bindings, **changed})
    assert not context.is_initialized
    assert not context.table.chunks.any()
    assert context.table.block_tables.tensors == ()


def test_only_the_first_initialisation_counts(bindings, rng):
    context = make_context(Model(groups=(Group(), Group(num_layers=1))))
    context.initialize_from_forward_context(**bindings)
    facts = context.table.chunks.clone()
    assert facts.any(dim=1).all()
    context.initialize_from_forward_context(**{**bindings, "block_tables": []})
    assert torch.equal(context.table.chunks, facts)
    assert facts[:, CHUNK_FIELDS.index("conv_width")].tolist() == [5, 0] * 3
    assert facts[:, CHUNK_FIELDS.index("group")].tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("backend", ["cuda", "TRITON"])
def test_unknown_backends_are_refused(backend):
    with pytest.raises(InvalidArgumentError, match="'auto', 'torch' or 'triton'"):
        MambaSpecDecodeGPUContext.create(
            1, Model().kv_cache_config(), 2, "cpu", lambda n, dtype: None, backend=backend
        )


def test_kernels_need_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InvalidArgumentError, match="needs tensors on a CUDA device, got cpu"):
        MambaSpecDecodeGPUContext.create(
            1, Model().kv_cache_config(), 2, "cpu", lambda n, dtype: None, backend="triton"
        )
