"""Kernels that move states, each beside its PyTorch twin of the same signature."""

from mamba_cache.states.kernels.extract import extract_checkpoint_states

__all__ = ["extract_checkpoint_states"]
