"""Benchmarks: ``python -m mamba_cache.bench <name>``."""

__all__: list[str] = []
