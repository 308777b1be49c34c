"""Contract 17 for a ``PrefixCache``: it resets itself only after an interrupted change."""

import sys
from contextlib import contextmanager, suppress

import pytest
import torch
from batch_rig import answer, tokens
from injectors import strike
from transformers_rig import BLOCK

from mamba_cache.errors import ConcurrentUseError, PoisonedError
from mamba_cache.events import Stored
from mamba_cache.integrations.transformers import replacement

FOREIGN = [OSError, KeyboardInterrupt]
both_ways = pytest.mark.parametrize("is_batch", [False, True], ids=["generate", "batch"])


@pytest.fixture
def warm(nemotron, generator):
    """A cache with a cached prompt, and the prompt."""
    cache, prompt = nemotron.cache(), tokens(generator, 3 * BLOCK)
    cache.prefill(prompt)
    return cache, prompt


def check_kept(cache, prompt, model, *, is_batch):
    """The cached prompt is found, the answer is right, and the cache did not reset itself."""
    before, longer = cache.stats().skipped_tokens, [*prompt, 5, 7]
    assert answer(cache, longer, is_batch=is_batch) == model.answer(longer, 3)
    assert cache.stats().skipped_tokens - before >= len(prompt) - BLOCK
    assert cache.stats().self_resets == 0
    cache.check_invariants()


@both_ways
@pytest.mark.parametrize("error", FOREIGN)
def test_a_forward_that_raises_keeps_the_cache(
    nemotron, warm, generator, monkeypatch, is_batch, error
):
    cache, prompt = warm
    answer(cache, tokens(generator, 5), is_batch=is_batch)  # sets up the memory of batches
    with monkeypatch.context() as patch:
        layer = nemotron.model.model.layers[1].mixer
        strike(patch, type(layer), "forward", error)
        unknown = tokens(generator, 2 * BLOCK)
        if is_batch and error is OSError:  # it is run again
            found = answer(cache, unknown, is_batch=True, variant="struck")
            assert found == nemotron.answer(unknown, 3)
        else:
            with pytest.raises(error, match="struck"):
                answer(cache, unknown, is_batch=is_batch, variant="struck")
    check_kept(cache, prompt, nemotron, is_batch=is_batch)


@pytest.mark.parametrize(
    ("error", "is_batch"), [(OSError, False), (KeyboardInterrupt, False), (KeyboardInterrupt, True)]
)
def test_a_callback_that_raises_keeps_the_cache_and_its_pins(
    nemotron, warm, generator, error, is_batch
):
    """A stopping criterion, and a streamer of batches."""
    cache, prompt = warm
    pin = cache.pin(prompt)

    def stop(*_):
        raise error("struck")

    options = {"streamer": stop} if is_batch else {"stopping_criteria": [stop]}
    with pytest.raises(error, match="struck"):
        answer(cache, tokens(generator, 2 * BLOCK), is_batch=is_batch, **options)
    assert cache.pins == (pin,)
    check_kept(cache, prompt, nemotron, is_batch=is_batch)


@contextmanager
def interrupted(moment):
    """Interrupt the code that replaces functions where Python checks signals; yield the moments.

    Python checks at beginnings of functions and after calls of C functions.
    """
    moments = []

    def look(frame, event, _):
        if frame.f_code.co_filename == replacement.__file__ and event in {"call", "c_return"}:
            moments.append(frame.f_lineno)
            if len(moments) == moment:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        yield moments
    finally:
        sys.setprofile(None)


@both_ways
def test_after_an_interrupt_while_functions_are_replaced_the_model_is_as_before(
    nemotron, warm, generator, is_batch
):
    """The interrupted call, or the next one, restores the functions."""
    cache, prompt = warm
    scans = [(owner, name, getattr(owner, name)) for owner, name in cache._capture._scans]
    answer(cache, prompt, is_batch=is_batch)
    with interrupted(0) as moments:
        answer(cache, tokens(generator, 2 * BLOCK), is_batch=is_batch)
    count = len(moments)
    for moment in torch.randint(1, count + 1, (40,), generator=generator).tolist():
        with suppress(KeyboardInterrupt), interrupted(moment):
            answer(cache, tokens(generator, 2 * BLOCK), is_batch=is_batch)
        longer = [*prompt, *tokens(generator, 3)]
        assert answer(cache, longer, is_batch=is_batch) == nemotron.answer(longer, 3)
        assert "forward" not in vars(nemotron.model)
        assert all(getattr(owner, name) is function for owner, name, function in scans)
        assert not replacement._now


@both_ways
@pytest.mark.parametrize("error", FOREIGN)
def test_a_listener_that_raises_keeps_the_cache(nemotron, warm, generator, is_batch, error):
    cache, prompt = warm
    answer(cache, tokens(generator, 5), is_batch=is_batch)

    def broken(event):
        raise error("struck")

    cache.listeners.add(broken, Stored)
    with pytest.raises(error, match="struck"):
        answer(cache, tokens(generator, 2 * BLOCK), is_batch=is_batch)
    cache.listeners.remove(broken)
    check_kept(cache, prompt, nemotron, is_batch=is_batch)


def test_a_listener_may_not_call_in(warm, generator):
    cache, _ = warm
    cache.listeners.add(lambda event: cache.prefill([1, 2]), Stored)
    with pytest.raises(ConcurrentUseError, match="from within it"):
        answer(cache, tokens(generator, 2 * BLOCK), is_batch=False)


@both_ways
@pytest.mark.parametrize("error", FOREIGN)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("kv_blocks", "_add_chain"),
        ("slots", "_put"),
        ("kv_blocks", "_offer"),
    ],
)
def test_a_change_that_breaks_off_resets_the_cache_at_its_next_call(
    nemotron, warm, generator, monkeypatch, is_batch, owner, name, error
):
    cache, prompt = warm
    answer(cache, tokens(generator, 5), is_batch=is_batch)
    with monkeypatch.context() as patch:
        rows = getattr(cache._store, owner)
        strike(patch, rows, name, error)
        with pytest.raises(error, match="struck"):
            answer(cache, tokens(generator, 2 * BLOCK), is_batch=is_batch)
    assert cache.stats().self_resets == 0
    longer = [*prompt, 5, 7]
    for is_next in (False, True):
        before = cache.stats().skipped_tokens if is_next else 0
        assert answer(cache, longer, is_batch=is_batch) == nemotron.answer(longer, 3)
        assert bool(cache.stats().skipped_tokens - before) == is_next
        assert cache.stats().self_resets == 1
    cache.check_invariants()
    cache.reset()
    assert cache.stats().self_resets == 0


def test_a_cache_that_cannot_reset_itself_raises_until_it_can(nemotron, warm, monkeypatch):
    cache, prompt = warm
    with monkeypatch.context() as patch:
        strike(patch, cache._store.kv_blocks, "_add_chain", OSError)
        with pytest.raises(OSError, match="struck"):
            cache.prefill([9, *prompt])

        def refuse():
            raise MemoryError("still")

        patch.setattr(cache._store, "reset", refuse)
        with pytest.raises(MemoryError, match="still"):
            cache.prefill(prompt)
        with pytest.raises(MemoryError, match="still"):
            cache.prefill(prompt)
    with pytest.raises(PoisonedError, match="broke off"):
        cache.kv_block_allocator.match_prefix(cache._store.kv_blocks)
    cache.prefill(prompt)
    assert cache.stats().self_resets == 1
