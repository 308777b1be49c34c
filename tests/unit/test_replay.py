"""Hits of a replayed trace, compared with a plain-Python model."""

import json

import pytest
import tiers_replay
from drawn_traces import draw_agents, draw_conversations, draw_mixed

from mamba_cache.cli.replay import run_replay
from mamba_cache.cli.traces import TOKENS_PER_HASH_ID, read_trace
from mamba_cache.errors import InvalidArgumentError

UNLIMITED = {"slots": [None], "policies": ["lru"]}


def expected_hits(requests):
    """Return matched KV and state tokens, with states at Megatron's three places."""
    seen, states, matched, skipped = set(), set(), 0, 0
    for request in requests:
        whole = request.hash_ids[: request.input_length // TOKENS_PER_HASH_ID]
        found = [n for n, hash_id in enumerate(whole, 1) if hash_id in seen]
        usable = [n for n in found if whole[n - 1] in states and n * 512 < request.input_length]
        matched += max(found, default=0) * 512
        skipped += max(usable, default=0) * 512
        seen.update(whole)
        ends = max(found, default=0), len(whole), -(-request.input_length // 512) - 1
        states.update(whole[end - 1] for end in ends if end)
    return matched, skipped


def test_unlimited_hits_are_those_of_the_trace():
    requests = draw_conversations(200)
    [record] = run_replay(requests, **UNLIMITED)["records"]
    matched, skipped = expected_hits(requests)
    total = sum(request.input_length for request in requests)
    assert 0 < skipped < matched
    assert (record["prompt_tokens"], record["skipped_tokens"]) == (total, skipped)
    assert record["kv_hit_rate"] == round(matched / total, 4)
    assert record["token_hit_rate"] == round(skipped / total, 4)
    assert (record["evicted_slots"], record["skipped_checkpoints"]) == (0, 0)
    assert record["kept_states"] == record["saved_states"] > 0


def test_states_in_host_memory_are_hit_as_if_there_were_slots_for_all():
    requests = draw_conversations(200)
    total = sum(request.input_length for request in requests)
    share = tiers_replay.replay(requests, 5, 10_000, "lru")
    assert share * total == pytest.approx(expected_hits(requests)[1])
    assert share > 2 * tiers_replay.replay(requests, 5, 1, "lru")


def test_every_combination_is_a_record():
    policies = ["lru", "adaptive"]
    result = run_replay(draw_conversations(60), slots=[8, None], policies=policies)
    combinations = [(r["policy"], r["slots"]) for r in result["records"]]
    assert combinations == [(policy, slots) for policy in policies for slots in (8, None)]
    assert (result["passed"], result["workload"]["requests"]) == (True, 60)
    for record in result["records"]:
        assert record["requests"] == 60
        assert record["kept_states"] <= (record["slots"] or 10**9)


@pytest.mark.parametrize(
    ("draw", "slots"), [(draw_agents, 25), (draw_mixed, 25), (draw_mixed, 100)]
)
def test_the_default_is_never_half_a_point_below_a_simple_policy(draw, slots):
    records = run_replay(draw(200, seed=1), slots=[slots])["records"]
    rates = {record["policy"]: record["token_hit_rate"] for record in records}
    assert rates["adaptive"] >= max(rates.values()) - 0.005, rates
    if draw is draw_agents:  # tokens saved per state differ much here
        assert rates["adaptive"] > 1.02 * rates["lru"], rates


def test_few_blocks_are_evicted_and_too_few_fail():
    requests = draw_conversations(40)
    enough = run_replay(requests, kv_blocks=300, **UNLIMITED)
    assert enough["passed"]
    assert enough["records"][0]["evicted_blocks"] > 0
    too_few = run_replay(requests, kv_blocks=10, **UNLIMITED)
    assert not too_few["passed"]
    assert 0 < too_few["records"][0]["failed_requests"] < 40


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"policies": ["fifo"]}, r"policies must be of \['adaptive', .*\], got \['fifo'\]"),
        ({"slots": [-1]}, "max_slots must be an int in"),
    ],
)
def test_settings_are_checked(settings, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        run_replay(draw_conversations(5), **settings)


def test_hints_and_tenants_of_a_trace_count(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"input_length": 33, "hash_ids": [1, 2], "tenant": each, "will_continue": True}
        for each in ("a", "b", "a")
    ]
    lines.insert(0, {"mamba_cache_trace": 2, "block_size_tokens": 16})
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    result = run_replay(read_trace(path), **UNLIMITED)
    assert result["settings"]["block_size_tokens"] == 16
    assert result["records"][0]["skipped_tokens"] == 32
