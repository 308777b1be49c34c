"""Batches on a GPU: decode steps from CUDA graphs, and what they fall back to."""

from contextlib import contextmanager

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

import torch
from gpu_models import BLOCK, make_model
from gpu_rig import waiting_raises
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from mamba_cache.integrations.transformers import PrefixCache
from mamba_cache.integrations.transformers.batching import batcher as batcher_module
from mamba_cache.integrations.transformers.batching.kernels import decode_inputs

pytestmark = pytest.mark.gpu

FAMILIES = (
    "mamba2", "nemotron_h", "granitemoehybrid without experts", "qwen3_5_text", "falcon_h1", "lfm2",
)  # fmt: skip
EAGER = ContinuousBatchingConfig(use_cuda_graph=False)


def make_cache(model, **settings):
    ample = {"mamba_cache_gb": 0.2, "kv_cache_gb": 0.2, "block_size_tokens": BLOCK}
    return PrefixCache(model, **{**ample, "max_requests": 16, **settings})


def tokens(generator, count):
    return torch.randint(3, 512, (count,), generator=generator).tolist()


def prompts_of(generator, count=10):
    shared = tokens(generator, 2 * BLOCK)
    return [shared + tokens(generator, 1 + 13 * n) for n in range(count)]


def run(cache, prompts, **options):
    options = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False, **options}
    outputs = cache.generate_batch(prompts, **options)
    cache.check_invariants()
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_compute_what_eager_ones_do(family, generator):
    model, prompts = make_model(family), prompts_of(generator)
    eager, replayed = make_cache(model), make_cache(model)
    lengths = {"max_new_tokens": 40}
    expected = run(eager, prompts, continuous_batching_config=EAGER, **lengths)
    assert run(replayed, prompts, **lengths) == expected
    graphs = replayed.batch_stats()
    assert graphs.eager_steps == 0, graphs.eager_reason
    assert graphs.replays == graphs.decode_steps > 0
    assert graphs.captures == len(graphs.graph_sizes) == 5  # 1, 2, 4, 8 and 12
    assert graphs.warm_up_seconds > 0
    assert eager.batch_stats().replays == 0
    assert eager.batch_stats().eager_reason == "use_cuda_graph is False"


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize(("family", "num_attention"), [("nemotron_h", 1), ("mamba2", 0)])
def test_what_a_step_takes_beside_the_models_own_code(family, num_attention, generator):
    """One launch sorts its inputs, and three serve each attention layer."""
    cache = make_cache(make_model(family))
    run(cache, prompts_of(generator, 3), continuous_batching_config=EAGER)
    before = cache.batch_stats().decode_steps
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        run(cache, prompts_of(generator, 3), continuous_batching_config=EAGER)
        torch.cuda.synchronize()
    steps = cache.batch_stats().decode_steps - before
    on_gpu = torch.profiler.DeviceType.CUDA
    names = [one.name for one in profile.events() if one.device_type == on_gpu]
    kernels = {"_sort_kernel": steps}
    kernels |= dict.fromkeys(
        ("_write_kernel", "_attend_kernel", "_combine_kernel"), num_attention * steps
    )
    assert {name: sum(one.startswith(name) for one in names) for name in kernels} == kernels
    assert not any("index_copy" in one or "indexFunc" in one for one in names)


def test_keys_and_values_past_the_reach_of_32_bits_are_written(generator):
    pool = torch.zeros(2, 2_200_000, 8, 128, dtype=torch.uint8, device="cuda")
    slots = torch.tensor([5, 2_199_999, 2_100_000], device="cuda")
    new = torch.randint(1, 99, (2, 3, 8, 1, 128), generator=generator).to("cuda", torch.uint8)
    decode_inputs.write_tokens(pool, slots, *new.unbind())
    assert torch.equal(pool[:, slots], new[:, :, :, 0])
    assert int((pool.view(torch.int64) != 0).any(-1).sum()) == 2 * 3 * 8


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5_text", "mamba2"])
def test_answers_in_single_precision_are_those_of_generate(family, generator):
    model, prompts = make_model(family, torch.float32), prompts_of(generator, 5)
    cache = make_cache(model)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16,
            eos_token_id=None,
        )  # fmt: skip
        expected.append(output[0, len(prompt) :].tolist())
    for _ in range(2):
        assert run(cache, prompts, max_new_tokens=16) == expected


