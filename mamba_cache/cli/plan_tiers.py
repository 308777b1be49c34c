"""Tiers and traces in ``mamba-cache plan``: rows, lengths from which they pay, the best split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from rich.console import Console

from mamba_cache._checks import check_number
from mamba_cache.bench.replay import run_replay
from mamba_cache.bench.replay_tiers import Costs, aligned_row_bytes
from mamba_cache.cli.output import make_table, size_text
from mamba_cache.config import CacheConfig
from mamba_cache.errors import BudgetError, InvalidArgumentError
from mamba_cache.integrations.model_shapes import ModelShape
from mamba_cache.tiers import Rates
from mamba_cache.tiers.slab import row_bytes_of

__all__ = [
    "SplitOfTrace",
    "TierPlan",
    "break_even_tokens",
    "plan_tiers",
    "show_splits",
    "show_tiers",
    "split_by_trace",
]

_GIB: Final = 2**30
_SHARES: Final = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
_PREFIX: Final = 4096
_HOST_STATE_SHARE: Final = CacheConfig(num_kv_blocks=1, max_slots=0).host_state_share


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """What a tier below the GPU holds, and from which length on it pays.

    Attributes:
        name: "host" or "disk".
        gb: Its budget in GiB.
        num_states: States that it holds.
        num_blocks: KV blocks that it holds.
        break_even_tokens: Tokens of a prefix from which on it is loaded sooner than it is computed;
            None: it never is.
        load_seconds: Of a prefix of 4,096 tokens.
        compute_seconds: Likewise.
    """

    name: str
    gb: float
    num_states: int
    num_blocks: int
    break_even_tokens: int | None
    load_seconds: float
    compute_seconds: float

    @property
    def settings(self) -> dict[str, float | str]:
        """The arguments of ``CacheConfig`` for it."""
        if self.name == "host":
            return {"host_cache_gb": self.gb}
        return {"disk_cache_path": "PATH", "disk_cache_gb": self.gb}


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOfTrace:
    """How a trace hits with several splits of one budget.

    Attributes:
        cache_gb: The budget for slots and KV blocks together, in GiB.
        requests: Requests replayed.
        hit_rates: Of each share of slots that was tried, the share of prompt tokens that hit.
        best_share: The share that hit the most.
        unlimited_hit_rate: The same with room for everything.
    """

    cache_gb: float
    requests: int
    hit_rates: dict[float, float]
    best_share: float
    unlimited_hit_rate: float


def break_even_tokens(rates: Rates, *, state_bytes: int, token_bytes: float) -> int | None:
    """Return from how many tokens on a load takes less time than computing; None: never.

    L + (S + k n) / B < n / P, so n > (L + S / B) / (1 / P - k / B).

    Args:
        rates: Bandwidth B and latency L of loads, and the rate P of prefill.
        state_bytes: S, of a state.
        token_bytes: k, of a token's keys and values.
    """
    fixed = rates.latency_seconds + state_bytes / rates.bytes_per_second
    gain = 1 / rates.tokens_per_second - token_bytes / rates.bytes_per_second
    return math.ceil(fixed / gain) if gain > 0 else None


def plan_tiers(
    shape: ModelShape,
    block_size: int,
    *,
    host_gb: float | None,
    disk_gb: float | None,
    prefill_rate: float,
    host_rate: float,
    disk_rate: float,
    slot_bytes: int,
) -> list[TierPlan]:
    """Plan the tiers that are asked for; of None GiB there is none. Rates of loads are in GB/s.

    Raises:
        InvalidArgumentError: A rate is not above 0, or there is a disk and no host tier.
        BudgetError: A budget does not hold one state and, of a model with attention, one block.
    """
    costs = Costs.of(
        shape, block_size, prefill_rate=prefill_rate, host_rate=host_rate, disk_rate=disk_rate
    )
    if disk_gb is not None and host_gb is None:
        raise InvalidArgumentError("--disk-gb needs --host-gb: entries come and go through it")
    plans = []
    for name, gb, rates in (
        ("host", host_gb, costs.host_rates),
        ("disk", disk_gb, costs.disk_rates),
    ):
        if gb is None:
            continue
        room = check_number(f"--{name}-gb", gb, maximum=1e9) * _GIB
        states, blocks = _rows(name, room, slot_bytes, costs.block_bytes)
        prefix = slot_bytes + _PREFIX * costs.block_bytes / block_size
        plans.append(
            TierPlan(
                name=name,
                gb=gb,
                num_states=states,
                num_blocks=blocks,
                break_even_tokens=break_even_tokens(
                    rates, state_bytes=slot_bytes, token_bytes=costs.block_bytes / block_size
                ),
                load_seconds=round(rates.latency_seconds + prefix / rates.bytes_per_second, 6),
                compute_seconds=round(_PREFIX / prefill_rate, 6),
            )
        )
    return plans


def _rows(name: str, room: float, state_bytes: int, block_bytes: int) -> tuple[int, int]:
    """Return the rows of both kinds, as the tiers divide their budget."""
    state_share = _HOST_STATE_SHARE if block_bytes else 1.0
    counts = []
    for size, share in ((state_bytes, state_share), (block_bytes, 1 - state_share)):
        row = aligned_row_bytes(size)
        counts.append(int(room * share) // (row if name == "host" else row_bytes_of(row)))
    states, blocks = counts
    if not states or (block_bytes and not blocks):
        raise BudgetError(
            f"--{name}-gb {room / _GIB:g} is too small: it holds {states} states of "
            f"{size_text(state_bytes)} and {blocks} KV blocks of {size_text(block_bytes)}"
        )
    return states, blocks if block_bytes else 0


def split_by_trace(
    shape: ModelShape, room: int, trace: str, *, limit: int, slot_bytes: int
) -> SplitOfTrace:
    """Replay the first requests of a trace with several splits of one budget, ``room`` bytes.

    Raises:
        InvalidArgumentError: The trace cannot be read.
        BudgetError: No split holds a slot and the longest prompt.
    """
    replayed = partial(
        run_replay, trace=trace, limit=limit, policies=["adaptive"], placements=["megatron"]
    )
    found = replayed(slots=[None])
    block = shape.kv_spec.bytes_per_block(found["settings"]["block_size_tokens"])
    rates: dict[float, float] = {}
    for share in _SHARES if block else (1.0,):
        slots = int(room * share) // slot_bytes
        blocks = int(room * (1 - share)) // block if block else None
        if not slots or blocks == 0:
            continue
        result = replayed(slots=[slots], kv_blocks=blocks)
        if result["passed"]:
            rates[share] = result["records"][0]["token_hit_rate"]
    if not rates:
        raise BudgetError(
            f"no split of {size_text(room)} holds a state of {size_text(slot_bytes)} beside the "
            "longest prompt of the trace"
        )
    return SplitOfTrace(
        cache_gb=math.floor(room / _GIB * 1000) / 1000,
        requests=found["workload"]["requests"],
        hit_rates=rates,
        best_share=max(rates, key=lambda share: (rates[share], -share)),
        unlimited_hit_rate=found["records"][0]["token_hit_rate"],
    )


def show_tiers(out: Console, tiers: Sequence[TierPlan]) -> None:
    """Print tiers as a table for people."""
    table = make_table(
        ["tier", ">memory", ">states", ">KV blocks", ">pays from", ">4,096 tokens", ">computed"]
    )
    for tier in tiers:
        least = tier.break_even_tokens
        table.add_row(
            tier.name,
            f"{tier.gb:g} GiB",
            f"{tier.num_states:,}",
            f"{tier.num_blocks:,}",
            "never" if least is None else f"{least:,} tokens",
            f"{tier.load_seconds * 1e3:,.1f} ms",
            f"{tier.compute_seconds * 1e3:,.1f} ms",
        )
    out.print(table)


def show_splits(out: Console, split: SplitOfTrace) -> None:
    """Print what each split hits."""
    table = make_table([">for states", ">tokens that hit", ""])
    for share, rate in split.hit_rates.items():
        mark = "best" if share == split.best_share else ""
        table.add_row(f"{share:.0%}", f"{rate:.1%}", mark)
    out.print(table)
    out.print(
        f"Replayed {split.requests:,} requests over {split.cache_gb:g} GiB; with room for "
        f"everything {split.unlimited_hit_rate:.1%} hit.\n"
    )
