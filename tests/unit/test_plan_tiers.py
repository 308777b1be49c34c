"""Tiers and traces in plans: rows, the length from which a load pays, the split that hits most."""

import dataclasses
import json

import pytest
import torch

from mamba_cache.bench.workload import draw_agents
from mamba_cache.cli import plan_tiers as module
from mamba_cache.cli.plan_tiers import break_even_tokens, plan_tiers, split_by_trace
from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext
from mamba_cache.errors import BudgetError, InvalidArgumentError
from mamba_cache.integrations.model_shapes import load_shape
from mamba_cache.states import KVCacheSpec, StateSpec
from mamba_cache.tiers import LoadPlanner, Rates, Resumption

GIB = 2**30
SHAPE = load_shape("nemotron-h-8b")
STATE, TOKEN = SHAPE.state_spec.bytes_per_slot, SHAPE.kv_spec.bytes_per_block(1)
RATES = {"prefill_rate": 12_000.0, "host_rate": 20.0, "disk_rate": 2.0}


def plan(**changes):
    settings = {"host_gb": 64.0, "disk_gb": None, "slot_bytes": STATE} | RATES | changes
    return plan_tiers(SHAPE, 256, **settings)


@pytest.mark.parametrize(
    ("gb_per_second", "seconds", "tokens_per_second", "expected"),
    [(52, 0.3e-3, 12_000, 27), (52, 0.3e-3, 50_000, 115), (25, 0.3e-3, 12_000, 53),
     (6.5, 0.5e-3, 12_000, 202), (2.5, 2e-3, 12_000, 561), (0.8, 0.0, 50_000, None)],
)  # fmt: skip
def test_the_length_from_which_a_load_pays(gb_per_second, seconds, tokens_per_second, expected):
    """Figures that were worked out elsewhere, by the same formula, for Nemotron-H-8B."""
    rates = Rates(gb_per_second * 1e9, seconds, tokens_per_second)
    found = break_even_tokens(rates, state_bytes=STATE, token_bytes=TOKEN)
    assert found is expected if expected is None else abs(found - expected) <= 4


def test_the_planner_of_a_context_agrees_with_that_length():
    rates = Rates(2e9, 1e-3, 12_000.0)
    planner = LoadPlanner(rates, learns=False)
    tokens = break_even_tokens(rates, state_bytes=STATE, token_bytes=TOKEN)
    for length, is_loaded in ((tokens - 2, False), (tokens + 1, True)):
        load = Resumption(length, STATE + length * TOKEN)
        assert (planner.choose([Resumption(0, 0), load], length + 1) == load) is is_loaded


def test_the_rows_planned_are_the_rows_of_a_tier():
    [host] = plan(host_gb=4.0)
    config = CacheConfig(
        block_size_tokens=256, num_kv_blocks=1, max_slots=1, max_requests=1, **host.settings
    )
    context = DynamicInferenceContext(config, SHAPE.state_spec, SHAPE.kv_spec)
    assert context.tier_stats()[0].rows == {"kv": host.num_blocks, "state": host.num_states}
    assert host.num_states > 20


def test_a_disk_lies_below_a_host_tier():
    host, disk = plan(disk_gb=500.0)
    assert (host.name, disk.name) == ("host", "disk")
    assert disk.num_states > 7 * host.num_states
    assert host.break_even_tokens < disk.break_even_tokens
    assert host.load_seconds < disk.load_seconds < disk.compute_seconds
    assert disk.settings == {"disk_cache_path": "PATH", "disk_cache_gb": 500.0}
    assert plan(host_gb=None) == []
    assert plan(disk_gb=500.0, disk_rate=0.1)[1].break_even_tokens is None


