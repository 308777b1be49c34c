"""Layers of every kind through the context: a hit equals a miss, bit for bit."""

import pytest
import torch
from context_rig import (
    BLOCK,
    add,
    generate,
    make_config,
    make_context,
    prepared,
    run_step,
    saved_prefix_lengths,
)
from kinds_rig import GDN, MIXED, MODELS, KindsModel

from mamba_cache import CapturedExtractions
from mamba_cache.cache import EveryNthBlock
from mamba_cache.errors import InvalidArgumentError, StepOrderError, UnwrittenStateWarning
from mamba_cache.states import StateSpec, quantize_states

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(4 * BLOCK + 3)]
OTHER = [*PROMPT[: 2 * BLOCK + 3], *((5 * i + 1) % 13 for i in range(2 * BLOCK))]
models = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def assert_same_run(run, model, prompt):
    tokens, logits, _ = model.answer(prompt, len(run[0]))
    assert run[0] == tokens
    assert torch.equal(torch.stack(run[1]), torch.stack(logits))


def assert_saved_states(context, model, prompt):
    """Each state that can be found for a prefix of ``prompt`` is the one after its tokens."""
    history, slots = model.answer(prompt, 1)[2], context.slot_allocator
    hashes = prepared(context, prompt).hashes
    saved = saved_prefix_lengths(context, prompt)
    for length in saved:
        block = context.kv_block_allocator.find_block(hashes.digests[length - 1])
        for name, tensor in slots.states.tensors.items():
            expected = history[length * BLOCK - 1][name]
            assert torch.equal(tensor[:, slots.get_slot(block)], expected), (name, length)
    return saved


@models
@pytest.mark.parametrize("chunk_tokens", [None, 1, BLOCK + 1])
def test_a_hit_equals_a_miss(model, chunk_tokens):
    context = make_context(model=model, placement=EveryNthBlock(1))
    for name, prompt in enumerate((PROMPT, OTHER, PROMPT)):
        admission = add(context, name, prompt, chunk_tokens=chunk_tokens)
        assert admission.skip_tokens == [0, 2 * BLOCK, 4 * BLOCK][name]
        tokens, logits = [], []
        while len(tokens) < 4:
            if context.status(name).value == "prefilling":
                context.schedule_prefill(name, chunk_tokens=chunk_tokens)
            for row, token in run_step(context, model=model).values():
                tokens.append(token)
                logits.append(row)
        context.finish(name)
        context.check_invariants()
        assert_same_run((tokens, logits), model, prompt)
    assert assert_saved_states(context, model, PROMPT) == [1, 2, 3, 4]


def test_a_layer_that_hands_nothing_over_is_named():
    """The warning names the layer's kind too, and no state is published."""

    class Forgetful(KindsModel):
        def _hand_over(self, layer, place, *rest):
            if (layer.name, place) != ("gdn", 1):
                super()._hand_over(layer, place, *rest)

    model = Forgetful("GMC*G")
    context = make_context(model=model, placement=EveryNthBlock(1))
    add(context, "a", PROMPT)
    with pytest.warns(UnwrittenStateWarning, match=r"layers \['gdn 1'\]"):
        run_step(context, model=model)
    assert saved_prefix_lengths(context, PROMPT) == []
    assert context.stats().unwritten_states == 4
    context.finish("a")
    assert_same_run(generate(context, PROMPT, 3, model=model), model, PROMPT)


@pytest.fixture
def begun():
    context = make_context(model=MIXED, placement=EveryNthBlock(1))
    add(context, "a", PROMPT)
    return context, context.begin_step().metadata


def handed_over(metadata, **changes):
    """Return the arguments with which layers of Gated DeltaNet hand over their states."""
    channels, shape = (shape for _, shape, _ in GDN.layers[0].tensors)
    states = {"recurrent": torch.zeros(metadata.num_chunks, *shape, dtype=torch.float32)}
    inputs = {"conv": torch.zeros(metadata.num_prefill_tokens, channels[0], dtype=torch.bfloat16)}
    given = {"kind": "gdn", "layer": 0, "chunk_states": states, "window_inputs": inputs}
    return {**given, "metadata": metadata, **changes}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("kind", lambda _: "mamba", r"kind must be one of \['gdn', 'short_conv', 'mamba2'\]"),
        ("layer", lambda _: 2, "layer must be"),
        ("chunk_states", lambda _: {}, "must hand over each"),
        ("window_inputs", lambda given: {**given, "recurrent": 0}, "must hand over each"),
        ("chunk_states", lambda given: [*given], "must map names to tensors"),
        ("chunk_states", lambda _: {"recurrent": 0}, "must be tensors"),
        ("chunk_states", lambda given: {"recurrent": given["recurrent"][1:]}, "layer gdn 0 handed"),
        ("window_inputs", lambda given: {"conv": given["conv"][1:]}, "layer gdn 0 handed"),
        ("window_inputs", lambda given: {"conv": given["conv"][:, 1:]}, "conv_input must be"),
        (
            "chunk_states",
            lambda given: {"recurrent": given["recurrent"].double()},
            "chunk_states must be",
        ),
        ("metadata", lambda _: None, "must be Step.metadata"),
    ],
)
def test_what_does_not_fit_is_refused(begun, name, change, message):
    context, metadata = begun
    given = handed_over(metadata)
    with pytest.raises(InvalidArgumentError, match=message):
        context.extract_states(**{**given, name: change(given[name])})
    context.extract_states(**given)


