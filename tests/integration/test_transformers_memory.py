"""What a prefix cache of a transformers model holds after a call that raised, and at its end."""

import gc
import weakref

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

from object_graph import tensors_of
from transformers_rig import (
    BLOCK,
    assert_same,
    cached,
    join,
    make_cache,
    plain,
    skipped,
)

from mamba_cache.errors import InvalidArgumentError


class Placement:
    """Returns, or raises, what it is given."""

    given = (4 * BLOCK,)

    def positions(self, facts):
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


@pytest.mark.parametrize("given", [OSError("broken"), [None], [1.5]], ids=repr)
def test_a_placement_that_raises_after_a_hit_holds_nothing(model, prompt, given):
    """The blocks of the matched prefix were held by nobody, for ever."""
    placement = Placement()
    cache = make_cache(model, placement=placement)
    cached(cache, prompt)
    placement.given = given
    for run in (lambda: cached(cache, prompt), lambda: cache.prefill(prompt)):
        with pytest.raises((OSError, InvalidArgumentError)):
            run()
        cache.check_invariants()
        assert cache.stats().used_blocks == 0
    placement.given = ()
    assert skipped(cache, lambda: cached(cache, prompt)) == prompt.shape[1] // BLOCK * BLOCK


def test_a_position_inside_a_block_saves_the_state_of_its_beginning(model, prompt):
    """The state after ten tokens was found as that after eight."""
    placement = Placement()
    placement.given = (BLOCK + 2,)
    cache = make_cache(model, placement=placement)
    cached(cache, prompt, max_new_tokens=1)
    placement.given = ()
    other = join(prompt[:, : 2 * BLOCK], prompt[:, :5])
    expected = plain(model, other)
    runs = []
    assert skipped(cache, lambda: runs.append(cached(cache, other))) == BLOCK
    assert_same(expected, runs[0])


def test_a_dropped_cache_keeps_no_memory(model, prompt):
    cache = make_cache(model)
    cached(cache, prompt)
    shared = {id(tensor) for tensor in tensors_of(model)}
    large = [t for t in tensors_of(cache._store) if id(t) not in shared and t.numel()]
    assert len(large) > 3
    references = [weakref.ref(tensor) for tensor in large]
    gc.collect()
    gc.disable()
    try:
        del cache, large
        assert [tuple(t.shape) for reference in references if (t := reference()) is not None] == []
    finally:
        gc.enable()
