"""Forks: equal to separate requests, all made or none; shared blocks are never written."""

import re
from contextlib import nullcontext
from itertools import permutations

import pytest
import torch
from context_rig import (
    BLOCK,
    MODEL,
    MODEL_CONFIG,
    VOCAB,
    UncachedRuns,
    add,
    make_config,
    make_context,
    refused,
    run_step,
    saved_prefix_lengths,
)

from mamba_cache.cache.sequence import CachedSequence
from mamba_cache.context import DynamicInferenceContext, Forks, Request
from mamba_cache.errors import (
    InvalidArgumentError,
    RequestCapacityError,
    StepOrderError,
    TokenCapacityError,
    UnknownRequestError,
)

PROMPT = [(3 * i * i + 2 * i) % VOCAB for i in range(2 * BLOCK + 3)]
DRAFTS = 2
UNCACHED = UncachedRuns(24)


def parent_of(context, prompt=PROMPT, steps=1, name="parent", **options):
    """Add a request, compute its prompt and sample ``steps`` tokens."""
    context.add_request(Request(request_id=name, prompt_tokens=prompt, **options))
    for _ in range(steps):
        run_step(context)
    return context.request_table.blocks_of(row_of(context, name)).tolist()


def row_of(context, name):
    return context.request_table.find(name).row


def blocks_of(context, name):
    return context.request_table.blocks_of(row_of(context, name)).tolist()


def tokens_of(context, name):
    active = context.request_table.find(name)
    context.request_table.take_over(active)
    return active.tokens(0, active.num_known).tolist()


def step_alone(context, name):
    """Compute one token of one request in a separate batch; return its logits."""
    return run_step(context, [name])[name][0]


def check_continuation(context, names, steps=2 * BLOCK):
    """Step all requests together; each must equal a run of its tokens without a cache."""
    starts = {name: (tuple(tokens_of(context, name)), len(context.output(name))) for name in names}
    for index in range(steps):
        for name, (row, _) in run_step(context, names).items():
            wanted = UNCACHED.logits(starts[name][0], index)
            torch.testing.assert_close(row, wanted, rtol=0, atol=1e-9)
        context.check_invariants()


def test_full_blocks_are_shared_and_the_rest_is_copied():
    context = make_context()
    blocks = parent_of(context)
    stamps = context.request_table.table_stamps.copy()
    forks = context.fork("parent", ["a", "b"])
    assert (context.request_table.table_stamps != stamps)[list(forks.rows)].all()
    row, kv_blocks = row_of(context, "parent"), context.kv_block_allocator
    assert forks == Forks(
        ("a", "b"), row, (row_of(context, "a"), row_of(context, "b")), blocks[2], forks.blocks
    )
    assert context.fork("parent", []) == Forks((), row, (), None, ())
    assert blocks_of(context, "a") == [*blocks[:2], forks.blocks[0]]
    assert blocks_of(context, "b") == [*blocks[:2], forks.blocks[1]]
    assert [int(kv_blocks.block_ref_counts[block]) for block in blocks] == [3, 3, 1]
    rest = len(PROMPT) % BLOCK
    for block in forks.blocks:
        assert torch.equal(
            context.kv_cache[:, :, block, :rest], context.kv_cache[:, :, blocks[2], :rest]
        )
    for tensor in context.live_states.tensors.values():
        assert not tensor[:, row].isnan().any()
        for fork in forks.rows:
            assert torch.equal(tensor[:, fork], tensor[:, row])


@pytest.mark.parametrize("num_forks", [1, 3])
@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_two_launches_do_for_any_number_of_forks(num_forks, drafts):
    context = make_context(make_config(num_speculative_tokens=drafts))
    parent_of(context)
    launches = []
    for copier in (context._live_to_live, context._kv_to_kv):
        [launch] = copier._launches
        copier._launches = [lambda *rows, launch=launch: (launches.append(1), launch(*rows))]
    context.fork("parent", range(num_forks))
    assert len(launches) == 2


