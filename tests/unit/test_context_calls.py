"""What the context refuses, and that it is as it was afterwards."""

import numpy as np
import pytest
import torch
from context_rig import BLOCK, MODEL_CONFIG, generate, make_config, make_context, run_step

from mamba_cache import errors
from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, Request, RequestStatus
from mamba_cache.states import StateSpec, StateTensorSpec

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
STATES, KV = MODEL_CONFIG.state_spec(torch.float64), MODEL_CONFIG.kv_spec(torch.float64)


def request(request_id, prompt=PROMPT, **options):
    return Request(request_id=request_id, prompt_tokens=prompt, **options)


@pytest.fixture
def busy():
    """A context with a request of each status, and its stats."""
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
    "negative token": (lambda c: c.add_request(request("x", [1, -2])), "-2 at position 1"),
    "huge token": (lambda c: c.add_request(request("x", [2**31])), "2147483648"),
    "token past the vocabulary": (lambda c: c.add_request(request("x", [13])), "vocab_size"),
    "float tokens": (lambda c: c.add_request(request("x", torch.rand(3))), "integer dtype"),
    "2-D tokens": (lambda c: c.add_request(request("x", np.ones((2, 2), int))), "one dimension"),
    "no tokens": (lambda c: c.add_request(request("x", None)), "NoneType"),
    "id in use": (lambda c: c.add_request(request("decoding")), "in use"),
    "unhashable id": (lambda c: c.add_request(request([])), "hashable"),
    "empty chunk": (lambda c: c.add_request(request("x"), chunk_tokens=0), "chunk_tokens"),
    "negative chunk": (lambda c: c.add_request(request("x"), chunk_tokens=-3), "chunk_tokens"),
    "fractional chunk": (lambda c: c.add_request(request("x"), chunk_tokens=1.5), "chunk_tokens"),
    "bool chunk": (lambda c: c.add_request(request("x"), chunk_tokens=True), "chunk_tokens"),
    "bad checkpoint": (
        lambda c: c.add_request(request("x"), checkpoint_positions=[-1]),
        "checkpoint_positions",
    ),
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
    before = busy.stats()
    with pytest.raises(errors.InvalidArgumentError, match=words):
        call(busy)
    busy.check_invariants()
    assert busy.stats() == before


@pytest.mark.parametrize("name", BAD_ORDER)
def test_bad_order_changes_nothing(busy, name):
    call, error = BAD_ORDER[name]
    before = busy.stats()
    with pytest.raises(error):
        call(busy)
    busy.check_invariants()
    assert busy.stats() == before


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
    with pytest.raises(errors.StepOrderError, match="in flight"):
        call(busy)
    busy.check_invariants()
    busy.abort_step()


def test_statuses(busy):
    for status in RequestStatus:
        assert busy.status(status.value) is status


def test_rows_are_limited(busy):
    busy.add_request(request("fourth", [1]))
    with pytest.raises(errors.RequestCapacityError, match="1 request rows are required"):
        busy.add_request(request("fifth", [1]))
    busy.check_invariants()


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ({}, "missing"),
        ({"decoding": 1, "scheduled": 1, "prefilling": 1}, "unexpected"),
        ({"decoding": 1, "scheduled": -1}, "-1"),
        ({"decoding": 1, "scheduled": 99}, "vocab_size"),
    ],
)
def test_refused_tokens_leave_the_step_in_flight(busy, tokens, words):
    step = busy.begin_step()
    assert set(step.sampling_ids) == {"decoding", "scheduled"}
    with pytest.raises(errors.InvalidArgumentError, match=words):
        busy.commit_step(tokens)
    busy.commit_step({"decoding": 1, "scheduled": 2})
    busy.check_invariants()


def test_decoding_ends_at_the_longest_length():
    context = make_context(make_config(max_sequence_length=2 * BLOCK))
    context.add_request(request("x", [1] * (2 * BLOCK - 1)))
    run_step(context)
    run_step(context)  # computes the last position, and samples a token that has none
    with pytest.raises(errors.SequenceLengthError, match="finish it"):
        context.begin_step()
    context.check_invariants()
    assert len(context.finish("x")) == 2


