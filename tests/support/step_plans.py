"""Plans of steps, written request by request."""

import numpy as np

from mamba_cache.metadata import DecodeBatch


def decode_batch(slices):
    """The decoding requests of a step, given as ``SequenceSlice``s."""
    lengths = [len(piece.token_ids) for piece in slices]
    return DecodeBatch(
        rows=np.array([piece.row for piece in slices], dtype=np.int64),
        starts=np.array([piece.start for piece in slices], dtype=np.int64),
        ends=np.array([p.start + len(p.token_ids) for p in slices], dtype=np.int64),
        longest=max((p.start + len(p.token_ids) for p in slices), default=0),
        token_ids=np.concatenate([piece.token_ids for piece in slices]) if slices else np.zeros(0),
        query_start_loc=None if set(lengths) <= {1} else np.cumsum([0, *lengths]),
    )
