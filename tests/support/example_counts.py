"""How many examples a test draws whose examples are slow."""

from hypothesis import settings

_ALL = settings.default.max_examples


def few_examples(count: int) -> settings:
    """So many where the profile asks for few, as in every run; where it asks for many, all."""
    return settings(max_examples=_ALL if _ALL > 100 else min(count, _ALL))
