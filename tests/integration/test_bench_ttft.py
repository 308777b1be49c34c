"""The benchmark of the time to first token times what it says, and says what went wrong."""

import json
import statistics
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

import torch

from mamba_cache.bench import ttft, ttft_model
from mamba_cache.bench.command import main
from mamba_cache.bench.model_kernels import REFERENCE
from mamba_cache.bench.ttft import PrefixTimes, break_even, run_ttft
from mamba_cache.bench.ttft_chat import Chat, measure_chat
from mamba_cache.bench.ttft_model import FAMILIES, Subject, copy_of, make_model
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.transformers import PrefixCache

SMALL_CHAT = Chat(system_tokens=300, users=2, turns=3, message_tokens=20, answer_tokens=3)

ARGUMENTS = ["ttft", "--family", "tiny", "--prefix", "300", "256"]
ARGUMENTS += ["--suffix", "9", "--rounds", "1"]


@pytest.fixture(scope="module")
def model():
    tiny = FAMILIES["tiny"]
    config = tiny.config | {"hybrid_override_pattern": "M*"}
    return make_model(replace(tiny, config=config), "cpu")


@pytest.fixture(autouse=True)
def every_hit_is_used(monkeypatch):
    """The clocks jump in tests: by them, any hit may seem to lose."""
    always = partial(PrefixCache, measure_costs=False)
    monkeypatch.setattr(ttft_model, "PrefixCache", always)


@pytest.fixture
def subject(model):
    return Subject(model)


