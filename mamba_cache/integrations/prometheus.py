"""Prometheus metrics of caches; needs the extra ``metrics``.

Statistics are read at each scrape, so they cost a context nothing. Call durations are measured only
for contexts that ``CallDurations`` watches.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mamba_cache._extras import install_hint
from mamba_cache.context import MissReason
from mamba_cache.errors import InvalidArgumentError, MissingExtraError

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtraError(f"metrics need prometheus_client: {install_hint('metrics')}") from error

__all__ = [
    "TIMED_CALLS",
    "CacheCollector",
    "CallDurations",
]

_Row = tuple[str, str, str, str | Callable[[Any], Any]]
"""A metric: its name, help text, label ("" for none), and value: a field of the statistics, or a
function that returns figures by label value."""

_GAUGES = frozenset(
    ("blocks", "slots", "tier_entries", "tier_rows", "tier_bytes", "verification_waiting_hits")
)
"""Metrics that can fall; all others are counters."""

_COUNTERS = {
    "requests": "Requests that began to run; a resumed one counts again",
    "hits": "Requests that skipped tokens",
    "kv_matched_blocks": "Blocks found cached",
    "state_matched_blocks": "Blocks skipped because a state was restored",
    "skipped_tokens": "Prompt tokens not computed again",
    "computed_tokens": "Tokens computed, prefill and decode",
    "saved_states": "States that became findable",
    "refused_states": "States not computed because the policy kept more valuable ones",
    "skipped_checkpoints": "States not saved because no slot or no room in the step was left",
    "unwritten_states": "States not published because a layer did not hand its state over",
    "evicted_blocks": "Cached KV blocks evicted for others",
    "evicted_slots": "Saved states evicted for others",
    "aborted_steps": "Aborted steps",
    "self_resets": "Times that a prefix cache reset itself after an exception in its bookkeeping",
    "preemptions": "Requests preempted by the engine",
    "forks": "Requests that continue another request",
}
"""Fields of ``CacheStats`` that are metrics without conversion, with their help texts."""


def _of_kinds(unit: str, *kinds: str) -> Callable[[Any], dict[str, float]]:
    return lambda stats: {kind: getattr(stats, f"{kind}_{unit}") for kind in kinds}


_OF_CACHES: Sequence[_Row] = [
    *((field, text, "", field) for field, text in _COUNTERS.items()),
    ("restored_bytes", "Bytes of states restored from slots", "",
     lambda stats: stats.hits * stats.bytes_per_slot),
    ("saved_bytes", "Bytes of states saved to slots and findable", "",
     lambda stats: stats.saved_states * stats.bytes_per_slot),
    # Every reason has a series from the start, so that its first increase is visible.
    ("misses", "Requests that skipped no tokens, by reason", "reason",
     lambda stats: {each.value: stats.misses.get(each.value, 0) for each in MissReason}),
    ("bypasses", "Calls of a PrefixCache that neither used the cache nor filled it, by reason",
     "reason", "bypasses"),
    ("blocks", "KV blocks, by status", "kind",
     _of_kinds("blocks", "free", "cached", "used")),
    ("slots", "Slots, by status", "kind",
     _of_kinds("slots", "free", "reserved", "cached")),
]  # fmt: skip

_OF_VERIFICATION: Sequence[_Row] = [
    ("verified_hits", "Hits that were computed again and compared", "", "verified"),
    ("verification_sampled_hits", "Hits chosen for verification", "", "sampled"),
    ("verification_skipped_hits", "Chosen hits that were not computed again", "", "skipped"),
    ("verification_differences",
     "Entries that were not what the model computes, by kind; each was removed", "kind",
     "differences"),
    ("verification_waiting_hits", "Hits that wait for verification", "", "waiting"),
]  # fmt: skip

_OF_TIERS: Sequence[_Row] = [
    ("tier_entries", "Entries that can be found in a tier, by kind", "kind", "entries"),
    ("tier_rows", "Entries that a tier can hold, by kind", "kind", "rows"),
    ("tier_bytes", "Bytes of these entries, by kind", "kind",
     lambda tier: {kind: n * tier.row_bytes[kind] for kind, n in tier.entries.items()}),
    ("tier_stored", "Entries stored in a tier", "", "stored"),
    ("tier_restored", "Verified entries that a hit loaded", "", "restored"),
    ("tier_evicted", "Entries of a tier evicted for others", "", "evicted"),
    ("tier_dropped", "Entries that were not stored in a tier, by reason", "reason", "dropped"),
    ("tier_refused", "Entries that were looked up in a tier and not restored, by reason",
     "reason", "refused"),
]  # fmt: skip

_DURATION_BUCKETS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3),
    *(5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0),
)  # fmt: skip
"""Upper bounds in seconds: a call normally takes tens of microseconds."""

TIMED_CALLS = ("add_request", "begin_step", "commit_step")
"""The calls of a step that ``CallDurations`` measures."""


class CacheCollector(Collector):
    """A collector of the ``stats()`` of caches, which are read at each scrape.

    Example::

        REGISTRY.register(CacheCollector({"main": context}))
        start_http_server(9000)

    Args:
        caches: Contexts or ``PrefixCache`` objects by name; the name becomes the label ``cache``.

    Raises:
        InvalidArgumentError: ``caches`` is no mapping, or is empty.
        MissingExtraError: On import, if prometheus_client is not installed.
    """

    def __init__(self, caches: Mapping[str, Any]) -> None:
        if not isinstance(caches, Mapping) or not caches:
            raise InvalidArgumentError(
                f"caches must map names to at least one cache, got {caches!r}"
            )
        self._caches = dict(caches)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, with one sample or more for each cache."""
        caches = self._caches.items()
        yield from _families(_OF_CACHES, [((name,), cache.stats()) for name, cache in caches])
        verified = [
            ((name,), cache.verification_stats())
            for name, cache in caches
            if hasattr(cache, "verification_stats")
        ]
        verified = [each for each in verified if each[1].differences]  # verification is on
        yield from _families(_OF_VERIFICATION, verified)
        tiers = [
            ((name, tier.name), tier)
            for name, cache in caches
            for tier in getattr(cache, "tier_stats", tuple)()
        ]
        yield from _families(_OF_TIERS, tiers)


