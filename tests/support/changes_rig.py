"""One change of a model between calls of its prefix cache, compared with the changed model."""

import contextlib
import warnings

import torch
from model_changes import BYPASSED, HARMLESS, KEYED, NOTICED, REFUSED
from transformers_rig import BLOCK, GREEDY, join, make_cache, text
from transformers_rig import plain as plain_generate

from mamba_cache._torch import has_all_digits
from mamba_cache.cache import LastBlock
from mamba_cache.errors import InvalidArgumentError, ModelChangedError

FEW = {"max_new_tokens": 3}


def same(expected, actual) -> bool:
    """Whether tokens are equal, and logits up to rounding of products with few digits.

    With such products either of two equally likely tokens may win; later tokens are not compared.
    """
    wanted, got = torch.stack(expected.logits), torch.stack(actual.logits)
    if wanted.dtype == torch.float32 and has_all_digits(wanted.device):
        close = torch.allclose(got, wanted, rtol=0, atol=1e-5)
        return close and torch.equal(actual.sequences, expected.sequences)
    are_equal = (wanted.argmax(-1) == got.argmax(-1)).all(dim=1)
    compared = 1 + int(are_equal.long().cumprod(0).sum())
    return torch.allclose(got[:compared].float(), wanted[:compared].float(), rtol=0, atol=0.02)


def plain(model, ids):
    return plain_generate(model, ids, **FEW)


def ask(cache, ids):
    output = cache.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY | FEW)
    cache.check_invariants()
    return output


def outcome_of(cache, model, ids) -> str:
    before = cache.stats()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a bypass
            actual = ask(cache, ids)
    except ModelChangedError:
        return NOTICED
    except InvalidArgumentError:
        return REFUSED
    assert same(plain(model, ids), actual)
    after = cache.stats()
    if sum(after.bypasses.values()) > sum(before.bypasses.values()):
        assert (after.requests, after.saved_states) == (before.requests, before.saved_states)
        return BYPASSED
    return HARMLESS if after.hits > before.hits else KEYED


def check_change(kind, model, generator, weights_check="full") -> None:
    """Cache a prefix, change the model, ask, undo the change, and ask again."""
    cache = make_cache(model, weights_check=weights_check, placement=LastBlock())
    prefix = text(generator, 4 * BLOCK)
    prompts = [join(prefix, text(generator, 5)) for _ in range(4)]
    first = plain(model, prompts[0])
    assert same(first, ask(cache, prompts[0]))

    change = contextlib.contextmanager(kind.change)
    with change(model):
        outcome = outcome_of(cache, model, prompts[1])
        if kind.matters and outcome != REFUSED:
            assert not torch.equal(
                torch.stack(plain(model, prompts[0]).logits), torch.stack(first.logits)
            )
        if outcome == KEYED:  # entries under the new key must be right, too
            again = [outcome_of(cache, model, prompts[2]) for _ in range(3)]
            assert again[-1] == HARMLESS
            # The first forward may create objects, as accelerate's hook does: one more new key.
            assert again[0] == HARMLESS or not kind.comes_back
        if outcome in (NOTICED, REFUSED, BYPASSED):  # also at the second call
            assert outcome_of(cache, model, prompts[2]) == outcome
    assert outcome == kind.outcome

    hits = cache.stats().hits
    try:
        output = ask(cache, prompts[3])
    except ModelChangedError:
        assert outcome == NOTICED  # the undo did not restore every bit
        cache.reset()
        output = ask(cache, prompts[3])
        hits = -1
    assert same(plain(model, prompts[3]), output)
    if outcome in (KEYED, BYPASSED) and kind.comes_back:
        assert cache.stats().hits == hits + 1
    cache.close()