@pytest.fixture
def small(model, monkeypatch):
    """Whatever is asked for, the benchmark takes the small model."""
    monkeypatch.setattr(ttft_model, "make_model", lambda family, device: model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_ways_compute_the_same(subject):
    """So that they may be compared: each gives the first token of the same prompt."""
    prompt = subject.random(300)
    filled = subject.fill(prompt[:, :256])
    bare = subject.forward(prompt[:, 256:], copy_of(filled))
    assert subject.generate(subject.model, prompt)[0, -1] == bare
    assert subject.first_token_filled(prompt, copy_of(filled)).ids[0, -1] == bare
    assert filled.get_seq_length() == 256, "a copy shares nothing"
    with subject.prefix_cache(num_tokens=1000, num_calls=3) as cache:
        assert subject.generate(cache, prompt)[0, -1] == bare
        assert subject.generate(cache, prompt)[0, -1] == bare


def test_prompts_are_what_their_names_say(subject, monkeypatch):
    resets, forwards = [], []
    reset, forward = PrefixCache.reset, subject.forward
    monkeypatch.setattr(PrefixCache, "reset", lambda self: resets.append(reset(self)))
    monkeypatch.setattr(
        subject,
        "forward",
        lambda tokens, past: (forwards.append(tokens.shape[1]), forward(tokens, past))[1],
    )
    times = PrefixTimes(subject, prefix=512, suffix=9, rounds=2)
    times.run()
    counts = {way: len(seconds) for way, seconds in times.seconds.items()}
    assert counts == {
        "plain transformers": 4,
        "first prompt of an empty cache": 2,
        "miss": 2,
        "second sighting": 2,
        "hit": 8,
        "identical prompt": 2,
        "next turn": 2,
        "the new tokens alone": 8,
        "the new tokens alone, through generate": 8,
    }
    assert all(seconds > 0 for way in times.seconds.values() for seconds in way)
    assert set(times.skipped["miss"]) == set(times.skipped["first prompt of an empty cache"]) == {0}
    for way in ("hit", "identical prompt", "next turn"):
        assert min(times.skipped[way]) >= 512, way
    assert set(forwards) == {512, 8, 9}, "what fills a cache, shows its size, and is new"
    assert len(resets) == 2
    assert times.evictions == 0
    assert times.stats["requests"] == 3 * 9, "the round that warms up is counted"
    assert times.stats["skipped_tokens"] > 0


def test_an_eviction_spoils_the_figures(small, model, monkeypatch):
    one_state = Subject(model)._measure_memory()[0] / 2**30
    sizes = {"mamba_cache_gb": 1.5 * one_state, "kv_cache_gb": 0.01}
    few = PrefixCache(model, measure_costs=False, **sizes)
    monkeypatch.setattr(Subject, "prefix_cache", lambda self, **_: few)
    result = run_ttft(family="tiny", prefix=[256], suffix=9, rounds=1)
    [given_up] = [one for one in result["measurements"] if one["name"].startswith("given up")]
    assert given_up["value"] > 0
    assert (given_up["passed"], result["passed"]) == (False, False)


def test_the_result_holds_every_time(small, monkeypatch, capsys):
    monkeypatch.setattr(ttft, "Chat", lambda: SMALL_CHAT)
    arguments = [*ARGUMENTS, "--chat", "--json"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["benchmark"], result["family"], result["rounds"]) == ("ttft", "tiny", 1)
    assert set(result["versions"]) == {"torch", "triton", "transformers"}
    assert set(result["kernels"].values()) == {REFERENCE}
    found = {one["name"]: one for one in result["measurements"]}
    for tokens in ("256 + 9 tokens", "300 + 9 tokens"):
        samples = result["samples_ms"][tokens]
        assert len(samples) == 9
        for way, milliseconds in samples.items():
            assert found[f"{way}, {tokens}"]["runs"] == len(milliseconds)
            median = pytest.approx(statistics.median(milliseconds), abs=2e-3)
            assert found[f"{way}, {tokens}"]["value"] == median
        assert result["stats"][tokens]["hits"] > 0
        ratio = found[f"miss over plain, {tokens}"]["value"]
        plain = found[f"plain transformers, {tokens}"]["value"]
        assert ratio == pytest.approx(found[f"miss, {tokens}"]["value"] / plain)
        beyond = found[f"hit beyond the new tokens alone, {tokens}"]["value"]
        pairs = zip(samples["hit"], samples["the new tokens alone"], strict=True)
        expected = statistics.median(hit - bare for hit, bare in pairs)
        assert beyond == pytest.approx(expected, abs=4e-3)
    assert "break_even" in result
    assert len(result["chat"]["requests"]) == 6
    assert result["failed"] == {}


class Pessimist(PrefixCache):
    """One that takes all hits to lose, as long as nobody knows better."""

    def __init__(self, model, **settings):
        super().__init__(model, **settings)
        self._costs.uses = lambda saving: False

    def expected_saving(self, cached_tokens, new_tokens):
        return {256: -0.003, 300: 0.001}[cached_tokens]


def test_declined_hits_show_and_so_does_what_the_cache_expects(small, monkeypatch, capsys):
    monkeypatch.setattr(ttft_model, "PrefixCache", Pessimist)
    assert main([*ARGUMENTS, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    found = {one["name"]: one for one in result["measurements"]}
    for tokens in ("256 + 9 tokens", "300 + 9 tokens"):
        assert found[f"hit, {tokens}"]["detail"].endswith("declined 4 of 4 times")
        assert "declined" not in found[f"miss, {tokens}"]["detail"]
        assert result["stats"][tokens]["declined_hits"] > 0
        assert result["stats"][tokens]["skipped_tokens"] == 0
    own = result["expected_break_even"]
    assert own["gains_ms"] == {"256": -3, "300": 1}
    assert own["cached_tokens"] == found["break-even by the cache's own measurements"]["value"]
    assert own["cached_tokens"] == 256 + 33


def test_a_failure_is_reported_and_the_rest_is_measured(small, monkeypatch, capsys):
    monkeypatch.setattr(ttft, "Chat", lambda: SMALL_CHAT)
    run = PrefixTimes.run

    def fail_at_300(self):
        if self._lengths[0] == 300:
            raise ValueError("this one is broken")
        run(self)

    monkeypatch.setattr(PrefixTimes, "run", fail_at_300)
    assert main(ARGUMENTS) == 1
    out, err = capsys.readouterr()
    assert "300 + 9 tokens: ValueError: this one is broken" in out
    assert "Traceback" in err
    assert "miss, 256 + 9" in " ".join(out.split())


def test_plain_transformers_may_run_out_of_memory(subject, monkeypatch):
    generate = subject.generate

    def without_memory(who, prompt, **options):
        if who is subject.model and "past_key_values" not in options:
            raise torch.cuda.OutOfMemoryError
        return generate(who, prompt, **options)

    monkeypatch.setattr(subject, "generate", without_memory)
    times = PrefixTimes(subject, prefix=256, suffix=9, rounds=1)
    times.run()
    assert "plain transformers" not in times.seconds
    assert len(times.seconds["hit"]) == 4


@pytest.mark.parametrize(
    ("gains", "tokens", "said"),
    [
        ({1024: -4.0, 4096: 12.0}, 1792, "between 1,024 and 4,096"),
        ({1024: -4.0, 2048: 3.0, 4096: -1.0, 8192: 1.0}, 6144, "between 4,096 and 8,192"),
        ({1024: 4.0, 4096: 12.0}, 1024, "the shortest"),
        ({1024: -4.0, 4096: 0.0}, None, "up to 4,096"),
    ],
)
def test_break_even_is_where_hits_begin_to_win_for_good(gains, tokens, said):
    found, detail = break_even(gains)
    assert found == tokens
    assert said in detail


def test_a_chat_knows_what_is_new_in_each_request(subject):
    figures, result = measure_chat(subject, SMALL_CHAT, rounds=1)
    requests = result["requests"]
    assert [(one["turn"], one["user"]) for one in requests] == [
        (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2),
    ]  # fmt: skip
    # The first request has the system prompt to compute; later ones what their user wrote, and the
    # last token of the answer, which no forward has seen.
    assert [one["new_tokens"] for one in requests] == [320, 20, 21, 21, 21, 21]
    assert [one["prompt_tokens"] for one in requests] == [320, 320, 343, 343, 366, 366]
    assert requests[0]["skipped_tokens"] == 0
    assert requests[1]["skipped_tokens"] == 256, "the system prompt's end was named"
    assert min(one["skipped_tokens"] for one in requests[2:]) > 0
    for way in ("plain_ms", "cached_ms", "bare_ms"):
        [total] = result["totals_ms"][way]
        assert total == pytest.approx(sum(one[way] for one in requests), abs=1e-3)
    ratio = next(one for one in figures if one.name.endswith("over the new tokens alone"))
    cached, bare = (result["totals_ms"][way][0] for way in ("cached_ms", "bare_ms"))
    assert ratio.value == pytest.approx(cached / bare)


def test_the_clock_of_a_chat_stops_at_the_first_token(subject, monkeypatch):
    """What comes after it, an answer of any length, is not counted."""
    times = iter(range(100))
    monkeypatch.setattr(ttft_model.time, "perf_counter", lambda: next(times))
    first = subject.first_token(subject.model, subject.random(20), max_new_tokens=5)
    assert (first.ids.shape, first.seconds, first.call_seconds) == ((1, 25), 1, 2)

    streamer = ttft_model._Streamer()
    streamer.put("the prompt")
    assert streamer.at == 0
    streamer.put("the first token")
    assert streamer.at == 3
    streamer.put("the second token")
    streamer.end()
    assert streamer.at == 3


@pytest.mark.parametrize("wrong", [{"prefix": [0]}, {"suffix": 0}, {"rounds": 0}])
def test_numbers_below_one_are_refused(wrong):
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        run_ttft(family="tiny", **wrong)


def test_the_reference_path_is_refused_to_a_model_with_kernels(small, monkeypatch):
    monkeypatch.setattr(ttft_model, "kernels_of", lambda model: {"scan": "fla 0.6"})
    with pytest.raises(InvalidArgumentError, match="with kernels before"):
        run_ttft(family="tiny", reference=True)
