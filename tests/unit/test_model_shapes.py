"""Sources of a model's shape: a name, a file or folder, or the local cache of the hub."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from mamba_cache.errors import InvalidArgumentError, MissingExtraError
from mamba_cache.integrations.model_shapes import BUILT_IN, load_shape
from mamba_cache.states import KVCacheSpec, StateSpec

CONFIG = {
    "model_type": "bamba", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "attn_layer_indices": [1], "mamba_n_heads": 6, "mamba_d_head": "auto", "mamba_expand": 3,
    "mamba_d_state": 24, "mamba_n_groups": 3, "mamba_d_conv": 4, "mamba_chunk_size": 32,
    "pad_token_id": 0, "dtype": "float16",
}  # fmt: skip
CONV, SSM = (6 * 32 + 2 * 3 * 24, 4), (6, 32, 24)


@pytest.fixture
def transformers():
    """Return transformers, which is needed to read a file."""
    return pytest.importorskip("transformers", reason="needs the extra transformers")


# Layers with a state, convolution channels, heads, head size and state size.
PUBLISHED = {
    "nemotron-h-8b": (24, 10240, (128, 64, 128)),
    "nemotron-nano-9b-v2": (27, 12288, (128, 80, 128)),
    "granite-4.0-h-tiny": (36, 3328, (48, 64, 128)),
    "qwen3-next-80b-a3b": (36, 8192, (32, 128, 128)),
    "falcon-h1-7b": (44, 3584, (24, 128, 256)),
    "zamba2-7b": (81, 7424, (112, 64, 64)),
}


def test_built_in_models_have_the_states_that_are_published():
    for name in BUILT_IN:
        num_layers, conv_dim, ssm = PUBLISHED[name]
        spec = StateSpec.mamba(num_layers, (conv_dim, 4), ssm, torch.bfloat16, torch.float32)
        assert load_shape(name).state_spec == load_shape(name.upper()).state_spec == spec, name


def test_every_size_is_read(transformers, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shape = load_shape(str(tmp_path))
    state = StateSpec.mamba(1, CONV, SSM, torch.float16, torch.float32)
    assert shape.state_spec.bytes_per_slot == state.bytes_per_slot
    kv = shape.kv_spec
    assert kv.bytes_per_block(1) == KVCacheSpec(1, 2, 16, torch.float16).bytes_per_block(1)
    assert (kv.num_layers, kv.dtype) == (1, torch.float16)
    assert (shape.ssm_chunk_size, shape.num_state_layers) == (32, 1)


def test_without_transformers_a_configuration_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[transformers\]'"):
        load_shape(str(tmp_path))
    assert load_shape("nemotron-h-8b") is BUILT_IN["nemotron-h-8b"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nemotron-h-8", "did you mean 'nemotron-h-8b'"),
        ("someone/their-model", "hf download OWNER/NAME config.json"),
        ("nowhere/config.json", r"the folder that holds one, .*got 'nowhere/config\.json'$"),
        ("x" * 5000, "got 'xxx"),
        ("a\0b", "got"),
    ],
)
def test_the_error_of_a_missing_model_lists_the_allowed_ones(model, said):
    with pytest.raises(InvalidArgumentError, match=said) as info:
        load_shape(model)
    assert str(info.value).startswith("model must be one of nemotron-h-8b,")
    assert "Errno" not in str(info.value)


@pytest.mark.parametrize("found", ["a file", None, object(), ValueError("no id"), "no library"])
def test_a_hub_id_is_looked_up_in_the_local_cache(transformers, tmp_path, monkeypatch, found):
    """This needs huggingface_hub; nothing is downloaded."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    shape = load_shape(str(path))  # imports transformers' part of the hub

    def look_up(hub_id, filename):
        assert (hub_id, filename) == ("someone/their-model", "config.json")
        if isinstance(found, Exception):
            raise found
        return str(path) if found == "a file" else found

    library = SimpleNamespace(try_to_load_from_cache=look_up)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None if found == "no library" else library)
    if found == "a file":
        assert load_shape("someone/their-model") == shape
    else:
        with pytest.raises(InvalidArgumentError, match="got 'someone/their-model'"):
            load_shape("someone/their-model")


def test_a_file_or_the_folder_that_holds_it(transformers, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    shape = load_shape(str(tmp_path))
    assert shape == load_shape(str(path))
    assert shape.weight_bytes > 2 * 64 * 64
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
