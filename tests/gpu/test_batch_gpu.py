"""Batches on a GPU: decode steps from CUDA graphs, and their eager fallback."""

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

import torch
from gpu_models import BLOCK, make_model
from gpu_rig import waiting_raises
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from mamba_cache.errors import ModelChangedError
from mamba_cache.integrations.transformers import PrefixCache
from mamba_cache.integrations.transformers.batching.graphs import RectangleCosts, StepGraphs
from mamba_cache.integrations.transformers.batching.kernels import paged_attention
from mamba_cache.integrations.transformers.capture import ScanRun

pytestmark = pytest.mark.gpu

FAMILIES = (
    "mamba2", "nemotron_h", "granitemoehybrid without experts", "qwen3_5_text", "falcon_h1", "lfm2",
)  # fmt: skip
EAGER = ContinuousBatchingConfig(use_cuda_graph=False)


@pytest.fixture
def costs_as_assumed(monkeypatch):
    """Use assumed costs of forwards: on a shared GPU measured costs may rule out graphs."""
    monkeypatch.setattr(RectangleCosts, "_update", lambda costs: None)


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
    assert len(graphs.graph_sizes) == 5  # 1, 2, 4, 8 and 12
    assert graphs.captures == 5 + graphs.graph_shapes
    assert graphs.warm_up_seconds > 0
    assert graphs.graph_bytes > 0
    assert eager.batch_stats().replays == 0
    assert eager.batch_stats().eager_reason == "use_cuda_graph is False"


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize(("family", "num_attention"), [("nemotron_h", 1), ("mamba2", 0)])
def test_what_a_step_takes_beside_the_models_own_code(
    family, num_attention, generator, monkeypatch
):
    """One launch sorts its inputs, and three serve each attention layer."""
    cache = make_cache(make_model(family))
    run(cache, prompts_of(generator, 3), continuous_batching_config=EAGER)
    batcher, profiles = cache._batcher, []
    step, kinds = batcher.step, torch.profiler.ProfilerActivity

    def profiled():
        if profiles or not batcher._scheduler.is_steady:
            return step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
            over = step()
            torch.cuda.synchronize()
        profiles.append(profile)
        return over

    monkeypatch.setattr(batcher, "step", profiled)
    run(cache, prompts_of(generator, 3), continuous_batching_config=EAGER)
    on_gpu = torch.profiler.DeviceType.CUDA
    names = [one.name for one in profiles[0].events() if one.device_type == on_gpu]
    launched = "_write_kernel", "_attend_kernel", "_combine_kernel"
    kernels = {"_sort_kernel": 1} | dict.fromkeys(launched, num_attention)
    assert {name: sum(one.startswith(name) for one in names) for name in kernels} == kernels
    assert not any("index_copy" in one or "indexFunc" in one for one in names)


