"""A prefix cache of a transformers model that is interrupted, and what must hold then."""

import shutil
import tempfile
import weakref

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

    tiers = {}

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
            self.cache = make_cache(self.model, **self.budgets, **self.tiers, max_pinned_share=0.5)
        self.cache.reset()
        return self.cache

    def check(self, cache, ids, salt):
        found = self.memory(cache.prefill(ids, cache_salt=salt))
        for state, wanted in zip(found, self.wanted[id(ids)], strict=True):
            if not torch.allclose(state, wanted, rtol=0, atol=1e-5):
                raise WrongAnswer(f"a prompt of {ids.shape[1]} tokens under salt {salt!r}")


class TieredCached(Cached):
    """The same over a tier in host memory and one on disk, which a reset leaves as it is."""

    def __init__(self, name="granite 4"):
        super().__init__(name)
        folder = tempfile.mkdtemp(prefix="mamba-cache-tiers-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.tiers = {"host_cache_gb": 0.01, "disk_cache_path": folder, "disk_cache_gb": 0.05}

    def go_down(self, cache):
        """What was computed lies on the disk, and nowhere else."""
        cache.prefill(ONE, cache_salt="a")
        cache._store.tiers._disk.flush()
        cache.reset()

    def go_out(self, cache):
        """What was computed lies in host memory, and no longer beside the model."""
        cache.prefill(ONE, cache_salt="a")
        for seed in range(10, 14):
            cache.prefill(_text(seed, 2 * BLOCK + 1), cache_salt="b")

    def check_tiers(self, cache):
        tiers = cache._store.tiers
        if not tiers._disk.flush(60):
            raise Wedged("the disk does not end what it was given")
        tiers._host.poll()
        if any(tiers._host.leases.values()) or tiers._host._lower:
            raise Leak("rows of host memory are held")
        if any(file.rows.leases for file in tiers._disk._files.values()):
            raise Leak("rows of the disk are held")


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
            if self.cached.tiers:
                cache.close()  # its disk, for the next one
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
        for pin in cache.pins:  # of a call that nobody heard the end of
            cache.unpin(pin)
        cache.check_invariants()
        stats = cache.stats()
        if stats.used_blocks or stats.reserved_slots:
            raise Leak(f"{stats.used_blocks} blocks and {stats.reserved_slots} slots are held")
        if self.cached.tiers:
            self.cached.check_tiers(cache)
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
        "PrefixCache.pin and unpin": CacheCall(
            cached, lambda cache: cache.unpin(cache.pin(FOREIGN, cache_salt="b"))
        ),
        "PrefixCache.prefill": CacheCall(cached, lambda cache: cache.prefill(ONE, cache_salt="a")),
        "PrefixCache.reset": CacheCall(cached, lambda cache: cache.reset()),
        **tier_calls(TieredCached()),
    }


def tier_calls(cached):
    """Returns calls of a cache that has tiers."""
    mask = torch.ones_like(ONE)

    def prefill(salt):
        return lambda cache: cache.prefill(ONE, cache_salt=salt)

    return {
        "PrefixCache over tiers, from the disk": CacheCall(cached, prefill("a"), cached.go_down),
        "PrefixCache over tiers, from host memory": CacheCall(cached, prefill("a"), cached.go_out),
        "PrefixCache over tiers, to the tiers": CacheCall(cached, prefill("c"), _forget_disk),
        "PrefixCache over tiers, generate": CacheCall(
            cached,
            lambda cache: cache.generate(ONE, attention_mask=mask, cache_salt="a", **OPTIONS),
            cached.go_down,
        ),
        "PrefixCache over tiers, reset": CacheCall(
            cached, lambda cache: cache.reset(), cached.go_out
        ),
    }


def _forget_disk(cache):
    """Nothing lies on the disk, so that all is written anew."""
    disk = cache._store.tiers._disk
    disk.flush()
    with disk._lock:
        for file in disk._files.values():
            file.rows.reset()
