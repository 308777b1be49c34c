"""Context, host tier and disk together under every order of calls, and of copies that come late."""

from example_counts import examples
from fresh_examples import all_drawn
from store_machine import StoreMachine
from tiers_machine import DiskMachine, TieredMachine

TestTieredMachine = all_drawn(TieredMachine.TestCase)
TestTieredMachine.settings = examples(100)
TestDiskMachine = all_drawn(DiskMachine.TestCase)
TestDiskMachine.settings = examples(50)
TestStoreMachine = all_drawn(StoreMachine.TestCase)
TestStoreMachine.settings = examples(20)
