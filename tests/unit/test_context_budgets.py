"""How a context is sized, and what it is not made for."""

import pytest
import torch
from context_rig import BLOCK, MODEL_CONFIG, make_config

from mamba_cache import errors
from mamba_cache.cache import MegatronPlacement
from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext
from mamba_cache.states import KVCacheSpec, StateSpec, StateTensorSpec

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
STATES, KV = MODEL_CONFIG.state_spec(torch.float64), MODEL_CONFIG.kv_spec(torch.float64)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"kv_cache_gb": 1e-9, "max_slots": 1}, errors.BudgetError, "dummy block"),
        ({"num_kv_blocks": 1, "mamba_cache_gb": 1e-9}, errors.BudgetError, "slot"),
    ],
)
def test_budgets_too_small(settings, error, words):
    with pytest.raises(error, match=words):
        DynamicInferenceContext(CacheConfig(**settings), STATES, KV)


def test_budgets_become_blocks_and_slots():
    block = KV.bytes_per_block(BLOCK)
    config = make_config(
        num_kv_blocks=None,
        max_slots=None,
        kv_cache_gb=10.5 * block / 2**30,
        mamba_cache_gb=3.5 * STATES.bytes_per_slot / 2**30,
    )
    context = DynamicInferenceContext(config, STATES, KV)
    assert context.kv_block_allocator.pool_size == 10
    assert context.kv_cache.nbytes == 10 * block
    assert context.slot_allocator.max_slots == 3
    assert context.stats().free_slots == 3


def test_a_model_without_attention_has_no_kv_budget():
    none = KVCacheSpec(0, 1, 4, torch.float64)
    with pytest.raises(errors.InvalidArgumentError, match="give num_kv_blocks"):
        DynamicInferenceContext(CacheConfig(kv_cache_gb=1.0, max_slots=1), STATES, none)


def test_unknown_device_is_refused():
    with pytest.raises(errors.InvalidArgumentError, match="nope"):
        DynamicInferenceContext(make_config(), STATES, KV, device="nope")


def test_own_kv_cache_needs_a_block_count():
    with pytest.raises(errors.InvalidArgumentError, match="num_kv_blocks"):
        DynamicInferenceContext(CacheConfig(kv_cache_gb=1.0, max_slots=1), STATES)
    context = DynamicInferenceContext(CacheConfig(num_kv_blocks=3, max_slots=1), STATES)
    assert context.kv_cache is None
    assert context.kv_block_allocator.pool_size == 4


def test_states_may_be_of_other_tensors_but_of_kinds_that_can_be_told_apart():
    """Layers are numbered by kind: two tensors of one kind cannot have other numbers of layers."""
    other = StateTensorSpec("other", 1, (2,), torch.float32)
    context = DynamicInferenceContext(make_config(), StateSpec((other,)), KV)
    assert context.bytes_per_slot == 8
    odd = StateSpec((other, StateTensorSpec("odd", 2, (2,), torch.float32)))
    with pytest.raises(errors.InvalidArgumentError, match="equally many layers"):
        DynamicInferenceContext(make_config(), odd, KV)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((CacheConfig(num_kv_blocks=4, max_slots=1), KV, STATES), "state_spec must be a StateSpec"),
        ((STATES, STATES, KV), "config must be a CacheConfig"),
        ((None, STATES, KV), "config must be a CacheConfig, got None"),
        ((CacheConfig(num_kv_blocks=4, max_slots=1), STATES, 3), "kv_spec must be a KVCacheSpec"),
    ],
)
def test_arguments_of_other_kinds_are_named(arguments, message):
    """Elsewhere specs in the wrong order were an AttributeError."""
    with pytest.raises(errors.InvalidArgumentError, match=message):
        DynamicInferenceContext(*arguments)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"placement": "last"}, r"placement must be .* such as MegatronPlacement\(\)"),
        ({"placement": MegatronPlacement}, "placement must be None or an object"),
        ({"slot_policy": "lru"}, "slot policy must be an object"),
        ({"device": 1.5}, "device must name a PyTorch device"),
    ],
)
def test_options_of_other_kinds_are_named(option, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        DynamicInferenceContext(make_config(), STATES, KV, **option)
