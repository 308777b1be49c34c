"""Builds the tiers below the GPU: host rows within the budget, copies, a disk and a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import torch

from mamba_cache._checks import check_kind, check_room
from mamba_cache.cache import AdaptiveSlotPolicy
from mamba_cache.config import CacheConfig
from mamba_cache.errors import BudgetError, InvalidArgumentError
from mamba_cache.protocols import RankAgreement
from mamba_cache.states import KVCacheSpec, StateSpec
from mamba_cache.stores import open_store
from mamba_cache.tiers import CacheIdentity, ModelIdentity, Numerics
from mamba_cache.tiers.cuda import CudaTicket, CudaTransfers, pinner_for
from mamba_cache.tiers.directory import cache_secret
from mamba_cache.tiers.disk import DiskStore
from mamba_cache.tiers.entry import EntryKind, EntryMacs
from mamba_cache.tiers.host import HostTier
from mamba_cache.tiers.lower import LowerTier
from mamba_cache.tiers.memory import RowMemory
from mamba_cache.tiers.transfers import PlainTicket, PlainTransfers, RowLayout

__all__ = [
    "Ticket",
    "Transfers",
    "identity_of",
    "make_host_tier",
    "open_disk",
    "open_lower_tiers",
    "with_secret",
]

_MAX_QUEUED_ON_DISK: Final = 256

Ticket: TypeAlias = PlainTicket | CudaTicket
"""A handle of enqueued copies."""

Transfers: TypeAlias = PlainTransfers | CudaTransfers
"""Copies entries between the GPU's memory and rows of host memory."""


def with_secret(
    config: CacheConfig, identity: ModelIdentity | None, agreement: RankAgreement | None
) -> CacheConfig:
    """Return settings with a hash secret: their own, or the one that their disk cache keeps."""
    if config.hash_secret is not None or config.disk_cache_path is None or identity is None:
        return config
    if agreement is not None:
        raise InvalidArgumentError(
            "hash_secret must be given to ranks with a disk cache: each would draw its own"
        )
    return replace(config, hash_secret=cache_secret(config.disk_cache_path))


def identity_of(
    given: ModelIdentity | None,
    config: CacheConfig,
    state_spec: StateSpec,
    kv_spec: KVCacheSpec | None,
    device: torch.device,
) -> CacheIdentity | None:
    """Return the identity of a context's entries."""
    if given is None:
        return None
    check_kind("identity", given, ModelIdentity)
    if device.type != "cpu" and given.numerics == Numerics.of("cpu"):
        given = replace(given, numerics=Numerics.of(device))
    return CacheIdentity.of(given, config, state_spec, kv_spec)


def make_host_tier(
    config: CacheConfig,
    tensors: Mapping[EntryKind, Sequence[torch.Tensor]],
    device: torch.device,
    policy: AdaptiveSlotPolicy | None,
) -> tuple[HostTier, Transfers]:
    """Create the host tier of slots and KV blocks, and the copies between GPU and host.

    Each of ``tensors`` is [num_layers, places, *inner].
    """
    on_gpu = device.type == "cuda"
    layouts = {kind: RowLayout(each, sums_chunks=on_gpu) for kind, each in tensors.items()}
    host = HostTier(
        *_row_memory(config, layouts),
        state_policy=policy,
        pinner=pinner_for(device) if on_gpu else None,
    )
    if on_gpu:  # pragma: no cover - tests/gpu run it
        return host, CudaTransfers(layouts, host.memory, device)
    return host, PlainTransfers(layouts, host.memory)


def open_lower_tiers(
    config: CacheConfig, identity: CacheIdentity | None, host: HostTier
) -> tuple[LowerTier | None, LowerTier | None]:
    """Open the tiers below host memory that the settings ask for."""
    for name in ("disk_cache_path", "store"):
        if identity is None and getattr(config, name) is not None:
            raise InvalidArgumentError(
                f"{name} needs identity (tiers.ModelIdentity): other processes use its entries, "
                "and only the identity names their model and weights"
            )
    if identity is None:
        return None, None
    assert config.hash_secret is not None, "an identity needs it"
    store, remote = config.store, None
    if store is not None:
        remote = LowerTier(
            open_store(store) if isinstance(store, str) else store,
            macs=EntryMacs(config.hash_secret),
            write_on_use=config.write_on_use,
            owns_store=isinstance(store, str),
        )
    try:
        disk = None if config.disk_cache_path is None else open_disk(config, identity, host)
    except BaseException:
        if remote is not None:
            remote.close()
        raise
    return disk, remote


def open_disk(config: CacheConfig, identity: CacheIdentity, host: HostTier) -> LowerTier:
    """Open the disk tier that the settings ask for."""
    assert config.disk_cache_path is not None, "the caller has checked"
    assert config.disk_cache_gb is not None, "the settings have both or none"
    sizes = {kind: rows.row_bytes if rows.num_rows else 0 for kind, rows in host.memory.items()}
    assert config.hash_secret is not None, "an identity needs it"
    macs = EntryMacs(config.hash_secret)  # first: a missing extra raises before a folder is made
    store = DiskStore(
        config.disk_cache_path,
        identity,
        int(config.disk_cache_gb * 2**30),
        state_bytes=sizes[EntryKind.STATE],
        kv_bytes=sizes[EntryKind.KV],
    )
    return LowerTier(
        store,
        macs=macs,
        write_on_use=config.write_on_use,
        max_queued=_MAX_QUEUED_ON_DISK,
        owns_store=True,
    )


def _row_memory(
    config: CacheConfig, layouts: Mapping[EntryKind, RowLayout]
) -> tuple[RowMemory, RowMemory]:
    """Divide the budget into rows of KV blocks and of states."""
    kv, states = layouts[EntryKind.KV], layouts[EntryKind.STATE]
    state_share = config.host_state_share if kv.payload_bytes else 1.0
    kv_rows = _num_rows(config, config.num_host_blocks, 1 - state_share, kv, "KV block")
    state_rows = _num_rows(config, config.num_host_states, state_share, states, "state")
    given = ("host_cache_gb", "num_host_blocks", "num_host_states")
    num_bytes = kv_rows * kv.row_bytes + state_rows * states.row_bytes
    check_room(num_bytes, {name: getattr(config, name) for name in given})
    return (
        RowMemory(kv.row_bytes, kv.checksums, kv_rows),
        RowMemory(states.row_bytes, states.checksums, state_rows),
    )


def _num_rows(
    config: CacheConfig, count: int | None, share: float, layout: RowLayout, name: str
) -> int:
    if not layout.payload_bytes:
        return 0
    if count is not None:
        return count
    assert config.host_cache_gb is not None, "the settings ask for a number or a budget"
    budget = int(config.host_cache_gb * share * 2**30)
    if share and budget < layout.row_bytes:
        raise BudgetError(
            f"host_cache_gb={config.host_cache_gb} GiB is too small: it holds no {name} of "
            f"{layout.row_bytes} bytes in its share of {share:.0%}"
        )
    return budget // layout.row_bytes
