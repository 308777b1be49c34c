"""A state is published only if every layer handed it over in the state's own step."""

import dataclasses
import warnings

import pytest
import torch
from context_rig import (
    BLOCK,
    CHUNK,
    MODEL,
    MODEL_CONFIG,
    add,
    assert_same_run,
    generate,
    make_config,
    make_context,
    prepared,
    refused,
    run_step,
    saved_prefix_lengths,
)
from injectors import strike

from mamba_cache import CapturedExtractions
from mamba_cache.cache import EveryNthBlock
from mamba_cache.errors import (
    InvalidArgumentError,
    PoisonedError,
    StepOrderError,
    UnwrittenStateWarning,
)
from mamba_cache.states import CHECKPOINT_FIELDS, plan_extraction

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
OTHER = [(5 * i + 1) % 13 for i in range(3 * BLOCK + 2)]
NUM_LAYERS = 2


class Caches:
    """A context that can lose hand-overs of its layers."""

    def __init__(self, context, forgets=()):
        self._context, self._forgets = context, set(forgets)
        self.kv_cache, self.live_states = context.kv_cache, context.live_states

    def extract_checkpoint_states(self, layer, chunk_states, conv_input, metadata):
        if layer not in self._forgets:
            self._context.extract_checkpoint_states(layer, chunk_states, conv_input, metadata)


def forgetful_step(context, layers):
    """Run a whole step in which some layers hand nothing over."""
    step = context.begin_step()
    logits = MODEL.forward(step.metadata, Caches(context, layers))
    pairs = zip(step.requests, logits, strict=True)
    context.commit_step({r.request_id: int(row.argmax()) for r, row in pairs if r.samples})


@pytest.fixture
def context():
    """Each block's end is a checkpoint, and the pool is small enough to reuse slots."""
    return make_context(make_config(max_slots=3), placement=EveryNthBlock(1))


