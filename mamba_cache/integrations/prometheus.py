"""Prometheus metrics of what caches did and hold; needs the extra ``metrics``.

The figures are read when Prometheus asks for them: a context does nothing for it. Call durations
are measured only where ``CallDurations`` is told to.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from mamba_cache._extras import install_hint
from mamba_cache.context import CacheStats, MissReason, VerificationStats
from mamba_cache.errors import InvalidArgumentError, MissingExtraError
from mamba_cache.tiers import TierStats

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtraError(f"metrics need prometheus_client: {install_hint('metrics')}") from error

__all__ = [
    "DURATION_BUCKETS",
    "TIMED_CALLS",
    "CacheCollector",
    "CallDurations",
    "StatsSource",
]

_COUNTERS = {
    "requests": "Requests that began to run; a resumed one counts again",
    "hits": "Requests that skipped tokens",
    "kv_matched_blocks": "Blocks found cached",
    "state_matched_blocks": "Blocks skipped because a state was restored",
    "skipped_tokens": "Prompt tokens not computed again",
    "computed_tokens": "Tokens computed, prefill and decode",
    "saved_states": "States that became findable",
    "refused_states": "States not computed because the policy held others worth more",
    "skipped_checkpoints": "States not saved because no slot or no room in the step was left",
    "unwritten_states": "States not published because a layer of the model did not hand them over",
    "evicted_blocks": "Cached KV blocks given up for others",
    "evicted_slots": "Saved states given up for others",
    "hash_collisions": "Blocks kept private because their hash id belonged to other content",
    "aborted_steps": "Steps taken back",
    "self_resets": "Times that a prefix cache reset itself after an exception in its bookkeeping",
    "preemptions": "Requests preempted by the engine",
    "forks": "Requests that went on from where another stood",
}
"""Fields of ``CacheStats`` that are metrics as they are, and what they say."""

_KINDS = {
    "blocks": ("KV blocks, by what they hold", ("free", "cached", "used")),
    "slots": ("Slots, by what they hold", ("free", "reserved", "cached")),
}
"""Fields of ``CacheStats`` such as "free_blocks": one metric each, with a label ``kind``."""

_OF_TIERS = {
    "stored": "Entries that arrived in a tier",
    "restored": "Entries that a hit brought back, verified",
    "evicted": "Entries of a tier given up for others",
}
_OF_TIERS_BY_REASON = {
    "dropped": "Entries that were not stored in a tier, by reason",
    "refused": "Entries that were looked for in a tier and not restored, by reason",
}
_OF_TIERS_BY_KIND = {
    "entries": "Entries that can be found in a tier, by kind",
    "rows": "Entries that a tier can hold, by kind",
}
_VERIFIED = {
    "verified_hits": ("Hits that were computed again and compared", "verified"),
    "verification_sampled_hits": ("Hits that were chosen for it", "sampled"),
    "verification_skipped_hits": ("Chosen hits that were not computed again", "skipped"),
}
"""Names of metrics, what they say, and the field of ``VerificationStats`` that each is."""

_TIER_LABELS = {label: ["cache", "tier", label] for label in ("kind", "reason")}
"""Fields of ``TierStats``: one metric each."""

DURATION_BUCKETS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3),
    *(5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0),
)  # fmt: skip
"""Upper bounds in seconds: a call takes tens of microseconds when all is well."""

TIMED_CALLS = ("add_request", "begin_step", "commit_step")
"""The calls of a step that ``CallDurations`` measures."""


class StatsSource(Protocol):
    """Whatever keeps ``CacheStats``: a context, or a ``PrefixCache`` of transformers."""

    def stats(self) -> CacheStats:
        """Return what the cache did so far and what it holds now, to any thread."""
        ...


class CacheCollector(Collector):
    """Gives a registry the ``stats()`` of caches, read at each scrape.

    Example::

        REGISTRY.register(CacheCollector({"main": context}))
        start_http_server(9000)

    Args:
        caches: The caches by name; the name becomes the label ``cache``.

    Raises:
        InvalidArgumentError: There is no cache.
        MissingExtraError: On import, if prometheus_client is not installed.
    """

    def __init__(self, caches: Mapping[str, StatsSource]) -> None:
        if not caches:
            raise InvalidArgumentError("caches must name at least one cache, got none")
        self._caches = dict(caches)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, with one sample or more for each cache."""
        stats = {name: cache.stats() for name, cache in self._caches.items()}
        for field, text in _COUNTERS.items():
            yield _counter(field, text, {name: getattr(one, field) for name, one in stats.items()})
        restored = {name: one.hits * one.bytes_per_slot for name, one in stats.items()}
        yield _counter("restored_bytes", "Bytes of states restored from slots", restored)
        saved = {name: one.saved_states * one.bytes_per_slot for name, one in stats.items()}
        yield _counter("saved_bytes", "Bytes of states saved to slots and findable", saved)
        yield _misses(stats)
        yield _bypasses(stats)
        for unit, (text, kinds) in _KINDS.items():
            gauge = GaugeMetricFamily(f"mamba_cache_{unit}", text, labels=["cache", "kind"])
            for name, one in stats.items():
                for kind in kinds:
                    gauge.add_metric([name, kind], getattr(one, f"{kind}_{unit}"))
            yield gauge
        verified = {
            name: cache.verification_stats()
            for name, cache in self._caches.items()
            if hasattr(cache, "verification_stats")
        }
        yield from _of_verification({n: one for n, one in verified.items() if one.differences})
        yield from _of_tiers(
            [
                (name, tier)
                for name, cache in self._caches.items()
                for tier in getattr(cache, "tier_stats", tuple)()
            ]
        )


