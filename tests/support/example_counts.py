"""How many examples a test draws, where the profile's number is not right for it."""

from hypothesis import settings

_ALL = settings.default.max_examples
_LONG = settings.get_profile("long").max_examples
_FEW = 10

NIGHTLY = _ALL > _LONG
"""Whether the profile asks for as many examples as there is time for."""


def examples(count: int) -> settings:
    """Draw ``count`` examples in the profile ``long``, and its share of them in the others.

    The nightly profile draws at least as many as of all other tests. One that asks for very few
    gets them.
    """
    if _ALL <= _FEW:
        return settings(max_examples=min(count, _ALL))
    share = -(-count * _ALL // _LONG)
    return settings(max_examples=max(share, _ALL) if NIGHTLY else share)
