"""A prefix cache that measures: which hits it uses, where it splits, and what it says of that."""

import contextlib
import math

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers_rig import (
    BLOCK,
    GREEDY,
    assert_same,
    budgets,
    cached,
    join,
    make_cache,
    make_model,
    plain,
    text,
)

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.transformers.costs import CostModel
from mamba_cache.slots import EveryNthBlock

SHARED = 4 * BLOCK
NEW = 9


class Machine:
    """A clock that what the model and the cache do turns on.

    Attributes:
        now: Its time in seconds.
        forward: Seconds of a forward, by its tokens.
        restore: Seconds of a restore.
        cut: Seconds that each state inside a forward takes.
    """

    def __init__(self, forward=lambda tokens: 1.0, restore=0.5, cut=0.25):
        self.now, self.forward, self.restore, self.cut = 0.0, forward, restore, cut
        self.prompts = []  # tokens of each forward but those that decode

    def run(self, tokens):
        """Computes so many tokens."""
        self.now += self.forward(tokens)
        if tokens > 1:
            self.prompts.append(tokens)

    def times(self, cache):
        """Lets a cache and its model turn this clock, and the cache read it."""
        _running[:] = [self]
        cache._costs._clock = lambda: self.now
        load, capture = cache._store.tensors.load, cache._prefiller._capture

        def timed_load(*args):
            self.now += self.restore
            return load(*args)

        cache._store.tensors.load = timed_load
        if capture is not None:
            during = capture.during

            @contextlib.contextmanager
            def timed_during(past, start, num_tokens, rooms):
                self.now += self.cut * len(rooms)
                with during(past, start, num_tokens, rooms) as captured:
                    yield captured

            capture.during = timed_during
        return cache


_running = []
"""The machine of the test: a hook with another one would be another model."""


def _run(_, args):
    for machine in _running:
        machine.run(args[0].shape[1])


def timed_model(name):
    """One whose forwards turn the clock of the machine that runs."""
    _running.clear()
    model = make_model(name)
    model.get_input_embeddings().register_forward_pre_hook(_run)
    return model


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def model():
    return timed_model("granite 4")


@pytest.fixture
def cache(model, machine):
    return machine.times(make_cache(model, measure_costs=True, segment_tokens=16 * BLOCK))


@pytest.fixture
def sent(generator):
    """Prompts of one length: ``sent()`` shares nothing, ``sent(shared)`` begins like others."""

    def send(shared=None):
        return join(text(generator, SHARED) if shared is None else shared, text(generator, NEW))

    return send


def ask(cache, ids):
    return cached(cache, ids, max_new_tokens=1)


def learn(cache, sent, generator, sightings=4):
    """Has it measure misses, second sightings and hits of one length, each at least twice.

    Returns:
        A beginning that is cached with a state.
    """
    for _ in range(2):
        ask(cache, sent())
    for _ in range(2):
        shared = text(generator, SHARED)
        for _ in range(sightings):
            ask(cache, sent(shared))
    return shared


def test_a_hit_that_loses_is_declined(model, cache, sent, generator):
    """Forwards of any length take as long here: what is restored saves nothing."""
    shared = learn(cache, sent, generator)
    before, prompt = cache.stats(), sent(shared)
    assert_same(plain(model, prompt, max_new_tokens=1), ask(cache, prompt))
    stats = cache.stats()
    assert stats.declined_hits - before.declined_hits == 1
    assert stats.declined_tokens - before.declined_tokens == SHARED
    assert stats.computed_tokens - before.computed_tokens == SHARED + NEW
    assert (stats.hits, stats.skipped_tokens) == (before.hits, before.skipped_tokens)
    assert stats.requests == stats.hits + sum(stats.misses.values()) + stats.declined_hits


def test_a_declined_hit_shares_its_blocks(cache, sent, generator):
    """What was cached is not cached a second time."""
    shared = learn(cache, sent, generator)
    before = cache.stats()
    prompt = sent(shared)
    ask(cache, prompt)
    stats = cache.stats()
    assert stats.declined_hits > before.declined_hits
    assert stats.cached_blocks - before.cached_blocks == 2  # a whole one and a part
    assert stats.saved_states - before.saved_states == 1
    ask(cache, prompt)  # found whole, with the logits: it loses nothing but the restore
    assert cache.stats().cached_blocks == stats.cached_blocks
    assert cache.stats().saved_states == stats.saved_states


