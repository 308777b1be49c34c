"""The contracts of the cache, one by one, and faults of other systems that must not occur here."""

import numpy as np
import pytest
import torch
from context_rig import (
    BLOCK,
    MODEL,
    add,
    assert_same_run,
    generate,
    make_config,
    make_context,
    prepared,
    refused,
    run_step,
    saved_prefix_lengths,
    uncached,
)

from mamba_cache import BlockHasher, Request, compute_block_hashes
from mamba_cache.cache import EveryNthBlock
from mamba_cache.context import MissReason
from mamba_cache.errors import BlockCapacityError

PROMPT = [(5 * i * i + i) % 13 for i in range(3 * BLOCK + 2)]


def test_nothing_is_findable_before_commit():
    """vLLM 56525, 57580: a hash published at scheduling let a retry read an unwritten block."""
    context = make_context()
    add(context, "first", PROMPT)
    MODEL.forward(context.begin_step().metadata, context)
    assert context.match(prepared(context, PROMPT)).kv_matched_blocks == 0
    assert context.abort_step() == ("first",)
    admission = add(context, "retry", PROMPT)
    assert admission.kv_matched_blocks == 0
    assert admission.miss_reason is MissReason.NO_KV_MATCH
    assert context.slot_allocator.num_reserved_slots == 1  # the retry's own checkpoint
    context.check_invariants()


def test_requests_of_one_step_do_not_read_each_other():
    """vLLM 29387: the second of two requests read a state computed in the same step.

    The blocks of the second request stay private, and so do its states.
    """
    context = make_context(placement=EveryNthBlock(1))
    for name in ("a", "b"):
        assert add(context, name, PROMPT).kv_matched_blocks == 0
    sampled = run_step(context)
    _, wanted = uncached(PROMPT, 1)
    for name in ("a", "b"):  # rows of one product may be summed in different orders
        torch.testing.assert_close(sampled[name][0], wanted[0], rtol=0, atol=1e-9)
    # Of the two copies of each block, one is findable; the state was saved once, beside it.
    assert saved_prefix_lengths(context, PROMPT) == [1, 2, 3]
    slots, hashes = context.slot_allocator, context.kv_block_allocator.block_hashes
    housed = slots.slot_to_block[slots.slot_to_block >= 0]
    assert len(housed) == slots.num_cached_slots == 3
    assert (hashes[housed.long()] >= 0).all()
    context.check_invariants()
    for name in ("a", "b"):
        context.finish(name)
    assert generate(context, PROMPT, 2)[2].skip_tokens == 3 * BLOCK


def test_a_lost_state_is_planned_again():
    """Megatron: the slot was gone when the restore came, and the live state was left zero."""
    context = make_context(placement=EveryNthBlock(1))
    generate(context, PROMPT, 1)
    assert add(context, "hit", PROMPT).state_matched_blocks == 3
    block = context.kv_block_allocator.match_prefix(prepared(context, PROMPT).hashes)[2]
    context.slot_allocator.invalidate_block(block)
    step = context.begin_step()
    assert step.requests[0].skip_tokens == 2 * BLOCK
    assert step.requests[0].num_tokens == 2  # as many as planned, from an earlier boundary
    context.check_invariants()
    context.commit_step({})
    stats = context.stats()  # the request counts by its final plan
    assert (stats.hits, stats.misses) == (1, {"no_kv_match": 1})
    assert (stats.state_matched_blocks, stats.skipped_tokens) == (2, 2 * BLOCK)
    context.check_invariants()


def test_full_pool_is_not_an_error():
    """SGLang 36770, 40128: an assertion failed when every state was locked."""
    context = make_context(make_config(max_slots=0))
    assert_same_run(generate(context, PROMPT, 10), PROMPT)
    assert context.stats().skipped_checkpoints > 0
    assert generate(context, PROMPT, 2)[2].miss_reason is MissReason.NO_STATE


def test_shared_blocks_are_not_written_again():
    """Tokens between the state and the end of the KV match are computed, but not stored."""
    context, prompt = make_context(), PROMPT[: 3 * BLOCK]
    generate(context, prompt, 1)
    block = context.kv_block_allocator.match_prefix(prepared(context, prompt).hashes)[2]
    before = context.kv_cache[:, :, block].clone()
    add(context, "again", prompt)
    step = context.begin_step()
    assert (step.metadata.kv_slot_mapping[: step.metadata.num_tokens] == -1).all()
    context.kv_cache[:, :, context.kv_block_allocator.dummy_block_id] = torch.nan
    MODEL.forward(step.metadata, context)
    context.commit_step({"again": 0})
    assert torch.equal(context.kv_cache[:, :, block], before)


