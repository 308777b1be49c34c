"""The probe accepts every model that resumes exactly, up to the model's own rounding."""

import contextlib

import pytest
import torch
import transformers
from transformers_rig import (
    BLOCK,
    FAMILIES,
    GREEDY,
    UNRESUMABLE,
    assert_same,
    budgets,
    cached,
    join,
    make_cache,
    make_model,
    plain,
    skipped,
    text,
)

from mamba_cache.errors import InvalidArgumentError, UnresumableModelError
from mamba_cache.integrations.transformers.capture import StateCapture
from mamba_cache.integrations.transformers.probe import probe
from mamba_cache.integrations.transformers.runner import ModelRunner


def refusal(model):
    """Return the message of the probe's refusal; None if it accepts the model."""
    try:
        probe(ModelRunner(model), BLOCK)
    except UnresumableModelError as error:
        return str(error)
    return None


def scaled(model, factor):
    """Enlarge a model's weights, so that time steps leave their range and rounding grows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_no_good_model_is_refused(name):
    """With a constant bound one of 72 models was refused, for a rounding of 2.5e-5."""
    for number, factor in ((0, 1), (1, 8), (2, 1), (3, 8)):
        model = scaled(make_model(name, seed=number), factor)
        assert refusal(model) is None, (number, factor)


@contextlib.contextmanager
def few_digits(how):
    """Compute products of factors with few digits, where the processor supports them."""
    if isinstance(how, torch.dtype):
        with torch.autocast("cpu", how):
            yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(how)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


FEW_DIGITS = pytest.mark.parametrize("how", ["medium", torch.bfloat16], ids=str)


@FEW_DIGITS
@pytest.mark.parametrize("name", FAMILIES)
def test_no_good_model_is_refused_for_products_of_few_digits(name, how):
    """Kernels for one row and for several differ by more than any rounding of the embeddings."""
    with few_digits(how):
        assert refusal(make_model(name)) is None


@FEW_DIGITS
def test_a_cache_that_is_made_with_few_digits_serves_what_the_model_answers(how, generator):
    model = make_model("granite 4")
    prompt = text(generator, 4 * BLOCK)
    with few_digits(how):
        cache = make_cache(model)
        for ids in (prompt, join(prompt, text(generator, 5))):
            expected, actual = plain(model, ids), cached(cache, ids)
            without, found = (torch.stack(each.logits).float() for each in (expected, actual))
            torch.testing.assert_close(found, without, rtol=0, atol=0.02)
    assert cache.stats().hits == 1


WIDE = pytest.mark.parametrize("name", ["qwen3_5", "olmo_hybrid", "zamba2", "bamba"])


def in_float64(name, seed=0):
    """Make a float64 model with large weights; some scans, norms and softmaxes stay in float32."""
    return make_model(name, seed=seed, initializer_range=0.3).double()


MAMBAS = ("mamba", "falcon_mamba")
FORGETFUL = {
    "as made": (UNRESUMABLE, lambda name: make_model(name, seed=1), "highest"),
    "with large weights": (
        UNRESUMABLE,
        lambda name: scaled(make_model(name, seed=2), 8),
        "highest",
    ),
    "products of few digits": (UNRESUMABLE, make_model, "medium"),
    "autocast": (UNRESUMABLE, make_model, torch.bfloat16),
    "in half precision": (MAMBAS, lambda name: make_model(name).to(torch.bfloat16), "highest"),
    "in float64": (MAMBAS, in_float64, "highest"),
}


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for way, (names, *_) in FORGETFUL.items() for name in names]
)
def test_no_model_that_forgets_is_accepted(name, way):
    _, make, digits = FORGETFUL[way]
    with few_digits(digits):
        assert "differ from those of an unbroken run" in (refusal(make(name)) or "")


@WIDE
def test_no_good_model_of_large_weights_is_refused_in_float64(name):
    """The bound counted a float32 rounding once, but later layers amplify it."""
    for seed in range(3):
        assert refusal(in_float64(name, seed)) is None


@WIDE
def test_a_model_of_float64_that_forgets_a_little_is_refused(name, monkeypatch):
    """A forward of several tokens that begins with a state loses a thousandth of it."""
    model, layer = in_float64(name), transformers.cache_utils.LinearAttentionLayer
    update = layer.update_recurrent_state

    def forgetful(self, states, *args, **kwargs):
        return update(self, states * 0.999, *args, **kwargs)

    monkeypatch.setattr(layer, "update_recurrent_state", forgetful)
    assert "differ from those of an unbroken run" in (refusal(model) or "")


@pytest.mark.parametrize(
    ("has_kernels", "kept", "is_refused"), [(True, 1, False), (True, 0.98, True), (False, 1, True)]
)
def test_kernels_of_a_gpu_may_multiply_float32_with_ten_bits(
    has_kernels, kept, is_refused, monkeypatch
):
    """A float32 model with mamba_ssm was refused unless blocks had its chunk size."""
    model, layer = make_model("nemotron_h"), transformers.cache_utils.LinearAttentionLayer
    update = layer.update_recurrent_state

    def rounded(self, states, *args, **kwargs):
        digits = (states.view(torch.int32) & ~0x1FFF).view(torch.float32)
        return update(self, digits * kept, *args, **kwargs)

    monkeypatch.setattr(layer, "update_recurrent_state", rounded)
    monkeypatch.setattr(ModelRunner, "placement", lambda _: (torch.device("cuda"), torch.float32))
    monkeypatch.setattr(StateCapture, "has_kernels", has_kernels)
    assert (refusal(model) is not None) is is_refused


def test_large_states_that_round_much_are_no_fault():
    """A model may amplify a rounding: then an unbroken run differs from itself as much."""
    model = scaled(make_model("kimi_linear", seed=3), 16)
    assert refusal(model) is None


def assert_same_but_rounding(expected, actual):
    """Logits grow with large weights, so rounding is compared with the largest logit."""
    assert torch.equal(actual.sequences, expected.sequences)
    logits = torch.stack(expected.logits)
    difference = (torch.stack(actual.logits) - logits).abs().max() / logits.abs().max()
    assert difference < 1e-5


# Models that clamp their time steps in the prefill and not in decoding.


@pytest.fixture(params=["nemotron_h", "zamba2"])
def clamping(request):
    """Transformers' Nemotron-H and Zamba2, whose large weights take time steps to the clamp."""
    return scaled(make_model(request.param), 8)


