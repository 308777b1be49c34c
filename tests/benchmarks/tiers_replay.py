"""Replays a trace with states in slots and in host memory, without a model.

    python tests/benchmarks/tiers_replay.py --trace requests.jsonl --slots 200 --host-states 2000

Loads take no time here, so every found state is loaded: the shares are upper bounds for the two
budgets. KV blocks never run out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from measuring import Measurement, parser_for, progress, report

from mamba_cache.cache import SLOT_POLICIES
from mamba_cache.cli.replay import _config
from mamba_cache.cli.traces import TraceRequest, prompt_tokens, read_trace
from mamba_cache.reference import Engine, SamplingParams
from mamba_cache.reference.no_model import NoModel
from mamba_cache.tiers.planner import LoadPlanner, Rates

_FREE = Rates(bytes_per_second=1e18, latency_seconds=0.0, tokens_per_second=1.0)
_FIRST_TOKEN = SamplingParams(max_new_tokens=1)


def replay(requests: Sequence[TraceRequest], slots: int, host_states: int, policy: str) -> float:
    """Return the share of prompt tokens that are skipped."""
    config = _config(requests, slots, None)
    config = replace(config, num_host_states=host_states, num_host_blocks=config.num_kv_blocks)
    planner = LoadPlanner(_FREE, learns=False)
    engine = Engine(NoModel(), config, slot_policy=SLOT_POLICIES[policy](), load_planner=planner)
    for index, request in enumerate(requests):
        engine.submit(
            prompt_tokens(request),
            _FIRST_TOKEN,
            will_continue=request.will_continue,
            cache_salt=request.tenant,
        )
        for _ in engine.stream():
            pass
        if index % 1000 == 0:
            progress(f"{index:,} of {len(requests):,} requests")
    engine.context.check_invariants()
    total = sum(request.input_length for request in requests)
    return engine.context.stats().skipped_tokens / total


def main() -> dict[str, Any]:
    """Replay a trace under the budgets of the command line."""
    parser = parser_for(__doc__)
    parser.add_argument("--trace", required=True, help="a file of JSON lines")
    parser.add_argument("--slots", type=int, default=200)
    parser.add_argument("--host-states", type=int, default=2000)
    parser.add_argument("--policy", choices=SLOT_POLICIES, default="adaptive")
    parser.add_argument("--limit", type=int, help="requests to replay; default: all")
    options = parser.parse_args()
    requests = read_trace(options.trace, options.limit)
    share = replay(requests, options.slots, options.host_states, options.policy)
    title = f"{options.slots} slots and {options.host_states} states in host memory"
    figures = [
        Measurement(f"tokens skipped, {title}", share, "x"),
        Measurement("requests", len(requests), ""),
    ]
    return report("tiers_replay", figures, options.json, policy=options.policy)


if __name__ == "__main__":
    main()
