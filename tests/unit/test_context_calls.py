"""Calls that the context refuses, without any change."""

from dataclasses import replace

import pytest
import torch
from context_rig import (
    BLOCK,
    MODEL,
    MODEL_CONFIG,
    generate,
    make_config,
    make_context,
    refused,
    run_step,
)

from mamba_cache import DynamicInferenceContext, errors
from mamba_cache.cache.sequence import Checkpoint
from mamba_cache.context import Request, RequestStatus

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
STATES, KV = MODEL_CONFIG.state_spec(torch.float64), MODEL_CONFIG.kv_spec(torch.float64)


def request(request_id, prompt=PROMPT, **options):
    return Request(request_id=request_id, prompt_tokens=prompt, **options)


@pytest.fixture
def busy():
    """Return a context with a request of each status, and its stats."""
    context = make_context(make_config(max_requests=4, max_tokens=60))
    generate(context, PROMPT, 1)
    context.add_request(request("preempted"))
    context.preempt("preempted")
    context.add_request(request("decoding"))
    run_step(context)
    context.add_request(request("prefilling", [4] * 30), chunk_tokens=7)
    run_step(context)
    context.add_request(request("scheduled", [5] * 20))
    return context


BAD_CALLS = {
    "empty prompt": (lambda c: c.add_request(request("x", [])), "is empty"),
    "token past the vocabulary": (lambda c: c.add_request(request("x", [13])), "vocab_size"),
    "float tokens": (lambda c: c.add_request(request("x", torch.rand(3))), "integer dtype"),
    "id in use": (lambda c: c.add_request(request("decoding")), "in use"),
    "unhashable id": (lambda c: c.add_request(request([])), "hashable"),
    "empty chunk": (lambda c: c.add_request(request("x"), chunk_tokens=0), "chunk_tokens"),
    "bool chunk": (lambda c: c.add_request(request("x"), chunk_tokens=True), "chunk_tokens"),
    "bad checkpoint": (
        lambda c: c.add_request(request("x"), checkpoint_positions=[-1]),
        "checkpoint_positions",
    ),
    "checkpoint past the longest sequence": (
        lambda c: c.add_request(request("x", checkpoint_positions=[129])),
        r"at most max_sequence_length \(128\), got 129",
    ),
    "hint that is no bool": (lambda c: request("x", will_continue=1), "will_continue must be True"),
    "tells_tokens that is no bool": (
        lambda c: request("x", tells_tokens=1),
        "tells_tokens must be",
    ),
    "source with a list in it": (lambda c: request("x", source=([],)), "source must be hashable"),
    "checkpoints that are no collection": (
        lambda c: c.add_request(request("x"), checkpoint_positions=8),
        "checkpoint_positions",
    ),
    "no request": (lambda c: c.add_request({}), "give a Request"),
    "a foreign preparation": (
        lambda c: c.add_request(make_context().prepare(request("x"))),
        "another context",
    ),
    "decode ids that are no collection": (lambda c: c.begin_step(5), "decode_ids"),
    "bad later checkpoint": (
        lambda c: c.schedule_prefill("prefilling", checkpoint_positions=["a"]),
        "checkpoint_positions",
    ),
    "zero later chunk": (lambda c: c.schedule_prefill("prefilling", chunk_tokens=0), "chunk"),
}
BAD_ORDER = {
    "unknown id": (lambda c: c.finish("nobody"), errors.UnknownRequestError),
    "unhashable lookup": (lambda c: c.status([]), errors.UnknownRequestError),
    "finished id": (lambda c: c.finish("only"), errors.UnknownRequestError),
    "commit without begin": (lambda c: c.commit_step({}), errors.StepOrderError),
    "abort without begin": (lambda c: c.abort_step(), errors.StepOrderError),
    "resume while decoding": (lambda c: c.resume_request("decoding"), errors.StepOrderError),
    "preempt twice": (lambda c: c.preempt("preempted"), errors.StepOrderError),
    "schedule while decoding": (lambda c: c.schedule_prefill("decoding"), errors.StepOrderError),
    "decode while prefilling": (lambda c: c.begin_step(["prefilling"]), errors.StepOrderError),
    "decode unknown": (lambda c: c.begin_step(["nobody"]), errors.UnknownRequestError),
    "decode unhashable": (lambda c: c.begin_step([[1]]), errors.UnknownRequestError),
    "too long a prompt": (
        lambda c: c.add_request(request("x", [1] * 129)),
        errors.SequenceLengthError,
    ),
    "too many tokens": (
        lambda c: c.add_request(request("x", [1] * 60)),
        errors.TokenCapacityError,
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_change_nothing(busy, name):
    call, words = BAD_CALLS[name]
    with refused(busy, errors.InvalidArgumentError, words):
        call(busy)


@pytest.mark.parametrize("name", BAD_ORDER)
def test_bad_order_changes_nothing(busy, name):
    call, error = BAD_ORDER[name]
    with refused(busy, error):
        call(busy)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.add_request(request("x", [1])),
        lambda c: c.resume_request("preempted"),
        lambda c: c.schedule_prefill("prefilling"),
        lambda c: c.preempt("decoding"),
        lambda c: c.finish("decoding"),
        lambda c: c.begin_step(),
    ],
)
def test_no_change_of_requests_while_a_step_is_in_flight(busy, call):
    busy.begin_step()
    with refused(busy, errors.StepOrderError, "in flight"):
        call(busy)
    busy.abort_step()


