"""Old import path of the engine in ``mamba_cache.reference``, which it stands for."""

from mamba_cache import reference
from mamba_cache._old_paths import keep_submodules
from mamba_cache.reference import *  # noqa: F403 - whatever it exports

__all__ = reference.__all__

keep_submodules(
    __name__,
    "mamba_cache.reference",
    {
        "drafting": "drafting",
        "engine": "engine",
        "model": "engine",
        "progress": "engine",
        "requests": "requests",
        "results": "results",
        "sampling": "sampling",
        "scheduler": "scheduler",
        "verification": "sampling",
        "waiting": "scheduler",
    },
)
