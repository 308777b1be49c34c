"""What a reset ends, and what it keeps."""

import torch
from context_rig import BLOCK, MODEL_CONFIG, generate, make_config, make_context, run_step
from fingerprints import fingerprint

from mamba_cache.context import Request

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
STATES, KV = MODEL_CONFIG.state_spec(torch.float64), MODEL_CONFIG.kv_spec(torch.float64)


def request(request_id, prompt=PROMPT, **options):
    return Request(request_id=request_id, prompt_tokens=prompt, **options)


def test_reset_gives_the_context_that_was_made():
    """Rows kept the order in which they had been given back."""
    config = make_config(hash_secret=b"fixed")
    context, fresh = make_context(config), make_context(config)
    for name in ("a", "b", "c"):
        context.add_request(request(name, [1] * 20))
    run_step(context)
    context.finish("b")
    context.add_request(request("d", [2] * 20))
    context.begin_step()
    context.reset()
    context.check_invariants()
    assert fingerprint(context) == fingerprint(fresh)
    assert context.stats() == fresh.stats()
    rows = []
    for one in (context, fresh):
        for name in ("a", "b"):
            one.add_request(request(name, [1] * 20))
        rows.append([piece.row for piece in one.begin_step().requests])
    assert rows[0] == rows[1]


def test_reset_heals_whatever_happened():
    context = make_context()
    context.add_request(request("x"))
    context.begin_step()
    context.slot_allocator._clear()
    context.kv_block_allocator._clear()
    context.reset()
    context.check_invariants()
    assert len(generate(context, PROMPT, 2)[0]) == 2


def test_reset_that_keeps_the_cache_ends_a_step_in_flight():
    context = make_context()
    generate(context, PROMPT, 1)
    context.add_request(request("x", [7] * 20))
    context.begin_step()
    context.reset(preserve_prefix_cache=True)
    context.check_invariants()
    assert context.stats().aborted_steps == 1
    assert context.stats().used_blocks == context.stats().reserved_slots == 0
    assert generate(context, PROMPT, 1)[2].skip_tokens == 3 * BLOCK
