"""The context under every order of calls, compared with a plain model of the findable prefixes."""

from context_machine import ContextMachine
from example_counts import examples

TestContextMachine = ContextMachine.TestCase
TestContextMachine.settings = examples(200)
