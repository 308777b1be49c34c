"""Context, host tier and disk together under every order of calls, and of copies that come late.

``FAULTS`` are put into the tiers one at a time, to see that the machine notices.
"""

import pytest
from broken_tiers import FAULTS, FOUND, broken, show
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


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_tiers_is_noticed(fault):
    show(fault)
    with broken(fault), pytest.raises(FOUND):
        show(fault)
