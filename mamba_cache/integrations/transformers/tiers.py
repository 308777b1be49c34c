"""Prefixes in host memory, on disk and in a store, below those beside the model."""

from __future__ import annotations

import os
import secrets
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from mamba_cache._checks import check_number
from mamba_cache._extras import installed_version
from mamba_cache.cache import BlockHashChain, BlockHashes, ExtraKey
from mamba_cache.config import CacheConfig
from mamba_cache.context.prefetch import LowerTierLink, Prefetch
from mamba_cache.errors import (
    BlockCapacityError,
    BudgetError,
    InvalidArgumentError,
    MambaCacheError,
)
from mamba_cache.integrations.transformers.fingerprint import ModelFingerprint
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.integrations.transformers.store import PrefixStore, SoughtPrompt
from mamba_cache.states import StateSpec, StateTensorSpec
from mamba_cache.stores import open_store
from mamba_cache.tiers import (
    CacheIdentity,
    LoadPlanner,
    ModelIdentity,
    Numerics,
    Rates,
    Refusal,
    TierStats,
)
from mamba_cache.tiers.cuda import CudaTransfers, pinner_for
from mamba_cache.tiers.disk import DiskTier
from mamba_cache.tiers.entry import EntryFacts, EntryKey, EntryKind
from mamba_cache.tiers.host import HostTier, RowFormat
from mamba_cache.tiers.identity import tenant_digest
from mamba_cache.tiers.remote import RemoteTier
from mamba_cache.tiers.rows import RowLease
from mamba_cache.tiers.transfers import CopyJob, Mark, PlainTransfers, RowLayout, Transfers

__all__ = ["PrefixTiers", "check_tiers"]

_GIB: Final = 2**30
_STATE_SHARE: Final = 0.5
_DEADLINE_SECONDS: Final = 10.0
"""How long a call waits for disk and store at most."""

_END_SECONDS: Final = 5.0

_UNMEASURED: Final = Rates(bytes_per_second=1e18, latency_seconds=0.0, tokens_per_second=1e-6)
"""Rates until the first measurement: every load is tried."""

_KERNEL_PACKAGES: Final = (
    "transformers", "accelerate", "peft", "kernels", "mamba-ssm", "causal-conv1d", "flash-attn",
    "flash-linear-attention",
)  # fmt: skip


def check_tiers(
    host_cache_gb: float | None,
    disk_cache_path: str | os.PathLike[str] | None,
    disk_cache_gb: float,
    store: Any,
    hash_secret: bytes | None,
) -> None:
    """Check the settings of tiers that do not depend on the model."""
    if host_cache_gb is not None:
        check_number("host_cache_gb", host_cache_gb, maximum=2**33)
    check_number("disk_cache_gb", disk_cache_gb, maximum=2**33)
    if disk_cache_path is not None and host_cache_gb is None:
        raise InvalidArgumentError("disk_cache_path needs host_cache_gb (GiB)")
    if store is not None and (host_cache_gb is None or hash_secret is None):
        raise InvalidArgumentError(
            "store needs host_cache_gb (GiB), through which prefixes come and go, and "
            "hash_secret, the same bytes in all processes that share it"
        )


class _Offer(NamedTuple):
    """What is findable, and is to be copied to the host tier."""

    facts: EntryFacts
    block: int
    place: int
    generation: int


