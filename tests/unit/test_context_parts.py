"""Requests that resume inside a block, where somebody has saved a state beside its tokens."""

import numpy as np
import pytest
import torch
from context_rig import (
    BLOCK,
    MODEL_CONFIG,
    add,
    generate,
    make_config,
    make_context,
    prepared,
    run_step,
)
from verification_rig import verify

from mamba_cache.context import DynamicInferenceContext, Request, SkippedVerification
from mamba_cache.errors import InvalidArgumentError, RequestCapacityError
from mamba_cache.slots import EveryNthBlock

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 6)]
PART = BLOCK + 5


def save_part(context, end=PART):
    """Runs a prompt that ends inside a block, and saves state and tokens of that end."""
    chain = prepared(context, PROMPT[:end]).chain
    add(context, "part", PROMPT[:end])
    run_step(context)
    depth, rest = divmod(end, BLOCK)
    row = context.request_table.find("part").row
    block = context.request_table.find("part").block_ids[depth]
    [slot] = context.slot_allocator.reserve_slots([block])
    context.slot_allocator.copy_live_to_slots([row], [slot])
    part = chain.part_hash(depth, PROMPT[end - rest : end])
    parent = chain.hashes[depth - 1] if depth else None
    context.kv_block_allocator.register_kv_block_hashes([block], part, parent_hash=parent)
    context.slot_allocator.commit_reserved([slot], [block], [part[0]])
    context.finish("part")
    return block


def resume(context, prompt=PROMPT, at=PART, **options):
    """Admits a request; returns what it skips, and the logits after its prompt."""
    request = Request(request_id="only", prompt_tokens=prompt)
    admission = context.add_request(request, resume_at=at, **options)
    context.check_invariants()
    [(logits, _)] = run_step(context).values()
    context.check_invariants()
    context.finish("only")
    context.check_invariants()
    return admission.skip_tokens, logits


def fresh(prompt=PROMPT):
    return generate(make_context(), prompt, 1)[1][0]


@pytest.mark.parametrize("end", [5, PART, 2 * BLOCK + 1, 2 * BLOCK + 7])
def test_a_request_resumes_where_the_state_is_and_says_the_same(end):
    context = make_context()
    save_part(context, end)
    skipped, logits = resume(context, at=end)
    assert skipped == end
    torch.testing.assert_close(logits, fresh(), rtol=1e-9, atol=1e-9)
    assert context.stats().hits == 1
    assert context.stats().skipped_tokens == end
    assert resume(context, at=end)[0] == 3 * BLOCK  # it has saved states of its own by now


def test_what_it_shares_is_not_written():
    """The part is copied: two that go on from it in different ways do not meet."""
    context = make_context()
    block = save_part(context)
    before = context.kv_cache[:, :, block, :5].clone()
    other = PROMPT[:PART] + PROMPT[::-1][: BLOCK + 1]
    for prompt in (other, PROMPT):
        skipped, logits = resume(context, prompt)
        assert skipped == PART
        torch.testing.assert_close(logits, fresh(prompt), rtol=1e-9, atol=1e-9)
    assert torch.equal(context.kv_cache[:, :, block, :5], before)


def test_where_the_whole_block_is_cached_too_nothing_is_copied():
    context = make_context(placement=EveryNthBlock(10))
    save_part(context)
    generate(context, PROMPT[: 2 * BLOCK], 1)
    skipped, logits = resume(context)
    assert skipped == PART
    torch.testing.assert_close(logits, fresh(), rtol=1e-9, atol=1e-9)
    assert context.stats().kv_matched_blocks == 1 + 2


def lost_block(context, block):
    context.kv_block_allocator.deregister_blocks([block])


@pytest.mark.parametrize(
    ("at", "prompt", "lose"),
    [
        (BLOCK, PROMPT, None),  # no part of a block
        (3, PROMPT, None),  # before what is found anyway
        (PART, PROMPT[:PART], None),  # nothing would be left to compute
        (2 * BLOCK + 5, PROMPT, None),  # the block before it is not cached
        (BLOCK + 4, PROMPT, None),  # nobody has saved that
        (PART, PROMPT, lambda context, block: context.slot_allocator.invalidate_block(block)),
        (PART, PROMPT, lost_block),
    ],
)
def test_otherwise_it_is_admitted_as_ever(at, prompt, lose):
    context = make_context()
    block = save_part(context)
    if lose is not None:
        lose(context, block)
    skipped, logits = resume(context, prompt, at)
    assert skipped == context.block_size_tokens  # where the saving request kept a state
    torch.testing.assert_close(logits, fresh(prompt), rtol=1e-9, atol=1e-9)


