"""Replay a trace of requests without a model, and find out how many slots are worth having.

A trace is a file of JSON lines with timestamp (ms), input_length, output_length and hash_ids: one
id for each 512 prompt tokens, which stands for the whole prefix up to their end. Without a file the
requests of coding agents are drawn: sessions that share a system prompt and grow turn by turn. The
bookkeeping is the real one, so the hit rates are those that an engine would see.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from mamba_cache.bench.replay import print_replay, run_replay
from mamba_cache.slots import SLOT_POLICIES

BUDGETS = (10, 20, 40, None)
DRAWN_REQUESTS = 150
NEAR = 0.02


def smallest_budget(records: list[dict[str, Any]], policy: str) -> str:
    """Say with how many slots a policy comes near to what it reaches without a limit."""
    rates = {record["slots"]: record["token_hit_rate"] for record in records}
    most = max(rates.values())
    slots, rate = next((slots, rate) for slots, rate in rates.items() if rate >= most - NEAR)
    number = "no limit" if slots is None else f"{slots} slots"
    return f"{policy:>8}: {number:>8}, {rate:.1%} of {most:.1%}"


def main(arguments: list[str] | None = None) -> int:
    """Replay, print a table, and what follows from it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", help="JSON lines; default: drawn requests of agents")
    parser.add_argument("--limit", type=int, help="requests to replay, from the first")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    drawn = DRAWN_REQUESTS if options.trace is None else None
    result = run_replay(
        trace=options.trace,
        workload="agents",
        limit=options.limit or drawn,
        slots=BUDGETS,
        placements=("megatron",),
    )
    print_replay(result)
    print(
        f"\nThe fewest slots that come within {NEAR:.0%} of what a policy reaches without a limit:"
    )
    for policy in SLOT_POLICIES:
        records = [record for record in result["records"] if record["policy"] == policy]
        print(smallest_budget(records, policy))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
