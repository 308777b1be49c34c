"""Kernels of continuous batching: each Triton launcher beside its PyTorch twin."""

__all__: list[str] = []
