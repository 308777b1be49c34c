"""The tiers of a ``PrefixCache``: prefixes in host memory, on disk and in a store."""

from __future__ import annotations

import secrets
import sys
import time
import weakref
from dataclasses import replace
from typing import Any, Final

from mamba_cache._extras import installed_version
from mamba_cache._guard import weak_callback
from mamba_cache.cache import ExtraKey
from mamba_cache.cache.sequence import CachedSequence, Checkpoint, PrefixMatch
from mamba_cache.context.prefetch import Prefetch
from mamba_cache.context.requests import PlannedLoad
from mamba_cache.context.tier_memory import open_disk
from mamba_cache.context.tiering import Tiering
from mamba_cache.errors import BlockCapacityError, InvalidArgumentError
from mamba_cache.integrations.transformers.fingerprint import ModelFingerprint
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.integrations.transformers.store import PrefixStore
from mamba_cache.tiers import (
    CacheIdentity,
    ModelIdentity,
    Numerics,
    Refusal,
)
from mamba_cache.tiers.entry import EntryKind
from mamba_cache.tiers.lower import LowerTier

__all__ = ["PrefixTiers"]

_DEADLINE_SECONDS: Final = 10.0
"""Maximum time that a call waits for disk and store."""

_RETRY_SECONDS: Final = 60.0
"""Time after which disk and store are tried again although an earlier load has not finished."""

_END_SECONDS: Final = 5.0

_UNDAMAGED: Final = frozenset({Refusal.ABORTED, Refusal.TIMEOUT, Refusal.IO_ERROR})
"""Reasons for which a load failed although the entry may be undamaged."""

_KERNEL_PACKAGES: Final = (
    "transformers", "accelerate", "peft", "kernels", "mamba-ssm", "causal-conv1d", "flash-attn",
    "flash-linear-attention",
)  # fmt: skip


