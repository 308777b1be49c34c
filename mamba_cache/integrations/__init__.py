"""Adapters to other projects. Each module needs its project only once it is used."""

__all__: list[str] = []
