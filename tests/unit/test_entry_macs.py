"""MACs of entries: an entry written without the secret is refused and counted."""

import builtins
import sys
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from disk_rig import (
    IDENTITY,
    SECRET,
    STATE_BYTES,
    change_file,
    facts_of,
    file_of,
    load,
    make_identity,
    name_of,
    open_tier,
    payload_of,
    put,
)
from memory_store import MemoryStore
from remote_rig import Bench

from mamba_cache.errors import MissingExtraError
from mamba_cache.tiers import Refusal
from mamba_cache.tiers.disk import PAGE_BYTES
from mamba_cache.tiers.entry import (
    EntryHeader,
    EntryMacs,
    payload_digest,
)
from mamba_cache.tiers.lower import LowerTier

FORGED = bytes(range(250)) * (STATE_BYTES // 250)
OTHER_SECRET = b"of somebody else"


def forged_headers(facts):
    """Headers of a forged payload: unchanged, with a checksum, and with an attacker's MAC."""
    macs = EntryMacs(OTHER_SECRET)
    mac = macs.payload_mac(IDENTITY.digest)
    own = EntryHeader(mac.tag_of([mac.part(0, FORGED)]), nonce=mac.nonce)
    return {
        "as it was": None,
        "with a checksum": EntryHeader(payload_digest(FORGED)).to_bytes(facts),
        "with another secret": own.to_bytes(facts, macs.header_key(IDENTITY.digest)),
    }


@pytest.mark.parametrize("how", ["as it was", "with a checksum", "with another secret"])
@pytest.mark.parametrize("is_reopened", [False, True])
def test_an_entry_on_disk_that_is_rewritten_without_the_secret_is_refused(
    tmp_path, how, is_reopened
) -> None:
    tier = open_tier(tmp_path)
    assert put(tier, 1) is None
    if is_reopened:
        tier.close()
    file = file_of(tmp_path)
    change_file(file, 0, forged_headers(facts_of(1))[how] or b"")
    change_file(file, PAGE_BYTES, FORGED)
    if is_reopened:
        tier = open_tier(tmp_path)
    assert load(tier, 1) is Refusal.MAC
    assert tier.stats().refused == {"mac": 1}
    tier.close()


@pytest.mark.parametrize("how", ["with a checksum", "with another secret"])
def test_an_entry_in_a_store_that_is_rewritten_without_the_secret_is_refused(
    how, monkeypatch
) -> None:
    """The chunks and a matching header are rewritten."""
    bench = Bench(monkeypatch, secret=OTHER_SECRET if how == "with another secret" else SECRET)
    bench.put(1)
    facts = facts_of(1)
    if how == "with a checksum":
        blobs = bench.memory._blobs
        names = [f"{facts.key}/{number}" for number in range(5)]
        size = len(blobs[names[0]])
        for number, name in enumerate(names):
            blobs[name] = FORGED[number * size :][: len(blobs[name])]
        digests = [payload_digest(blobs[name]) for name in names]
        tag = payload_digest(b"".join(digests))
        blobs[str(facts.key)] = EntryHeader(tag).to_bytes(facts)
    reader = Bench(store=bench.memory)
    assert reader.load(1) is Refusal.MAC
    assert reader.tier.stats().refused == {"mac": 1}
    reader.end()
    assert reader.names() == []
    for each in (bench, reader):
        each.tier.close()


def test_parts_cannot_be_reordered_dropped_or_mixed() -> None:
    mac, other = (EntryMacs(SECRET).payload_mac(IDENTITY.digest) for _ in range(2))
    size = 1024
    payload = memoryview(np.random.default_rng(1).bytes(3 * size + 77))
    slices = [slice(first, first + size) for first in range(0, len(payload), size)]
    parts = [payload[part] for part in slices]
    macs = [mac.part(number, part) for number, part in enumerate(parts)]
    tag = mac.tag_of(macs)
    assert replace(mac, tag=tag).vouches_for(macs)
    assert mac.part(1, parts[0]) != macs[0]  # a MAC depends on the part's place
    assert other.part(0, parts[0]) != macs[0]  # and on the entry
    for wrong in ([macs[1], macs[0], *macs[2:]], macs[:-1], [*macs, macs[0]], macs[:1] * 3):
        assert not replace(mac, tag=tag).vouches_for(wrong)
    for byte in (0, size - 1, size, 3 * size, len(payload) - 1):
        damaged = bytearray(payload)
        damaged[byte] ^= 4
        found = [mac.part(n, memoryview(damaged)[part]) for n, part in enumerate(slices)]
        assert mac.tag_of(found) != tag


@pytest.mark.parametrize("refused", [{0}, {0, 1}])
def test_entries_on_disk_whose_parts_were_exchanged_are_refused(tmp_path, refused) -> None:
    """Parts of one entry, or of two entries with their headers."""
    tier = open_tier(tmp_path, chunk_bytes=PAGE_BYTES)
    assert [put(tier, number) for number in range(2)] == [None, None]
    one, other = file_of(tmp_path, 0), file_of(tmp_path, 0 if refused == {0} else 1)
    at = 2 * PAGE_BYTES if refused == {0} else PAGE_BYTES
    first, second = one.read_bytes()[PAGE_BYTES:][:PAGE_BYTES], other.read_bytes()[at:][:PAGE_BYTES]
    change_file(one, PAGE_BYTES, second)
    change_file(other, at, first)
    for number in range(2):
        assert load(tier, number) == (Refusal.MAC if number in refused else payload_of(number))
    tier.close()


def test_chunks_in_a_store_that_were_exchanged_are_refused(monkeypatch) -> None:
    bench = Bench(monkeypatch)
    for one, other in (((1, 0), (1, 1)), ((1, 2), (2, 2))):
        assert {bench.put(1), bench.put(2)} == {None}
        names = [name_of(*each) for each in (one, other)]
        blobs = bench.memory._blobs
        blobs[names[0]], blobs[names[1]] = blobs[names[1]], blobs[names[0]]
        assert bench.load(1) is Refusal.MAC
        assert bench.load(2) == (Refusal.MAC if other[0] == 2 else bytes(payload_of(2)))
        bench.end()
    bench.tier.close()


def test_no_nonce_and_no_key_is_used_twice(tmp_path, monkeypatch) -> None:
    """The same entry written again has another nonce, and so another key for its payload."""
    macs = EntryMacs(SECRET)
    nonces = {macs.payload_mac(IDENTITY.digest).nonce for _ in range(100)}
    assert len(nonces) == 100
    used, make = [], EntryMacs.payload_mac

    def counted(self, identity, nonce=None):
        mac = make(self, identity, nonce)
        if nonce is None:
            used.append(mac.part(0, b"the same bytes"))
        return mac

    monkeypatch.setattr(EntryMacs, "payload_mac", counted)
    for _ in range(3):
        tier = open_tier(tmp_path)
        assert put(tier, 1) is None
        tier.remove(facts_of(1).key)
        tier.flush()
        tier.close()
    assert len(set(used)) == len(used) == 3


def test_keys_are_of_the_secret_and_the_identity_and_are_neither() -> None:
    other = make_identity("other weights").digest
    macs = [(EntryMacs(secret), identity) for secret in (SECRET, OTHER_SECRET)
            for identity in (IDENTITY.digest, other)]  # fmt: skip
    nonce = b"n" * 16
    header_keys = {each.header_key(identity) for each, identity in macs}
    parts = {each.payload_mac(identity, nonce).part(0, b"x") for each, identity in macs}
    assert len(header_keys) == len(parts) == 4
    assert {len(key) for key in header_keys} == {32}
    assert not header_keys & {SECRET, OTHER_SECRET, IDENTITY.digest, other}
    again = EntryMacs(SECRET).payload_mac(IDENTITY.digest, nonce)
    assert again.part(0, b"x") == macs[0][0].payload_mac(IDENTITY.digest, nonce).part(0, b"x")
    # Keys of old identities are dropped and derived again.
    identities = [number.to_bytes(32, "little") for number in range(40)]
    first = [macs[0][0].header_key(identity) for identity in identities]
    assert len(set(first)) == 40
    assert [macs[0][0].header_key(identity) for identity in identities] == first


def test_the_macs_are_aes_gmac_under_hkdf() -> None:
    """An independent implementation: a change of the disk format would be noticed."""
    identity, nonce = IDENTITY.digest, b"n" * 16
    keys = HKDF(hashes.SHA256(), 64, identity, b"mamba_cache entries 3").derive(SECRET)
    key = HKDFExpand(hashes.SHA256(), 32, b"mamba_cache payload " + nonce).derive(keys[32:])

    def gmac(number, content):
        encryptor = Cipher(algorithms.AES(key), modes.GCM(number)).encryptor()
        encryptor.authenticate_additional_data(content)
        encryptor.finalize()
        return encryptor.tag

    mac = EntryMacs(SECRET).payload_mac(identity, nonce)
    assert EntryMacs(SECRET).header_key(identity) == keys[:32]
    assert mac.part(5, b"five") == gmac((5).to_bytes(12, "little"), b"five")
    assert mac.tag_of([b"a" * 16, b"b" * 16]) == gmac(b"\xff" * 12, b"a" * 16 + b"b" * 16)


def test_without_cryptography_disk_and_store_name_the_extra(tmp_path, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    load_module = builtins.__import__

    def refuse(name, *arguments):
        if name.split(".")[0] == "cryptography":
            raise ImportError("no cryptography")
        return load_module(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for use in (
        lambda: open_tier(tmp_path),
        lambda: LowerTier(MemoryStore(), macs=EntryMacs(SECRET)),
    ):
        with pytest.raises(MissingExtraError, match=r"cryptography.*\[tiers\]"):
            use()
    assert list(tmp_path.iterdir()) == []
