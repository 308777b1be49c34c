"""Layers that forget to hand over, in any step: nothing wrong is ever found afterwards.

What a request resumes from shows in its logits, which are compared with those of a run without a
cache; small pools see to it that slots hold other prefixes' states before.
"""

import random

import pytest
from context_machine import ContextMachine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from speculation_machine import SpeculationMachine

from mamba_cache.errors import InvalidArgumentError


class Forgetful:
    """A context of which some layers hand nothing over, or first what is too short."""

    def __init__(self, context, forgets, cuts):
        self._context, self._forgets, self._cuts = context, forgets, cuts

    def __getattr__(self, name):
        return getattr(self._context, name)

    def extract_checkpoint_states(self, layer, chunk_states, conv_input, metadata):
        if layer in self._cuts and metadata.num_checkpoints:
            with pytest.raises(InvalidArgumentError, match="handed over"):
                self._context.extract_checkpoint_states(
                    layer, chunk_states[:-1], conv_input, metadata
                )
        if layer not in self._forgets:
            self._context.extract_checkpoint_states(layer, chunk_states, conv_input, metadata)


class _Forgetting:
    """What both machines add: in some steps some layers fail."""

    _random = random.Random(0)

    @initialize(seed=st.integers(0, 2**32))
    def begin_forgetting(self, seed):
        self._random = random.Random(seed)

    def forget(self):
        super().forget()
        # What should have been saved may not be, but what is found must be right as ever.
        self.exact = self.keeps_all = False

    def caches(self):
        forgets, cuts = ({i for i in (0, 1) if self._random.random() < 0.3} for _ in range(2))
        return Forgetful(self.context, forgets, cuts)


class ForgettingMachine(_Forgetting, ContextMachine):
    """Layers forget in steps without drafts."""


class ForgettingSpeculationMachine(_Forgetting, SpeculationMachine):
    """Layers forget in steps with drafts."""


for _machine in (ForgettingMachine, ForgettingSpeculationMachine):
    _machine.TestCase.settings = settings(max_examples=settings.default.max_examples)

ignored = pytest.mark.filterwarnings("ignore::mamba_cache.errors.UnwrittenStateWarning")
TestForgetting = ignored(ForgettingMachine.TestCase)
TestForgettingWithDrafts = ignored(ForgettingSpeculationMachine.TestCase)
