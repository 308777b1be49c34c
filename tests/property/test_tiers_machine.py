"""Context, host tier and disk together under every order of calls, and of copies that come late."""

from example_counts import few_examples
from fresh_examples import all_drawn
from hypothesis import settings
from store_machine import StoreMachine
from tiers_machine import DiskMachine, TieredMachine

TestTieredMachine = all_drawn(TieredMachine.TestCase)
TestTieredMachine.settings = settings(max_examples=2 * settings.default.max_examples)
TestDiskMachine = all_drawn(DiskMachine.TestCase)
TestDiskMachine.settings = few_examples(50)
TestStoreMachine = all_drawn(StoreMachine.TestCase)
TestStoreMachine.settings = few_examples(20)
