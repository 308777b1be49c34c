"""Tokens and drafts as arrays in the order of the batch; work that a steady step avoids."""

import re

import numpy as np
import pytest
import torch
from context_rig import BLOCK, MODEL, VOCAB, add, make_config, make_context, refused, run_step
from work import lines_executed

from mamba_cache import DeviceTokens
from mamba_cache.errors import InvalidArgumentError

DRAFTS = 2
PROMPT = [3, 1, 4, 1, 5]
FORMS = {
    "list": list,
    "tuple": tuple,
    "numpy": np.array,
    "int32": lambda tokens: np.array(tokens, dtype=np.int32),
    "tensor": torch.tensor,
    "by name": lambda tokens: dict(zip(("b", "a", "whole"), tokens, strict=True)),
    "by name in another order": lambda tokens: dict(
        zip(("whole", "b", "a"), (tokens[2], *tokens[:2]), strict=True)
    ),
}


def make_mixed(**changes):
    """Two requests that decode, a chunk that samples and one that does not, in one step."""
    context = make_context(make_config(max_requests=4, **changes))
    for name in ("b", "a"):
        add(context, name, PROMPT)
    run_step(context)
    add(context, "half", PROMPT * 3, chunk_tokens=BLOCK)
    add(context, "whole", PROMPT)
    step = context.begin_step()
    MODEL.forward(step.metadata, context)
    assert step.sampling_ids == ("b", "a", "whole")
    return context


@pytest.mark.parametrize("num_drafts", [0, DRAFTS])
@pytest.mark.parametrize("form", FORMS)
def test_tokens_may_come_in_the_order_of_those_that_sample(form, num_drafts):
    context = make_mixed(num_speculative_tokens=num_drafts)
    context.commit_step(FORMS[form]([7, 8, 9]))
    context.check_invariants()
    last = {name: context.output(name)[-1] for name in ("b", "a", "whole")}
    assert last == {"b": 7, "a": 8, "whole": 9}
    assert context.output("half") == []
    assert context.begin_step().metadata.token_ids[:3].tolist() == [7, 8, 9]


def test_counts_are_the_tokens_that_a_request_takes_of_its_row():
    context = make_mixed(num_speculative_tokens=DRAFTS)
    context.abort_step()
    for name in ("b", "a", "whole"):
        context.resume_request(name)
    run_step(context)
    before = {name: context.output(name) for name in ("b", "a", "whole")}
    drafts = [[1, 2], [3, -1], [-4, -1]]
    step = context.begin_step(["b", "a", "whole"], drafts=drafts)
    assert [request.drafts for request in step.requests] == [(1, 2), (3,), ()]
    MODEL.forward(step.metadata, context)
    context.commit_step([[1, 2, 6], [3, 5, VOCAB + 7], [0, -1, 4]], [3, 2, 0])
    context.check_invariants()
    taken = {name: context.finish(name)[len(before[name]) :] for name in before}
    assert taken == {"b": [1, 2, 6], "a": [3, 5], "whole": []}