def test_keys_and_values_past_the_reach_of_32_bits_are_written(generator):
    pool = torch.zeros(2, 2_200_000, 8, 128, dtype=torch.uint8, device="cuda")
    slots = torch.tensor([5, 2_199_999, 2_100_000], device="cuda")
    new = torch.randint(1, 99, (2, 3, 8, 1, 128), generator=generator).to("cuda", torch.uint8)
    paged_attention.write_tokens(pool, slots, *new.unbind())
    assert torch.equal(pool[:, slots], new[:, :, :, 0])
    assert int((pool.view(torch.int64) != 0).any(-1).sum()) == 2 * 3 * 8


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5_text", "mamba2"])
def test_calls_of_generate_are_replayed_and_answer_as_the_model_does(family, generator):
    """Calls: a prompt twice, sampled with processors, and rows of different lengths."""
    model, prompts = make_model(family, torch.float32), prompts_of(generator, 4)
    cache = make_cache(model)
    longest = max(map(len, prompts))
    rows = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device="cuda")
    options = {"max_new_tokens": 16, "eos_token_id": None, "do_sample": False}
    sampled = {"do_sample": True, "top_k": 20, "repetition_penalty": 1.2, "num_return_sequences": 2}
    calls = [(rows[-1:], {}), (rows[-1:], {}), (rows[-1:], sampled), (rows, {})]
    for ids, others in calls:
        found = []
        for one in (model, cache):
            torch.manual_seed(5)
            mask = (ids > 0).long()
            found.append(one.generate(ids, attention_mask=mask, **{**options, **others}))
        assert torch.equal(*found)
        cache.check_invariants()
    stats = cache.batch_stats()
    # Rows wait before their last token, which is then computed as a single token.
    is_step_exact = cache._prefiller.min_tokens == 1
    num_batched = len(calls) if is_step_exact else 2
    assert stats.generate_calls == num_batched
    assert stats.eager_steps == 0, stats.eager_reason
    assert stats.replays == stats.decode_steps > 0
    assert cache.stats().hits > 0
    dictionary = cache.generate(rows[-1:], return_dict_in_generate=True, **options)
    assert dictionary.past_key_values.layers
    assert cache.batch_stats().generate_calls == num_batched


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_replayed_rectangle_is_the_eager_one_to_the_bit(family, dtype, generator, monkeypatch):
    """Compare logits, live states, checkpoints, keys and values of rows of many lengths."""
    cache = make_cache(make_model(family, dtype))
    cache.generate_batch([[5]], max_new_tokens=1)
    batcher, compared = cache._batcher, []
    context, replay = batcher.context, StepGraphs.run
    written = [*context.live_states.tensors.values()]
    written += context.slot_allocator.states.tensors.values()
    written.append(context.kv_cache)

    def run_both(self, key, compute):
        if key not in self._graphs or isinstance(key, int):
            return replay(self, key, compute)
        before = [tensor.clone() for tensor in written]
        expected = [compute().clone(), *(tensor.clone() for tensor in written)]
        for tensor, kept in zip(written, before, strict=True):
            tensor.copy_(kept)
        logits = replay(self, key, compute)
        # All padding is written to the last block, in any order.
        found = [logits, *written[:-1], written[-1][:, :, :-1]]
        pairs = zip(found, [*expected[:-1], expected[-1][:, :, :-1]], strict=True)
        compared.append(all(torch.equal(a, b) for a, b in pairs))
        return logits

    monkeypatch.setattr(StepGraphs, "run", run_both)
    for _ in range(6):
        prompts = [tokens(generator, 20 + 23 * n) for n in range(7)]
        run(cache, prompts, max_new_tokens=2)
        run(cache, [[*prompts[3], *tokens(generator, 70)]], max_new_tokens=2)
    assert len(compared) >= 4
    assert all(compared)
    assert cache.batch_stats().prefill_replays == len(compared)


@pytest.mark.usefixtures("costs_as_assumed")
def test_all_shapes_are_captured_before_the_first_answer(generator):
    model = make_model("nemotron_h")
    cache, plain = make_cache(model, max_requests=8), make_cache(model, cuda_graphs=False)
    cache.prepare_batches()
    before = cache.batch_stats()
    assert before.graph_sizes == (1, 2, 4, 8)
    most = cache._batcher.chunk_tokens
    sizes = [rows for rows, _ in cache._batcher._forwards.costs.sizes(most)]
    assert before.graph_shapes >= sum(rows <= 8 for rows in sizes) > 5
    assert before.prefill_tokens == before.steps == 0
    assert cache.stats().cached_blocks == cache.stats().saved_states == 0
    prompts = prompts_of(generator, 4)
    expected = run(plain, prompts, max_new_tokens=1)
    assert run(cache, prompts, max_new_tokens=1) == expected
    assert cache.batch_stats().prefill_replays > 0
    assert plain.batch_stats().prefill_replays == plain.batch_stats().captures == 0
    assert plain.batch_stats().eager_reason in {"", "cuda_graphs is False"}


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5_text"])
@pytest.mark.usefixtures("costs_as_assumed")
def test_conversations_in_mixed_batches_are_those_of_generate(family, generator):
    """In float32: prompts of any length and turns of chats, replayed or not."""
    model = make_model(family, torch.float32)
    cache, chats = make_cache(model), [tokens(generator, 10 + 31 * n) for n in range(6)]
    for _ in range(12):
        found = run(cache, chats, max_new_tokens=6)
        for number, chat in enumerate(chats):
            ids = torch.tensor([chat], device="cuda")
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6,
                eos_token_id=None,
            )  # fmt: skip
            assert found[number] == output[0, len(chat) :].tolist()
            more = int(torch.randint(1, 150, (), generator=generator))
            chats[number] = chat + found[number] + tokens(generator, more)
    stats = cache.batch_stats()
    assert stats.prefill_replays > 0
    assert stats.padding_tokens > 0
    assert stats.prefill_eager_reason == ""


def ssd_kernel(generator, rows, size):
    scan = pytest.importorskip("mamba_ssm.ops.triton.ssd_combined", reason="needs mamba_ssm")
    shapes = {"x": (8, 32), "dt": (8,), "B": (1, 64), "C": (1, 64)}
    given = [
        torch.randn(rows, size, *shape, generator=generator).to("cuda", torch.bfloat16)
        for shape in shapes.values()
    ]
    x, dt, b, c = given
    options = {
        "chunk_size": 128, "D": torch.ones(8, device="cuda"), "dt_softplus": True,
        "dt_bias": torch.linspace(-1, 1, 8, device="cuda"), "return_final_states": True,
    }  # fmt: skip
    a = -torch.linspace(0.5, 4, 8, device="cuda")
    states = torch.randn(rows, 8, 32, 64, generator=generator).cuda()
    return scan.mamba_chunk_scan_combined, (x, dt, a, b, c), options, "initial_states", states


