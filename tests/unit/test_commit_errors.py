"""A commit ends well or is known not to have: no error out of it is taken for a refusal."""

import itertools

import pytest
from context_rig import (
    BLOCK,
    add,
    assert_same_run,
    generate,
    make_config,
    make_context,
    prepared,
    run_step,
)

from mamba_cache.cache import EveryNthBlock
from mamba_cache.errors import InvalidArgumentError, PoisonedError

OTHER = [(5 * i + 1) % 13 for i in range(2 * BLOCK + 3)]


def prompt_with_ids(context, wanted, not_this=()):
    """A prompt of two blocks whose hash ids are as wanted, by trying."""
    blocks = [[a] * (BLOCK - 1) + [b] for a, b in itertools.product(range(1, 13), repeat=2)]
    for first, second in itertools.product(blocks, repeat=2):
        prompt = [*first, *second, 0]
        if tuple(prepared(context, prompt).hashes) == wanted and prompt != not_this:
            return prompt
    raise AssertionError(f"no prompt has ids {wanted}")


@pytest.fixture
def context(monkeypatch):
    """One whose hash ids are 1, 2 or 3."""
    monkeypatch.setattr("mamba_cache.cache.hashing._ID_MASK", 3)
    return make_context(placement=EveryNthBlock(1))


def test_a_colliding_id_whose_parents_lead_back_to_it_is_kept_private(context):
    """Registration refused it, in the middle of a commit; the next one was an AssertionError."""
    first = prompt_with_ids(context, (2, 3))
    generate(context, first, 1)
    [parent, _] = context.kv_block_allocator.match_prefix(prepared(context, first).hashes)
    context.kv_block_allocator.deregister_blocks([parent])  # the child is there, under id 3
    second = prompt_with_ids(context, (3, 2), not_this=first)
    collisions = context.stats().hash_collisions
    add(context, "beside it", OTHER)
    assert_same_run(generate(context, second, 2), second)
    assert context.stats().hash_collisions > collisions
    context.check_invariants()
    context.finish("beside it")
    for prompt in (first, second, OTHER, first):
        assert_same_run(generate(context, prompt, 2), prompt)
        context.check_invariants()


@pytest.mark.parametrize("num_ids", [1, 3, 7])
def test_commits_go_on_under_forced_collisions_while_parents_go_first(monkeypatch, rng, num_ids):
    monkeypatch.setattr("mamba_cache.cache.hashing._ID_MASK", num_ids)
    context = make_context(make_config(num_kv_blocks=9), placement=EveryNthBlock(1))
    for _ in range(12):
        prompt = rng.integers(0, 3, size=int(rng.integers(1, 4 * BLOCK))).tolist()
        assert_same_run(generate(context, prompt, 2), prompt)
        registered = [b for b in range(9) if context.kv_block_allocator.block_hashes[b] >= 0]
        if registered:
            context.kv_block_allocator.deregister_blocks(rng.choice(registered, 1).tolist())
        context.check_invariants()


@pytest.mark.parametrize(("owner", "name"), [
    ("kv_block_allocator", "register_kv_block_hashes"),
    ("slot_allocator", "commit_reserved"),
    ("slot_allocator", "note_consumed"),
])  # fmt: skip
def test_any_error_in_the_middle_of_a_commit_poisons(monkeypatch, owner, name):
    """One of the package's own, too: half of the requests have their tokens."""
    context = make_context()
    prompt = [1, 2, 3] * BLOCK
    generate(context, prompt, 1)
    add(context, "a", prompt)
    add(context, "b", OTHER)

    def refuse(*_, **__):
        raise InvalidArgumentError("no")

    monkeypatch.setattr(getattr(context, owner), name, refuse)
    with pytest.raises(InvalidArgumentError, match="no"):
        run_step(context)
    monkeypatch.undo()
    with pytest.raises(PoisonedError, match="commit_step broke off"):
        run_step(context)
    context.reset()
    assert_same_run(generate(context, prompt, 2), prompt)


def test_slots_that_were_not_freed_with_their_blocks_make_the_context_unusable(monkeypatch):
    """Freeing the slots broke off; the block's next tokens would have had the state of these."""
    context = make_context(make_config(num_kv_blocks=6))
    generate(context, OTHER, 1)

    def broken(*_):
        raise OSError("broken")

    with monkeypatch.context() as patches:
        patches.setattr(context.slot_allocator, "free_states", broken)
        with pytest.raises(OSError, match="broken"):
            add(context, "x", OTHER[::-1] * 2)
    with pytest.raises(PoisonedError, match="allocate_memory_blocks broke off"):
        add(context, "x", OTHER)
    context.reset()
    assert_same_run(generate(context, OTHER, 2), OTHER)
