"""The memory of a context: sizes, fields that slots and embedders read, devices."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from context_rig import BLOCK, CHUNK, MODEL_CONFIG, add, make_config, make_context

from mamba_cache import Request, errors
from mamba_cache._torch import check_device_room
from mamba_cache.cache import EveryNthBlock, KVBlockAllocator, MegatronPlacement, SlotPool
from mamba_cache.config import CacheConfig, EvictionPolicy
from mamba_cache.context import DynamicInferenceContext
from mamba_cache.states import (
    CHECKPOINT_FIELDS,
    KVCacheSpec,
    LayerKind,
    StatePool,
    StateSpec,
    StateTensorSpec,
)

STATES, KV = MODEL_CONFIG.state_spec(torch.float64), MODEL_CONFIG.kv_spec(torch.float64)


def test_a_context_has_every_field_that_slots_read():
    config = make_config()
    context = make_context(config)
    blocks = context.kv_block_allocator
    assert context.max_requests == config.max_requests
    assert context.block_size_tokens == BLOCK
    assert context.prefix_caching_eviction_policy == config.eviction_policy
    assert context.mamba_chunk_size == context.ssm_chunk_alignment == CHUNK
    assert context.max_mamba_intermediate_states_per_step == 0
    assert context.paused_request_count == 0
    tables = context.request_to_kv_block_ids
    assert tables.dtype == torch.int32
    assert tables.shape == (config.max_requests, config.max_blocks_per_request)
    assert (tables == blocks.dummy_block_id).all()
    assert context.mamba_conv_states is context.live_states["conv"]
    assert context.mamba_ssm_states is context.live_states["ssm"]
    counts = context.batch_dimensions
    assert (counts.prefill_req_count, counts.decode_req_count) == (0, 0)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_metadata_that_slots_read(num_drafts):
    """With drafts, only the device can tell the row of a request's state."""
    metadata = make_context(make_config(num_speculative_tokens=num_drafts)).mamba_metadata
    rows = metadata.request_to_mamba_state_idx
    assert rows.dtype == torch.int32
    assert rows.tolist() == ([-1] * 4 if num_drafts else [0, 1, 2, 3])
    assert metadata.intermediate_count == 0
    assert metadata.per_request_intermediate_counts == ()


@pytest.mark.parametrize("policy", EvictionPolicy)
@pytest.mark.parametrize("is_cached", [False, True])
def test_kv_blocks_follow_the_settings(policy, is_cached):
    config = make_config(eviction_policy=policy, enable_prefix_caching=is_cached)
    blocks = make_context(config).kv_block_allocator
    assert blocks.eviction_policy == policy
    assert blocks.enable_prefix_caching == is_cached
    arrays = blocks.block_ref_counts, blocks.block_timestamps, blocks.block_hashes
    assert [array.dtype for array in arrays] == [torch.int32, torch.int64, torch.int64]


@pytest.mark.parametrize(("num_tokens", "num_checkpoints"), [(3 * BLOCK, 1), (CHUNK, 0)])
def test_only_the_steps_checkpoints_are_extracted(monkeypatch, num_tokens, num_checkpoints):
    """The buffers have room for many more checkpoints; a step without any launches nothing."""
    context = make_context()
    add(context, "a", [1] * num_tokens)
    metadata = context.begin_step().metadata
    calls = []

    def plan(*_, **options):
        calls.append(options["fields"])
        return lambda: None

    monkeypatch.setattr("mamba_cache.context.context.plan_extraction", plan)
    states, inputs = torch.empty(metadata.num_chunks, 0), torch.empty(num_tokens, 0)
    context.extract_checkpoint_states(0, states, inputs, metadata)
    assert len(metadata.checkpoint_slots) > num_checkpoints == metadata.num_checkpoints
    assert len(calls) == bool(num_checkpoints)
    for fields in calls:
        for name, field in zip(CHECKPOINT_FIELDS, fields, strict=True):
            assert torch.equal(field, getattr(metadata, name)[:num_checkpoints])