class CallDurations:
    """Measures how long the calls of a step take on the host, in one histogram.

    Without it nothing is measured. With it each call takes about two microseconds more.

    Example::

        CallDurations().watch("main", context)

    Args:
        registry: Where the histogram is registered. Default: prometheus_client's own.
        buckets: Upper bounds in seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        buckets: Sequence[float] = DURATION_BUCKETS,
    ) -> None:
        self._histogram = Histogram(
            "mamba_cache_call_duration_seconds",
            "Time that calls of a step take on the host",
            ["cache", "call"],
            buckets=buckets,
            registry=registry,
        )

    def watch(self, name: str, context: object) -> None:
        """Put in the place of the context's ``TIMED_CALLS`` ones that are measured.

        Args:
            name: The label ``cache``, as for ``CacheCollector``.
            context: A ``DynamicInferenceContext``, or what has its calls.

        Raises:
            InvalidArgumentError: The object lacks one of the calls, or is watched already.
        """
        lacking = [call for call in TIMED_CALLS if not hasattr(context, call)]
        if lacking:
            raise InvalidArgumentError(
                f"context must have the calls {list(TIMED_CALLS)}, but "
                f"{type(context).__name__} lacks {lacking}"
            )
        if any(call in vars(context) for call in TIMED_CALLS):
            raise InvalidArgumentError(f"the context is watched already, asked as {name!r}")
        for call in TIMED_CALLS:
            observe = self._histogram.labels(cache=name, call=call).observe
            setattr(context, call, _timed(getattr(context, call), observe))


def _counter(field: str, text: str, values: Mapping[str, float]) -> CounterMetricFamily:
    counter = CounterMetricFamily(f"mamba_cache_{field}", text, labels=["cache"])
    for name, value in values.items():
        counter.add_metric([name], value)
    return counter


def _of_tiers(tiers: Sequence[tuple[str, TierStats]]) -> Iterator[Metric]:
    """Yield the metrics of caches' tiers; none if no cache has any."""
    if not tiers:
        return
    for field, text in _OF_TIERS_BY_KIND.items():
        gauge = GaugeMetricFamily(f"mamba_cache_tier_{field}", text, labels=_TIER_LABELS["kind"])
        for name, tier in tiers:
            for kind, value in getattr(tier, field).items():
                gauge.add_metric([name, tier.name, kind], value)
        yield gauge
    held = GaugeMetricFamily(
        "mamba_cache_tier_bytes", "Bytes of these entries, by kind", labels=_TIER_LABELS["kind"]
    )
    for name, tier in tiers:
        for kind, value in tier.entries.items():
            held.add_metric([name, tier.name, kind], value * tier.row_bytes[kind])
    yield held
    for field, text in _OF_TIERS.items():
        counter = CounterMetricFamily(f"mamba_cache_tier_{field}", text, labels=["cache", "tier"])
        for name, tier in tiers:
            counter.add_metric([name, tier.name], getattr(tier, field))
        yield counter
    for field, text in _OF_TIERS_BY_REASON.items():
        counter = CounterMetricFamily(
            f"mamba_cache_tier_{field}", text, labels=_TIER_LABELS["reason"]
        )
        for name, tier in tiers:
            for reason, value in getattr(tier, field).items():
                counter.add_metric([name, tier.name, reason], value)
        yield counter


def _of_verification(stats: Mapping[str, VerificationStats]) -> Iterator[Metric]:
    """Yield what came of hits that were verified; nothing where none ever was to be."""
    if not stats:
        return
    for name, (text, field) in _VERIFIED.items():
        yield _counter(name, text, {cache: getattr(one, field) for cache, one in stats.items()})
    text = "Entries that were not what the model computes, by kind; each was removed"
    counter = CounterMetricFamily(
        "mamba_cache_verification_differences", text, labels=["cache", "kind"]
    )
    for cache, one in stats.items():
        for kind, count in one.differences.items():
            counter.add_metric([cache, kind], count)
    yield counter
    gauge = GaugeMetricFamily(
        "mamba_cache_verification_waiting_hits", "Hits that wait for it", labels=["cache"]
    )
    for cache, one in stats.items():
        gauge.add_metric([cache], one.waiting)
    yield gauge


def _misses(stats: Mapping[str, CacheStats]) -> CounterMetricFamily:
    """Every reason has its series from the start, so that its first rise is seen as one."""
    text = "Requests that skipped no tokens, by reason"
    counter = CounterMetricFamily("mamba_cache_misses", text, labels=["cache", "reason"])
    for name, one in stats.items():
        for reason in MissReason:
            counter.add_metric([name, reason.value], one.misses.get(reason.value, 0))
    return counter


def _bypasses(stats: Mapping[str, CacheStats]) -> CounterMetricFamily:
    text = "Calls of a PrefixCache that neither used the cache nor filled it, by reason"
    counter = CounterMetricFamily("mamba_cache_bypasses", text, labels=["cache", "reason"])
    for name, one in stats.items():
        for reason, count in one.bypasses.items():
            counter.add_metric([name, reason], count)
    return counter


def _timed(call: Callable[..., Any], observe: Callable[[float], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            observe(time.perf_counter() - start)

    return timed
