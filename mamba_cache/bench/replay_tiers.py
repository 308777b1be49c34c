"""Tiers of a replay, and what its requests would have cost: the real tiers, with the smallest rows.

What is kept, refused, spilled, loaded and brought back is decided by the package's own host and
disk tier. Only sizes are others: a row holds a few bytes, and a planner counts it as a model's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from mamba_cache._checks import check_int, check_number
from mamba_cache.bench.no_model import NoModel
from mamba_cache.config import CacheConfig
from mamba_cache.context import CacheStats
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.model_shapes import ModelShape
from mamba_cache.reference import Engine
from mamba_cache.slots import CheckpointPlacement, SlotEvictionPolicy
from mamba_cache.tiers import EntryKind, LoadPlanner, ModelIdentity, Rates
from mamba_cache.tiers.memory import ROW_ALIGNMENT
from mamba_cache.tiers.slab import row_bytes_of

__all__ = ["CostMeter", "Costs", "TierSizes", "aligned_row_bytes", "engine_with_tiers"]

_GIB = 2**30
_DISK_LATENCY = 1e-3
_IN_MEMORY = Path("/dev/shm")
_SECRET = b"of a replay"
_NO_LIMIT_SECONDS = 1e9
_CHECKSUM_BYTES = 64
"""Room for those behind a row's bytes, and for what aligns them."""


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Entries that tiers have room for.

    Attributes:
        host_states: States in host memory.
        host_blocks: KV blocks there.
        disk_states: States on the disk below; 0: there is no disk.
        disk_blocks: KV blocks there.

    Raises:
        InvalidArgumentError: A number is out of range.
    """

    host_states: int
    host_blocks: int = 0
    disk_states: int = 0
    disk_blocks: int = 0

    def __post_init__(self) -> None:
        check_int("host_slots", self.host_states, minimum=1)
        check_int("disk_slots", self.disk_states, minimum=0)


@dataclass(frozen=True, slots=True)
class Costs:
    """What computing and loading take, of one model on one machine.

    Attributes:
        state_bytes: Bytes of a state.
        block_bytes: Bytes of a KV block.
        flops_per_token: Of the products with weights, two for each; None if that is not known.
        prefill_rate: Prompt tokens computed in a second.
        host_rate: GB/s of loads from host memory.
        disk_rate: GB/s of reads from the disk.

    Raises:
        InvalidArgumentError: A rate is not a number above 0.
    """

    state_bytes: int
    block_bytes: int
    flops_per_token: int | None
    prefill_rate: float = Rates().tokens_per_second
    host_rate: float = Rates().bytes_per_second / 1e9
    disk_rate: float = 2.0

    def __post_init__(self) -> None:
        for name in ("prefill_rate", "host_rate", "disk_rate"):
            if not check_number(name, getattr(self, name), maximum=1e12):
                raise InvalidArgumentError(f"{name} must be above 0, got 0")

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        block_size: int,
        *,
        prefill_rate: float | None = None,
        host_rate: float | None = None,
        disk_rate: float | None = None,
    ) -> Costs:
        """Return those of a model; a rate of None is the one that planners assume.

        Raises:
            InvalidArgumentError: A rate is not a number above 0.
        """
        given = {"prefill_rate": prefill_rate, "host_rate": host_rate, "disk_rate": disk_rate}
        return cls(
            shape.state_spec.bytes_per_slot,
            shape.kv_spec.bytes_per_block(block_size),
            shape.weight_bytes,  # two bytes a parameter, two operations with each
            **{name: rate for name, rate in given.items() if rate is not None},
        )

    @property
    def host_rates(self) -> Rates:
        """Those of the host tier, as planners take them."""
        return Rates(self.host_rate * 1e9, Rates().latency_seconds, self.prefill_rate)

    @property
    def disk_rates(self) -> Rates:
        """Those of the disk, likewise."""
        return Rates(self.disk_rate * 1e9, _DISK_LATENCY, self.prefill_rate)


class _SizedPlanner(LoadPlanner):
    """Counts rows as what they stand for."""

    def __init__(
        self, rates: Rates, costs: Costs, *, block_row_bytes: int, state_row_bytes: int
    ) -> None:
        super().__init__(rates, learns=False)
        self._costs = costs
        self._rows = block_row_bytes, state_row_bytes

    def load_seconds(self, num_bytes: int) -> float:
        """Return how long it takes to load what so many bytes of rows stand for."""
        of_block, of_state = self._rows
        if num_bytes:  # that of the state, and some blocks
            blocks = (num_bytes - of_state) // of_block if of_block else 0
            num_bytes = self._costs.state_bytes + max(0, blocks) * self._costs.block_bytes
        return super().load_seconds(num_bytes)


@contextmanager
def engine_with_tiers(
    config: CacheConfig,
    sizes: TierSizes | None,
    costs: Costs,
    *,
    keeps_kv: bool,
    policy: SlotEvictionPolicy,
    placement: CheckpointPlacement,
) -> Iterator[Engine]:
    """Make an engine around ``NoModel`` with the tiers, and end them.

    Yields:
        The engine.

    Raises:
        OSError: There is no room for the disk tier's files.
    """
    if sizes is None:
        yield Engine(NoModel(), config, slot_policy=policy, placement=placement)
        return
    keeps_kv = keeps_kv and bool(sizes.host_blocks)
    config = replace(
        config,
        num_host_states=sizes.host_states,
        num_host_blocks=sizes.host_blocks if keeps_kv else 0,
        # A long chunk ends with all its blocks at once.
        max_tier_copies=max(config.max_tier_copies, config.max_blocks_per_request + 8),
        hash_secret=_SECRET,
    )
    rows = {
        "block_row_bytes": _block_row_bytes(config) if keeps_kv else 0,
        "state_row_bytes": ROW_ALIGNMENT,
    }
    with TemporaryDirectory(dir=_folder(sizes)) as folder:
        if sizes.disk_states:
            config = _with_disk(config, sizes, folder, keeps_kv=keeps_kv)
        engine = Engine(
            NoModel(keeps_kv=keeps_kv),
            config,
            slot_policy=policy,
            placement=placement,
            load_planner=_SizedPlanner(costs.host_rates, costs, **rows),
            disk_planner=_SizedPlanner(costs.disk_rates, costs, **rows),
            identity=ModelIdentity(name="none", weights="none"),
            prefetch_seconds=_NO_LIMIT_SECONDS,
        )
        try:
            yield engine
        finally:
            engine.context.close()


def _with_disk(
    config: CacheConfig, sizes: TierSizes, folder: str, *, keeps_kv: bool
) -> CacheConfig:
    """Return settings with a disk that holds so many entries: a header and a page each."""
    state_row = row_bytes_of(ROW_ALIGNMENT)
    states = sizes.disk_states * state_row + state_row // 2  # half a row more: shares are rounded
    blocks = 0
    if keeps_kv:
        block_row = row_bytes_of(_block_row_bytes(config))
        blocks = sizes.disk_blocks * block_row + block_row // 2
    return replace(
        config,
        disk_cache_path=folder,
        disk_cache_gb=(states + blocks) / _GIB,
        host_state_share=states / (states + blocks),
        disk_write_on_use=1,
    )


def aligned_row_bytes(num_bytes: int) -> int:
    """Return the bytes of a row that holds so many, its checksums included."""
    return -(-(num_bytes + _CHECKSUM_BYTES) // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _block_row_bytes(config: CacheConfig) -> int:
    """Return the bytes of a row of a KV block: ``NoModel`` keeps two bytes of each token."""
    return aligned_row_bytes(2 * config.block_size_tokens)


def _folder(sizes: TierSizes) -> Path | None:
    """Return where the disk tier's files are soonest written; None: the usual place."""
    needed = 2 * (sizes.disk_states + sizes.disk_blocks) * row_bytes_of(ROW_ALIGNMENT)
    if _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > needed:
        return _IN_MEMORY
    return None


