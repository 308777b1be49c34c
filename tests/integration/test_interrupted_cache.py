"""Prefix caches whose calls are interrupted: nothing foreign is served, and the model is let go."""

import threading
from types import SimpleNamespace

import pytest
import torch
from injectors import LineInterrupt, LineOfSignals
from interrupt_rig import Search

pytest.importorskip("transformers", reason="needs the extra transformers")

from interrupt_cache_rig import FOREIGN, ONE, OPTIONS, OTHER, cache_calls

from mamba_cache.errors import (
    ConcurrentUseError,
    InvalidArgumentError,
    InvariantError,
    PoisonedError,
    StepOrderError,
)
from mamba_cache.integrations.transformers.generation import Generation

CALLS = cache_calls()


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_cache_serves_nothing_wrong_and_lets_the_model_go(name):
    """Removed to see it fail: ``remove_hooks``, and ``let_go``, in ``PrefixCache._take_back``."""
    search = Search(CALLS[name], LineOfSignals)  # without tiers there is no disk
    few = "over tiers" in name  # each waits for disks and threads
    assert search.survey(search.moments(4 if few else 12))[1] == []


class _LinesOfReplacements(LineInterrupt):
    """A moment is before each line that replaces the model's functions, or puts them back."""

    def _trace(self, frame, event, argument):
        is_one = frame.f_code.co_filename.endswith("replacement.py")
        return super()._trace(frame, event, argument) if is_one else None


class _LinesOfParts(LineInterrupt):
    """A moment is before each line that enters the part of a block, or takes it out."""

    def _trace(self, frame, event, argument):
        code = frame.f_code
        is_one = code.co_filename.endswith("store.py") and code.co_name in ("add", "forget")
        return super()._trace(frame, event, argument) if is_one else None


@pytest.mark.parametrize("name", ["a hit", "a miss", "answers fill blocks"])
def test_an_interrupt_while_a_part_is_entered_or_forgotten_breaks_nothing(name):
    """A part that only one of two maps had was a KeyError when its block was evicted."""
    search = Search(CALLS[f"PrefixCache.generate, {name}"], _LinesOfParts)
    assert search.num_moments > 3
    assert search.survey(search.moments())[1] == []


@pytest.mark.parametrize("name", ["a hit", "a miss"])
def test_an_interrupt_while_functions_are_replaced_hangs_nobody(name):
    """A lock was left locked by one at the end of its block, and the next call waited for ever."""
    search = Search(CALLS[f"PrefixCache.generate, {name}"], _LinesOfReplacements)
    assert search.num_moments > 20
    assert search.survey(search.moments())[1] == []


PROMPT = ONE[0].tolist()


@pytest.fixture(scope="module")
def cached():
    return next(iter(CALLS.values())).cached


@pytest.fixture
def cache(cached):
    yield cached.fresh()
    cached.cache = None  # the next test makes its own


def struck(monkeypatch, owner, name, *, after=False):
    """Has a method interrupted, once: before it does its work, or after."""
    method = getattr(owner, name)

    def run(*args, **kwargs):
        monkeypatch.setattr(owner, name, method)
        if after:
            method(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, run)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "name", ["_deregister", "_choose_victims", "retain_memory_blocks", "register_kv_block_hashes"]
)
def test_no_line_of_the_block_allocator_lets_another_tenants_state_be_served(
    cached, cache, monkeypatch, name, after
):
    """Blocks had lost their hashes and kept their states, which then passed for other prompts'."""
    for ids, salt in ((FOREIGN, "b"), (OTHER, "a")):
        cached.check(cache, ids, salt)
    struck(monkeypatch, cache._store.kv_blocks, name, after=after)
    salts = iter("cdefgh")  # until blocks are evicted
    with pytest.raises(KeyboardInterrupt):
        any(cache.prefill(ONE, cache_salt=salt) is None for salt in salts)
    monkeypatch.undo()
    try:
        cache.check_invariants()
    except PoisonedError:
        cache.reset()
    for ids, salt in ((ONE, "a"), (FOREIGN, "b"), (ONE, "b"), (OTHER, "a"), (ONE, "c")):
        cached.check(cache, ids, salt)
    assert cache.stats().used_blocks == cache.stats().reserved_slots == 0


@pytest.mark.parametrize("name", ["__enter__", "__exit__", "publish", "watch", "_fill"])
def test_a_model_does_not_stay_hooked(cached, cache, monkeypatch, name):
    struck(monkeypatch, Generation, name, after=name == "__enter__")
    with pytest.raises(KeyboardInterrupt):
        cache.generate([PROMPT], **OPTIONS)
    monkeypatch.undo()
    assert not cached.model._forward_pre_hooks
    assert not cached.model._forward_pre_hooks_with_kwargs
    assert not cached.model._forward_hooks
    assert "forward" not in vars(cached.model)
    assert cached.plain().equal(cached.answer)
    cache.check_invariants()
    cached.check(cache, ONE, None)


def test_a_cache_that_cannot_be_proved_right_refuses_all_but_reset_and_close(cached, cache):
    cache._store.kv_blocks.block_ref_counts[0] = -1
    with pytest.raises(InvariantError):
        cache.check_invariants()
    for call in (lambda: cache.prefill(ONE), lambda: cache.generate([PROMPT], **OPTIONS)):
        with pytest.raises(PoisonedError, match=r"reset\(\) makes everything new"):
            call()
    assert cached.plain().equal(cached.answer)
    cache.stats()
    cache.reset()
    cached.check(cache, ONE, "a")
    cache._store.kv_blocks.block_ref_counts[0] = -1
    with pytest.raises(InvariantError):
        cache.check_invariants()
    cache.close()
    with pytest.raises(StepOrderError, match="closed"):
        cache.prefill(ONE)
    assert cached.plain().equal(cached.answer)


def test_a_cache_is_not_called_from_within_one_of_its_calls(cache):
    def meddle(input_ids, scores, **_):
        for call in (lambda: cache.prefill(ONE), cache.reset, cache.close):
            with pytest.raises(ConcurrentUseError, match="from within it while generate was"):
                call()
        cache.stats()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    cache.generate([PROMPT], stopping_criteria=[meddle], **OPTIONS)
    cache.check_invariants()


def test_other_threads_wait_and_an_interrupted_one_does_not_stop_them(cached, cache, monkeypatch):
    struck(monkeypatch, cache._store.tensors, "save_tokens")
    with pytest.raises(KeyboardInterrupt):
        cache.prefill(ONE)
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(cache.generate([PROMPT], **OPTIONS)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 3
    assert all(answer.equal(cached.answer) for answer in answers)


def test_an_error_of_the_package_in_the_middle_gives_everything_back(cached, cache, monkeypatch):
    """Of a placement, say: the books are proved whatever is raised."""

    def refuse(_):
        raise InvalidArgumentError("no")

    monkeypatch.setattr(cache._prefiller, "_placement", SimpleNamespace(positions=refuse))
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="no"):
            cache.prefill(OTHER, cache_salt="a")
    monkeypatch.undo()
    assert cache.stats().used_blocks == 0
    cached.check(cache, ONE, "a")
