"""Continuous batching of hybrid models, with unmodified model code."""

__all__: list[str] = []