def test_a_context_without_keys_and_values_lists_copies_for_its_embedder():
    """The context copies states in one launch; the embedder copies its KV blocks."""

    class Memory:
        """The caches of an embedder; only the states belong to the context."""

        def __init__(self, context):
            self.live_states = context.live_states
            self.extract_checkpoint_states = context.extract_checkpoint_states
            blocks = context.kv_block_allocator.pool_size
            kv_spec = MODEL_CONFIG.kv_spec(torch.float64)
            self.kv_cache = kv_spec.allocate(blocks, BLOCK, "cpu").fill_(torch.nan)

    context = DynamicInferenceContext(make_config(), MODEL_CONFIG.state_spec(torch.float64))
    memory = Memory(context)

    def step():
        step = context.begin_step()
        logits = MODEL.forward(step.metadata, memory)
        context.commit_step(logits.argmax(1).tolist())
        return dict(zip(step.request_ids, logits, strict=True))

    add(context, "parent", PROMPT)
    step()
    forks = context.fork("parent", ["a", "b"], last_tokens=[1, 2])
    memory.kv_cache[:, :, list(forks.blocks)] = memory.kv_cache[:, :, [forks.source_block]]
    starts = {name: tuple(tokens_of(context, name)) for name in context.statuses()}
    for index in range(BLOCK):
        for name, logits in step().items():
            wanted = UNCACHED.logits(starts[name], index)
            torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-9)


def test_slots_in_int8_round_nothing_of_a_fork():
    context = make_context(make_config(slot_quantization="int8"), poison=False)
    parent_of(context, steps=3)
    [row] = context.fork("parent", ["a"]).rows
    for tensor in context.live_states.tensors.values():
        assert torch.equal(tensor[:, row], tensor[:, row_of(context, "parent")])
    for _ in range(BLOCK):
        assert torch.equal(step_alone(context, "parent"), step_alone(context, "a"))


def test_slots_that_the_parent_has_reserved_are_not_doubled():
    """Each fork saves at the caller's checkpoint positions, since its tokens may differ."""
    context = make_context(make_config(save_decode_states=False, max_requests=8))
    parent_of(context, checkpoint_positions=[3 * BLOCK])
    context.fork("parent", ["a", "b"], last_tokens=[1, 2])
    assert context.stats().reserved_slots == 0
    while len(tokens_of(context, "a")) <= 3 * BLOCK:
        step = context.begin_step()
        context.commit_step(MODEL.forward(step.metadata, context).argmax(1).tolist())
        context.check_invariants()
    for name in ("parent", "a", "b"):
        assert saved_prefix_lengths(context, tokens_of(context, name))[-1] == 3


def test_each_keeps_the_newest_state_of_its_own_answer():
    """It drops its previous state, even one from before the fork, but no other request's."""
    context = make_context()
    parent_of(context, steps=BLOCK)
    assert saved_prefix_lengths(context, tokens_of(context, "parent"))[-1] == 3
    context.fork("parent", ["a", "b"], last_tokens=[1, 2])
    context.preempt("b")
    check_continuation(context, ["parent", "a"], steps=BLOCK)
    for name in ("parent", "a"):
        assert saved_prefix_lengths(context, tokens_of(context, name)) == [2, 4]
    assert context.resume_request("b").skip_tokens == 2 * BLOCK
    run_step(context)
    check_continuation(context, ["parent", "a", "b"], steps=BLOCK)
    for name in ("parent", "a", "b"):
        assert saved_prefix_lengths(context, tokens_of(context, name))[-1] == 4 + (name != "b")


def test_forks_survive_the_removal_of_cached_blocks():
    context = make_context()
    parent_of(context, steps=2)
    context.fork("parent", ["a"], last_tokens=[4])
    registered = (context.kv_block_allocator.block_hashes >= 0).nonzero().flatten().tolist()
    context.kv_block_allocator.deregister_blocks(registered)
    context.slot_allocator.reset()
    check_continuation(context, ["parent", "a"])
    # Neither request publishes again a block that the parent has published.
    shared = blocks_of(context, "a")[:2]
    assert (context.kv_block_allocator.block_hashes[shared] == -1).all()


@pytest.mark.parametrize("drafts", [0, DRAFTS])
@pytest.mark.parametrize("modes", list(permutations([torch.inference_mode, nullcontext])))
def test_forks_in_and_out_of_inference_mode_lie_where_the_context_does(modes, drafts):
    """The copier is made at the first fork and kept; the default device is "meta" meanwhile."""
    context = make_context(make_config(num_speculative_tokens=drafts))
    parent_of(context)
    for number, mode in enumerate((modes[0], modes[1], modes[0])):
        with mode(), torch.device("meta"):
            context.fork("parent", [number], last_tokens=[4])
        with mode():
            run_step(context)
    check_continuation(context, ["parent", 0, 1, 2], steps=3)


# Refusals: nothing is changed.


