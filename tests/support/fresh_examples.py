"""Examples of state machines that are all drawn anew."""

from unittest import mock

from hypothesis.internal.conjecture.engine import ConjectureRunner


def only_drawn():
    """A time in which examples are not made from each other.

    Hypothesis makes most of a machine's examples by repeating parts of one, which finds what takes
    equal values, and tries the rest that much less. A failure is made smaller as ever.
    """
    return mock.patch.object(ConjectureRunner, "generate_mutations_from")


def all_drawn(test_case):
    """A machine's ``TestCase`` whose examples are all drawn anew."""

    class Drawn(test_case):
        def runTest(self):
            with only_drawn():
                super().runTest()

    Drawn.__qualname__ = Drawn.__name__ = test_case.__name__
    return Drawn
