"""Budgets for a model and a workload, compared with the allocated bytes and saved states."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.cli.plan import make_plan, suggest_block_size
from mamba_cache.config import CacheConfig
from mamba_cache.context import CapturedExtractions, DynamicInferenceContext, Request
from mamba_cache.errors import BudgetError, InvalidArgumentError
from mamba_cache.integrations.model_shapes import BUILT_IN, ModelShape, load_shape
from mamba_cache.states import KVCacheSpec, StateSpec

GIB = 2**30
TINY = ModelShape(
    "tiny",
    StateSpec.mamba(2, (6, 4), (2, 3, 5), torch.bfloat16, torch.float32),
    KVCacheSpec(1, 1, 4, torch.bfloat16),
    ssm_chunk_size=8,
    weight_bytes=100,
    num_state_layers=2,
)
WORKLOAD = {"prompt": 3000, "output": 300, "concurrency": 4, "shared": 1100}


def nbytes(*tensors):
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_bytes_planned_are_the_bytes_allocated(name):
    """The test allocates fewer requests, slots and blocks, to fit into any machine's memory."""
    shape = load_shape(name)
    plan = make_plan(shape, 200 * GIB, **WORKLOAD)
    few = {"max_requests": 2, "max_slots": 1, "num_kv_blocks": 2}
    memory = DynamicInferenceContext(
        CacheConfig(**plan["config"] | few), shape.state_spec, shape.kv_spec
    )
    slots = memory.slot_allocator
    assert 2 * plan["bytes_per_slot"] == nbytes(*memory.live_states.tensors.values())
    assert plan["bytes_per_slot"] == nbytes(slots.conv_states, slots.ssm_states)
    assert 3 * plan["bytes_per_block"] == nbytes(memory.kv_cache)


def saved_states(prompts, output_tokens, block):
    """Return the number of states saved for the last of ``prompts`` and its answer."""
    config = CacheConfig(
        block_size_tokens=block,
        ssm_chunk_size=block,
        num_kv_blocks=99,
        max_slots=99,
        max_requests=1,
    )
    context = DynamicInferenceContext(config, TINY.state_spec)
    before = after = 0
    for prompt, positions in prompts:
        context.add_request(
            Request(request_id=0, prompt_tokens=prompt, checkpoint_positions=positions)
        )
        for token in range(output_tokens):
            metadata = context.begin_step().metadata
            lengths = metadata.num_chunks, metadata.num_prefill_tokens
            layers = range(TINY.state_spec.tensors[0].num_layers)
            context.count_extractions(CapturedExtractions(dict.fromkeys(layers, lengths)))
            context.commit_step({0: token + 1000})
        context.finish(0)
        before, after = after, context.stats().saved_states
    return after - before


@pytest.mark.parametrize("output_tokens", [1, 5])
def test_the_checkpoints_planned_are_the_states_saved(output_tokens):
    block, mean = 8, 44
    shared = 19  # two blocks, and a part of one
    workload = {"prompt": mean, "output": output_tokens, "concurrency": 1, "shared": shared}
    plan = make_plan(TINY, GIB, **workload, block_size=block)
    first, later = 0, 0
    for length in range(mean - block // 2, mean + block // 2):
        prompt = list(range(length))
        first += saved_states([(prompt, ())], output_tokens, block)
        other = prompt[:shared] + [500 + i for i in range(mean - shared)]
        later += saved_states([(other, [16]), (prompt, ())], output_tokens, block)
    assert plan["checkpoints_of_first_prompt"] == first / block
    assert plan["checkpoints_of_later_prompts"] == later / block


@st.composite
def workloads(draw):
    prompt = draw(st.integers(1, 6000))
    return {
        "prompt": prompt,
        "output": draw(st.integers(1, 2000)),
        "concurrency": draw(st.integers(1, 40)),
        "shared": draw(st.integers(0, prompt)),
    }


@given(workloads(), st.sampled_from([TINY, load_shape("granite-4.0-h-tiny")]))
def test_memory_is_filled_and_no_more(workload, shape):
    total = 3 * 10**6 if shape is TINY else 80 * GIB
    try:
        plan = make_plan(shape, total, **workload)
    except BudgetError:
        return
    config, memory = plan["config"], plan["memory"]
    used = sum(memory[part] for part in ("live_states", "kv_blocks", "slots"))
    blocks = -(-(workload["prompt"] + workload["output"]) // config["block_size_tokens"])
    one_more = blocks * plan["bytes_per_block"] + 4 * plan["bytes_per_slot"]
    assert (memory["total"], memory["reserved"]) == (total, total // 10)
    room = total - shape.weight_bytes - memory["reserved"]
    assert used <= room < used + one_more + plan["sequences"]
    assert plan["idle_sequences"] >= 0
    assert config["num_kv_blocks"] >= blocks
    assert config["block_size_tokens"] % shape.ssm_chunk_size == 0


def test_when_memory_is_short_the_error_has_the_number_of_requests_that_fit():
    shape = load_shape("nemotron-h-8b")

    def plan(concurrency):
        return make_plan(shape, 26 * GIB, **WORKLOAD | {"concurrency": concurrency})

    with pytest.raises(
        BudgetError, match=r"must hold 500 requests at once, but hold (\d+)"
    ) as info:
        plan(500)
    most = int(str(info.value).split("but hold ")[1].split()[0])
    assert plan(most)["idle_sequences"] == 0
    with pytest.raises(BudgetError, match=f"but hold {most}"):
        plan(most + 1)


def test_weights_that_do_not_fit_leave_room_for_no_request():
    with pytest.raises(BudgetError, match="but hold 0"):
        make_plan(load_shape("nemotron-h-8b"), GIB, **WORKLOAD)


@pytest.mark.parametrize(
    ("chunk", "prompt", "shared", "expected"),
    [
        (256, 10_000, 0, 256),
        (64, 10_000, 0, 256),
        (128, 10_000, 1500, 128),
        (64, 10_000, 1500, 128),
        (64, 1100, 0, 128),
        (256, 300, 0, 256),
        (1, 2000, 0, 250),
        (96, 10_000, 0, 192),
    ],
)
def test_blocks_are_chunks_and_small_beside_the_shared_prefix(chunk, prompt, shared, expected):
    assert suggest_block_size(chunk, prompt, shared) == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": 12}, "multiple of ssm_chunk_size"),
        ({"prompt": 0}, "--prompt"),
        ({"output": 0}, "--output"),
        ({"concurrency": 0}, "--concurrency"),
        ({"shared": 3001}, "--shared"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(changes, said):
    with pytest.raises(InvalidArgumentError, match=said):
        make_plan(TINY, GIB, **WORKLOAD | changes)