class PrefixTiers:
    """The tiers below one prefix cache.

    What becomes findable is copied to host memory when its call is over, and from there to the
    disk and to the store. A prompt of which more lies below than beside the model has that
    brought before it is matched. Both wait for their copies: a prefix cache serves one call at a
    time. For the disk and the store a call waits only where they are not known to be slower than
    the model, and no longer than the model would take; what comes later stays in host memory.
    Settings are those of ``PrefixCache``.
    """

    def __init__(
        self,
        store: PrefixStore,
        runner: ModelRunner,
        *,
        host_cache_gb: float,
        disk_cache_path: str | os.PathLike[str] | None,
        disk_cache_gb: float,
        shared: Any = None,
    ) -> None:
        budget, self._disk_bytes = int(host_cache_gb * _GIB), int(disk_cache_gb * _GIB)
        self._path = None if disk_cache_path is None else Path(disk_cache_path).expanduser()
        self._store, self._runner = store, runner
        layout, on_gpu = store.layout, store.layout.device.type == "cuda"
        tensors = store.tensors
        self._layouts = {
            EntryKind.STATE: RowLayout([tensors.slots[None]], sums_chunks=on_gpu),
            EntryKind.KV: RowLayout(tensors.blocks, sums_chunks=on_gpu),
        }
        self._has_kv = bool(tensors.blocks)
        shares = {EntryKind.STATE: _STATE_SHARE if self._has_kv else 1.0}
        shares[EntryKind.KV] = 1 - shares[EntryKind.STATE]
        formats = {
            kind: _format(each, int(budget * shares[kind]), kind)
            for kind, each in self._layouts.items()
        }
        self._host = HostTier(
            formats[EntryKind.KV],
            formats[EntryKind.STATE],
            pinner=pinner_for(layout.device) if on_gpu else None,
        )
        self._copies = self._make_copies()
        self.hash_secret = store.hash_secret
        self._offers: list[_Offer] = []
        self._keys: dict[ExtraKey, ExtraKey] = {}
        self._key: ExtraKey = None
        self._planner = LoadPlanner(_UNMEASURED)
        self._timed: list[tuple[Mark, Mark, int]] = []
        self._prefetch: Prefetch | None = None
        self._disk: DiskTier | None = None
        self._remote: RemoteTier | None = None
        if runner.fingerprint.weights_digest() is None:
            raise InvalidArgumentError(
                "host_cache_gb and disk_cache_path need weights_check='full' or 'sample': prefixes "
                "outlive the weights that they were computed with, and must not be used with others"
            )
        if shared is not None or self._path is not None:
            runner.fingerprint.check_files()
        if shared is not None:
            self._remote = RemoteTier(
                open_store(shared) if isinstance(shared, str) else shared,
                secret=self.hash_secret,
                write_on_use=1,
                owns_store=isinstance(shared, str),
            )
            weakref.finalize(self, _end, self._remote)
        self._begin()

    def _make_copies(self) -> Transfers:
        device = self._store.layout.device
        if device.type == "cuda":  # pragma: no cover - tests/gpu run it
            return CudaTransfers(self._layouts, self._host.memory, device)
        return PlainTransfers(self._layouts, self._host.memory)

    def _begin(self) -> None:
        """Take the weights as they are now, and open the disk tier for them."""
        weights = self._runner.fingerprint.weights_digest()
        self._knows_weights = weights is not None
        name = weights or f"unknown {secrets.token_hex(16)}"
        self._identity = _identity(self._store, self._runner, name)
        self._disk = None
        if self._path is not None and weights is not None:
            self._disk = DiskTier(
                self._path,
                self._identity,
                self._disk_bytes,
                secret=self.hash_secret,
                state_bytes=self._layouts[EntryKind.STATE].row_bytes,
                kv_bytes=self._layouts[EntryKind.KV].row_bytes if self._has_kv else 0,
                write_on_use=1,
            )
            self._closes = weakref.finalize(self, _end, self._disk)
        self._link = LowerTierLink(
            self._host,
            self._disk,
            block_size_tokens=self._store.layout.block_size_tokens,
            min_computed_tokens=0,
            has_kv=self._has_kv,
            host_planner=self._planner,
            store=self._remote if self._knows_weights else None,
            planner=LoadPlanner(_UNMEASURED),
            store_planner=LoadPlanner(_UNMEASURED),
            is_waited_for=True,
        )

    def key_for(self, lora_id: ExtraKey) -> ExtraKey:
        """Return what stands in block hashes for the model's settings, in all processes.

        In this one ``lora_id`` stands for them, the fingerprint's key.
        """
        fingerprint: ModelFingerprint = self._runner.fingerprint
        if not self._knows_weights:  # they could not be read at the reset: in training mode
            self._begin()
        if fingerprint.foreign is not None:  # nothing is found again under this key
            self._key = None
            return lora_id
        if lora_id not in self._keys:
            is_shared = self._path is not None or self._remote is not None
            self._keys[lora_id] = fingerprint.portable_key() if is_shared else lora_id
        self._key = self._keys[lora_id]
        return lora_id if self._key is None else self._key

    def offer(self, kind: EntryKind, chain: BlockHashChain, index: int, block: int) -> None:
        """Have a block, or the state at its end, copied to the host tier when the call is over.

        It is the sequence's block ``index``.
        """
        if self._key is None or self._host.has(kind, chain.hashes.digest(index)):
            return
        facts = self._facts(chain.hashes, kind, index)
        slots = self._store.slots
        if kind is EntryKind.STATE:
            place = slots.get_slot(block)
            self._offers.append(_Offer(facts, block, place, slots.generations.item(place)))
        elif self._has_kv:
            self._offers.append(_Offer(facts, block, block, 0))

    @property
    def num_offers(self) -> int:
        """What was offered and is not copied yet, some of it perhaps more than once."""
        return len(self._offers)

    def spill(self) -> None:
        """Copy what was offered, as far as it is still there, and offer it to the disk."""
        offers, self._offers = self._offers, []
        self._host.poll()
        leases = [
            (offer, lease)
            for offer in offers
            if self._is_there(offer) and (lease := self._host.reserve(offer.facts)) is not None
        ]
        if not leases:
            return
        jobs = [CopyJob(each.facts.key.kind, each.place, row.row) for each, row in leases]
        self._copies.spill(jobs).wait()
        for offer, lease in leases:
            self._host.complete(lease)
            self._link.offer(offer.facts)

    @contextmanager
    def timed(self, num_tokens: int) -> Iterator[None]:
        """Measure what the forward inside takes, over ``num_tokens`` tokens of a prompt."""
        begun = self._copies.mark()
        yield
        self._timed.append((begun, self._copies.mark(), num_tokens))

    def _read_times(self) -> None:
        """Take over the forwards that have ended."""
        while self._timed:
            begun, ended, num_tokens = self._timed[0]
            seconds = self._copies.seconds_between(begun, ended)
            if seconds is None:
                return
            self._planner.record_prefill(num_tokens, seconds)
            del self._timed[0]

    def bring(self, prompt: SoughtPrompt) -> None:
        """Bring the longest prefix of a prompt below, if it is longer than the one here."""
        self._host.poll()
        self._link.poll()
        self._read_times()
        if self._key is None:
            return
        # While an earlier load is under way, disk and store are taken to be too slow.
        if self._below and (self._prefetch is None or self._prefetch.is_over):
            self._fetch(prompt)
        for depth in self._depths_in_host(prompt):
            match = self._store.match(prompt)
            if depth <= match.state_matched_blocks:
                return
            if self._bring_up_to(prompt, depth, list(match.block_ids)):
                return

    def _fetch(self, prompt: SoughtPrompt) -> None:
        """Bring what disk and store have of a prompt to host memory, and wait for it."""
        match, hashes = self._store.match(prompt), prompt.chain.hashes
        depth = max(self._depths_in_host(prompt), default=match.state_matched_blocks)
        match = replace(
            match,
            prompt_tokens=match.prompt_tokens - prompt.min_computed,
            skip_tokens=depth * self._store.layout.block_size_tokens,
        )
        self._prefetch = self._link.prefetch(
            None,
            match,
            hashes,
            partial(self._facts, hashes),
            _DEADLINE_SECONDS,
            key_of=lambda kind, index: self._key_of(kind, hashes.digest(index)),
        )
        self._prefetch.go_on = self._link.poll
        self._prefetch.wait()
        self._host.poll()
        self._link.poll()

    def _depths_in_host(self, prompt: SoughtPrompt) -> list[int]:
        """Return after how many blocks states of a prompt lie in host memory, the most first.

        Only those count whose keys and values are there or beside the model.
        """
        found, hashes = self._store.match(prompt), prompt.chain.hashes
        size = self._store.layout.block_size_tokens
        usable = max(0, len(prompt.tokens) - prompt.min_computed) // size
        reach = min(found.kv_matched_blocks, usable) if self._has_kv else usable
        while reach < usable and self._host.has(EntryKind.KV, hashes.digest(reach)):
            reach += 1
        return [
            depth
            for depth in range(reach, found.state_matched_blocks, -1)
            if self._host.has(EntryKind.STATE, hashes.digest(depth - 1))
        ]

    def _bring_up_to(self, prompt: SoughtPrompt, depth: int, matched: list[int]) -> bool:
        """Bring the state after ``depth`` blocks, and these; say whether they are there now."""
        held, hashes = matched[:depth], prompt.chain.hashes
        missing = range(len(held), depth)
        wanted = [self._facts(hashes, EntryKind.STATE, depth - 1)]
        if self._has_kv:  # after the state, which takes longest
            wanted += [self._facts(hashes, EntryKind.KV, index) for index in missing]
        kv_blocks = self._store.kv_blocks
        kv_blocks.retain_memory_blocks(held)
        try:
            try:
                blocks = kv_blocks.allocate_memory_blocks(len(missing))
            except BlockCapacityError:
                return False
            held += blocks
            return self._load(prompt, depth, wanted, blocks, held[-1])
        finally:
            kv_blocks.release_memory_blocks(held)

    def _load(
        self,
        prompt: SoughtPrompt,
        depth: int,
        wanted: Sequence[EntryFacts],
        blocks: list[int],
        last_block: int,
    ) -> bool:
        """Copy entries of the host tier to blocks and a slot, and make them findable if whole."""
        store, host = self._store, self._host
        leases: list[RowLease] = []
        if store.slots.has_state(last_block):
            return False
        [slot] = store.slots.reserve_slots([last_block])
        if slot is None:
            return False
        is_committed = False
        try:
            for facts in wanted:
                lease = host.read(facts)
                if isinstance(lease, Refusal):
                    return False
                leases.append(lease)
            places = [slot, *(blocks if self._has_kv else ())]
            jobs = [
                CopyJob(lease.facts.key.kind, place, lease.row)
                for lease, place in zip(leases, places, strict=True)
            ]
            ticket = self._copies.load(jobs)
            ticket.wait()
            damaged = set(ticket.damaged())
            if damaged:
                for index in sorted(damaged, reverse=True):
                    lease = leases.pop(index)
                    host.refuse(lease, Refusal.PAYLOAD_DIGEST)
                    self._link.remove(lease.facts.key)  # it may have been stored like this
                return False
            host.use(leases)
            host.count_restored(len(leases))
            is_committed = self._publish(prompt, depth, blocks, slot)
            return is_committed
        finally:
            for lease in leases:
                host.release(lease)
            if not is_committed:
                store.slots.cancel_reserved([slot])

    def _publish(self, prompt: SoughtPrompt, depth: int, blocks: list[int], slot: int) -> bool:
        """Make loaded blocks and their state findable; say whether they are."""
        store, size = self._store, self._store.layout.block_size_tokens
        hashes, first = prompt.chain.hashes, depth - len(blocks)
        if blocks:
            holders = store.kv_blocks.register_kv_block_hashes(
                blocks,
                hashes[first:depth],
                parent_hash=hashes[first - 1] if first else None,
                tokens=prompt.tokens[first * size : depth * size] if prompt.is_told else None,
            )
            if None in holders:
                return False
        block = store.kv_blocks.find_block(hashes[depth - 1], hashes.digest(depth - 1))
        if block is None:
            return False
        store.slots.commit_reserved(
            [slot], [block], [hashes[depth - 1]], saved_tokens=[depth * size]
        )
        return True

    def remove(self, kind: EntryKind, digest: bytes) -> None:
        """Have an entry that is known to be wrong not found again."""
        self._link.remove(self._key_of(kind, digest))
        self._host.remove(kind, digest)

    def stats(self) -> tuple[TierStats, ...]:
        """Return what each tier holds and did, from the top down."""
        return (self._host.stats(), *(tier.stats() for tier in self._below))

    @property
    def _below(self) -> list[DiskTier | RemoteTier]:
        return [tier for tier in (self._disk, self._remote) if tier is not None]

    def let_go(self) -> None:
        """Give back all that a call held which broke off.

        The host tier begins anew if the call was reading or writing rows of it.
        """
        self._end_transfers()
        try:
            self._host.poll()
            is_idle = not any(self._host.leases.values())
        except MambaCacheError:  # a change of its bookkeeping broke off
            is_idle = False
        if not is_idle:
            self._host.reset()

    def _end_transfers(self) -> None:
        self._offers, self._timed, self._prefetch = [], [], None
        self._copies.wait()
        self._link.reset()

    def reset(self) -> None:
        """Forget what host memory holds. What is on the disk stays, and is found again."""
        self._end_transfers()
        self._host.reset()
        self._keys.clear()

    def take_weights(self) -> None:
        """Take the weights as they are from now on: of others nothing below is found."""
        for tier in self._below:
            tier.flush()
        if self._disk is not None:
            self._closes()  # and forgets it, which would live as long as this otherwise
        self.reset()
        self._begin()

    def close(self) -> None:
        """Write what is still to be written, and give everything back."""
        for tier in self._below:
            tier.flush()
            self._host.poll()
            tier.close()
        self._host.close()

    def check_invariants(self) -> None:
        """Check the books, between calls."""
        for tier in (self._host, *self._below):
            tier.check_invariants()

    def _key_of(self, kind: EntryKind, digest: bytes) -> EntryKey:
        """Name the entry of a block, or of the state at its end."""
        identity, tenant = self._identity, tenant_digest(self.hash_secret, None)
        return EntryKey(identity.digest, tenant, kind, digest, identity.rank)  # it has the salt

    def _facts(self, hashes: BlockHashes, kind: EntryKind, index: int) -> EntryFacts:
        """Derive what the entry of block ``index`` must be."""
        return EntryFacts(
            self._key_of(kind, hashes.digest(index)),
            (index + 1) * self._store.layout.block_size_tokens,
            self._layouts[kind].row_bytes,
        )

    def _is_there(self, offer: _Offer) -> bool:
        slots = self._store.slots
        if offer.facts.key.kind is EntryKind.STATE:
            is_same = slots.get_slot(offer.block) == offer.place
            return is_same and slots.generations.item(offer.place) == offer.generation
        found = BlockHashes([offer.facts.key.digest])
        return self._store.kv_blocks.find_block(found[0], found.digest(0)) == offer.block


