"""A context over tiers, interrupted at moments of its calls: never wrong, nothing held.

At some moments of each call, the same in each run; ``python tests/interrupt_table.py`` tries all,
``--only Tiers``, ``--only DiskTier`` and ``--only RemoteTier``.
"""

import pytest
from injectors import LineOfSignals
from interrupt_lower_rig import LOWER_TIER_CALLS, DiskRun, StoreRun, signal_tier
from interrupt_rig import Search
from interrupt_tiers_rig import TIER_CALLS


@pytest.mark.parametrize("name", TIER_CALLS)
def test_an_interrupted_context_over_tiers_is_whole_or_says_that_it_is_not(name):
    search = Search(TIER_CALLS[name], LineOfSignals)
    assert search.survey(search.moments(12))[1] == []


@pytest.mark.parametrize("name", LOWER_TIER_CALLS)
def test_an_interrupted_call_of_a_lower_tier_loses_nothing(name):
    """Flush and close end, counts agree, who is told is told once, no memory is kept."""
    search = Search(LOWER_TIER_CALLS[name], LineOfSignals)
    assert search.survey(search.moments(24))[1] == []


@pytest.mark.parametrize("kind", [DiskRun, StoreRun])
def test_a_lower_tier_whose_caller_gets_signals_loses_nothing(kind, rng):
    """At any instant, also while it waits in a flush."""
    assert signal_tier(kind, rng, 200)["KeyboardInterrupt"] >= 190
