"""Steps described request by request, and request tables for them."""

from types import SimpleNamespace

import numpy as np

from mamba_cache.context.request_table import DecodingGroup
from mamba_cache.context.requests import Chunk
from mamba_cache.context.step import DecodeWork
from mamba_cache.context.step_buffers import StepBuffers


def make_buffers(table, device, **sizes):
    """Step buffers over a table of ``make_table``.

    Settings that only error messages read are set to the number of rows.
    """
    named = ("max_requests", "max_sequence_length", "max_checkpoints_per_step")
    config = SimpleNamespace(**dict.fromkeys(named, len(table.block_tables)), **sizes)
    return StepBuffers(table, config, device)


def make_table(block_tables):
    """A request table with the fields that step buffers read."""
    count = len(block_tables)
    return SimpleNamespace(
        block_tables=block_tables,
        table_stamps=np.arange(count),
        stamp=0,
        last_tokens=np.zeros(count, dtype=np.int64),
        place_shifts=np.zeros(count, dtype=np.int64),
    )


def stamp_row(table, row):
    """Mark a row's blocks as changed, like the real table."""
    table.stamp += len(table.table_stamps)
    table.table_stamps[row] = table.stamp + row


def group_of(slices):
    """A group of decoding requests, whose ids are their rows."""
    requests = [SimpleNamespace(request_id=piece.row, row=piece.row) for piece in slices]
    return DecodingGroup(requests)


def decode_work(slices, table, block_size):
    """The work of decoding requests, given as chunks; updates the table."""
    lengths = np.array([len(piece.token_ids) for piece in slices], dtype=np.int64)
    width = max(lengths.tolist(), default=1)
    drafts = np.full((len(slices), width - 1), -1, dtype=np.int64)
    starts = np.array([piece.start for piece in slices], dtype=np.int64)
    crossing = []
    for index, piece in enumerate(slices):
        first, *rest = piece.token_ids.tolist()
        drafts[index, : len(rest)] = rest
        table.last_tokens[piece.row] = first
        block = piece.start // block_size
        shift = (int(table.block_tables[piece.row, block]) - block) * block_size
        table.place_shifts[piece.row] = shift
        if (piece.end - 1) // block_size > block:
            crossing.append(index)
    return DecodeWork(
        group=group_of(slices),
        starts=starts,
        max_starts=starts,
        ends=starts + lengths,
        longest=max((starts + lengths).tolist(), default=0),
        num_tokens=int(lengths.sum()),
        width=width,
        lengths=None if set(lengths.tolist()) <= {width} else lengths,
        drafts=drafts if width > 1 else None,
        crossing=crossing,
    )


def part(row, start, tokens, first_writable=0, **rest):
    """The chunk of one request in a step."""
    return Chunk(row, start, np.asarray(tokens), first_writable, **rest)
