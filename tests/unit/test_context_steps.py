"""Steps: descriptions of their requests, and copies of states."""

from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from context_rig import (
    BLOCK,
    MODEL,
    add,
    assert_same_run,
    generate,
    make_config,
    make_context,
    run_step,
    uncached,
)
from kv_rig import by_id

from mamba_cache import Request
from mamba_cache.cache import EveryNthBlock, LastBlock
from mamba_cache.context import ScheduledRequest
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states import ZERO_SOURCE

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
OTHER = [7, 3, 5]


@pytest.fixture
def context():
    return make_context(make_config(num_speculative_tokens=2))


def test_a_step_describes_all_of_each_request(context):
    add(context, "decoding", OTHER)
    run_step(context)
    add(context, "new", PROMPT, chunk_tokens=4)
    step = context.begin_step(drafts={"decoding": [4, 5]})
    decoding_row, new_row = step.metadata.request_rows[:2].tolist()
    decoding = ScheduledRequest(
        request_id="decoding",
        row=decoding_row,
        start=len(OTHER),
        num_tokens=3,
        skip_tokens=0,
        is_prefill=False,
        samples=True,
        drafts=(4, 5),
    )
    new = ScheduledRequest(
        request_id="new",
        row=new_row,
        start=0,
        num_tokens=4,
        skip_tokens=0,
        is_prefill=True,
        samples=False,
        drafts=(),
    )
    assert step.requests == (decoding, new)
    assert step.sampling_ids == ("decoding",)


def test_a_step_has_the_facts_for_embedders_that_compute_its_parts_separately():
    """A step lists its chunks with their slots, the decoding rows, and the metadata's tensors."""
    context = make_context(make_config(), placement=EveryNthBlock(1))
    add(context, "decoding", OTHER)
    run_step(context)
    add(context, "new", PROMPT)
    step = context.begin_step()
    [new] = step.prefills
    assert new == step.requests[1]
    assert [position for position, _ in new.checkpoints] == [BLOCK, 2 * BLOCK, 3 * BLOCK]
    slots = step.metadata.checkpoint_slots[:3].tolist()
    assert [slot for _, slot in new.checkpoints] == slots
    assert step.decode_rows.tolist() == step.metadata.request_rows[:1].tolist()
    assert step.requests[0].checkpoints == ()
    for name, tensor in context.step_buffers.tensors.items():
        assert getattr(step.metadata, name) is tensor


def blocks_of(context, name):
    table = context.request_table
    return table.blocks_of(table.find(name).row).tolist()


def test_tokens_are_skipped_by_the_first_chunk_alone(context):
    generate(context, PROMPT, 1)
    add(context, "hit", PROMPT, chunk_tokens=1)
    [first] = context.begin_step().requests
    context.commit_step({})
    context.schedule_prefill("hit")
    [later] = context.begin_step().requests
    assert (first.start, first.skip_tokens, first.samples) == (3 * BLOCK, 3 * BLOCK, False)
    assert (later.start, later.skip_tokens, later.samples) == (3 * BLOCK + 1, 0, True)


def moved(monkeypatch, context):
    """Record the pairs of each restore and each copy to slots from now on."""
    calls = {"_slots_to_live": [], "_live_to_slots": []}

    def watch(name):
        copier = getattr(context, name)
        function = copier.copy_own

        def watched(sources, targets):
            calls[name].append([(int(s), int(t)) for s, t in zip(sources, targets, strict=True)])
            function(sources, targets)

        monkeypatch.setattr(copier, "copy_own", watched)

    for name in calls:
        watch(name)
    return calls.values()


def test_a_step_moves_the_states_that_it_plans_and_no_padding(monkeypatch):
    """A kernel visits each entry passed to it, and there is room for one entry per request."""
    context = make_context(make_config(max_requests=8), placement=EveryNthBlock(1))
    restored, saved = moved(monkeypatch, context)
    add(context, "saves", PROMPT[: 2 * BLOCK])
    add(context, "short", OTHER)
    run_step(context)
    run_step(context)
    context.finish("saves")
    add(context, "hit", PROMPT[: 2 * BLOCK + 1])
    context.begin_step()
    [(saved_row, slot)] = saved[0]
    assert restored == [
        [(ZERO_SOURCE, saved_row), (ZERO_SOURCE, 1 - saved_row)],
        [(slot, saved_row)],  # the row that was released last
    ]
    assert saved == [[(saved_row, slot)]]


