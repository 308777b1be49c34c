"""What lies in a folder of a disk cache, for people: listed and verified without a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mamba_cache.tiers.directory import payload_sizes, slab_path
from mamba_cache.tiers.entry import EntryHeader, EntryKind, Refusal, payload_digest
from mamba_cache.tiers.slab import SlabFile

__all__ = ["RowReport", "count_rows", "inspect_rows"]

_ANY_NUMBER: Final = 2**62


@dataclass(frozen=True, slots=True)
class RowReport:
    """What one row holds.

    Attributes:
        kind: Of the file that it is in.
        row: Which one.
        header: The entry's header; None if there is no entry.
        refusal: What is wrong with it; None if nothing is, or if the row is empty.
    """

    kind: EntryKind
    row: int
    header: EntryHeader | None
    refusal: Refusal | None


def count_rows(folder: Path) -> int:
    """Count the rows in all files of a folder, empty ones included."""
    return sum(slab.num_rows for _, slab in _slabs(folder))


def inspect_rows(
    folder: Path, identity_digest: bytes | None, *, with_payloads: bool, erase: bool = False
) -> Iterator[RowReport]:
    """Look at every row of a folder, one after the other.

    Args:
        folder: Which nobody else writes to meanwhile.
        identity_digest: What all entries must be of; None: whatever they are of.
        with_payloads: Read the payloads too, and compare them with their digests. Otherwise only
            headers are read.
        erase: Erase the headers of entries that are refused.

    Yields:
        A report on each row.

    Raises:
        OSError: A header cannot be erased.
    """
    for kind, slab in _slabs(folder, close=False):
        try:
            for row in range(slab.num_rows):
                report = _report(kind, slab, row, identity_digest, with_payloads=with_payloads)
                if erase and report.refusal is not None:
                    slab.erase_header(row)
                    slab.sync()
                yield report
        finally:
            slab.close()


def _slabs(folder: Path, *, close: bool = True) -> Iterator[tuple[EntryKind, SlabFile]]:
    for kind, size in payload_sizes(folder).items():
        path = slab_path(folder, kind)
        if path.exists():
            slab = SlabFile(path, size, max_rows=_ANY_NUMBER)
            if close:
                slab.close()
            yield kind, slab


def _report(
    kind: EntryKind,
    slab: SlabFile,
    row: int,
    identity_digest: bytes | None,
    *,
    with_payloads: bool,
) -> RowReport:
    payload = memoryview(bytearray(slab.payload_bytes if with_payloads else 0))
    try:
        page = slab.read(row, payload) if with_payloads else slab.read_header(row)
    except OSError:
        return RowReport(kind, row, None, Refusal.IO_ERROR)
    if not any(page):
        return RowReport(kind, row, None, None)
    header = EntryHeader.read(page)
    if isinstance(header, Refusal):
        return RowReport(kind, row, None, header)
    refusal = None
    if identity_digest not in (None, header.facts.key.identity):
        refusal = Refusal.IDENTITY
    elif header.facts.key.kind is not kind:
        refusal = Refusal.KIND
    elif header.facts.payload_bytes != slab.payload_bytes:
        refusal = Refusal.PAYLOAD_BYTES
    elif with_payloads and payload_digest(payload) != header.payload_digest:
        refusal = Refusal.PAYLOAD_DIGEST
    return RowReport(kind, row, header, refusal)
