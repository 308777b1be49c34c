"""The command line, ``mamba-cache`` or ``python -m mamba_cache.cli``."""

from mamba_cache.cli.app import main

__all__ = ["main"]
