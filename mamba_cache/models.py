"""Old import path of the model in ``mamba_cache.reference``, which it stands for."""

from mamba_cache import reference
from mamba_cache._old_paths import keep_submodules
from mamba_cache.reference import *  # noqa: F403 - whatever it exports

__all__ = reference.__all__

keep_submodules(
    __name__,
    "mamba_cache.reference",
    {
        "attention": "attention",
        "batch": "batch",
        "config": "model_config",
        "conv": "conv",
        "hybrid": "hybrid_model",
        "mamba": "mamba",
        "ssd": "ssd",
        "ssd_naive": "ssd",
        "weights": "weights",
    },
)