def test_a_window_that_is_called_conv_is_no_mamba_state():
    """Megatron's fields hold states of Mamba layers only."""
    kind = LayerKind("", 1, (("conv", (2, 3), torch.float32),))
    context = DynamicInferenceContext(make_config(), StateSpec.of(kind))
    assert [*context.live_states.tensors] == ["conv"]
    assert context.mamba_conv_states is context.mamba_ssm_states is None


@pytest.mark.parametrize("keeps", ["state", "window"])
def test_layers_may_keep_a_state_or_a_window_alone(keeps):
    shape = (3,) if keeps == "state" else (2, 3)
    kind = LayerKind("k", 1, ((keeps, shape, torch.float32),))
    config = make_config(max_slots=4)
    context = DynamicInferenceContext(config, StateSpec.of(kind), placement=EveryNthBlock(1))
    context.add_request(Request(request_id="a", prompt_tokens=[1] * (2 * BLOCK + 1)))
    metadata = context.begin_step().metadata
    num_tokens, num_chunks = metadata.num_prefill_tokens, metadata.num_chunks
    states = torch.arange(3 * num_chunks).view(num_chunks, 3).float()
    inputs = torch.arange(2 * num_tokens).view(num_tokens, 2).float()
    given = ({"state": states}, {}) if keeps == "state" else ({}, {"window": inputs})
    context.extract_states("k", 0, *given, metadata)
    context.commit_step({"a": 1})
    saved = context.slot_allocator.states.tensors[f"k.{keeps}"]
    slots = [context.slot_allocator.get_slot(block) for block in (0, 1)]
    ends = [BLOCK // config.ssm_chunk_size, 2 * BLOCK // config.ssm_chunk_size]
    for slot, end, boundary in zip(slots, ends, (BLOCK, 2 * BLOCK), strict=True):
        wanted = states[end - 1] if keeps == "state" else inputs[boundary - 3 : boundary].T
        assert torch.equal(saved[0, slot], wanted)


def test_budgets_become_blocks_and_slots():
    block = KV.bytes_per_block(BLOCK) / 2**30

    def make(kv_gb, slots_gb=3.5 * STATES.bytes_per_slot / 2**30):
        budgets = {"kv_cache_gb": kv_gb, "mamba_cache_gb": slots_gb}
        config = make_config(num_kv_blocks=None, max_slots=None, **budgets)
        return DynamicInferenceContext(config, STATES, KV)

    context = make(10.5 * block)
    assert context.kv_block_allocator.pool_size == 10
    assert context.kv_cache.nbytes == 10 * KV.bytes_per_block(BLOCK)
    assert context.slot_allocator.max_slots == context.stats().free_slots == 3
    assert make(2 * block).kv_block_allocator.pool_size == 2  # the dummy block and one more
    with pytest.raises(errors.BudgetError, match=r"for one KV block .* dummy block"):
        make(1.9 * block)
    with pytest.raises(errors.BudgetError, match="slot"):
        make(2 * block, 1e-9)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_kv_blocks": None, "kv_cache_gb": 1e6}, "kv_cache_gb=1000000.0 and max_slots=100"),
        ({"num_kv_blocks": 2**31 - 2}, "num_kv_blocks=2147483646 and"),
        ({"max_slots": None, "mamba_cache_gb": 1e6}, "and mamba_cache_gb=1000000.0"),
        ({"max_slots": 2**31 - 1}, "and max_slots=2147483647"),
        ({"num_kv_blocks": None, "max_slots": None, "cache_gb": 1e6}, "cache_gb=1000000.0"),
        ({"max_requests": 10**8, "max_sequence_length": 2**20}, "max_requests=100000000 and"),
        ({"max_requests": 10**8, "max_sequence_length": 8}, "max_requests=100000000"),
        ({"max_requests": 1, "max_sequence_length": 2**31 - 1}, "max_requests=1 and"),
        (
            {"max_requests": 5000, "max_sequence_length": 2**20, "block_size_tokens": 2**20},
            "max_requests=5000 and",
        ),
        ({"max_tokens": 2**31 - 1}, "max_tokens=2147483647 and"),
        ({"host_cache_gb": 1e6}, "host_cache_gb=1000000.0"),
        ({"num_host_blocks": 2**31 - 1, "num_host_states": 2}, "num_host_blocks=2147483647 and"),
    ],
)
def test_memory_that_no_machine_has_is_refused_by_the_names_of_the_settings(
    monkeypatch, settings, named
):
    """Regression: numpy or torch raised, some after a minute, and named an array's shape."""
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 2**22))
    with pytest.raises(errors.BudgetError) as raised:
        make_context(make_config(**settings))
    assert named in str(raised.value)
    assert "GiB are needed, and 16.00 GiB are there" in str(raised.value)


