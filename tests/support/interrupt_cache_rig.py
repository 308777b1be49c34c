"""A prefix cache of a transformers model that is interrupted, and what must hold then."""

import torch
from interrupt_rig import Leak, Wedged, WrongAnswer
from transformers_rig import BLOCK, budgets, make_cache, make_model

from mamba_cache.errors import PoisonedError
from mamba_cache.integrations.transformers.layers import read_layers

OPTIONS = {"do_sample": False, "max_new_tokens": 3, "eos_token_id": None}


def _text(seed, length):
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(seed))


ROOT = _text(1, 2 * BLOCK)
ONE = torch.cat([ROOT, _text(2, BLOCK + 3)], 1)
OTHER = torch.cat([ROOT, _text(3, BLOCK - 2)], 1)
FOREIGN = _text(4, 2 * BLOCK + 1)


class Cached:
    """One model, and the states that it has after each prompt, computed without a cache."""

    def __init__(self, name="granite 4"):
        self.model = make_model(name)
        self.wanted = {}
        ample = make_cache(self.model)
        self.budgets = budgets(ample, slots=4, blocks=9)
        self.layers = ample._store.layout.layers
        for ids in (ONE, OTHER, FOREIGN):
            ample.reset()
            self.wanted[id(ids)] = self.memory(ample.prefill(ids))
        self.answer = self.plain()
        self.cache = None

    def plain(self):
        return self.model.generate(ONE, attention_mask=torch.ones_like(ONE), **OPTIONS)

    def memory(self, past):
        memory = read_layers(past, self.layers, 0)
        return [t.clone() for t in (*memory.states, *memory.windows, *memory.tokens)]

    def fresh(self):
        """A cache as it was made, of few slots and blocks."""
        if self.cache is None:
            self.cache = make_cache(self.model, **self.budgets)
        self.cache.reset()
        return self.cache

    def check(self, cache, ids, salt):
        found = self.memory(cache.prefill(ids, cache_salt=salt))
        for state, wanted in zip(found, self.wanted[id(ids)], strict=True):
            if not torch.allclose(state, wanted, rtol=0, atol=1e-5):
                raise WrongAnswer(f"a prompt of {ids.shape[1]} tokens under salt {salt!r}")


class CacheCall:
    """A call of a prefix cache that holds prefixes of two salts."""

    def __init__(self, cached, run, prepare=lambda cache: None):
        self.cached, self.call, self.prepare = cached, run, prepare

    def make(self):
        cache = self.cached.fresh()
        cache.prefill(OTHER, cache_salt="a")
        cache.prefill(FOREIGN, cache_salt="b")
        self.prepare(cache)
        return cache

    def run(self, cache):
        self.call(cache)

    def judge(self, cache):
        try:
            return self._judge(cache)
        except BaseException:
            self.cached.cache = None
            raise

    def _judge(self, cache):
        model = self.cached.model
        if model._forward_pre_hooks or model._forward_hooks:
            raise Leak("the model is still hooked")
        with torch.no_grad():
            model(input_ids=ONE)
        cache.stats()
        try:
            cache.check_invariants()
            is_poisoned = False
        except PoisonedError:
            is_poisoned = True
            try:
                cache.prefill(ONE)
            except PoisonedError:
                pass
            else:
                raise Wedged("one call says that it is poisoned, the next one goes on")
            cache.reset()
        # First of all what might be served from what the call left.
        for ids, salt in ((ONE, "a"), (ONE, "b"), (FOREIGN, "b"), (OTHER, "a")):
            self.cached.check(cache, ids, salt)
        cache.check_invariants()
        stats = cache.stats()
        if stats.used_blocks or stats.reserved_slots:
            raise Leak(f"{stats.used_blocks} blocks and {stats.reserved_slots} slots are held")
        return is_poisoned


def _batch(cache):
    prompts = [ONE[0].tolist(), FOREIGN[0].tolist(), ONE[0].tolist()]
    cache.generate(prompts, cache_salt="a", **OPTIONS)


def _generate_batch(cache):
    """Resumes inside a block, and preempts: not all three have room at once."""
    prompts = [ids[0].tolist() for ids in (ONE, OTHER, FOREIGN)]
    cache.generate_batch(prompts, cache_salt=["a", "a", "c"], **OPTIONS)


def _declined(cache):
    """Finds what it could restore, and computes it all the same."""
    cache._costs.uses = lambda _: False
    try:
        cache.generate(ONE, checkpoints=[BLOCK], cache_salt="a", **OPTIONS)
    finally:
        del cache._costs.uses


def cache_calls():
    """Returns the calls by name; they share one model."""
    cached = Cached()
    mask = torch.ones_like(ONE)
    return {
        "PrefixCache.generate, a hit": CacheCall(
            cached,
            lambda cache: cache.generate(ONE, attention_mask=mask, cache_salt="a", **OPTIONS),
        ),
        "PrefixCache.generate, a miss": CacheCall(
            cached,
            lambda cache: cache.generate(ONE, attention_mask=mask, cache_salt="c", **OPTIONS),
        ),
        "PrefixCache.generate, a batch": CacheCall(cached, _batch),
        "PrefixCache.generate, a hit is declined": CacheCall(
            cached, _declined, lambda cache: cache.prefill(ROOT, cache_salt="a")
        ),
        "PrefixCache.generate, answers fill blocks": CacheCall(
            cached,
            lambda cache: cache.generate(
                ONE, attention_mask=mask, cache_salt="a", **{**OPTIONS, "max_new_tokens": BLOCK + 2}
            ),
        ),
        "PrefixCache.generate_batch": CacheCall(
            cached, _generate_batch, lambda cache: cache.prepare_batches()
        ),
        "PrefixCache.prefill": CacheCall(cached, lambda cache: cache.prefill(ONE, cache_salt="a")),
        "PrefixCache.reset": CacheCall(cached, lambda cache: cache.reset()),
    }
