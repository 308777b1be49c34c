"""The context under every order of calls, against a plain model of what may be found."""

from context_machine import ContextMachine
from example_counts import examples

TestContextMachine = ContextMachine.TestCase
TestContextMachine.settings = examples(200)
