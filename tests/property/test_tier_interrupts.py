"""A context over tiers, interrupted at moments of its calls: never wrong, nothing held.

At some moments of each call, the same in each run; ``python tests/interrupt_table.py --only Tiers``
tries all.
"""

import pytest
from injectors import LineAboveDisk
from interrupt_rig import Search
from interrupt_tiers_rig import TIER_CALLS


@pytest.mark.parametrize("name", TIER_CALLS)
def test_an_interrupted_context_over_tiers_is_whole_or_says_that_it_is_not(name):
    search = Search(TIER_CALLS[name], LineAboveDisk)
    assert search.survey(search.moments(12))[1] == []
