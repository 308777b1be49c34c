"""Hints of what will follow, which ``PrefixCache`` hands on to the log and to the slots' policy."""

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

from batch_rig import batch, subject, tokens
from transformers_rig import BLOCK

from mamba_cache.bench.traces import read_trace
from mamba_cache.errors import InvalidArgumentError

SHORT = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def nemotron():
    return subject("nemotron_h")


def test_hints_are_logged_with_their_prompts(nemotron, generator, tmp_path):
    path = tmp_path / "requests.jsonl"
    prompts = [tokens(generator, BLOCK + 1) for _ in range(3)]
    with nemotron.cache(trace_path=path) as cache:
        cache.generate([prompts[0]], will_continue=True, source="a", **SHORT)
        cache.generate([prompts[1]], **SHORT)
        cache.generate(prompts, will_continue=False, **SHORT)
        batch(cache, prompts, will_continue=[True, None, False], source="a")
        batch(cache, prompts[:1], will_continue=False)
    told = [request.will_continue for request in read_trace(path)]
    assert told == [True, None, False, False, False, True, None, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"will_continue": "yes"}, "will_continue must be True, False or None, got 'yes'"),
        ({"source": []}, r"source must be hashable, got \[\]"),
    ],
)
def test_malformed_hints_are_refused(nemotron, options, message):
    cache = nemotron.cache()
    for call in (cache.generate, cache.generate_batch):
        with pytest.raises(InvalidArgumentError, match=message):
            call([[5, 6]], max_new_tokens=2, **options)
        cache.check_invariants()


def test_a_batch_wants_a_hint_for_each_prompt(nemotron):
    with pytest.raises(InvalidArgumentError, match="will_continue must be one for all, or a list"):
        nemotron.cache().generate_batch([[5, 6]], will_continue=[True, False])
