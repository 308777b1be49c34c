"""Chunks of any length, position and checkpoints in one forward: each row equals the row alone."""

import importlib
import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import partial, partialmethod
from types import SimpleNamespace

import pytest
import torch
from batch_rig import answers, batch, subject, tokens
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers_rig import BLOCK, FAMILIES, compute_in_double, make_cache, make_model

from mamba_cache import Request
from mamba_cache.integrations.transformers import capture as capturing
from mamba_cache.integrations.transformers.batching import forwards, graphs, paged
from mamba_cache.integrations.transformers.batching.batcher import Batcher
from mamba_cache.integrations.transformers.batching.forwards import BatchForwards
from mamba_cache.integrations.transformers.batching.graphs import split_rows
from mamba_cache.integrations.transformers.batching.kernels import pieces_torch
from mamba_cache.integrations.transformers.capture import ScanRun
from mamba_cache.integrations.transformers.layers import read_layers

REFUSED = ("inkling", "kimi_linear", "bailing_hybrid")
"""Families that batches do not serve."""

SERVED = [name for name in FAMILIES if name not in REFUSED]
ONE_LENGTH = ("zaya",)
"""Families whose states no function returns: their rectangles have no padding."""

BOUND = 1e-9


class Rows:
    """Requests that run through a context in steps of any chunks, and the results of each alone."""

    def __init__(self, name, monkeypatch):
        compute_in_double(monkeypatch)
        # All rows of a step in one rectangle, with any amount of padding.
        monkeypatch.setitem(graphs._FORWARD_TOKENS, "cpu", (10**6, 10**6))
        model = make_model(name).double()
        model.set_experts_implementation("eager")  # the default has no float64
        cache = make_cache(model, max_requests=8, segment_tokens=32 * BLOCK)
        monkeypatch.setattr(Batcher, "check", lambda _: None)
        self.batcher = cache._ready_batcher()
        self.runner, self.context = cache._runner, self.batcher.context
        self.layers, self.layout = cache._store.layout.layers, cache._store.layout
        self.steps = []  # the chunks of each step
        self._alone = {}

    def run(self, prompts, generator):
        """Compute prompts in chunks of random lengths, with random checkpoints."""

        def drawn(high):
            return int(torch.randint(1, high + 1, (), generator=generator))

        left = {}
        for number, prompt in enumerate(prompts):
            named = [drawn(len(prompt)) for _ in range(drawn(4) - 1)]
            left[number] = len(prompt)
            request = Request(request_id=number, prompt_tokens=prompt, checkpoint_positions=named)
            self._begin(left, number, partial(self.context.add_request, request), drawn)
        while left:
            step = self.context.begin_step()
            self.steps.append((step.prefills, self.batcher._forwards.prefill(step, 10**6)))
            firsts = [0] * sum(part.samples for part in step.prefills)
            self.context.commit_step(firsts)
            yield
            for part in step.prefills:
                if part.samples:
                    self.context.finish(part.request_id)
            for number in list(left):
                self._begin(left, number, partial(self.context.schedule_prefill, number), drawn)

    @staticmethod
    def _begin(left, number, schedule, drawn):
        if not left[number]:
            del left[number]
            return
        size = min(drawn(3 * BLOCK), left[number])
        schedule(chunk_tokens=size)
        left[number] -= size

    def alone(self, tokens, end):
        """The model's cache after the first ``end`` tokens, in one forward, and its logits."""
        key = (*tokens[:end],)
        if key not in self._alone:
            cache = self.runner.new_cache()
            logits = self.runner.forward(tokens[:end], cache, 0)[0, -1]
            self._alone[key] = read_layers(cache, self.layers, end), logits
        return self._alone[key]

    def errors(self, prompts):
        """Errors of logits, live states, saved states, keys and values of the last step."""
        parts, computed = self.steps[-1]
        tensors = self.context.live_states.tensors
        saved = self.context.slot_allocator.states.tensors
        places = {part.request_id: place for place, part in enumerate(parts)}
        tables = self.context.step_buffers.tensors["block_tables"]
        found = []
        for chunks in computed:
            for row, part in enumerate(chunks.requests):
                prompt, end = prompts[part.request_id], part.start + part.num_tokens
                memory, logits = self.alone(prompt, end)
                found.append(off(chunks.logits[row], logits))
                live = self.layout.views(
                    {n: t[:, part.row : part.row + 1] for n, t in tensors.items()}
                ).states
                found += [off(a, b) for a, b in zip(live, memory.states, strict=True)]
                for position, slot in part.checkpoints:
                    kept = self.layout.views(
                        {n: t[:, slot : slot + 1] for n, t in saved.items()}
                    ).states
                    expected = self.alone(prompt, position)[0].states
                    found += [off(a, b) for a, b in zip(kept, expected, strict=True)]
                if memory.tokens:
                    blocks = tables[places[part.request_id], : -(-end // BLOCK)].long()
                    kv = self.context.kv_cache[:, :, blocks].flatten(0, 1).flatten(1, 2)[:, :end]
                    found += [
                        off(a.transpose(0, 1), b[0]) for a, b in zip(kv, memory.tokens, strict=True)
                    ]
        return max(found)


def off(actual, expected):
    error = (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    return math.inf if math.isnan(error) else error


def prompts_of(generator, *lengths):
    return [tokens(generator, length) for length in lengths]


LENGTHS = (61, 3, 40, 77, 17)


@pytest.mark.parametrize("name", SERVED)
def test_each_row_of_a_rectangle_is_computed_as_alone(name, monkeypatch, generator):
    rows, prompts = Rows(name, monkeypatch), prompts_of(generator, *LENGTHS)
    for _ in rows.run(prompts, generator):
        assert rows.errors(prompts) < BOUND
    shapes = [[len(one.requests) for one in computed] for _, computed in rows.steps]
    checkpoints = [part.checkpoints for parts, _ in rows.steps for part in parts]
    assert len(shapes) >= 3
    if name not in ONE_LENGTH:
        assert {len(shape) for shape in shapes} == {1}
        assert any(checkpoints)
    assert any(one.num_padded for _, computed in rows.steps for one in computed) is (
        name not in ONE_LENGTH
    )


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5"])
def test_rows_in_order_are_computed_where_they_lie_and_to_the_bit_as_in_copies(
    name, monkeypatch, generator
):
    prompts, found, firsts = prompts_of(generator, *LENGTHS), [], []
    shape_of, seed = BatchForwards._shape_of, generator.initial_seed()

    def noted(self, group, *, in_copies):
        shape = shape_of(self, group)
        firsts.append(shape.first_live_row)
        return replace(shape, first_live_row=-1) if in_copies else shape

    for in_copies in (False, True):
        shaped = partialmethod(noted, in_copies=in_copies)
        monkeypatch.setattr(BatchForwards, "_shape_of", shaped)
        rows, seen = Rows(name, monkeypatch), []
        for _ in rows.run(prompts, generator.manual_seed(seed)):
            live = rows.context.live_states.tensors
            parts, computed = rows.steps[-1]
            at = [part.row for part in parts]
            logits = {
                part.request_id: one.logits[number]
                for one in computed
                for number, part in enumerate(one.requests)
            }
            seen += [tensor[:, at].clone() for tensor in live.values()]
            seen += [logits[part.request_id] for part in parts]
        found.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert min(firsts) == -1 < max(firsts)  # finished requests leave gaps


FAULTS = [
    *itertools.product(["nemotron_h", "qwen3_5", "falcon_h1"], ["masks", "windows"]),
    *itertools.product(["nemotron_h", "falcon_h1"], ["steps"]),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_what_padding_must_not_do_is_noticed(name, fault, monkeypatch, generator):
    """Controls: the comparison fails where padding is computed like tokens."""
    rows, prompts = Rows(name, monkeypatch), prompts_of(generator, *LENGTHS)
    if fault == "windows":
        right = pieces_torch.copy_windows
        monkeypatch.setattr(
            pieces_torch,
            "copy_windows",
            lambda full, ends, windows, *more: right(
                full, torch.full_like(ends, full.shape[-1] - windows.shape[-1]), windows, *more
            ),
        )
    elif fault == "steps":
        monkeypatch.setattr(ScanRun, "_stop_steps", lambda *_: {})
    else:
        take = pieces_torch.take_piece

        def unmasked(values, fills, bounds, number, width):
            behind = torch.cat([bounds[:, : number + 1], bounds[:, -1:] * 0 + 10**6], dim=1)
            return take(values, fills, behind, number, width)

        monkeypatch.setattr(pieces_torch, "take_piece", unmasked)
    assert max(rows.errors(prompts) for _ in rows.run(prompts, generator)) > 100 * BOUND


SHAPES = {"x": (4, 16), "dt": (4,), "B": (2, 8), "C": (2, 8)}
SIZES, ENDS = [21, 40, 8, 33], [[5, 9], [16, 24], [8, 8], [11, 33]]


def call(x, dt, B, C, *, low, states):
    """Return arguments of Mamba-2's scan with time steps of at least ``low``."""
    steps = {"dt_bias": torch.linspace(-1, 1, 4), "dt_softplus": True, "dt_limit": (low, math.inf)}
    options = {"chunk_size": BLOCK, "D": torch.linspace(0, 2, 4), "return_final_states": True}
    return (x, dt, -torch.linspace(0.5, 4, 4), B, C), {**options, **steps, "initial_states": states}


def compute(args, kwargs, *, is_cut):
    """Return the results of a run over a rectangle: outputs, states at cuts, last states."""
    lengths, ends = torch.tensor(SIZES), torch.tensor(ENDS)[:, : 2 if is_cut else 0]
    bounds = torch.cat([torch.zeros_like(lengths)[:, None], ends, lengths[:, None]], 1)
    widths = tuple((bounds[:, 1:] - bounds[:, :-1]).max(0).values.tolist())
    run = ScanRun(len(SIZES), max(SIZES), widths, bounds.device, bounds)
    output, final = run.compute(mamba2_chunk_scan, *args, **kwargs)
    return output, [*run.pieces, final]


@pytest.mark.parametrize("low", [0.0, 0.1])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_scan_computes_each_row_as_alone(low, is_cut, monkeypatch, generator):
    """Contents of the padding change no bit; products of other shapes round differently."""
    compute_in_double(monkeypatch)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    given = {n: draw(len(SIZES), max(SIZES), *s) for n, s in SHAPES.items()}
    states = draw(len(SIZES), 4, 16, 8)
    spoilt = {n: x.clone() for n, x in given.items()}
    for row, size in enumerate(SIZES):
        for x in spoilt.values():
            x[row, size:] = math.nan
    output, found = compute(*call(**spoilt, low=low, states=states), is_cut=is_cut)
    assert output.isfinite().all()
    clean, others = compute(*call(**given, low=low, states=states), is_cut=is_cut)
    assert torch.equal(output, clean)
    assert all(torch.equal(a, b) for a, b in zip(found, others, strict=True))
    for row, (size, own) in enumerate(zip(SIZES, ENDS, strict=True)):
        one = slice(row, row + 1)
        state, outputs, expected = states[one], [], []
        for begin, end in itertools.pairwise([0, *(own if is_cut else []), size]):
            if begin < end:
                own_part = {n: x[one, begin:end] for n, x in given.items()}
                args, kwargs = call(**own_part, low=low, states=state)
                part, state = mamba2_chunk_scan(*args, **kwargs)
                outputs.append(part)
            expected.append(state)
        assert off(output[one, :size], torch.cat(outputs, 1)) < 1e-12
        assert max(off(a[one], b) for a, b in zip(found, expected, strict=True)) < 1e-12


def test_a_scan_is_never_given_no_tokens(generator):
    """A kernel without tokens writes out of bounds; a row cut at its end needs no further call."""
    given = torch.randn(1, 8, 4, generator=generator)

    def summed(x, *, initial_state, output_final_state):
        assert output_final_state
        assert x.shape[1]
        return x, initial_state + x.sum(1)

    run = ScanRun(1, 8, (3, 5, 0), torch.device("cpu"), torch.tensor([[0, 3, 8, 8]]))
    state = torch.zeros(1, 4)
    output, final = run.compute(summed, given, initial_state=state, output_final_state=True)
    assert torch.equal(output, given)
    assert torch.equal(run.pieces[0], given[:, :3].sum(1))
    assert torch.equal(run.pieces[1], final)


@pytest.mark.parametrize("end", [1, 3, 4, 9])
def test_the_window_of_a_fresh_prompt_begins_with_zeros_where_tokens_are_too_few(end, generator):
    full = torch.randn(2, 5, 9, generator=generator)
    padded = torch.cat([torch.zeros(2, 5, 4), full], dim=-1)
    assert torch.equal(capturing._window_before(full, end, 4), padded[..., end : end + 4])
    assert torch.equal(capturing._window_before(padded, 4 + end, 4), padded[..., end : end + 4])


def test_a_fresh_prompt_enters_convolutions_as_it_is(monkeypatch, generator):
    """Nothing is put before it, which would copy all of it in each layer."""
    cache, seen = make_cache(make_model("nemotron_h"), segment_tokens=32 * BLOCK), []
    batch(cache, prompts_of(generator, 5), max_new_tokens=1)  # the first call tests batching
    keep = capturing._keep_windows

    def looked_at(*args, **options):
        full = keep(*args, **options)
        seen.append((full.shape[-1], args[2].num_tokens))
        return full

    monkeypatch.setattr(capturing, "_keep_windows", looked_at)
    batch(cache, prompts_of(generator, 5 * BLOCK), max_new_tokens=1)
    assert seen
    assert all(columns == size for columns, size in seen)


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5"])
def test_a_convolutions_kernel_gets_tokens_whose_channels_lie_together(
    name, monkeypatch, generator
):
    """Rows that go on from a state enter it as transformers would have them, in another layout."""
    one, seen = subject(name), []
    cache = one.cache()
    monkeypatch.setattr(cache._capture, "_has_conv_kernel", True)
    by_token = capturing._update_by_token

    def looked_at(update, layer, run, *args, **options):
        states = capturing.numbered(layer.conv_states)
        before = {index: state.clone() for index, state in states.items() if state is not None}
        full = by_token(update, layer, run, *args, **options)
        if 0 in before:
            assert full.stride(1) == 1
            expected = torch.cat([before[0], args[0]], dim=-1)
            assert torch.equal(full, expected)
            assert torch.equal(layer.conv_states[0], expected[..., -before[0].shape[-1] :])
            seen.append(full.shape)
        return full

    monkeypatch.setattr(capturing, "_update_by_token", looked_at)
    stem = tokens(generator, 3 * BLOCK)
    for lengths in ([5], [9, 20, 2 * BLOCK + 3]):
        prompts = [[*stem, *tokens(generator, length)] for length in lengths]
        found = answers(batch(cache, prompts, max_new_tokens=3, eos_token_id=None))
        assert found == [one.answer(prompt, 3) for prompt in prompts]
    assert any(rows == 3 for rows, *_ in seen)


class Recorded:
    """A stand-in for a CUDA graph and its logits, which computes at its replay only."""

    def __init__(self, compute):
        self.graph, self.compute, self.logits = self, compute, None

    def replay(self):
        self.logits = self.compute()


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5", "lfm2", "mamba2"])
def test_rectangles_of_captured_sizes_are_computed_as_others_are(name, monkeypatch, generator):
    """Without a GPU: padded with rows and tokens, from tensors of fixed addresses."""

    def capture(self, key, compute):
        self._graphs[key] = Recorded(compute)
        return True

    monkeypatch.setattr(graphs.StepGraphs, "why_eager", lambda *_: "")
    monkeypatch.setattr(graphs.StepGraphs, "capture", capture)
    monkeypatch.setattr(graphs, "_SIZES", dict.fromkeys((1, 2, 4, 8), (8, 24)))
    rows = Rows(name, monkeypatch)
    for number in range(12):  # which sizes come twice, and are captured, is drawn
        if number >= 3 and rows.batcher.stats().graph_shapes >= 2:
            break
        prompts = prompts_of(generator, *LENGTHS)
        for _ in rows.run(prompts, generator):
            assert rows.errors(prompts) < BOUND
        rows.batcher.context.kv_block_allocator.reset()
    shapes = {(shape.num_rows, shape.num_tokens) for shape in rows.batcher._forwards._inputs}
    assert shapes <= set(itertools.product((1, 2, 4, 8), (8, 24)))
    assert rows.batcher.counts["prefill_replays"] >= 3
    assert rows.batcher.counts["eager_prefills"] == len(rows.batcher._forwards._inputs)
    assert rows.batcher.stats().graph_shapes >= 2


def test_graphs_end_with_what_they_were_captured_for():
    own = graphs.StepGraphs(torch.device("cuda"), Counter())
    own.begin("here")
    assert not own.why_eager("decode")
    own._graphs[4] = own._graphs["a shape"] = graphs._Graph(None, None)
    own._refusals["prefill"] = "it waits for the device"
    own.begin("here")
    assert (own.sizes, own.num_shapes) == ((4,), 1)
    assert (own.why_eager("decode"), own.why_eager("prefill")) == ("", "it waits for the device")
    own.begin("there")
    assert (own.sizes, own.num_shapes) == ((), 0)
    assert not own.why_eager("prefill")
    own.begin("elsewhere")
    assert own.run(4, lambda: "computed") == "computed"
    assert own.eager_reason.startswith("the model's weights move")
    own.begin("elsewhere")
    assert not own.why_eager("decode")


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_divided_so_that_they_take_the_least(seed):
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 9, (), generator=generator))
    sizes = sorted(torch.randint(1, 60, (count,), generator=generator).tolist(), reverse=True)
    least, extra, most = torch.randint(0, 70, (3,), generator=generator).tolist()

    def cost(bounds):
        total = 0
        for begin, end in itertools.pairwise(bounds):
            area = sizes[begin] * (end - begin)
            if area > most and end - begin > 1:
                return math.inf
            total += max(area, least) + extra
        return total

    found = split_rows(sizes, most, lambda rows, tokens: max(rows * tokens, least) + extra)
    everything = [
        [0, *cuts, count]
        for number in range(count)
        for cuts in itertools.combinations(range(1, count), number)
    ]
    assert cost(found) == min(map(cost, everything))


def test_the_slower_launches_are_the_larger_are_the_rectangles_that_are_captured():
    """On a GPU 2,048 tokens are assumed to take as long as launches until both are measured."""
    costs = graphs.RectangleCosts(torch.device("cuda"))
    assert [costs.captured(*size, 8192) for size in ((1, 65), (1, 2048), (3, 70), (5, 300))] == [
        (1, 128), (1, 2048), (4, 128), None,
    ]  # fmt: skip
    assert costs.captured(1, 65, 100) is None
    assert costs.captured(65, 1, 8192) is costs.captured(1, 9000, 8192) is None
    few = costs.sizes(8192)
    assert max(rows * own for rows, own in few) == 2048
    lengths = [300] * 16
    assert [*costs.split(lengths, 8192, 8192)] == [(0, 16)]
    costs._launch_seconds.extend([3.0, 0.1, 0.1])  # the first one tunes kernels
    costs._token_seconds = 0.1 / 8000
    assert {*few} < {*costs.sizes(8192)}
    assert costs.captured(5, 300, 8192) == (8, 384)
    assert costs.captured(32, 256, 8192) is None  # computing takes longer than its launches
    # Ten rows of one length and two long ones: a launch costs more than their padding.
    assert [*costs.split([384] * 2 + [128] * 10, 8192, 0)] == [(0, 12)]
    costs._launch_seconds.extend([0.001] * 8)
    assert [*costs.split([384] * 2 + [128] * 10, 8192, 0)] == [(0, 2), (2, 12)]


def test_launch_costs_are_taken_from_usual_forwards(generator, monkeypatch):
    """Rows of one length launch faster: ragged rows were split into too many forwards."""
    costs, now = graphs.RectangleCosts(torch.device("cuda")), [0.0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(graphs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for num_tokens, is_usual, took in ((256, False, 0.05), (256, True, 0.07), (4096, True, 0.01)):
        with costs.launching(num_tokens, is_usual=is_usual):
            now[0] += took
    assert costs._launch_seconds.pop() == pytest.approx(0.07)
    assert not costs._launch_seconds
    monkeypatch.undo()
    # All rows of a step in one rectangle.
    monkeypatch.setitem(graphs._FORWARD_TOKENS, "cpu", (10**6, 10**6))
    launching, forward, seen = graphs.RectangleCosts.launching, BatchForwards.forward, []
    monkeypatch.setattr(
        graphs.RectangleCosts,
        "launching",
        lambda *args, is_usual: seen.append(is_usual) or launching(*args, is_usual=is_usual),
    )
    monkeypatch.setattr(
        BatchForwards,
        "forward",
        lambda self, shape, *rest: seen.append(shape) or forward(self, shape, *rest),
    )
    cache = subject("nemotron_h").cache(segment_tokens=32 * BLOCK)
    for lengths in ([2 * BLOCK + 3], [2 * BLOCK + 3, BLOCK + 5], [3, 2]):
        batch(cache, prompts_of(generator, *lengths), max_new_tokens=1)
    kinds = {
        (s.is_ragged, bool(s.num_checkpoints)): is_usual
        for is_usual, s in zip(seen[::2], seen[1::2], strict=True)
    }
    assert kinds[True, True]
    assert not kinds[False, True]
    assert not kinds[True, False]


def test_no_forward_has_more_tokens_than_a_batch_may(generator, monkeypatch):
    one, shapes, forward = subject("nemotron_h"), [], BatchForwards.forward

    def noted(self, shape, inputs):
        shapes.append(shape)
        return forward(self, shape, inputs)

    monkeypatch.setattr(BatchForwards, "forward", noted)
    monkeypatch.setitem(graphs._FORWARD_TOKENS, "cpu", (10**6, 0))
    cache, prompts = one.cache(), prompts_of(generator, 5, 30, 9, 14, 21, 2)
    cache.prepare_batches()
    shapes.clear()
    config = ContinuousBatchingConfig(max_batch_tokens=24)
    outputs = batch(cache, prompts, continuous_batching_config=config)
    assert [x.generated_tokens for x in outputs] == [one.answer(p, 6) for p in prompts]
    assert max(shape.num_rows * shape.num_tokens for shape in shapes) <= 24
    assert max(shape.num_rows for shape in shapes) > 1
    stats, computed = cache.batch_stats(), sum(one.num_rows * one.num_tokens for one in shapes)
    assert 0 < stats.padding_tokens == computed - stats.prefill_tokens


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5"])
def test_batches_with_a_gpus_kernels_answer_as_with_their_twins(family, generator, monkeypatch):
    """Triton's interpreter runs the GPU's kernels on the tensors of rectangles and steps."""
    shared, own = tokens(generator, 2 * BLOCK), [3, 21]
    rounds = [[[*shared, *tokens(generator, length)] for length in own] for _ in range(2)]
    launched = Counter()

    def kernels_in_triton(backend, device, *, kernels, twins):
        module = importlib.import_module(kernels)
        for name in twins.__all__:
            launch = partial(_count, launched, name, getattr(module, name))
            monkeypatch.setattr(module, name, launch)
        return module

    found = []
    for uses_triton in (False, True):
        if uses_triton:
            for module in (paged, forwards, capturing):
                monkeypatch.setattr(module, "kernels_for", kernels_in_triton)
        cache = make_cache(make_model(family), max_requests=4)
        found.append([answers(batch(cache, one, max_new_tokens=3)) for one in rounds])
        assert cache.stats().hits
    assert found[0] == found[1]
    assert all(launched[name] for name in ("paged_attention", "write_tokens", "copy_rows"))


def _count(counts, name, launch, *args, **options):
    counts[name] += 1
    return launch(*args, **options)
