"""The context under every order of calls, against a plain model of what may be found."""

from context_machine import ContextMachine
from hypothesis import settings

TestContextMachine = ContextMachine.TestCase
TestContextMachine.settings = settings(max_examples=2 * settings.default.max_examples)
