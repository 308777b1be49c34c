"""Block hashes: which prompts they distinguish, which tokens they accept and refuse."""

import hashlib

import numpy as np
import pytest
import torch
import xxhash

from mamba_cache.cache import (
    BlockHashChain,
    BlockHasher,
    BlockHashes,
    as_token_array,
    compute_block_hashes,
)
from mamba_cache.cache.hashing import encode_keys, hash_id_of
from mamba_cache.errors import InvalidArgumentError

HASHERS = pytest.mark.parametrize(
    "hasher", [BlockHasher(name, b"key") for name in ("blake2b", "sha256", "xxh3_128")], ids=str
)


def blake2b(data, person=b"mamba_cache node", key=b"key"):
    return hashlib.blake2b(data, key=key, person=person, digest_size=16).digest()


@pytest.fixture
def tokens(rng):
    return rng.integers(0, 2**31, size=50).tolist()


def hashes(tokens, **options):
    options.setdefault("hasher", BlockHasher(secret=b"key"))
    return compute_block_hashes(tokens, 4, **options)


@pytest.mark.parametrize(
    ("algorithm", "reference"),
    [
        ("blake2b", blake2b),
        ("xxh3_128", xxhash.xxh3_128_digest),
        ("sha256", lambda data: hashlib.sha256(data).digest()),
    ],
)
def test_a_digest_is_of_the_parent_digest_the_tokens_as_int32_and_the_keys(
    tokens, algorithm, reference
):
    hasher = BlockHasher(algorithm, b"key")
    parent = hasher.root(4, None, None)
    expected = []
    for start in range(0, 48, 4):
        data = parent + np.array(tokens[start : start + 4], dtype="<i4").tobytes()
        if start == 20:
            data += encode_keys(1, "a", 3, b"b")
        parent = reference(data)
        expected.append(parent)
    keys = [(23, b"b"), (21, "a")]
    assert hashes(tokens, hasher=hasher, multimodal_keys=keys).digests == tuple(expected)


@HASHERS
def test_the_root_is_keyed_and_names_block_size_salt_and_adapter(hasher):
    spelled = hashlib.blake2b(
        encode_keys(4, "salt", 7),
        key=b"key",
        person=b"mamba_cache root",
        digest_size=hasher.digest_size_bytes,
    )
    assert hasher.root(4, "salt", 7) == spelled.digest()


def digest_of(hasher, data):
    block = hasher.start()
    block.update(data)
    return block.digest()


def test_a_secret_of_any_length_keys_every_block():
    """Every byte of a secret that is longer than a BLAKE2b key changes the digest."""
    secrets = [b"s", b"s\0", bytes(64), bytes(65), bytes(66), bytes(65) + b"\1"]
    hashers = [BlockHasher(secret=secret) for secret in secrets]
    assert len({digest_of(hasher, b"parent and tokens") for hasher in hashers}) == len(secrets)
    assert len({hasher.root(1, None, None) for hasher in hashers}) == len(secrets)
    long = hashlib.blake2b(bytes(65), person=b"mamba_cache key").digest()
    assert digest_of(BlockHasher(secret=bytes(65)), b"x") == blake2b(b"x", key=long)


def test_ids_are_positive_and_cut_from_the_digests():
    high = b"\xff" * 8 + b"\x01" * 8
    zero = b"\x00" * 8 + b"\x02" * 8
    assert list(BlockHashes([high, zero])) == [2**63 - 1, 1]
    assert repr(BlockHashes([zero])) == "BlockHashes([1])"
    assert [BlockHashes([high, zero])[i] for i in (0, 1, -1)] == [2**63 - 1, 1, 1]
    # Many digests, too: 0 and 1 are the only ones that share an id.
    many = [number.to_bytes(16, "little") for number in range(20)]
    assert list(BlockHashes(many)) == [1, *range(1, 20)] == [hash_id_of(each) for each in many]


