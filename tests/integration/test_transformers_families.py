"""Every hybrid family of transformers: the same answers with the cache and without."""

import functools

import pytest
import torch
from transformers_rig import (
    BLOCK,
    FAMILIES,
    GREEDY,
    assert_same,
    cached,
    join,
    make_cache,
    make_model,
    plain,
    skipped,
    text,
)

SHORT = {"max_new_tokens": 4}
model_of = functools.cache(make_model)  # each is built once

every_family = pytest.mark.parametrize("name", FAMILIES)


@every_family
def test_prompts_that_share_prefixes(name, generator):
    model = model_of(name)
    cache = make_cache(model)
    prompt = text(generator, 5 * BLOCK + 5)

    def check(ids):
        expected = plain(model, ids, **SHORT)
        hit = skipped(cache, lambda: assert_same(expected, cached(cache, ids, **SHORT)))
        return expected.sequences, hit

    answer, cold = check(prompt)
    _, hit = check(prompt)
    shared = prompt[:, : 3 * BLOCK + 6]
    goes_on = prompt[:, 3 * BLOCK + 6 :][:, :1]  # neither of the branches goes on with this token
    others = [torch.where(goes_on > 50, goes_on - n, goes_on + n) for n in (1, 2)]
    _, first_branch = check(join(shared, others[0], text(generator, 20)))
    _, second_branch = check(join(shared, others[1], text(generator, 20)))
    _, next_turn = check(join(answer, text(generator, 7)))
    _, ends_with_block = check(prompt[:, : 5 * BLOCK])
    assert (cold, hit) == (0, 5 * BLOCK)
    assert (first_branch, second_branch) == (0, 3 * BLOCK)
    assert next_turn == (answer.shape[1] - 1) // BLOCK * BLOCK
    assert ends_with_block == 3 * BLOCK
    assert cache.stats().bypasses == {}


@every_family
def test_prompts_in_a_list(name, generator):
    """Each row equals the row alone; no model alone achieves that under left padding."""
    model = model_of(name)
    cache = make_cache(model)
    shared = text(generator, 3 * BLOCK)
    rows = [join(shared, text(generator, 9)), text(generator, 1), join(shared, text(generator, 2))]
    prompts = [row[0].tolist() for row in rows]
    output, again = (cache.generate(prompts, **GREEDY | SHORT) for _ in range(2))
    cache.check_invariants()
    width = max(map(len, prompts))
    for number, row in enumerate(rows):
        alone = plain(model, row, **SHORT)
        answer = alone.sequences[:, row.shape[1] :]
        for run in (output, again):
            assert torch.equal(run.sequences[number : number + 1, width:], answer)
            logits = torch.stack([step[number] for step in run.logits])
            expected = torch.stack([step[0] for step in alone.logits])
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
