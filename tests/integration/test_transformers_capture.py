"""States captured inside one forward equal those of a forward that ends there."""

import threading

import pytest
import torch
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers_rig import BLOCK, FAMILIES, compute_in_double, make_cache, make_model, text

from mamba_cache.cache import EveryNthBlock
from mamba_cache.integrations.transformers import capture as capture_module
from mamba_cache.integrations.transformers.capture import StateCapture
from mamba_cache.integrations.transformers.layers import SequenceMemory, read_layers
from mamba_cache.integrations.transformers.probe import probe
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.states import StatePool

INSEPARABLE = ("zaya",)
"""Families whose states no function returns; their prompts are cut at checkpoints."""

IN_FLOAT32 = ("nemotron_h with experts", "kimi_linear", "bailing_hybrid")
"""Families whose routers cast to float32 without a patch here: they run in float32."""

CUTS = (2, 3 * BLOCK, 4 * BLOCK)
LENGTH = 6 * BLOCK - 3


@pytest.fixture(params=[name for name in FAMILIES if name not in INSEPARABLE])
def setting(request, monkeypatch):
    if request.param not in IN_FLOAT32:
        compute_in_double(monkeypatch)
    model = make_model(request.param)
    if request.param not in IN_FLOAT32:
        model.double()
    model.set_experts_implementation("eager")  # the default has no float64
    runner = ModelRunner(model)
    bound = 1e-6 if request.param in IN_FLOAT32 else 1e-12
    return model, runner, probe(runner, BLOCK)[0], bound


def rooms_for(layout, positions):
    """Tensors full of NaN to receive the state at each position."""
    saved = StatePool(layout.state_spec, len(positions), device="cpu").tensors
    for tensor in saved.values():
        tensor.fill_(float("nan"))
    rows = [{n: x[:, row, None] for n, x in saved.items()} for row in range(len(positions))]
    return {p: layout.views(row, p) for p, row in zip(positions, rows, strict=True)}


def kept(layout, cache, num_tokens):
    memory = read_layers(cache, layout.layers, num_tokens)
    return [t.clone() for t in (*memory.states, *layout.pad_windows(memory))]


def held(room: SequenceMemory):
    return [*room.states, *room.windows]


@pytest.mark.parametrize("start", [0, BLOCK])
def test_they_are_those_of_a_run_in_parts(setting, start, generator):
    model, runner, layout, atol = setting
    tokens = text(generator, LENGTH)[0].tolist()
    positions = [position for position in CUTS if position > start]
    parts, expected = runner.new_cache(), {}
    for begin, end in zip([0, start, *positions], [start, *positions, LENGTH], strict=True):
        if end > begin:
            last = runner.forward(tokens[begin:end], parts, begin)
        expected[end] = kept(layout, parts, end) if end else []

    whole, rooms = runner.new_cache(), rooms_for(layout, positions)
    if start:
        runner.forward(tokens[:start], whole, 0)
    capture = StateCapture(model, layout.layers)
    with capture.during(whole, start, LENGTH - start, rooms) as captured:
        logits = runner.forward(tokens[start:], whole, start)
    assert captured == set(positions)
    for position in positions:
        torch.testing.assert_close(held(rooms[position]), expected[position], rtol=0, atol=atol)
    torch.testing.assert_close(kept(layout, whole, LENGTH), expected[LENGTH], rtol=0, atol=atol)
    torch.testing.assert_close(logits[:, -1], last[:, -1], rtol=0, atol=10 * atol)
    plain = runner.forward(tokens, runner.new_cache(), 0)
    torch.testing.assert_close(logits[:, -1], plain[:, -1], rtol=0, atol=10 * atol)


@pytest.mark.parametrize("name", INSEPARABLE)
def test_what_cannot_be_captured_is_noticed(name):
    assert probe(ModelRunner(make_model(name)), BLOCK)[2] is None


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_state_that_is_one_token_off_is_noticed(wrong, monkeypatch):
    runner = ModelRunner(make_model("nemotron_h"))
    assert probe(runner, BLOCK)[2] is not None
    original = capture_module.ScanRun

    def shifted(num_rows, num_tokens, widths, *others, **named):
        first, *middle, last = widths
        moved = (first + wrong, *middle, last - wrong)
        return original(num_rows, num_tokens, moved, *others, **named)

    monkeypatch.setattr(capture_module, "ScanRun", shifted)
    assert probe(runner, BLOCK)[2] is None


def test_forwards_of_other_threads_are_left_alone(generator):
    model = make_model("nemotron_h")
    runner = ModelRunner(model)
    layout = probe(runner, BLOCK)[0]
    tokens, other = text(generator, LENGTH)[0].tolist(), text(generator, LENGTH)[0].tolist()
    expected = runner.forward(other, runner.new_cache(), 0)
    rooms, cache, got = rooms_for(layout, CUTS), runner.new_cache(), []
    with StateCapture(model, layout.layers).during(cache, 0, LENGTH, rooms):

        def run():
            got.append(runner.forward(other, runner.new_cache(), 0))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert all(torch.isnan(state).all() for state in rooms[CUTS[0]].states)
        runner.forward(tokens, cache, 0)
    assert torch.equal(got[0], expected)


def test_a_forward_that_fails_leaves_everything_as_it_was(generator):
    model = make_model("nemotron_h")
    runner = ModelRunner(model)
    layout = probe(runner, BLOCK)[0]
    names = ("mamba2_chunk_scan", "mamba2_selective_state_update")
    before = [getattr(modeling_nemotron_h, name) for name in names]
    cache, rooms = runner.new_cache(), rooms_for(layout, CUTS)
    capture = StateCapture(model, layout.layers)
    replaced = []

    def fail():
        with capture.during(cache, 0, LENGTH, rooms):
            replaced.append(getattr(modeling_nemotron_h, names[0]))
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        fail()
    assert replaced[0] is not before[0]
    assert [getattr(modeling_nemotron_h, name) for name in names] == before
    assert not any("update_conv_state" in vars(layer) for layer in cache.layers)


def test_a_layer_that_hands_nothing_over_is_not_published(generator, monkeypatch):
    """Its slot would hold the old state of another prompt."""
    model = make_model("nemotron_h")
    cache = make_cache(model, placement=EveryNthBlock(1))

    def hand_over_nothing(update, run, to, *args, **options):
        return update(*args, **options)

    monkeypatch.setattr(capture_module, "_keep_states", hand_over_nothing)
    prompt = text(generator, 3 * BLOCK + 1)
    cache.generate(prompt, max_new_tokens=1, do_sample=False)
    cache.check_invariants()
    assert cache.stats().saved_states == 0
    monkeypatch.undo()
    cache.generate(text(generator, 3 * BLOCK + 1), max_new_tokens=1, do_sample=False)
    assert cache.stats().saved_states == 3
