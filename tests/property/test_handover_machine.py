"""Layers that forget to hand over, in any step: nothing wrong is ever found afterwards.

What a request resumes from shows in its logits, which are compared with those of a run without a
cache; small pools see to it that slots hold other prefixes' states before.
"""

import contextlib
import random

import pytest
import torch
from context_machine import ContextMachine
from context_rig import MODEL, VOCAB, UncachedRuns, make_config, make_context
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from speculation_machine import SpeculationMachine

from mamba_cache.context import Request, RequestStatus
from mamba_cache.errors import CapacityError, InvalidArgumentError
from mamba_cache.slots import EveryNthBlock


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


STEMS = [tuple((a * i * i + 3 * i + a) % VOCAB for i in range(40)) for a in (1, 5, 9)]
UNCACHED = UncachedRuns()


def draw_request(rng, number):
    stem = STEMS[rng.integers(3)][: int(rng.choice([17, 24, 33, 40]))]
    prompt = (*stem, *rng.integers(0, VOCAB, rng.integers(0, 3)).tolist())
    return Request(request_id=number, prompt_tokens=list(prompt), cache_salt=f"{rng.integers(2)}")


@ignored
@pytest.mark.parametrize("drafts", [0, 2])
def test_many_requests_of_two_salts_over_few_slots(rng, drafts):
    """Each step some layers forget; all that is restored meanwhile is right."""
    config = make_config(num_kv_blocks=20, max_slots=5, num_speculative_tokens=drafts)
    context = make_context(config, placement=EveryNthBlock(1))
    running = {}
    for number in range(60):
        request = draw_request(rng, number)
        chunk = int(rng.choice([8, 13, 99]))
        with contextlib.suppress(CapacityError):
            context.add_request(request, chunk_tokens=chunk)
            running[number] = tuple(request.prompt_tokens)
        while context.request_table.scheduled_requests():
            step = context.begin_step()
            forgets = {layer for layer in (0, 1) if rng.random() < 0.15}
            logits = MODEL.forward(step.metadata, Forgetful(context, forgets, set()))
            sampled = {}
            for scheduled, row in zip(step.requests, logits, strict=True):
                name = scheduled.request_id
                if scheduled.samples:
                    known = context.request_table.find(name).generated
                    wanted = UNCACHED.logits(running[name], len(known))
                    torch.testing.assert_close(row, wanted, rtol=0, atol=1e-9)
                    sampled[name] = int(wanted.argmax())
            context.commit_step(sampled)
            context.check_invariants()
            for name in running:
                if context.status(name) is RequestStatus.PREFILLING:
                    context.schedule_prefill(name)
        for name in [name for name in running if rng.random() < 0.7]:
            context.finish(name)
            del running[name]
    stats = context.stats()
    assert min(stats.hits, stats.unwritten_states, stats.evicted_slots) > 2, stats
