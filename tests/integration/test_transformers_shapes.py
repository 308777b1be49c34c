"""A plan's state and KV sizes equal those of the model's transformers cache."""

import json
import runpy

import pytest
import torch
import transformers
from sources import ROOT
from transformers_rig import FAMILIES as SERVED
from transformers_rig import make_model

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.model_shapes import load_shape
from mamba_cache.integrations.transformers.layers import PrefixLayout, learn_layers, read_layers
from mamba_cache.integrations.transformers.runner import ModelRunner

BLOCK = 16


def measure(model):
    """Return the bytes per state and per block that ``PrefixCache`` measures."""
    runner = ModelRunner(model)
    cache = runner.new_cache()
    runner.forward([0, 1, 2], cache, 0)
    layers = learn_layers(cache)
    memory = read_layers(cache, layers, 3)
    layout = PrefixLayout(cache, layers, memory, BLOCK)
    return layout.state_spec.bytes_per_slot, layout.bytes_per_block


def planned(folder, config, dtype):
    """Return the sizes that a plan reads from a configuration's file."""
    config = {**config, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape = load_shape(str(folder))
    return shape.state_spec.bytes_per_slot, shape.kv_spec.bytes_per_block(BLOCK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_a_plan_reads_every_family_that_the_cache_serves(name, dtype, tmp_path):
    model = make_model(name).to(dtype)
    assert planned(tmp_path, model.config.to_dict(), dtype) == measure(model)


def test_a_file_has_other_names_than_transformers_gives(tmp_path):
    published = {
        "model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-M", "vocab_size": 64,
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "n_groups": 2, "ssm_state_size": 24, "conv_kernel": 4, "chunk_size": 16,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(**published)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert planned(tmp_path, published, torch.float32) == measure(model)


def test_the_text_model_of_a_multimodal_one_is_read(tmp_path):
    model = make_model("qwen3_5")
    text = model.config.to_dict()
    kept = measure(model)
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}}
    assert planned(tmp_path, config | {"architectures": None}, torch.float32) == kept


def test_weights_are_counted_where_there_are_no_files(tmp_path):
    model = make_model("granite 4")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict() | {"dtype": "float32"}))
    assert load_shape(str(tmp_path)).weight_bytes == 4 * sum(p.numel() for p in model.parameters())


LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA, "the model must have linear-attention layers"),
        ({"hidden_size": 32}, "must be a config.json that transformers reads"),
        ({"model_type": "no-such-type"}, "must be a config.json that transformers reads"),
        ({"model_type": "bamba", "mamba_n_heads": 7}, "must be a config.json|cannot be built"),
        ({"model_type": "nemotron_h", "hidden_size": -4}, "cannot be built on the meta device"),
        ([1, 2], "must be a config.json that transformers reads"),
    ],
)
def test_what_cannot_be_read_is_named(config, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=message):
        load_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "chunk"), [("mamba2", None), ("qwen3_next", 64), ("mamba", 1), ("lfm2", 1)]
)
def test_the_chunk_is_the_kernels(name, chunk, tmp_path):
    config = make_model(name).config
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    assert load_shape(str(tmp_path)).ssm_chunk_size == (chunk or config.chunk_size)


def test_the_readmes_table_is_as_the_code_makes_it():
    """If this fails, `python tests/model_table.py` rewrites the table."""
    made = runpy.run_path(str(ROOT / "tests" / "model_table.py"))
    readme = made["README"].read_text(encoding="utf-8")
    shown = readme.split(made["BEGIN"])[1].split(made["END"])[0]
    assert shown.strip() == made["table"]()