class CostMeter:
    """What each request of a replay would have taken."""

    def __init__(self, engine: Engine, costs: Costs) -> None:
        self._context, self._costs = engine.context, costs
        self._before = self._counts()
        self._seconds: list[float] = []
        self._uncached: list[float] = []
        self._host_hits = self._disk_hits = 0

    def end_request(self, num_tokens: int) -> None:
        """Count a request that has its first token; its prompt has so many tokens."""
        if self._context.disk_tier is not None:
            self._context.wait_for_tiers()  # so that a replay comes out alike each time
        before, self._before = self._before, self._counts()
        pairs = zip(before, self._before, strict=True)
        skipped, from_host, from_disk = (now - then for then, now in pairs)
        costs = self._costs
        seconds = (num_tokens - skipped) / costs.prefill_rate
        seconds += self._load_seconds(from_host, costs.host_rates)
        seconds += self._load_seconds(from_disk, costs.disk_rates)
        self._host_hits += bool(from_host)
        self._disk_hits += bool(from_disk)
        self._seconds.append(seconds)
        self._uncached.append(num_tokens / costs.prefill_rate)

    def summary(self) -> dict[str, float | int | None]:
        """Return the figures: times to first token in ms, FLOPs, and hits by tier."""
        flops = self._costs.flops_per_token
        seconds = np.array(self._seconds)
        return {
            "saved_flops": None if flops is None else flops * self._before[0],
            "ttft_ms_mean": round(float(seconds.mean()) * 1e3, 1),
            "ttft_ms_p95": round(float(np.quantile(seconds, 0.95)) * 1e3, 1),
            "uncached_ttft_ms_mean": round(float(np.mean(self._uncached)) * 1e3, 1),
            "host_hits": self._host_hits,
            "disk_hits": self._disk_hits,
            **self._stored(),
        }

    def _load_seconds(self, num_entries: int, rates: Rates) -> float:
        """Return how long it takes to load a state and, before it, some blocks."""
        if not num_entries:
            return 0.0
        num_bytes = self._costs.state_bytes + (num_entries - 1) * self._costs.block_bytes
        return rates.latency_seconds + num_bytes / rates.bytes_per_second

    def _stored(self) -> dict[str, int]:
        tiers = self._context.tier_stats()
        states = EntryKind.STATE.name.lower()
        stored = {f"{tier.name}_stored": tier.stored for tier in tiers}
        return stored | {f"{tier.name}_states": tier.entries[states] for tier in tiers}

    def _counts(self) -> tuple[int, int, int]:
        stats: CacheStats = self._context.stats()
        host, disk = self._context.host_tier, self._context.disk_tier
        return (
            stats.skipped_tokens,
            0 if host is None else host.restored_total,
            0 if disk is None else disk.stats().hits,
        )
