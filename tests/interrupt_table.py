"""Prints the table of interrupts: which call was interrupted, how often, and what came of it.

Run ``python tests/interrupt_table.py > table.md``; all moments take about two hours on one core.
"""

import argparse
import sys
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))

import numpy as np
import torch
from interrupt_rig import FAULTS, Search, signal_engine, subjects
from shares import shared_out

COLUMNS = ["call", "moments", "struck", "went on", "poisoned", "wrong", "wedged", "leaks"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="every N-th moment only")
    parser.add_argument("--only", default="", help="calls whose names begin so")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the moments")
    parser.add_argument("--signals", type=int, default=3000, help="real signals to Engine.step")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the signals")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("|" + "|".join(COLUMNS) + "|")
    print("|" + "---|" * len(COLUMNS))
    num_faults = 0
    for name, subject, injector in subjects(options.only):
        started = time.monotonic()
        search = Search(subject, injector)
        counts, examples = survey(name, search, options)
        found = [counts[kind] for kind in ("struck", "went on", "poisoned", *FAULTS)]
        print(f"|`{name}`|{len(search.moments())}|" + "|".join(map(str, found)) + "|", flush=True)
        print(
            f"{name}: {time.monotonic() - started:.0f} s",
            *examples[:9],
            sep="\n",
            file=sys.stderr,
        )
        num_faults += len(examples)
    if options.signals:
        counts = signal_engine(np.random.default_rng(options.seed), options.signals)
        print(f"real signals: {dict(counts)}", file=sys.stderr)
    return bool(num_faults)


def survey(name, search, options):
    """Strikes at the moments, in this process or in several that share them."""
    moments = search.moments()[:: options.every]
    if options.jobs == 1:
        return search.survey(moments)
    counts, examples = Counter(), []
    for found, told in shared_out(survey_share, name, moments, options.jobs):
        counts += found
        examples += told
    return counts, examples


def survey_share(name, moments):
    """Strikes at some of the moments, in a process of its own."""
    return search_named(name).survey(moments)


@lru_cache(maxsize=1)
def search_named(name):
    [(_, subject, injector)] = [one for one in subjects(name) if one[0] == name]
    return Search(subject, injector)


if __name__ == "__main__":
    sys.exit(main())
