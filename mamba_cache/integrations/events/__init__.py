"""KV events for routers, in vLLM's format; needs the extra ``events``.

Before the first request of a context, an engine or a prefix cache of transformers::

    from mamba_cache.integrations.events import EventPublisher

    publisher = EventPublisher("tcp://127.0.0.1:5557", replay_endpoint="tcp://127.0.0.1:5558")
    publisher.watch(context)
"""

from mamba_cache.integrations.events.publisher import EventPublisher, PublisherStats
from mamba_cache.integrations.events.view import EventMode

__all__ = ["EventMode", "EventPublisher", "PublisherStats"]