@pytest.mark.parametrize("start", [-1, 1.0, None])
def test_an_answer_is_read_from_a_token_on(context, start):
    add(context, "a", OTHER)
    run_step(context)
    run_step(context)
    assert context.output("a", 1) == context.output("a")[1:]
    with pytest.raises(InvalidArgumentError, match=r"start must be an int >= 0, got"):
        context.output("a", start)


def test_a_prepared_request_can_be_added_again_when_an_answer_has_grown_on_it(context):
    prepared = context.prepare(Request(request_id="a", prompt_tokens=PROMPT[:BLOCK]))
    for _ in range(2):
        context.add_request(prepared)
        for _ in range(BLOCK + 2):
            run_step(context)
        context.check_invariants()
        assert len(prepared.hashes) == 1
        context.finish("a")
    assert context.match(prepared).kv_matched_blocks == 1


@pytest.mark.parametrize("drafts", [None, [[1, 2], [3, -1]], "device"])
def test_attention_looks_back_as_far_as_the_longest_request(drafts):
    context = make_context(make_config(num_speculative_tokens=2))
    for name, length in (("a", 5), ("b", 9)):
        add(context, name, PROMPT[:length])
    run_step(context)
    if drafts == "device":
        drafts = torch.full((4, 2), 3)
    metadata = context.begin_step(drafts=drafts).metadata
    assert metadata.max_seq_len == int(metadata.seq_lens.max())
    width = 0 if drafts is None else 2
    assert metadata.max_decode_len == 1 + width
    assert metadata.seq_lens[0] == 5 + 1 + width


def test_a_state_is_not_given_to_a_block_of_another_prefix_with_its_hash_id():
    """The matched block loses its hash during the step, and another block takes the hash id."""
    context = make_context(placement=LastBlock())
    generate(context, PROMPT[: BLOCK + 1], 1)
    context.slot_allocator.reset()
    add(context, "a", PROMPT[:BLOCK])
    step = context.begin_step()
    MODEL.forward(step.metadata, context)
    kv_blocks = context.kv_block_allocator
    [matched] = blocks_of(context, "a")
    hash_id = kv_blocks.block_hashes[matched].item()
    kv_blocks.deregister_blocks([matched])
    [foreign] = kv_blocks.allocate_memory_blocks(1)
    kv_blocks.register_kv_block_hashes([foreign], by_id(hash_id))
    context.commit_step({"a": 1})
    assert not context.slot_allocator.has_state(foreign)
    assert context.stats().reserved_slots == 0


def test_tokens_are_int32_wherever_they_come_from():
    context = make_context()
    add(context, "x", OTHER)
    for _ in range(3):
        run_step(context)
    [active] = context.request_table
    context.request_table.collect(active)
    every = [*OTHER, *active.generated]
    for start, end in combinations(range(len(every) + 1), 2):
        tokens = active.tokens(start, end)
        assert (tokens.dtype, tokens.tolist()) == (np.int32, every[start:end])


@pytest.mark.parametrize("make", [partial(np.array, dtype=np.int32), np.array, torch.tensor, list])
def test_an_array_of_tokens_may_be_overwritten_once_its_request_is_added(make):
    """The engine reuses its buffer; without a copy, the next prompt would match the first one."""
    context, given = make_context(), make(PROMPT)
    context.add_request(Request(request_id="a", prompt_tokens=given))
    given[:] = make(PROMPT[::-1])
    assert not context.match(Request(request_id="b", prompt_tokens=given)).block_ids
    run_step(context)
    context.finish("a")
    for prompt in (PROMPT, PROMPT[::-1]):
        run = generate(context, prompt, 3)
        assert run[2].skip_tokens == (3 * BLOCK if prompt is PROMPT else 0)
        assert_same_run(run, prompt)


def test_rows_whose_blocks_end_in_different_steps_keep_their_own_tokens():
    """A prompt of whole blocks leaves the most tokens to collect at once: one block + 1."""
    context = make_context()
    prompts = {"a": PROMPT[: 2 * BLOCK], "b": PROMPT[: BLOCK + 3], "c": PROMPT[1 : BLOCK + 1]}
    for name, prompt in prompts.items():
        add(context, name, prompt)
    for _ in range(2 * BLOCK + 3):
        run_step(context)
    for name, prompt in prompts.items():
        assert context.finish(name) == uncached(prompt, 2 * BLOCK + 3)[0]
