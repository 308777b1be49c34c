"""Batches of requests that come and go: each request gets the answer that it gets alone."""

import gc
import threading
import weakref
from functools import partial
from itertools import product

import pytest
import torch
from batch_rig import SERVED, answer, answers, batch, subject, tokens
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers_rig import BLOCK, budgets, make_cache, make_model, skipped

from mamba_cache.errors import (
    InvalidArgumentError,
    ModelChangedError,
    SequenceLengthError,
    UnresumableModelError,
)
from mamba_cache.integrations.transformers.batching.batcher import Batcher
from mamba_cache.integrations.transformers.batching.kernels import paged_attention_torch
from mamba_cache.integrations.transformers.batching.paged import PagedAttention

pytestmark = pytest.mark.usefixtures("either_way")

FEW = ("nemotron_h", "qwen3_5", "mamba2")
"""Families of three kinds of states; tests/property/test_conversations.py takes all."""

ONLY_THE_LIKELIEST = {"do_sample": True, "top_k": 1}
"""Sampling, which transformers needs for several answers to a prompt, as greedy as possible."""


@pytest.fixture
def cache(nemotron):
    return nemotron.cache()


def alike(generator, *lengths, stem=3 * BLOCK):
    """Prompts that begin alike, with tails of these lengths."""
    shared = tokens(generator, stem)
    return [shared + tokens(generator, length) for length in lengths]


@pytest.mark.parametrize("name", SERVED)
def test_each_prompt_of_a_batch_is_answered_as_alone(name, generator):
    """Covers hits, rectangles, chunks and mixed lengths; the second run hits the cache."""
    one = subject(name)
    cache = one.cache()
    prompts = [*alike(generator, 5, 9, 9, 1, 45), *(tokens(generator, n) for n in (3, 1, 17))]
    expected = [one.answer(prompt, 6) for prompt in prompts]
    assert answers(batch(cache, prompts)) == expected
    first, skipped = cache.batch_stats(), cache.stats().skipped_tokens
    assert answers(batch(cache, prompts)) == expected
    second = cache.batch_stats()
    assert skipped >= 4 * 3 * BLOCK  # one request computed the stem, four waited for it
    assert first.rectangles >= 1
    assert second.prefill_tokens - first.prefill_tokens < 8 * (BLOCK + 1)
    assert cache.stats().unwritten_states == 0
    forks = batch(cache, prompts[:2], num_return_sequences=3, **ONLY_THE_LIKELIEST)
    assert answers(forks) == [answer for answer in expected[:2] for _ in range(3)]
    assert cache.stats().forks == 4


@pytest.mark.parametrize("name", FEW)
def test_requests_that_are_preempted_go_on_as_before(name, generator):
    one = subject(name)
    room = budgets(one.cache(), slots=16, blocks=17)
    if name == "mamba2":  # without attention no block is ever short
        room["kv_cache_gb"] = 0.01
    cache = one.cache(**room)
    prompts = [tokens(generator, n) for n in (3 * BLOCK + 5, 2 * BLOCK + 1, 30, 25, 7)]
    expected = [one.answer(prompt, 20) for prompt in prompts]
    assert answers(batch(cache, prompts, max_new_tokens=20)) == expected
    assert (cache.stats().preemptions > 0) is (name != "mamba2")


def test_what_is_returned(cache, nemotron, generator):
    prompts = [tokens(generator, 5), tokens(generator, 9)]
    options = {"num_return_sequences": 2, "max_new_tokens": 3, "eos_token_id": None}
    returned = cache.generate_batch(prompts, **options, **ONLY_THE_LIKELIEST)
    ids = ["req_0__child#0", "req_0", "req_1__child#0", "req_1"]
    assert list(returned) == [output.request_id for output in returned.values()] == ids
    for output, prompt in zip(
        returned.values(), [p for p in prompts for _ in range(2)], strict=True
    ):
        assert isinstance(output, GenerationOutput)
        assert output.prompt_ids == prompt
        assert output.status == RequestStatus.FINISHED
        assert output.error is None
        assert output.is_finished()
        assert output.timestamps is None
        assert output.created_time <= output.lifespan[0] <= output.lifespan[1]
    # Without an end token: a random model draws it now and then.
    stamped = cache.generate_batch(
        prompts, max_new_tokens=3, eos_token_id=None, record_timestamps=True
    )
    assert [len(output.timestamps) for output in stamped.values()] == [3, 3]
    assert cache.generate_batch([]) == {}


