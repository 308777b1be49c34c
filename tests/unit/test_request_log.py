"""The log line of a request: each reason of a miss, and where a hit lay."""

import logging

import pytest
from context_rig import BLOCK, VOCAB, generate, make_config, make_context, run_step
from tier_rig import cached_rows, flip, flip_header, make_tiered
from verification_rig import corrupt_and_verify

from mamba_cache.context import Request, request_log
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.tiers import EntryKind

PROMPT = [token % VOCAB for token in range(3 * BLOCK + 3)]


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "mamba_cache.requests")
    return caplog


def fields(line):
    return dict(field.split("=", 1) for field in line.split(" "))


def run(context, lines, prompt=PROMPT, **options):
    """Runs one request; returns what its line says."""
    lines.clear()
    generate(context, prompt, 1, **options)
    [line] = [record.getMessage() for record in lines.records if record.name.endswith("requests")]
    return fields(line)


def reason(context, lines, prompt=PROMPT, **options):
    return run(context, lines, prompt, **options)["reason"]


def logged(**changes):
    return make_context(make_config(log_requests=True, **changes))


def test_a_new_prefix_and_a_hit(lines):
    context = logged()
    size = len(PROMPT)
    assert run(context, lines, request_id="a") == {
        "request": "'a'", "prompt_tokens": str(size), "matched_tokens": "0", "skipped_tokens": "0",
        "tier": "-", "reason": "new_prefix",
    }  # fmt: skip
    assert run(context, lines) == {
        "request": "'only'", "prompt_tokens": str(size), "matched_tokens": str(3 * BLOCK),
        "skipped_tokens": str(3 * BLOCK), "tier": "gpu", "reason": "-",
    }  # fmt: skip


def test_no_line_unless_it_is_asked_for(lines):
    generate(make_context(), PROMPT, 1)
    assert not lines.records
    with pytest.raises(InvalidArgumentError, match="log_requests"):
        make_config(log_requests="yes")


def test_other_keys(lines):
    context = logged()
    assert reason(context, lines, cache_salt="a") == "new_prefix"
    assert reason(context, lines, cache_salt="b") == "salt_differs"
    assert reason(context, lines, cache_salt="b", lora_id="x") == "adapter_differs"
    keys = [(2, "image")]
    assert reason(context, lines, cache_salt="b", lora_id="x", multimodal_keys=keys) == (
        "multimodal_keys_differ"
    )
    assert reason(context, lines, cache_salt="a") == "-"
    # What is remembered of it is neither salt nor token.
    [log] = [context._request_log]
    assert "'a'" not in repr(vars(log))


def test_what_was_evicted(lines):
    context = logged(num_kv_blocks=5)
    run(context, lines)
    other = [token * 5 % VOCAB for token in range(1, 4 * BLOCK + 3)]
    run(context, lines, other)
    assert reason(context, lines) == "evicted"
    run(context, lines, other)
    context._request_log._blocks.clear()  # as if much had been evicted since
    assert reason(context, lines) == "not_kept"


def test_a_state_that_was_evicted_and_one_that_never_was(lines):
    context = logged(max_slots=1)
    run(context, lines)
    longer = [*PROMPT[: 2 * BLOCK], *reversed(PROMPT), *PROMPT]
    assert reason(context, lines, longer) == "no_state"
    assert reason(context, lines, PROMPT) in ("state_evicted", "-")
    context = logged()
    run(context, lines)
    block = context.kv_block_allocator.match_prefix(
        context.prepare(Request(request_id=0, prompt_tokens=PROMPT)).hashes
    )
    for each in block:
        context.slot_allocator.invalidate_block(each)
    assert reason(context, lines) == "state_evicted"


def test_what_no_cache_could_have(lines):
    assert reason(logged(enable_prefix_caching=False), lines) == "cache_disabled"
    assert reason(logged(), lines, PROMPT[: BLOCK - 1]) == "prompt_shorter_than_block"


def test_a_state_too_late(lines):
    context = logged(min_computed_tokens=BLOCK + 1)
    first = PROMPT[: 2 * BLOCK]
    run(context, lines, first)
    context.slot_allocator.invalidate_block(
        context.kv_block_allocator.match_prefix(
            context.prepare(Request(request_id=0, prompt_tokens=first)).hashes
        )[0]
    )
    assert reason(context, lines, first) == "state_too_late"


def test_what_verification_removed(lines):
    context = logged(verify_hits=1.0)
    generate(context, PROMPT, 1)
    run(context, lines)
    corrupt_and_verify(context, block=0)
    assert reason(context, lines) == "verification_failed"


def test_a_hit_in_host_memory_and_an_entry_that_was_damaged(lines):
    context = make_tiered(log_requests=True, num_kv_blocks=5)
    run(context, lines)
    context.wait_for_tiers()
    other = [token * 5 % VOCAB for token in range(1, 4 * BLOCK + 3)]
    run(context, lines, other)
    assert run(context, lines)["tier"] == "host"
    run(context, lines, other)
    context.wait_for_tiers()
    for row in cached_rows(context, EntryKind.STATE):
        flip(context, EntryKind.STATE, row, 9)
    context.add_request(Request(request_id="damaged", prompt_tokens=PROMPT))
    lines.clear()
    step = context.begin_step()
    assert context.commit_step(dict.fromkeys(step.sampling_ids, 1)) == ("damaged",)
    assert not lines.records
    context.resume_request("damaged")
    run_step(context)
    [line] = lines.messages
    assert fields(line)["reason"] == "entry_refused"


def test_an_entry_whose_header_is_wrong_is_the_reason_of_the_miss(lines):
    """That shows before anything is loaded, so the request computes at once."""
    context = make_tiered(log_requests=True, num_kv_blocks=5)
    run(context, lines)
    run(context, lines, [token * 5 % VOCAB for token in range(1, 4 * BLOCK + 3)])
    context.wait_for_tiers()
    for row in cached_rows(context, EntryKind.STATE):
        flip_header(context, EntryKind.STATE, row, 9)
    assert run(context, lines)["reason"] == "entry_refused"
    assert run(context, lines, PROMPT[:BLOCK])["reason"] != "entry_refused"


def test_it_remembers_no_more_than_it_may(lines, monkeypatch):
    monkeypatch.setattr(request_log, "MOST_REMEMBERED", 2)
    context = logged()
    for salt in range(40):
        generate(context, PROMPT, 1, cache_salt=str(salt))
    [keys] = context._request_log._begun.values()
    assert len(keys) == 16
    for first in range(5):
        generate(context, [first] * BLOCK, 1)
    assert len(context._request_log._begun) == 2
    context.reset()
    assert not context._request_log._begun
    assert not context._request_log._blocks


def test_it_forgets_with_a_reset(lines):
    context = logged()
    run(context, lines)
    context.reset()
    assert reason(context, lines) == "new_prefix"
