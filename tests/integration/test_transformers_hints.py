"""Prompts and continuation hints that ``PrefixCache`` passes to the log and the slot policy."""

import json

import numpy as np
import pytest
import torch
from batch_rig import batch, subject, tokens
from drawn_traces import draw_agents, draw_conversations, draw_mixed
from prefix_replay import replay, turns_of
from slot_rig import Listening
from transformers_rig import BLOCK, budgets, cached, make_cache, text

from mamba_cache.cache import AdaptiveSlotPolicy, BlockHashChain
from mamba_cache.cli.replay import run_replay
from mamba_cache.cli.traces import read_trace
from mamba_cache.integrations.trace import TraceLog

SHORT = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}


def test_hints_are_logged_with_their_prompts(nemotron, generator, tmp_path):
    path = tmp_path / "requests.jsonl"
    prompts = [tokens(generator, BLOCK + 1) for _ in range(3)]
    with nemotron.cache() as cache, TraceLog(path) as log:
        cache.listeners.add(log)
        cache.generate([prompts[0]], will_continue=True, source="a", **SHORT)
        cache.generate([prompts[1]], **SHORT)
        cache.generate(prompts, will_continue=False, **SHORT)
        batch(cache, prompts, will_continue=[True, None, False], source="a")
        batch(cache, prompts[:1], will_continue=False)
    hints = [request.will_continue for request in read_trace(path)]
    assert hints == [True, None, False, False, False, True, None, False, False]


def test_the_policy_receives_prompts_and_hints_from_both(nemotron, generator):
    policy = Listening()
    cache, prompt = nemotron.cache(slot_policy=policy), tokens(generator, 2 * BLOCK + 3)
    cache.prepare_batches()
    policy.requests.clear()  # drop the requests of the preparation
    cache.generate([prompt], will_continue=True, source="a", **SHORT)
    batch(cache, [[*prompt, 5]], will_continue=False, source="b")
    cache.check_invariants()
    alone, batched = policy.requests
    assert alone.block_size_tokens == batched.block_size_tokens == BLOCK
    assert batched.hash_ids == alone.hash_ids
    assert [facts.num_usable_blocks for facts in (alone, batched)] == [2, 2]
    assert (alone.will_continue, alone.source) == (True, "a")
    assert (batched.will_continue, batched.source) == (False, "b")
    # The same candidate stands for the state at the first prompt's last boundary.
    node = policy._tree._by_hash[alone.hash_ids[-1]]
    assert policy._tree._last_use_at[node] == policy._tree._clock
    cache.generate([prompt[:BLOCK]], checkpoints=[BLOCK], **SHORT)
    assert policy.proposed[-1].num_blocks == 1


