"""Adapters to other projects; a module needs its project only when the module is used."""

__all__: list[str] = []
