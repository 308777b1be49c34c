"""The memory of a context: what slots and an embedder read of it, and where it lies."""

import pytest
import torch
from context_rig import BLOCK, CHUNK, add, make_config, make_context

from mamba_cache import DynamicInferenceContext, Request
from mamba_cache.cache import EveryNthBlock
from mamba_cache.config import EvictionPolicy
from mamba_cache.states import CHECKPOINT_FIELDS, LayerKind, StateSpec


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
    """Drafts leave the row of a request's state to the device."""
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
    """The buffers have room for many more; a step without any launches nothing."""
    context = make_context()
    add(context, "a", [1] * num_tokens)
    metadata = context.begin_step().metadata
    calls = []

    def plan(*_, **options):
        calls.append(options["fields"])
        return lambda: None

    monkeypatch.setattr("mamba_cache.context.extractions.plan_extraction", plan)
    states, inputs = torch.empty(metadata.num_chunks, 0), torch.empty(num_tokens, 0)
    context.extract_checkpoint_states(0, states, inputs, metadata)
    assert len(metadata.checkpoint_slots) > num_checkpoints == metadata.num_checkpoints
    assert len(calls) == bool(num_checkpoints)
    for fields in calls:
        for name, field in zip(CHECKPOINT_FIELDS, fields, strict=True):
            assert torch.equal(field, getattr(metadata, name)[:num_checkpoints])


def test_a_window_that_is_called_conv_is_no_mamba_state():
    """Megatron's fields name the states of Mamba layers alone."""
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
