"""Metrics of a cache for Prometheus."""

import dataclasses
import importlib
import random
import re
import sys

import pytest
from clocks import Clock
from context_rig import generate, make_context
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tier_rig import make_tiered

from mamba_cache.context import CacheStats, MissReason, VerificationStats
from mamba_cache.errors import InvalidArgumentError, MissingExtraError, StepOrderError
from mamba_cache.integrations import prometheus
from mamba_cache.integrations.prometheus import (
    TIMED_CALLS,
    CacheCollector,
    CallDurations,
)
from mamba_cache.tiers import TierStats


class Source:
    """Statistics of distinct values, each at least 1."""

    def __init__(self, seed):
        by_reason = ("misses", "bypasses")
        fields = [f.name for f in dataclasses.fields(CacheStats) if f.name not in by_reason]
        values = random.Random(seed).sample(range(1, 10**6), len(fields) + len(MissReason) + 1)
        self.bypasses = {"forward hook": values.pop()}
        self.values = dict(zip(fields, values, strict=False))
        self.misses = dict(
            zip([r.value for r in MissReason], values[-len(MissReason) :], strict=True)
        )

    def stats(self):
        return CacheStats(misses=self.misses, bypasses=self.bypasses, **self.values)


def scrape(registry):
    """Return {sample name: {frozen labels: value}} as Prometheus reads them."""
    samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return samples


def registry_of(**caches):
    registry = CollectorRegistry(auto_describe=True)
    registry.register(CacheCollector(caches))
    return registry


def labels(**named):
    return frozenset(named.items())


def test_every_figure_is_exported_under_its_name(seed):
    source, other = Source(seed), Source(seed + 1)
    samples = scrape(registry_of(main=source, other=other))
    assert samples["mamba_cache_hits_total"] == {
        labels(cache="main"): source.values["hits"], labels(cache="other"): other.values["hits"]
    }  # fmt: skip
    samples = scrape(registry_of(main=source))
    for unit, kinds in (("slots", ("free", "reserved", "cached")), ("blocks", ("free", "used"))):
        for kind in kinds:
            value = samples[f"mamba_cache_{unit}"][labels(cache="main", kind=kind)]
            assert value == source.values[f"{kind}_{unit}"]
    for name, counts in (("misses", source.misses), ("bypasses", source.bypasses)):
        assert samples[f"mamba_cache_{name}_total"] == {
            labels(cache="main", reason=reason): count for reason, count in counts.items()
        }
    restored = samples["mamba_cache_restored_bytes_total"][labels(cache="main")]
    assert restored == source.values["hits"] * source.values["bytes_per_slot"]
    exported = {value for series in samples.values() for value in series.values()}
    bytes_per_slot = source.values.pop("bytes_per_slot")
    assert exported == {
        *source.values.values(),
        *source.misses.values(),
        *source.bypasses.values(),
        source.values["hits"] * bytes_per_slot,
        source.values["saved_states"] * bytes_per_slot,
    }


def test_names_follow_the_conventions(seed):
    registry = registry_of(main=Source(seed))
    CallDurations(registry)
    for family in registry.collect():
        assert re.fullmatch(r"mamba_cache_[a-z_]+", family.name)
        assert family.documentation
        wanted = "histogram" if family.name.endswith("_seconds") else ("gauge", "counter")
        assert family.type in wanted
        if family.type == "counter":
            assert {sample.name for sample in family.samples} == {f"{family.name}_total"}