KEYS = [
    {},
    {"cache_salt": "tenant"},
    {"cache_salt": b"tenant"},
    {"cache_salt": ""},
    {"cache_salt": "7"},
    {"cache_salt": 7},
    {"cache_salt": -7},
    {"cache_salt": "\ud800"},
    {"lora_id": "tenant"},
    {"lora_id": 7},
    {"cache_salt": "tenant", "lora_id": 7},
    {"cache_salt": "tenant7"},
    {"cache_salt": "asb", "lora_id": "c"},
    {"cache_salt": "a", "lora_id": "bsc"},
    {"multimodal_keys": [(0, "image")]},
    {"multimodal_keys": [(0, b"image")]},
    {"multimodal_keys": [(1, b"image")]},
    {"multimodal_keys": [(0, b"image"), (0, b"image")]},
    {"multimodal_keys": [(0, b"im"), (0, b"age")]},
    {"hasher": BlockHasher(secret=b"other")},
    {"hasher": BlockHasher("sha256", b"key")},
    {"hasher": BlockHasher("xxh3_128", b"key")},
]


def test_no_two_keys_share_a_block(tokens):
    digests = [digest for key in KEYS for digest in hashes(tokens, **key).digests]
    assert len(set(digests)) == len(digests)


def test_a_multimodal_key_cannot_be_spelled_in_tokens():
    """The same bytes as tokens of a longer block have another digest: the root holds the size."""
    key = encode_keys(0, "image ") + b"\0" * (-len(encode_keys(0, "image ")) % 4)
    hasher = BlockHasher(secret=b"key")
    keyed = compute_block_hashes([1, 2], 2, multimodal_keys=[(0, "image ")], hasher=hasher)
    size = 2 + len(key) // 4
    spelled = compute_block_hashes(
        [1, 2, *np.frombuffer(key, dtype="<i4").tolist()], size, hasher=hasher
    )
    assert (len(keyed), len(spelled)) == (1, 1)
    assert keyed.digests[0] != spelled.digests[0]


def test_the_default_secret_is_the_process_s_own(tokens):
    first = compute_block_hashes(tokens, 4)
    assert first == compute_block_hashes(tokens, 4, hasher=BlockHasher())
    assert first != hashes(tokens)
    assert repr(BlockHasher(secret=b"do not print")) == "BlockHasher('blake2b', secret=...)"


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        lambda ids: [np.int64(token) for token in ids],
        *(lambda ids, kind=kind: np.array(ids, dtype=kind) for kind in ("<i4", ">i4", "i8", "u8")),
        lambda ids: np.repeat(np.array(ids), 2)[::2],
        lambda ids: torch.tensor(ids, dtype=torch.int32),
        lambda ids: memoryview(np.array(ids)),
        lambda ids: torch.tensor(ids, dtype=torch.float64).to(torch.int64),
    ],
)
def test_every_form_of_the_same_tokens_has_the_same_hashes(tokens, convert):
    given = [0, 2**31 - 1, *tokens]
    assert hashes(convert(given)) == hashes(given)
    np.testing.assert_array_equal(as_token_array(convert(given)), given)


