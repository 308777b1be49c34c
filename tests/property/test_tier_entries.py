"""Keys, headers and identities of any values: read as written, and damage is always noticed."""

from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.tiers import Refusal
from mamba_cache.tiers.entry import HEADER_BYTES, EntryFacts, EntryHeader, EntryKey, EntryKind

KEYS = st.builds(
    EntryKey,
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=16, max_size=16),
    st.sampled_from(EntryKind),
    st.one_of(st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32)),
    st.integers(0, 2**31 - 1),
)
FACTS = st.builds(
    EntryFacts,
    KEYS,
    st.integers(1, 2**63 - 1),
    st.integers(1, 2**63 - 1),
)
HEADERS = st.builds(
    EntryHeader,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**63 - 1),
    st.binary(min_size=16, max_size=16),
)
KEYS_OF_MACS = st.just(b"") | st.binary(min_size=1, max_size=32)


@given(KEYS, KEYS)
def test_each_key_has_a_unique_spelling(one: EntryKey, other: EntryKey) -> None:
    assert (str(one) == str(other)) == (one == other)


@given(HEADERS, FACTS, KEYS_OF_MACS, KEYS_OF_MACS)
def test_headers_are_read_as_written(
    header: EntryHeader, facts: EntryFacts, key: bytes, other: bytes
) -> None:
    data = header.to_bytes(facts, key)
    assert EntryHeader.read(data, facts, key) == header
    is_same = key.rstrip(b"\0") == other.rstrip(b"\0")  # BLAKE2 pads its keys with zeroes
    if not is_same or bool(key) != bool(other):
        reason = Refusal.MAC if other else Refusal.CHECKSUM
        assert EntryHeader.read(data, facts, other) is reason


@given(HEADERS, FACTS, KEYS_OF_MACS, st.sets(st.integers(0, HEADER_BYTES * 8 - 1), min_size=1))
def test_any_flipped_bits_are_noticed(
    header: EntryHeader, facts: EntryFacts, key: bytes, bits: set[int]
) -> None:
    data = bytearray(header.to_bytes(facts, key))
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    assert isinstance(EntryHeader.read(data, facts, key), Refusal)


@given(HEADERS, FACTS, FACTS)
def test_only_equal_facts_match(header: EntryHeader, mine: EntryFacts, its: EntryFacts) -> None:
    found = EntryHeader.read(header.to_bytes(its), mine)
    assert (found == header) == (mine == its)


@given(st.binary(max_size=2 * HEADER_BYTES), FACTS)
def test_no_bytes_make_the_reader_raise(data: bytes, facts: EntryFacts) -> None:
    assert isinstance(EntryHeader.read(data, facts), Refusal)
