"""Prefix caches whose calls are interrupted; ``tests/property/test_interrupts.py`` has the others."""

import pytest
from interrupt_cache_rig import cache_calls
from interrupt_rig import Search

CALLS = cache_calls()


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_cache_serves_nothing_wrong_and_lets_the_model_go(name):
    """Removed to see it fail: ``remove_hooks``, and ``let_go``, in ``PrefixCache._take_back``."""
    search = Search(CALLS[name])
    assert search.survey(search.moments(12))[1] == []
