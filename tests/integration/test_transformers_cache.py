"""The contract of the prefix cache of a transformers model."""

import contextlib
import gc
import weakref

import pytest
import torch
from object_graph import tensors_of
from transformers import AutoModelForCausalLM
from transformers_rig import (
    ANSWER,
    BLOCK,
    GREEDY,
    assert_same,
    budgets,
    cached,
    join,
    make_cache,
    make_model,
    plain,
    skipped,
    text,
)

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.transformers import PrefixCache


@pytest.fixture(scope="module")
def model():
    return make_model("nemotron_h")


@pytest.fixture
def cache(model):
    return make_cache(model, variant="watched")  # some tests hook the model


_shapes = []


def _watch(_, args):
    _shapes.append(tuple(args[0].shape))


@contextlib.contextmanager
def watched_forwards(model):
    """Yield the (rows, tokens) of every forward, always by one hook: a new hook changes the key."""
    _shapes.clear()
    hook = model.get_input_embeddings().register_forward_pre_hook(_watch)
    yield _shapes
    hook.remove()


# The same arguments and results as `generate`.


@pytest.mark.parametrize(
    "options",
    [{"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3, "num_return_sequences": 2}],
    ids=["sequences", "beams"],
)
def test_answers_share_the_prompt(model, cache, prompt, options):
    options = {**options, "output_logits": False}
    for number in range(2):
        with watched_forwards(model) as shapes:
            torch.manual_seed(3)
            actual = cached(cache, prompt, **options)
        assert all(rows == 1 for rows, tokens in shapes if tokens > 1)
        computed = prompt.shape[1] - number * 4 * BLOCK
        assert sum(tokens for rows, tokens in shapes if rows == 1) == computed
        torch.manual_seed(3)
        assert torch.equal(actual.sequences, plain(model, prompt, **options).sequences)
    assert cache.stats().hits == 1


def test_beams_cache_a_prompt_that_ends_with_a_block(model, cache, prompt, generator):
    whole = prompt[:, : 4 * BLOCK]
    cached(cache, whole, num_beams=2, output_logits=False)
    longer = join(whole, text(generator, 3))
    hit = skipped(cache, lambda: assert_same(plain(model, longer), cached(cache, longer)))
    assert hit == 4 * BLOCK


def test_rows_that_end_early_are_cached_to_their_end(model, cache, generator):
    """Padding after an answer is no part of the conversation."""
    prompts = [text(generator, 2 * BLOCK - 2)[0].tolist() for _ in range(2)]
    alone = [plain(model, torch.tensor([p]), max_new_tokens=3 * BLOCK).sequences for p in prompts]
    eos = alone[0][0, 2 * BLOCK + 3].item()
    output = cache.generate(prompts, **{**GREEDY, "max_new_tokens": 3 * BLOCK, "eos_token_id": eos})
    cache.check_invariants()
    first = output.sequences[0].tolist()
    end = first.index(eos, 2 * BLOCK - 2) + 1
    next_turn = torch.tensor([first[:end] + [5, 6, 7] * 4])
    hit = skipped(cache, lambda: assert_same(plain(model, next_turn), cached(cache, next_turn)))
    num_computed = output.sequences.shape[1] - 1  # the last token has not gone through the model
    assert hit == min(end, num_computed) // BLOCK * BLOCK


# Cached entries, and the amount of computed tokens.


def test_long_prompts_are_computed_in_segments(model, generator):
    cache = make_cache(model, segment_tokens=2 * BLOCK, variant="watched")
    prompt = text(generator, 9 * BLOCK + 1)
    with watched_forwards(model) as shapes:
        assert_same(plain(model, prompt, max_new_tokens=1), cached(cache, prompt, max_new_tokens=1))
    assert [tokens for _, tokens in shapes[1:]] == [16, 16, 16, 16, 9]


@pytest.mark.parametrize("length", [3, 4 * BLOCK, 4 * BLOCK + 3])
def test_an_identical_prompt_computes_a_block_at_most(model, cache, prompt, length):
    whole, boundary = prompt[:, :length], (length - 1) // BLOCK * BLOCK
    expected = plain(model, whole)
    with watched_forwards(model) as shapes:  # a hook makes another model of it
        cached(cache, whole)
        shapes.clear()
        again = cached(cache, whole)
    assert shapes == [(1, length - boundary)] + [(1, 1)] * (ANSWER - 1)
    assert cache.stats().skipped_tokens == boundary
    assert_same(expected, again)


@pytest.mark.parametrize(
    ("name", "length"),
    [*(("nemotron_h", n) for n in (31, 32, 33, 95, 97)), ("qwen3_next", 64), ("lfm2", 64)],
)
def test_a_chat_and_a_prompt_that_come_again_compute_at_most_a_block_of_it(name, length, generator):
    """A block has 32 tokens by default, for every chunk size of the model."""
    model = make_model(name)
    cache = PrefixCache(model, mamba_cache_gb=0.01, kv_cache_gb=0.01)
    assert cache.block_size_tokens == 32
    prompt = text(generator, length)
    answer = cached(cache, prompt, max_new_tokens=41).sequences
    turn = join(answer, text(generator, 3))
    for again, num_cached in ((prompt, length - 1), (turn, length + 40), (turn, length + 43)):
        expected = plain(model, again)
        before = cache.stats().skipped_tokens
        assert_same(expected, cached(cache, again))
        hit = cache.stats().skipped_tokens - before
        assert num_cached - 32 < hit <= num_cached


def test_a_restored_state_is_the_saved_one_to_the_bit(model, cache, prompt):
    past = cache.prefill(prompt[:, : 4 * BLOCK])
    again = cache.prefill(prompt[:, : 4 * BLOCK])
    assert cache.stats().skipped_tokens == 4 * BLOCK
    for one, other in zip(past.layers, again.layers, strict=True):
        for name in ("keys", "values"):
            if getattr(one, name, None) is not None:
                assert torch.equal(getattr(one, name), getattr(other, name))
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(one, name, {}).items():
                if state is not None:
                    assert torch.equal(state, getattr(other, name)[index])


def test_another_default_device_changes_nothing(model, prompt):
    """Engines set a default device; the one here holds no data."""
    expected = make_cache(model).prefill(prompt[:, : 4 * BLOCK])
    with torch.device("meta"):
        past = make_cache(model).prefill(prompt[0, : 4 * BLOCK].tolist())
    for one, other in zip(past.layers, expected.layers, strict=True):
        if getattr(one, "keys", None) is not None:
            assert torch.equal(one.keys, other.keys)
        for index, state in getattr(one, "recurrent_states", {}).items():
            assert state is None or torch.equal(state, other.recurrent_states[index])


def test_the_callers_cache_is_his_own(model, cache, prompt):
    """Changes that the caller makes to it leave the cached entries as they are."""
    past = cache.prefill(prompt[:, : 4 * BLOCK])
    for layer in past.layers:
        for state in getattr(layer, "recurrent_states", {}).values():
            if state is not None:
                state.fill_(float("nan"))
    assert_same(plain(model, prompt), cached(cache, prompt))


def test_a_model_that_was_loaded_from_files_is_cached(model, prompt, tmp_path):
    """Attributes that the library sets for a later save are no foreign code."""
    model.save_pretrained(tmp_path)
    cache = make_cache(AutoModelForCausalLM.from_pretrained(tmp_path))
    for _ in range(2):
        assert_same(plain(model, prompt), cached(cache, prompt))
    assert (cache.stats().hits, cache.stats().bypasses) == (1, {})


def test_stats_count_misses_by_reason(model, cache, prompt, generator):
    cached(cache, prompt, max_new_tokens=1)
    cached(cache, join(prompt[:, : 2 * BLOCK], text(generator, BLOCK)), max_new_tokens=1)
    stats = cache.stats()
    assert (stats.requests, stats.hits) == (2, 0)
    assert stats.misses == {"no_kv_match": 1, "no_state": 1}
    assert stats.computed_tokens == prompt.shape[1] + 3 * BLOCK
    assert (stats.used_blocks, stats.reserved_slots) == (0, 0)


def test_equal_rows_save_the_state_of_their_answer_once(model, cache, generator):
    """A second slot for the same state would evict another's."""
    row, other = text(generator, 3 * BLOCK + 2), text(generator, 3 * BLOCK + 3)
    for last in (other, torch.cat([row, row])):
        cached(cache, last)
    slots = cache.stats().cached_slots
    small = make_cache(model, slot_policy="lru", **budgets(cache, slots=slots, blocks=40))
    for last in (other, torch.cat([row, row])):
        cached(small, last)
    assert (small.stats().cached_slots, small.stats().evicted_slots) == (slots, 0)


def test_a_prompt_longer_than_the_pool_is_cached_as_far_as_it_goes(model, cache, prompt):
    small = make_cache(model, **budgets(cache, slots=1, blocks=2))
    for _ in range(2):
        assert_same(plain(model, prompt), cached(small, prompt))
    assert small.stats().cached_blocks == 2


def test_a_prompt_that_does_not_fit_is_computed_in_parts(model, prompt, generator):
    """A forward that runs out of memory sets the length of the next parts."""
    cache = make_cache(model, segment_tokens=None, variant="watched")
    limit, lengths = 2 * BLOCK, []

    def run_out(_, args):
        lengths.append(args[0].shape[1])
        if lengths[-1] > limit:
            raise torch.OutOfMemoryError("too much")

    expected = plain(model, prompt)
    hook = model.get_input_embeddings().register_forward_pre_hook(run_out)
    assert_same(expected, cached(cache, prompt))
    assert lengths[:5] == [35, 16, 16, 3, 1]
    lengths.clear()
    cached(cache, text(generator, 35))
    assert lengths[:3] == [16, 16, 3]  # the limit is kept for later calls
    limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        cached(cache, text(generator, 35))
    hook.remove()
    cache.check_invariants()
    assert_same(expected, cached(cache, prompt))
    own = make_cache(model, segment_tokens=4 * BLOCK, variant="watched")  # is not made smaller
    hook = model.get_input_embeddings().register_forward_pre_hook(out_of_memory)
    with hook, pytest.raises(torch.OutOfMemoryError):
        cached(own, prompt)
    own.check_invariants()


@pytest.mark.parametrize("way", ["prefill", "batch", "padded"])
def test_prompts_of_batches_are_tried_again_too(model, prompt, way):
    rows = {"padded": [[0, 0, *prompt[0].tolist()]]}.get(way, [prompt[0].tolist()] * 2)
    ids = torch.tensor(rows)
    mask = (ids > 0).long()
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    cache = make_cache(model, segment_tokens=None, variant="watched")

    def run_out(_, args):
        if args[0].shape[1] > 2 * BLOCK:
            raise torch.OutOfMemoryError("too much")

    hook = model.get_input_embeddings().register_forward_pre_hook(run_out)
    if way == "prefill":
        cache.prefill(prompt)
    else:
        assert_same(expected, cache.generate(ids, attention_mask=mask, **GREEDY))
    hook.remove()
    cache.check_invariants()
    assert cache.stats().saved_states > 0


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("too much")


@pytest.mark.parametrize("name", ["load", "save_state", "save_tokens"])
def test_memory_that_runs_out_beside_the_model(model, cache, prompt, monkeypatch, name):
    """A failed restore raises once; a failed save is skipped, and the answer stays."""
    expected = plain(model, prompt)
    cached(cache, prompt[:, :20])
    monkeypatch.setattr(cache._store.tensors, name, out_of_memory)
    if name == "load":
        with pytest.raises(torch.OutOfMemoryError):
            cached(cache, prompt)
    else:
        assert_same(expected, cached(cache, prompt))
        assert cache.stats().skipped_checkpoints > 0
    cache.check_invariants()
    monkeypatch.undo()
    assert_same(expected, cached(cache, prompt))


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
def test_a_conversation_goes_on_with_few_slots(model, cache, prompt, generator, slots):
    """The state that a turn resumed from is evicted for the one at the turn's end."""
    small = make_cache(model, **budgets(cache, slots=slots, blocks=40))
    turn = prompt[:, :9]
    for _ in range(5):
        answer = cached(small, turn)
        assert_same(plain(model, turn), answer)
        turn = join(answer.sequences, text(generator, 3))
        assert skipped(small, lambda turn=turn: cached(small, turn, max_new_tokens=1)) == (
            (answer.sequences.shape[1] - 1) // BLOCK * BLOCK
        )


class Placement:
    """A placement that returns its argument, or raises it."""

    given = (4 * BLOCK,)

    def positions(self, facts):
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


@pytest.mark.parametrize("given", [OSError("broken"), [None], [1.5]], ids=repr)
def test_a_placement_that_raises_after_a_hit_holds_nothing(model, prompt, given):
    """The blocks of the matched prefix stayed held for ever."""
    placement = Placement()
    cache = make_cache(model, placement=placement)
    cached(cache, prompt)
    placement.given = given
    for run in (lambda: cached(cache, prompt), lambda: cache.prefill(prompt)):
        with pytest.raises((OSError, InvalidArgumentError)):
            run()
        cache.check_invariants()
        assert cache.stats().used_blocks == 0
    placement.given = ()
    assert skipped(cache, lambda: cached(cache, prompt)) == prompt.shape[1] // BLOCK * BLOCK


def test_a_position_inside_a_block_saves_the_state_of_its_beginning(model, prompt):
    """The state after ten tokens was found as that after eight."""
    placement = Placement()
    placement.given = (BLOCK + 2,)
    cache = make_cache(model, placement=placement)
    cached(cache, prompt, max_new_tokens=1)
    placement.given = ()
    other = join(prompt[:, : 2 * BLOCK], prompt[:, :5])
    expected = plain(model, other)
    runs = []
    assert skipped(cache, lambda: runs.append(cached(cache, other))) == BLOCK
    assert_same(expected, runs[0])


def test_a_dropped_cache_keeps_no_memory(model, prompt):
    cache = make_cache(model)
    cached(cache, prompt)
    shared = {id(tensor) for tensor in tensors_of(model)}
    large = [t for t in tensors_of(cache._store) if id(t) not in shared and t.numel()]
    assert len(large) > 3
    references = [weakref.ref(tensor) for tensor in large]
    gc.collect()
    gc.disable()
    try:
        del cache, large
        assert [tuple(t.shape) for reference in references if (t := reference()) is not None] == []
    finally:
        gc.enable()
