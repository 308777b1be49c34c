"""Old import path of ``mamba_cache.integrations.vllm.mamba2_attention``, which it stands for."""

from mamba_cache.integrations.vllm import mamba2_attention
from mamba_cache.integrations.vllm.mamba2_attention import *  # noqa: F403 - whatever it exports

__all__ = mamba2_attention.__all__