def _end(tier: DiskTier | RemoteTier) -> None:
    """Close a tier, also as the process ends, once it has written what it was given."""
    tier.flush(_END_SECONDS)
    tier.close()


def _format(layout: RowLayout, budget: int, kind: EntryKind) -> RowFormat:
    """Return rows within a budget."""
    num_rows = budget // layout.row_bytes if layout.tensors else 0
    if layout.tensors and not num_rows:
        raise BudgetError(
            f"host_cache_gb is too small: it holds no {kind.name.lower()} of {layout.row_bytes} "
            "bytes"
        )
    return RowFormat(layout.row_bytes, layout.checksums, num_rows)


def _identity(store: PrefixStore, runner: ModelRunner, weights: str) -> CacheIdentity:
    """Return what entries of this model have in common in all processes."""
    layout = store.layout
    versions = {name: installed_version(name) for name in _KERNEL_PACKAGES}
    kernels = [f"{name} {version}" for name, version in versions.items() if version]
    kernels.append(f"python {sys.version_info.major}.{sys.version_info.minor}")
    model: Any = runner.model
    described = ModelIdentity(
        name=f"{type(model).__module__}.{type(model).__qualname__}",
        weights=weights,
        settings=layout.description,
        numerics=Numerics.of(layout.device, kernels=", ".join(kernels)),
    )
    config = CacheConfig(
        num_kv_blocks=1,
        max_slots=1,
        block_size_tokens=layout.block_size_tokens,
        ssm_chunk_size=1,
        hash_algorithm=store.hasher.algorithm,
        hash_secret=store.hash_secret,
    )
    slot = StateTensorSpec("slot", 1, (layout.bytes_per_slot,), torch.uint8)
    return CacheIdentity.of(described, config, StateSpec((slot,)), None)
