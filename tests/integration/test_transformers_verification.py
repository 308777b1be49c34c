"""Verified hits of a prefix cache, and the log about them."""

import pytest
import torch
from batch_rig import subject, tokens
from transformers_rig import BLOCK, cached, join, make_cache, make_model, text
from verification_rig import files_called

from mamba_cache.context import VerificationStats
from mamba_cache.errors import ModelChangedError

CLEAN = {"state": 0, "kv": 0}


def make_verified(name="granite 4", dtype=torch.float32, **settings):
    model = make_model(name).to(dtype)
    return make_cache(model, verify_hits=1.0, **settings)


def find(cache, hit):
    return cache._store.verifier.find(hit)


def converse(cache, generator):
    """Run two turns, a branch, and a repeated prompt; return the last prompt."""
    system = text(generator, 2 * BLOCK + 3)
    first = join(system, text(generator, BLOCK))
    answer = cached(cache, first).sequences
    for prompt in (
        join(answer, text(generator, 3)),
        join(system, text(generator, 2 * BLOCK)),
        join(system, text(generator, BLOCK + 1)),
        first,
    ):
        cached(cache, prompt)
    return first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["nemotron_h", "granite 4", "qwen3_next", "lfm2", "kimi_linear"])
def test_clean_hits_differ_in_nothing(name, dtype, generator):
    cache = make_verified(name, dtype)
    for _ in range(2):
        converse(cache, generator)
    waiting, hits = cache.verification_stats().waiting, cache.stats().hits
    assert waiting == hits > 4
    assert cache.verify_pending() == hits
    stats = cache.verification_stats()
    assert stats.differences == CLEAN
    assert (stats.verified, stats.skipped) == (hits, 0)
    cache.check_invariants()
    assert cache.verify_pending() == 0


@pytest.mark.parametrize("block", [None, 0, 2], ids=["state", "first block", "last block"])
def test_what_is_corrupted_is_found_and_removed(generator, block):
    cache = make_verified(host_cache_gb=0.01)
    prompt = text(generator, 3 * BLOCK + 2)
    cached(cache, prompt)
    cached(cache, join(prompt, text(generator, 4)))
    hit = cache._store.verifier.take()
    blocks, slot = find(cache, hit)
    if block is None:
        kind = "state"
        cache._store.tensors.room(slot, 0).states[-1][0, 0, 0, 0] += 0.01
    else:
        kind = "kv"
        cache._store.tensors.blocks[0][1, blocks[block], 0] += 0.01
    cache._store.verifier._waiting.append(hit)
    [before] = cache.tier_stats()
    assert cache.verify_pending() == 1
    assert cache.verification_stats().differences == {**CLEAN, kind: 1}
    [after] = cache.tier_stats()
    assert after.entries[kind] == before.entries[kind] - 1
    cache.check_invariants()
    assert find(cache, hit) is None


@pytest.mark.parametrize("salt", [None, "a"])
def test_what_is_wrong_of_a_salted_prompt_is_removed_from_the_disk_too(generator, salt, tmp_path):
    settings = {"host_cache_gb": 0.01, "disk_cache_path": tmp_path, "disk_cache_gb": 0.05}
    prompt = text(generator, 3 * BLOCK + 2)
    with make_verified(**settings) as cache:
        for ids in (prompt, join(prompt, text(generator, 4))):
            cached(cache, ids, cache_salt=salt)
        hit = cache._store.verifier.take()
        _, slot = find(cache, hit)
        cache._store.tensors.room(slot, 0).states[-1][0, 0, 0, 0] += 0.01
        cache._store.verifier._waiting.append(hit)
        cache._store.tiers.flush()
        before = cache.tier_stats()[1].entries["state"]
        assert cache.verify_pending() == 1
        cache._store.tiers.flush()
        assert cache.tier_stats()[1].entries["state"] == before - 1


def test_hits_of_batches_over_tiers_are_verified_and_removed_below_too(generator):
    own = subject("granite 4")
    cache = own.cache(verify_hits=1.0, host_cache_gb=0.01)
    prompt, greedy = tokens(generator, 3 * BLOCK), own.config(max_new_tokens=2)
    for _ in range(2):
        cache.generate_batch([[*prompt, 4]], greedy)
    assert cache.verify_pending() == 1
    assert cache.verification_stats() == VerificationStats(1, 1, 0, CLEAN)
    cache._batcher.context.kv_cache[0, 0, :, 3] += 0.01
    cache.generate_batch([[*prompt, 5]], greedy)
    [before] = cache.tier_stats()
    assert cache.verify_pending() == 1
    assert cache.verification_stats().differences == {"state": 0, "kv": 3}
    [after] = cache.tier_stats()
    assert after.entries["kv"] == before.entries["kv"] - 3
    cache.check_invariants()


def test_hits_under_other_settings_and_weights(generator):
    cache = make_verified()
    prompt = text(generator, 3 * BLOCK)
    for _ in range(2):
        cached(cache, prompt)
    cache._runner.model.model.note = 1
    assert cache.verify_pending() == 1
    del cache._runner.model.model.note
    assert cache.verification_stats().skipped == 1
    cached(cache, prompt)
    with torch.no_grad():
        next(cache._runner.model.parameters()).mul_(2)
    with pytest.raises(ModelChangedError):
        cache.verify_pending()
    assert cache.verification_stats().differences == CLEAN
    cache.reset()
    assert cache.verification_stats() == VerificationStats(differences=CLEAN)


def test_it_costs_nothing_when_it_is_off(generator):
    def files_of_a_hit(**settings):
        cache, prompt = make_cache(make_model("granite 4"), **settings), text(generator, 3 * BLOCK)
        cached(cache, prompt)
        return files_called(lambda: cached(cache, prompt))

    assert "verification.py" not in files_of_a_hit()
    assert "verification.py" in files_of_a_hit(verify_hits=1.0)
