"""The number of examples of tests for which the profile's number does not fit."""

from hypothesis import settings

_ALL = settings.default.max_examples
_LONG = settings.get_profile("long").max_examples
_FEW = 10

NIGHTLY = _ALL > _LONG
"""Whether the profile runs as many examples as time allows."""


def examples(count: int) -> settings:
    """Draw ``count`` examples in the profile ``long``, and a proportional number in others.

    The nightly profile draws at least its usual number of examples. A profile with very few
    examples draws at most its usual number.
    """
    if _ALL <= _FEW:
        return settings(max_examples=min(count, _ALL))
    share = -(-count * _ALL // _LONG)
    return settings(max_examples=max(share, _ALL) if NIGHTLY else share)