def delta_kernel(generator, rows, size):
    rule = pytest.importorskip("fla.ops.gated_delta_rule", reason="needs fla")

    def draw(*shape):
        return torch.randn(rows, size, *shape, generator=generator).to("cuda", torch.bfloat16)

    args = draw(4, 64), draw(4, 64), draw(4, 64)
    # fla sums the gates of a chunk in a tree: with padding at the chunk's end the order differs
    # from that at a row's own end. Sums of multiples of 1/256 are exact in any order.
    gates = (draw(4).float().exp() * 256).round() / 256
    options = {
        "g": -gates, "beta": draw(4).sigmoid(), "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    states = torch.randn(rows, 4, 64, 64, generator=generator).cuda()
    return rule.chunk_gated_delta_rule, args, options, "initial_state", states


@pytest.mark.parametrize("make", [ssd_kernel, delta_kernel])
@pytest.mark.parametrize("low", [0.0, 0.01])
def test_a_kernel_computes_each_row_of_a_rectangle_as_alone_to_the_bit(make, low, generator):
    lengths, cuts = [130, 256, 300, 384], [[64, 96], [128, 256], [37, 300], [352, 384]]
    scan, args, options, initial, states = make(generator, len(lengths), max(lengths))
    if "dt_softplus" in options:
        options["dt_limit"] = (low, float("inf"))

    def compute(rows, size, *, is_spoilt):
        part = slice(rows[0], rows[-1] + 1)

        def cut(value):
            if not torch.is_tensor(value) or value.dim() < 3:
                return value
            value = value[part, :size].clone()
            for row, length in enumerate(lengths[part]):
                value[row, length:] = torch.nan if is_spoilt else value[row, length:]
            return value

        ends, own = torch.tensor(cuts).cuda()[part], torch.tensor(lengths).cuda()[part]
        bounds = torch.cat([torch.zeros_like(own)[:, None], ends, own[:, None]], 1)
        widths = tuple((bounds[:, 1:] - bounds[:, :-1]).amax(0).tolist())
        run = ScanRun(len(rows), size, widths, bounds.device, bounds, is_kernel=True)
        named = {name: cut(value) for name, value in options.items()}
        named[initial] = states[part]
        output, final = run.compute(scan, *map(cut, args), **named)
        return output, [*run.pieces, final]

    output, found = compute(range(len(lengths)), max(lengths), is_spoilt=True)
    for row, length in enumerate(lengths):
        alone, expected = compute([row], length, is_spoilt=False)
        assert torch.equal(output[row, :length], alone[0])
        assert all(torch.equal(a[row], b[0]) for a, b in zip(found, expected, strict=True))


class _ChangesWeights:
    """A streamer that changes the model when it is handed the prompt, before the first forward."""

    def __init__(self, model):
        self._weight = next(model.parameters())

    def put(self, _):
        with torch.no_grad():
            self._weight.mul_(1.5)

    def end(self):
        pass


def test_weights_that_a_streamer_changes_before_the_first_forward_are_noticed(generator):
    """The GPU begins to compare weights when the call begins."""
    model = make_model("nemotron_h", torch.float32)  # half precision rounds by shape
    cache, prompt = make_cache(model), torch.tensor(prompts_of(generator, 1), device="cuda")
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 2}
    for _ in range(3):
        cache.generate(prompt, **options)
    with pytest.raises(ModelChangedError):
        cache.generate(prompt, streamer=_ChangesWeights(model), **options)
    cache.reset()
    expected = model.generate(prompt, **options)
    assert torch.equal(cache.generate(prompt, **options), expected)
    next(model.parameters()).data.mul_(0.5)  # no version counter shows it
    with pytest.raises(ModelChangedError):
        cache.generate(prompt, **options)


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
    assert len(cache.batch_stats().graph_sizes) == 5


def test_a_model_that_cannot_be_captured_is_run_eagerly_with_a_reason(generator):
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
    step, steady = batcher.step, []

    def watched():
        if not batcher._scheduler.is_steady:
            return step()
        steady.append(1)
        with waiting_raises():  # waits for an event are not detected
            return step()

    monkeypatch.setattr(batcher, "step", watched)
    run(cache, prompts, max_new_tokens=100, **options)
    assert len(steady) >= 95