def test_a_request_that_does_not_fit_fails_and_the_others_go_on(nemotron, generator):
    room = budgets(nemotron.cache(), slots=16, blocks=6)
    cache = nemotron.cache(**room)
    prompts = [tokens(generator, 5), tokens(generator, 4 * BLOCK), tokens(generator, 6)]
    outputs = batch(cache, prompts, max_new_tokens=20)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert outputs[1].status == RequestStatus.FAILED
    assert outputs[1].error.endswith("the longest sequence is 48 tokens")
    assert outputs[1].generated_tokens == nemotron.answer(prompts[1], 17)
    assert outputs[0].generated_tokens == nemotron.answer(prompts[0], 20)
    assert outputs[2].generated_tokens == nemotron.answer(prompts[2], 20)
    with pytest.raises(SequenceLengthError, match=r"'req_1' has 49 .* max_sequence_length is 48"):
        cache.generate_batch([[5, 6], tokens(generator, 49)])
    cache.check_invariants()


def test_prompts_of_different_salts_share_nothing(cache, generator):
    prompt = tokens(generator, 4 * BLOCK)
    batch(cache, [prompt], cache_salt="a")
    batch(cache, [prompt, prompt], cache_salt=["b", "c"])
    assert cache.stats().skipped_tokens == 0
    batch(cache, [prompt], cache_salt="b")
    assert cache.stats().skipped_tokens > 0


@pytest.mark.parametrize("way", ["either_way", "ahead"])
def test_those_that_are_left_are_a_smaller_batch(nemotron, generator, request, way):
    """Requests in high rows move down when the others have ended."""
    request.getfixturevalue(way)
    cache = nemotron.cache(max_requests=8)
    prompts = [tokens(generator, 5) for _ in range(8)]
    lengths = [4, 5, 6, 7, 4, 20, 4, 3 * BLOCK]
    configs = [nemotron.config(max_new_tokens=length) for length in lengths]
    sizes = []
    compute = cache.generate_batch([[5]], max_new_tokens=1) and cache._batcher._forwards.decode
    cache._batcher._forwards.decode = lambda size: sizes.append(size) or compute(size)
    outputs = batch(cache, prompts, generation_config=configs)
    expected = [nemotron.answer(p, n) for p, n in zip(prompts, lengths, strict=True)]
    assert answers(outputs) == expected
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (8, 1)
    assert sizes.count(2) >= 10
    assert cache.batch_stats().moves >= 2


def test_rows_without_a_request_write_to_the_dummy_block_only(nemotron, generator):
    """A decode step changes only the keys and values of the tokens that it computes."""
    cache = nemotron.cache()
    batch(cache, [tokens(generator, 5)])
    batcher, written = cache._batcher, []
    context, compute = batcher.context, batcher._forwards.decode
    pool = context.kv_cache.flatten(2, 3)
    dummy = context.kv_block_allocator.dummy_block_id

    def watched(size):
        metadata = context.step_buffers.tensors
        decoding = int((metadata["decode_state_rows"][:, 0] >= 0).sum())
        own = metadata["kv_slot_mapping"][:decoding].tolist()
        before, live = pool.clone(), context.live_states.tensors
        beyond = {name: tensor[:, size:].clone() for name, tensor in live.items()}
        logits = compute(size)
        changed = (pool != before).flatten(3).any(-1).flatten(0, 1).any(0).nonzero().flatten()
        assert {*changed.tolist()} - {*own} <= {*range(dummy * BLOCK, (dummy + 1) * BLOCK)}
        assert {*own} <= {*changed.tolist()}
        assert all(torch.equal(live[name][:, size:], kept) for name, kept in beyond.items())
        written.append(size - decoding)
        return logits

    batcher._forwards.decode = watched
    prompts = [tokens(generator, n) for n in (5, 2 * BLOCK, 9)]
    assert answers(batch(cache, prompts)) == [nemotron.answer(prompt, 6) for prompt in prompts]
    assert max(written) > 0


