"""Adapters to other projects; each module needs its project only once it is used."""

__all__: list[str] = []
