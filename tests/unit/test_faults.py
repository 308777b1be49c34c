"""Single faults by name, and interrupted commits.

tests/property/test_faults.py injects faults everywhere.
"""

import pytest
import torch
from context_rig import (
    BLOCK,
    MODEL,
    add,
    assert_same_run,
    generate,
    make_config,
    make_context,
    refused,
    run_step,
    uncached,
)
from injectors import OutOfMemory

from mamba_cache import DeviceTokens, Request
from mamba_cache.cache import EveryNthBlock
from mamba_cache.errors import PoisonedError, StepOrderError

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
OTHER = [(5 * i + 1) % 13 for i in range(2 * BLOCK + 3)]
ENDING = PROMPT[: 2 * BLOCK - 1]


def fail_on(call, error=OSError):
    """Return a function that raises on call number ``call`` and forwards earlier calls."""

    def wrap(function):
        calls = 0

        def run(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call:
                raise error("broken")
            return function(*args, **kwargs)

        return run

    return wrap


def patch(monkeypatch, owner, name, wrap):
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))


@pytest.fixture
def context():
    """Return a context whose next step has a later chunk of one prompt and a new prompt."""
    context = make_context()
    add(context, "later", PROMPT, chunk_tokens=BLOCK)
    run_step(context)
    context.schedule_prefill("later", chunk_tokens=BLOCK)
    add(context, "new", OTHER)
    return context


def test_a_step_whose_rollback_breaks_off_is_noticed(monkeypatch):
    context = make_context()
    for name in ("a", "b"):  # the next token of each ends a block
        add(context, name, ENDING)
    run_step(context)
    patch(monkeypatch, context.step_buffers, "fill", fail_on(1))
    patch(monkeypatch, context, "_release", fail_on(1))
    with pytest.raises(OSError, match="broken"):
        context.begin_step()
    with pytest.raises(PoisonedError, match="begin_step broke off"):
        context.status("b")


@pytest.mark.parametrize("on_device", [False, True])
def test_the_device_gets_a_steps_tokens_once(monkeypatch, on_device):
    """Regression: a commit repeated after a failed save advanced the states twice."""
    context = make_context(make_config(num_speculative_tokens=2))
    add(context, "x", ENDING)
    run_step(context)
    step = context.begin_step()
    token = int(MODEL.forward(step.metadata, context)[0].argmax())
    new_tokens = {"x": token}
    if on_device:
        counts = torch.ones(1, dtype=torch.int32)
        new_tokens = DeviceTokens(torch.tensor([[token, 0, 0]]), counts)
    patch(monkeypatch, context._live_to_slots, "copy_own", fail_on(1))
    with pytest.raises(OSError, match="broken"):
        context.commit_step(new_tokens)
    with pytest.raises(StepOrderError, match="abort_step takes the step back"):
        context.commit_step(new_tokens)
    context.abort_step()
    context.resume_request("x")
    for _ in range(3):
        run_step(context)
    tokens = context.finish("x")
    assert tokens == uncached(ENDING, len(tokens))[0]


class Broken:
    """A collection that raises when it is read."""

    def __iter__(self):
        raise OSError("broken")


def test_arguments_may_raise(context):
    with refused(context, OSError, "broken"):
        add(context, "x", PROMPT, checkpoint_positions=Broken())
    with refused(context, OSError, "broken"):
        context.begin_step(Broken())
    with refused(context, OSError, "broken"):
        context.match(Request(request_id="x", prompt_tokens=PROMPT, multimodal_keys=Broken()))
    run_step(context)


def test_without_memory_nothing_is_made():
    moments = OutOfMemory(None, 0)
    with moments:
        make_context(poison=False)
    for index in range(1, moments.count + 1):
        with pytest.raises(torch.OutOfMemoryError), OutOfMemory(None, index):
            make_context(poison=False)


@pytest.mark.parametrize("num_ids", [1, 3, 7])
def test_commits_go_on_under_forced_collisions_while_parents_go_first(monkeypatch, rng, num_ids):
    """Hash ids hardly distinguish prefixes here: prefixes are found by their digests."""
    monkeypatch.setattr("mamba_cache.cache.hashing._ID_MASK", num_ids)
    context = make_context(make_config(num_kv_blocks=9), placement=EveryNthBlock(1))
    for _ in range(12):
        prompt = rng.integers(0, 3, size=int(rng.integers(1, 4 * BLOCK))).tolist()
        assert_same_run(generate(context, prompt, 2), prompt)
        registered = [b for b in range(9) if context.kv_block_allocator.block_hashes[b] >= 0]
        if registered:
            context.kv_block_allocator.deregister_blocks(rng.choice(registered, 1).tolist())
        context.check_invariants()
    generate(context, OTHER, 2)
    assert len(generate(context, OTHER, 2)[2].block_ids) == 2


def test_slots_that_were_not_freed_with_their_blocks_make_the_context_unusable(monkeypatch):
    """Freeing the slots failed, so the block's next tokens would get the state of the old ones."""
    context = make_context(make_config(num_kv_blocks=6))
    generate(context, OTHER, 1)

    def broken(*_):
        raise OSError("broken")

    with monkeypatch.context() as patches:
        patches.setattr(context.slot_allocator, "free_states", broken)
        with pytest.raises(OSError, match="broken"):
            add(context, "x", OTHER[::-1] * 2)
    with pytest.raises(PoisonedError, match="add_request broke off"):
        add(context, "x", OTHER)
    context.reset()
    assert_same_run(generate(context, OTHER, 2), OTHER)
