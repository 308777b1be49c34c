"""The page ``/metrics``: what the caches of the models that are loaded did and hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, make_asgi_app

from mamba_cache.integrations.prometheus import CacheCollector
from mamba_cache.integrations.transformers.prefix_cache import PrefixCache

__all__ = ["metrics_app"]


def metrics_app(caches: Callable[[], Mapping[str, PrefixCache]]) -> Any:
    """Make an ASGI application that answers each request with the metrics of that moment."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        registry = CollectorRegistry()
        if loaded := caches():  # models come and go
            registry.register(CacheCollector(loaded))
        await make_asgi_app(registry)(scope, receive, send)

    return answer
