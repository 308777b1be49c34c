"""Tiny random models of every hybrid family in transformers, and uncached runs of them."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from mamba_cache.integrations.transformers import PrefixCache, prefix_cache  # noqa: E402
from mamba_cache.integrations.transformers.batching.batcher import Batcher  # noqa: E402

transformers.logging.set_verbosity_error()

VOCABULARY = 97
BLOCK = 8
ANSWER = 10
GREEDY = {
    "do_sample": False,
    "max_new_tokens": ANSWER,
    "eos_token_id": None,
    "return_dict_in_generate": True,
    "output_logits": True,
}

_SMALL = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
_SSD = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_NEMOTRON = {
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "chunk_size": BLOCK,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    **_HEADS,
}
_CONVS = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, **_HEADS}
_LATENT = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}

_CONFIGS: dict[str, dict[str, object]] = {
    "mamba2": {
        "model_type": "mamba2", "num_hidden_layers": 2, "state_size": 8, "num_heads": 4,
        "head_dim": 16, "n_groups": 1, "chunk_size": BLOCK,
    },
    "nemotron_h": {
        "model_type": "nemotron_h", "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        **_NEMOTRON,
    },
    "nemotron_h with experts": {
        "model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        **_NEMOTRON,
    },
    "granite 4": {
        "model_type": "granitemoehybrid", "num_hidden_layers": 3, "num_local_experts": 4,
        "layer_types": ["mamba", "attention", "mamba"], "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "mamba_chunk_size": BLOCK, **_SSD, **_HEADS,
    },
    "falcon_h1": {
        "model_type": "falcon_h1", "num_hidden_layers": 2, "mamba_d_ssm": 64,
        "mamba_chunk_size": BLOCK, **_SSD, **_HEADS,
    },
    "bamba": {
        "model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [1],
        "mamba_chunk_size": BLOCK, **_SSD, **_HEADS,
    },
    "zamba2": {
        "model_type": "zamba2", "num_hidden_layers": 4, "mamba_d_state": 8, "mamba_ngroups": 1,
        "n_mamba_heads": 4, "mamba_headdim": 16, "chunk_size": BLOCK, "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "hybrid_layer_ids": [1, 3],
        "num_attention_heads": 2, "num_key_value_heads": 2,
    },
    "qwen3_next": {"model_type": "qwen3_next", **_DELTA, **_HEADS, **_EXPERTS},
    "qwen3_5": {"model_type": "qwen3_5_text", **_DELTA, **_HEADS},
    "qwen3_5 with experts": {"model_type": "qwen3_5_moe_text", **_DELTA, **_HEADS, **_EXPERTS},
    "olmo_hybrid": {
        "model_type": "olmo_hybrid", **_DELTA, "num_attention_heads": 2, "num_key_value_heads": 2,
    },
    "lfm2": {"model_type": "lfm2", **_CONVS},
    "lfm2 with experts": {
        "model_type": "lfm2_moe", "num_dense_layers": 1, **_CONVS, **_EXPERTS,
    },
    "lfm3": {"model_type": "lfm3", **_CONVS},
    "kimi_linear": {
        "model_type": "kimi_linear", "linear_head_dim": 16, "linear_num_heads": 2, **_LATENT,
    },
    "bailing_hybrid": {
        "model_type": "bailing_hybrid", "n_group": 1, "topk_group": 1, "head_dim": 16, **_LATENT,
    },
    "inkling": {
        "model_type": "inkling_text", "num_hidden_layers": 2, "sliding_window_size": 12,
        "layer_types": ["hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse"],
        "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **_HEADS,
    },
    "qwen4_exp": {
        "model_type": "qwen4_exp_text", "ple_layer_ids": [1], "hc_count": 2, "hc_lowrank": 4,
        "heads_per_ngram": 1, "ngram_vocab_size_base": 64, "split_ngram_parts": 1,
        "make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4,
        **_DELTA, **_HEADS, **_EXPERTS,
    },
    "zaya": {"model_type": "zaya", "num_hidden_layers": 2},
    "mamba": {"model_type": "mamba", "num_hidden_layers": 2, "state_size": 8},
    "falcon_mamba": {"model_type": "falcon_mamba", "num_hidden_layers": 2, "state_size": 8},
    "jamba": {
        "model_type": "jamba", "num_hidden_layers": 4, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 2, "mamba_d_state": 8, "use_mamba_kernels": False, **_HEADS,
    },
}  # fmt: skip

UNRESUMABLE = ("mamba", "falcon_mamba", "jamba")
"""Refused families: forwards of several tokens ignore the initial state."""

UNKNOWN_LAYERS = ("qwen4_exp",)
"""Families whose caches store more for each token than keys and values."""

FAMILIES = [
    name
    for name, config in _CONFIGS.items()
    if config["model_type"] in CONFIG_MAPPING and name not in (*UNKNOWN_LAYERS, *UNRESUMABLE)
]


def make_model(name: str, seed: int = 0, **settings: object) -> transformers.PreTrainedModel:
    """A model with fixed random weights."""
    config = {**_SMALL, **_CONFIGS[name], **settings}
    model_type = str(config.pop("model_type"))
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[model_type](**config)
    ).eval()


def compute_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the casts to float32 in float64 models, whose rounding would show."""

    def in_double(function):
        def cast(*args, **kwargs):
            args = [torch.float64 if x is torch.float32 else x for x in args]
            kwargs = {n: torch.float64 if x is torch.float32 else x for n, x in kwargs.items()}
            return function(*args, **kwargs)

        return cast

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for name in ("to", "type"):
        monkeypatch.setattr(torch.Tensor, name, in_double(getattr(torch.Tensor, name)))
    for owner in (torch, torch.nn.functional):
        monkeypatch.setattr(owner, "softmax", in_double(torch.nn.functional.softmax))


