"""Prints by which example the machine of all tiers notices each fault that is put into them.

Run ``python tests/broken_tiers_table.py > table.md``; it takes some minutes of one core. The exit
status is 1 if one is not noticed.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))

import torch
from broken_tiers import FAULTS, STORE_FAULT, found_by_example
from kept_runs import add_json_option, keep

COLUMNS = "put in", "found by example"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100, help="at most, for each fault")
    parser.add_argument("--only", default="", help="faults whose names begin so")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|")
    rows = []
    for fault in (*FAULTS, STORE_FAULT):
        if fault.startswith(options.only):
            rows.append((fault, found_by_example(fault, options.examples)))
            print(f"| {' | '.join(map(str, rows[-1]))} |", flush=True)
    none_of = {"not noticed": sum(number is None for _, number in rows)}
    keep(options.json, COLUMNS, rows, none_of=none_of, packages=("torch", "hypothesis"))
    return bool(none_of["not noticed"])


if __name__ == "__main__":
    sys.exit(main())
