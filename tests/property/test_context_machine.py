"""The context under every order of calls, against a plain model of what may be found."""

from context_machine import ContextMachine, WholeArrays
from example_counts import examples


class WholeArraysMachine(WholeArrays, ContextMachine):
    """By whole arrays."""


TestContextMachine = ContextMachine.TestCase
TestContextMachine.settings = examples(100)
TestWholeArraysMachine = WholeArraysMachine.TestCase
