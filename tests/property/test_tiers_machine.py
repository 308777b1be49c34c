"""Context, host tier and disk together under every order of calls, and of copies that come late.

``FAULTS`` are put into the tiers one at a time, to see that the machine notices.
"""

import pytest
from broken_tiers import FAULTS, FOUND_SOON, STORE_FAULT, broken, found_by_example
from example_counts import NIGHTLY, examples
from fresh_examples import all_drawn
from store_machine import StoreMachine
from tiers_machine import DiskMachine, TieredMachine

TestTieredMachine = all_drawn(TieredMachine.TestCase)
TestTieredMachine.settings = examples(100)
TestDiskMachine = all_drawn(DiskMachine.TestCase)
TestDiskMachine.settings = examples(50)
TestStoreMachine = all_drawn(StoreMachine.TestCase)
TestStoreMachine.settings = examples(20)


@pytest.mark.parametrize("fault", [*(FAULTS if NIGHTLY else FOUND_SOON), STORE_FAULT])
def test_a_fault_of_the_tiers_is_noticed(fault):
    assert found_by_example(fault)


def test_the_faults_are_still_put_in():
    """Each names what it takes the place of, and undoes it."""
    for fault in (*FAULTS, STORE_FAULT):
        with broken(fault):
            pass