def test_an_embedder_with_its_own_keys_and_values_resumes_at_blocks_alone():
    context = DynamicInferenceContext(make_config(), MODEL_CONFIG.state_spec(torch.float64))
    save = Request(request_id="a", prompt_tokens=PROMPT)
    assert context.add_request(save, resume_at=PART).skip_tokens == 0


def test_without_room_for_the_block_it_resumes_in_it_does_without():
    context = make_context(make_config(num_kv_blocks=4, max_sequence_length=32))
    save_part(context)
    skipped, logits = resume(context, [*PROMPT[:PART], *PROMPT[: 2 * BLOCK]])
    assert skipped == BLOCK
    torch.testing.assert_close(
        logits, fresh([*PROMPT[:PART], *PROMPT[: 2 * BLOCK]]), rtol=1e-9, atol=1e-9
    )


def test_a_state_that_goes_before_the_step_begins_is_done_without():
    context = make_context()
    block = save_part(context)
    request = Request(request_id="only", prompt_tokens=PROMPT)
    assert context.add_request(request, resume_at=PART).skip_tokens == PART
    context.slot_allocator.invalidate_block(block)
    assert not run_step(context)  # as many tokens from an earlier state on
    context.check_invariants()
    assert context.stats().skipped_tokens == BLOCK
    assert context.schedule_prefill("only") == PART - BLOCK
    [(logits, _)] = run_step(context).values()
    torch.testing.assert_close(logits, fresh(), rtol=1e-9, atol=1e-9)


def test_a_chunk_that_begins_there():
    context = make_context()
    save_part(context)
    request = Request(request_id="only", prompt_tokens=PROMPT)
    admission = context.add_request(request, resume_at=PART, chunk_tokens=4)
    assert (admission.skip_tokens, admission.chunk_tokens) == (PART, 4)
    assert not run_step(context)
    context.schedule_prefill("only")
    [(logits, _)] = run_step(context).values()
    torch.testing.assert_close(logits, fresh(), rtol=1e-9, atol=1e-9)


def test_calls_that_fail_hold_nothing(monkeypatch):
    context = make_context(make_config(max_requests=1))
    save_part(context)

    def broken(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(context._admitter._copier, "copy", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            context.add_request(Request(request_id="a", prompt_tokens=PROMPT), resume_at=PART)
    context.check_invariants()
    assert context.kv_block_allocator.num_used_blocks == 0
    context.add_request(Request(request_id="b", prompt_tokens=[1, 2]))
    with pytest.raises(RequestCapacityError):
        context.add_request(Request(request_id="a", prompt_tokens=PROMPT), resume_at=PART)
    with pytest.raises(InvalidArgumentError, match="resume_at"):
        context.add_request(Request(request_id="a", prompt_tokens=PROMPT), resume_at=-1)
    context.check_invariants()
    context.finish("b")
    assert context.kv_block_allocator.num_used_blocks == 0


def test_a_request_that_resumed_inside_a_block_is_verified():
    context = make_context(make_config(verify_hits=1.0))
    for end in (5, PART):
        save_part(context, end)
        assert resume(context, at=end)[0] == end
        hit = context.take_verification()
        assert len(hit.tokens) == end
        assert verify(context, hit) == ()
        context.reset()
    block = save_part(context)
    resume(context)
    context.kv_cache[0, 1, block, 4] += 1
    hit = context.take_verification()
    assert [(each.block, each.name) for each in verify(context, hit)] == [(1, "values")]
    assert context.kv_block_allocator.find_block(hit.part[0], hit.part.digest(0)) is None
    context.check_invariants()


def test_a_hit_inside_a_block_whose_part_is_gone_is_passed_over():
    context = make_context(make_config(verify_hits=1.0))
    block = save_part(context)
    resume(context)
    context.kv_block_allocator.deregister_blocks([block])
    assert context.take_verification() is None
    assert context.verification_stats().skipped == {SkippedVerification.GONE: 1}


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_a_position_of_any_kind_of_int_becomes_a_plain_one(kind):
    """A tensor became the tokens that were skipped, and went into all that was counted of them."""
    context = make_context()
    save_part(context)
    request = Request(request_id="only", prompt_tokens=PROMPT)
    admission = context.add_request(request, resume_at=kind(PART))
    assert (admission.skip_tokens, type(admission.skip_tokens)) == (PART, int)
    assert type(admission.state_matched_blocks) is int
