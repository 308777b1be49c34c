"""How many examples a test draws, where the profile's number is not right for it."""

from hypothesis import settings

_ALL = settings.default.max_examples
_LONG = settings.get_profile("long").max_examples
_FEWEST = 10

NIGHTLY = _ALL > _LONG
"""Whether the profile asks for as many examples as there is time for."""


def examples(count: int) -> settings:
    """Draw ``count`` examples in the profile ``long``, its share in the others.

    The nightly profile draws at least as many as it draws of all other tests.
    """
    share = count * _ALL // _LONG
    return settings(max_examples=max(share, _ALL if NIGHTLY else min(count, _FEWEST)))
