"""State machines whose examples are all drawn independently."""

from unittest import mock

from hypothesis.internal.conjecture.engine import ConjectureRunner


def only_drawn():
    """Turn off Hypothesis's mutation of earlier examples in the ``with`` block.

    Hypothesis creates most examples of a machine by repeating parts of an example. This finds
    failures that need equal values, but others less often. Failures are shrunk as usual.
    """
    return mock.patch.object(ConjectureRunner, "generate_mutations_from")


def all_drawn(test_case):
    """A machine's ``TestCase`` whose examples are all drawn independently."""

    class Drawn(test_case):
        def runTest(self):
            with only_drawn():
                super().runTest()

    Drawn.__qualname__ = Drawn.__name__ = test_case.__name__
    return Drawn
