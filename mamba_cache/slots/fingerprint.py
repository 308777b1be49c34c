"""A digest of bookkeeping, by which processes prove that they have decided alike."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

__all__ = ["fingerprint_of"]


def fingerprint_of(*parts: npt.ArrayLike) -> int:
    """Digest numbers; equal ones give equal results in every process.

    Args:
        parts: Integers, or arrays or lists of them. Where one part ends and the next begins counts.

    Returns:
        From 0 to 2**63 - 1, so that it fits an int64 tensor.
    """
    digest = blake2b(digest_size=8)
    for part in parts:
        array = np.asarray(part, np.int64)
        digest.update(array.size.to_bytes(8, "little"))
        digest.update(array.tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1