def test_prompts_that_pause_between_two_chunks_keep_their_state(nemotron, generator, monkeypatch):
    """Rows of the decode batch that are half-way through a prompt, of which no chunk is due."""
    cache = nemotron.cache()
    lengths = [17, 29, 5, 26, 2, 27, 5, 19]  # found by a search
    prompts = [tokens(generator, n) for n in lengths]
    find, found = Batcher._idle_rows, []

    def idle_rows(self, bound):
        rows = find(self, bound)
        found.extend(rows)
        return rows

    monkeypatch.setattr(Batcher, "_idle_rows", idle_rows)
    config = ContinuousBatchingConfig(max_batch_tokens=BLOCK)
    options = {"continuous_batching_config": config, "max_new_tokens": 20}
    assert answers(batch(cache, prompts, **options)) == [nemotron.answer(p, 20) for p in prompts]
    assert found


def test_limits_of_the_batching_config(cache, nemotron, generator):
    prompts = [tokens(generator, 3 * BLOCK) for _ in range(4)]
    config = ContinuousBatchingConfig(
        max_requests_per_batch=2, max_batch_tokens=BLOCK, use_cuda_graph=False
    )
    outputs = batch(cache, prompts, continuous_batching_config=config)
    assert answers(outputs) == [nemotron.answer(prompt, 6) for prompt in prompts]
    stats = cache.batch_stats()
    assert stats.prefill_forwards >= 4 * 3
    assert stats.eager_reason == "use_cuda_graph is False"
    assert stats.decode_steps >= 2 * 5


def test_a_preparation_captures_after_a_call_without_graphs(cache, generator):
    batch(
        cache,
        [tokens(generator, 5)],
        continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=False),
    )
    cache._batcher.prepare()
    assert cache.batch_stats().prefill_eager_reason.startswith("CUDA graphs need a CUDA device")


def test_answers_are_reused_if_they_are_kept(nemotron, generator):
    prompt = tokens(generator, 2 * BLOCK)
    answer = nemotron.answer(prompt, 3 * BLOCK)
    longer = prompt + answer + tokens(generator, 3)
    for keeps, hit in ((True, 4 * BLOCK), (False, 2 * BLOCK)):
        cache = nemotron.cache(reuse_answers=keeps)
        batch(cache, [prompt], max_new_tokens=3 * BLOCK)
        before = cache.stats().skipped_tokens
        outputs = batch(cache, [longer])
        assert answers(outputs) == [nemotron.answer(longer, 6)]
        assert cache.stats().skipped_tokens - before == hit
        assert cache.stats().kv_matched_blocks == hit // BLOCK


def test_a_streamer_that_changes_the_model_is_noticed(generator):
    model = make_model("nemotron_h")
    cache = make_cache(model)

    def change(request_id, token):
        model.model.layers[0].mixer.time_step_limit = (0.0, 0.01)

    with pytest.raises(ModelChangedError, match="while generate_batch ran"):
        cache.generate_batch([tokens(generator, 9)], streamer=change, max_new_tokens=3)
    cache.check_invariants()


def test_the_attention_of_the_model_is_put_back(cache, nemotron, generator):
    config = nemotron.model.config
    before = config._attn_implementation
    prompts = [tokens(generator, 4)]
    seen = []
    batch(cache, prompts, streamer=lambda *_: seen.append(config._attn_implementation))
    assert {*seen, config._attn_implementation} == {before}

    def fail(*_):
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            batch(cache, prompts, streamer=fail)
        assert config._attn_implementation == before
        cache.check_invariants()
    assert answers(batch(cache, prompts)) == [nemotron.answer(prompts[0], 6)]


