"""A prefix cache installed on its model, whose weights, mode and dtype change between calls."""

import copy
import gc
import weakref
from unittest import mock

import pytest
import torch
from batch_rig import answers, tokens
from transformers import GenerationConfig
from transformers_rig import BLOCK, make_cache, make_model, plain

from mamba_cache.errors import (
    BudgetError,
    InvalidArgumentError,
    ModelChangedError,
    NotCopyableError,
    StepOrderError,
)
from mamba_cache.events import Removed, Stored
from mamba_cache.integrations.transformers.batching.graphs import StepGraphs

ANSWER = 6
CONFIG = GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1)


@pytest.fixture
def model():
    return make_model("qwen3_5")


@pytest.fixture
def prompts(generator):
    """Prompts, each twice, as a trainer asks for several answers to each."""
    each = [tokens(generator, 3 * BLOCK + 2), tokens(generator, 2 * BLOCK + 5)]
    return [each[0], each[0], each[1], each[1]]


def installed_answers(model, prompts, **options):
    return answers(model.generate_batch(prompts, CONFIG, **options).values())


def own_answers(model, prompts):
    """The answers of ``model.generate`` to each prompt alone."""
    modes = [module.training for module in model.modules()]
    model.eval()
    ids = [torch.tensor([prompt]) for prompt in prompts]
    found = [plain(model, one, max_new_tokens=ANSWER).sequences[0, one.shape[1] :] for one in ids]
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return [one.tolist() for one in found]


def change_weights(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.roll(1, dims=0))


def test_the_model_has_it_until_the_with_is_left(model, prompts):
    with pytest.raises(ValueError, match="linear_attention"):
        model.generate_batch(prompts, CONFIG)
    with make_cache(model) as cache:
        with cache.install():
            assert installed_answers(model, prompts) == own_answers(model, prompts)
            assert cache.stats().hits == 2
            assert not cache.stats().bypasses  # it is no foreign code
        assert "generate_batch" not in vars(model)
        cache.install()
        cache.install()  # once more changes nothing
        cache.uninstall()
        assert "generate_batch" not in vars(model)
        cache.uninstall()
        cache.install()
    assert "generate_batch" not in vars(model)
    with pytest.raises(StepOrderError, match="closed"):
        cache.install()


def test_one_cache_at_a_time(model):
    with make_cache(model) as one, make_cache(model) as other, one.install():
        with pytest.raises(InvalidArgumentError, match="uninstall"):
            other.install()
        other.uninstall()
        assert vars(model)["generate_batch"] == one._generate_for_model


def test_prefixes_of_earlier_weights_are_gone(model, prompts):
    with make_cache(model) as cache, cache.install():
        before = installed_answers(model, prompts)
        change_weights(model)
        with pytest.raises(ModelChangedError):
            cache.generate_batch(prompts)
        after = installed_answers(model, prompts)
        assert after == own_answers(model, prompts) != before
        assert cache.stats().hits == 2  # of the second call alone
        installed_answers(model, prompts)
        assert cache.stats().hits == 6  # prefixes of unchanged weights stay findable


def test_graphs_outlive_an_optimizers_step(model, prompts):
    # Graphs read the weights in place. Capturing them again in each training step is slow.
    with make_cache(model) as cache, cache.install():
        installed_answers(model, prompts)
        with mock.patch.object(StepGraphs, "_drop", autospec=True) as drop:
            change_weights(model)
            installed_answers(model, prompts)
            assert drop.call_count == 0
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
            installed_answers(model, prompts)
            assert drop.call_count == 1  # dropped because addresses changed
            cache.reset()
            assert drop.call_count == 2


def test_modes_are_as_they_were(model, prompts):
    layers = list(model.modules())
    with make_cache(model) as cache, cache.install():
        model.train()
        layers[3].eval()
        modes = [module.training for module in layers]
        assert installed_answers(model, prompts) == own_answers(model, prompts)
        assert [module.training for module in layers] == modes
        with pytest.raises(InvalidArgumentError, match="token ids"):
            model.generate_batch([[10**6]])
        assert [module.training for module in layers] == modes
        with pytest.raises(InvalidArgumentError, match="training"):
            cache.generate_batch(prompts)


def test_a_cast_model_gets_memory_of_its_dtype(model, prompts, tmp_path):
    received = []
    settings = {"host_cache_gb": 0.01, "disk_cache_path": tmp_path, "disk_cache_gb": 0.01}
    with make_cache(model, **settings) as cache, cache.install():
        cache.listeners.add(received.append, Stored, Removed)
        listeners = cache.listeners
        installed_answers(model, prompts)
        bytes_before = cache.stats().bytes_per_slot
        model.to(torch.float64)
        with pytest.raises(ModelChangedError):
            cache.generate_batch(prompts)
        received.clear()
        assert installed_answers(model, prompts) == own_answers(model, prompts)
        assert cache.stats().bytes_per_slot > bytes_before
        assert cache.stats().hits == 2
        assert cache.listeners is listeners
        assert {type(event) for event in received} == {Stored, Removed}
        assert received[0].is_reset
        assert [tier.name for tier in cache.tier_stats()] == ["host", "disk"]
        cache.check_invariants()


def test_a_cast_that_the_budgets_do_not_hold(model, prompts):
    room = make_cache(model)._store.layout.state_spec.bytes_per_slot * 1.2 / 2**30
    with make_cache(model, mamba_cache_gb=room) as cache, cache.install():
        model.to(torch.float64)
        with pytest.raises(BudgetError, match="mamba_cache_gb"):
            installed_answers(model, prompts)
        with pytest.raises(StepOrderError, match="closed"):
            installed_answers(model, prompts)


def test_foreign_code_is_named_for_one_call(model, prompts):
    with make_cache(model) as cache, cache.install():
        hook = model.register_forward_hook(lambda *_: None)
        first = installed_answers(model, prompts, variant="own")
        change_weights(model)
        second = installed_answers(model, prompts, variant="own")
        assert second == own_answers(model, prompts) != first
        hook.remove()
        assert not cache.stats().bypasses


def test_a_model_is_not_copied_with_its_cache(model):
    with make_cache(model) as cache:
        with cache.install(), pytest.raises(NotCopyableError, match="uninstall"):
            copy.deepcopy(model)
        assert type(copy.deepcopy(model)) is type(model)


def test_what_is_left_installed_goes_with_the_model(prompts):
    model = make_model("qwen3_5")
    cache = make_cache(model)
    cache.install()
    left = weakref.ref(cache)
    del cache
    assert installed_answers(model, prompts) == own_answers(model, prompts)
    del model
    gc.collect()
    assert left() is None
