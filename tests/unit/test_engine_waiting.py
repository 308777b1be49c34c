"""Who shares what with whom, and who waits for whom."""

import pytest
from engine_rig import BLOCK, cache_config, draw_prompt, greedy, make_engine, step_checked

from mamba_cache.context import Admission, Request, RequestStatus
from mamba_cache.reference.requests import EngineRequest
from mamba_cache.reference.scheduler import branch_positions, common_blocks, is_worth_waiting


@pytest.fixture
def make():
    """Makes a request record whose digests belong to one context."""
    context = make_engine().context

    def make_request(prompt):
        prepared = context.prepare(Request(request_id=object(), prompt_tokens=prompt))
        return EngineRequest.make(prepared, greedy(4), cache_config(), None, 0.0)

    return make_request


@pytest.mark.parametrize("common", range(0, 50, 7))
def test_common_blocks_are_those_of_the_common_prefix(make, rng, common):
    root = draw_prompt(rng, 50)
    one = make(root)
    other = make([*root[:common], (root[common] + 1) % 256, *draw_prompt(rng, 9)])
    assert common_blocks(one, other) == common // BLOCK
    assert common_blocks(other, one) == common // BLOCK


def test_the_block_of_the_last_token_must_be_computed_anyway(make, rng):
    prompt = draw_prompt(rng, 3 * BLOCK)
    same, longer = make(prompt), make([*prompt, 1])
    assert common_blocks(same, make(prompt)) == 2
    assert common_blocks(longer, same) == 3


def test_branch_positions_lie_ahead_and_are_told_once(make, rng):
    root = draw_prompt(rng, 6 * BLOCK)
    request = make(root)
    queued = [request, *(make([*root[: n * BLOCK], 0, 1]) for n in (0, 1, 3, 3, 6))]
    found = branch_positions(request, queued, start=BLOCK, block_size_tokens=BLOCK)
    assert found == [3 * BLOCK, 6 * BLOCK]
    request.branch_positions.update(found[:1])
    again = branch_positions(request, queued, start=BLOCK, block_size_tokens=BLOCK)
    assert again == [6 * BLOCK]


@pytest.mark.parametrize(
    ("skip_blocks", "computed", "promised", "expected"),
    [
        (0, 0, True, True),
        (0, 3 * BLOCK - 1, True, True),
        (0, 3 * BLOCK, True, False),  # computed, so what was saved of it is found already
        (2, 0, True, True),
        (3, 0, True, False),  # nothing to gain
        (0, 0, False, False),  # no state will be saved there
    ],
)
def test_waiting_is_for_a_state_that_will_be_saved_farther_on(
    make, rng, skip_blocks, computed, promised, expected
):
    root = draw_prompt(rng, 3 * BLOCK)
    request, other = make([*root, 1, 2]), make([*root, 3, 4])
    other.branch_positions = {3 * BLOCK} if promised else {2 * BLOCK}
    found = is_worth_waiting(
        request, [(other, computed)], skip_tokens=skip_blocks * BLOCK, block_size_tokens=BLOCK
    )
    assert found is expected


def test_what_was_cached_when_a_request_first_ran_is_reported(make, rng):
    request = make(draw_prompt(rng, 20))
    first, resumed = (
        Admission(
            prompt_tokens=20,
            block_ids=(0,) * n,
            state_matched_blocks=n,
            skip_tokens=n * BLOCK,
            miss_reason=None,
            request_id="x",
            chunk_tokens=12,
        )
        for n in (1, 2)
    )
    request.note_admission(first)
    request.prefill_tokens = 12
    request.note_admission(resumed)
    assert request.admission == first


def shared_prompts(rng, count, *, root_blocks):
    root = draw_prompt(rng, root_blocks * BLOCK)
    return [[*root, *draw_prompt(rng, 5)] for _ in range(count)]


def num_running(engine):
    return engine.context.stats().requests


def submit_two(engine, rng, *, root_blocks=6):
    for name, prompt in zip("ab", shared_prompts(rng, 2, root_blocks=root_blocks), strict=True):
        engine.submit(prompt, greedy(3), request_id=name)


def test_the_second_waits_while_the_first_computes_what_they_share(rng):
    engine = make_engine(max_tokens=2 * BLOCK)
    submit_two(engine, rng)
    for _ in range(3):
        step_checked(engine)
        assert num_running(engine) == 1
    step_checked(engine)
    assert num_running(engine) == 2


def test_nobody_waits_for_one_that_was_cancelled(rng):
    engine = make_engine(max_tokens=2 * BLOCK)
    submit_two(engine, rng)
    step_checked(engine)
    engine.cancel("a")
    step_checked(engine)
    assert engine.context.status("b") is RequestStatus.PREFILLING
    assert {event.request_id for event in engine.stream()} == {"b"}


def test_waiting_ends_after_max_wait_steps(rng):
    engine = make_engine(max_tokens=2 * BLOCK + 3, max_wait_steps=2)
    submit_two(engine, rng, root_blocks=20)
    for _ in range(2):
        step_checked(engine)
        assert num_running(engine) == 1
    step_checked(engine)
    assert num_running(engine) == 2


@pytest.mark.parametrize("changes", [{"wait_for_prefix": False}, {"max_wait_steps": 0}])
def test_waiting_can_be_switched_off(rng, changes):
    engine = make_engine(max_tokens=128, **changes)
    submit_two(engine, rng)
    step_checked(engine)
    assert num_running(engine) == 2


def test_without_slots_nobody_waits(rng):
    engine = make_engine(max_tokens=128, max_slots=0)
    submit_two(engine, rng)
    step_checked(engine)
    assert num_running(engine) == 2


def test_others_overtake_one_that_waits(rng):
    engine = make_engine(max_tokens=4 * BLOCK)
    submit_two(engine, rng, root_blocks=3)
    engine.submit(draw_prompt(rng, 3), greedy(1), request_id="other")
    ends = [event.request_id for event in step_checked(engine) if event.finished]
    assert ends == ["other"]
    assert num_running(engine) == 2
