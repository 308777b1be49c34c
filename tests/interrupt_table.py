"""Prints the table of interrupts: which call was interrupted, how often, and what came of it.

Run ``python tests/interrupt_table.py > table.md``; all moments take days of one core, most of it
for calls of prefix caches over tiers. With ``--seconds 15`` each call has so many of its moments,
evenly spread, as fit into that.
"""

import argparse
import math
import sys
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))

import numpy as np
import torch
from interrupt_rig import FAULTS, Search, signal_engine, subjects
from kept_runs import add_json_option, keep
from shares import shared_out

COLUMNS = ["call", "moments", "struck", "went on", "poisoned", "wrong", "wedged", "leaks"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="every N-th moment only")
    parser.add_argument("--seconds", type=float, help="of process time that each call may take")
    parser.add_argument("--only", default="", help="calls whose names begin so")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the moments")
    parser.add_argument("--signals", type=int, default=3000, help="real signals to Engine.step")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the signals")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("|" + "|".join(COLUMNS) + "|")
    print("|" + "---|" * len(COLUMNS))
    rows, signals, num_faults = [], {}, 0
    for name, subject, injector in subjects(options.only):
        started = time.monotonic()
        search = Search(subject, injector)
        counts, examples = survey(name, search, options)
        found = [counts[kind] for kind in ("struck", "went on", "poisoned", *FAULTS)]
        rows.append([name, len(search.moments()), *found])
        print(f"|`{name}`|" + "|".join(map(str, rows[-1][1:])) + "|", flush=True)
        print(
            f"{name}: {time.monotonic() - started:.0f} s",
            *examples[:9],
            sep="\n",
            file=sys.stderr,
        )
        num_faults += len(examples)
    if options.signals:
        signals = dict(signal_engine(np.random.default_rng(options.seed), options.signals))
        print(f"real signals: {signals}", file=sys.stderr)
    none_of = {kind: sum(cells[COLUMNS.index(kind)] for cells in rows) for kind in COLUMNS[-3:]}
    versions = "torch", "transformers"
    keep(options.json, COLUMNS, rows, none_of=none_of, packages=versions, real_signals=signals)
    return bool(num_faults)


def survey(name, search, options):
    """Strikes at the moments, in this process or in several that share them."""
    moments = search.moments()[:: options.every]
    if options.seconds is not None:
        moments = moments[:: stride(search, moments, options.seconds)]
    if options.jobs == 1:
        return search.survey(moments)
    counts, examples = Counter(), []
    for found, told in shared_out(survey_share, name, moments, options.jobs):
        counts += found
        examples += told
    return counts, examples


def stride(search, moments, seconds):
    """Of the moments every N-th fits into so much time, by what three in the middle take."""
    began = time.process_time()
    search.survey(moments[len(moments) // 2 :][:3])
    return max(1, math.ceil(len(moments) * (time.process_time() - began) / 3 / seconds))


def survey_share(name, moments):
    """Strikes at some of the moments, in a process of its own."""
    return search_named(name).survey(moments)


@lru_cache(maxsize=1)
def search_named(name):
    [(_, subject, injector)] = [one for one in subjects(name) if one[0] == name]
    return Search(subject, injector)


if __name__ == "__main__":
    sys.exit(main())
