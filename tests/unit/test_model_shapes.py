"""What a model keeps, read from the configurations of several families."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.bench.copy import SHAPES
from mamba_cache.cli.built_in import BUILT_IN
from mamba_cache.cli.model_shapes import load_shape, shape_of
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states import KVCacheSpec, StateSpec

MAMBA2 = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 3,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 32,
}
CONV, SSM = (6 * 16 + 2 * 3 * 24, 4), (6, 16, 24)


def read(config=MAMBA2, **changes):
    changed = {name: value for name, value in {**config, **changes}.items() if value is not None}
    return shape_of(changed, name="a model")


def layers(shape):
    return shape.state_spec.tensors[0].num_layers, shape.kv_spec.num_layers


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_models_have_the_states_that_the_benchmark_copies(name):
    def plain(text):
        return text.lower().split(",")[0].replace(".0", "").replace(" ", "-")

    [known] = [s.spec for s in SHAPES if plain(s.name) == plain(name) and "bf16" not in s.name]
    assert load_shape(name).state_spec == known


def test_every_size_is_read():
    shape = read(layer_types=["mamba", "attention", "mamba"], torch_dtype="float16")
    assert shape.state_spec == StateSpec.mamba(2, CONV, SSM, torch.float16, torch.float32)
    assert shape.kv_spec == KVCacheSpec(1, 2, 16, torch.float16)
    assert shape.ssm_chunk_size == 32


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"hybrid_override_pattern": "M-M*-ME"}, (3, 1)),
        ({"layer_types": ["linear_attention", "full_attention"]}, (1, 1)),
        ({"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}, (4, 2)),
        ({"num_hidden_layers": 5, "attn_layer_indices": [1, 4]}, (3, 2)),
        ({"num_hidden_layers": 9, "attn_layer_period": 4, "attn_layer_offset": 2}, (7, 2)),
        ({"num_hidden_layers": 9, "full_attention_interval": 4}, (7, 2)),
        ({"num_hidden_layers": 3, "mamba_d_ssm": 96}, (3, 3)),
    ],
)
def test_every_way_to_list_layers(named, expected):
    assert layers(read(**named)) == expected


def test_other_names_for_the_same_sizes():
    renamed = {
        "mamba_n_heads": ("mamba_num_heads", "n_mamba_heads"),
        "mamba_d_head": ("mamba_head_dim", "mamba_headdim"),
        "mamba_d_state": ("ssm_state_size", "state_size"),
        "mamba_n_groups": ("n_groups", "mamba_ngroups"),
        "mamba_d_conv": ("conv_kernel", "conv_kernel"),
        "mamba_chunk_size": ("chunk_size", "chunk_size"),
    }
    wanted = read(layer_types=["mamba"])
    for dialect in (0, 1):
        config = {
            renamed[name][dialect] if name in renamed else name: value
            for name, value in MAMBA2.items()
        }
        assert read(config, layer_types=["mamba"]) == wanted


def test_a_head_size_that_is_left_to_the_model():
    shape = read(layer_types=["mamba"], mamba_d_head="auto", mamba_expand=3)
    assert shape.state_spec.tensors[1].shape == (6, 3 * 64 // 6, 24)
    shape = read(num_hidden_layers=1, mamba_d_head=None, mamba_d_ssm=120)
    assert shape.state_spec.tensors[1].shape == (6, 120 // 6, 24)


@pytest.mark.parametrize(("named", "chunk"), [(None, 64), (128, 128)])
def test_linear_attention(named, chunk):
    shape = read(
        mamba_d_conv=None,
        mamba_chunk_size=None,
        chunk_size=named,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        layer_types=["linear_attention"],
    )
    conv, ssm = shape.state_spec.tensors
    assert (conv.shape, ssm.shape) == ((2 * 2 * 8 + 6 * 12, 4), (6, 8, 12))
    assert shape.ssm_chunk_size == chunk


def test_mamba_1_has_no_chunks():
    shape = read(mamba_chunk_size=None, mamba_expand=2, layer_types=["mamba"])
    conv, ssm = shape.state_spec.tensors
    assert (conv.shape, ssm.shape, shape.ssm_chunk_size) == ((128, 4), (128, 24), 1)


def test_heads_of_attention():
    one_kind = read(layer_types=["mamba", "attention"], num_key_value_heads=None)
    assert (one_kind.kv_spec.num_kv_heads, one_kind.kv_spec.head_dim) == (4, 16)
    named = read(layer_types=["mamba", "attention"], attention_head_dim=40)
    assert named.kv_spec.head_dim == 40


def test_dtypes():
    assert read(layer_types=["mamba"]).state_spec.tensors[0].dtype == torch.bfloat16
    assert read(layer_types=["mamba"], dtype="torch.float16").kv_spec.dtype == torch.float16
    low = read(layer_types=["mamba"], mamba_ssm_cache_dtype="bfloat16")
    assert low.state_spec.tensors[1].dtype == torch.bfloat16


def test_the_text_model_of_a_multimodal_one():
    inner = {**MAMBA2, "layer_types": ["mamba", "attention"]}
    outer = {"model_type": "sees", "text_config": inner, "hidden_size": 999}
    assert shape_of(outer, name="a model") == shape_of(inner, name="a model")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["mamba", "rwkv"]}, "rwkv"),
        ({"layer_types": ["attention"]}, "must have Mamba layers"),
        ({"num_hidden_layers": 2, "model_type": "llama"}, "'llama'"),
        ({"layer_types": ["mamba"], "mamba_d_state": 0}, r"mamba_d_state.* in \[1, .*got 0"),
        ({"layer_types": ["mamba"], "mamba_n_heads": None}, "mamba_num_heads or mamba_n_heads"),
        ({"layer_types": ["mamba"], "dtype": "float7"}, "float7"),
    ],
)
def test_what_cannot_be_read_is_named(changes, said):
    with pytest.raises(InvalidArgumentError, match=said):
        read(**changes)


def test_what_is_no_configuration_is_refused():
    with pytest.raises(InvalidArgumentError, match="must be an object"):
        shape_of([1, 2], name="a model")


def test_a_file_or_the_folder_that_holds_it(tmp_path):
    config = {**MAMBA2, "layer_types": ["mamba", "attention"]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    shape = load_shape(str(tmp_path))
    assert shape == load_shape(str(path))
    assert shape.weight_bytes is None
    (tmp_path / "a.safetensors").write_bytes(bytes(70))
    (tmp_path / "b.safetensors").write_bytes(bytes(7))
    assert load_shape(str(path)).weight_bytes == 77
    index = {"metadata": {"total_size": 123456}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_shape(str(path)).weight_bytes == 123456
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match="total_size"):
        load_shape(str(path))


@pytest.mark.parametrize("text", [None, "{", "[]", b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidArgumentError, match=r"config"):
        load_shape(str(path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)
KINDS = (
    {"layer_types": ["mamba", "attention"]},
    {"hybrid_override_pattern": "M*"},
    {"num_hidden_layers": 5, "attn_layer_indices": [1, 4]},
    {"num_hidden_layers": 9, "attn_layer_period": 4, "attn_layer_offset": 2},
    {"num_hidden_layers": 9, "full_attention_interval": 4, "mamba_d_head": "auto"},
    {"num_hidden_layers": 3, "mamba_d_ssm": 96, "text_config": None},
    {
        **{"num_hidden_layers": 4, "full_attention_interval": 2, "linear_conv_kernel_dim": 4},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "chunk_size": 64},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 12, "dtype": "bfloat16"},
    },
)


@given(st.sampled_from(KINDS), st.data())
def test_whatever_a_file_holds_is_read_or_refused_by_name(kind, data):
    config = {"mamba_expand": 2, **MAMBA2, **kind}
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=2)):
        config[name] = data.draw(JSON)
    try:
        shape = read(config)
    except InvalidArgumentError:
        return
    assert shape.state_spec.bytes_per_slot > 0
    assert shape.ssm_chunk_size >= 1
