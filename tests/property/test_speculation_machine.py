"""Steps with drafts under every order of calls."""

from example_counts import few_examples
from speculation_machine import SpeculationMachine

TestSpeculationMachine = SpeculationMachine.TestCase
TestSpeculationMachine.settings = few_examples(60)
