"""``mamba-cache replay``: hit rates of a trace of requests, under budgets and policies.

The package's own control plane runs without a model. Each request runs to its first token before
the next one begins: a trace does not hold the tokens of answers.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Final

from mamba_cache.cache import SLOT_POLICIES
from mamba_cache.cli.output import Option, Report, table
from mamba_cache.cli.traces import TraceRequest, prompt_tokens, read_trace
from mamba_cache.config import CacheConfig
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference import Engine, SamplingParams
from mamba_cache.reference.no_model import NoModel

__all__ = ["OPTIONS", "replay", "run_replay"]

_FIRST_TOKEN: Final = SamplingParams(max_new_tokens=1)
_MAX_TOKENS: Final = 8192
_UNLIMITED: Final = "unlimited"
_PROGRESS_SECONDS: Final = 20.0


OPTIONS: tuple[Option, ...] = (
    ("trace", "TRACE", None, "a file of JSON lines, or .gz"),
    ("--slots", "N,...", "50,200,unlimited", "budgets of slots: numbers, or unlimited"),
    ("--kv-blocks", "NUMBER", _UNLIMITED, "budget of KV blocks: a number, or unlimited"),
    ("--policy", "NAME,...", ",".join(SLOT_POLICIES), "eviction"),
    ("--limit", "N", None, "requests to replay (default: all)"),
)


def replay(options: Namespace) -> Report:
    """Replay a trace of requests: its hit rate with each policy and number of slots.

    No model runs and no GPU is needed.
    """
    [blocks] = _budgets("--kv-blocks", options.kv_blocks, max_count=1)
    result = run_replay(
        read_trace(options.trace, options.limit),
        slots=_budgets("--slots", options.slots),
        kv_blocks=blocks,
        policies=options.policy.split(","),
    )
    return Report(result, _text_of(result), result["passed"])


def run_replay(
    requests: Sequence[TraceRequest],
    *,
    slots: Sequence[int | None] = (50, 200, None),
    kv_blocks: int | None = None,
    policies: Sequence[str] = tuple(SLOT_POLICIES),
) -> dict[str, Any]:
    """Replay requests, all of one block size, under every combination of policy and slots.

    A budget of None never runs out. Every 20 seconds a line on stderr shows the progress.
    """
    unknown = [name for name in policies if name not in SLOT_POLICIES]
    if unknown:
        raise InvalidArgumentError(f"policies must be of {list(SLOT_POLICIES)}, got {unknown}")
    runs = [(policy, states) for policy in policies for states in slots]
    records: list[dict[str, Any]] = []
    reported_at = time.monotonic()
    for number, (policy, states) in enumerate(runs):
        config = _config(requests, states, kv_blocks)
        engine = Engine(NoModel(), config, slot_policy=SLOT_POLICIES[policy]())
        num_failed = 0
        for index, request in enumerate(requests):
            if time.monotonic() - reported_at >= _PROGRESS_SECONDS:
                reported_at = time.monotonic()
                share = (number + index / len(requests)) / len(runs)
                what = f"{policy}, {_budget_text(states)} slots"
                print(f"replay: {share:.0%}, {what}", file=sys.stderr, flush=True)
            engine.submit(
                prompt_tokens(request),
                _FIRST_TOKEN,
                will_continue=request.will_continue,
                cache_salt=request.tenant,
            )
            ends = [event.completion for event in engine.stream() if event.completion]
            num_failed += any(end.error is not None for end in ends)
        record: dict[str, Any] = {"policy": policy, "slots": states, "kv_blocks": kv_blocks}
        records.append(record | _counts(engine, requests, num_failed))
    total = sum(request.input_length for request in requests)
    return {
        "passed": not any(record["failed_requests"] for record in records),
        "workload": {
            "requests": len(requests),
            "prompt_tokens": total,
            "mean_prompt_tokens": round(total / len(requests), 1),
        },
        "settings": {"block_size_tokens": requests[0].block_size},
        "records": records,
    }


def _config(
    requests: Sequence[TraceRequest], max_slots: int | None, num_kv_blocks: int | None
) -> CacheConfig:
    """Return settings for requests that run one at a time; a budget of None never runs out."""
    size = requests[0].block_size
    longest = max(request.input_length for request in requests) + 1
    names = {(request.tenant, hash_id) for request in requests for hash_id in request.hash_ids}
    # Every block that can ever be cached, and the blocks of the longest request beside them.
    enough = len(names) + -(-longest // size)
    return CacheConfig(
        block_size_tokens=size,
        ssm_chunk_size=size,
        max_requests=1,
        max_tokens=_MAX_TOKENS,
        max_sequence_length=longest,
        num_kv_blocks=enough if num_kv_blocks is None else num_kv_blocks,
        max_slots=enough if max_slots is None else max_slots,
        max_checkpoints_per_step=_MAX_TOKENS // size + 1,
    )


def _counts(engine: Engine, requests: Sequence[TraceRequest], num_failed: int) -> dict[str, Any]:
    """Return the counters of one replay.

    "token_hit_rate" is the share of prompt tokens that were skipped. "kv_hit_rate" is the share
    whose KV blocks were found, an upper limit of "token_hit_rate".
    """
    engine.context.check_invariants()
    stats = engine.context.stats()
    total = sum(request.input_length for request in requests)
    matched = stats.kv_matched_blocks * engine.context.config.block_size_tokens
    names = (
        "hits", "skipped_tokens", "saved_states", "refused_states", "evicted_slots",
        "evicted_blocks", "skipped_checkpoints",
    )  # fmt: skip
    return {
        "requests": len(requests),
        "failed_requests": num_failed,
        "prompt_tokens": total,
        "token_hit_rate": round(stats.skipped_tokens / total, 4),
        "kv_hit_rate": round(matched / total, 4),
        "kept_states": stats.cached_slots,
        **{name: getattr(stats, name) for name in names},
    }


def _text_of(result: dict[str, Any]) -> str:
    records, workload = result["records"], result["workload"]
    rows = [
        [
            record["policy"],
            _budget_text(record["slots"]),
            f"{record['token_hit_rate']:.1%}",
            f"{record['saved_states']:,}",
        ]
        for record in records
    ]
    text = table(["policy", ">slots", ">hit", ">saved"], rows)
    text += (
        f"\n{workload['requests']:,} requests, {workload['mean_prompt_tokens']:,.0f} prompt tokens "
        "each.\nhit: prompt tokens not computed; saved: states"
    )
    if failed := sum(record["failed_requests"] for record in records):
        text += f"\n{failed:,} requests failed: --kv-blocks does not hold them"
    return text


def _budgets(option: str, text: str, *, max_count: int = 1_000) -> list[int | None]:
    parts = text.split(",")
    if len(parts) > max_count or not all(each == _UNLIMITED or each.isdecimal() for each in parts):
        many = "a number" if max_count == 1 else "numbers"
        raise InvalidArgumentError(f"{option} must be {many} or {_UNLIMITED!r}, got {text!r}")
    return [None if part == _UNLIMITED else int(part) for part in parts]


def _budget_text(budget: int | None) -> str:
    return _UNLIMITED if budget is None else f"{budget:,}"