def test_other_threads_attend_as_usual_while_a_batch_is_computed(
    cache, nemotron, generator, monkeypatch
):
    prompt, attend, found = tokens(generator, 2 * BLOCK + 3), PagedAttention.attend, []

    def compute():
        with torch.no_grad():
            found.append(nemotron.model(torch.tensor([prompt])).logits)

    def attend_beside_another(*args):
        if threading.get_ident() == own:
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()
        return attend(*args)

    own = threading.get_ident()
    compute()
    monkeypatch.setattr(PagedAttention, "attend", attend_beside_another)
    assert answers(batch(cache, [prompt], max_new_tokens=2)) == [nemotron.answer(prompt, 2)]
    assert len(found) > 2
    assert all(torch.equal(logits, found[0]) for logits in found)


def failing(monkeypatch, *numbers):
    """Make the steps of these numbers raise after they have spoilt all live states."""
    compute, calls = Batcher._compute_decodes, []

    def fails(self, step):
        calls.append(step)
        logits = compute(self, step)
        if len(calls) in numbers:
            for states in self.context.live_states.tensors.values():
                states.fill_(torch.nan)
            raise RuntimeError("out of order")
        return logits

    monkeypatch.setattr(Batcher, "_compute_decodes", fails)
    return calls


def test_a_step_that_fails_is_taken_back_and_its_requests_go_on(
    cache, nemotron, generator, monkeypatch
):
    """Also a prompt without a chunk in the step; streamed tokens are streamed once."""
    prompts = [tokens(generator, n) for n in (5, 3 * BLOCK + 2, 9)]
    calls = failing(monkeypatch, 3, 10, 17)
    received = {}
    outputs = batch(
        cache,
        prompts,
        streamer=lambda name, token: received.setdefault(name, []).append(token),
        continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=BLOCK),
        max_new_tokens=9,
    )
    assert answers(outputs) == [nemotron.answer(prompt, 9) for prompt in prompts]
    assert received == {one.request_id: one.generated_tokens for one in outputs}
    assert cache.batch_stats().steps == len(calls) - 3


def test_a_forward_that_fails_twice_ends_the_call_and_not_the_cache(
    cache, nemotron, generator, monkeypatch
):
    prompt = tokens(generator, 3 * BLOCK)
    batch(cache, [prompt])
    with monkeypatch.context() as patch:
        failing(patch, 3, 4)
        with pytest.raises(RuntimeError, match="out of order"):
            batch(cache, [prompt, [*prompt, 7]])
    assert answers(batch(cache, [prompt])) == [nemotron.answer(prompt, 6)]


def test_models_that_are_not_served():
    for name, reason in (("inkling", "sliding window"), ("kimi_linear", "size of a head")):
        cache = make_cache(make_model(name))
        with pytest.raises(InvalidArgumentError, match=f"cannot serve this model: .*{reason}"):
            cache.generate_batch([[5, 6]])
        cache.generate([[5, 6]], max_new_tokens=1)  # which serves it, with all of the budget
        cache.check_invariants()


def test_attention_that_is_computed_otherwise_in_a_batch_is_noticed(nemotron, monkeypatch):
    right = paged_attention_torch.paged_attention

    def forgetful(query, keys, values, tables, places, starts, lengths, scale):
        return right(query, keys, values, tables, places, starts.clamp(max=1), lengths, scale)

    monkeypatch.setattr(paged_attention_torch, "paged_attention", forgetful)
    cache = nemotron.cache()
    with pytest.raises(UnresumableModelError, match="something else for several requests at once"):
        cache.generate_batch([[5, 6]])


def test_rows_without_a_request_attend_to_nothing(nemotron, monkeypatch):
    """Their position is -1, and the kernel must not read a block table at -1."""
    right, seen = paged_attention_torch.paged_attention, []

    def noted(query, keys, values, tables, places, starts, lengths, scale):
        if query.shape[2] == 1:
            seen.extend(zip(places.tolist(), lengths.tolist(), strict=True))
        return right(query, keys, values, tables, places, starts, lengths, scale)

    monkeypatch.setattr(paged_attention_torch, "paged_attention", noted)
    nemotron.cache().generate_batch([[5, 6], [7], [8, 9, 10]], max_new_tokens=3)
    assert {length for place, length in seen if place < 0} == {0}
    assert {length for place, length in seen if place >= 0} == {1}


