"""A prefix cache behind transformers' own server; needs the extra ``serve``.

Before the server is made, in the same process::

    from mamba_cache.integrations.transformers import serve

    serve.install(mamba_cache_gb=4, kv_cache_gb=8)

``mamba-cache serve MODEL`` calls ``install`` and starts the server.
"""

from mamba_cache.integrations.transformers.serve.installing import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
