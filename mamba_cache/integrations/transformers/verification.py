"""Hits of a prefix cache that are verified, and the log of its prompts."""

from __future__ import annotations

import logging
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, cast
from weakref import proxy

import torch

from mamba_cache.context import HitToVerify, Request, SkippedVerification
from mamba_cache.context.requests import ActiveRequest, Admission
from mamba_cache.context.verification import HitSampler, log_difference
from mamba_cache.errors import MambaCacheError
from mamba_cache.integrations.transformers.layers import LayerParts, SequenceMemory
from mamba_cache.integrations.transformers.prefill import Prefiller
from mamba_cache.integrations.transformers.store import PrefixStore, SequenceRecord
from mamba_cache.states import PrefixContent, PrefixDifference, compare_prefixes
from mamba_cache.tiers import EntryKind

if TYPE_CHECKING:  # it starts this
    from mamba_cache.integrations.transformers.prefix_cache import PrefixCache

__all__ = ["IdleVerifier", "PromptWatch", "verify_prefixes"]

_log = logging.getLogger(__name__)


class PromptWatch:
    """What is done about the prompts of a store beside counting them.

    Attributes:
        sampler: Chooses hits.
    """

    def __init__(self, store: PrefixStore, *, verify_hits: float) -> None:
        self.sampler = HitSampler(verify_hits)
        self._size = store.layout.block_size_tokens
        self._num_prompts = 0
        self._store = proxy(store)

    def counted(self, record: SequenceRecord, start: int) -> None:
        """Hear of a prompt that is counted, of which ``start`` tokens are restored."""
        name = f"generate-{self._num_prompts}"
        self._num_prompts += 1
        tokens, chain, (salt, lora_id) = record.prompt
        request = Request(
            request_id=name,
            prompt_tokens=tokens,
            cache_salt=cast("str | None", salt),
            lora_id=cast("str | None", self._store.key_for(lora_id)),
        )
        if start and self.sampler.chooses():
            hashes = chain.hashes[: start // self._size]
            self.sampler.add(HitToVerify(request, tokens[:start].copy(), hashes))

    def admitted(self, active: ActiveRequest, admission: Admission) -> None:
        """Hear of a request of a batch that begins to run."""
        self.sampler.admitted(active, admission)

    def reset(self) -> None:
        """Forget all prompts and counts."""
        self.sampler.reset()


def verify_prefixes(store: PrefixStore, prefiller: Prefiller, key: str, count: int | None) -> int:
    """Compute prefixes again that prompts went on from, compare them, remove what differs.

    ``key`` stands for the model's settings now. At most ``count`` are verified, None: all that
    wait; it is returned how many were.
    """
    sampler = None if store.watch is None else store.watch.sampler
    done = 0
    while sampler is not None and done != count and (hit := sampler.take()) is not None:
        done += 1
        if hit.request.lora_id != store.key_for(key):
            sampler.skip(SkippedVerification.SETTINGS)
        elif (found := hit.find(store.kv_blocks, store.slots)) is None:
            sampler.skip(SkippedVerification.GONE)
        else:
            try:
                differences = _compare(store, prefiller, hit, *found)
            except torch.OutOfMemoryError:
                sampler.skip(SkippedVerification.FAILED)
            else:
                sampler.count([_remove(store, hit, found[0], each) for each in differences])
    return done


def _compare(
    store: PrefixStore, prefiller: Prefiller, hit: HitToVerify, blocks: list[int], slot: int
) -> list[PrefixDifference]:
    """Compute a prefix that a prompt went on from, and compare it."""
    saved = store.tensors.load(slot, blocks, len(hit.tokens))
    layers = store.layout.layers

    def compute(*, in_pieces: bool = False) -> PrefixContent:
        computed = prefiller.recompute(hit.tokens, in_pieces=in_pieces)
        return _content(computed, layers)

    return compare_prefixes(
        _content(saved, layers),
        compute(),
        partial(compute, in_pieces=True),
        block_size_tokens=store.layout.block_size_tokens,
    )


def _content(memory: SequenceMemory, layers: tuple[LayerParts, ...]) -> PrefixContent:
    """Return what a slot and blocks hold of one row, by what it is."""
    states: dict[str, list[torch.Tensor]] = {"conv": [], "recurrent": []}
    own = iter(memory.states)
    for parts in layers:
        states["conv"] += [next(own)[0] for _ in parts.convs]
        states["recurrent"] += [next(own)[0] for _ in parts.recurrents]
    states["window"] = [window[0] for window in memory.windows]
    held = {name: tensors for name, tensors in states.items() if tensors}
    return PrefixContent(held, [tokens[0].transpose(0, 1) for tokens in memory.tokens])


def _remove(
    store: PrefixStore, hit: HitToVerify, blocks: list[int], difference: PrefixDifference
) -> str:
    """Make an entry unfindable, here and below; return its kind."""
    is_state = difference.block is None
    index = len(blocks) - 1 if difference.block is None else difference.block
    digest = hit.digest(index)
    kind = log_difference(hit.request_id, digest, difference)
    store.remove(blocks[index], digest, EntryKind.STATE if is_state else EntryKind.KV)
    return kind


class IdleVerifier:
    """Verifies the hits of a cache in a thread of its own, one at a time, when nobody uses it.

    A call of the cache that comes meanwhile waits until the prefix is computed. The thread ends
    with ``stop``, and when the cache is collected.

    Args:
        cache: The cache; only a weak reference is kept.
        idle_seconds: How long nobody must have used it.
    """

    def __init__(self, cache: PrefixCache, *, idle_seconds: float = 1.0) -> None:
        self._cache = weakref.ref(cache)
        self._idle_seconds = idle_seconds
        self._stopped = threading.Event()
        self._last: object = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, when it has verified what it is at."""
        self._stopped.set()

    def look(self) -> int:
        """Verify one hit if nobody has used the cache since the last look; say how many."""
        cache = self._cache()
        if cache is None:
            self.stop()
            return 0
        stats = cache.stats()
        seen, last = (stats.requests, stats.computed_tokens), self._last
        self._last = seen
        if seen != last or cache.is_busy or not cache.verification_stats().waiting:
            return 0
        try:
            return cache.verify_pending(1)
        except MambaCacheError as error:  # the next call of the cache says it to who can help it
            _log.warning("hits cannot be verified: %s", error)
            return 0

    def _work(self) -> None:
        while not self._stopped.wait(self._idle_seconds):
            self.look()
