"""Old import path of ``mamba_cache.integrations.vllm``, which it stands for."""

from mamba_cache._old_paths import keep_submodules
from mamba_cache.integrations import vllm
from mamba_cache.integrations.vllm import *  # noqa: F403 - whatever it exports

__all__ = vllm.__all__

keep_submodules(
    __name__,
    "mamba_cache.integrations.vllm",
    {
        "buffers": "copy_buffers",
        "decisions": "column_moves",
        "engine": "protocols",
        "gpu_context": "align_on_gpu",
        "host": "align_on_host",
        "memory": "copy_specs",
        "resident": "hybrid_model_state",
        "spec": "mamba_spec",
        "staging": "align_on_gpu",
        "table": "state_table",
    },
)