class CallDurations:
    """Measures how long the calls of a step take on the host, in one histogram.

    Each measured call takes about two microseconds more.

    Example::

        CallDurations().watch("main", context)

    Args:
        registry: Registry of the histogram. Default: prometheus_client's default registry.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._histogram = Histogram(
            "mamba_cache_call_duration_seconds",
            "Time that calls of a step take on the host",
            ["cache", "call"],
            buckets=_DURATION_BUCKETS,
            registry=registry,
        )

    def watch(self, name: str, context: object) -> None:
        """Replace the ``TIMED_CALLS`` of a context by measured ones.

        Args:
            name: The label ``cache``, as for ``CacheCollector``.
            context: A ``DynamicInferenceContext``, or an object with the same calls.

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


def _families(
    table: Sequence[_Row], sources: Sequence[tuple[tuple[str, ...], Any]]
) -> Iterator[Metric]:
    """Yield a table's metrics for labelled statistics; nothing without statistics."""
    if not sources:
        return
    names = ["cache", "tier"][: len(sources[0][0])]
    for name, text, label, figures in table:
        make = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
        family = make(f"mamba_cache_{name}", text, labels=[*names, *([label] if label else [])])
        for labels, stats in sources:
            found = getattr(stats, figures) if isinstance(figures, str) else figures(stats)
            for value, figure in (found if label else {"": found}).items():
                family.add_metric([*labels, *([value] if label else [])], figure)
        yield family


def _timed(call: Callable[..., Any], observe: Callable[[float], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            observe(time.perf_counter() - start)

    return timed
