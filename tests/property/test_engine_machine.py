"""The engine under every order of calls: each answer equals that of a run alone, uncached."""

from dataclasses import replace
from functools import cache
from random import Random

from engine_rig import BLOCK, FailingModel, ModelFailure, alone, cache_config, step_checked
from example_counts import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mamba_cache.cache import EveryNthBlock, LastBlock
from mamba_cache.reference import Engine, NgramDrafter, SamplingParams

STEM = [(5 * i * i + 11 * i) % 256 for i in range(48)]
TAILS = [[], [1], [2, 3, 2, 3, 2], list(range(90, 103)), [7] * 24]
TENANTS = [{"cache_salt": "a"}, {"lora_id": 1}, {"multimodal_keys": [(9, "a")]}]
SAMPLINGS = [
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=14),
    SamplingParams(max_new_tokens=23, temperature=1.0, top_k=9, seed=5),
    SamplingParams(max_new_tokens=23, temperature=2.0, stop_tokens=range(0, 256, 7)),
    SamplingParams(max_new_tokens=23, stop_tokens=range(0, 256, 9)),
]


@cache
def answer(prompt, sampling):
    return alone(list(prompt), sampling)


class Guesser:
    """Proposes the right tokens, except at every fifth position."""

    def __init__(self, prompt, tokens):
        self._right = [*prompt, *tokens]

    def propose(self, tokens, max_drafts):
        known = len(tokens)
        guessed = enumerate(self._right[known : known + max_drafts], known)
        return [token if place % 5 else (token + 1) % 256 for place, token in guessed]


class Wild:
    """Proposes random tokens, more than requested."""

    def __init__(self):
        self._random = Random(0)

    def propose(self, tokens, max_drafts):
        return [
            self._random.randrange(256) for _ in range(self._random.randrange(2 * max_drafts + 1))
        ]


class EngineMachine(RuleBasedStateMachine):
    """``self.expected`` holds each request's prompt, sampling and answer until it is finished."""

    @initialize(
        num_speculative_tokens=st.sampled_from([0, 1, 3]),
        drafter=st.sampled_from([None, None, NgramDrafter, Wild]),
        num_kv_blocks=st.sampled_from([3, 7, 12, 100]),
        max_slots=st.sampled_from([0, 1, 3, 50]),
        max_requests=st.sampled_from([1, 3, 8]),
        max_tokens=st.sampled_from([5, 24, 64]),
        max_sequence_length=st.sampled_from([80, 80, 30]),
        eviction_policy=st.sampled_from(["lru", "ref_zero"]),
        max_wait_steps=st.sampled_from([0, 2, 64]),
        placement=st.sampled_from([None, LastBlock(), EveryNthBlock(1)]),
        save_decode_states=st.booleans(),
        min_computed_tokens=st.sampled_from([1, 1, 5]),
    )
    def start(self, drafter, max_wait_steps, placement, **changes):
        self.model = FailingModel()
        self.engine = Engine(
            self.model,
            cache_config(**changes),
            max_wait_steps=max_wait_steps,
            placement=placement,
            drafter=drafter or (lambda: Guesser(*self.newest)),
        )
        self.config = self.engine.context.config
        self.expected = {}
        self.received = {}

    @rule(
        stem=st.sampled_from([0, BLOCK, 2 * BLOCK, 2 * BLOCK + 3, 3 * BLOCK, 5 * BLOCK]),
        tail=st.sampled_from(TAILS),
        sampling=st.sampled_from(SAMPLINGS),
        tenant=st.just({}) | st.sampled_from(TENANTS),
        positions=st.lists(st.integers(0, 60), max_size=2),
        n=st.sampled_from([1, 2, 4]),
    )
    def submit(self, stem, tail, sampling, tenant, positions, n):
        longest = self.config.max_sequence_length
        prompt = (STEM[:stem] + tail or [1])[:longest]
        positions = [min(position, longest) for position in positions]
        tokens = answer(tuple(prompt), sampling)
        self.newest = prompt, tokens
        n = n if sampling.temperature else 1
        first = self.engine.submit(prompt, sampling, n=n, checkpoint_positions=positions, **tenant)
        for index in range(n):
            request_id = (first, index) if index else first
            its_own = replace(sampling, seed=sampling.seed + index)
            self.expected[request_id] = prompt, its_own, answer(tuple(prompt), its_own)
            self.received[request_id] = []

    @rule(times=st.integers(1, 12), fails=st.booleans())
    def steps(self, times, fails):
        """Run steps, the last of which may fail."""
        if fails:
            self.model.failing_steps.add(self.model.num_steps + times)
        for _ in range(times):
            self.step()

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def cancel(self, data):
        self.end(data.draw(st.sampled_from(list(self.expected))))

    def end(self, request_id):
        self.engine.cancel(request_id)
        del self.expected[request_id]

    @invariant()
    def invariants_hold(self):
        if hasattr(self, "engine"):
            self.engine.context.check_invariants()
            assert self.engine.num_requests == len(self.expected)

    def step(self):
        try:
            events = step_checked(self.engine)
        except ModelFailure:
            return
        for event in events:
            if event.token is not None:
                self.received[event.request_id].append(event.token)
            if event.completion:
                self.check(event.completion)

    def check(self, done):
        prompt, sampling, tokens = self.expected.pop(done.request_id)
        assert list(done.tokens) == self.received[done.request_id]
        longest = self.config.max_sequence_length + 1 - len(prompt)
        if done.finish_reason == "failed":
            # The last token is never computed.
            blocks = -(-(len(prompt) + min(sampling.max_new_tokens, longest) - 1) // BLOCK)
            assert blocks > self.config.num_kv_blocks
            assert done.tokens == tokens[: len(done.tokens)]
        else:
            assert done.tokens == tokens[:longest]

    def teardown(self):
        """In the end the engine finishes all requests and holds nothing."""
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.expected:
                break
            self.step()
        assert self.engine.num_requests == len(self.expected) == 0
        stats = self.engine.context.stats()
        assert stats.used_blocks == stats.reserved_slots == 0


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = examples(22)
