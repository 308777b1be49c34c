"""Keys and headers of entries: each mismatch is refused by name."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from disk_rig import IDENTITY

from mamba_cache.tiers import Refusal
from mamba_cache.tiers.directory import entry_name, named_entry
from mamba_cache.tiers.entry import (
    HEADER_BYTES,
    EntryFacts,
    EntryHeader,
    EntryKey,
    EntryKind,
    payload_digest,
    prefix_tokens_in,
)

KEY = EntryKey(b"i" * 32, b"t" * 16, EntryKind.STATE, b"d" * 16, 3)
FACTS = EntryFacts(KEY, 512, 1000)
HEADER = EntryHeader(payload_digest(b"payload"), 7)


def patched(offset: int, data: bytes) -> bytes:
    """Return the header with other bytes at an offset, and a correct checksum."""
    content = bytearray(HEADER.to_bytes(FACTS)[:-16])
    content[offset : offset + len(data)] = data
    return bytes(content) + hashlib.blake2b(content, digest_size=16).digest()


@pytest.mark.parametrize("kind", EntryKind)
@pytest.mark.parametrize("digest", [b"d" * 16, b"\x00" * 32])
def test_keys_are_spelled_and_read(kind, digest) -> None:
    key = EntryKey(b"i" * 32, b"t" * 16, kind, digest, 3)
    assert str(key) == f"mc1/{'69' * 32}/{'74' * 16}/{kind.value}/{digest.hex()}/3"
    own = replace(key, identity=IDENTITY.digest)
    assert named_entry(IDENTITY, entry_name(own)) == own
    assert named_entry(IDENTITY, entry_name(f"{own}/0")) is None


NAME = entry_name(KEY)


@pytest.mark.parametrize(
    "text",
    [
        "", NAME + "-", NAME + "-1-2", NAME.replace("-s-", "-x-"), NAME.upper(), NAME[:-1] + "03",
        NAME.replace("64", "zz"), NAME[:-1] + "-1", NAME + ".new", NAME + "\n", "\u0661" + NAME[1:],
        NAME.replace("7474", "74"), NAME.replace("64" * 16, "64" * 17), f"mc1-{NAME}",
    ],
)  # fmt: skip
def test_other_names_are_no_entrys(text) -> None:
    assert named_entry(IDENTITY, NAME) is not None
    assert named_entry(IDENTITY, text) is None


def test_the_bytes_of_a_header_do_not_change_within_their_version() -> None:
    assert hashlib.sha256(HEADER.to_bytes(FACTS)).hexdigest() == (
        "dee88b274c477a5299cf20cbf05a8f7d87a631ce766544d191249f9efa0683a8"
    )


@pytest.mark.parametrize(
    ("offset", "data", "reason"),
    [
        (0, bytes(8), Refusal.MAGIC),
        (8, b"\1\0", Refusal.VERSION),  # earlier versions had no MAC
        (8, b"\2\0", Refusal.VERSION),
        (10, b"x", Refusal.KIND),
        (11, b"\x11", Refusal.DIGEST),  # size of the digest
        (12, b"\xff\xff\xff\xff", Refusal.RANK),
        (16, bytes(4), Refusal.MALFORMED),  # the mark of a whole entry
        (28, bytes(8), Refusal.PREFIX_TOKENS),
        (36, b"\xff" * 8, Refusal.PAYLOAD_BYTES),
        (108, b"\x01", Refusal.DIGEST),  # beyond a digest of 16 bytes
        (HEADER_BYTES - 17, b"\x01", Refusal.MALFORMED),  # outside of all fields
    ],
)
def test_forged_headers_are_refused_though_their_checksum_is_right(offset, data, reason) -> None:
    assert EntryHeader.read(patched(offset, data), FACTS) is reason


CHANGES = {
    Refusal.IDENTITY: {"identity": b"I" * 32},
    Refusal.TENANT: {"tenant": b"T" * 16},
    Refusal.KIND: {"kind": EntryKind.KV},
    Refusal.RANK: {"rank": 4},
    Refusal.DIGEST: {"digest": b"D" * 16},
    Refusal.PREFIX_TOKENS: {"prefix_tokens": 513},
    Refusal.PAYLOAD_BYTES: {"payload_bytes": 1001},
}


@pytest.mark.parametrize("reason", CHANGES)
def test_each_field_is_compared_with_the_facts_of_the_request(reason: Refusal) -> None:
    change = CHANGES[reason]
    if hasattr(KEY, next(iter(change))):
        change = {"key": replace(KEY, **change)}
    other = replace(FACTS, **change)
    assert EntryHeader.read(HEADER.to_bytes(other), FACTS) is reason
    assert EntryHeader.read(HEADER.to_bytes(FACTS), other) is reason


@pytest.mark.parametrize("tokens", [0, 256, 2**40, 2**63])
def test_the_prefix_length_of_an_unverified_header_is_bounded(tokens) -> None:
    """The number of tokens is bounded, since a clock is set back by as many microseconds."""
    header = HEADER.to_bytes(replace(FACTS, prefix_tokens=tokens))
    assert prefix_tokens_in(memoryview(header)) == min(tokens, 2**40)


def test_a_payload_digest_is_of_the_bytes() -> None:
    data = np.arange(64, dtype=np.uint8)
    assert (
        payload_digest(data) == payload_digest(data.tobytes()) == payload_digest(memoryview(data))
    )
    assert payload_digest(data) != payload_digest(data[:-1].copy())