BAD_TOKENS = [
    ([3, -1], "got -1 at position 1"),
    ([0, 2**31 - 1, 2**31], "got 2147483648 at position 2"),
    ([3, True], "got True at position 1"),
    ([3, 1.0], "got 1.0 at position 1"),
    ([3, np.True_], "got .*True.* at position 1"),
    ([np.int64(3), np.int64(-1)], "got .*-1.* at position 1"),
    ([3, torch.empty(1, dtype=torch.int64, device="meta")], "at position 1"),
    ([2**31 - 1, np.uint64(2**63)], "at position 1"),
    ("text", "got str"),
    (None, "got NoneType"),
    (np.array([0, 2**31 - 1, -1]), "got .*-1.* at position 2"),
    (np.array([3, 2**64 - 1], dtype=np.uint64), "at position 1"),
    (np.array([1.5]), "float64, first value .*1.5"),
    (np.array([True]), "bool"),
    (np.array([[1]]), r"shape \(1, 1\)"),
    (torch.tensor([1.5], dtype=torch.bfloat16), "bfloat16"),
    (torch.empty(3, dtype=torch.int32, device="meta"), "int32.* on meta"),
    (torch.ones(3, dtype=torch.int32).to_sparse(), "sparse_coo"),
    (memoryview(np.ones((2, 2), np.int32)), "one dimension"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_TOKENS)
def test_bad_tokens_are_refused_and_nothing_is_appended(bad, message):
    chain = BlockHashChain(2)
    chain.append([1, 2, 3])
    before = chain.hashes
    with pytest.raises(InvalidArgumentError, match=message):
        chain.append(bad)
    assert (chain.num_tokens, chain.hashes) == (3, before)
    assert isinstance(chain.num_tokens, int)


def test_an_unrelated_error_raised_by_a_token_is_passed_on():
    class Odd:
        def __index__(self):
            raise MemoryError

    with pytest.raises(MemoryError):
        as_token_array([3, Odd()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size_tokens": 0}, "block_size_tokens must be an int in .*, got 0"),
        ({"block_size_tokens": 2.0}, "got 2.0"),
        ({"cache_salt": 1.5}, "got 1.5"),
        ({"cache_salt": True}, "got True"),
        ({"lora_id": ["x"]}, "got \\['x'\\]"),
        ({"multimodal_keys": [(-1, "x")]}, "position of a multimodal key .* got -1"),
        ({"multimodal_keys": [(1.0, "x")]}, "got 1.0"),
        ({"multimodal_keys": [(1, 2)]}, "got 2 at position 1"),
        ({"multimodal_keys": [5]}, "pairs, got 5"),
        ({"multimodal_keys": [(1, "x", 2)]}, "pairs, got \\(1, 'x', 2\\)"),
    ],
    ids=repr,
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        compute_block_hashes([1, 2, 3], **{"block_size_tokens": 2, **options})


def test_bad_hashers_and_digests_are_refused():
    with pytest.raises(InvalidArgumentError, match="md5"):
        BlockHasher("md5")
    with pytest.raises(InvalidArgumentError, match="got str"):
        BlockHasher(secret="text")
    with pytest.raises(
        InvalidArgumentError, match=r"secret must be bytes, at least one .* got none"
    ):
        BlockHasher(secret=b"")
    for digests in ([b"short"], [7], [b"x" * 16, b"x" * 32]):
        with pytest.raises(InvalidArgumentError, match="digest"):
            BlockHashes(digests)


@pytest.mark.parametrize("num_blocks", [None, 0, 1, 5, 7])
@pytest.mark.parametrize("num_appended", [0, 1, 4])
def test_a_chain_is_copied_up_to_a_block(tokens, num_blocks, num_appended):
    """The copy continues from there, with the keys of the blocks that are hashed anew."""
    keys = [(0, "a"), (9, "b"), (11, "c"), (20, b"d"), (29, "e"), (33, "f")]
    chain = BlockHashChain(4, multimodal_keys=keys, cache_salt="salt")
    chain.append(tokens[: 28 + num_appended])
    before = chain.hashes
    copied = chain.copy(num_blocks)
    end = chain.num_tokens if num_blocks is None else 4 * num_blocks
    assert (copied.num_tokens, copied.hashes) == (end, before[:num_blocks])
    other = [*tokens[:end], *(token ^ 1 for token in tokens[end:37])]
    copied.append(other[end:])
    options = {"multimodal_keys": keys, "cache_salt": "salt"}
    assert copied.hashes == compute_block_hashes(other, 4, **options)
    assert chain.hashes == before
    chain.append(tokens[28 + num_appended : 37])
    assert chain.hashes == compute_block_hashes(tokens[:37], 4, **options)
    for bad in (-1, 10, 1.0, True):
        with pytest.raises(InvalidArgumentError, match=r"num_blocks must be an int in \[0, 9\]"):
            chain.copy(bad)


def test_block_hashes_are_an_immutable_sequence(tokens):
    all_hashes = hashes(tokens)
    ids = list(all_hashes)
    for part in (slice(3), slice(2, 7), slice(None, None, -1), slice(1, None, 3), slice(20, 30)):
        assert isinstance(all_hashes[part], BlockHashes)
        assert all_hashes[part] == ids[part]
        assert all_hashes[part] == tuple(ids[part])
        assert all_hashes[part].digests == all_hashes.digests[part]
    assert hash(all_hashes) == hash(hashes(tokens)) == hash(tuple(ids))
    assert all_hashes != ids[:-1]
    assert all_hashes != "text"
    assert ids[2] in all_hashes
    assert all_hashes.index(ids[2]) == 2
    with pytest.raises(TypeError):
        all_hashes[0] = 1
    one, two = (BlockHashes([b"same id " + tail]) for tail in (b"12345678", b"87654321"))
    assert one != two
    assert list(one) == list(two)
