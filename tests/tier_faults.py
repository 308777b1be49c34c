"""Prints a table of injected faults of the tiers: kind, number and results.

Run ``python tests/tier_faults.py --jobs 16 > table.md``; 100,000 faults take some ten minutes of
one core. The exit code is 1 if a wrong byte was restored, or anything hung or was leaked.
"""

import argparse
import sys
import tempfile
import time
from functools import reduce
from operator import add
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))

import torch
from kept_runs import add_json_option, keep
from shares import shared_out
from tier_fault_rig import FAULTS, inject

COLUMNS = (
    "fault", "injected", "restored rightly", "refused, by reason", "wrong", "hung", "leaked",
)  # fmt: skip
RARE = {"killed writer": 0.15, "aborted": 0.5}
"""Share of the usual number of faults, for kinds that take longer."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="faults of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the faults")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    weights = {name: RARE.get(name, 1.0) for name in FAULTS}
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    rows, total = [], None
    for name in FAULTS:
        started = time.perf_counter()
        count = max(1, round(options.count * weights[name] / sum(weights.values())))
        counts = injected(name, count, options)
        total = counts if total is None else total + counts
        rows.append(row(name, counts))
        print(f"| {' | '.join(map(str, rows[-1]))} |", flush=True)
        seconds = time.perf_counter() - started
        breach = f"; {counts.first_breach}" if counts.first_breach else ""
        print(f"{name}: {seconds:.0f} s{breach}", file=sys.stderr)
    rows.append(row("all", total))
    print(f"| {' | '.join(map(str, rows[-1]))} |")
    none_of = {"wrong": total.wrong, "hung": total.hung, "leaked": total.leaked}
    keep(options.json, COLUMNS, rows, none_of=none_of)
    return 1 if any(none_of.values()) else 0


def injected(name, count, options):
    """Injects ``count`` faults, in this process or shared among several."""
    case = name, options.seed
    if options.jobs == 1:
        return inject_share(case, range(count))
    return reduce(add, shared_out(inject_share, case, range(count), options.jobs))


def inject_share(case, numbers):
    """Injects some of the faults of one kind."""
    name, seed = case
    with tempfile.TemporaryDirectory() as folder:
        return inject(folder, name, len(numbers), [seed, numbers.start])


def row(name, counts):
    refused = {each: n for each, n in counts.outcomes.most_common() if each != "right"}
    reasons = ", ".join(f"{each} {n:,}" for each, n in refused.items()) or "none"
    cells = name, f"{counts.injected:,}", f"{counts.outcomes['right']:,}", reasons
    return *cells, counts.wrong, counts.hung, counts.leaked


if __name__ == "__main__":
    sys.exit(main())
