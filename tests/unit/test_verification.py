"""Verified hits: differences found, entries removed, and no cost when turned off."""

import logging
from dataclasses import replace

import pytest
import torch
from clocks import ManualClock
from context_rig import BLOCK, MODEL, VOCAB, generate, make_config, make_context
from memory_store import MemoryStore
from tier_rig import always, make_tiered
from verification_rig import files_called, take, verify

from mamba_cache.cache.sequence import CachedSequence, MissReason, PrefixMatch
from mamba_cache.context import (
    DynamicInferenceContext,
    PrefixContent,
    Request,
    VerificationStats,
)
from mamba_cache.context.verification import (
    MAX_WAITING,
    RELATIVE_BOUNDS,
    HitVerifier,
    compare_prefixes,
)
from mamba_cache.errors import InvalidArgumentError, StepOrderError
from mamba_cache.reference.engine import compute_prefix
from mamba_cache.tiers import ModelIdentity, lower
from mamba_cache.tiers.entry import EntryKind

PROMPT = [token % VOCAB for token in range(3 * BLOCK + 3)]


def make_verified(**changes):
    """Return a context in which a request has hit two blocks, and the hit to verify."""
    context = make_context(make_config(verify_hits=1.0, **changes))
    generate(context, PROMPT, 1)
    generate(context, PROMPT, 1, request_id="hit")
    hit = take(context)
    assert hit is not None
    return context, hit


def computed(context, hit):
    return compute_prefix(MODEL, context, hit)


def blocks_of(context, hit):
    return context.kv_block_allocator.match_prefix(hit.hashes)


def test_a_clean_hit_differs_in_nothing():
    context, hit = make_verified()
    assert hit.request.request_id == "hit"
    assert list(hit.tokens) == PROMPT[: 3 * BLOCK]
    assert verify(context, hit) == []
    assert context.verification_stats() == VerificationStats(
        sampled=1, verified=1, differences={"state": 0, "kv": 0}
    )
    assert context.verify_pending(lambda hit: computed(context, hit)) == 0
    generate(context, PROMPT, 1)
    assert context.verify_pending(lambda hit: computed(context, hit)) == 1
    assert context.verification_stats().verified == 2


def test_a_corrupted_state_is_found_logged_and_removed(caplog):
    context, hit = make_verified()
    blocks = blocks_of(context, hit)
    slot = context.slot_allocator.get_slot(blocks[-1])
    context.slot_allocator.states["ssm"][1, slot, 0, 0, 0] += 1e-3
    with caplog.at_level(logging.ERROR, "mamba_cache.verification"):
        [difference] = verify(context, hit)
    assert (difference.block, difference.name, difference.layer) == (None, "ssm", 1)
    assert difference.relative > difference.limit
    assert context.verification_stats().differences == {"state": 1, "kv": 0}
    line = caplog.messages[0]
    assert "request='hit' kind=state" in line
    assert hit.hashes.digests[2].hex() in line
    assert "tensor=ssm layer=1 relative=" in line
    # Only the state is removed; the blocks are right.
    assert blocks_of(context, hit) == blocks
    assert not context.slot_allocator.has_state(blocks[-1])
    context.check_invariants()
    assert generate(context, PROMPT, 1)[2].skip_tokens < 3 * BLOCK


def test_values_that_are_not_numbers_differ():
    context, hit = make_verified()
    blocks = blocks_of(context, hit)
    slot = context.slot_allocator.get_slot(blocks[-1])
    context.slot_allocator.states["conv"][0, slot] = torch.nan
    context.kv_cache[0, 0, blocks[1:3], 0] = torch.inf
    found = [(difference.block, difference.name) for difference in verify(context, hit)]
    assert found == [(None, "conv"), (1, "keys"), (2, "keys")]
    assert context.verification_stats().differences == {"state": 1, "kv": 2}
    context.check_invariants()


def test_a_corrupted_entry_goes_from_the_host_tier_too():
    context = make_tiered(num_kv_blocks=100, max_slots=20, verify_hits=1.0)
    generate(context, PROMPT, 1)
    generate(context, PROMPT, 1)
    context.wait_for_tiers()
    hit = take(context)
    host, blocks = context.host_tier, blocks_of(context, hit)
    slot = context.slot_allocator.get_slot(blocks[-1])
    context.slot_allocator.states["ssm"][0, slot] += 1
    context.kv_cache[0, 0, blocks[0]] += 1
    assert hit.hashes.digests[2] in host[EntryKind.STATE]
    assert len(verify(context, hit)) == 2
    assert hit.hashes.digests[2] not in host[EntryKind.STATE]
    assert hit.hashes.digests[0] not in host[EntryKind.KV]
    assert hit.hashes.digests[1] in host[EntryKind.KV]
    context.check_invariants()
    assert not host[EntryKind.KV].remove(hit.hashes.digests[0])


