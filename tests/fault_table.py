"""Prints the table of faults: what was injected into which call, how often, and what came of it.

Run ``python tests/fault_table.py > table.md``; all moments take some thirty minutes on one core.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))

import torch
from fault_rig import CALLS, Outcome, Survey
from injectors import INJECTORS, Interrupt

COLUMNS = ["call", "injected", "moments", "struck", *(outcome.value for outcome in Outcome)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="of the instructions, every N-th only")
    every = parser.parse_args().every
    torch.set_num_threads(1)
    print("|" + "|".join(COLUMNS) + "|")
    print("|" + "---|" * len(COLUMNS))
    for injected, injector in INJECTORS.items():
        for name, call in CALLS.items():
            started = time.perf_counter()
            survey = Survey(call, injector)
            step = every if injector is Interrupt else 1
            for moment in range(1, survey.num_moments + 1, step):
                survey.inject(moment)
            counts = [survey.outcomes[outcome] for outcome in Outcome]
            cells = [f"`{name}`", injected, survey.num_moments, sum(counts), *counts]
            print("|" + "|".join(map(str, cells)) + "|", flush=True)
            seconds = time.perf_counter() - started
            print(f"{name}, {injected}: {seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
