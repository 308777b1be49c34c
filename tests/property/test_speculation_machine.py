"""Steps with drafts under every order of calls."""

from example_counts import examples
from speculation_machine import SpeculationMachine

TestSpeculationMachine = SpeculationMachine.TestCase
TestSpeculationMachine.settings = examples(100)