@pytest.mark.parametrize("below", ["disk", "store"])
def test_a_corrupted_entry_goes_from_disk_and_store_too(tmp_path, monkeypatch, below):
    """Only the corrupted entry is removed, so that no process finds it."""
    monkeypatch.setattr(lower, "time", ManualClock())  # no call times out on a busy machine
    memory = MemoryStore()
    disk = {"disk_cache_path": str(tmp_path), "disk_cache_gb": 1.0}
    context = make_context(
        make_config(
            verify_hits=1.0, num_host_blocks=60, num_host_states=30, hash_secret=b"secret",
            write_on_use=1, **({"store": memory} if below == "store" else disk),
        ),
        load_planner=always(), identity=ModelIdentity(name="tiny", weights="7"),
    )  # fmt: skip
    generate(context, PROMPT, 1)
    generate(context, PROMPT, 1)
    context.wait_for_tiers()
    hit, tiering = take(context), context._tiering
    keys = [tiering.entries(hit.hashes, None).key(EntryKind.KV, index) for index in range(2)]
    tier = context.disk_tier or context.store_tier

    def found():
        if below == "disk":
            return tier.has_many(keys)
        return [str(key) in memory._blobs for key in keys]

    assert found() == [True, True]
    context.kv_cache[0, 0, blocks_of(context, hit)[1]] += 1
    assert len(verify(context, hit)) == 1
    context.wait_for_tiers()
    for digest in (hit.hashes.digests[1], b"\0" * 16):  # gone, or never cached
        tiering.remove(EntryKind.KV, None, digest)
    context.wait_for_tiers()
    assert found() == [True, False]
    tier.check_invariants()
    context.close()
    tiering.remove(EntryKind.KV, None, hit.hashes.digests[0])  # nothing is written after the close


def test_hits_whose_entries_are_gone_are_passed_over():
    context, hit = make_verified()
    generate(context, PROMPT, 1)
    generate(context, PROMPT, 1)
    context.slot_allocator.invalidate_block(blocks_of(context, hit)[-1])
    assert context.verify_pending(pytest.fail) == 2  # nothing is computed for them
    assert verify(context, hit) == []
    assert context.verification_stats().skipped == 3


def test_a_hit_of_which_a_shorter_one_is_left_is_passed_over():
    """The hit did not resume from the shorter prefix's state, which is right."""
    context, hit = make_verified()
    generate(context, PROMPT[: 2 * BLOCK + 1], 1, request_id="shorter")
    blocks = blocks_of(context, hit)
    context.kv_block_allocator.deregister_blocks(blocks[2:])
    assert context.slot_allocator.has_state(blocks[1])
    assert verify(context, hit) == []
    assert context.verification_stats().skipped == 1
    assert context.slot_allocator.has_state(blocks[1])


def test_hits_that_cannot_be_recomputed_are_counted():
    context, _ = make_verified()
    answers = iter([None, torch.OutOfMemoryError("too much")])

    def compute(_):
        answer = next(answers)
        if answer is not None:
            raise answer

    for _ in range(2):
        generate(context, PROMPT, 1)
    assert [context.verify_pending(compute, 1) for _ in range(3)] == [1, 1, 0]
    assert context.verification_stats().skipped == 2


def test_without_verification_nothing_is_done():
    context = make_context()
    assert context.verify_pending(pytest.fail) == 0
    assert context.verification_stats() == VerificationStats()


def test_a_part_of_the_hits_is_chosen():
    context = make_context()
    verifier = HitVerifier(
        0.25, context.kv_block_allocator, context.slot_allocator, block_size_tokens=BLOCK,
        read=pytest.fail, remove=pytest.fail,
    )  # fmt: skip
    request = Request(request_id=1, prompt_tokens=PROMPT)
    prepared = context.prepare(request)
    sequence = CachedSequence(request, prepared.tokens, prepared.chain)
    miss = PrefixMatch(len(PROMPT), (), 0, 0, MissReason.NO_KV_MATCH)
    hit = replace(miss, state_matched_blocks=1, skip_tokens=BLOCK, miss_reason=None)
    for _ in range(4000):
        verifier.admitted(sequence, hit)
        verifier.admitted(sequence, miss)
    assert 700 < verifier.stats().sampled < 1300


