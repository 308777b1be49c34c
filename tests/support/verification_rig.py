"""Verification of hits: take a hit, compute its prefix again, and compare."""

import sys
from pathlib import Path

from context_rig import MODEL

from mamba_cache.reference.engine import compute_prefix


def take(context):
    """Return the hit that waits longest for its verification, or None."""
    return context._memory.verifier.take()


def verify(context, hit):
    """Compute a hit's prefix with the reference model; return the differences."""
    return context._memory.verifier.judge(hit, compute_prefix(MODEL, context, hit))


def files_called(call):
    """Names of the files whose functions a call runs."""
    files = set()

    def profile(frame, event, _):
        if event == "call":
            files.add(Path(frame.f_code.co_filename).name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files
