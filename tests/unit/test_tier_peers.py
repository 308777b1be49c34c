"""Faults of other systems' tiers that no other test of this suite covers."""

import ast

import pytest
from context_rig import (
    BLOCK,
    MODEL,
    UncachedRuns,
    add,
    assert_same_run,
    generate,
    run_step,
)
from sources import sources
from tier_rig import KV, STATE, LateTransfers, flip_all, install, make_tiered

from mamba_cache.context import Request

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(5 * BLOCK)]
UNCACHED = UncachedRuns()
OTHERS = [[(5 * i + k) % 13 for i in range(4 * BLOCK - 2)] for k in range(1, 8)]


def evict(context):
    for other in OTHERS:
        generate(context, other, 1, request_id="other")


@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_prompts_around_a_boundary_resume_at_one_that_they_have_passed(blocks, beyond):
    """At the boundary itself one token is left to compute; answers equal those without a cache."""
    context = make_tiered()
    prompt = PROMPT[: blocks * BLOCK + beyond]
    assert_same_run(generate(context, prompt, 2), prompt)
    evict(context)
    context.slot_allocator.reset()
    run = generate(context, prompt, 2)
    assert run[2].loads_state
    assert run[2].skip_tokens == (blocks - (beyond < 1)) * BLOCK
    assert_same_run(run, prompt)


def found_below(context, prompt):
    """Return the prompt's blocks with a state in host memory, and those with keys and values."""
    hashes = context.prepare(Request(request_id="probe", prompt_tokens=prompt)).hashes
    host = context.host_tier
    return [
        [index + 1 for index in range(len(hashes)) if hashes.digests[index] in host[kind]]
        for kind in (STATE, KV)
    ]


def test_nothing_of_a_draft_that_was_rejected_is_kept_below():
    """The drafts cross the end of a block, so the live state held the rejected state briefly."""
    context = make_tiered(num_speculative_tokens=3, save_decode_states=True)
    prompt = PROMPT[: 2 * BLOCK - 2]
    add(context, "a", prompt)
    [(_, first)] = run_step(context).values()
    second = int(UNCACHED.logits(tuple(prompt), 1).argmax())
    wrong = [(second + 1) % 13] * 3
    step = context.begin_step(drafts={"a": wrong})
    logits = MODEL.forward(step.metadata, context)
    assert int(logits[0].argmax()) == second
    context.commit_step({"a": [second]})
    context.wait_for_tiers()
    drafted = [*prompt, first, *wrong]
    assert found_below(context, drafted) == [[1], [1]]
    context.finish("a")
    evict(context)
    longer = [*drafted, *PROMPT[:BLOCK]]
    assert_same_run(generate(context, longer, 2), longer)


def test_bad_bytes_are_not_kept_because_they_are_there_already():
    """The next computation of a damaged entry replaces it."""
    context = make_tiered()
    prompt = PROMPT[: 3 * BLOCK + 2]
    generate(context, prompt, 1)
    evict(context)
    flip_all(context, STATE, 7)
    for _ in range(9):
        if not context.match(Request(request_id="p", prompt_tokens=prompt)).loads_state:
            break
        add(context, "a", prompt)
        step = context.begin_step()
        MODEL.forward(step.metadata, context)
        assert context.commit_step({"a": 1}) == ("a",)
        context.finish("a")
    assert_same_run(generate(context, prompt, 1), prompt)
    evict(context)
    run = generate(context, prompt, 1)
    assert run[2].skip_tokens == 3 * BLOCK
    assert_same_run(run, prompt)


def test_no_row_is_reused_while_a_copy_from_it_is_under_way():
    """A load's rows are held until its copy has ended, even if the request has ended."""
    context = make_tiered(num_host_states=2, num_host_blocks=6)
    prompt = PROMPT[: 3 * BLOCK + 2]
    generate(context, prompt, 1)
    for other in OTHERS[:1]:
        generate(context, other, 1, request_id="other")
    context.slot_allocator.reset()
    late = install(context, LateTransfers)
    assert add(context, "a", prompt).loads_state
    [held] = [lease.row for lease in context.host_tier.leases[STATE]]
    generation = context.host_tier[STATE].generations[held]
    context.begin_step()
    context.abort_step()
    context.check_invariants()
    for other in OTHERS[1:]:
        generate(context, other, 1, request_id="other")
    assert context.host_tier[STATE].generations[held] == generation
    late.run(99)
    context.wait_for_tiers()
    assert not any(context.host_tier.leases.values())


def test_nothing_is_unpickled():
    """No reader runs code of its input either."""
    called = {"torch.load", "np.load", "eval", "exec"}
    known = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    for source in sources("mamba_cache"):
        for node in ast.walk(source.tree):
            names = set()
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in called, source.name
                assert not any(word.arg == "allow_pickle" for word in node.keywords), source.name
            assert not names & known, source.name