def test_captures_between_calls_leave_what_is_cached_alone(generator):
    model = make_model("nemotron_h")
    cache, prompts = make_cache(model), prompts_of(generator, 12)
    first = run(cache, prompts[:2])
    assert cache.batch_stats().graph_sizes == (1, 2)
    everything = run(cache, prompts)  # captures larger batches beside cached blocks
    assert everything[:2] == first
    before = cache.stats().skipped_tokens
    assert run(cache, prompts[:2]) == first
    assert cache.stats().skipped_tokens > before
    assert cache.batch_stats().captures == 5


def test_a_model_whose_weights_lie_elsewhere_is_captured_anew(generator):
    # What is cached is not computed again, and half precision rounds other shapes otherwise.
    model = make_model("nemotron_h", torch.float32)
    cache, prompts = make_cache(model), prompts_of(generator, 2)
    expected = run(cache, prompts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    assert run(cache, prompts) == expected
    assert cache.batch_stats().captures == 4
    assert cache.batch_stats().eager_steps == 0


def test_a_model_that_cannot_be_captured_is_run_eagerly_and_says_why(generator):
    model, prompts = make_model("nemotron_h"), prompts_of(generator, 3)
    expected = run(make_cache(model), prompts)
    model.model.layers[0].register_forward_hook(lambda *args: args[2].sum().item() and None)
    cache = make_cache(model, variant="watched")
    assert run(cache, prompts) == expected
    graphs = cache.batch_stats()
    assert (graphs.replays, graphs.graph_sizes) == (0, ())
    assert graphs.eager_reason.startswith("the model's decode step cannot be captured: ")


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 20, "seeds": 3}], ids=str)
def test_nothing_waits_for_the_device_but_for_the_tokens(generator, options, monkeypatch):
    model, prompts = make_model("nemotron_h"), [tokens(generator, 20) for _ in range(8)]
    cache = make_cache(model)
    run(cache, prompts, **options)
    batcher = cache._batcher
    fetch, step, steady = batcher_module._fetch, batcher.step, []

    @contextmanager
    def allowed():
        torch.cuda.set_sync_debug_mode("default")
        yield
        torch.cuda.set_sync_debug_mode("error")

    def fetch_tokens(tensor):
        if not steady:
            return fetch(tensor)
        with allowed():
            return fetch(tensor)

    def watched():
        if not batcher._scheduler.is_steady:
            return step()
        steady.append(1)
        with waiting_raises():
            return step()

    monkeypatch.setattr(batcher_module, "_fetch", fetch_tokens)
    monkeypatch.setattr(batcher, "step", watched)
    run(cache, prompts, max_new_tokens=100, **options)
    assert len(steady) >= 95


def test_requests_that_end_and_begin_while_others_decode(generator):
    """Rows of every kind beside the decoding ones: free, in their prompt, and moved."""
    model = make_model("nemotron_h")
    lengths = [3, 40, 7, 25, 1, 60, 12, 33, 5, 9, 80, 2, 15, 21, 30, 6]
    prompts = [tokens(generator, 5 + 31 * n) for n in range(len(lengths))]
    limits = {"max_batch_tokens": 128, "max_requests_per_batch": 6}
    together, alone = make_cache(model), make_cache(model, max_requests=1)
    config = model.generation_config
    configs = []
    for length in lengths:
        own = type(config)(**config.to_dict())
        own.max_new_tokens, own.do_sample, own.eos_token_id = length, False, -1
        configs.append(own)
    outputs = together.generate_batch(prompts, configs, ContinuousBatchingConfig(**limits))
    together.check_invariants()
    singly = alone.generate_batch(prompts, configs)
    same = [
        one.generated_tokens == other.generated_tokens
        for one, other in zip(outputs.values(), singly.values(), strict=True)
    ]
    # In half precision a batch rounds otherwise than one request does, which may turn a token.
    assert [len(one.generated_tokens) for one in outputs.values()] == lengths
    assert sum(same) >= 12
    assert together.batch_stats().eager_steps == 0
