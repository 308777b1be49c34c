"""Steps with drafts: refused calls, and cases found by the search over all calls."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from context_rig import (
    BLOCK,
    MODEL,
    VOCAB,
    add,
    make_config,
    make_context,
    on_device,
    refused,
    saved_prefix_lengths,
)

from mamba_cache import DeviceTokens
from mamba_cache.context.speculation import Speculation
from mamba_cache.errors import (
    InvalidArgumentError,
    SequenceLengthError,
    StepOrderError,
    TokenCapacityError,
)

DRAFTS = 2
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def context():
    return make_context(make_config(num_speculative_tokens=DRAFTS))


def prefill(context, *names, prompt=PROMPT, token=9):
    for name in names:
        add(context, name, prompt)
    step = context.begin_step(decode_ids=[])
    MODEL.forward(step.metadata, context)
    context.commit_step(dict.fromkeys(step.sampling_ids, token))


def compute(context, **options):
    step = context.begin_step(**options)
    MODEL.forward(step.metadata, context)
    return step


ON_DEVICE = "drafts must be a contiguous tensor of [4, 2]"
REFUSED_DRAFTS = {
    "too many": ({"a": [1, 2, 3]}, "the number of drafts of 'a' must be an int in [0, 2], got 3"),
    "of a stranger": ({"c": [1]}, "drafts are for requests that decode in the step, got [\"'c'\"]"),
    "no tokens": ({"a": [VOCAB]}, "token ids must be below vocab_size"),
    "no mapping": ([1, 2], "in the order of the requests that decode, got list of int64 [2]"),
    "a tensor of another shape": (torch.zeros(4, 3, dtype=torch.int64), ON_DEVICE),
    "a tensor of another dtype": (torch.zeros(4, 2), "got [4, 2] torch.float32 on cpu"),
    "a tensor elsewhere": (torch.zeros(4, 2, dtype=torch.int64, device="meta"), ON_DEVICE),
    "a tensor with strides": (torch.zeros(2, 4, dtype=torch.int64).T, ON_DEVICE),
    "an array of several lengths": ([[1, 2], [3]], "ints"),
    "an array for too many requests": ([[1, 2]] * 3, "ints"),
    "an array of too many": ([[1, 2, 3]] * 2, "ints"),
    "an array of floats": ([[1.0, 2.0]] * 2, "ints"),
    "an array with a hole": ([[-1, 2], [3, 4]], "must come before its negative entries"),
    "an array of no token ids": ([[1, VOCAB], [3, -1]], "token ids must be"),
    "an array beyond 63 bits": (np.full((2, 2), 2**64 - 1, dtype=np.uint64), "ints"),
}


@pytest.mark.parametrize("case", REFUSED_DRAFTS)
def test_drafts_that_are_refused(context, case):
    drafts, message = REFUSED_DRAFTS[case]
    prefill(context, "a", "b")
    with refused(context, InvalidArgumentError, re.escape(message)):
        context.begin_step(drafts=drafts)
    assert context.begin_step(drafts=np.zeros((2, 0), dtype=np.int64)).metadata.num_tokens == 2


def test_drafts_with_a_hole_after_the_first_are_refused():
    context = make_context(make_config(num_speculative_tokens=3))
    prefill(context, "a")
    with refused(context, InvalidArgumentError, "must come before its negative entries"):
        context.begin_step(drafts=[[1, -1, 2]])


def test_drafts_need_room_within_the_longest_sequence():
    context = make_context(make_config(num_speculative_tokens=DRAFTS, max_sequence_length=7))
    prefill(context, "short", prompt=PROMPT[:4])  # the request may have exactly these two drafts
    prefill(context, "a")
    message = r"request 'a' has room for 1 drafts .* \(7\), got 2"
    with pytest.raises(InvalidArgumentError, match=message):
        context.begin_step(drafts={"short": [1, 2], "a": [1, 2]})
    step = compute(context, decode_ids=["a"], drafts=torch.full((4, DRAFTS), 1))
    assert step.requests[0].num_tokens == 2  # drafts of the tensor are truncated
    context.commit_step(on_device([1, 2]))
    with pytest.raises(SequenceLengthError, match=r"may have 8 tokens.*: collect the last step"):
        context.begin_step()
    context.collect_step()
    with pytest.raises(SequenceLengthError, match=r"'a' has 8 tokens.*: finish it"):
        context.begin_step()


def test_drafts_that_the_buffers_do_not_hold_are_refused():
    context = make_context(make_config(num_speculative_tokens=DRAFTS, max_tokens=4))
    for name in ("a", "b"):
        prefill(context, name, prompt=[1])
    with pytest.raises(TokenCapacityError, match="without drafts") as refusal:
        context.begin_step(drafts={"a": [1, 2], "b": [1, 2]})
    assert (refusal.value.required, refusal.value.available) == (6, 4)
    assert context.begin_step(drafts={"a": [1, 2]}).metadata.num_tokens == 4


def test_a_decoding_request_is_kept_room_for_its_drafts():
    context = make_context(make_config(num_speculative_tokens=DRAFTS, max_tokens=6))
    prefill(context, "a")
    with pytest.raises(TokenCapacityError):
        add(context, "b", PROMPT, chunk_tokens=4)
    add(context, "b", PROMPT, chunk_tokens=3)
    assert context.begin_step(drafts={"a": [1, 2]}).metadata.num_tokens == 6


REFUSED_TOKENS = {
    "too many": ([1, 2, 5, 6], "the number of new tokens of 'a' must be an int in [0, 3], got 4"),
    "no draft": ([2, 2, 5], "its drafts are [1, 2], got [2, 2, 5]"),
    "no token id": ([1, VOCAB], "token ids must be below vocab_size"),
    "nested": ([[1]], "token ids must be ints"),
    "without data": (torch.ones(1, dtype=torch.int64, device="meta"), "must be ints, got tensor"),
}


@pytest.mark.parametrize("case", REFUSED_TOKENS)
def test_tokens_that_are_refused(context, case):
    tokens, message = REFUSED_TOKENS[case]
    prefill(context, "a")
    compute(context, drafts={"a": [1, 2]})
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        context.commit_step({"a": tokens})
    context.commit_step({"a": [1, 2, 5]})  # the step is still in flight
    assert context.finish("a") == [9, 1, 2, 5]


class OutOfMemoryTokens:
    """Tokens whose copy to the host fails for a reason unrelated to the tokens."""

    def tolist(self):
        raise MemoryError


def test_an_error_of_the_machine_is_not_said_of_the_tokens(context):
    prefill(context, "a")
    compute(context, drafts={"a": [1, 2]})
    with pytest.raises(MemoryError):
        context.commit_step({"a": OutOfMemoryTokens()})
    context.commit_step({"a": [1, 2, 5]})  # the step is still in flight
    assert context.finish("a") == [9, 1, 2, 5]


@pytest.mark.parametrize(
    "given",
    [
        DeviceTokens(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, dtype=torch.int32)),
        DeviceTokens(torch.zeros(1, 3, dtype=torch.int64), torch.ones(2, dtype=torch.int32)),
        DeviceTokens(torch.zeros(1, 3), torch.ones(1, dtype=torch.int32)),
        DeviceTokens(torch.zeros(1, 3, dtype=torch.int64), torch.ones(1)),
        DeviceTokens([[1, 2, 3]], torch.ones(1, dtype=torch.int32)),
        DeviceTokens(
            torch.zeros(1, 3, dtype=torch.int64, device="meta"), torch.ones(1, dtype=torch.int32)
        ),
    ],
)
def test_tokens_on_the_device_that_are_refused(context, given):
    add(context, "a", PROMPT)
    compute(context)
    with pytest.raises(InvalidArgumentError, match="must be a contiguous tensor of"):
        context.commit_step(given)
    with pytest.raises(InvalidArgumentError, match=re.escape("must be an int in [1, 1], got 0")):
        context.commit_step({"a": []})  # a prefill samples one token
    context.commit_step({"a": 1})


def test_counts_of_tokens_on_the_device_need_drafts():
    context = make_context()
    add(context, "a", PROMPT)
    compute(context)
    with pytest.raises(InvalidArgumentError, match=r"counts .* must be None .* got Tensor"):
        context.commit_step(on_device([1], num_drafts=0))
    context.commit_step(DeviceTokens(torch.tensor([[1]])))
    assert context.collect_step() == {"a": [1]}


def test_tokens_on_the_device_need_blocks_of_two_tokens():
    context = make_context(make_config(block_size_tokens=1, ssm_chunk_size=1))
    add(context, "a", PROMPT)
    compute(context)
    with pytest.raises(InvalidArgumentError, match="block_size_tokens of at least 2, got 1"):
        context.commit_step(DeviceTokens(torch.tensor([[1]])))
    context.commit_step([1])


def test_a_step_computes_tokens_that_the_host_does_not_know():
    """Known tokens are mixed in, and tokens go by request: the order of the batch may change."""
    context = make_context(make_config(save_decode_states=True))
    for name, first in (("a", 1), ("b", 2), ("gone", 3), ("late", 4)):
        prefill(context, name, prompt=[first, *PROMPT], token=first)
    compute(context, decode_ids=["gone", "b", "a"])
    context.commit_step(DeviceTokens(torch.tensor([[7], [6], [5]])))  # for "gone", "b", "a"
    context.preempt("gone")
    step = compute(context)
    assert step.request_ids == ("a", "b", "late")
    assert step.metadata.token_ids[:3].tolist() == [5, 6, 4]
    assert step.metadata.positions[:3].tolist() == [7, 7, 6]
    assert context.collect_step() == {"b": [6], "a": [5]}
    context.commit_step([8, 9, 10])
    assert context.finish("a") == [1, 5, 8]
    assert context.finish("gone") == [3]


def test_without_drafts_a_request_advances_by_a_token():
    """The only live state has advanced: the next step would have added the same token again."""
    context = make_context()
    prefill(context, "a")
    compute(context)
    for given in (({"a": []},), ([[4]], [0])):
        with pytest.raises(InvalidArgumentError, match=re.escape("an int in [1, 1], got 0")):
            context.commit_step(*given)
    context.commit_step([[4]], [1])
    assert context.finish("a") == [9, 4]


def test_steps_are_committed_collected_and_begun_in_order(context):
    prefill(context, "a")
    with pytest.raises(StepOrderError, match="no step is uncollected"):
        context.collect_step()
    compute(context)
    context.commit_step(on_device([4]))
    compute(context)
    for tokens in ({"a": 1}, on_device([1])):
        with pytest.raises(StepOrderError, match="call collect_step first"):
            context.commit_step(tokens)
    assert context.collect_step() == {"a": [4]}
    context.commit_step({"a": 1})
    assert context.finish("a") == [9, 4, 1]


def test_a_request_is_forked_once_its_tokens_are_collected():
    """The forks would begin without the token that only the device knows."""
    context = make_context()
    prefill(context, "a")
    compute(context)
    context.commit_step(DeviceTokens(torch.tensor([[4]])))
    with pytest.raises(StepOrderError, match="call collect_step before fork"):
        context.fork("a", ["b"])
    assert context.collect_step() == {"a": [4]}
    context.fork("a", ["b"])
    assert context.finish("b") == context.finish("a") == [9, 4]


def test_a_device_token_that_is_none_loses_nothing(context):
    prefill(context, "a", "b")
    compute(context)
    context.commit_step(on_device([4], [VOCAB]))
    with pytest.raises(InvalidArgumentError, match="below vocab_size"):
        context.collect_step()
    context.finish("b")
    assert context.collect_step() == {"a": [4]}


def test_a_state_reached_in_either_of_two_steps_is_saved_once(context):
    """Found by search: once one request's checkpoint was gone, another one's was not copied.

    The first request's step is uncollected, so its checkpoint is planned for both steps.
    """
    first, second = [1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1]
    prefill(context, "first", prompt=first, token=0)
    prefill(context, "second", prompt=second, token=0)
    compute(context, decode_ids=["first"])
    context.commit_step(on_device([1]))  # ends a block
    compute(context)
    assert context.slot_allocator.num_reserved_slots == 2
    assert context.collect_step() == {"first": [1]}
    context.commit_step({"first": 2, "second": 3})
    for prompt in (first, second):
        assert saved_prefix_lengths(context, [*prompt, 0]) == [1]
    slots = context.slot_allocator
    saved = slots.slot_to_block.ge(0).nonzero().flatten()
    assert len(saved) == 2
    assert not slots.ssm_states[:, saved].isnan().any()


def test_a_state_is_not_saved_again_by_a_step_that_begins_past_it():
    """When the next step was planned, the number of tokens was known but not the tokens."""
    prompt, saved = [1, 2, 3, 4, 5, 6, 7], []
    for is_ahead in (False, True):
        context = make_context(make_config(save_decode_states=True))
        prefill(context, "a", prompt=prompt, token=0)
        compute(context)
        context.commit_step(DeviceTokens(torch.tensor([[1]])))  # ends a block
        if not is_ahead:
            context.collect_step()
        compute(context)
        assert context.slot_allocator.num_reserved_slots == is_ahead
        if is_ahead:
            context.collect_step()
        context.commit_step([2])
        assert saved_prefix_lengths(context, [*prompt, 0, 1]) == [1]
        slots = context.slot_allocator
        [slot] = slots.slot_to_block.ge(0).nonzero().flatten().tolist()
        saved.append((slots.ssm_states[:, slot].clone(), slots.conv_states[:, slot].clone()))
    for one, other in zip(*saved, strict=True):
        assert torch.equal(one, other)


def test_a_state_is_saved_though_another_request_of_the_uncollected_step_has_left(context):
    prefill(context, "gone")  # frees the row that "leaves" gets
    context.finish("gone")
    for name, first in (("leaves", 1), ("stays", 2)):
        prefill(context, name, prompt=[first, 3, 3, 3, 3, 3, 3], token=0)
    add(context, "new", PROMPT[:5])
    compute(context)
    context.commit_step(on_device([1], [2], [3]))  # the first two end a block
    context.preempt("leaves")
    before = context.stats().computed_tokens
    assert context.collect_step() == {"stays": [2], "new": [3]}
    assert context.stats().computed_tokens == before + 1  # tokens of prompts count at the commit
    context.check_invariants()
    assert saved_prefix_lengths(context, [2, 3, 3, 3, 3, 3, 3, 0]) == [1]
    assert context.stats().reserved_slots == 0


def test_counts_of_the_device_are_cut_to_the_computed_tokens(context):
    prefill(context, "a", prompt=PROMPT[:5], token=0)
    compute(context)
    sampled = on_device([1])
    sampled.counts.fill_(7)
    context.commit_step(sampled)
    assert context.collect_step() == {"a": [1]}
    assert context.output("a") == [0, 1]


def test_requests_that_cross_a_boundary_alike_in_one_step_share_its_state(context):
    prompt = [1, 2, 3, 4, 5, 6]
    prefill(context, "a", "b", prompt=prompt, token=0)
    answer = [0]
    for drafts in ([1, 2], [3, 4], [5, 6], [7, 8]):  # the first and the last end a block
        new = [*drafts, drafts[-1] + 1]
        compute(context, drafts=dict.fromkeys("ab", drafts))
        context.commit_step(dict.fromkeys("ab", new))
        context.check_invariants()
        answer += new
    # The newest state is saved once; the request that saved the previous state replaced it.
    assert saved_prefix_lengths(context, [*prompt, *answer]) == [2]
    assert context.stats().cached_slots == 1
    assert context.finish("a") == context.finish("b") == answer
    assert add(context, "next", [*prompt, *answer]).skip_tokens == 2 * BLOCK


def test_an_unreached_checkpoint_is_released_beside_a_step_that_cannot_reach_it(context):
    """Regression: the slot stayed reserved until the request reached the boundary."""
    prefill(context, "a", prompt=PROMPT[:4])
    compute(context, drafts=torch.full((4, DRAFTS), -1))
    context.commit_step(on_device([1]))
    compute(context)  # as far as is known then, this step may end the block
    context.collect_step()
    context.commit_step(on_device([1]))
    assert context.stats().reserved_slots == 1
    compute(context)  # now it is known that this step may not
    context.collect_step()
    assert context.stats().reserved_slots == 0
    context.commit_step(on_device([1]))
    context.collect_step()
    context.check_invariants()


def test_a_checkpoint_that_a_step_did_not_reach_is_left_to_the_step_in_flight(context):
    drafts = torch.full((4, DRAFTS), 2)
    prefill(context, "a")
    compute(context, drafts=drafts)  # the step may end the block
    context.commit_step(on_device([1]))
    compute(context, drafts=drafts)  # this step may end it, too
    assert context.collect_step() == {"a": [1]}
    assert context.stats().reserved_slots == 1
    context.commit_step(on_device([2, 2, 3]))
    context.collect_step()
    context.check_invariants()
    assert saved_prefix_lengths(context, [*PROMPT, 9, 1, 2, 2]) == [1]


def test_live_rows_of_requests_are_not_for_others(context):
    """Only the device can tell which row of the ring holds a request's state."""
    prefill(context, "a", prompt=list(range(BLOCK)))
    with pytest.raises(InvalidArgumentError, match="have a live state"):
        context.slot_allocator.store_from_live_batch([0], [0])


