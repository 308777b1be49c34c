"""Arguments of any kind: accepted, or refused by an error of the package that changes nothing."""

import warnings

import pytest
from example_counts import NIGHTLY, examples
from fuzz_rig import JUNK, TARGETS, state_of
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.errors import MambaCacheError

junk = st.sampled_from(JUNK)
each_target = pytest.mark.parametrize("name", TARGETS)


@each_target
def test_the_arguments_of_the_table_are_accepted(name):
    target = TARGETS[name]
    it = target.make()
    target.call(it, **target.arguments(it))


@each_target
def test_each_argument_takes_anything_or_refuses_it(name, rng):
    target = TARGETS[name]
    it = target.make()
    before = state_of(it)
    for argument in target.arguments(it):
        for index in range(len(JUNK)) if NIGHTLY else rng.permutation(len(JUNK))[:20]:
            if try_call(target, it, before, {argument: JUNK[index]}):
                it = target.make()
                before = state_of(it)


@each_target
@examples(25)
@given(data=st.data())
def test_several_arguments_take_anything_or_refuse_it(name, data):
    target = TARGETS[name]
    it = target.make()
    names = sorted(target.arguments(it))
    if len(names) > 1:
        changes = data.draw(st.dictionaries(st.sampled_from(names), junk, min_size=2))
        try_call(target, it, state_of(it), changes)


def try_call(target, it, before, changes):
    """Call with some arguments changed; return whether they are accepted."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy and torch warn of values that are refused
            target.call(it, **target.arguments(it) | changes)
    except MambaCacheError as refusal:
        error = refusal
    except Exception as foreign:
        raise AssertionError(f"{changes}: {foreign!r}") from foreign
    else:
        check = getattr(it, "check_invariants", lambda: None)
        check()
        return True
    assert str(error), changes
    assert state_of(it) == before, f"{changes}: {error!r} was raised, but something changed"
    return False
