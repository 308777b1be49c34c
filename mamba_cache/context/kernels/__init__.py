"""Kernels between two steps of speculative decoding, and their numpy twins."""

__all__: list[str] = []
