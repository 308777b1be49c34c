"""Old import path of ``mamba_cache.integrations.vllm.mamba2_attention``."""

from mamba_cache.integrations.vllm import mamba2_attention
from mamba_cache.integrations.vllm.mamba2_attention import *  # noqa: F403 - all of its exports

__all__ = mamba2_attention.__all__