def test_a_hit_that_wins_is_used(model, machine, cache, sent, generator):
    machine.forward = lambda tokens: tokens
    shared = learn(cache, sent, generator)
    before, prompt = cache.stats(), sent(shared)
    assert_same(plain(model, prompt, max_new_tokens=1), ask(cache, prompt))
    stats = cache.stats()
    assert (stats.hits - before.hits, stats.declined_hits) == (1, 0)
    assert stats.seconds_saved - before.seconds_saved == pytest.approx(SHARED - 0.5)
    assert stats.seconds_restoring - before.seconds_restoring == pytest.approx(0.5)


def test_while_costs_are_unknown_every_hit_is_used(cache, sent, generator):
    shared = text(generator, SHARED)
    for _ in range(4):
        ask(cache, sent(shared))
    stats = cache.stats()
    assert (stats.hits, stats.declined_hits, stats.seconds_saved) == (2, 0, 0)


def test_now_and_then_a_hit_that_loses_is_used(machine, cache, sent, generator):
    """So a machine on which hits have come to win is noticed."""
    shared = learn(cache, sent, generator)
    before = cache.stats()
    for _ in range(20):
        ask(cache, sent(shared))
    stats = cache.stats()
    assert stats.hits - before.hits == 1
    assert stats.declined_hits - before.declined_hits == 19
    machine.forward, machine.restore = lambda tokens: tokens, 0.0
    for _ in range(40):
        ask(cache, sent(shared))
    declined = cache.stats().declined_hits
    for _ in range(5):
        ask(cache, sent(shared))
    assert cache.stats().declined_hits == declined


def test_with_it_off_hits_that_lose_are_used(model, machine, sent, generator):
    cache = make_cache(model, segment_tokens=16 * BLOCK)
    machine.times(cache)
    cache._costs._clock = None  # it would be called
    shared = learn(cache, sent, generator)
    before = cache.stats()
    ask(cache, sent(shared))
    stats = cache.stats()
    assert (stats.hits - before.hits, stats.declined_hits, stats.seconds_restoring) == (1, 0, 0)
    assert cache.break_even_tokens() is None


def test_prefill_declines_too(model, cache, sent, generator):
    shared = learn(cache, sent, generator)
    prompt = sent(shared)
    past = cache.prefill(prompt)
    assert cache.stats().declined_hits > 0
    wanted = make_cache(model).prefill(prompt)
    for layer, other in zip(past.layers, wanted.layers, strict=True):
        if getattr(layer, "keys", None) is not None:
            torch.testing.assert_close(layer.keys, other.keys)
    cache.check_invariants()


def test_rows_of_a_batch_are_declined_one_by_one(model, cache, sent, generator):
    shared = learn(cache, sent, generator)
    rows = torch.cat([sent(shared), sent()])
    mask = torch.ones_like(rows)
    expected = model.generate(rows, attention_mask=mask, **GREEDY)
    declined = cache.stats().declined_hits
    assert_same(expected, cache.generate(rows, attention_mask=mask, **GREEDY))
    cache.check_invariants()
    assert cache.stats().declined_hits - declined == 1


def test_a_prompt_that_ran_out_of_memory_uses_its_hit(model, machine, sent, generator):
    """It would need more without."""
    cache = machine.times(make_cache(model, measure_costs=True, segment_tokens=None))
    shared = learn(cache, sent, generator)
    prompt = sent(shared)
    expected, usual, failures = plain(model, prompt, max_new_tokens=1), machine.forward, [1]
    cache._costs.uses = lambda saving: False

    def run_out(tokens):
        if failures and tokens > 2 * BLOCK:
            failures.pop()
            raise torch.OutOfMemoryError("too much")
        return usual(tokens)

    machine.forward = run_out
    machine.prompts.clear()
    assert_same(expected, ask(cache, prompt))
    assert machine.prompts == [NEW]


# Splits.


def test_a_split_that_does_not_pay_is_not_made(cache, sent, generator):
    learn(cache, sent, generator)
    before, shared = cache.stats(), text(generator, SHARED)
    for _ in range(3):
        ask(cache, sent(shared))
    stats = cache.stats()
    assert stats.splits == before.splits
    assert stats.declined_splits - before.declined_splits == 2
    assert stats.misses["no_state"] - before.misses["no_state"] == 2


def test_a_split_that_pays_is_made(machine, cache, sent, generator):
    machine.forward = lambda tokens: tokens
    learn(cache, sent, generator)
    before, shared = cache.stats(), text(generator, SHARED)
    for _ in range(3):
        ask(cache, sent(shared))
    stats = cache.stats()
    assert (stats.splits - before.splits, stats.declined_splits) == (1, 0)
    assert stats.seconds_splitting - before.seconds_splitting == pytest.approx(machine.cut)
    assert stats.hits - before.hits == 1