def tier_samples(cache):
    """Return {(metric, label values): value} of the tiers of the cache named ``a``."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in CacheCollector({"a": cache}).collect()
        for sample in metric.samples
        if "_tier_" in sample.name
    }


class Tiered(Source):
    """Statistics of a cache that has two tiers."""

    def tier_stats(self):
        host = TierStats(
            name="host", entries={"kv": 2, "state": 0}, rows={"kv": 60, "state": 30},
            row_bytes={"kv": 7, "state": 9}, stored=3, restored=4, evicted=5,
            dropped={"queue_full": 6}, refused={"missing": 8},
        )  # fmt: skip
        store = TierStats(
            name="store", stored=10, restored=0, refused={}, dropped={"unconfirmed": 11}
        )
        return host, store


def test_tiers_have_metrics_of_their_own(seed):
    assert tier_samples(Tiered(seed)) == {
        ("mamba_cache_tier_bytes", "a", "host", "kv"): 2 * 7,
        ("mamba_cache_tier_bytes", "a", "host", "state"): 0,
        ("mamba_cache_tier_entries", "a", "host", "kv"): 2,
        ("mamba_cache_tier_entries", "a", "host", "state"): 0,
        ("mamba_cache_tier_rows", "a", "host", "kv"): 60,
        ("mamba_cache_tier_rows", "a", "host", "state"): 30,
        ("mamba_cache_tier_stored_total", "a", "host"): 3,
        ("mamba_cache_tier_restored_total", "a", "host"): 4,
        ("mamba_cache_tier_evicted_total", "a", "host"): 5,
        ("mamba_cache_tier_dropped_total", "a", "host", "queue_full"): 6,
        ("mamba_cache_tier_refused_total", "a", "host", "missing"): 8,
        ("mamba_cache_tier_stored_total", "a", "store"): 10,
        ("mamba_cache_tier_restored_total", "a", "store"): 0,
        ("mamba_cache_tier_evicted_total", "a", "store"): 0,
        ("mamba_cache_tier_dropped_total", "a", "store", "unconfirmed"): 11,
    }
    assert ("mamba_cache_tier_rows", "a", "host", "kv") in tier_samples(make_tiered())


def test_each_scrape_reads_the_context_anew(seed):
    context = make_context()
    registry = registry_of(main=context)
    rng = random.Random(seed)
    prompt = [rng.randrange(13) for _ in range(40)]
    before = scrape(registry)
    generate(context, prompt, 2)
    generate(context, prompt, 2)
    after = scrape(registry)
    only = labels(cache="main")
    for name, rise in (("requests", 2), ("hits", 1), ("skipped_tokens", 32)):
        series = f"mamba_cache_{name}_total"
        assert after[series][only] - before[series][only] == rise
    no_match = labels(cache="main", reason="no_kv_match")
    assert before["mamba_cache_misses_total"][no_match] == 0
    assert after["mamba_cache_misses_total"][no_match] == 1
    restored = after["mamba_cache_restored_bytes_total"][only]
    assert restored == context.live_states.spec.bytes_per_slot
    held = sum(after["mamba_cache_slots"].values())
    assert held == context.slot_allocator.max_slots


@pytest.mark.parametrize("caches", [{}, 5, ["main"]])
def test_a_collector_needs_a_cache(caches):
    with pytest.raises(InvalidArgumentError, match="must map names to at least one cache, got"):
        CacheCollector(caches)


def test_calls_are_measured_where_that_is_asked_for(seed, monkeypatch):
    monkeypatch.setattr(prometheus, "time", Clock(0.25))
    watched, other = make_context(), make_context()
    registry = CollectorRegistry()
    CallDurations(registry).watch("main", watched)
    prompt = [random.Random(seed).randrange(13) for _ in range(20)]
    tokens, _, _ = generate(watched, prompt, 3)
    generate(other, prompt, 3)
    with pytest.raises(StepOrderError):  # measured, too
        watched.begin_step()
    samples = scrape(registry)
    counts = {
        call: samples["mamba_cache_call_duration_seconds_count"][labels(cache="main", call=call)]
        for call in TIMED_CALLS
    }
    assert counts == {"add_request": 1, "begin_step": len(tokens) + 1, "commit_step": len(tokens)}
    seconds = samples["mamba_cache_call_duration_seconds_sum"]
    assert sum(seconds.values()) == 0.25 * sum(counts.values())


def test_a_watch_that_cannot_be_is_refused():
    context = make_context()
    durations = CallDurations(CollectorRegistry())
    durations.watch("main", context)
    with pytest.raises(InvalidArgumentError, match="already"):
        durations.watch("again", context)
    with pytest.raises(InvalidArgumentError, match=r"lacks \['add_request'"):
        durations.watch("main", object())


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "mamba_cache.integrations.prometheus")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[metrics\]'"):
        importlib.import_module("mamba_cache.integrations.prometheus")


class Verified(Source):
    """Statistics of a cache whose hits are verified."""

    def verification_stats(self):
        return VerificationStats(7, 5, 2, {"state": 1, "kv": 0}, 3)


def test_verified_hits_have_metrics_where_they_are_asked_for(seed):
    samples = {
        (name, *sorted(value for _, value in series)): value
        for name, all_series in scrape(registry_of(main=Verified(seed))).items()
        if "verif" in name
        for series, value in all_series.items()
    }
    assert samples == {
        ("mamba_cache_verification_sampled_hits_total", "main"): 7,
        ("mamba_cache_verified_hits_total", "main"): 5,
        ("mamba_cache_verification_differences_total", "main", "state"): 1,
        ("mamba_cache_verification_differences_total", "kv", "main"): 0,
        ("mamba_cache_verification_skipped_hits_total", "main"): 2,
        ("mamba_cache_verification_waiting_hits", "main"): 3,
    }
    off = scrape(registry_of(main=make_context(), other=Source(seed)))
    assert not [name for name in off if "verif" in name]
