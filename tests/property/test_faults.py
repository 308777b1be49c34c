"""Interrupted calls: the context continues correctly, or becomes unusable."""

import pytest
from fault_rig import CALLS, Outcome, Survey
from injectors import INJECTORS


@pytest.mark.parametrize("injector", INJECTORS.values(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_breaks_off_leaves_nothing_half_done(call, injector):
    """The call is interrupted at every point."""
    survey = Survey(CALLS[call], injector)
    for moment in range(1, survey.num_moments + 1):
        survey.inject(moment)
    if call == "match":
        assert set(survey.outcomes) <= {Outcome.UNCHANGED}