def test_a_split_that_costs_more_than_it_saves_is_not_made(machine, cache, sent, generator):
    """Although the hit would win, once it were there."""
    machine.forward, machine.cut = lambda tokens: tokens, 100.0
    learn(cache, sent, generator)
    before, shared = cache.stats(), text(generator, SHARED)
    for _ in range(3):
        ask(cache, sent(shared))
    stats = cache.stats()
    assert (stats.splits - before.splits, stats.declined_splits) == (0, 2)


def test_what_the_caller_names_is_kept_whatever_it_costs(cache, sent, generator):
    learn(cache, sent, generator)
    before, shared = cache.stats(), text(generator, SHARED)
    ask(cache, sent(shared))
    cached(cache, sent(shared), max_new_tokens=1, checkpoints=[SHARED])
    stats = cache.stats()
    assert stats.splits - before.splits == 1
    assert stats.declined_splits == before.declined_splits
    ask(cache, sent(shared))
    assert cache.stats().declined_hits - stats.declined_hits == 1


def test_a_declined_prompt_is_not_split_where_its_state_is(machine, cache, sent, generator):
    """Nor before it: what is not worth restoring there is not worth saving."""
    shared = text(generator, SHARED)
    cached(cache, sent(shared), max_new_tokens=1, checkpoints=[SHARED])
    cache._prefiller._capture, cache._prefiller._placement = None, EveryNthBlock(1)
    cache._costs.uses = lambda saving: False
    machine.prompts.clear()
    cached(cache, sent(shared), max_new_tokens=1, checkpoints=[SHARED])
    assert cache.stats().declined_hits == 1
    assert machine.prompts == [SHARED + BLOCK]  # and the one token that is left


def test_the_state_at_the_end_costs_no_split(machine, cache, sent, generator):
    machine.restore = 100.0
    learn(cache, sent, generator)
    cache._prefiller._placement = EveryNthBlock((SHARED + BLOCK) // BLOCK)
    before = cache.stats()
    prompt = sent()[:, : SHARED + BLOCK]
    ask(cache, prompt)
    stats = cache.stats()
    assert (stats.splits, stats.declined_splits) == (before.splits, before.declined_splits)
    assert stats.saved_states - before.saved_states == 1


@pytest.mark.parametrize("per_token", [0.0, 0.5])
def test_a_split_into_two_forwards_costs_the_second_one(
    model, machine, cache, sent, generator, per_token
):
    """As for models whose states cannot be captured: what any forward costs is paid twice."""
    cache._prefiller._capture = None
    machine.forward = lambda tokens: 20.0 + per_token * tokens
    machine.restore = 0.0
    learn(cache, sent, generator, sightings=3)
    for length in (SHARED, SHARED + BLOCK):  # halves of other lengths are measured as well
        for _ in range(2):
            cache.prefill(text(generator, length))
    before, shared = cache.stats(), text(generator, SHARED)
    machine.prompts.clear()
    for _ in range(2):
        ask(cache, sent(shared))
    stats = cache.stats()
    # It saves 0.5 s for each of 32 tokens, and costs 20 s.
    assert machine.prompts == [SHARED + NEW] * 2
    assert (stats.splits - before.splits, stats.declined_splits - before.declined_splits) == (0, 1)
    machine.forward = lambda tokens: 1.0 + tokens
    for _ in range(9):
        learn(cache, sent, generator, sightings=3)
        for length in (SHARED, SHARED + BLOCK):
            cache.prefill(text(generator, length))
    before, shared = cache.stats(), text(generator, SHARED)
    machine.prompts.clear()
    for _ in range(2):
        ask(cache, sent(shared))
    assert machine.prompts == [SHARED + NEW, SHARED, NEW]
    assert cache.stats().splits - before.splits == 1
    spent = cache.stats().seconds_splitting - before.seconds_splitting
    assert spent == pytest.approx(1.0, abs=0.5)


def test_a_placement_of_many_positions_keeps_those_that_pay(model, machine, sent, generator):
    machine.forward, machine.restore = lambda tokens: tokens, 20.0
    placement = EveryNthBlock(1)
    cache = make_cache(model, measure_costs=True, segment_tokens=16 * BLOCK, placement=placement)
    machine.times(cache)
    cache._prefiller._placement = EveryNthBlock(100)
    for length in (8 * BLOCK, 4 * BLOCK, 2 * BLOCK, BLOCK):
        for _ in range(2):
            known = text(generator, length)
            cache.prefill(known)
            cache.prefill(join(known, text(generator, 8 * BLOCK - length)))
    cache._prefiller._placement = placement
    for _ in range(3):  # what a cut costs is not known before
        cache.prefill(text(generator, 8 * BLOCK))
    before = cache.stats()
    cache.prefill(text(generator, 8 * BLOCK))
    stats = cache.stats()
    # Of 8, 16, ..., 56 tokens the first two are computed faster than they are restored.
    assert stats.declined_splits - before.declined_splits == 2
    assert stats.splits - before.splits == 5


# What it says.


def test_it_says_from_how_many_tokens_on_a_hit_wins(machine, cache, sent, generator):
    machine.forward = lambda tokens: 10.0 + max(0, tokens - 40)
    machine.restore = 4.5
    assert cache.break_even_tokens(NEW) is None
    assert cache.expected_saving(SHARED, NEW) is None
    for length in (SHARED, 2 * SHARED, 3 * SHARED):
        for _ in range(3):
            ask(cache, sent(text(generator, length)))
            shared = text(generator, length)
            for _ in range(2):
                cached(cache, sent(shared), max_new_tokens=1, checkpoints=[length])
    # A prompt of n tokens takes n - 30 s, and a hit 14.5 s.
    assert cache.expected_saving(2 * SHARED, NEW) == pytest.approx(2 * SHARED + NEW - 30 - 14.5)
    assert cache.expected_saving(SHARED, NEW) == pytest.approx(SHARED + NEW - 30 - 14.5)
    assert cache.break_even_tokens(NEW) == math.ceil(44.5 - NEW)
    assert cache.break_even_tokens(4 * SHARED) is None, "no forward of so many was measured"


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None])
def test_lengths_are_checked(cache, wrong):
    with pytest.raises(InvalidArgumentError, match="new_tokens must be an int >= 1"):
        cache.break_even_tokens(wrong)
    with pytest.raises(InvalidArgumentError, match="new_tokens must be an int >= 1"):
        cache.expected_saving(8, wrong)
    with pytest.raises(InvalidArgumentError, match="cached_tokens must be an int >= 1"):
        cache.expected_saving(wrong, 8)