def test_only_free_memory_of_a_gpu_counts(monkeypatch):
    """Freed memory that PyTorch's allocator caches counts as free."""
    free, reserved, allocated = 3 * 2**30, 2 * 2**30, 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    check_device_room(4 * 2**30, {"max_slots": 5}, "cuda:0")
    with pytest.raises(
        errors.BudgetError, match=r"max_slots=5 .* memory of cuda:0: .* 4\.00 GiB are"
    ):
        check_device_room(4 * 2**30 + 1, {"max_slots": 5, "cache_gb": None}, "cuda:0")


def test_many_requests_take_memory_when_they_come():
    """Regression: a context of a million requests took 26 s to make; it cleared a new GiB."""

    def resident():
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096

    before, width = resident(), 2048
    config = make_config(max_requests=50_000, block_size_tokens=width, max_sequence_length=width)
    context = make_context(config, poison=False)
    assert resident() - before < 50_000 * width * 4 / 2
    assert add(context, "a", range(8)).prompt_tokens == 8


@pytest.mark.parametrize(
    "make",
    [
        lambda: KVBlockAllocator(2**31 - 1),
        lambda: SlotPool(2**31 - 1, KVBlockAllocator(2)),
        lambda: StatePool(STATES, 2**31 - 1, device="cpu"),
        lambda: KV.allocate(2**31 - 1, BLOCK, "cpu"),
    ],
)
def test_oversized_parts_of_a_context_are_refused_by_name(monkeypatch, make):
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 2**20))
    with pytest.raises(errors.BudgetError, match="=2147483647 must fit into the memory of this"):
        make()


@pytest.mark.parametrize("kv_spec", [None, KVCacheSpec(0, 1, 4, torch.float64)])
def test_without_keys_and_values_blocks_are_counted(kv_spec, monkeypatch):
    """For an embedder's own KV cache, or a model without attention."""
    with pytest.raises(errors.InvalidArgumentError, match="num_kv_blocks"):
        DynamicInferenceContext(CacheConfig(kv_cache_gb=1.0, max_slots=1), STATES, kv_spec)
    config = CacheConfig(num_kv_blocks=3, enable_prefix_caching=False)
    context = DynamicInferenceContext(config, STATES, kv_spec)
    assert (context.kv_cache is None) is (kv_spec is None)
    assert (context.kv_block_allocator.pool_size, context.slot_allocator.max_slots) == (4, 0)
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 2**20))
    with pytest.raises(errors.BudgetError, match="num_kv_blocks=2147483646 and"):
        DynamicInferenceContext(replace(config, num_kv_blocks=2**31 - 2), STATES, kv_spec)


def test_states_may_have_other_tensors_of_distinguishable_kinds():
    """Layers are numbered by kind, so all tensors of one kind have equally many layers."""
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
    """In another system, specs in the wrong order raised an AttributeError."""
    with pytest.raises(errors.InvalidArgumentError, match=message):
        DynamicInferenceContext(*arguments)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"placement": "last"}, r"placement must be .* such as MegatronPlacement\(\)"),
        ({"placement": MegatronPlacement}, "placement must be None or an object"),
        ({"slot_policy": "lru"}, "slot policy must be an object"),
        ({"device": "nope"}, "nope"),
        ({"device": 1.5}, "device must name a PyTorch device"),
    ],
)
def test_options_of_other_kinds_are_named(option, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        DynamicInferenceContext(make_config(), STATES, KV, **option)
