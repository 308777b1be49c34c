"""The log of prompts that a prefix cache of transformers writes."""

import json

import pytest
import torch
from transformers_rig import BLOCK, cached, make_cache, make_model, text

from mamba_cache.cli.replay import run_replay
from mamba_cache.cli.traces import read_trace
from mamba_cache.integrations.trace import TraceLog

FAMILY = "granite 4"


@pytest.fixture(scope="module")
def model():
    return make_model(FAMILY)


def test_prompts_of_generate_and_of_batches_are_logged(model, generator, tmp_path) -> None:
    path = tmp_path / "requests.jsonl"
    head = text(generator, 3 * BLOCK + 1)
    with make_cache(model) as cache, TraceLog(path) as log:
        cache.listeners.add(log)
        cached(cache, head)
        cached(cache, head[:, :-1], cache_salt="somebody")
        cache.generate_batch([head[0].tolist()], max_new_tokens=2, do_sample=False)
    first, salted, batched = read_trace(path)
    assert first.block_size == BLOCK
    assert first.input_length == batched.input_length == 3 * BLOCK + 1
    assert first.hash_ids == batched.hash_ids
    assert not set(first.hash_ids) & set(salted.hash_ids)
    assert (first.tenant, salted.tenant is None) == (None, False)
    content = path.read_text(encoding="utf-8")
    assert "somebody" not in content
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