def test_the_split_that_the_cache_uses_is_what_counts(clamping):
    _, is_step_exact, _ = probe(ModelRunner(clamping), BLOCK)
    assert not is_step_exact


@pytest.mark.parametrize("num_tokens", [1, 2, BLOCK, 4 * BLOCK, 4 * BLOCK + 1, 4 * BLOCK + 2])
def test_no_prompt_is_computed_in_single_tokens(clamping, generator, num_tokens):
    """A hit that left one token would use the decode path, which does not clamp."""
    lengths = []
    clamping.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: lengths.append(args[0].shape[1])
    )
    cache = make_cache(clamping, variant="watched")
    prompt = text(generator, num_tokens)
    shared = join(prompt[:, : num_tokens - 1], text(generator, 1))
    for ids in (prompt, prompt, shared):
        assert_same_but_rounding(plain(clamping, ids), cached(cache, ids))
        lengths.clear()
        cached(cache, ids, max_new_tokens=1)
        assert num_tokens == 1 or min(lengths, default=2) > 1
    if num_tokens > 2 * BLOCK:
        assert cache.stats().hits > 0


def test_a_prompt_that_is_cached_whole_is_not_computed_at_all(clamping, generator):
    cache = make_cache(clamping)
    prompt = text(generator, 3 * BLOCK)
    cache.prefill(prompt)
    computed = cache.stats().computed_tokens
    past = cache.prefill(prompt)
    assert cache.stats().computed_tokens == computed
    assert past.get_seq_length() == 3 * BLOCK


def test_a_state_that_no_cut_reaches_evicts_no_other(clamping, generator, monkeypatch):
    """Its boundary would leave one token; without capture no state can be saved there."""
    room = budgets(make_cache(clamping), slots=2, blocks=40)
    monkeypatch.setattr(StateCapture, "during", lambda *_: contextlib.nullcontext(()))
    cache = make_cache(clamping, **room)
    assert cache._prefiller._capture is None
    for length in (BLOCK + 4, 2 * BLOCK + 1):
        cache.prefill(text(generator, length))
    assert (cache.stats().cached_slots, cache.stats().evicted_slots) == (2, 0)


def test_rows_of_a_batch_are_not_either(clamping, generator):
    cache = make_cache(clamping)
    prompts = [text(generator, n) for n in (3 * BLOCK + 1, 3 * BLOCK + 2, 2 * BLOCK, 5, 1)]
    for _ in range(2):
        output = cache.generate([p[0].tolist() for p in prompts], **GREEDY)
        cache.check_invariants()
        for row, prompt in enumerate(prompts):
            alone = plain(clamping, prompt)
            answer = output.sequences[row : row + 1, 3 * BLOCK + 2 :]
            assert torch.equal(answer, alone.sequences[:, prompt.shape[1] :])


def test_their_answers_are_not_reused(clamping, generator):
    """States after decoding differ from those of a prefill of the next turn."""
    cache = make_cache(clamping)
    prompt = text(generator, 2 * BLOCK + 3)
    answer = cached(cache, prompt, max_new_tokens=3 * BLOCK).sequences
    longer = join(answer, text(generator, 4))
    hit = skipped(
        cache, lambda: assert_same_but_rounding(plain(clamping, longer), cached(cache, longer))
    )
    assert hit == 2 * BLOCK


def test_states_that_are_kept_outside_of_the_cache_are_named():
    config = transformers.RecurrentGemmaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, lru_width=32,
        block_types=["recurrent", "recurrent", "attention"], attention_window_size=16,
    )  # fmt: skip
    model = transformers.RecurrentGemmaForCausalLM(config).eval()
    with pytest.raises(InvalidArgumentError, match=r"layers \[0, 1\] are still empty .* modules"):
        make_cache(model)


# Rotary embeddings whose frequencies depend on the length of the sequence.


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope", "rope_theta": 1e4, "long_factor": [4.0] * 8,
            "short_factor": [1.0] * 8, "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["falcon_h1", "lfm2"])
def test_rope_that_depends_on_the_length_is_refused(name, parameters):
    model = make_model(name, rope_parameters=parameters, max_position_embeddings=16)
    with pytest.raises(UnresumableModelError, match=f"rope_type '{parameters['rope_type']}'"):
        make_cache(model)


def test_rope_of_one_kind_of_layers_is_refused():
    model = make_model("falcon_h1")
    rotary = next(m for m in model.modules() if hasattr(m, "rope_type"))
    rotary.rope_type = {"full_attention": "default", "sliding_attention": "dynamic"}
    with pytest.raises(UnresumableModelError, match=r"'dynamic' for layers of type 'sliding_att"):
        make_cache(model)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)  # fmt: skip
def test_rope_that_is_fixed_is_served_beyond_its_first_length(generator, parameters):
    model = make_model("falcon_h1", rope_parameters=parameters, max_position_embeddings=16)
    cache = make_cache(model)
    prompt = text(generator, 4 * BLOCK + 3)
    for _ in range(2):
        assert_same(plain(model, prompt), cached(cache, prompt))
    assert cache.stats().hits == 1