def test_hits_that_find_no_room_are_dropped_and_counted():
    context, _ = make_verified()
    for number in range(MAX_WAITING + 3):
        generate(context, PROMPT, 1, request_id=number)
    stats = context.verification_stats()
    assert (stats.waiting, stats.sampled) == (MAX_WAITING, MAX_WAITING + 4)
    assert stats.skipped == 3
    assert take(context).request.request_id == 3  # the oldest was dropped
    context.reset()
    assert context.verification_stats() == VerificationStats(differences={"state": 0, "kv": 0})


def test_misuse_is_refused():
    context, hit = make_verified()
    content = computed(context, hit)
    with pytest.raises(InvalidArgumentError, match="must have the tensors"):
        context._memory.verifier.judge(hit, PrefixContent({"conv": content.states["conv"]}))
    with pytest.raises(InvalidArgumentError, match="max_hits"):
        context.verify_pending(pytest.fail, 0)
    with pytest.raises(InvalidArgumentError, match="slot_quantization"):
        make_config(verify_hits=0.5, slot_quantization="int8")
    for rate in (-0.1, 1.1, True, "all"):
        with pytest.raises(InvalidArgumentError, match="verify_hits"):
            make_config(verify_hits=rate)
    generate_begun(context)
    with pytest.raises(StepOrderError):
        context.verify_pending(pytest.fail)


def generate_begun(context):
    context.add_request(Request(request_id="begun", prompt_tokens=PROMPT))
    context.begin_step()


@pytest.mark.parametrize("dtype", RELATIVE_BOUNDS)
def test_the_coarsest_dtype_sets_the_tolerance(dtype):
    bound, ones = RELATIVE_BOUNDS[dtype], torch.ones(1, 4, 2, dtype=torch.float64)
    kv = [torch.ones(8, 2, dtype=dtype)] * 2

    def differences(factor):
        saved = PrefixContent({"ssm": ones * (1 + factor * bound)}, kv)
        return compare_prefixes(saved, PrefixContent({"ssm": ones}, kv), block_size_tokens=4)

    assert differences(0) == differences(0.9) == []
    [difference] = differences(1.1)
    assert difference.limit == bound
    assert difference.relative == pytest.approx(1.1 * bound)


def test_a_difference_names_its_tensor_and_layer():
    kv = [torch.ones(8, 2)] * 4
    wrong = PrefixContent({}, [*kv[:2], 2 * kv[2], kv[3]])
    differences = compare_prefixes(wrong, PrefixContent({}, kv), block_size_tokens=8)
    assert [(each.name, each.layer) for each in differences] == [("keys", 1)]


def test_contexts_without_kv_compare_states_alone():
    config = make_config(verify_hits=1.0)
    context = DynamicInferenceContext(config, MODEL.config.state_spec(torch.float64))
    for name in "ab":
        context.add_request(Request(request_id=name, prompt_tokens=PROMPT))
        step = context.begin_step()
        saved, length = context.slot_allocator.states, len(PROMPT)
        for layer in range(2):
            chunks = torch.zeros(-(-length // 4), *saved["ssm"].shape[2:], dtype=torch.float64)
            inputs = torch.zeros(length, saved["conv"].shape[2], dtype=torch.float64)
            lengths = step.metadata.num_prefill_tokens
            context.extract_checkpoint_states(layer, chunks, inputs[:lengths], step.metadata)
        context.commit_step({name: 1})
        context.finish(name)
    hit = take(context)
    states = {name: t[:, 0] for name, t in context.live_states.tensors.items()}
    content = PrefixContent({name: torch.zeros_like(state) for name, state in states.items()})
    assert context._memory.verifier.judge(hit, content) == []


def test_it_costs_nothing_when_it_is_off():
    def files_of_a_hit(**changes):
        context = make_context(make_config(**changes))
        for _ in range(2):
            generate(context, PROMPT, 1)
        return files_called(lambda: generate(context, PROMPT, 1))

    assert "verification.py" not in files_of_a_hit()
    assert "verification.py" in files_of_a_hit(verify_hits=1.0)
