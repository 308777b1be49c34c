"""Old import path of ``mamba_cache.integrations.vllm``, which it stands for."""

from mamba_cache.integrations import vllm
from mamba_cache.integrations.vllm import *  # noqa: F403 - whatever it exports

__all__ = vllm.__all__
