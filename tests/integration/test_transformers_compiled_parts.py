"""Norms, MLPs and experts that a user compiled in place: the same answers, hits and batches."""

import re

import pytest
import torch
from batch_rig import Subject, answers, batch, tokens
from bench_serve import compile_parts
from transformers_rig import BLOCK

FAMILIES = ("granite 4", "qwen3_next")


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """``compile`` traces and guards as usual, and runs the traced graph without a C++ compiler."""
    compile = torch.nn.Module.compile

    def trace(self, **options):
        compile(self, backend="eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", trace)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_compiled_parts_answers_as_it_did(family, generator):
    one = Subject(family)  # not shared: the model is changed
    stem = tokens(generator, 3 * BLOCK)
    prompts = [stem + tokens(generator, length) for length in (5, 9, 9, 30)]
    expected = [one.answer(prompt, 6) for prompt in prompts]
    names = compile_parts(one.model)
    assert names
    assert all(re.search("Norm|MLP|MoE", name) for name in names)
    torch._dynamo.utils.counters.clear()
    cache = one.cache()
    assert answers(batch(cache, prompts)) == expected
    assert answers(batch(cache, prompts)) == expected
    for prompt, answer in zip(prompts * 2, expected * 2, strict=True):
        ids = torch.tensor([prompt])
        output = cache.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert output[0, len(prompt) :].tolist() == answer
    assert cache.stats().hits >= 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # it was compiled code


def test_what_lies_in_a_compiled_part_is_not_compiled_again():
    one = Subject("granite 4")
    compile_parts(one.model)
    parts = [m for m in one.model.modules() if m._compiled_call_impl is not None]
    inner = {m for part in parts for m in part.modules() if m is not part}
    assert parts
    assert not inner & {*parts}
