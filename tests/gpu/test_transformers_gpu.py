"""The prefix cache of transformers models on a GPU, with the kernels that are installed there."""

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

import torch
from gpu_models import BLOCK, make_model

from mamba_cache.integrations.transformers import PrefixCache
from mamba_cache.integrations.transformers.layers import PrefixTensors, read_layers
from mamba_cache.integrations.transformers.probe import probe
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.states import StatePool

pytestmark = pytest.mark.gpu

FAMILIES = ("mamba2", "nemotron_h", "granitemoehybrid", "qwen3_next", "falcon_h1")
CUTS = (BLOCK, 3 * BLOCK)
LENGTH = 5 * BLOCK - 7


@pytest.fixture(params=FAMILIES)
def model(request):
    return make_model(request.param)


def tokens(generator, count=LENGTH):
    return torch.randint(3, 512, (count,), generator=generator).tolist()


def kept(layout, cache, count):
    memory = read_layers(cache, layout.layers, count)
    return [t.double() for t in (*memory.states, *layout.pad_windows(memory))]


def distance(one, other):
    return [
        (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(a)).item()
        for a, b in zip(one, other, strict=True)
    ]


def test_captured_states_are_those_of_a_run_in_parts(model, generator):
    """Their distance is at most that of two runs in different parts at the prompt's end."""
    runner = ModelRunner(model)
    (layout, _, capture), ids = probe(runner, BLOCK), tokens(generator)
    assert capture is not None
    parts, expected = runner.new_cache(), {}
    for begin, end in zip((0, *CUTS), (*CUTS, LENGTH), strict=True):
        runner.forward(ids[begin:end], parts, begin)
        expected[end] = kept(layout, parts, end)
    saved = PrefixTensors(layout, StatePool(layout.state_spec, 2, device="cuda"), 1)
    for tensor in saved.states.tensors.values():
        tensor.fill_(float("nan"))
    rooms = {p: saved.room(slot, p) for slot, p in enumerate(CUTS)}
    whole = runner.new_cache()
    with capture.during(whole, 0, LENGTH, rooms) as captured:
        runner.forward(ids, whole, 0)
    assert captured == set(CUTS)
    rounding = max(distance(expected[LENGTH], kept(layout, whole, LENGTH)))
    for position, room in rooms.items():
        got = [t.double() for t in (*room.states, *room.windows)]
        # The first layer's convolution state depends on the projection only.
        assert max(distance(expected[position], got)) <= 4 * rounding + 0.01


def make_cache(model, **settings):
    sizes = {"mamba_cache_gb": 0.1, "kv_cache_gb": 0.1, "block_size_tokens": BLOCK}
    return PrefixCache(model, **sizes, **settings)


def test_hits_are_equal_to_the_bit_and_near_the_miss(model, generator):
    """A hit is as near to the miss as a run in two parts is to a whole run."""
    cache, ids = make_cache(model), tokens(generator)
    caches = [cache.prefill(ids) for _ in range(3)]
    boundary = LENGTH // BLOCK * BLOCK
    assert cache.stats().skipped_tokens == 2 * boundary
    runner, layout = cache._runner, cache._store.layout
    parts = runner.new_cache()
    runner.forward(ids[:boundary], parts, 0)
    runner.forward(ids[boundary:], parts, boundary)
    miss, hit, again, two_parts = (kept(layout, one, LENGTH) for one in (*caches, parts))
    assert all(torch.equal(one, other) for one, other in zip(hit, again, strict=True))
    assert max(distance(miss, hit)) <= 4 * max(distance(miss, two_parts)) + 0.01