@pytest.mark.parametrize(
    ("changes", "error", "complaint"),
    [
        ({"host_gb": 0.05}, BudgetError, "--host-gb 0.05 is too small: it holds 0 states"),
        ({"disk_gb": 0.05}, BudgetError, "--disk-gb 0.05 is too small"),
        ({"host_gb": None, "disk_gb": 9.0}, InvalidArgumentError, "--disk-gb needs --host-gb"),
        ({"prefill_rate": 0.0}, InvalidArgumentError, "prefill_rate must be above 0"),
        ({"host_rate": float("nan")}, InvalidArgumentError, "host_rate must be"),
    ],
)
def test_what_cannot_be_is_refused(changes, error, complaint):
    with pytest.raises(error, match=complaint):
        plan(**changes)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"input_length": each.input_length, "hash_ids": each.hash_ids}
        for each in draw_agents(80, num_sessions=4)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


def test_the_split_of_a_budget_is_the_one_that_hits_most(trace, monkeypatch):
    monkeypatch.setattr(module, "_SHARES", (0.01, 0.1, 0.9))
    found = split_by_trace(SHAPE, 10 * GIB, trace, limit=60, slot_bytes=STATE)
    assert (found.cache_gb, found.requests) == (10.0, 60)
    assert found.hit_rates.keys() == {0.01, 0.1}, "with 0.9 the longest prompt finds no room"
    assert found.best_share == 0.1
    assert found.hit_rates[0.01] < found.hit_rates[0.1] <= found.unlimited_hit_rate


def test_a_model_without_attention_needs_no_split(trace):
    shape = dataclasses.replace(SHAPE, kv_spec=KVCacheSpec(0, 1, 1, SHAPE.kv_spec.dtype))
    found = split_by_trace(shape, GIB, trace, limit=20, slot_bytes=STATE)
    assert found.hit_rates.keys() == {1.0}
    [host] = plan_tiers(shape, 256, host_gb=1.0, disk_gb=None, slot_bytes=STATE, **RATES)
    assert (host.num_states, host.num_blocks) == (10, 0)


def test_a_budget_that_holds_no_prompt_is_refused(trace):
    with pytest.raises(BudgetError, match=r"no split of 1\.00 GiB holds"):
        split_by_trace(SHAPE, GIB, trace, limit=20, slot_bytes=STATE)


def test_one_budget_is_divided_when_a_context_is_made():
    spec, kv = (
        StateSpec.mamba(2, (6, 4), (2, 3, 5), torch.float32, torch.float32),
        KVCacheSpec(1, 1, 4, SHAPE.kv_spec.dtype),
    )
    room = 100_000
    settings = {"block_size_tokens": 16, "ssm_chunk_size": 16, "max_requests": 1}
    config = CacheConfig(cache_gb=room / GIB, state_share=0.4, **settings)
    context = DynamicInferenceContext(config, spec, kv)
    slots = context.slot_allocator.max_slots * spec.bytes_per_slot
    blocks = context.kv_block_allocator.pool_size * kv.bytes_per_block(16)
    assert 0.4 * room - spec.bytes_per_slot < slots <= 0.4 * room
    assert 0.6 * room - kv.bytes_per_block(16) < blocks <= 0.6 * room
    changed = dataclasses.replace(config, max_slots=3)
    assert DynamicInferenceContext(changed, spec, kv).slot_allocator.max_slots == 3
    off = dataclasses.replace(config, enable_prefix_caching=False)
    blocks = DynamicInferenceContext(off, spec, kv).kv_block_allocator.pool_size
    assert room - kv.bytes_per_block(16) < blocks * kv.bytes_per_block(16) <= room


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"cache_gb": 1, "kv_cache_gb": 1}, "give cache_gb or kv_cache_gb, not both"),
        ({"cache_gb": 1, "mamba_cache_gb": 1}, "give cache_gb or mamba_cache_gb, not both"),
        ({"cache_gb": -1}, "cache_gb must be"),
        ({"cache_gb": 1, "state_share": 1.5}, "state_share must be"),
        ({}, "give kv_cache_gb .* or cache_gb for both budgets"),
    ],
)
def test_one_budget_is_checked(settings, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        CacheConfig(**settings)
