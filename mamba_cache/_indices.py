"""Row indices with a meaning of their own, wherever rows of states or blocks are listed."""

__all__ = ["PAD_SLOT_ID", "ZERO_SOURCE"]

PAD_SLOT_ID = -1
"""An index that means: nothing here, skip it."""

ZERO_SOURCE = -2
"""A source index that means: no state is copied, the destination is cleared."""