def pinned_slots(context):
    pool = context.slot_allocator
    return [slot for slot in np.flatnonzero(pool.pin_counts) if slot not in pool.reserved]


def test_admission_failure_releases_everything():
    """SGLang 16067, 20182: a slot taken at match time leaked when the admission failed."""
    context = make_context(make_config(num_kv_blocks=6))
    generate(context, PROMPT, 1)
    add(context, "holder", [9] * (2 * BLOCK))
    for _ in range(3):
        with refused(context, BlockCapacityError):
            add(context, "too-long", PROMPT + [0] * (3 * BLOCK))
    assert not pinned_slots(context)


def test_too_few_blocks_for_a_later_chunk_name_its_request():
    context = make_context(make_config(num_kv_blocks=6))
    add(context, "a", PROMPT, chunk_tokens=BLOCK)
    run_step(context)
    add(context, "holder", [9] * (3 * BLOCK))
    with refused(context, BlockCapacityError, f"for request 'a', of up to {len(PROMPT)} tokens"):
        context.schedule_prefill("a")


@pytest.mark.parametrize(("count", "others"), [(8, ""), (9, " and others")])
def test_too_few_blocks_for_a_step_name_eight_requests(count, others):
    context = make_context(make_config(num_kv_blocks=count + 1, max_requests=count))
    for name in range(count):
        add(context, name, [name] * BLOCK)
    run_step(context)
    with refused(context, BlockCapacityError, f"for request 0, 1, 2, 3, 4, 5, 6, 7{others}, of"):
        context.begin_step()


OTHER = [(5 * i + 1) % 13 for i in range(3 * BLOCK + 2)]


KEYS = [
    {"cache_salt": "a"}, {"cache_salt": b"a"}, {"cache_salt": "b"},
    {"lora_id": 1}, {"lora_id": "1"},
    {"multimodal_keys": [(0, "cat")]}, {"multimodal_keys": [(0, "dog")]},
    {"multimodal_keys": [(1, "cat")]}, {"cache_salt": "a", "lora_id": 1}, {},
]  # fmt: skip


@pytest.mark.parametrize("algorithm", ["blake2b", "sha256", "xxh3_128"])
def test_tenants_adapters_and_images_share_nothing(algorithm):
    """Fails if salt, LoRA id or multimodal keys are removed from ``BlockHasher``."""
    secret = b"known to the ranks of one model"
    context = make_context(make_config(hash_algorithm=algorithm, hash_secret=secret))
    hasher = BlockHasher(algorithm, secret)
    assert prepared(context, PROMPT).hashes == compute_block_hashes(PROMPT, BLOCK, hasher=hasher)
    for options in KEYS:
        run = generate(context, PROMPT, 2, **options)
        assert run[2].kv_matched_blocks == run[2].skip_tokens == 0, options
        assert_same_run(run, PROMPT)
    for options in KEYS:
        assert generate(context, PROMPT, 1, **options)[2].skip_tokens == 3 * BLOCK, options


def test_a_hash_of_few_values_never_serves_another_tenant(monkeypatch):
    """Digests of tokens collide here; the salt, which no client chooses, separates tenants."""
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
        start = self.start
        self.start = lambda: _ShortSighted(start(), num_bytes_read)

    return patched


class _ShortSighted:
    def __init__(self, state, num_bytes_read):
        self.digest = state.digest
        self.update = lambda data: state.update(data[:num_bytes_read])


def test_blocks_behind_a_removed_block_stay_private_and_their_slots_are_freed():
    context = make_context(placement=EveryNthBlock(1))
    add(context, "a", PROMPT, chunk_tokens=BLOCK)
    run_step(context)
    assert saved_prefix_lengths(context, PROMPT) == [1]
    context.kv_block_allocator.deregister_blocks([context.request_table.block_tables[0, 0]])
    context.schedule_prefill("a")
    run_step(context)
    slots = context.slot_allocator
    assert saved_prefix_lengths(context, PROMPT) == []
    assert (slots.num_cached_slots, slots.num_reserved_slots) == (0, 0)
    context.check_invariants()
