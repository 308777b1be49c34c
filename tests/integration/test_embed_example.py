"""The engine of the tutorial: right with little memory too, and when the model fails."""

import importlib.util

import pytest
import torch
from sources import ROOT

from mamba_cache import CacheConfig, DynamicInferenceContext, Request
from mamba_cache.errors import BlockCapacityError
from mamba_cache.reference import HybridModel

EXAMPLE = ROOT / "examples" / "embed_in_your_engine.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("embed_in_your_engine", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model():
    return HybridModel(dtype=torch.float64)


def make_engine(example, model, *, num_kv_blocks, cached=True, forward=None, **settings):
    config = CacheConfig(
        block_size_tokens=64,
        max_requests=4,
        max_tokens=256,
        max_sequence_length=1024,
        ssm_chunk_size=64,
        num_kv_blocks=num_kv_blocks,
        max_slots=4,
        enable_prefix_caching=cached,
    )
    context = DynamicInferenceContext(
        config, model.config.state_spec(model.dtype), model.config.kv_spec(model.dtype)
    )
    return example.TinyEngine(context, forward or model.forward, example.most_likely, **settings)


def submit(engine, prompts):
    for name, prompt in enumerate(prompts):
        engine.queue.append(Request(request_id=name, prompt_tokens=prompt))


@pytest.fixture
def prompts(rng):
    """Some share a beginning of up to two blocks; all grow into another block while decoding."""
    shared = rng.integers(0, 256, 128).tolist()
    lengths = (250, 120, 180, 62, 190)
    return [shared + rng.integers(0, 256, length).tolist() for length in lengths]


@pytest.mark.parametrize("num_kv_blocks", [8, 9, 11, 32])
def test_answers_do_not_depend_on_memory(example, model, prompts, num_kv_blocks):
    engines = [
        make_engine(
            example, model, num_kv_blocks=num_kv_blocks, chunk_tokens=96, max_new_tokens=80
        ),
        make_engine(example, model, num_kv_blocks=64, cached=False, max_new_tokens=80),
    ]
    for engine in engines:
        submit(engine, prompts)
        engine.run()
        engine.context.check_invariants()
    assert engines[0].answers == engines[1].answers
    assert engines[0].answers.keys() == set(range(len(prompts)))
    assert bool(engines[0].context.stats().preemptions) == (num_kv_blocks < 12)


def test_what_does_not_fit_alone_is_told(example, model, prompts):
    engine = make_engine(example, model, num_kv_blocks=5)
    submit(engine, prompts)
    with pytest.raises(BlockCapacityError):
        engine.run()


def test_goes_on_after_a_model_that_failed(example, model, prompts):
    calls = []

    def forward(metadata, context):
        calls.append(metadata.num_tokens)
        logits = model.forward(metadata, context)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")
        return logits

    engine = make_engine(example, model, num_kv_blocks=32, forward=forward)
    uncached = make_engine(example, model, num_kv_blocks=64, cached=False)
    for one in (engine, uncached):
        submit(one, prompts)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.run()
    engine.run()
    uncached.run()
    assert engine.context.stats().aborted_steps == 1
    assert engine.answers == uncached.answers


def test_main(example, capsys):
    assert example.main() == 0
    output = capsys.readouterr().out
    assert "agree" in output
    assert "448" in output


def test_engine_is_short():
    """The tutorial promises an engine of about a hundred lines."""
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    start = lines.index("class TinyEngine:")
    end = next(i for i in range(start, len(lines)) if lines[i].startswith("def make_context"))
    assert end - start <= 105
