"""What the machine of all tiers has found, one test each."""

from context_rig import BLOCK, add, generate, run_step
from tier_rig import make_tiered

from mamba_cache.slots import AdaptiveSlotPolicy

PROMPT = [(7 * i * i + 3 * i) % 13 for i in range(2 * BLOCK + 1)]
OTHERS = [[(5 * i + k) % 13 for i in range(5 * BLOCK)] for k in range(1, 4)]


def test_a_request_that_has_grown_resumes_by_a_load_under_a_policy_that_knows_prompts():
    """The policy knew the prompt as it was first; the state that is loaded lies beyond it."""
    context = make_tiered(save_decode_states=True)
    context.slot_allocator.change_policy(AdaptiveSlotPolicy())
    add(context, "grown", PROMPT)
    tokens = []
    while len(tokens) < 2 * BLOCK:
        tokens.append(run_step(context)["grown"][1])
    context.preempt("grown")
    context.wait_for_tiers()
    for other in OTHERS:
        generate(context, other, 1)
    admission = context.resume_request("grown")
    assert admission.loads_state
    assert admission.skip_tokens > len(PROMPT)
    run_step(context)
    assert context.finish("grown")[:-1] == tokens