@pytest.mark.parametrize("count", [3, BLOCK + 2])
def test_an_answer_of_a_batch_is_a_candidate_that_its_next_turn_uses(nemotron, generator, count):
    one, policy = subject("granite 4"), AdaptiveSlotPolicy()
    cache, prompt = one.cache(slot_policy=policy), tokens(generator, 2 * BLOCK - 2)
    [answer] = [output.generated_tokens for output in batch(cache, [prompt], max_new_tokens=count)]
    cache.check_invariants()
    depth = (len(prompt) + count - 1) // BLOCK * BLOCK
    turn = [*prompt, *answer, 5]
    tree = policy._tree
    node = tree._by_hash[_chain(cache, turn).hashes[depth // BLOCK - 1]]
    assert tree.num_kept_at[node]
    assert tree._last_use_at[node] < tree._clock + 1
    batch(cache, [turn])
    assert tree._last_use_at[node] == tree._clock
    cache.check_invariants()


def _chain(cache, tokens):
    key = cache._store.tiers.key_for(cache._runner.fingerprint.key)
    chain = BlockHashChain(BLOCK, hasher=cache._store.hasher, lora_id=key)
    chain.append(tokens)
    return chain


def test_what_is_refused_is_not_copied(nemotron, generator, monkeypatch):
    """States of one-time prompts are worth less than those of a prompt that comes repeatedly."""
    room = budgets(nemotron.cache(), slots=1, blocks=200)
    cache = nemotron.cache(**room, slot_policy="adaptive")
    copies, save = [], cache._store.tensors.save_state
    monkeypatch.setattr(
        cache._store.tensors, "save_state", lambda *args: (copies.append(1), save(*args))
    )
    prompt, counts = tokens(generator, 3 * BLOCK), []
    for number in range(12):
        for one in ([*prompt, 5 + number], tokens(generator, BLOCK)):
            assert cache.generate([one], **SHORT)[0, len(one) :].tolist() == nemotron.answer(one, 2)
        stats = cache.stats()
        assert len(copies) <= stats.saved_states  # states captured inside a prompt need no copy
        counts.append((len(copies), stats.refused_states, stats.skipped_tokens))
    cache.check_invariants()
    assert counts[-1][1] > 0
    assert counts[-1][0] + counts[-1][1] <= 2 * 24


def test_over_tiers_nothing_is_refused(nemotron, generator):
    """A refused state would be missing in host memory too."""
    room = budgets(nemotron.cache(), slots=2, blocks=200)
    with nemotron.cache(**room, host_cache_gb=0.01, slot_policy="adaptive") as cache:
        prompts = [tokens(generator, BLOCK + 3) for _ in range(8)]
        for prompt in prompts[:4]:
            cache.generate([prompt], **SHORT)
        batch(cache, prompts[4:])
        assert cache.stats().refused_states == 0
        cache.check_invariants()


@pytest.mark.parametrize("drawn", [draw_agents, draw_conversations, draw_mixed])
def test_replays_hit_no_less_than_what_was_used_last(drawn):
    layout = subject("nemotron_h").cache()._store.layout
    turns = turns_of(drawn(150, seed=3))
    found = {
        policy: replay(layout, turns, policy, slots=25)["token_hit_rate"]
        for policy in ("lru", "adaptive")
    }
    assert found["adaptive"] >= found["lru"] - 0.005


def test_kv_blocks_go_by_the_worth_of_their_states(generator):
    """Under LRU, one-time prompts evicted the blocks of a prompt that came every sixth time."""
    layout = subject("nemotron_h").cache()._store.layout

    def drawn(length):
        return np.array(tokens(generator, length), np.int32)

    shared, answer = drawn(10 * BLOCK + 3), drawn(2)
    turns = []
    for _ in range(20):
        turns += [(np.append(shared, drawn(2)), answer)]
        turns += [(drawn(4 * BLOCK + 3), answer) for _ in range(5)]
    found = {
        policy: replay(layout, turns, policy, slots=20, blocks=20)["token_hit_rate"]
        for policy in ("lru", "adaptive")
    }
    assert found["lru"] == 0
    assert found["adaptive"] > 0.2


def test_prompts_of_generate_and_of_batches_are_logged(model, generator, tmp_path) -> None:
    path = tmp_path / "requests.jsonl"
    head = text(generator, 3 * BLOCK + 1)
    with make_cache(model) as cache, TraceLog(path) as log:
        cache.listeners.add(log)
        cached(cache, head)
        cached(cache, head[:, :-1], cache_salt="a user")
        cache.generate_batch([head[0].tolist()], max_new_tokens=2, do_sample=False)
    first, salted, batched = read_trace(path)
    assert first.block_size == BLOCK
    assert first.input_length == batched.input_length == 3 * BLOCK + 1
    assert first.hash_ids == batched.hash_ids
    assert not set(first.hash_ids) & set(salted.hash_ids)
    assert (first.tenant, salted.tenant is None) == (None, False)
    content = path.read_text(encoding="utf-8")
    assert "a user" not in content
    assert json.loads(content.splitlines()[0])["block_size_tokens"] == BLOCK
    [record] = run_replay(read_trace(path), slots=[None], policies=["lru"])["records"]
    assert record["skipped_tokens"] == 3 * BLOCK


def test_a_prompt_that_is_computed_anew_in_smaller_pieces_is_logged_once(
    model, generator, tmp_path, monkeypatch
) -> None:
    path = tmp_path / "requests.jsonl"
    with make_cache(model, segment_tokens=None) as cache, TraceLog(path) as log:
        cache.listeners.add(log)
        forward, failures = cache._runner.forward, [torch.OutOfMemoryError()]

        def fail_once(*args):
            if failures:
                raise failures.pop()
            return forward(*args)

        monkeypatch.setattr(cache._runner, "forward", fail_once)
        cache.prefill(text(generator, 4 * BLOCK))
        assert not failures
        assert cache.stats().requests == 1
    [only] = read_trace(path)
    assert len(only.hash_ids) == 4