@pytest.mark.parametrize("layers", [[0], [1], [0, 1]])
def test_a_layer_that_forgets_publishes_no_state(context, layers):
    """Regression: old bytes of another salt's slot were published as the new owner's state."""
    generate(context, OTHER, 1, cache_salt="another")
    context.reset()
    for tensor in (context.slot_allocator.conv_states, context.slot_allocator.ssm_states):
        tensor.fill_(7)
    add(context, "a", PROMPT)
    with pytest.warns(UnwrittenStateWarning, match=r"layers \[.*'a' at \[8, 16, 24\]") as caught:
        forgetful_step(context, layers)
    assert str(layers) in str(caught[0].message)
    assert caught[0].filename == __file__  # the caller of commit_step
    assert saved_prefix_lengths(context, PROMPT) == []
    assert context.stats().unwritten_states == 3
    assert context.stats().saved_states == 0
    assert context.stats().free_slots == 3
    context.check_invariants()
    context.finish("a")
    again = generate(context, PROMPT, 3, request_id="again")
    assert again[2].kv_matched_blocks == 3, "keys and values were computed"
    assert again[2].skip_tokens == 0
    assert_same_run(again, PROMPT)
    assert context.stats().unwritten_states == 3
    add(context, "b", OTHER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forgetful_step(context, layers)
    assert context.stats().unwritten_states > 3, "one warning is enough"


def test_as_an_error_it_leaves_the_step_in_flight(context):
    add(context, "a", PROMPT)
    step = context.begin_step()
    MODEL.forward(step.metadata, Caches(context, [1]))
    for _ in range(2):
        with refused(context, UnwrittenStateWarning, r"layers \[1\]"):
            context.commit_step({"a": 1})
    assert context.stats().unwritten_states == 0
    assert context.abort_step() == ("a",)
    context.resume_request("a")
    run_step(context)
    assert saved_prefix_lengths(context, PROMPT) == [1, 2, 3]


@pytest.mark.parametrize("name", ["cancel", "set_status"])
def test_giving_states_up_is_a_change_that_may_not_break_off(context, monkeypatch, name):
    owner = context._index if name == "cancel" else context.request_table
    add(context, "a", PROMPT)
    context.begin_step()
    strike(monkeypatch, owner, name, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), pytest.warns(UnwrittenStateWarning):
        context.commit_step({"a": 1})
    with pytest.raises(PoisonedError):
        context.abort_step()
    monkeypatch.undo()
    context.reset()
    context.check_invariants()


def test_a_commit_may_be_repeated_after_states_were_cancelled(context, monkeypatch):
    add(context, "a", PROMPT)
    step = context.begin_step()
    MODEL.forward(step.metadata, Caches(context, [1]))
    monkeypatch.setattr(context._tiering, "verify", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError), pytest.warns(UnwrittenStateWarning):
        context.commit_step({"a": 1})
    monkeypatch.undo()
    context.check_invariants()
    context.commit_step({"a": 1})
    run_step(context)
    context.check_invariants()
    assert context.stats().unwritten_states == 3


def test_a_launch_that_fails_hands_nothing_over(context, monkeypatch):
    def fail(*_, **__):
        raise OSError("launch failed")

    add(context, "a", PROMPT)
    step = context.begin_step()
    with monkeypatch.context() as patch:
        patch.setattr("mamba_cache.context.context.plan_extraction", fail)
        with pytest.raises(OSError, match="launch failed"):
            MODEL.forward(step.metadata, context)
    with pytest.raises(UnwrittenStateWarning, match=r"layers \[0, 1\]"):
        context.commit_step({"a": 1})


def tensors_for(metadata, *, chunks=0, tokens=0):
    """Return a layer's hand-over, longer or shorter than it should be."""
    ssm = MODEL_CONFIG.state_spec(torch.float64).tensors[1].shape
    return (
        torch.zeros(metadata.num_chunks + chunks, *ssm, dtype=torch.float64),
        torch.zeros(metadata.num_prefill_tokens + tokens, MODEL_CONFIG.conv_dim).double(),
    )


LENGTHS = "the step has 7 chunks and 26 prefill tokens: .* without those of decoding requests"
REFUSED = [
    # A shorter tensor was read past its end; a longer tensor is not packed like the step.
    *[(0, wrong, LENGTHS) for wrong in ({"chunks": -1}, {"chunks": 1}, {"tokens": -1})],
    (0, {"tokens": 1}, LENGTHS),  # as if it had the decoding request's token
    (0, (3, torch.zeros(26)), "must be tensors"),
    (0, (torch.zeros(()),) * 2, "must be tensors"),
    *[(layer, {}, r"layer must be an int in \[0, 1\]") for layer in (-1, NUM_LAYERS, True)],
]


@pytest.mark.parametrize(("layer", "given", "message"), REFUSED, ids=range(len(REFUSED)))
def test_hand_overs_that_do_not_fit_the_step_are_refused(layer, given, message):
    context = make_context(placement=EveryNthBlock(1))
    add(context, "decodes", OTHER)
    run_step(context)
    add(context, "a", PROMPT)
    metadata = context.begin_step().metadata
    assert metadata.num_decode_tokens == 1
    before = context.slot_allocator.ssm_states.clone()
    tensors = tensors_for(metadata, **given) if isinstance(given, dict) else given
    with pytest.raises(InvalidArgumentError, match=message):
        context.extract_checkpoint_states(layer, *tensors, metadata)
    torch.testing.assert_close(
        context.slot_allocator.ssm_states, before, rtol=0, atol=0, equal_nan=True
    )
    context.extract_checkpoint_states(0, *tensors_for(metadata), metadata)


def test_metadata_of_another_step_are_refused(context):
    """Old metadata hold the same tensors, but the number of checkpoints of another step."""
    add(context, "a", PROMPT)
    old = context.begin_step().metadata
    MODEL.forward(old, context)
    context.commit_step({"a": 1})
    with pytest.raises(StepOrderError, match="no step is in flight"):
        context.extract_checkpoint_states(0, *tensors_for(old), old)
    add(context, "b", OTHER)
    metadata = context.begin_step().metadata
    for foreign, what in ((old, "of another step"), (dataclasses.replace(metadata), "of another")):
        with pytest.raises(InvalidArgumentError, match=f"got StepMetadata {what}"):
            context.extract_checkpoint_states(0, *tensors_for(metadata), foreign)
    with pytest.raises(
        InvalidArgumentError, match=r"must be Step.metadata of the step in flight, got NoneType$"
    ):
        context.extract_checkpoint_states(0, *tensors_for(metadata), None)


def test_a_step_without_checkpoints_asks_for_nothing(context):
    add(context, "a", PROMPT[: BLOCK - 1])
    metadata = context.begin_step().metadata
    context.extract_checkpoint_states(0, None, None, metadata)
    context.commit_step({"a": 1})
    assert context.stats().unwritten_states == 0


def captured_step(context, *, forgets=(), longest=64):
    """Imitate a CUDA graph of a model's hand-overs on a CPU: (captured, replay)."""
    spec = MODEL_CONFIG.state_spec(torch.float64)
    states = torch.zeros(NUM_LAYERS, longest // CHUNK, *spec.tensors[1].shape).double()
    inputs = torch.zeros(NUM_LAYERS, longest, MODEL_CONFIG.conv_dim).double()
    layers = [layer for layer in range(NUM_LAYERS) if layer not in forgets]
    with context.capture_extractions() as captured:
        for layer in layers:
            context.extract_checkpoint_states(layer, states[layer], inputs[layer], None)

    def replay(metadata):
        slots = context.slot_allocator
        fields = tuple(context.step_buffers.tensors[name] for name in CHECKPOINT_FIELDS)
        chunks, tokens = metadata.num_chunks, metadata.num_prefill_tokens
        states[:, :chunks].normal_()
        inputs[:, :tokens].normal_()
        for layer in layers:
            plan_extraction(
                slots.conv_states[layer], slots.ssm_states[layer], context.mamba_conv_states[layer],
                states[layer], inputs[layer], fields=fields,
            )()  # fmt: skip
        return states

    return captured, replay


def test_a_replayed_graph_counts_if_reported(context):
    captured, replay = captured_step(context)
    assert captured.lengths == {0: (16, 64), 1: (16, 64)}
    add(context, "a", PROMPT)
    metadata = context.begin_step().metadata
    states = replay(metadata)
    context.count_extractions(captured)
    context.commit_step({"a": 1})
    assert saved_prefix_lengths(context, PROMPT) == [1, 2, 3]
    blocks = context.match(prepared(context, PROMPT)).block_ids
    for index, block in enumerate(blocks):
        slot = context.slot_allocator.get_slot(block)
        last_chunk = (index + 1) * BLOCK // CHUNK - 1
        assert torch.equal(context.slot_allocator.ssm_states[:, slot], states[:, last_chunk])


@pytest.mark.parametrize(
    ("forgets", "is_counted", "message"),
    [([], False, "count_extractions"), ([1], True, r"layers \[1\]")],
)
def test_a_graph_that_is_not_counted_or_lacks_a_layer_publishes_nothing(
    context, forgets, is_counted, message
):
    captured, replay = captured_step(context, forgets=forgets)
    add(context, "a", PROMPT)
    replay(context.begin_step().metadata)
    captured_step(context)  # hands nothing over in the step in flight
    if is_counted:
        context.count_extractions(captured)
    with pytest.warns(UnwrittenStateWarning, match=message):
        context.commit_step({"a": 1})
    assert saved_prefix_lengths(context, PROMPT) == []
    add(context, "b", OTHER)
    metadata = context.begin_step().metadata
    replay(metadata)
    context.count_extractions(captured)
    for layer in forgets:  # a graph may hold a part of the layers
        context.extract_checkpoint_states(layer, *tensors_for(metadata), metadata)
    context.commit_step([1] * 2)
    assert saved_prefix_lengths(context, OTHER) == [1, 2, 3]


def test_a_step_may_end_within_a_capture(context):
    """Regression: the step's checkpoints were used for the next step, which has none."""
    add(context, "a", PROMPT)
    context.begin_step()
    with context.capture_extractions():
        context.abort_step()
    context.finish("a")
    add(context, "b", PROMPT[: BLOCK - 1])
    metadata = context.begin_step().metadata
    context.extract_checkpoint_states(0, None, None, metadata)
    context.commit_step({"b": 1})


def test_a_graph_that_is_captured_in_a_step_has_room_for_steps_with_more_checkpoints(
    context, monkeypatch
):
    planned = []

    def plan(*_, fields, **__):
        planned.append([*map(len, fields)])
        return lambda: None

    monkeypatch.setattr("mamba_cache.context.context.plan_extraction", plan)
    add(context, "a", PROMPT[: BLOCK + 1])
    assert context.begin_step().metadata.num_checkpoints == 1
    captured_step(context)
    room = [len(context.step_buffers.tensors[name]) for name in CHECKPOINT_FIELDS]
    assert planned == [room] * NUM_LAYERS


def test_a_graph_for_shorter_steps_is_refused(context):
    captured, _ = captured_step(context, longest=24)
    add(context, "a", PROMPT)
    context.begin_step()
    with pytest.raises(InvalidArgumentError, match=r"captured with 6 chunk_states and 24 tokens"):
        context.count_extractions(captured)
    with pytest.raises(UnwrittenStateWarning):
        context.commit_step({"a": 1})


def test_captures_and_counts_come_in_order(context):
    captured, _ = captured_step(context)
    with pytest.raises(StepOrderError, match="no step is in flight"):
        context.count_extractions(captured)
    with context.capture_extractions():
        again = context.capture_extractions()
        with pytest.raises(StepOrderError, match="within capture_extractions"):
            again.__enter__()
        with pytest.raises(InvalidArgumentError, match="layer must be"):
            context.extract_checkpoint_states(2, torch.zeros(1), torch.zeros(1), None)
    add(context, "a", PROMPT)
    context.begin_step()
    with pytest.raises(InvalidArgumentError, match="capture_extractions gave"):
        context.count_extractions([0, 1])
    with pytest.raises(InvalidArgumentError, match="layer must be"):
        context.count_extractions(CapturedExtractions({NUM_LAYERS: (99, 99)}))


@pytest.mark.parametrize(
    "lengths", [None, [0, 1], {0: 5}, {0: (1, 2, 3)}, {0: (1, -1)}, {0: (1, None)}, {0: [1, 2]}]
)
def test_captured_lengths_are_checked(lengths):
    with pytest.raises(InvalidArgumentError, match="lengths must map each layer"):
        CapturedExtractions(lengths)