@pytest.mark.parametrize(
    ("new_ids", "options", "message"),
    [
        (["parent"], {}, "request id 'parent' is in use"),
        (["a", "other"], {}, "request id 'other' is in use"),
        (["a", "b", "a"], {}, "new_ids must be different, got ['a', 'b', 'a']"),
        ([["a"]], {}, "request ids must be hashable, got list"),
        ("child", {}, "new_ids must be several ids, got one: 'child'"),
        (3, {}, "new_ids must be a collection of request ids, got 3"),
        (["a"], {"last_tokens": [1, 2]}, "one token for each of the 1 new ids, got 2"),
        (["a"], {"last_tokens": [VOCAB]}, "token ids must be below vocab_size (13), got 13"),
        (["a"], {"last_tokens": [1.5]}, "int"),
        (["a"], {"last_tokens": 1}, "tokens must be a sequence of ints"),
    ],
)
def test_arguments_that_are_refused(new_ids, options, message):
    context = make_context()
    parent_of(context, name="other")
    parent_of(context)
    with refused(context, InvalidArgumentError, re.escape(message)):
        context.fork("parent", new_ids, **options)


def test_only_a_request_that_decodes_can_be_forked():
    context = make_context()

    def refuses(error, message):
        with refused(context, error, message):
            context.fork("parent", ["a"])

    refuses(UnknownRequestError, "there is no request 'parent'")
    add(context, "parent", PROMPT, chunk_tokens=5)
    refuses(StepOrderError, "is scheduled; this call takes one that is decoding")
    run_step(context)
    refuses(StepOrderError, "is prefilling; this call takes one that is decoding")
    context.schedule_prefill("parent")
    context.begin_step()
    refuses(StepOrderError, "a step is in flight")
    context.abort_step()
    refuses(StepOrderError, "is preempted; this call takes one that is decoding")


def test_forks_leave_the_room_that_scheduled_chunks_have():
    """The step's buffers have no room for both."""
    context = make_context(make_config(max_tokens=21, max_requests=8))
    parent_of(context)
    add(context, "scheduled", [7] * 18)  # beside it there is room for two tokens more
    message = "3 tokens in one step are required, but only 2 are available: chunks are scheduled"
    with refused(context, TokenCapacityError, message):
        context.fork("parent", range(3))
    context.fork("parent", range(2))
    run_step(context)
    with pytest.raises(TokenCapacityError, match=r"18 tokens .* give 'more' a shorter chunk"):
        add(context, "more", [8] * 18)
    context.fork("parent", range(2, 5))
    assert len(run_step(context)) == 7


def test_forks_find_no_room_beside_chunks_that_take_all():
    context = make_context(make_config(max_tokens=20, max_requests=8))
    parent_of(context)
    add(context, "scheduled", [7] * 19)
    with refused(context, TokenCapacityError, "1 tokens in one step .*, but only 0 are available"):
        context.fork("parent", ["fork"])


def test_forks_need_rows():
    context = make_context(make_config(max_requests=4))
    parent_of(context)
    with refused(context, RequestCapacityError, "finish or preempt") as caught:
        context.fork("parent", range(4))
    assert (caught.value.required, caught.value.available) == (4, 3)
    context.fork("parent", range(3))


def test_forks_may_be_more_than_one_step_holds():
    context = make_context(make_config(max_tokens=19, max_requests=30))
    parent_of(context)
    context.fork("parent", range(20))
    with refused(context, TokenCapacityError, "21 tokens in one step are required"):
        context.begin_step()
    check_continuation(context, [*range(10)], steps=2)
    check_continuation(context, [*range(10, 20), "parent"], steps=2)


def test_forks_whose_copies_fail_take_nothing(monkeypatch):
    context = make_context()
    parent_of(context)
    monkeypatch.setattr(context, "_copy_to_forks", lambda *_: 1 // 0)
    with refused(context, ZeroDivisionError, "division"):
        context.fork("parent", range(2))
    context.check_invariants()


def test_a_fork_of_a_sequence_shares_all_but_id_and_answer():
    own = make_context().prepare(Request(request_id="a", prompt_tokens=PROMPT))
    sequence = CachedSequence(
        own.request,
        own.tokens,
        own.chain,
        frozenset({BLOCK}),
        num_shared_blocks=1,
        num_published=2,
        num_initial=3,
        prompt_seen=object(),
        prompt_seen_below=object(),
    )
    fork = sequence.fork("b", own.chain, [1])
    assert (fork.request.request_id, fork.tokens(0, fork.num_known).tolist()) == ("b", [*PROMPT, 1])
    for name in (
        "prompt", "requested_boundaries", "num_shared_blocks", "num_published", "num_initial",
        "prompt_seen", "prompt_seen_below",
    ):  # fmt: skip
        assert getattr(fork, name) is getattr(sequence, name), name
