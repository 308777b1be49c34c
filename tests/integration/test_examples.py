"""Examples print the output that the documentation shows, and have their intended effect."""

import contextlib
import io
import json
import re
import sys

import numpy as np
import pytest
import torch
from clocks import Clock
from sources import ROOT, load_example

from mamba_cache import CacheConfig, DynamicInferenceContext, Request
from mamba_cache.reference import HybridModel, engine


def shown(page: str, command: str) -> str:
    """The output that a page of the documentation shows under a command."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    [block] = re.findall(rf"^```console\n\$ {re.escape(command)}\n(.*?)^```$", text, re.M | re.S)
    return block


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("tutorial/embed.md", "embed_in_your_engine"),
        ("how-to/policies.md", "custom_policy"),
        ("how-to/batching.md", "forks"),
        ("how-to/batching.md", "transformers_batch"),
    ],
)
def test_output_is_as_shown(page, name, capsys):
    if name.startswith("transformers"):
        pytest.importorskip("transformers", reason="needs the extra transformers")
    assert load_example(name).main() == 0
    assert capsys.readouterr().out == shown(page, f"python examples/{name}.py")


def test_every_turn_of_a_chat_skips_what_was_said_before(capsys):
    chat = load_example("own_engine")
    assert chat.main() == 0
    printed = capsys.readouterr().out
    turns = [line.split() for line in printed.splitlines() if re.match(r" +\d+ ", line)]
    assert len(turns) == len(chat.QUESTIONS)
    prompts = [int(turn[1]) for turn in turns]
    skipped = [int(turn[2]) for turn in turns]
    block = chat.BLOCK_SIZE_TOKENS
    for turn in range(1, len(turns)):
        # The last token of an answer is not computed in its turn, so its block is not full then.
        said_before = prompts[turn - 1] + chat.NEW_TOKENS - 1
        assert skipped[turn] == said_before // block * block


def test_questions_on_one_text_compute_what_is_new_from_the_second_on(capsys):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    assert load_example("transformers_script").main() == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^.*\? +(\d+) +(\d+) .* ms$", printed, re.M)
    skipped = [int(number) for _, number in rows]
    assert skipped == [0, 896, 896]
    computed = sum(int(length) for length, _ in rows) - sum(skipped)
    assert f"Prompt tokens computed: {computed:,} with the cache" in printed


def test_the_own_policy_keeps_what_was_used_most():
    policy = load_example("custom_policy").PopularSlotPolicy()
    policy.reset(4)
    policy.on_stored([0, 1, 2, 3])
    policy.on_consumed([0])
    policy.on_consumed([2])
    policy.on_consumed([0])
    slots = np.arange(4)
    assert policy.choose(4, slots, slots.astype(np.int32), None) == [1, 3, 2, 0]
    policy.on_stored([0])
    assert policy.choose(2, slots, slots.astype(np.int32), None) == [1, 3]
    assert policy.choose(4, slots, slots.astype(np.int32), None)[-1] == 2


# Examples that print a report, as a table or as JSON.


class Reporting:
    """An example, and the report of one run of it."""

    def __init__(self, name):
        self.example = load_example(name)
        if name == "speculative_decoding":
            self.example.TEXTS = self.example.TEXTS[1:2]  # one is enough here
        stdout, stderr = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
        ):
            patch.setattr(engine, "time", Clock(0.001))
            patch.setattr(sys, "argv", [f"{name}.py", "--json"])
            assert self.example.main() == 0
        assert stderr.getvalue() == ""
        self.report = json.loads(stdout.getvalue())


@pytest.fixture(scope="module")
def reuse():
    """The first command of the README."""
    return Reporting("prefix_reuse")


@pytest.fixture(scope="module")
def speculation():
    return Reporting("speculative_decoding")


def test_outputs_match_and_half_of_the_prefill_is_skipped(reuse):
    report = reuse.report
    assert report["outputs_match"] is True
    computed = sum(request["computed_tokens"] for request in report["requests"])
    needed = sum(request["prompt_tokens"] for request in report["requests"])
    assert report["prefill_tokens_computed"] == computed
    assert report["prefill_tokens_without_cache"] == needed
    assert computed <= needed / 2


def test_each_scene_shows_what_it_is_there_for(reuse):
    requests = {request["name"]: request for request in reuse.report["requests"]}
    skipped = {name: request["skipped_tokens"] for name, request in requests.items()}
    kv_blocks = {name: request["kv_matched_blocks"] for name, request in requests.items()}
    assert all(skipped[f"system prompt {n}"] > 2000 for n in (2, 3, 4))
    assert all(skipped[f"conversation {n}"] > 1000 for n in (2, 3, 4))
    assert kv_blocks["branch 2"] == kv_blocks["branch 3"] > 0
    assert skipped["branch 2"] == 0 < skipped["branch 3"]
    assert skipped["eviction 6: B"] == 0 < skipped["eviction 5: A"]


def test_drafts_save_steps_and_change_no_token(speculation):
    report, example = speculation.report, speculation.example
    assert report["outputs_match"] is True
    plain = {run["sampling"]: run for run in report["runs"] if run["num_speculative_tokens"] == 0}
    assert plain.keys() == {"greedy", "drawn"}
    assert len(report["runs"]) == 6
    for run in report["runs"]:
        without = plain[run["sampling"]]
        assert run["tokens"] == run["steps"] + run["accepted_tokens"] == without["steps"]
        if run is not without:
            assert run["tokens_per_step"] > 1.3
            assert run["accepted_tokens"] <= run["drafted_tokens"]
        # The second turn resumes behind the first answer.
        assert run["skipped_tokens"] > len(example.TEXTS) * example.PROMPT_TOKENS


# The engine of the tutorial: right with little memory too, and when the model fails.


@pytest.fixture(scope="module")
def model():
    return HybridModel(dtype=torch.float64)


@pytest.fixture
def make_engine(model, rng):
    """Makes engines for the same requests, with given blocks, with or without a cache.

    Some prompts share a beginning of up to two blocks; all grow by a block while decoding.
    """
    example, shared = load_example("embed_in_your_engine"), rng.integers(0, 256, 128).tolist()
    prompts = [shared + rng.integers(0, 256, n).tolist() for n in (250, 120, 180, 62, 190)]

    def make(*, num_kv_blocks, cached=True, forward=model.forward, **settings):
        config = CacheConfig(
            block_size_tokens=64,
            max_requests=4,
            max_tokens=256,
            max_sequence_length=1024,
            ssm_chunk_size=64,
            num_kv_blocks=num_kv_blocks,
            max_slots=4,
            enable_prefix_caching=cached,
        )
        context = DynamicInferenceContext(
            config, model.config.state_spec(model.dtype), model.config.kv_spec(model.dtype)
        )
        made = example.TinyEngine(context, forward, example.most_likely, **settings)
        for name, prompt in enumerate(prompts):
            made.queue.append(Request(request_id=name, prompt_tokens=prompt))
        return made

    return make


@pytest.mark.parametrize("num_kv_blocks", [8, 32])
def test_answers_do_not_depend_on_memory(make_engine, num_kv_blocks):
    engines = [
        make_engine(num_kv_blocks=num_kv_blocks, chunk_tokens=96, max_new_tokens=80),
        make_engine(num_kv_blocks=64, cached=False, max_new_tokens=80),
    ]
    for one in engines:
        one.run()
        one.context.check_invariants()
    assert engines[0].answers == engines[1].answers
    assert engines[0].answers.keys() == set(range(5))
    assert bool(engines[0].context.stats().preemptions) == (num_kv_blocks == 8)


def test_goes_on_after_a_model_that_failed(make_engine, model):
    calls = []

    def forward(metadata, context):
        calls.append(metadata.num_tokens)
        logits = model.forward(metadata, context)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")
        return logits

    failing = make_engine(num_kv_blocks=32, forward=forward)
    uncached = make_engine(num_kv_blocks=64, cached=False)
    with pytest.raises(RuntimeError, match="the device is gone"):
        failing.run()
    failing.run()
    uncached.run()
    assert failing.context.stats().aborted_steps == 1
    assert failing.answers == uncached.answers
