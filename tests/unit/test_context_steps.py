"""What a step says of its requests, and what it moves for them."""

import pytest
import torch
from context_rig import BLOCK, add, generate, make_config, make_context, run_step

from mamba_cache import DeviceTokens
from mamba_cache.context import ScheduledRequest
from mamba_cache.slots import EveryNthBlock
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


def test_a_step_tells_what_embedders_that_compute_its_parts_apart_need():
    """Its chunks with the slots inside them, the rows that decode, and the metadata's tensors."""
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


def test_the_lowest_free_row_is_taken_next():
    context = make_context(make_config(max_requests=4))
    for name in "abcd":
        add(context, name, OTHER)
    run_step(context)
    for name in "dbc":
        context.finish(name)
    taken = []
    for name in "xyz":
        add(context, name, OTHER)
        taken.append(context.begin_step([]).metadata.state_rows[0].item())
        context.commit_step({name: 1})
    assert taken == [1, 2, 3]


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
    """The pairs of each restore and of each copy to slots from now on."""
    calls = {"restore_slots": [], "copy_live_to_slots": []}

    def watch(name):
        function = getattr(context.slot_allocator, name)

        def watched(sources, targets):
            calls[name].append(list(zip(sources.tolist(), targets.tolist(), strict=True)))
            function(sources, targets)

        monkeypatch.setattr(context.slot_allocator, name, watched)

    for name in calls:
        watch(name)
    return calls.values()


def test_a_step_moves_the_states_that_it_plans_and_no_padding(monkeypatch):
    """A kernel looks at each entry that it is given, and there is room for one of each request."""
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
        [(slot, saved_row)],  # the row that was given back last
    ]
    assert saved == [[(saved_row, slot)]]


def test_the_device_may_accept_none_of_a_requests_tokens(context):
    for name in ("some", "none"):
        add(context, name, OTHER)
    run_step(context)
    step = context.begin_step()
    context.commit_step(
        DeviceTokens(torch.tensor([[4, 8, 9], [5, 8, 9]]), torch.tensor([1, 0]).int())
    )
    assert step.sampling_ids == ("some", "none")
    assert context.collect_step() == {"some": [4], "none": []}
    assert [request.start for request in context.begin_step().requests] == [4, 3]


def test_drafts_of_the_device_are_computed_by_request_row(context):
    for name in ("first", "second", "gone"):
        add(context, name, OTHER)
    new = {name: token for name, (_, token) in run_step(context).items()}
    drafts = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    step = context.begin_step(["first", "second"], drafts=drafts)
    rows = [request.row for request in step.requests]
    wanted = [[new[r.request_id], *drafts[r.row].tolist()] for r in step.requests]
    assert step.metadata.token_ids[:6].view(2, 3).tolist() == wanted
    assert [(r.num_tokens, r.drafts) for r in step.requests] == [(3, ())] * 2

    # The host does not know them, and takes the caller's word for what was accepted.
    accepted = {"first": [*drafts[rows[0]].tolist(), 9], "second": [drafts[rows[1], 0].item()]}
    context.commit_step(accepted)
    for name, tokens in accepted.items():
        assert context.finish(name) == [new[name], *tokens]