def test_the_setting_is_checked(model):
    with pytest.raises(InvalidArgumentError, match="measure_costs must be a bool"):
        make_cache(model, measure_costs="yes")


def test_a_reset_forgets_the_counts_and_not_the_machine(cache, sent, generator):
    learn(cache, sent, generator, sightings=6)
    assert cache.stats().declined_hits > 0
    cache.reset()
    stats = cache.stats()
    assert (stats.declined_hits, stats.declined_tokens, stats.splits) == (0, 0, 0)
    assert (stats.seconds_saved, stats.seconds_restoring, stats.seconds_splitting) == (0, 0, 0)
    assert cache.expected_saving(SHARED, NEW) == pytest.approx(-0.5)


# No result depends on it.

SECONDS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 10), st.sampled_from([0.0, 1.0])
)


@pytest.fixture(scope="module")
def lied_to():
    """Caches with plenty of room and with little, and prompts with what they are answered."""
    generator = torch.Generator().manual_seed(7)
    model = make_model("granite 4")
    ample = make_cache(model, measure_costs=True)
    little = make_cache(model, measure_costs=True, **budgets(ample, slots=2, blocks=7))
    root = text(generator, 2 * BLOCK)
    prompts = [join(root, text(generator, length)) for length in (5, 5, 5, BLOCK, 2 * BLOCK)]
    prompts += [root, root[:, :BLOCK], text(generator, 5), join(prompts[0], text(generator, 9))]
    expected = [plain(model, prompt, max_new_tokens=2) for prompt in prompts]
    return (ample, little), list(zip(prompts, expected, strict=True))


@given(
    times=st.lists(SECONDS, min_size=1, max_size=30),
    calls=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9)), min_size=4, max_size=16),
    has_room=st.booleans(),
)
def test_clocks_that_lie_change_no_answer(lied_to, times, calls, has_room):
    caches, prompts = lied_to
    cache = caches[not has_room]
    cache.reset()
    told = iter(range(10**9))
    cache._costs = CostModel(clock=lambda: times[next(told) % len(times)])
    cache._prefiller._costs = cache._costs
    for number, named in calls:
        ids, expected = prompts[number]
        checkpoints = [named] if 0 < named <= ids.shape[1] else None
        assert_same(expected, cached(cache, ids, max_new_tokens=2, checkpoints=checkpoints))
    stats = cache.stats()
    assert stats.requests == len(calls)
    assert stats.requests == stats.hits + sum(stats.misses.values()) + stats.declined_hits
    tokens = cache.break_even_tokens(5)
    assert tokens is None or tokens > 0