REFUSED = {
    "too few": (([1, 2], None), "one token for each of the 3 requests"),
    "a table without counts": (([[1, 2]] * 3, None), "one token for each of the 3 requests"),
    "no token ids": (([1, 2, VOCAB], None), "vocab_size"),
    "a negative one": (([1, 2, -1], None), "token ids must be"),
    "floats": ((np.ones(3), None), "new_tokens must be ints.*got float64"),
    "floats with gradients": (
        (torch.ones(3, requires_grad=True), None),
        "new_tokens must be ints.*got float32",
    ),
    "bools": (([True, False, True], None), "new_tokens must be ints.*got bool"),
    "lists of several lengths": (([[1], [1, 2], [1]], [1, 2, 1]), "new_tokens must be ints"),
    "elsewhere": (
        (torch.ones(3, device="meta").long(), None),
        "got Tensor on meta: give DeviceTokens",
    ),
    "text": (("abc", None), "got str"),
    "counts with a mapping": (({"b": 1, "a": 1, "whole": 1}, [1, 1, 1]), "counts belong to tokens"),
    "counts with one token each": (([1, 2, 3], [1, 1, 1]), r"\[3, k\] and counts \[3\]"),
    "too few counts": (([[1]] * 3, [1, 1]), r"got \[3, 1\] and \[2\]"),
    "more than there are": (([[1]] * 3, [1, 2, 1]), r"counts must be ints in \[0, 1\]"),
    "fewer than none": (([[1]] * 3, [1, -1, 1]), r"counts must be ints in \[0, 1\]"),
    "more than computed": (([[1, 2]] * 3, [1, 2, 1]), "of 'a' must be an int in [1, 1], got 2"),
    "none of a decode": (([[1]] * 3, [1, 0, 1]), "of 'a' must be an int in [1, 1], got 0"),
    "none of a prefill": (([[1]] * 3, [1, 1, 0]), "of 'whole' must be an int in [1, 1], got 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_arrays_leave_the_step_in_flight(case):
    (tokens, counts), message = REFUSED[case]
    context = make_mixed()
    is_regex = "\\" in message or "*" in message
    with refused(context, InvalidArgumentError, message if is_regex else re.escape(message)):
        context.commit_step(tokens, counts)
    context.commit_step([1, 2, 3])
    context.check_invariants()


class Broken:
    """An array that raises an unrelated error when it is read."""

    def __array__(self, *_, **__):
        raise OSError("broken")


def test_a_failure_of_the_array_itself_is_passed_on():
    context = make_mixed()
    with pytest.raises(OSError, match="broken"):
        context.commit_step([Broken()] * 3)
    context.commit_step([1, 2, 3])


def test_accepted_tokens_of_an_array_must_be_the_drafts():
    context = make_context(make_config(num_speculative_tokens=DRAFTS))
    add(context, "a", PROMPT)
    run_step(context)
    context.begin_step(drafts=[[1]])
    with pytest.raises(InvalidArgumentError, match=r"its drafts are \[1\], got \[2, 3\]"):
        context.commit_step([[2, 3, 0]], [2])
    context.commit_step([[1, 3, 0]], [2])
    assert context.finish("a")[-2:] == [1, 3]


def test_a_step_describes_itself_even_after_its_requests_advanced():
    """A step's requests may be read after they have advanced."""
    contexts = [make_context(make_config(num_speculative_tokens=DRAFTS)) for _ in range(2)]
    described = []
    for asks_at_once, context in zip((True, False), contexts, strict=True):
        for name in ("a", "b"):
            add(context, name, PROMPT)
        run_step(context)
        add(context, "c", PROMPT)
        step = context.begin_step(drafts={"b": [1, 2]})
        if asks_at_once:
            described.append((step.requests, step.sampling_ids, repr(step)))
        MODEL.forward(step.metadata, context)
        context.commit_step([[5, 0, 0], [1, 2, 3], [4, 0, 0]], [1, 3, 1])
        for name in "abc":
            context.finish(name)
        if not asks_at_once:
            described.append((step.requests, step.sampling_ids, repr(step)))
    assert described[0] == described[1]
    assert [request.request_id for request in described[0][0]] == ["a", "b", "c"]


def forbid(monkeypatch, owner, *names):
    def refuse(*_, **__):
        raise AssertionError("nothing calls for that")

    for name in names:
        monkeypatch.setattr(owner, name, refuse)


def decode(count, *, num_drafts=0):
    context = make_context(
        make_config(
            max_requests=count, num_kv_blocks=4 * count, num_speculative_tokens=num_drafts,
            max_tokens=8 * count,
        )
    )  # fmt: skip
    for name in range(count):
        add(context, name, [1])
    run_step(context)
    return context


@pytest.mark.parametrize("num_drafts", [0, DRAFTS])
def test_a_step_costs_as_many_lines_for_many_requests_as_for_few(monkeypatch, num_drafts):
    lines = []
    for count in (2, 8):
        context = decode(count, num_drafts=num_drafts)
        context.begin_step()
        context.commit_step([2] * count)
        forbid(monkeypatch, context._slots_to_live, "copy_own")
        forbid(monkeypatch, context._live_to_slots, "copy_own")
        forbid(monkeypatch, context.slot_allocator, "reserve")
        forbid(monkeypatch, context.kv_block_allocator, "take", "register")
        drafts, given = None, (np.full(count, 2),)
        if num_drafts:  # none, all and some drafts are accepted
            drafts, counts = np.full((count, DRAFTS), 3), np.arange(count) * 3 % (DRAFTS + 2)
            given = np.full((count, DRAFTS + 1), 3), counts

        def step(context=context, drafts=drafts, given=given):
            context.begin_step(drafts=drafts)
            context.commit_step(*given)

        lines.append(lines_executed(step))
    assert lines[0] == lines[1]


def test_collecting_tokens_looks_at_requests_only_to_name_them():
    lines = []
    for count in (2, 8):
        context = decode(count, num_drafts=DRAFTS)
        run_step(context)
        context.begin_step()
        tokens = torch.full((count, 1 + DRAFTS), 3)

        def step(context=context, tokens=tokens, count=count):
            context.commit_step(DeviceTokens(tokens, torch.ones(count).int()))
            context.begin_step()
            context.collect_step()

        lines.append(lines_executed(step))
    assert lines[1] - lines[0] <= 2 * (8 - 2)


def test_a_chunk_beside_decodes_costs_as_many_lines_for_many_as_for_few():
    lines = []
    for count in (2, 6):
        context = decode(8)
        for name in range(count, 8):
            context.finish(name)
        add(context, "long", [1] * (4 * BLOCK), chunk_tokens=BLOCK)
        run_step(context)
        context.schedule_prefill("long", chunk_tokens=BLOCK)
        lines.append(lines_executed(context.begin_step))
    assert lines[0] == lines[1]


def test_adding_a_request_does_not_look_at_others():
    lines = []
    for count in (2, 8):
        context = decode(count + 2)
        for name in (count, count + 1):
            context.finish(name)
        add(context, "scheduled", PROMPT)
        lines.append(lines_executed(lambda context=context: add(context, "new", PROMPT)))
    assert lines[0] == lines[1]


def test_a_step_of_the_same_requests_by_name_is_one_of_the_same_group():
    context = decode(3)
    rows = []
    for names in ([0, 2], [0, 2], [2, 0], None):
        step = context.begin_step(names)
        rows.append(step._work.group)
        context.commit_step([1] * len(step.sampling_ids))
    assert rows[0] is rows[1]
    assert rows[2].ids == (2, 0)
    context.preempt(0)
    context.resume_request(0)
    run_step(context)
    assert context.begin_step([2, 0])._work.group is not rows[2]


@pytest.mark.parametrize(
    "empty", [[], (), np.zeros((0, 3), dtype=np.int64), np.zeros(0, dtype=int)]
)
def test_a_step_that_samples_nothing_takes_no_tokens(empty):
    """Found by search: an empty array lost its width and was refused."""
    for counts in (None, []) if np.ndim(empty) < 2 else ([],):
        context = make_context()
        add(context, "a", PROMPT, chunk_tokens=2)
        run_the_forward(context)
        context.commit_step(empty, counts)
        context.check_invariants()
        assert context.request_table.num_computed[0] == 2


def run_the_forward(context):
    MODEL.forward(context.begin_step().metadata, context)
