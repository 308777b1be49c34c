"""Calls that break off: the context goes on rightly, or says that it cannot."""

import pytest
from example_counts import NIGHTLY
from fault_rig import CALLS, Outcome, Survey
from injectors import INJECTORS


@pytest.mark.parametrize("injector", INJECTORS.values(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_breaks_off_leaves_nothing_half_done(call, injector, rng):
    survey = Survey(CALLS[call], injector)
    moments = range(1, survey.num_moments + 1)
    few = sorted(rng.choice(moments, min(len(moments), 6), replace=False)) if moments else ()
    for moment in moments if NIGHTLY else few:
        survey.inject(int(moment))
    if call == "match":
        assert set(survey.outcomes) <= {Outcome.UNCHANGED}
