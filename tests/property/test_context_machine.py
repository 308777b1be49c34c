"""The context under every order of calls, against a plain model of what may be found."""

from context_machine import ContextMachine
from example_counts import examples

from mamba_cache.context import request_table


class WholeArraysMachine(ContextMachine):
    """Requests are given blocks by whole arrays, as otherwise only many at once are."""

    few = request_table._FEW

    def __init__(self):
        super().__init__()
        request_table._FEW = 0

    def teardown(self):
        super().teardown()
        request_table._FEW = self.few


TestContextMachine = ContextMachine.TestCase
TestContextMachine.settings = examples(100)
TestWholeArraysMachine = WholeArraysMachine.TestCase
