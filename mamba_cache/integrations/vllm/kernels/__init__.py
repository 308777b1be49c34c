"""Copies between columns: Triton kernels, and in ``plain`` their twins in plain Python."""

__all__: list[str] = []
