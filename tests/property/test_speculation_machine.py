"""Steps with drafts under every order of calls."""

from context_machine import WholeArrays
from example_counts import examples
from speculation_machine import SpeculationMachine


class WholeArraysMachine(WholeArrays, SpeculationMachine):
    """By whole arrays."""


TestSpeculationMachine = SpeculationMachine.TestCase
TestSpeculationMachine.settings = examples(50)
TestWholeArraysMachine = WholeArraysMachine.TestCase
TestWholeArraysMachine.settings = examples(50)
