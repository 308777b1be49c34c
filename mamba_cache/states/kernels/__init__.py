"""Kernels that move states, each beside its PyTorch twin of the same signature.

The kernels need Triton, so nothing is imported here.
"""

__all__: list[str] = []
