"""``mamba-cache replay``: what a trace of requests would hit, under budgets and policies.

The package's own control plane runs without a model. Each request runs to its first token before
the next one begins: a trace does not hold the tokens of answers.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from mamba_cache._checks import check_int
from mamba_cache.cache import (
    SLOT_POLICIES,
    CheckpointPlacement,
    EveryNthBlock,
    LastBlock,
    MegatronPlacement,
    PrefixSlotPolicy,
    SlotEvictionPolicy,
)
from mamba_cache.cli.bound import bound_of
from mamba_cache.cli.output import print_json, print_table
from mamba_cache.cli.traces import TraceRequest, prompt_tokens, read_trace
from mamba_cache.config import CacheConfig
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference import Engine, SamplingParams
from mamba_cache.reference.no_model import NoModel

__all__ = ["OPTIONS", "PLACEMENTS", "replay", "run_replay"]

PLACEMENTS: dict[str, Callable[[], CheckpointPlacement]] = {
    "megatron": MegatronPlacement,
    "last": LastBlock,
    "every": lambda: EveryNthBlock(1),
}
"""Placements by name."""

_FIRST_TOKEN: Final = SamplingParams(max_new_tokens=1)
_UNLIMITED: Final = "unlimited"
_PROGRESS_SECONDS: Final = 20.0
_TIMED: Final = ("on_request", "admit", "on_reserved", "on_published", "on_removed", "least_loss")

OPTIONS: dict[str, dict[str, Any]] = {
    "trace": {"metavar": "TRACE", "help": "a file of JSON lines, or .gz"},
    "--slots": {"metavar": "N,...", "help": "budgets of slots: numbers, or unlimited"},
    "--kv-blocks": {"metavar": "N", "help": "budget of KV blocks: a number, or unlimited"},
    "--policy": {"metavar": "NAME,...", "help": "eviction"},
    "--placement": {"metavar": "NAME", "help": f"checkpoints: one of {', '.join(PLACEMENTS)}"},
    "--limit": {"metavar": "N", "type": int, "help": "requests to replay (default: all)"},
    "--block-size": {
        "metavar": "N",
        "type": int,
        "help": "tokens of a hash (default: the trace's, else 512)",
    },
    "--max-tokens": {"metavar": "N", "help": "tokens of a step"},
    "--bound": {
        "action": "store_true",
        "help": "add the most that any cache could skip; needs scipy",
    },
}


def replay(
    trace: str,
    *,
    slots: str = "50,200,unlimited",
    kv_blocks: str = _UNLIMITED,
    policy: str = ",".join(SLOT_POLICIES),
    placement: str = "megatron",
    limit: int | None = None,
    block_size: int | None = None,
    max_tokens: int = 8192,
    bound: bool = False,
    as_json: bool = False,
) -> int:
    """Replay a trace of requests: what it hits with each policy and number of slots.

    No model runs and no GPU is needed.
    """
    [blocks] = _budgets("--kv-blocks", kv_blocks, most=1)
    result = run_replay(
        read_trace(trace, limit, block_size=block_size),
        slots=_budgets("--slots", slots),
        kv_blocks=blocks,
        policies=policy.split(","),
        placement=placement,
        max_tokens=max_tokens,
        bound=bound,
    )
    if as_json:
        print_json(result)
    else:
        _show(result)
    return 0 if result["passed"] else 1


def run_replay(
    requests: Sequence[TraceRequest],
    *,
    slots: Sequence[int | None] = (50, 200, None),
    kv_blocks: int | None = None,
    policies: Sequence[str] = tuple(SLOT_POLICIES),
    placement: str = "megatron",
    max_tokens: int = 8192,
    bound: bool = False,
) -> dict[str, Any]:
    """Replay requests under every combination of policy and slots.

    A line on stderr says every 20 seconds how far it is.

    Args:
        requests: In the order in which they come; all of one block size.
        slots: Budgets of slots; None never runs out.
        kv_blocks: The budget of KV blocks; None never runs out.
        policies: Names of ``SLOT_POLICIES``.
        placement: One name of ``PLACEMENTS``.
        max_tokens: Tokens of a step.
        bound: Whether each record has the linear program's bound.

    Returns:
        "records": what one replay counted, for each combination, with its budgets; "workload":
        what was replayed; "passed": whether every request found room.

    Raises:
        InvalidArgumentError: A setting is out of range.
        MissingExtraError: A bound is asked for and scipy is not installed.
    """
    _check_names("policies", policies, SLOT_POLICIES)
    _check_names("placement", [placement], PLACEMENTS)
    check_int("max_tokens", max_tokens, minimum=1)
    bounds = {
        states: bound_of(requests, states, num_blocks=kv_blocks)
        for states in (set(slots) if bound else ())
    }
    runs = [(policy, states) for policy in policies for states in slots]
    records: list[dict[str, Any]] = []
    told_at = time.monotonic()
    for number, (policy, states) in enumerate(runs):
        engine = Engine(
            NoModel(),
            _config(requests, states, kv_blocks, max_tokens),
            slot_policy=SLOT_POLICIES[policy](),
            placement=PLACEMENTS[placement](),
        )
        seconds, decisions, failed = [], _time_decisions(engine.context.slot_allocator.policy), 0
        for index, request in enumerate(requests):
            if time.monotonic() - told_at >= _PROGRESS_SECONDS:
                told_at = time.monotonic()
                share = (number + index / len(requests)) / len(runs)
                what = f"{policy}, {_budget_text(states)} slots"
                print(f"replay: {share:.0%}, {what}", file=sys.stderr, flush=True)
            decisions.append(0.0)
            its_seconds, has_failed = _run(engine, request)
            seconds.append(its_seconds)
            failed += has_failed
        record = {
            "placement": placement, "policy": policy, "slots": states, "kv_blocks": kv_blocks,
            **_counts(engine, requests, failed, seconds, decisions),
        }  # fmt: skip
        if bound:
            rate, is_solved = bounds[states]
            record |= {"bound": round(rate, 4), "bound_is_solved": is_solved}
        records.append(record)
    total = sum(request.input_length for request in requests)
    return {
        "passed": not any(record["failed_requests"] for record in records),
        "workload": {
            "requests": len(requests),
            "prompt_tokens": total,
            "mean_prompt_tokens": round(total / len(requests), 1),
        },
        "settings": {"block_size_tokens": requests[0].block_size, "max_tokens": max_tokens},
        "records": records,
    }


def _config(
    requests: Sequence[TraceRequest],
    max_slots: int | None,
    num_kv_blocks: int | None,
    max_tokens: int,
) -> CacheConfig:
    """Return settings for requests that come one at a time; a budget of None never runs out."""
    size = requests[0].block_size
    longest = max(request.input_length for request in requests) + 1
    names = {(request.tenant, hash_id) for request in requests for hash_id in request.hash_ids}
    # Every block that can ever be cached, and the blocks of the longest request beside them.
    enough = len(names) + -(-longest // size)
    return CacheConfig(
        block_size_tokens=size,
        ssm_chunk_size=size,
        max_requests=1,
        max_tokens=max_tokens,
        max_sequence_length=longest,
        num_kv_blocks=enough if num_kv_blocks is None else num_kv_blocks,
        max_slots=enough if max_slots is None else max_slots,
        max_checkpoints_per_step=max_tokens // size + 1,
    )


def _run(engine: Engine, request: TraceRequest) -> tuple[float, bool]:
    """Run a request to its first token; return the CPU seconds, and whether it failed."""
    tokens = prompt_tokens(request)
    start = time.process_time()  # not wall time: other processes do not count
    engine.submit(
        tokens, _FIRST_TOKEN, will_continue=request.will_continue, cache_salt=request.tenant
    )
    ends = [event.completion for event in engine.stream() if event.completion]
    return time.process_time() - start, any(end.error is not None for end in ends)


def _counts(
    engine: Engine,
    requests: Sequence[TraceRequest],
    failed: int,
    seconds: Sequence[float],
    decisions: Sequence[float],
) -> dict[str, Any]:
    """Return what one replay counted.

    "token_hit_rate" is the share of prompt tokens that were skipped; "kv_hit_rate" the share whose
    KV blocks were found, an upper limit for it; "us_per_request" the median CPU time to hash,
    admit, schedule, commit and finish a request.
    """
    engine.context.check_invariants()
    stats = engine.context.stats()
    total = sum(request.input_length for request in requests)
    matched = stats.kv_matched_blocks * engine.context.config.block_size_tokens
    return {
        "requests": len(requests),
        "failed_requests": failed,
        "hits": stats.hits,
        "prompt_tokens": total,
        "skipped_tokens": stats.skipped_tokens,
        "token_hit_rate": round(stats.skipped_tokens / total, 4),
        "kv_hit_rate": round(matched / total, 4),
        "saved_states": stats.saved_states,
        "refused_states": stats.refused_states,
        "kept_states": stats.cached_slots,
        "evicted_slots": stats.evicted_slots,
        "evicted_blocks": stats.evicted_blocks,
        "skipped_checkpoints": stats.skipped_checkpoints,
        "us_per_request": round(statistics.median(seconds) * 1e6, 1),
        "cpu_seconds": round(sum(seconds), 3),
        "decision_us_mean": round(statistics.mean(decisions) * 1e6, 1),
        "decision_us_worst": round(max(decisions) * 1e6, 1),
    }


def _time_decisions(policy: SlotEvictionPolicy) -> list[float]:
    """Time the methods of a policy that knows prompts; simple policies are not timed.

    Reading the clock is subtracted, and Python's garbage collector waits during a call: its time
    depends on the whole process.

    Returns:
        CPU seconds: each call adds its own to the last item.
    """
    seconds: list[float] = []
    of_clock = min(-time.thread_time() + time.thread_time() for _ in range(1_000))

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            collects = gc.isenabled()
            gc.disable()
            start = time.thread_time()
            try:
                return method(*args)
            finally:
                seconds[-1] += time.thread_time() - start - of_clock
                if collects:
                    gc.enable()

        return run

    if isinstance(policy, PrefixSlotPolicy):
        for name in _TIMED:
            setattr(policy, name, timed(getattr(policy, name)))
    return seconds


def _show(result: dict[str, Any]) -> None:
    records, workload = result["records"], result["workload"]
    has_bound = "bound" in records[0]
    print_table(
        ["policy", ">slots", ">hit", *([">bound"] if has_bound else []), ">saved", ">time"],
        [
            [
                record["policy"],
                _budget_text(record["slots"]),
                f"{record['token_hit_rate']:.1%}",
                *([f"{record['bound']:.1%}"] if has_bound else []),
                f"{record['saved_states']:,}",
                f"{record['us_per_request']:,.0f} us",
            ]
            for record in records
        ],
    )
    print(
        f"{workload['requests']:,} requests, {workload['mean_prompt_tokens']:,.0f} prompt tokens "
        f"each; placement {records[0]['placement']}.\n"
        "hit: prompt tokens not computed; saved: states; time: CPU time of one request"
    )
    if has_bound:
        print("bound: an upper limit for any cache of this size, future requests known")
    failed = sum(record["failed_requests"] for record in records)
    if failed:
        print(f"{failed:,} requests failed: --kv-blocks does not hold them")


def _budgets(option: str, text: str, *, most: int = 1_000) -> list[int | None]:
    parts = text.split(",")
    if len(parts) > most or not all(part == _UNLIMITED or part.isdecimal() for part in parts):
        many = "a number" if most == 1 else "numbers"
        raise InvalidArgumentError(f"{option} must be {many} or {_UNLIMITED!r}, got {text!r}")
    return [None if part == _UNLIMITED else int(part) for part in parts]


def _check_names(argument: str, given: Sequence[str], known: Iterable[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown or not given:
        raise InvalidArgumentError(f"{argument} must be of {list(known)}, got {unknown}")


def _budget_text(budget: int | None) -> str:
    return _UNLIMITED if budget is None else f"{budget:,}"
