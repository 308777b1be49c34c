"""Verified hits on a GPU: right entries are kept, a changed bit of a state is found."""

import pytest
from context_rig import BLOCK, VOCAB, generate, make_config, make_context

from mamba_cache.reference.engine import compute_prefix

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
PROMPT = [(5 * i * i + 3 * i) % VOCAB for i in range(3 * BLOCK + 3)]


@pytest.mark.parametrize("damage", [None, "state", "kv"])
def test_a_hit_is_computed_again_and_what_differs_is_found(model, damage):
    context = make_context(make_config(verify_hits=1.0), model=model, device=DEVICE)
    generate(context, PROMPT, 1, model=model)
    generate(context, PROMPT, 1, request_id="hit", model=model)
    hit = context._memory.verifier.take()
    blocks = context.kv_block_allocator.match_prefix(hit.hashes)
    if damage == "state":
        slot = context.slot_allocator.get_slot(blocks[-1])
        context.slot_allocator.states["ssm"][1, slot, 0, 0, 0] += 1e-3
    elif damage == "kv":
        context.kv_cache[0, 1, blocks[1], 5] *= 1.01
    found = context._memory.verifier.judge(hit, compute_prefix(model, context, hit))
    assert len(found) == (damage is not None)
    differences = {kind: int(kind == damage) for kind in ("state", "kv")}
    assert context.verification_stats().differences == differences
    skipped = {None: 3 * BLOCK, "state": 0, "kv": 0}[damage]
    assert generate(context, PROMPT, 1, model=model)[2].skip_tokens == skipped
    context.check_invariants()
