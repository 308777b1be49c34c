"""Steps with drafts under every order of calls."""

from example_counts import examples
from speculation_machine import SpeculationMachine

from mamba_cache.context import request_table


class WholeArraysMachine(SpeculationMachine):
    """Requests are given blocks by whole arrays, as otherwise only many at once are."""

    few = request_table._FEW

    def __init__(self):
        super().__init__()
        request_table._FEW = 0

    def teardown(self):
        super().teardown()
        request_table._FEW = self.few


TestSpeculationMachine = SpeculationMachine.TestCase
TestSpeculationMachine.settings = examples(50)
TestWholeArraysMachine = WholeArraysMachine.TestCase
TestWholeArraysMachine.settings = examples(50)
