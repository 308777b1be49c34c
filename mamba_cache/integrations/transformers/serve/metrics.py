"""The page ``/metrics``: what the caches of the models that are loaded did and hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from mamba_cache.integrations.prometheus import CacheCollector
from mamba_cache.integrations.transformers.prefix_cache import PrefixCache

__all__ = ["metrics_app"]


class _LoadedCaches(Collector):
    """Collects from the caches that are there at each scrape; models come and go."""

    def __init__(self, caches: Callable[[], Mapping[str, PrefixCache]]) -> None:
        self._caches = caches

    def collect(self) -> Iterator[Metric]:
        caches = self._caches()
        if caches:
            yield from CacheCollector(caches).collect()


def metrics_app(caches: Callable[[], Mapping[str, PrefixCache]]) -> Any:
    """Make an ASGI application that answers each request with the metrics of that moment."""
    registry = CollectorRegistry()
    registry.register(_LoadedCaches(caches))
    return make_asgi_app(registry)