def test_statuses(busy):
    for status in RequestStatus:
        assert busy.status(status.value) is status


def test_the_beginning_of_the_prompt_may_be_named_as_a_checkpoint():
    assert request("x", checkpoint_positions=[0]).checkpoint_positions == (0,)


def test_the_end_of_the_longest_sequence_may_be_named_as_a_checkpoint(busy):
    longest = busy.config.max_sequence_length
    busy.prepare(request("x", checkpoint_positions=[longest]))


def test_a_context_counts_the_requests_of_each_kind_in_its_step(busy):
    busy.begin_step()
    assert vars(busy.batch_dimensions) == {"prefill_req_count": 1, "decode_req_count": 1}
    busy.abort_step()
    for name in ("decoding", "scheduled"):
        busy.resume_request(name)
    busy.schedule_prefill("prefilling", chunk_tokens=1)
    busy.begin_step()
    assert vars(busy.batch_dimensions) == {"prefill_req_count": 3, "decode_req_count": 0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "meta"}, "device 'meta' cannot be used"),
        ({"clock": 5}, "clock must .* got 5"),
        ({"agreement": 5}, "agreement must be a RankAgreement, got 5"),
    ],
)
def test_arguments_of_a_context_are_checked(options, words):
    with pytest.raises(errors.InvalidArgumentError, match=words):
        DynamicInferenceContext(make_config(), STATES, KV, **options)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ({}, "missing"),
        ({"decoding": 1, "scheduled": 1, "prefilling": 1}, "unexpected"),
        (None, "NoneType"),
        ([1], r"each of the 2 requests in Step.sampling_ids.*got \[1\]"),
        ({1, 2}, "got set"),
        ({"decoding": 1, "scheduled": -1}, "-1"),
        ({"decoding": 1, "scheduled": 99}, "vocab_size"),
    ],
)
def test_refused_tokens_leave_the_step_in_flight(busy, tokens, words):
    step = busy.begin_step()
    assert set(step.sampling_ids) == {"decoding", "scheduled"}
    with pytest.raises(errors.InvalidArgumentError, match=words):
        busy.commit_step(tokens)
    MODEL.forward(step.metadata, busy)
    busy.commit_step({"decoding": 1, "scheduled": 2})
    busy.check_invariants()


def test_decoding_requests_keep_their_token_room():
    """An admitted chunk always fits into a step beside the decoding requests."""
    context = make_context(make_config(max_tokens=20, max_requests=3))
    for name in ("a", "b"):
        context.add_request(request(name, [1]))
    run_step(context)
    with pytest.raises(errors.TokenCapacityError) as tokens:
        context.add_request(request("c", [2] * 19))
    assert (tokens.value.required, tokens.value.available) == (19, 18)
    context.add_request(request("c", [2] * 18))
    assert set(run_step(context, decode_ids=["b", "b"])) == {"b", "c"}
    assert list(run_step(context, decode_ids=["c", "a"])) == ["c", "a"]
    with pytest.raises(errors.RequestCapacityError) as row:
        context.add_request(request("d", [3]))
    assert (row.value.required, row.value.available) == (1, 0)


