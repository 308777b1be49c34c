"""The benchmarks that ``mamba-cache bench`` runs; ``command`` lists them."""

__all__: list[str] = []
