"""Hits that are verified: corrupt what one resumed from, and compute it again."""

import sys
from pathlib import Path

from context_rig import MODEL

from mamba_cache.reference.engine import compute_prefix


def take(context):
    """Returns the hit that has waited longest to be verified; None if there is none."""
    return context._memory.verifier.take()


def verify(context, hit):
    """Computes a hit's prefix with the reference model; returns what differs."""
    return context._memory.verifier.judge(hit, compute_prefix(MODEL, context, hit))


def files_called(call):
    """Files of the package whose functions a call runs."""
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