def test_each_kind_has_its_own_call(begun):
    context, metadata = begun
    with pytest.raises(InvalidArgumentError, match="call extract_states"):
        context.extract_checkpoint_states(
            0, torch.zeros(metadata.num_chunks), torch.zeros(metadata.num_prefill_tokens), metadata
        )
    assert context.mamba_conv_states is context.mamba_ssm_states is None
    context.abort_step()
    with pytest.raises(StepOrderError, match="no step is in flight"):
        context.extract_states(**handed_over(metadata))


def test_in_a_step_without_checkpoints_nothing_is_looked_at():
    context = make_context(model=MIXED)
    add(context, "a", PROMPT[:3])
    context.extract_states("?", 99, None, None, context.begin_step().metadata)


def test_states_of_a_mamba_spec_can_be_handed_over_by_name():
    spec = StateSpec.mamba(1, (5, 3), (2, 3), torch.bfloat16, torch.float32)

    class Shape:
        config = None

        def state_spec(self, dtype):
            return spec

        def kv_spec(self, dtype):
            return MIXED.kv_spec(dtype)

    Shape.config = Shape()
    context = make_context(model=Shape, placement=EveryNthBlock(1))
    add(context, "a", PROMPT)
    metadata = context.begin_step().metadata
    states = torch.rand(metadata.num_chunks, 2, 3)
    inputs = torch.rand(metadata.num_prefill_tokens, 5).bfloat16()
    context.extract_states("", 0, {"ssm": states}, {"conv": inputs}, metadata)
    context.commit_step({"a": 1})
    slots = metadata.checkpoint_slots[: metadata.num_checkpoints].tolist()
    for index, slot in enumerate(slots):
        end = (index + 1) * BLOCK
        assert torch.equal(context.slot_allocator.conv_states[0, slot], inputs[end - 3 : end].T)
        assert torch.equal(context.slot_allocator.ssm_states[0, slot], states[2 * index + 1])
    assert saved_prefix_lengths(context, PROMPT) == [1, 2, 3, 4]


def test_captured_layers_are_numbered_through_the_kinds():
    context = make_context(model=MIXED, placement=EveryNthBlock(1))
    add(context, "a", PROMPT)
    metadata = context.begin_step().metadata
    lengths = metadata.num_chunks, metadata.num_prefill_tokens
    with context.capture_extractions() as captured:
        MIXED.forward(metadata, context)
    assert sorted(captured.lengths) == [0, 1, 2, 3]
    assert captured.lengths[0] == captured.lengths[1] == captured.lengths[3] == lengths
    assert captured.lengths[2] == (2**31 - 1, lengths[1]), "a short convolution has no chunks"
    short = CapturedExtractions({1: (lengths[0], lengths[1] - 1)})
    with pytest.raises(InvalidArgumentError, match="layer gdn 1 was captured"):
        context.count_extractions(short)
    context.count_extractions(captured)
    context.commit_step({"a": 1})
    assert context.stats().unwritten_states == 0


def test_int8_is_for_the_tensors_that_are_named():
    """Named tensors are int8 in every slot, saved from live rows or extracted; others are exact."""
    model = KindsModel("GMR*C")
    names = ("gdn.recurrent", "rwkv7.wkv")
    config = make_config(slot_quantization="int8", quantized_tensors=names)
    context = make_context(config, model=model, placement=EveryNthBlock(1))
    generate(context, PROMPT[: 4 * BLOCK], 1, model=model)
    assert saved_prefix_lengths(context, PROMPT) == [1, 2, 3, 4]
    history, slots = model.answer(PROMPT, 1)[2], context.slot_allocator
    hashes = prepared(context, PROMPT).hashes
    add(context, "again", PROMPT)
    row = context.begin_step().requests[0].row
    for length in range(1, 5):
        block = context.kv_block_allocator.find_block(hashes.digests[length - 1])
        for name, state in history[length * BLOCK - 1].items():
            stored = slots.states[name][:, slots.get_slot(block)]
            if name not in names:
                assert torch.equal(stored, state), (name, length)
                continue
            codes, scales = quantize_states(state)
            assert torch.equal(stored, codes), (name, length)
            assert torch.equal(slots.states[f"{name}_scales"][:, slots.get_slot(block)], scales)
            if length == 4:
                restored = context.live_states[name][:, row]
                assert torch.equal(restored, codes * scales[..., None, :]), name
    exact = make_context(model=model)
    assert context.bytes_per_slot < exact.bytes_per_slot


def test_int8_needs_tensors_that_there_are():
    for names, message in (
        (("ssm",), "quantised slots need states of"),
        (("gdn.conv",), "quantised slots need states of"),
        ("ssm", "quantized_tensors must be one or more names"),
        ((), "quantized_tensors must be one or more names"),
        (("a", "a"), "quantized_tensors must be different names"),
        (("a", 3), "quantized_tensors must be one or more names"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            make_context(
                make_config(slot_quantization="int8", quantized_tensors=names), model=MIXED
            )


def test_resetting_clears_the_slots_of_all_kinds():
    context = make_context(model=MIXED, poison=False)
    generate(context, PROMPT, 2, model=MIXED)
    slots = context.slot_allocator
    assert all(tensor.any() for tensor in slots.states.tensors.values())
    context.reset()
    assert not any(tensor.any() for tensor in slots.states.tensors.values())
