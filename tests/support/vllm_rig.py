"""A real vLLM on the CPU with tiny random models of three families, and requests for it."""

import contextlib
import gc
import os
import random
import warnings
from dataclasses import dataclass, field
from unittest import mock

os.environ.update(
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # so that tests can inspect the engine
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about vLLM's imports
    import torch
    import transformers
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.platforms import current_platform
    from vllm.v1.metrics.reader import Counter
    from vllm.v1.worker import mamba_utils
    from vllm.v1.worker.gpu.model_states import mamba_hybrid

from mamba_cache.integrations import vllm as ours

VOCABULARY = 512
FEW = 128
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def granite(vocabulary):
    config = transformers.GraniteMoeHybridConfig(
        **_SHAPE, vocab_size=vocabulary, num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"], mamba_n_heads=4, mamba_d_head=32,
        mamba_d_state=16, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=64,
        num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=64,
        position_embedding_type="nope",
    )  # fmt: skip
    return transformers.GraniteMoeHybridForCausalLM(config)


def nemotron(vocabulary):
    config = transformers.NemotronHConfig(
        **_SHAPE, vocab_size=vocabulary, num_hidden_layers=4, hybrid_override_pattern="M*M-",
        head_dim=32, mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=16, n_groups=1,
        conv_kernel=4, expand=2, chunk_size=64,
    )  # fmt: skip
    return transformers.NemotronHForCausalLM(config)


def qwen3_next(vocabulary):
    config = transformers.Qwen3NextConfig(
        **_SHAPE, vocab_size=vocabulary, num_hidden_layers=3, head_dim=32,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=64, linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2,
        mlp_only_layers=[0, 2], moe_intermediate_size=32, shared_expert_intermediate_size=32,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


MODELS = {"granite": granite, "nemotron": nemotron, "qwen3_next": qwen3_next}
DTYPES = {"qwen3_next": "bfloat16"}  # required by vLLM's CPU kernels for its layers


def save_model(name, folder, counts=False):
    """Save a random model whose states depend on distant tokens.

    A model that ``counts`` often answers the successor of a token, so that drafts are right. Its
    vocabulary is small: vLLM's layers on a CPU without AMX cannot take fewer drafts than before, so
    each token must have occurred before with a continuation.
    """
    torch.manual_seed(1)
    model = MODELS[name](FEW if counts else VOCABULARY).float()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("A_log"):
                weight.uniform_(-3, 0)
            elif key.endswith("dt_bias"):
                weight.uniform_(-4, -2)
            elif weight.dim() > 1:
                weight.normal_(0, 0.15)
            if counts and key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                weight.mul_(0.1)
        if counts:
            model.lm_head.weight += 4 * model.get_input_embeddings().weight.roll(1, dims=0)
    model.save_pretrained(folder)


def _keep_kernel_overrides():
    """Let vLLM search all modules for kernels only once: it fails on numba's modules."""
    type(current_platform).register_triton_kernel_overrides = lambda *_: None


def without_checkpoints_in_prefills(monkeypatch):
    """Turn off checkpoints inside prefills: vLLM 0.32 on the CPU reads them at a wrong index."""
    if "get_kv_cache_spec" in vars(MambaMixer2):
        monkeypatch.delattr(MambaMixer2, "get_kv_cache_spec")


COPIES = {
    mamba_utils: (
        "MambaBuffers",
        "MambaCopyBuffers",
        "MambaSpecDecodeGPUContext",
        "postprocess_mamba_align_gpu",
        "preprocess_mamba",
        "stage_postprocess_inputs_to_gpu",
    ),
    mamba_hybrid: ("MambaSpecDecodeGPUContext",),
}


@contextlib.contextmanager
def patched():
    """Replace vLLM's copies by this package's, for engines created in the ``with`` block."""
    with contextlib.ExitStack() as stack:
        for module, names in COPIES.items():
            for name in names:
                assert hasattr(module, name)
                stack.enter_context(mock.patch.object(module, name, getattr(ours, name)))
        yield


@dataclass
class Answers:
    """Answers of an engine: tokens and cached prompt tokens of each request."""

    tokens: dict = field(default_factory=dict)
    cached: dict = field(default_factory=dict)


class Engine:
    """An engine with a saved model; it ends with the ``with`` block."""

    def __init__(self, folder, name, **options):
        defaults = {
            "dtype": DTYPES.get(name, "float32"),
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": 64 << 20,
            "max_num_batched_tokens": 1024,
        }
        self.llm = LLM(
            model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=2048,
            max_num_seqs=8, disable_log_stats=False, **{**defaults, **options},
        )  # fmt: skip
        _keep_kernel_overrides()
        self.answers = Answers()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    @property
    def cache_config(self):
        return self.llm.llm_engine.vllm_config.cache_config

    @property
    def runner(self):
        worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        return worker.model_runner

    def counted(self, name):
        """Return one of vLLM's counters."""
        counters = [m for m in self.llm.get_metrics() if isinstance(m, Counter)]
        return sum(m.value for m in counters if m.name == f"vllm:{name}")

    def ask(self, title, *prompts, num_tokens=12):
        """Answer one batch of prompts greedily."""
        sampling = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        for place, output in enumerate(self.llm.generate(requests, sampling, use_tqdm=False)):
            self.answers.tokens[title, place] = list(output.outputs[0].token_ids)
            self.answers.cached[title, place] = output.num_cached_tokens


DRAFTS = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1, "prompt_lookup_min": 1,
}  # fmt: skip


def random_tokens(count, seed):
    drawn = random.Random(seed)
    return [drawn.randrange(2, VOCABULARY) for _ in range(count)]


def serve(engine):
    """Run cold, hit, branch and mixed prompts; then more than a ``TIGHT`` engine has room for."""
    block = engine.cache_config.block_size
    first = random_tokens(2 * block + 70, 1)
    engine.ask("cold", first)
    engine.ask("hit", first)
    engine.ask("branch", first[: 2 * block] + random_tokens(90, 2))
    engine.ask(
        "mixed", first + random_tokens(20, 3), random_tokens(block + 30, 4), random_tokens(9, 5),
        first[: 2 * block] + random_tokens(9, 6),
    )  # fmt: skip
    engine.ask("preempted", *(random_tokens(block - 4, 7 + place) for place in range(8)))
    return engine.answers


TIGHT = {"num_gpu_blocks_override": 22}
"""Room for one request of maximum length, or for seven requests that grow to two blocks."""


def serve_drafts(engine):
    """Run prompts that partly predict their answers; answers cross the ends of columns."""
    block = engine.cache_config.block_size
    numbers = [place % FEW for place in range(2 * block)]
    engine.ask("cold", numbers[: block - 9], num_tokens=24)
    engine.ask("longer", numbers[: block + 40], num_tokens=24)
    engine.ask("again", numbers[: block + 40], num_tokens=24)
    engine.ask("two", numbers[: 2 * block - 7], numbers[50 : 50 + block - 11], num_tokens=24)
    return engine.answers
