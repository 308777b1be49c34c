"""The benchmark of serving measures what it says, and notices answers that are wrong."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

import torch
from clocks import Clock

from mamba_cache.bench import serve, ttft_model
from mamba_cache.bench.command import main
from mamba_cache.bench.serve import (
    WAYS,
    WORKLOADS,
    Outcome,
    Workload,
    _answer_in_batches,
    _answer_one_by_one,
    _time_decode_steps,
    make_workloads,
    run_serve,
)
from mamba_cache.bench.ttft_model import FAMILIES, Subject, make_model
from mamba_cache.errors import InvalidArgumentError

SCALE = replace(
    serve._TINY, requests=3, shared=256, own=5, new=3, most=6, samples=2, static_rows=(2, 4),
    decode_rows=(2,), steps=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    tiny = FAMILIES["tiny"]
    config = tiny.config | {"hybrid_override_pattern": "M*"}
    return make_model(replace(tiny, config=config), "cpu")


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Rates are compared with times here, so these are not to be next to nothing."""
    for module in (serve, ttft_model):
        monkeypatch.setattr(module, "time", Clock(0.01))


@pytest.fixture
def subject(model):
    return Subject(model)


@pytest.fixture
def small(model, monkeypatch):
    """Whatever is asked for, the benchmark takes a small model and few requests."""
    monkeypatch.setattr(ttft_model, "make_model", lambda family, device: model)
    monkeypatch.setattr(serve, "_TINY", SCALE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def workload(**changes):
    given = {"name": "shared", "title": "some", "prompts": [[5], [6]], "new_tokens": [4, 2]}
    return Workload(**(given | changes))


def rate(outcome):
    return outcome["new_tokens"] / outcome["seconds"]


def by_name(result):
    return {one["name"]: one for one in result["measurements"]}


def test_workloads_are_what_their_names_say():
    shared, lengths, rollouts = make_workloads([*WORKLOADS], serve._FULL, 131_072)
    assert [shared.title, lengths.title, rollouts.title] == [
        "64 requests, 128 new", "64 requests, 16 to 512 new", "8 x 16 rollouts",
    ]  # fmt: skip
    for one in (shared, lengths):
        beginnings = {tuple(prompt[:2048]) for prompt in one.prompts}
        assert len(beginnings) == 1
        assert len({tuple(prompt[2048:]) for prompt in one.prompts}) == 64
        assert {len(prompt) for prompt in one.prompts} == {2304}
    assert shared.prompts[0][:2048] != lengths.prompts[0][:2048], "one would warm the other up"
    assert set(shared.new_tokens) == {128}
    assert 16 <= min(lengths.new_tokens) < 40
    assert 480 < max(lengths.new_tokens) <= 512
    assert (len(rollouts.prompts), rollouts.samples, rollouts.num_answers) == (8, 16, 128)
    assert len({tuple(prompt[:64]) for prompt in rollouts.prompts}) == 8
    # Of a model that says anything, one of 256 tokens ends an answer.
    assert 131_072 / len(rollouts.end_tokens) == 256
    assert rollouts.options(0)["do_sample"]
    assert not lengths.options(0)["do_sample"]


def test_workloads_are_the_same_ones_in_each_run_and_part():
    everything = make_workloads([*WORKLOADS], SCALE, 512)
    assert everything == make_workloads([*WORKLOADS], SCALE, 512)
    assert make_workloads(["rollouts"], SCALE, 512) == everything[2:]
    assert make_workloads([*WORKLOADS], SCALE, 512, seed=1) != everything


def test_an_answer_is_cut_where_it_ends_by_itself():
    one = workload(end_tokens=[9, 8])
    assert one.cut([1, 2, 3, 4, 5], 0) == [1, 2, 3, 4]
    assert one.cut([1, 9, 0, 0], 0) == [1, 9]
    assert one.cut([1, 2, 9], 1) == [1, 2]
    assert workload().cut([9], 0) == [9]


def test_a_sample_is_spread_over_the_lengths_of_answers():
    one = workload(prompts=[[i] for i in range(6)], new_tokens=[50, 10, 60, 20, 40, 30])
    assert one.sample(None) == one.sample(6) == [0, 1, 2, 3, 4, 5]
    assert [one.new_tokens[i] for i in one.sample(2)] == [20, 50]
    assert [one.new_tokens[i] for i in one.sample(3)] == [20, 40, 60]


def test_static_batches_go_on_until_their_longest_is_over(subject):
    prompts = [subject.random(7)[0].tolist() for _ in range(3)]
    one = workload(prompts=prompts, new_tokens=[2, 5, 3])
    outcome = _answer_in_batches(subject, one, 2)
    assert {key: len(answer) for key, answer in outcome.answers.items()} == {
        (0, 0): 2, (1, 0): 5, (2, 0): 3,
    }  # fmt: skip
    assert len(outcome.step_seconds) == 4 + 2, "five tokens, and three"
    assert outcome.tokens_per_second == 10 / outcome.seconds, "what nobody asked for is no token"
    assert len(outcome.first_seconds) == 3
    assert outcome.first_seconds[0] == outcome.first_seconds[1] < outcome.first_seconds[2]
    alone = _answer_one_by_one(subject, subject.model, one, [0, 1, 2])
    assert alone.answers == outcome.answers
    assert _answer_in_batches(subject, one, 2, most_batches=1).answers.keys() == {(0, 0), (1, 0)}


def test_static_batches_of_samples_are_generates_own(subject, monkeypatch):
    calls = []
    generate = subject.model.generate

    def watched(ids, **options):
        calls.append((len(ids), options["num_return_sequences"]))
        return generate(ids, **options)

    monkeypatch.setattr(subject.model, "generate", watched)
    prompts = [subject.random(5)[0].tolist() for _ in range(3)]
    one = workload(prompts=prompts, new_tokens=[4] * 3, samples=2, end_tokens=[7])
    outcome = _answer_in_batches(subject, one, 4)
    assert calls == [(2, 2), (1, 2)]
    assert outcome.answers.keys() == {(i, number) for i in range(3) for number in range(2)}


def test_the_result_says_what_was_measured_of_what(small, capsys):
    assert main(["serve", "--tiny", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["benchmark"], result["family"], result["failed"]) == ("serve", "tiny", {})
    assert result["sample"] is None
    for name, rows in zip(WORKLOADS, (3, 3, 4), strict=True):
        ways = result["workloads"][name]["ways"]
        assert ways.keys() == WAYS.keys()
        for outcomes in ways.values():
            for outcome in outcomes:
                if name != "rollouts" or len(outcomes) == 1:
                    assert outcome["answers"] == outcome["of"]
                assert rate(outcome) == pytest.approx(
                    outcome["tokens_per_second"], rel=1e-3, abs=0.01
                )
        assert [outcome["rows"] for outcome in ways["static"]] == [2, rows]
    assert result["workloads"]["shared"]["ways"]["batch"][0]["new_tokens"] == 9
    found = by_name(result)
    for title in ("3 requests, 3 new", "3 requests, 2 to 6 new"):
        for way in ("static", "cached", "batch"):
            equal = found[f"{WAYS[way]}: answers equal to those of {WAYS['generate']}, {title}"]
            assert (equal["value"], equal["limit"]) == (100, 100)
    ratio = found["generate_batch over static batches of generate, 3 requests, 3 new"]
    ways = result["workloads"]["shared"]["ways"]
    expected = rate(ways["batch"][0]) / max(map(rate, ways["static"]))
    assert ratio["value"] == pytest.approx(expected, rel=0.01)
    assert ratio["limit"] is None, "limits are for a GPU and whole workloads"
    assert result["decode_step_ms"].keys() == {"2"}
    steps = found["generate_batch: decode step of 2 requests, host time included"]
    assert steps["runs"] >= 2, "of three, less where one request began earlier"
    assert result["batch"]["graphs"]["eager_reason"]
    assert result["batch"]["counts"]["decoded_tokens"] > 0


def test_a_part_can_be_measured(small, capsys):
    arguments = ["serve", "--tiny", "--workload", "shared", "--only", "generate", "static"]
    assert main([*arguments, "--sample", "1", "--static-rows", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["workloads"].keys() == {"shared"}
    ways = result["workloads"]["shared"]["ways"]
    assert ways.keys() == {"generate", "static"}
    assert [(one["answers"], one["of"]) for outcomes in ways.values() for one in outcomes] == [
        (1, 3), (1, 3),
    ]  # fmt: skip
    assert result["sample"] == 1
    [first] = [one for one in result["measurements"] if one["name"].endswith("3 new: new tokens")][
        :1
    ]
    assert first["detail"].startswith("1 of 3 answers")


def test_of_a_part_the_cache_has_seen_the_prefix(small, monkeypatch):
    """As for all requests but the first two, which a sample would count for too much."""
    seen = []
    answer = serve._answer_one_by_one

    def watched(subject, who, workload, prompts):
        if who is not subject.model:
            seen.append(who.stats().skipped_tokens)
            outcome = answer(subject, who, workload, prompts)
            seen.append(who.stats().skipped_tokens)
            return outcome
        return answer(subject, who, workload, prompts)

    monkeypatch.setattr(serve, "_answer_one_by_one", watched)
    always = serve.Subject.prefix_cache
    monkeypatch.setattr(
        serve.Subject,
        "prefix_cache",
        lambda self, **sizes: always(self, **sizes, measure_costs=False),
    )
    run_serve(family="tiny", workload=["shared"], only=["cached"], sample=1)
    assert seen[1] - seen[0] == 256


def test_answers_that_differ_are_noticed(small, monkeypatch):
    answer = serve._answer_batched

    def wrong(subject, cache, workload):
        outcome = answer(subject, cache, workload)
        outcome.answers[1, 0][-1] += 1
        return outcome

    monkeypatch.setattr(serve, "_answer_batched", wrong)
    result = run_serve(family="tiny", workload=["shared"], only=["static", "batch"])
    name = f"{WAYS['batch']}: answers equal to those of {WAYS['static']}, 3 requests, 3 new"
    equal = by_name(result)[name]
    assert equal["value"] == pytest.approx(200 / 3)
    assert equal["detail"].startswith("2 of 3; equal tokens before the first other one: 89%")
    assert (equal["passed"], result["passed"]) == (False, False)


def test_what_fails_is_reported_and_the_rest_is_measured(small, monkeypatch, capsys):
    def out_of_memory(subject, workload, rows, most_batches=None):
        if rows > 2:
            raise torch.cuda.OutOfMemoryError("no room. Tried to have some")
        if workload.name == "lengths":
            raise ValueError("this one is broken")
        return _answer_in_batches(subject, workload, rows, most_batches)

    monkeypatch.setattr(serve, "_answer_in_batches", out_of_memory)
    assert main(["serve", "--tiny", "--only", "generate", "static", "--json"]) == 1
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["failed"] == {
        "static batches of generate, 3 requests, 2 to 6 new": "ValueError: this one is broken"
    }
    assert "Traceback" in err
    assert set(result["out_of_memory"].values()) == {"no room"}
    assert len(result["workloads"]["shared"]["ways"]["static"]) == 1
    assert "static" not in result["workloads"]["lengths"]["ways"]


def test_a_device_that_failed_is_not_asked_again(small, monkeypatch, capsys):
    """As after an assertion in a kernel: what was measured before it is reported."""

    def assertion(*_):
        monkeypatch.setattr(serve._Report, "_empty", assertion)
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(serve, "_answer_batched", assertion)
    assert main(["serve", "--tiny", "--workload", "shared", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    broken = "RuntimeError: device-side assert triggered"
    assert result["failed"]["generate_batch, 3 requests, 3 new"] == broken
    over = "not begun: the device had failed"
    assert result["failed"]["static batches of generate, 3 requests, 3 new"] == over
    assert list(result["workloads"]["shared"]["ways"]) == ["generate"]


def test_a_way_that_gave_nothing_fails(small, monkeypatch):
    def out_of_memory(*_):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(serve, "_answer_in_batches", out_of_memory)
    result = run_serve(family="tiny", workload=["shared"], only=["static"])
    assert result["failed"] == {
        "static batches of generate, 3 requests, 3 new": "nothing was measured"
    }
    assert not result["passed"]


def test_nothing_is_begun_when_the_time_is_over(small, monkeypatch):
    """What was measured until then is reported: whoever kills a run gets nothing."""
    now = [0.0]
    monkeypatch.setattr(serve.time, "perf_counter", lambda: now[0])

    def slow(subject, who, workload, prompts):
        now[0] += 6
        return Outcome(6, {(0, 0): [1, 2]})

    monkeypatch.setattr(serve, "_answer_one_by_one", slow)
    result = run_serve(family="tiny", only=["generate", "batch"], seconds=10)
    assert [name for name, one in result["workloads"].items() if one["ways"]] == [
        "shared", "lengths",
    ]  # fmt: skip
    over = "not begun: 10 s were over"
    assert result["failed"] == {
        "generate, one by one, 2 x 2 rollouts": over,
        "generate_batch": over,
        **{f"generate_batch, {title}": "nothing was measured" for title in (
            "3 requests, 3 new", "3 requests, 2 to 6 new", "2 x 2 rollouts",
        )},
    }  # fmt: skip
    assert (result["seconds"], result["passed"]) == (12, False)


def report(model, **outcomes):
    [one] = make_workloads(["shared"], SCALE, 512)
    made = serve._Report(
        Subject(model), workloads=[one], ways=[*WAYS], sample=2, seconds=None, static_rows=[2],
        decode_rows=[64], steps=3, has_limits=True, is_exact=False,
    )  # fmt: skip
    made.outcomes["shared"] = outcomes
    return {figure.name: figure for figure in made._compare(one)}


def outcome(seconds):
    return Outcome(seconds, {(0, 0): [1] * 30})


def test_limits_are_those_of_the_best_baseline(model):
    figures = report(
        model, generate=[outcome(21)], static=[outcome(9), outcome(1.9)], batch=[outcome(1)]
    )
    over_one = figures["generate_batch over generate, one by one, 3 requests, 3 new"]
    over_static = figures["generate_batch over static batches of generate, 3 requests, 3 new"]
    assert (over_one.value, over_one.limit, over_one.passed) == (pytest.approx(21), 20, True)
    assert (over_static.value, over_static.limit, over_static.passed) == (1.9, 2, False)


def test_decode_steps_are_those_in_which_all_decode(subject):
    """Not those of the first while the second's prompt is computed, nor of the last alone."""
    stamps = [[1.0, 4.0, 9.0, 9.5, 10.5], [9.01, 9.51, 10.51, 13.0], [9.02, 9.52, 10.52]]
    asked = []

    def generate_batch(prompts, generation_config, record_timestamps):
        asked.append((len(prompts), generation_config.max_new_tokens, record_timestamps))
        return {str(i): SimpleNamespace(timestamps=one) for i, one in enumerate(stamps)}

    cache = SimpleNamespace(generate_batch=generate_batch)
    assert _time_decode_steps(subject, cache, 3, 8) == pytest.approx([0.5])
    assert asked == [(3, 9, True)]
    stamps[0].append(10.6)
    assert _time_decode_steps(subject, cache, 3, 8) == pytest.approx([0.5, 1.0])


def test_the_spread_is_of_all_times():
    milliseconds = Counter({0.001: 98, 0.5: 1, 2.0: 1})
    assert serve._spread_ms([*milliseconds.elements()]) == {"median": 1.0, "p99": 500.0}
    assert serve._spread_ms([]) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"sample": 0},
        {"seconds": 0},
        {"static_rows": [0]},
        {"workload": ["long"]},
        {"only": ["vllm"]},
    ],
)
def test_what_is_unknown_or_below_one_is_refused(wrong):
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        run_serve(family="tiny", **wrong)
