"""A client of a prefix cache that knows another client's prompt cannot change its answer."""

import pytest
import torch
from forged import BLOCK, FORGED, PUBLIC, VOCABULARY
from transformers_rig import make_cache, make_model, plain

TAIL, MORE = [5, 6, 7], [8, 9, 10, 11]
GREEDY = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    return make_model("granite 4", vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def expected(model):
    ids = torch.tensor([PUBLIC + TAIL])
    return plain(model, ids, max_new_tokens=6).sequences[0, -6:].tolist()


def open_cache(model, **settings):
    own = {"mamba_cache_gb": 0.05, "kv_cache_gb": 0.05, "block_size_tokens": BLOCK}
    return make_cache(model, **(own | settings | {"segment_tokens": None}))


def ask(cache, prompt):
    """Return the answer to a prompt, and the number of skipped tokens."""
    before = cache.stats().skipped_tokens
    ids = torch.tensor([prompt])
    output = cache.generate(ids, attention_mask=torch.ones_like(ids), checkpoints=[BLOCK], **GREEDY)
    return output[0, len(prompt) :].tolist(), cache.stats().skipped_tokens - before


def ask_batch(cache, prompt):
    before = cache.stats().skipped_tokens
    [output] = cache.generate_batch([prompt], checkpoints=[[BLOCK]], **GREEDY).values()
    return output.generated_tokens, cache.stats().skipped_tokens - before


@pytest.mark.parametrize("attack", [ask, ask_batch])
@pytest.mark.parametrize("victim", [ask, ask_batch])
def test_a_forged_block_is_a_miss(model, expected, attack, victim):
    """By ``generate`` and in batches, which share their prefixes."""
    with open_cache(model) as cache:
        attack(cache, FORGED + TAIL)
        assert victim(cache, FORGED + MORE)[1] == BLOCK
        assert victim(cache, PUBLIC + TAIL) == (expected, 0)


@pytest.mark.parametrize(("algorithm", "hit"), [("blake2b", 0), ("sha256", 0), ("xxh3_128", BLOCK)])
def test_a_setting_chooses_the_digest_of_every_call(model, algorithm, hit):
    """The pair collides where, and only where, xxh3 is asked for."""
    with open_cache(model, hash_algorithm=algorithm, hash_secret=b"s") as cache:
        ask(cache, FORGED + TAIL)
        assert ask_batch(cache, FORGED + MORE)[1] == BLOCK
        assert ask_batch(cache, [*PUBLIC, 12, 13, 14])[1] == hit
