"""The kernels of ``decode`` in numpy: the default on the CPU, and what the kernels must equal.

They write the tensors' own memory. Of batches as small as those of decoding requests numpy is some
times faster than PyTorch, whose every operation costs as much as a step's bookkeeping may.
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
    """Progress by request row, kept by the device alone.

    A request has a ring of ``ring`` live-state rows. Its cursor is the row of the ring that holds
    the state after ``num_computed`` tokens; a step writes the state after its j-th token to the
    row j after the cursor. So any number of them can be accepted, none included, by moving the
    cursor.
    """

    def __init__(
        self,
        max_requests: int,
        ring: int,
        device: torch.device,
        step_arrays: Mapping[str, np.ndarray[Any, Any]],
    ) -> None:
        self.ring = ring  # live-state rows of one request
        # [max_requests], each written when the first step of the row's request is committed.
        self.num_computed = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.cursors = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_requests, dtype=torch.int64, device=device)
        # The memory of these tensors and of a step's by their names, where all is on the CPU.
        self.arrays = dict(step_arrays)
        if device.type == "cpu":
            for name in ("num_computed", "cursors", "last_tokens"):
                self.arrays[name] = getattr(self, name).numpy()


def describe_decodes(
    rows: DecodeRows, metadata: StepMetadata, drafts: torch.Tensor | None, block_size: int
) -> None:
    """Write what only the device knows of the decoding requests into a step's metadata."""
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
    """Write which live state of each decoding request is current, and which ones follow."""
    arrays, count, ring = rows.arrays, metadata.num_decodes, rows.ring
    # Here and below: of 64 bits, by which numpy looks up several times as fast as by others.
    places = arrays["request_rows"][:count].astype(np.intp)
    live = (places * ring).repeat(ring)
    live += _rings(ring).take(arrays["cursors"][places], axis=0).ravel()
    arrays["state_rows"][:count] = live[::ring]
    arrays["decode_state_rows"][:count] = live.reshape(count, ring)


@cache
def _rings(ring: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return [ring, ring]: for each cursor the rows of the ring, from that one on."""
    columns = np.arange(ring)
    rows: np.ndarray[Any, np.dtype[np.intp]] = (columns[:, None] + columns) % ring
    return rows


def advance_rows(
    rows: DecodeRows,
    metadata: StepMetadata,
    tokens: torch.Tensor | np.ndarray[Any, Any],
    counts: torch.Tensor | np.ndarray[Any, Any],
) -> None:
    """Move each request of a step past the tokens that became part of it."""
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
        # Of a request that takes none it is some token, which is not looked at.
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
    """Say which live state of each request is at its boundary, if the step has reached that."""
    arrays = rows.arrays
    if arrays["boundary_slots"][0] < 0:  # they come first, so there is none
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
