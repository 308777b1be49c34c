"""Old import path of ``mamba_cache.integrations.vllm``."""

from mamba_cache.integrations import vllm
from mamba_cache.integrations.vllm import *  # noqa: F403 - all of its exports

__all__ = vllm.__all__