# Batches and ``generate`` share prefixes: each resumes from what the other has cached.

alone = partial(answer, is_batch=False, count=6)


def test_the_first_batch_forgets_nothing_and_has_the_whole_budget(nemotron, generator):
    cache = nemotron.cache(**budgets(nemotron.cache(), slots=10, blocks=30))
    kv_blocks, slots = cache.kv_block_allocator, cache.slot_allocator
    prompts = [tokens(generator, 2 * BLOCK + n) for n in range(3)]
    for prompt in prompts:
        alone(cache, prompt)
    held = slots.num_cached_slots, kv_blocks.num_cached_blocks
    cache.prepare_batches()
    assert (slots.num_cached_slots, kv_blocks.num_cached_blocks) == held
    context = cache._batcher.context
    assert (context.kv_block_allocator, context.slot_allocator) == (kv_blocks, slots)
    assert (cache.kv_block_allocator, cache.slot_allocator) == (kv_blocks, slots)
    assert (slots.max_slots, kv_blocks.pool_size) == (10, 30 + 1)
    stats = cache.stats()
    assert (stats.requests, stats.free_slots + stats.cached_slots) == (3, 10)
    for prompt in prompts:
        whole = (len(prompt) - 1) // BLOCK * BLOCK
        assert skipped(cache, lambda prompt=prompt: alone(cache, prompt)) == whole


@pytest.mark.parametrize("verify_hits", [0.0, 1.0])
def test_a_cache_that_has_batched_gives_its_memory_back_at_once(nemotron, verify_hits):
    cache = nemotron.cache(verify_hits=verify_hits)
    cache.generate_batch([[5, 6]], max_new_tokens=1)
    tensors = [*cache._store.tensors.states.tensors.values(), *cache._store.tensors.blocks]
    tensors += cache._batcher.context.live_states.tensors.values()
    held = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    gone = weakref.ref(cache._batcher)
    del tensors
    gc.disable()
    try:
        cache.close()
        assert gone() is None
    finally:
        gc.enable()
    assert [storage() for storage in held] == [None] * len(held)


@pytest.mark.parametrize(("made", "used"), [*product([False, True], repeat=2)])
def test_it_may_be_made_and_used_in_and_out_of_inference_mode(nemotron, generator, made, used):
    prompts = [tokens(generator, 2 * BLOCK + n) for n in (3, 5)]
    expected = [nemotron.answer(prompt, 6) for prompt in prompts]
    with torch.inference_mode(made):
        cache = nemotron.cache()
    for mode in (used, not used):
        with torch.inference_mode(mode):
            assert alone(cache, prompts[0]) == expected[0]
            assert answers(batch(cache, prompts)) == expected
    assert cache.stats().hits >= 4
    with torch.inference_mode(used):
        cache.reset()
        assert alone(cache, prompts[1]) == expected[1]


def test_what_batches_computed_lies_in_host_memory_too(nemotron, generator):
    room = budgets(nemotron.cache(), slots=8, blocks=28)
    with nemotron.cache(**room, host_cache_gb=0.01, slot_policy="lru") as cache:
        prompts = [tokens(generator, 4 * BLOCK + 3) for _ in range(8)]
        answered = answers(batch(cache, prompts[:4], max_new_tokens=BLOCK))
        answered += answers(batch(cache, prompts[4:], max_new_tokens=BLOCK))
        assert cache.tier_stats()[0].stored > 8 * 4
        for prompt, answer in zip(prompts, answered, strict=True):
            longer = prompt + answer + [5]
            assert skipped(cache, lambda longer=longer: batch(cache, [longer])) == 5 * BLOCK
            assert alone(cache, longer) == nemotron.answer(longer, 6)
        assert cache.tier_stats()[0].restored > 0
