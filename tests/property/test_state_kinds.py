"""States of several kinds, under every order of calls."""

from context_machine import ContextMachine
from context_rig import UncachedRuns
from example_counts import examples
from kinds_rig import EVERY, MIXED
from speculation_machine import SpeculationMachine

SLOW = examples(12)


class MixedMachine(ContextMachine):
    """Gated DeltaNet, Mamba-2, short convolutions and attention in one model."""

    longest_answer = 6
    model, uncached = MIXED, UncachedRuns(6, model=MIXED)


TestMixedMachine = MixedMachine.TestCase
TestMixedMachine.settings = SLOW


class EveryKindSpeculationMachine(SpeculationMachine):
    """With drafts: each state after a draft lies in a live row of its own."""

    longest_answer = 8
    model, uncached = EVERY, UncachedRuns(16, model=EVERY)


TestEveryKindSpeculationMachine = EveryKindSpeculationMachine.TestCase
TestEveryKindSpeculationMachine.settings = SLOW
