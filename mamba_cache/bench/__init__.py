"""Benchmarks: ``python -m mamba_cache.bench <name>``."""