COMPOSITE = {"qwen3_5": "qwen3_5", "qwen3_5 with experts": "qwen3_5_moe"}
"""Families released with a vision tower, and the model type of these checkpoints."""


def make_multimodal_model(
    name: str = "qwen3_5", image_token_id: int = 1, **text_settings: object
) -> transformers.PreTrainedModel:
    """A model with a vision tower; 4 patches of 4 x 4 pixels give a token."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    settings = make_model(name, **text_settings).config.to_dict()
    settings["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[COMPOSITE[name]](
        text_config=settings,
        vision_config={**vision, "out_hidden_size": 32, "patch_size": 4},
        image_token_id=image_token_id,
    )
    return transformers.AutoModelForMultimodalLM.from_config(config).eval()


def generate_about_an_image(model: transformers.PreTrainedModel) -> None:
    """Answer a prompt with an image of 32 x 32 pixels, without a cache."""
    ids = torch.tensor([[5, *[1] * 16, 7]])
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=torch.rand(64, 3 * 2 * 4 * 4),
        image_grid_thw=torch.tensor([[1, 8, 8]]),
        mm_token_type_ids=(ids == 1).int(),
        **GREEDY,
    )


def make_cache(model: transformers.PreTrainedModel, **settings: object) -> PrefixCache:
    """A cache with room for a whole test, unless ``settings`` change the sizes.

    Entries in host memory are always loaded: speeds measured by a jumping clock mean nothing.
    """
    ample = {"mamba_cache_gb": 0.01, "kv_cache_gb": 0.01, "block_size_tokens": BLOCK}
    cache = PrefixCache(model, **{**ample, "segment_tokens": 4 * BLOCK, **settings})
    if cache._store.tiers.host is not None:
        cache._store.tiers.planners.host._learns = False
    return cache


def budgets(cache: PrefixCache, *, slots: int, blocks: int) -> dict[str, float]:
    """Budgets for exactly these numbers, for another cache of the same model."""
    layout = cache._store.layout
    return {
        "mamba_cache_gb": (slots + 0.5) * layout.state_spec.bytes_per_slot / 2**30,
        "kv_cache_gb": (blocks + 0.5) * layout.bytes_per_block / 2**30,
    }


def text(generator: torch.Generator, length: int) -> torch.Tensor:
    """Random token ids, [1, length], none of them special."""
    return torch.randint(3, VOCABULARY, (1, length), generator=generator)


def join(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, dim=1)


def plain(model: transformers.PreTrainedModel, ids: torch.Tensor, **options: object):
    """Output of the model without a cache."""
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{**GREEDY, **options})


def cached(cache: PrefixCache, ids: torch.Tensor, **options: object):
    """Output of the model with a cache; check invariants afterwards."""
    output = cache.generate(ids, attention_mask=torch.ones_like(ids), **{**GREEDY, **options})
    cache.check_invariants()
    return output


class RecordingStreamer:
    """A streamer that records its values, and acts at each value, at one value, or at the end."""

    def __init__(self, act=lambda: None, at: object = None) -> None:
        self.received, self._act, self._at = [], act, at

    def put(self, value: torch.Tensor) -> None:
        self.received.append(value.flatten().tolist())
        if self._at in (None, len(self.received)):
            self._act()

    def end(self) -> None:
        self.received.append("end")
        if self._at == "end":
            self._act()


def take_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `generate` use batches where it can, as with replayed CUDA graphs."""
    monkeypatch.setattr(prefix_cache, "GRAPH_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(Batcher, "replays", lambda *_: True)


def num_batched(cache: PrefixCache) -> int:
    """Calls of `generate` computed as a batch; the loop computed the others."""
    stats = cache.batch_stats()
    return 0 if stats is None else stats.generate_calls


def assert_same(expected, actual) -> None:
    """Check that tokens are equal, and logits up to rounding."""
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(
        torch.stack(actual.logits), torch.stack(expected.logits), rtol=0, atol=1e-5
    )


def skipped(cache: PrefixCache, run) -> int:
    """Prompt tokens that ``run()`` skipped."""
    before = cache.stats().skipped_tokens
    run()
    return cache.stats().skipped_tokens - before
