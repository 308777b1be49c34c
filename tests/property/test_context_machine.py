"""The context under every order of calls, against a plain model of what may be found."""

from context_machine import ContextMachine
from example_counts import examples

from mamba_cache.context import context as context_module


class WholeArraysMachine(ContextMachine):
    """Requests are given blocks by whole arrays, as otherwise only many at once are."""

    few = context_module._FEW

    def __init__(self):
        super().__init__()
        context_module._FEW = 0

    def teardown(self):
        super().teardown()
        context_module._FEW = self.few


TestContextMachine = ContextMachine.TestCase
TestContextMachine.settings = examples(100)
TestWholeArraysMachine = WholeArraysMachine.TestCase
