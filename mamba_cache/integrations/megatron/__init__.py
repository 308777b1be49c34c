"""Megatron Core's inference contexts with this package's slots instead of Megatron's."""

from mamba_cache.integrations.megatron.installing import install, installed, replaced, uninstall

__all__ = ["install", "installed", "replaced", "uninstall"]