class PrefixTiers(Tiering):
    """The tiers below one prefix cache.

    Published blocks and states are copied to host memory at the end of their call, and from there
    to disk and store. If the tiers have a longer prefix of a prompt than the GPU, this prefix is
    loaded before the prompt is matched. Both copies block the thread, because a prefix cache serves
    one call at a time. A call waits for disk and store unless they are known to be slower than the
    model, and no longer than the model would take. Later arrivals stay in host memory.
    """

    def __init__(self, store: PrefixStore, runner: ModelRunner) -> None:
        self._store, self._runner = store, runner
        self._config = replace(store.config, host_state_share=0.5, write_on_use=1)
        self._keys: dict[ExtraKey, ExtraKey] = {}
        self._key: ExtraKey = None
        self._prefetch: Prefetch | None = None
        self._fetched_at = 0.0
        self._knows_weights = True
        fingerprint = runner.fingerprint
        weights = fingerprint.weights_digest()
        if weights is None:
            raise InvalidArgumentError(
                "host_cache_gb and disk_cache_path need weights_check='full' or 'sample': prefixes "
                "outlive the weights that they were computed with, and must not be used with others"
            )
        below = self._config.disk_cache_path, self._config.store
        self._is_shared = any(each is not None for each in below)
        if self._is_shared:
            fingerprint.check_files()
        tensors = store.tensors
        super().__init__(
            self._config,
            {EntryKind.STATE: [*tensors.states.tensors.values()], EntryKind.KV: tensors.blocks},
            store.layout.device,
            store.kv_blocks,
            store.slots,
            identity=self._identity_with(weights),
            is_waited_for=True,
        )
        self._remote = self.store
        for tier in reversed(self.lower_tiers):  # ends with the disk, if there is one
            self._closes = weakref.finalize(self, _end, tier)

    def _take_weights(self) -> None:
        """Read the digest of the present weights, and open the disk tier for it."""
        weights = self._runner.fingerprint.weights_digest()
        self._knows_weights = weights is not None
        identity = self._identity_with(weights or f"unknown {secrets.token_hex(16)}")
        self.identify(identity)
        self.store = self._remote if self._knows_weights else None
        if self._knows_weights and self._config.disk_cache_path is not None:
            self.disk = open_disk(self._config, identity, self.host)
            self._closes = weakref.finalize(self, _end, self.disk)

    def key_for(self, lora_id: ExtraKey) -> ExtraKey:
        """Return the key of the model's settings for block hashes.

        With disk or store it is the same in all processes, unlike ``lora_id``, the fingerprint's.
        """
        fingerprint: ModelFingerprint = self._runner.fingerprint
        if not self._knows_weights:  # the reset could not read them, as in training mode
            self._take_weights()
        if fingerprint.foreign is not None:  # no later call has this random key
            self._key = None
            return lora_id
        if lora_id not in self._keys:
            self._keys[lora_id] = fingerprint.portable_key() if self._is_shared else lora_id
        self._key = self._keys[lora_id]
        return lora_id if self._key is None else self._key

    @property
    def _takes_offers(self) -> bool:
        # Entries in other dtypes than the layout's would not be restored exactly elsewhere.
        is_alike = self._key not in self._store.live_dtypes
        return self._key is not None and is_alike

    def _tenant(self, _: ExtraKey) -> bytes:
        return super()._tenant(None)  # digests have the salt

    def spill(self) -> None:
        """Copy offered entries that are still cached to host memory, and offer them to the disk."""
        if self.num_offers:
            self.pump()
            self.transfers.wait()
            self.poll()

    def bring(self, sequence: CachedSequence, min_computed: int) -> None:
        """Load the prefix of a sequence from the tiers with which it is computed soonest.

        At least ``min_computed`` of its tokens are left to compute.
        """
        self.poll()
        if self._key is None:
            return
        usable = sequence.num_known - min_computed
        # A damaged entry is removed, so a second try may find another boundary.
        if self.lower_tiers and self._may_fetch() and self._fetch(sequence, usable):
            self._fetch(sequence, usable)
        while True:
            match, load = self.resume(sequence, self._matched(sequence, usable))
            if load is None or self._load(sequence, match, load):
                return
            usable = match.skip_tokens - 1

    def _may_fetch(self) -> bool:
        """Return whether disk and store may be asked: not while an earlier, slow load runs."""
        is_idle = self._prefetch is None or self._prefetch.is_over
        return is_idle or time.monotonic() - self._fetched_at >= _RETRY_SECONDS

    def _matched(self, sequence: CachedSequence, usable: int) -> PrefixMatch:
        """Match a sequence; at most ``usable`` of its tokens may be skipped."""
        min_computed = self._config.min_computed_tokens
        return self._store.index.match(sequence.chain.digests, usable + min_computed, min_computed)

    def _fetch(self, sequence: CachedSequence, usable: int) -> bool:
        """Load entries from disk and store to host memory; return whether one was damaged."""
        match = self.extend(self._matched(sequence, usable), sequence.hashes)
        self._fetched_at = time.monotonic()
        self._prefetch = self.prefetch(None, match, self._entries(sequence), _DEADLINE_SECONDS)
        self._prefetch.go_on = weak_callback(self.poll)
        self._prefetch.wait()
        self.poll()
        return self._prefetch.is_over and not _UNDAMAGED.issuperset(self._prefetch.refusals)

    def _load(self, sequence: CachedSequence, match: PrefixMatch, load: PlannedLoad) -> bool:
        """Load a match's entries to blocks and a slot; return whether they are findable there."""
        store, depth = self._store, match.state_matched_blocks
        kv_blocks, index = store.kv_blocks, store.index
        held, reserved = list(match.block_ids[:depth]), list[Checkpoint]()
        sequence.num_published = len(held)
        kv_blocks.retain_memory_blocks(held)
        try:
            try:
                blocks = kv_blocks.allocate_memory_blocks(depth - len(held))
            except BlockCapacityError:
                return False
            held += blocks
            [checkpoint] = index.reserve([(sequence, [match.skip_tokens], held[-1:])])
            if checkpoint is None:
                return False
            reserved.append(checkpoint)
            load.blocks, load.checkpoint = blocks if self._has_kv else [], checkpoint
            if not self.load([load]):
                return False
            self.end_loads([load])
            if load.is_damaged:
                return False
            reserved.clear()
            index.publish([(sequence, blocks, [checkpoint._replace(is_loaded=True)])])
            return (
                index.match(sequence.chain.digests, match.prompt_tokens, 0).skip_tokens
                >= match.skip_tokens
            )
        finally:
            self.cancel(load)
            kv_blocks.release_memory_blocks(held)
            index.cancel(reserved)

    def let_go(self) -> None:
        """Drop all offers, copies and prefetches of a call that raised."""
        self._prefetch = None
        super().let_go()

    def reset(self) -> None:
        """Empty host memory. Entries on disk stay and can be found again."""
        self._prefetch = None
        super().reset()
        self._keys.clear()

    def take_weights(self) -> None:
        """Take the present weights as the expected ones; entries of other weights are not found."""
        self.flush()
        if self.disk is not None:
            self.disk = None
            self._closes()  # closes the tier, and drops the finalizer's reference to it
        self.reset()
        self._take_weights()

    def close(self) -> None:
        """Finish waiting writes, and free all memory."""
        super().close()
        self.host.close()

    def _identity_with(self, weights: str) -> CacheIdentity:
        """Return the identity of this model's entries, the same in all processes."""
        layout = self._store.layout
        versions = {name: installed_version(name) for name in _KERNEL_PACKAGES}
        kernels = [f"{name} {version}" for name, version in versions.items() if version]
        kernels.append(f"python {sys.version_info.major}.{sys.version_info.minor}")
        model: Any = self._runner.model
        described = ModelIdentity(
            name=f"{type(model).__module__}.{type(model).__qualname__}",
            weights=weights,
            settings=layout.description,
            numerics=Numerics.of(layout.device, kernels=", ".join(kernels)),
        )
        return CacheIdentity.of(described, self._config, layout.state_spec, None)


def _end(tier: LowerTier) -> None:
    """Finish a tier's writes and close it; also called at the end of the process."""
    tier.flush(_END_SECONDS)
    tier.close()
