"""Steps with drafts under every order of calls."""

from hypothesis import settings
from speculation_machine import SpeculationMachine

TestSpeculationMachine = SpeculationMachine.TestCase
TestSpeculationMachine.settings = settings(max_examples=2 * settings.default.max_examples)
