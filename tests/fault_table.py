"""Prints the table of faults: what was injected into which call, how often, and what came of it.

Run ``python tests/fault_table.py --jobs 16 > table.md``; all moments take some forty minutes of one
core.
"""

import argparse
import sys
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))

import torch
from fault_rig import CALLS, Outcome, Survey
from injectors import INJECTORS, Interrupt
from kept_runs import add_json_option, keep
from shares import shared_out

COLUMNS = ["call", "injected", "moments", "struck", *(outcome.value for outcome in Outcome)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="of the instructions, every N-th only")
    parser.add_argument("--only", default="", help="calls whose names begin so")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the moments")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("|" + "|".join(COLUMNS) + "|")
    print("|" + "---|" * len(COLUMNS))
    rows = []
    for injected, injector in INJECTORS.items():
        for name in (name for name in CALLS if name.startswith(options.only)):
            started = time.perf_counter()
            num_moments = survey_of(injected, name).num_moments
            step = options.every if injector is Interrupt else 1
            outcomes = survey((injected, name), range(1, num_moments + 1, step), options.jobs)
            counts = [outcomes[outcome] for outcome in Outcome]
            rows.append([name, injected, num_moments, sum(counts), *counts])
            cells = [f"`{name}`", *rows[-1][1:]]
            print("|" + "|".join(map(str, cells)) + "|", flush=True)
            seconds = time.perf_counter() - started
            print(f"{name}, {injected}: {seconds:.0f} s", file=sys.stderr)
    keep(options.json, COLUMNS, rows)


def survey(case, moments, num_processes):
    """Injects at the moments, in this process or in several that share them."""
    if num_processes == 1 or len(moments) < 16 * num_processes:
        return survey_share(case, moments)
    outcomes = Counter()
    for found in shared_out(survey_share, case, moments, num_processes):
        outcomes += found
    return outcomes


def survey_share(case, moments):
    """Injects at some of the moments; returns how often each outcome came."""
    subject = survey_of(*case)
    before = Counter(subject.outcomes)
    for moment in moments:
        subject.inject(moment)
    return subject.outcomes - before


@lru_cache(maxsize=1)
def survey_of(injected, name):
    return Survey(CALLS[name], INJECTORS[injected])


if __name__ == "__main__":
    main()
