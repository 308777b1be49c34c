"""Block hashes: chaining, and that hits mean equal prefixes."""

import itertools

import pytest
from context_rig import make_config
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.cache import BlockHashChain, BlockHasher, compute_block_hashes
from mamba_cache.context import Request
from mamba_cache.context.requests import RequestPreparer
from mamba_cache.errors import InvalidArgumentError

HASHER = BlockHasher(secret=b"fixed")
TOKENS = st.lists(st.integers(0, 2), max_size=24)
KEYS = st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["a", b"a", "b"])), max_size=3)
BLOCK_SIZES = st.integers(1, 5)


@given(parts=st.lists(TOKENS, max_size=8), block_size=BLOCK_SIZES, keys=KEYS)
def test_a_chain_fed_in_parts_equals_one_fed_at_once(parts, block_size, keys):
    chain = BlockHashChain(block_size, hasher=HASHER, multimodal_keys=keys)
    tokens = []
    for part in parts:
        chain.append(part)
        tokens += part
        expected = compute_block_hashes(tokens, block_size, hasher=HASHER, multimodal_keys=keys)
        assert chain.hashes == expected
        assert list(chain.hashes) == [chain.hashes[i] for i in range(len(chain.hashes))]
        assert chain.num_tokens == len(tokens)


@given(one=TOKENS, two=TOKENS, keys=st.tuples(KEYS, KEYS), block_size=BLOCK_SIZES)
def test_hashes_agree_exactly_where_whole_prefixes_do(one, two, keys, block_size):
    hashes = [
        compute_block_hashes(tokens, block_size, hasher=HASHER, multimodal_keys=own).digests
        for tokens, own in zip((one, two), keys, strict=True)
    ]
    for block, digests in enumerate(zip(*hashes, strict=False)):
        end = (block + 1) * block_size
        prefixes = [
            (tokens[:end], sorted(repr(key) for key in own if key[0] < end))
            for tokens, own in zip((one, two), keys, strict=True)
        ]
        assert (digests[0] == digests[1]) == (prefixes[0] == prefixes[1])


@given(tokens=TOKENS, block_size=BLOCK_SIZES)
def test_no_block_stands_for_two_positions(tokens, block_size):
    digests = compute_block_hashes(tokens, block_size, hasher=HASHER).digests
    assert len(set(digests)) == len(digests) == len(tokens) // block_size


REQUEST_KEYS = [
    {},
    {"cache_salt": "a"},
    {"cache_salt": b"a"},
    {"cache_salt": "b"},
    {"lora_id": "a"},
    {"lora_id": 1},
    {"lora_id": 2},
    {"multimodal_keys": [(0, "a")]},
    {"multimodal_keys": [(0, b"a")]},
]
BITS = st.lists(st.integers(0, 1), max_size=12)


def test_prompts_of_different_keys_take_over_nothing_from_each_other():
    tokens = [0, 1, 1, 0]
    for one, two in itertools.permutations(REQUEST_KEYS, 2):
        preparer = RequestPreparer(make_config(block_size_tokens=2, ssm_chunk_size=2))
        for number, keys in enumerate((one, two)):
            request = Request(request_id=number, prompt_tokens=tokens, **keys)
            expected = BlockHashChain(2, hasher=preparer._hasher, **keys)
            expected.append(tokens)
            assert preparer.read(request)[2].digests == expected.digests


@pytest.mark.parametrize("name", ["cache_salt", "lora_id"])
def test_a_key_that_is_no_key_is_refused_after_one_that_is_equal(name):
    preparer = RequestPreparer(make_config(block_size_tokens=2, ssm_chunk_size=2))
    preparer.read(Request(request_id=1, prompt_tokens=[1, 2], **{name: 1}))
    with pytest.raises(InvalidArgumentError, match="got True"):
        preparer.read(Request(request_id=2, prompt_tokens=[1, 2], **{name: True}))


@given(
    stem=BITS,
    rests=st.lists(st.tuples(BITS.filter(len), BITS, st.sampled_from(REQUEST_KEYS)), max_size=9),
    block_size=BLOCK_SIZES,
)
def test_a_prompt_is_hashed_as_alone_whatever_came_before_it(stem, rests, block_size):
    """Hashes of the common prefix come from the last prompt, whose answer may continue."""
    config = make_config(block_size_tokens=block_size, ssm_chunk_size=block_size)
    preparer = RequestPreparer(config)
    for number, (rest, answer, keys) in enumerate(rests):
        tokens = [*stem, *rest]
        _, read, chain = preparer.read(Request(request_id=number, prompt_tokens=tokens, **keys))
        expected = BlockHashChain(block_size, hasher=preparer._hasher, **keys)
        expected.append(tokens)
        assert read.tolist() == tokens
        assert (chain.digests, chain.num_tokens) == (expected.digests, len(tokens))
        for each in (chain, expected):
            each.append(answer)
        assert chain.digests == expected.digests
