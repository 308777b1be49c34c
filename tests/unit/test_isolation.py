"""No request ever sees what another tenant's request, or another step, left behind."""

import pytest
from context_rig import (
    BLOCK,
    add,
    assert_same_run,
    generate,
    make_config,
    make_context,
    prepared,
)
from fingerprints import fingerprint

from mamba_cache import BlockHasher, Request, compute_block_hashes
from mamba_cache.cache import EveryNthBlock
from mamba_cache.errors import StepOrderError

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
OTHER = [(5 * i + 1) % 13 for i in range(3 * BLOCK + 2)]
KEYS = [
    {"cache_salt": "a"}, {"cache_salt": b"a"}, {"cache_salt": "b"},
    {"lora_id": 1}, {"lora_id": "1"},
    {"multimodal_keys": [(0, "cat")]}, {"multimodal_keys": [(0, "dog")]},
    {"multimodal_keys": [(1, "cat")]}, {"cache_salt": "a", "lora_id": 1}, {},
]  # fmt: skip


@pytest.mark.parametrize("algorithm", ["blake2b", "sha256", "xxh3_128"])
def test_tenants_adapters_and_images_share_nothing(algorithm):
    """Removed to see it fail: each of salt, LoRA id and multimodal keys in ``BlockHasher``."""
    context = make_context(make_config(hash_algorithm=algorithm))
    for options in KEYS:
        run = generate(context, PROMPT, 2, **options)
        assert run[2].kv_matched_blocks == run[2].skip_tokens == 0, options
        assert_same_run(run, PROMPT)
    for options in KEYS:
        assert generate(context, PROMPT, 1, **options)[2].skip_tokens == 3 * BLOCK, options


@pytest.mark.parametrize("algorithm", ["blake2b", "sha256", "xxh3_128"])
def test_hashes_are_made_with_the_algorithm_and_secret_of_the_settings(algorithm):
    secret = b"known to the ranks of one model"
    context = make_context(make_config(hash_algorithm=algorithm, hash_secret=secret))
    hasher = BlockHasher(algorithm, secret)
    assert prepared(context, PROMPT).hashes == compute_block_hashes(PROMPT, BLOCK, hasher=hasher)


@pytest.mark.parametrize("num_ids", [1, 3])
def test_forced_collisions_of_ids_serve_nothing_foreign(monkeypatch, num_ids):
    """Removed to see it fail: the comparison of digests in ``KVBlockAllocator.match_prefix``."""
    monkeypatch.setattr("mamba_cache.cache.hashing._ID_MASK", num_ids)
    context = make_context(placement=EveryNthBlock(1))
    for salt in ("a", "b", "a"):
        for prompt in (PROMPT, OTHER, PROMPT[: BLOCK + 1]):
            assert_same_run(generate(context, prompt, 3, cache_salt=salt), prompt)
            context.check_invariants()
    assert context.stats().hash_collisions > 0
    assert context.stats().cached_blocks <= num_ids


def test_a_hash_of_few_values_never_serves_another_tenant(monkeypatch):
    """Tokens collide here, digests and all; what a tenant cannot choose still keeps it apart."""
    monkeypatch.setattr(
        BlockHasher, "__init__", _few_digests(BlockHasher.__init__, num_bytes_read=16)
    )
    context = make_context()
    generate(context, PROMPT, 1, cache_salt="a")
    foreign = Request(request_id="x", prompt_tokens=PROMPT, cache_salt="b")
    assert context.match(foreign).kv_matched_blocks == 0


def _few_digests(init, num_bytes_read):
    def patched(self, *args, **kwargs):
        init(self, *args, **kwargs)
        digest = self.digest
        self.digest = lambda data: digest(data[:num_bytes_read])

    return patched


def test_slots_are_not_reset_under_a_step():
    """The step would write into slots that are somebody else's by then."""
    context = make_context()
    generate(context, OTHER, 1)
    add(context, "x", PROMPT)
    context.begin_step()
    before = fingerprint(context)
    with pytest.raises(StepOrderError, match="in flight"):
        context.slot_allocator.reset()
    assert fingerprint(context) == before
    context.check_invariants()
    context.abort_step()
    context.slot_allocator.reset()
    context.check_invariants()
    assert context.stats().cached_slots == 0


def test_reset_zeroes_states():
    context = make_context()
    generate(context, PROMPT, 1)
    slots = context.slot_allocator
    assert slots.conv_states.any()
    context.reset()
    assert not slots.conv_states.any()
    assert not slots.ssm_states.any()
