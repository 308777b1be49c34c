"""A prefix cache for the hybrid models of Hugging Face transformers.

Put it around a model and call its ``generate`` instead of the model's::

    from mamba_cache.integrations.transformers import PrefixCache

    cache = PrefixCache(model, mamba_cache_gb=4, kv_cache_gb=8)
    output = cache.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=64)
"""

from mamba_cache.integrations.transformers.batching.batcher import BatchStats
from mamba_cache.integrations.transformers.checkpoints import message_ends
from mamba_cache.integrations.transformers.prefix_cache import PrefixCache

__all__ = ["BatchStats", "PrefixCache", "message_ends"]