def test_decoding_needs_token_room():
    context = make_context(make_config(max_tokens=20, max_requests=3))
    for name in ("a", "b"):
        context.add_request(request(name, [1]))
    run_step(context)
    context.add_request(request("c", [2] * 19))
    with pytest.raises(errors.TokenCapacityError, match="decode_ids"):
        context.begin_step()
    sampled = run_step(context, decode_ids=["b", "b"])
    assert set(sampled) == {"b", "c"}


def test_decoding_needs_blocks():
    context = make_context(make_config(num_kv_blocks=2))
    for name in ("a", "b"):
        context.add_request(request(name, [1] * BLOCK))
    run_step(context)
    with pytest.raises(errors.BlockCapacityError, match="2 KV blocks are required"):
        context.begin_step()
    context.check_invariants()
    context.preempt("b")
    assert set(run_step(context)) == {"a"}
    context.check_invariants()


def test_later_chunk_needs_blocks():
    context = make_context(make_config(num_kv_blocks=2))
    context.add_request(request("a", [1] * (3 * BLOCK)), chunk_tokens=BLOCK)
    run_step(context)
    with pytest.raises(errors.BlockCapacityError):
        context.schedule_prefill("a", checkpoint_positions=[BLOCK])
    assert context.schedule_prefill("a", chunk_tokens=BLOCK) == BLOCK
    context.check_invariants()


def test_exception_while_planning_takes_the_admission_back():
    class Broken:
        def positions(self, facts):
            raise OSError("planning failed")

    context = make_context(placement=Broken())
    before = context.stats()
    with pytest.raises(OSError, match="planning failed"):
        context.add_request(request("x"))
    context.check_invariants()
    assert context.stats() == before


def test_exception_while_restoring_preempts_the_step(monkeypatch):
    context = make_context()
    context.add_request(request("x"))

    def fail(sources, rows):
        raise OSError("launch failed")

    monkeypatch.setattr(context.slot_allocator, "restore_slots", fail)
    with pytest.raises(OSError, match="launch failed"):
        context.begin_step()
    context.check_invariants()
    assert context.status("x") is RequestStatus.PREEMPTED
    assert context.slot_allocator.num_reserved_slots == 0


def test_exception_while_saving_publishes_nothing(monkeypatch):
    context = make_context()
    context.add_request(request("x", PROMPT[: 2 * BLOCK]))
    context.begin_step()

    def fail(rows, slots):
        raise OSError("launch failed")

    monkeypatch.setattr(context.slot_allocator, "copy_live_to_slots", fail)
    with pytest.raises(OSError, match="launch failed"):
        context.commit_step({"x": 1})
    assert context.match(context.prepare(request("y"))).kv_matched_blocks == 0
    assert context.abort_step() == ("x",)
    context.check_invariants()


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"kv_cache_gb": 1e-9, "max_slots": 1}, errors.BudgetError, "GiB"),
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


def test_own_kv_cache_needs_a_block_count():
    with pytest.raises(errors.InvalidArgumentError, match="num_kv_blocks"):
        DynamicInferenceContext(CacheConfig(kv_cache_gb=1.0, max_slots=1), STATES)
    context = DynamicInferenceContext(CacheConfig(num_kv_blocks=3, max_slots=1), STATES)
    assert context.kv_cache is None
    assert context.kv_block_allocator.pool_size == 4


def test_states_of_other_tensors_are_refused():
    spec = StateSpec((StateTensorSpec("other", 1, (2,), torch.float32),))
    with pytest.raises(errors.InvalidArgumentError, match="'conv' and 'ssm'"):
        DynamicInferenceContext(make_config(), spec, KV)


def test_invariants_see_a_lost_reservation(busy):
    busy.slot_allocator.cancel_reserved(list(busy.slot_allocator.pool.reserved)[:1])
    with pytest.raises(errors.InvariantError, match="are reserved, but"):
        busy.check_invariants()


def test_invariants_see_a_wrong_table(busy):
    row = int((busy.request_memory.block_tables[:, 0] >= 0).argmax())
    busy.request_memory.block_tables[row, -1] = 0
    with pytest.raises(errors.InvariantError, match="block table"):
        busy.check_invariants()


def test_invariants_see_a_lost_row(busy):
    busy.request_memory._free_rows.pop()
    with pytest.raises(errors.InvariantError, match="rows are lost"):
        busy.check_invariants()


def test_invariants_see_a_lost_reference(busy):
    busy.kv_block_allocator.retain_memory_blocks([0])
    with pytest.raises(errors.InvariantError, match="reference counts"):
        busy.check_invariants()
