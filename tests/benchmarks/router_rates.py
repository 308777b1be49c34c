"""Prints how many prompt tokens are skipped behind routers, and how many predictions hold.

Run ``python tests/benchmarks/router_rates.py`` where the routers are (tests/engines/routers.sh).
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from kept_runs import add_json_option, keep
from router_rig import FEW, FEW_SLOTS, KINDS, LOAD, SIZES, TWICE, run, two

COLUMNS = "conversations", "slots", "replicas", "router", "mode", "hit rate", "predicted rightly"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json_option(parser)
    options = parser.parse_args()
    is_here = {"vllm-router": two.find_vllm_router() is not None, "dynamo": two.has_dynamo()}
    routers = {name: kind for name, kind in KINDS.items() if is_here[name]}
    cases = [
        *((name, kind, LOAD, 2, SIZES, "reachable") for name, kind in routers.items()),
        ("round robin", two.RoundRobin, LOAD, 2, SIZES, "reachable"),
        ("none", two.RoundRobin, LOAD, 1, TWICE, "reachable"),
        *(
            (name, kind, FEW, 2, FEW_SLOTS, mode)
            for name, kind in routers.items()
            for mode in ("resident", "reachable")
        ),
    ]
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    rows = []
    for name, kind, load, number, sizes, mode in cases:
        answers = run(kind, load, number, mode=mode, **sizes)
        right = two.right_predictions(answers) if name in routers else None
        rate = two.hit_rate(answers)
        rows.append((load.conversations, sizes["num_slots"], number, name, mode, rate, right))
        print(f"| {' | '.join(map(str, rows[-1]))} |", flush=True)
    wheels = {"vllm-router": "vllm-router", "dynamo": "ai-dynamo-runtime"}
    keep(options.json, COLUMNS, rows, packages=("torch", *(wheels[name] for name in routers)))


if __name__ == "__main__":
    main()
