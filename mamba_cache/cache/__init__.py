"""What is decided about rows of a cache, without tensors: the life cycle of blocks and slots."""

from mamba_cache.cache.rows import FEW, NONE, RowIds, Rows, as_rows, ids_of, values_at

__all__ = ["FEW", "NONE", "RowIds", "Rows", "as_rows", "ids_of", "values_at"]