def test_exception_while_saving_publishes_nothing(monkeypatch):
    context = make_context()
    context.add_request(request("x", PROMPT[: 2 * BLOCK]))
    MODEL.forward(context.begin_step().metadata, context)

    def fail(rows, slots):
        raise OSError("launch failed")

    monkeypatch.setattr(context._live_to_slots, "copy_own", fail)
    with pytest.raises(OSError, match="launch failed"):
        context.commit_step({"x": 1})
    assert context.match(context.prepare(request("y"))).kv_matched_blocks == 0
    assert context.abort_step() == ("x",)
    context.check_invariants()


def test_resuming_ends_at_the_longest_length():
    """Regression: a request of maximum length was resumed past its table and leaked its row."""
    for longest in (4 * BLOCK, 4 * BLOCK - 2):
        context = make_context(make_config(max_sequence_length=longest))
        context.add_request(request("x", [1] * longest))
        run_step(context)
        context.preempt("x")
        with pytest.raises(errors.SequenceLengthError, match="finish it"):
            context.resume_request("x")
        context.check_invariants()
        assert len(context.finish("x")) == 1


def test_prepared_tokens_cannot_be_changed():
    """Regression: the hashes differed from the computed tokens, and the next request hit them."""
    prepared = make_context().prepare(request("x"))
    with pytest.raises(ValueError, match="read-only"):
        prepared.tokens[0] = 5


def row_of(context, name="decoding"):
    return context.request_table.find(name).row


def give_back_a_reservation(context):
    slots = context.slot_allocator
    slots.cancel_reserved(list(slots.reserved)[:1])


def add_to(array, row, number=1):
    array[row] += number


def add_chunk(context, chunk):
    context.request_table.scheduled_chunks[chunk.row] = chunk


BREACHES = {
    "events": (lambda c: add_to(c.request_table.next_events, row_of(c)), "events of rows"),
    "places": (lambda c: add_to(c.request_table.place_shifts, row_of(c)), "events of rows"),
    "marks": (lambda c: c.request_table.decoding_rows.add(3), "are marked so"),
    "lengths": (lambda c: add_to(c.request_table.num_tokens, row_of(c)), "decodes, with"),
    "counted tokens": (
        lambda c: setattr(c.request_table, "num_scheduled_tokens", 21),
        r"are scheduled, but \(21, ",
    ),
    "lost room": (
        lambda c: add_to(vars(c.request_table), "num_planned_checkpoints"),
        "are counted",
    ),
    "a chunk of before": (
        lambda c: add_chunk(c, replace(c.request_table.find("scheduled").chunk)),
        "are marked so",
    ),
    "no chunk": (
        lambda c: setattr(c.request_table.find("scheduled"), "chunk", None),
        "'scheduled' is scheduled with chunk None",
    ),
    "a chunk that was computed": (
        lambda c: add_to(c.request_table.num_computed, row_of(c, "scheduled")),
        "its chunk begins at 0",
    ),
    "a checkpoint of no step": (
        lambda c: setattr(c.request_table.find("decoding"), "checkpoint", Checkpoint(BLOCK, 0)),
        "is in no step, but has",
    ),
    "a lost reservation": (give_back_a_reservation, "are reserved, and planned for"),
    "a table": (lambda c: add_to(c.request_table.block_tables[row_of(c)], -1), "block table"),
    "a lost row": (lambda c: c.request_table._free_rows.pop(), "rows are lost"),
    "a block too much": (
        lambda c: c.kv_block_allocator.allocate_memory_blocks(1),
        r"of blocks \[\d+\] do not match",
    ),
    "a reference too much": (
        lambda c: c.kv_block_allocator.retain_memory_blocks([0]),
        r"of blocks \[0\] do not match",
    ),
    "a pin too much": (
        lambda c: add_to(c.slot_allocator.pin_counts, 99),
        r"slots \[99\] are pinned",
    ),
}


@pytest.mark.parametrize("name", BREACHES)
def test_invariants_find_each_breach(busy, name):
    breach, message = BREACHES[name]
    busy.check_invariants()
    breach(busy)
    with pytest.raises(errors.InvariantError, match=message):
        busy.check_invariants()
