"""Batches of prompts for tiny hybrid models, and the answer to each single prompt."""

from __future__ import annotations

import torch
from transformers import GenerationConfig
from transformers_rig import VOCABULARY, make_cache, make_model

SERVED = (
    "nemotron_h", "granite 4", "falcon_h1", "zamba2", "qwen3_next", "qwen3_5", "lfm2",
    "olmo_hybrid", "mamba2",
)  # fmt: skip
"""Families whose batches are compared with ``generate``."""


class Subject:
    """A model and its greedy answers, each computed once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = make_model(name)
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """The first ``count`` tokens of ``generate`` for a single prompt without a cache."""
        known = self._answers.get(tuple(prompt), [])
        if len(known) < count:
            ids = torch.tensor([prompt])
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                eos_token_id=None,
            )
            known = self._answers[tuple(prompt)] = output[0, len(prompt) :].tolist()
        return known[:count]

    def config(self, **options: object) -> GenerationConfig:
        """A configuration without an EOS token."""
        return GenerationConfig(eos_token_id=-1, **options)

    def cache(self, **settings: object):
        """A cache whose batches may use all of its memory."""
        return make_cache(self.model, **{"max_requests": 8, **settings})


_SUBJECTS: dict[str, Subject] = {}


def subject(name: str) -> Subject:
    """The subject of a family, created once."""
    if name not in _SUBJECTS:
        _SUBJECTS[name] = Subject(name)
    return _SUBJECTS[name]


def tokens(generator: torch.Generator, length: int) -> list[int]:
    """Random token ids, none of them special."""
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def batch(cache, prompts, **options):
    """Outputs of ``generate_batch`` in order; check invariants afterwards."""
    if options.get("generation_config") is None:
        options = {"max_new_tokens": 6, "eos_token_id": None, **options}
    outputs = cache.generate_batch(prompts, **options)
    cache.check_invariants()
    assert not cache._batcher.context.statuses()
    return list(outputs.values())


def answers(outputs) -> list[list[int]]:
    """The tokens of each answer."""
    return [output.generated_tokens for output in outputs]


def answer(cache, prompt, *, is_batch, count=3, **options) -> list[int]:
    """A cache's answer to a prompt, by ``generate`` or in a batch."""
    if is_batch:
        return answers(batch(cache, [prompt], max_new_tokens=count, **options))[0]
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, **options}
    output = cache.generate([prompt], **options)
    cache.check_invariants()
    return output[0, len(prompt) :].tolist()
