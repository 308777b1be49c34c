"""What a model keeps, read from the configurations of several families."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.model_shapes import BUILT_IN, load_shape, shape_of
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


# Layers with a state, channels of the convolution, and heads, head size and state size.
PUBLISHED = {
    "nemotron-h-8b": (24, 10240, (128, 64, 128)),
    "nemotron-nano-9b-v2": (27, 12288, (128, 80, 128)),
    "granite-4.0-h-tiny": (36, 3328, (48, 64, 128)),
    "qwen3-next-80b-a3b": (36, 8192, (32, 128, 128)),
    "falcon-h1-7b": (44, 3584, (24, 128, 256)),
    "zamba2-7b": (81, 7424, (112, 64, 64)),
}


def test_built_in_models_have_the_states_that_are_published():
    """The benchmark of copies takes its states from them."""
    for name in BUILT_IN:
        num_layers, conv_dim, ssm = PUBLISHED[name]
        spec = StateSpec.mamba(num_layers, (conv_dim, 4), ssm, torch.bfloat16, torch.float32)
        assert load_shape(name).state_spec == spec, name


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
        ({"num_hidden_layers": 5, "full_attn_idxs": [1, 4]}, (3, 2)),
        ({"num_hidden_layers": 9, "layer_group_size": 4}, (7, 2)),
        ({"layer_types": ["conv", "full_attention", "moe"]}, (1, 1)),
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
        ({"layer_types": ["mamba", "indexed_attention"]}, "got .'indexed_attention'"),
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


def test_a_model_of_states_alone_names_its_heads_without_a_prefix():
    mamba2 = {
        "num_hidden_layers": 3, "hidden_size": 64, "num_heads": 6, "head_dim": 16,
        "state_size": 24, "n_groups": 3, "conv_kernel": 4, "chunk_size": 32,
    }  # fmt: skip
    shape = read(mamba2)
    assert [tensor.shape for tensor in shape.state_spec.tensors] == [CONV, SSM]
    assert (layers(shape), shape.kv_spec.bytes_per_block(256)) == ((3, 0), 0)
    assert shape.ssm_chunk_size == 32


@pytest.mark.parametrize(("width", "inner"), [(None, 128), (80, 80)])
def test_mamba_1_alone_may_say_its_width(width, inner):
    mamba = {
        "num_hidden_layers": 3, "hidden_size": 64, "expand": 2, "intermediate_size": width,
        "state_size": 24, "conv_kernel": 4,
    }  # fmt: skip
    assert [tensor.shape for tensor in read(mamba).state_spec.tensors] == [(inner, 4), (inner, 24)]


def test_windows_of_attention_are_part_of_the_state():
    """Next to a conv window, and without the token that is computed."""
    shape = read(
        mamba_d_state=None,
        conv_L_cache=3,
        layer_types=["conv", "conv", "sliding_attention", "full_attention"],
        sliding_window=12,
    )
    conv, window = shape.state_spec.tensors
    assert (conv.num_layers, conv.shape) == (2, (64, 3))
    assert (window.num_layers, window.shape) == (1, (2, 2, 11, 16))
    assert shape.kv_spec.num_layers == 1
    assert shape.ssm_chunk_size == 1


def test_latent_attention_keeps_one_vector_of_a_token():
    shape = read(
        layer_types=["linear_attention", "full_attention"],
        mamba_d_state=None,
        linear_num_heads=2,
        linear_head_dim=8,
        linear_conv_kernel_dim=4,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
    )
    assert shape.kv_spec.bytes_per_block(1) == (512 + 64) * 2
    assert [tensor.shape for tensor in shape.state_spec.tensors] == [(48, 4), (2, 8, 8)]


def test_compressed_attention_without_a_convolution_is_refused():
    with pytest.raises(InvalidArgumentError, match="cca_time0"):
        read(num_hidden_layers=1, cca_time0=1, cca_time1=1)


def test_kimi_sizes_that_are_no_object_are_refused():
    with pytest.raises(InvalidArgumentError, match="linear_attn_config must be an object"):
        read(num_hidden_layers=1, linear_attn_config=[1])


def test_what_is_of_no_known_kind_says_what_was_looked_for():
    with pytest.raises(InvalidArgumentError, match=r"conv_L_cache.*state_size.*'rwkv'"):
        shape_of({"model_type": "rwkv", "num_hidden_layers": 2}, name="a model")
    with pytest.raises(InvalidArgumentError, match=r"full_attn_idxs.*'unheard'"):
        read(num_hidden_layers=2, model_type="unheard")


@pytest.mark.parametrize("part", ["text_config", "llm_config", "decoder"])
def test_the_dtype_of_a_multimodal_model_is_that_of_its_text_model(part):
    inner = {**MAMBA2, "layer_types": ["mamba"]}
    shape = shape_of({"dtype": "float16", part: inner}, name="a model")
    assert shape.state_spec.tensors[0].dtype == torch.float16
    shape = shape_of({"dtype": "float16", part: {**inner, "dtype": "float32"}}, name="a model")
    assert shape.state_spec.tensors[0].dtype == torch.float32


@pytest.mark.parametrize("name", ["Nemotron-H-8B", "ZAMBA2-7b"])
def test_a_built_in_name_in_any_case(name):
    assert load_shape(name) == load_shape(name.lower())


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nemotron-h-8", "did you mean 'nemotron-h-8b'"),
        ("nvidia/Nemotron-H-8B-Base-8K", "did you mean 'nemotron-h-8b'"),
        ("someone/their-model", "hf download someone/their-model config.json"),
        (
            "nowhere/config.json",
            r"got 'nowhere/config\.json'\. There is no file or folder of that name$",
        ),
        ("", "got ''"),
        ("x" * 5000, "got 'xxx"),
        ("a\0b", "got"),
    ],
)
def test_a_model_that_is_not_there_says_what_is_allowed(model, said):
    with pytest.raises(InvalidArgumentError, match=said) as info:
        load_shape(model)
    assert str(info.value).startswith("model must be one of nemotron-h-8b,")
    assert "Errno" not in str(info.value)


def test_a_folder_without_a_configuration_is_said_to_be_one(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"folder .* must hold a config\.json"):
        load_shape(str(tmp_path))


@pytest.mark.parametrize("found", ["a file", None, object(), ValueError("no id"), "no library"])
def test_a_hub_id_is_looked_up_in_the_local_cache(tmp_path, monkeypatch, found):
    """Where huggingface_hub is installed; and nothing is downloaded."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**MAMBA2, "layer_types": ["mamba"]}))

    def look_up(hub_id, filename):
        assert (hub_id, filename) == ("someone/their-model", "config.json")
        if isinstance(found, Exception):
            raise found
        return str(path) if found == "a file" else found

    library = SimpleNamespace(try_to_load_from_cache=look_up)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None if found == "no library" else library)
    if found == "a file":
        assert load_shape("someone/their-model") == load_shape(str(path))
    else:
        with pytest.raises(InvalidArgumentError, match="no such model"):
            load_shape("someone/their-model")


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
    {"num_attention_heads": None, "num_hidden_layers": 3, "num_heads": 6, "head_dim": 16},
    {"num_hidden_layers": 3, "full_attn_idxs": [1], "conv_L_cache": 3},
    {"layer_types": ["hybrid", "hybrid_sliding"], "conv_kernel_size": 3, "sliding_window": 9},
    {"num_hidden_layers": 3, "cca_time0": 2, "cca_time1": 2},
    {
        **{"num_hidden_layers": 3, "kv_lora_rank": 8, "qk_rope_head_dim": 4},
        "linear_attn_config": {
            **{"full_attn_layers": [3], "num_heads": 2, "head_dim": 8},
            "short_conv_kernel_size": 4,
        },
    },
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