def test_a_device_is_sent_rows_as_wide_as_its_kernel_reads():
    """As on a GPU: tokens of the host are padded, tokens of the device are used unchanged."""
    config, device, calls = make_config(num_speculative_tokens=DRAFTS), torch.device("meta"), []
    speculation = Speculation(config, device, {})
    speculation._kernels = SimpleNamespace(advance_rows=lambda *given: calls.append(given))
    speculation.advance(None, (np.array([[4], [5]]), np.array([1, 0])))
    rows, _, tokens, counts = calls[0]
    assert rows is speculation._rows
    assert (tokens.shape, tokens.dtype, tokens.device) == ((2, 1 + DRAFTS), torch.int64, device)
    assert (counts.shape, counts.dtype, counts.device) == ((2,), torch.int32, device)
    speculation.advance(None, DeviceTokens(tokens, counts))
    assert calls[1][2] is tokens
    assert calls[1][3] is counts


def test_drafts_that_are_not_accepted_count_as_computed(context):
    prefill(context, "a")
    compute(context, drafts={"a": [4, 4]})
    context.commit_step({"a": [4]})
    assert context.stats().computed_tokens == len(PROMPT) + 3
    compute(context, drafts={"a": [4]})
    context.commit_step(on_device([1]))
    assert context.stats().computed_tokens == len(PROMPT) + 3
    context.collect_step()
    assert context.stats().computed_tokens == len(PROMPT) + 5


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_drafts_of_a_request_may_come_in_any_form(context, form):
    prefill(context, "a", "b")
    step = context.begin_step(drafts={"a": form([4, 5]), "b": form([6])})
    assert [request.drafts for request in step.requests] == [(4, 5), (6,)]
    assert step.metadata.token_ids[:5].tolist() == [9, 4, 5, 9, 6]


def test_tokens_of_a_mixed_step_stay_ints(context, monkeypatch):
    """On a GPU the kernel would misread another dtype."""
    prefill(context, "a")
    add(context, "half", PROMPT * 2, chunk_tokens=4)
    compute(context)
    speculation, given = context._speculation, []
    advance = speculation.advance
    monkeypatch.setattr(speculation, "advance", lambda *args: (given.append(args), advance(*args)))
    context.commit_step([7])
    [(_, (tokens, counts))] = given
    assert (tokens.dtype, counts.dtype) == (np.int64, np.int64)
    assert (tokens[:, 0].tolist(), counts.tolist()) == ([7, 0], [1, 0])


def test_drafts_on_the_device_do_not_matter_without_decodes():
    """Regression: with sequences shorter than the drafts, the maximum of no lengths was taken."""
    context = make_context(make_config(num_speculative_tokens=2, max_sequence_length=2))
    add(context, "a", PROMPT[:2])
    metadata = context.begin_step(drafts=torch.zeros(4, 2, dtype=torch.int32)).metadata
    assert (metadata.num_decodes, metadata.num_tokens, metadata.max_seq_len) == (0, 2, 2)
    context.abort_step()
