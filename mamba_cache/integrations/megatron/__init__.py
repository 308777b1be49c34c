"""Megatron Core's inference contexts with this package's slots in the place of their own."""

from mamba_cache.integrations.megatron.installing import install, installed, replaced, uninstall

__all__ = ["install", "installed", "replaced", "uninstall"]
