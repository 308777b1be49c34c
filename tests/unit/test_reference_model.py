"""The reference model: its sizes, formulas and input checks; requests never touch each other."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from packed_steps import PlainCaches, Sequence, Work, build_metadata, run_step, ssd_naive

from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, Request
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference import HybridModel, HybridModelConfig
from mamba_cache.reference.attention import AttentionLayer
from mamba_cache.reference.mamba import Mamba2Layer
from mamba_cache.reference.ssd import SSDInputs

CONFIG = HybridModelConfig(
    layer_pattern="M*M-",
    hidden_size=24,
    num_attention_heads=4,
    num_kv_heads=2,
    attention_head_dim=6,
    mamba_num_heads=4,
    mamba_head_dim=5,
    ssm_state_size=7,
    num_groups=2,
    ssm_chunk_size=4,
    mlp_size=16,
)
BLOCK_SIZE = 8
BLOCKS_PER_SEQUENCE = 8


def make_caches(config=CONFIG, dtype=torch.float64, *, num_rows=4, num_slots=4):
    return PlainCaches(
        config,
        dtype,
        num_blocks=num_rows * BLOCKS_PER_SEQUENCE,
        block_size=BLOCK_SIZE,
        num_rows=num_rows,
        num_slots=num_slots,
    )


def start(caches, tokens, row):
    """Return a fresh request in ``row``; zero its live state as ``begin_step`` does."""
    for tensor in caches.live_states.tensors.values():
        tensor[:, row] = 0
    first = row * BLOCKS_PER_SEQUENCE
    return Sequence(tokens, row, list(range(first, first + BLOCKS_PER_SEQUENCE)))


def draw_tokens(generator, count):
    return torch.randint(256, (count,), generator=generator).tolist()


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def logits_by_the_formulas(model, tokens):
    """Return logits of every position by a second implementation over the whole sequence."""

    def norm(x):
        return F.rms_norm(x, x.shape[-1:], eps=1e-5)

    hidden = model.embedding[tokens]
    for layer in model.layers:
        x = norm(hidden)
        if isinstance(layer, Mamba2Layer):
            hidden = hidden + _mamba_by_the_formulas(layer, x)
        elif isinstance(layer, AttentionLayer):
            hidden = hidden + _attention_by_the_formulas(layer, x)
        else:
            hidden = hidden + (x @ layer.up_proj.T).clamp(min=0) ** 2 @ layer.down_proj.T
    return norm(hidden) @ model.head.T


def _mamba_by_the_formulas(layer, x):
    config, num_tokens = layer.config, len(x)
    inner, shared = config.mamba_inner_size, config.num_groups * config.ssm_state_size
    projected = x @ layer.in_proj.T
    gate, conv_input, dt = (
        projected[:, :inner],
        projected[:, inner : inner + config.conv_dim],
        projected[:, inner + config.conv_dim :],
    )
    mixed = F.conv1d(
        F.pad(conv_input.T, (config.conv_kernel - 1, 0)),
        layer.conv_weight[:, None],
        layer.conv_bias,
        groups=config.conv_dim,
    ).T
    mixed = mixed / (1 + torch.exp(-mixed))
    inputs = SSDInputs(
        x=mixed[:, :inner].reshape(num_tokens, config.mamba_num_heads, -1),
        dt=torch.log1p(torch.exp(dt + layer.dt_bias)),
        a=layer.a,
        b=mixed[:, inner : inner + shared].reshape(num_tokens, config.num_groups, -1),
        c=mixed[:, inner + shared :].reshape(num_tokens, config.num_groups, -1),
    )
    zero = x.new_zeros(config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size)
    y, _ = ssd_naive(inputs, zero)
    y = (y + layer.d[None, :, None] * inputs.x).reshape(num_tokens, inner)
    gated = (y * gate / (1 + torch.exp(-gate))).reshape(num_tokens, config.num_groups, -1)
    gated = F.rms_norm(gated, gated.shape[-1:], eps=1e-5).reshape(num_tokens, inner)
    return gated @ layer.out_proj.T


def _attention_by_the_formulas(layer, x):
    config, num_tokens = layer.config, len(x)
    width, kv_heads = config.attention_head_dim, config.num_kv_heads
    projected = (x @ layer.qkv_proj.T).reshape(num_tokens, -1, width)
    queries, keys, values = (
        projected[:, : -2 * kv_heads],
        projected[:, -2 * kv_heads : -kv_heads],
        projected[:, -kv_heads:],
    )
    outputs = torch.empty_like(queries)
    for head in range(config.num_attention_heads):
        shared = head * kv_heads // config.num_attention_heads
        for t in range(num_tokens):
            scores = keys[: t + 1, shared] @ queries[t, head] / width**0.5
            outputs[t, head] = torch.softmax(scores, 0) @ values[: t + 1, shared]
    return outputs.flatten(1) @ layer.out_proj.T


def test_follows_the_papers_formulas(generator):
    """Two requests in rows of any order: whole, in chunks and token by token, in one batch."""
    model = HybridModel(CONFIG, dtype=torch.float64, seed=1)
    prompts = [draw_tokens(generator, 27) for _ in range(2)]
    expected = [logits_by_the_formulas(model, tokens) for tokens in prompts]
    caches = make_caches()
    first, second = (start(caches, *each) for each in zip(prompts, (2, 0), strict=True))
    steps = [([], [Work(first, count), Work(second, 5)]) for count in (11, 7)]
    steps += [([Work(first, 1)], [Work(second, count)]) for count in (1, 6, 3, 2)]
    steps += [([Work(second, 1), Work(first, 1)], []), ([Work(second, 2), Work(first, 1)], [])]
    for decodes, prefills in steps:
        logits = run_step(model, caches, decodes, prefills)
        ends = [(w, w.num_tokens - 1) for w in prefills]
        rows = [(w, place) for w in decodes for place in range(w.num_tokens)] + ends
        for row, (work, place) in zip(logits, rows, strict=True):
            sequence = work.sequence
            at = sequence.num_computed - work.num_tokens + place
            wanted = expected[0 if sequence is first else 1][at]
            torch.testing.assert_close(row, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("pattern", ["M-", "*-", "MM"])
def test_needs_no_layer_of_any_kind(pattern, generator):
    config = dataclasses.replace(CONFIG, layer_pattern=pattern)
    model, caches = HybridModel(config, dtype=torch.float64), make_caches(config)
    tokens = draw_tokens(generator, 13)
    sequence = start(caches, tokens, row=0)
    if "*" not in pattern:
        caches.kv_cache = None
    run_step(model, caches, [], [Work(sequence, 12)])
    logits = run_step(model, caches, [Work(sequence, 1)], [])
    expected = logits_by_the_formulas(model, tokens)[-1]
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_narrow_weights_come_close_to_float64(dtype, tolerance, generator):
    tokens = draw_tokens(generator, 30)
    logits = {}
    for each in (torch.float64, dtype):
        model, caches = HybridModel(CONFIG, dtype=each, seed=5), make_caches(dtype=each)
        sequence = start(caches, tokens, row=0)
        run_step(model, caches, [], [Work(sequence, 29)])
        logits[each] = run_step(model, caches, [Work(sequence, 1)], [])
    assert logits[dtype].dtype == torch.float32
    assert (logits[dtype] - logits[torch.float64]).norm() < tolerance * logits[torch.float64].norm()


def test_a_seed_names_the_weights():
    def weights(seed, dtype=torch.float32):
        return HybridModel(CONFIG, seed=seed, dtype=dtype).layers[0].in_proj

    assert torch.equal(weights(3), weights(3))
    assert torch.equal(weights(3, torch.float64).float(), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_forward_reads_nothing_back_from_the_device(generator):
    """Tensors on the meta device have no values: reading one on the host raises."""
    model = HybridModel(CONFIG, dtype=torch.float64, device="meta")
    caches = make_caches()
    decoding, prefilling = (start(caches, draw_tokens(generator, 20), row) for row in (0, 1))
    decoding.num_computed = 9
    decodes = [Work(decoding, 2)]
    metadata = build_metadata(CONFIG, caches, decodes, [Work(prefilling, 18, {8: 0, 16: 1})])
    on_meta = {
        field.name: getattr(metadata, field.name).to("meta")
        for field in dataclasses.fields(metadata)
        if isinstance(getattr(metadata, field.name), torch.Tensor)
    }
    caches.kv_cache = caches.kv_cache.to("meta")
    for pool in (caches.live_states, caches.slots):
        pool.tensors = {name: tensor.to("meta") for name, tensor in pool.tensors.items()}
    # The plain twin serves the CPU; tests/gpu check that the kernel does not synchronise.
    caches.extract_checkpoint_states = lambda *_: None
    logits = model.forward(dataclasses.replace(metadata, **on_meta), caches)
    assert logits.shape == (3, 256)
    assert logits.device.type == "meta"


def test_rows_of_other_requests_keep_their_bits(generator):
    """Live states, KV blocks and slots that the step does not name stay unchanged."""
    model, caches = HybridModel(CONFIG, dtype=torch.float64), make_caches()
    decoding, prefilling = (start(caches, draw_tokens(generator, 20), row) for row in (2, 0))
    run_step(model, caches, [], [Work(decoding, 9)])
    tensors = [caches.live_states["conv"], caches.live_states["ssm"]]
    slots = [caches.slots["conv"], caches.slots["ssm"]]
    kv_blocks = caches.kv_cache.transpose(1, 2)
    before = [bits(tensor).clone() for tensor in (*tensors, *slots, kv_blocks)]
    run_step(model, caches, [Work(decoding, 1)], [Work(prefilling, 11, {8: 3})])
    after = [bits(tensor) for tensor in (*tensors, *slots, kv_blocks)]
    written = [{0, 2}, {0, 2}, {3}, {3}, {0, 1, 2 * BLOCKS_PER_SEQUENCE + 1, caches.dummy_block}]
    for old, new, rows in zip(before, after, written, strict=True):
        changed = {row for row in range(old.shape[1]) if not torch.equal(old[:, row], new[:, row])}
        assert changed <= rows
        assert rows - changed <= {caches.dummy_block}


def test_padding_rows_change_nothing(generator):
    """In another system, a padded tail that ran through prefill changed the state."""
    model = HybridModel(CONFIG, dtype=torch.float64)
    tokens = draw_tokens(generator, 21)
    results = []
    for padding in (0, 5):
        caches = make_caches()
        work = Work(start(caches, tokens, row=0), 21, {16: 0})
        metadata = build_metadata(CONFIG, caches, [], [work], padding=padding)
        metadata.token_ids[21:] = 7
        logits = model.forward(metadata, caches)
        live, slots = caches.live_states.tensors.values(), caches.slots.tensors.values()
        results.append([logits, *(t[:, 0] for t in live), *(t[:, 0] for t in slots)])
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*results, strict=True))


def test_forward_refuses_foreign_caches_and_empty_steps(generator):
    model, caches = HybridModel(CONFIG, dtype=torch.float64), make_caches()
    tokens = draw_tokens(generator, 4)
    metadata = build_metadata(CONFIG, caches, [], [Work(start(caches, tokens, 0), 4)])
    with pytest.raises(InvalidArgumentError, match="live_states must be made for"):
        model.forward(metadata, make_caches(dtype=torch.float32))
    empty = dataclasses.replace(metadata, num_prefills=0)
    with pytest.raises(InvalidArgumentError, match="at least one"):
        model.forward(empty, caches)


def test_chunks_longer_than_the_scan_takes_are_refused():
    """Regression: chunks of 256 over a scan of 64 produced tokens from unwritten memory."""
    model = HybridModel(dtype=torch.float64)
    config = CacheConfig(num_kv_blocks=8, max_slots=2)
    context = DynamicInferenceContext(
        config, model.config.state_spec(model.dtype), model.config.kv_spec(model.dtype)
    )
    context.add_request(Request(request_id=0, prompt_tokens=[1] * 65))
    with pytest.raises(InvalidArgumentError, match="chunks of 256 tokens"):
        model.forward(context.begin_step().metadata, context)


def test_ssm_state_is_kept_in_the_dtype_of_the_scan():
    """In another system, a pool narrower than its kernel made hits differ from misses."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        conv, ssm = CONFIG.state_spec(dtype).tensors
        assert (conv.num_layers, conv.shape, conv.dtype) == (2, (48, 3), dtype)
        assert (ssm.num_layers, ssm.shape) == (2, (4, 5, 7))
        assert ssm.dtype == torch.promote_types(dtype, torch.float32)
        assert HybridModel(CONFIG, dtype=dtype).layers[0].a.dtype == ssm.dtype
    kv = CONFIG.kv_spec(torch.bfloat16)
    assert (kv.num_layers, kv.num_kv_heads, kv.head_dim, kv.dtype) == (1, 2, 6, torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_pattern": ""}, "layer_pattern must be one or more of 'M', '\\*' and '-', got ''"),
        ({"layer_pattern": "M*X"}, "got 'M\\*X'"),
        ({"layer_pattern": 5}, "layer_pattern must be .* got 5"),
        ({"hidden_size": 0}, "hidden_size must be an int in .1, .*, got 0"),
        ({"vocab_size": 2.5}, "vocab_size must be an int in .1, .*, got 2.5"),
        ({"mlp_size": True}, "mlp_size must be an int in .1, .*, got True"),
        ({"conv_kernel": 1}, "conv_kernel must be an int in .2, .*, got 1"),
        ({"num_kv_heads": 3}, "must be a multiple of num_kv_heads \\(3\\), got 4"),
        ({"num_groups": 3}, "mamba_num_heads must be a multiple of num_groups \\(3\\), got 4"),
    ],
)  # fmt: skip
def test_config_refuses_inconsistent_sizes(changes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_model_refuses_integer_weights():
    with pytest.raises(InvalidArgumentError, match=r"floating-point type, got torch\.int32"):
        HybridModel(CONFIG, dtype=torch.int32)
