"""The kernels of ``decode`` in numpy: the default on the CPU, and the kernels' reference.

They write the tensors' own memory. For the small batches of decoding requests numpy is several
times faster than PyTorch, of which one operation takes as long as a step's bookkeeping may.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from mamba_cache.metadata import StepMetadata

__all__ = ["DecodeRows", "advance_rows", "describe_decodes", "describe_live_rows"]


class DecodeRows:
    """Progress of decoding requests by request row, on the device only.

    A request has a ring of ``ring`` live-state rows. Its cursor is the ring's row with the state
    after ``num_computed`` tokens. A step writes the state after its j-th token to the row j after
    the cursor. So moving the cursor accepts any number of tokens, or none.
    """

    def __init__(
        self,
        max_requests: int,
        ring: int,
        device: torch.device,
        step_arrays: Mapping[str, np.ndarray[Any, Any]],
    ) -> None:
        self.ring = ring  # live-state rows of one request
        # [max_requests]; the commit of a request's first step sets its items.
        self.num_computed = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.cursors = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_requests, dtype=torch.int64, device=device)
        # By name: a step's tensors on the host; on the CPU also the three tensors above.
        self.arrays = dict(step_arrays)
        if device.type == "cpu":
            for name in ("num_computed", "cursors", "last_tokens"):
                self.arrays[name] = getattr(self, name).numpy()


def describe_decodes(
    rows: DecodeRows, metadata: StepMetadata, drafts: torch.Tensor | None, block_size: int
) -> None:
    """Write positions, lengths, tokens and rows of decoding requests into a step's metadata."""
    describe_live_rows(rows, metadata)
    arrays, count, total = rows.arrays, metadata.num_decodes, metadata.num_decode_tokens
    places = arrays["request_rows"][:count].astype(np.intp)
    bounds = arrays["query_start_loc"][: count + 1]
    starts = bounds[:-1]
    lengths = bounds[1:] - starts
    computed = arrays["num_computed"][places]
    arrays["num_computed_tokens"][:count] = computed
    arrays["seq_lens"][:count] = computed + lengths

    request = np.repeat(np.arange(count), lengths)
    positions = np.arange(total) + (computed - starts)[request]
    arrays["positions"][:total] = positions
    blocks = positions // block_size
    slots = arrays["block_tables"][request, blocks] - blocks
    slots *= block_size
    slots += positions
    arrays["kv_slot_mapping"][:total] = slots
    tokens = arrays["token_ids"][:total]
    if drafts is not None:
        offsets = np.arange(total) - starts[request]
        guessed = drafts.numpy()[places[request], np.maximum(offsets - 1, 0)]
        tokens[:] = np.maximum(guessed, 0)
    tokens[starts] = arrays["last_tokens"][places]


def describe_live_rows(rows: DecodeRows, metadata: StepMetadata) -> None:
    """Write the rows of each decoding request's current live state, and of the following ones."""
    arrays, count, ring = rows.arrays, metadata.num_decodes, rows.ring
    # 64-bit indices, here and below: numpy's lookup by other dtypes is several times slower.
    places = arrays["request_rows"][:count].astype(np.intp)
    live = (places * ring).repeat(ring)
    live += _rings(ring).take(arrays["cursors"][places], axis=0).ravel()
    arrays["state_rows"][:count] = live[::ring]
    arrays["decode_state_rows"][:count] = live.reshape(count, ring)


@cache
def _rings(ring: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return [ring, ring]: for each cursor the rows of the ring, from the cursor on."""
    columns = np.arange(ring)
    rows: np.ndarray[Any, np.dtype[np.intp]] = (columns[:, None] + columns) % ring
    return rows


def advance_rows(
    rows: DecodeRows,
    metadata: StepMetadata,
    tokens: torch.Tensor | np.ndarray[Any, Any],
    counts: torch.Tensor | np.ndarray[Any, Any],
) -> None:
    """Advance each request of a step by its new tokens."""
    arrays, count, end = rows.arrays, metadata.num_decodes, metadata.num_requests
    places, new_tokens = arrays["request_rows"][:end].astype(np.intp), np.asarray(tokens)
    num_computed, cursors = arrays["num_computed"], arrays["cursors"]
    last_tokens = arrays["last_tokens"]
    if count:
        decoding = places[:count]
        accepted = np.asarray(counts)[:count]
        if isinstance(counts, torch.Tensor):
            accepted = np.clip(accepted, 0, np.diff(arrays["query_start_loc"][: count + 1]))
        computed, moved = num_computed[decoding], cursors[decoding] + accepted
        _save_boundaries(rows, metadata, decoding, accepted)
        num_computed[decoding] = computed + accepted
        moved %= rows.ring
        cursors[decoding] = moved
        # For a request that takes no token this is some other token, replaced below.
        width = new_tokens.shape[1]
        last = new_tokens.ravel()[np.arange(-1, count * width - 1, width) + accepted]
        if np.count_nonzero(accepted) < count:
            last = np.where(accepted > 0, last, last_tokens[decoding])
        last_tokens[decoding] = last
    if end > count:
        prefilling = places[count:]
        num_computed[prefilling] = arrays["seq_lens"][count:end]
        cursors[prefilling] = 0
        last_tokens[prefilling] = new_tokens[count:end, 0]


def _save_boundaries(
    rows: DecodeRows,
    metadata: StepMetadata,
    decoding: np.ndarray[tuple[int], np.dtype[np.intp]],
    accepted: np.ndarray[tuple[int], np.dtype[np.integer[Any]]],
) -> None:
    """Set the live row of each boundary that the step has reached; skip the other boundaries."""
    arrays = rows.arrays
    if arrays["boundary_slots"][0] < 0:  # entries come before padding, so there are none
        return
    entries = arrays["boundary_entries"][: len(decoding)]
    indices = (entries >= 0).nonzero()[0]
    places, saved = decoding[indices], entries[indices]
    ahead = arrays["boundary_positions"][indices] - arrays["num_computed"][places]
    reached = (ahead > 0) & (ahead <= accepted[indices])
    live = places * rows.ring + (arrays["cursors"][places] + ahead) % rows.ring
    arrays["boundary_rows"][saved] = np.where(reached, live, -1)
    slots = arrays["boundary_slots"]
    slots[saved] = np.where(reached, slots[saved], -1)
