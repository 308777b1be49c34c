"""The replay of a trace of requests: what it would hit, by the real control plane and no model.

Each request runs to its first token before the next one comes: the tokens of answers are in no
trace, so there would be nothing to find of them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from mamba_cache._checks import check_int, check_number
from mamba_cache.bench.measure import describe_run, print_rows, progress_bar
from mamba_cache.bench.no_model import NoModel
from mamba_cache.bench.options import budget, count, gibibytes, one_of, share
from mamba_cache.bench.workload import (
    TOKENS_PER_HASH_ID,
    WORKLOADS,
    TraceRequest,
    prompt_tokens,
    read_trace,
)
from mamba_cache.config import CacheConfig
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.model_shapes import load_shape
from mamba_cache.reference import Engine, SamplingParams
from mamba_cache.slots import (
    SLOT_POLICIES,
    CheckpointPlacement,
    EveryNthBlock,
    LastBlock,
    MegatronPlacement,
    PrefixSlotPolicy,
    SlotEvictionPolicy,
)

__all__ = [
    "PLACEMENTS",
    "POLICIES",
    "DecisionTimes",
    "add_replay_options",
    "print_replay",
    "replay",
    "run_replay",
    "split_budget",
]

POLICIES: dict[str, Callable[[], SlotEvictionPolicy]] = {**SLOT_POLICIES}
"""Eviction policies by name."""

PLACEMENTS: dict[str, Callable[[], CheckpointPlacement]] = {
    "megatron": MegatronPlacement,
    "last": LastBlock,
    "every": lambda: EveryNthBlock(1),
}
"""Placements by name."""

_MOST_GIB = 10**6

_FIRST_TOKEN = SamplingParams(max_new_tokens=1)


def add_replay_options(command: Any) -> None:
    """Add what ``run_replay`` takes to an ``ArgumentParser``."""
    command.add_argument("--trace", metavar="FILE", help="JSON lines; default: a drawn workload")
    command.add_argument(
        "--workload",
        type=one_of(WORKLOADS),
        default="conversations",
        metavar="NAME",
        help=f"what is drawn: {', '.join(WORKLOADS)}",
    )
    command.add_argument(
        "--limit", type=count, metavar="N", help="requests to replay, from the first"
    )
    # Where one is left out, run_replay has its own default; `extend` would add to one given here.
    many: dict[str, Any] = {"nargs": "+", "action": "extend", "default": argparse.SUPPRESS}
    command.add_argument(
        "--slots",
        type=budget,
        metavar="N",
        help="numbers, or unlimited; default: 50 200 unlimited",
        **many,
    )
    command.add_argument(
        "--kv-blocks", type=budget, metavar="N", help="a number; default: unlimited"
    )
    command.add_argument(
        "--policy",
        type=one_of(POLICIES),
        dest="policies",
        metavar="NAME",
        help=f"eviction: {', '.join(POLICIES)}; default: all",
        **many,
    )
    command.add_argument(
        "--placement",
        type=one_of(PLACEMENTS),
        dest="placements",
        metavar="NAME",
        help=f"where states are saved: {', '.join(PLACEMENTS)}; default: megatron last",
        **many,
    )
    command.add_argument(
        "--cache-gb",
        type=gibibytes,
        metavar="GIB",
        help="memory for slots and KV blocks of --model's sizes, in place of both numbers",
    )
    command.add_argument(
        "--state-share",
        type=share,
        default=0.25,
        metavar="SHARE",
        help="how much of --cache-gb slots get; default: 0.25",
    )
    command.add_argument(
        "--model",
        default="nemotron-h-8b",
        metavar="MODEL",
        help="as for mamba-cache plan; default: nemotron-h-8b",
    )
    command.add_argument(
        "--hints-wrong",
        type=share,
        metavar="SHARE",
        help="tell with each request whether a longer one follows, wrongly so often; "
        "default: nothing is told",
    )
    command.add_argument(
        "--max-tokens", type=count, default=8192, metavar="N", help="tokens of a step"
    )


def run_replay(
    *,
    trace: str | None = None,
    workload: str = "conversations",
    limit: int | None = None,
    slots: Sequence[int | None] = (50, 200, None),
    kv_blocks: int | None = None,
    policies: Sequence[str] = tuple(POLICIES),
    placements: Sequence[str] = ("megatron", "last"),
    cache_gb: float | None = None,
    state_share: float = 0.25,
    model: str = "nemotron-h-8b",
    hints_wrong: float | None = None,
    max_tokens: int = 8192,
) -> dict[str, Any]:
    """Replay one trace under every combination of placement, policy and slots.

    It takes what ``add_replay_options`` adds; a budget of None never runs out.

    Returns:
        "records": what ``replay`` returns for each combination; "workload": what was replayed;
        "passed": whether every request found room; and what every benchmark says of its run.

    Raises:
        InvalidArgumentError: The trace cannot be read, or a setting is out of range.
    """
    _check_names("policies", policies, POLICIES)
    _check_names("placements", placements, PLACEMENTS)
    requests = _load(trace, workload, limit)
    split: dict[str, Any] = {}
    if cache_gb is not None:
        of_states, kv_blocks = split_budget(model, cache_gb, state_share)
        slots = [of_states]
        split = {"cache_gb": cache_gb, "state_share": state_share, "model": model}
    hints = None if hints_wrong is None else _hints(requests, hints_wrong)
    runs = list(product(placements, policies, slots))
    records = []
    with progress_bar("replay", len(runs)) as show:
        for number, (placement, policy, max_slots) in enumerate(runs):
            remark = f"{placement}, {policy}, {_say(max_slots)} slots"
            config = _fit(requests, max_slots, kv_blocks, max_tokens)
            engine = Engine(
                NoModel(), config, slot_policy=POLICIES[policy](), placement=PLACEMENTS[placement]()
            )
            settings = {"placement": placement, "policy": policy}
            budgets = {"slots": max_slots, "kv_blocks": kv_blocks}
            told = _tell(requests, show, number, remark)
            records.append(settings | budgets | replay(engine, told, hints))
    total = sum(request.input_length for request in requests)
    return describe_run("replay") | {
        "passed": not any(record["failed_requests"] for record in records),
        "workload": {
            "source": workload if trace is None else "trace",
            "requests": len(requests),
            "prompt_tokens": total,
            "mean_prompt_tokens": round(total / len(requests), 1),
        },
        "settings": {
            "block_size_tokens": TOKENS_PER_HASH_ID,
            "max_tokens": max_tokens,
            "hints_wrong": hints_wrong,
            **split,
        },
        "records": records,
    }


def split_budget(model: str, cache_gb: float, state_share: float) -> tuple[int, int]:
    """Return the slots and KV blocks that memory for both holds.

    Args:
        model: As for ``mamba-cache plan``.
        cache_gb: The memory in GiB.
        state_share: How much of it slots get, from 0 to 1.

    Raises:
        InvalidArgumentError: The model is not known, or there is not room for one of each.
    """
    check_number("cache_gb", cache_gb, maximum=_MOST_GIB)
    check_number("state_share", state_share, maximum=1)
    shape = load_shape(model)
    room = cache_gb * 2**30
    slots = int(room * state_share) // shape.state_spec.bytes_per_slot
    blocks = int(room * (1 - state_share)) // shape.kv_spec.bytes_per_block(TOKENS_PER_HASH_ID)
    if not slots or not blocks:
        raise InvalidArgumentError(
            f"cache_gb={cache_gb} with state_share={state_share} holds {slots} slots and "
            f"{blocks} blocks of {model}: at least one of each is needed"
        )
    return slots, blocks


def _hints(requests: Sequence[TraceRequest], wrong: float) -> list[bool]:
    """Say of each request whether a later prompt goes on from its last whole block.

    Args:
        requests: The trace.
        wrong: How many of the answers are turned round, from 0 to 1; 0.5 makes them random.
    """
    check_number("hints_wrong", wrong, maximum=1)
    later: set[int] = set()
    hints = []
    for request in reversed(requests):
        whole = request.hash_ids[: request.input_length // TOKENS_PER_HASH_ID]
        hints.append(bool(whole) and whole[-1] in later)
        later.update(whole)
    turned = np.random.default_rng(0).random(len(hints)) < wrong
    pairs = zip(reversed(hints), turned.tolist(), strict=True)
    return [hint != is_turned for hint, is_turned in pairs]


def replay(
    engine: Engine, requests: Iterable[TraceRequest], hints: Sequence[bool] | None = None
) -> dict[str, Any]:
    """Run requests one after the other, each to its first token.

    Args:
        engine: A new one, around ``NoModel``.
        requests: In the order in which they come.
        hints: What each says of a longer one to follow; None: nothing.

    Returns:
        Counts of requests, tokens, states and evictions; "token_hit_rate": the share of prompt
        tokens that were skipped; "kv_hit_rate": the share whose keys and values were found, which
        is the most that states could make of it; "us_per_request": the median CPU time to hash,
        admit, schedule, commit and finish one; "decision_us_mean" and "decision_us_worst": the
        part of it that a policy which knows prompts takes.
    """
    seconds, failed, total = [], 0, 0
    decisions = DecisionTimes(engine.context.slot_allocator.policy)
    for number, request in enumerate(requests):
        tokens = prompt_tokens(request)
        total += len(tokens)
        hint = None if hints is None else hints[number]
        start = time.process_time()  # unlike the clock, it bears neighbours on the machine
        engine.submit(tokens, _FIRST_TOKEN, will_continue=hint)
        ends = [event.completion for event in engine.stream() if event.completion]
        seconds.append(time.process_time() - start)
        decisions.end_request()
        failed += sum(end.error is not None for end in ends)
    engine.context.check_invariants()
    stats = engine.context.stats()
    matched = stats.kv_matched_blocks * engine.context.config.block_size_tokens
    return {
        "requests": len(seconds),
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
        **decisions.summary(),
    }


def print_replay(result: dict[str, Any]) -> None:
    """Print a result of ``run_replay`` as a table for people."""
    header = ("placement", "policy", "slots", "hit", "saved", "refused", "evicted", "time")
    rows = [
        (
            record["placement"],
            record["policy"],
            _say(record["slots"]),
            f"{record['token_hit_rate']:.1%}",
            f"{record['saved_states']:,}",
            f"{record['refused_states']:,}",
            f"{record['evicted_slots']:,}",
            f"{record['us_per_request']:,.0f} us",
        )
        for record in result["records"]
    ]
    print_rows(header, rows)
    workload = result["workload"]
    print(
        f"{workload['requests']:,} requests, {workload['mean_prompt_tokens']:,.0f} prompt tokens "
        "each.\n"
        "hit: tokens not computed; saved, refused, evicted: states; time: of a CPU for one request"
    )


class DecisionTimes:
    """CPU seconds that a policy which knows prompts spends on each request.

    Meanwhile Python's garbage collector waits: it looks at all that the process has, whoever's call
    it strikes in.

    Args:
        policy: Its methods are replaced by ones that are timed. Of simple ones nothing is.

    Attributes:
        by_request: Of each request so far.
    """

    _TIMED = ("on_request", "admit", "on_reserved", "on_published", "on_removed", "least_loss")

    def __init__(self, policy: SlotEvictionPolicy) -> None:
        self.by_request: list[float] = []
        self._spent = 0.0
        if isinstance(policy, PrefixSlotPolicy):
            for name in self._TIMED:
                setattr(policy, name, self._timed(getattr(policy, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            collects = gc.isenabled()
            gc.disable()
            start = time.process_time()
            try:
                return method(*args)
            finally:
                self._spent += time.process_time() - start
                if collects:
                    gc.enable()

        return run

    def end_request(self) -> None:
        """Begin to count for the next request."""
        self.by_request.append(self._spent)
        self._spent = 0.0

    def summary(self) -> dict[str, float]:
        """Return the mean and the worst in microseconds."""
        mean = sum(self.by_request) / len(self.by_request)
        worst = max(self.by_request)
        return {
            "decision_us_mean": round(mean * 1e6, 1),
            "decision_us_worst": round(worst * 1e6, 1),
        }


def _tell(
    requests: Sequence[TraceRequest], show: Callable[[float, str], None], number: int, remark: str
) -> Iterator[TraceRequest]:
    """Yield the requests of a replay, and show how many replays are done before each of them."""
    for index, request in enumerate(requests):
        show(number + index / len(requests), remark)
        yield request


def _load(trace: str | None, workload: str, limit: int | None) -> list[TraceRequest]:
    if limit is not None:
        check_int("limit", limit, minimum=1)
    if trace is not None:
        return read_trace(trace, limit)
    _check_names("workload", [workload], WORKLOADS)
    draw = WORKLOADS[workload]
    return draw() if limit is None else draw(limit)


def _check_names(argument: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check names.

    Raises:
        InvalidArgumentError: One is not known.
    """
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InvalidArgumentError(f"{argument} must be of {list(known)}, got {unknown}")


def _fit(
    requests: Sequence[TraceRequest],
    max_slots: int | None,
    num_kv_blocks: int | None,
    max_tokens: int,
) -> CacheConfig:
    """Return settings for requests that come one at a time; a budget of None never runs out.

    A block is what one hash id names: of smaller ones the trace does not tell which are equal.
    """
    check_int("max_tokens", max_tokens, minimum=1)
    longest = max(request.input_length for request in requests) + 1
    names = {hash_id for request in requests for hash_id in request.hash_ids}
    # All blocks that can ever be cached, and those of the longest request beside them.
    enough = len(names) + -(-longest // TOKENS_PER_HASH_ID)
    return CacheConfig(
        block_size_tokens=TOKENS_PER_HASH_ID,
        ssm_chunk_size=TOKENS_PER_HASH_ID,
        max_requests=1,
        max_tokens=max_tokens,
        max_sequence_length=longest,
        num_kv_blocks=enough if num_kv_blocks is None else num_kv_blocks,
        max_slots=enough if max_slots is None else max_slots,
        max_checkpoints_per_step=max_tokens // TOKENS_PER_HASH_ID + 1,
    )


def _say(budget: int | None) -> str:
    return "unlimited" if budget is None else f"{budget:,}"
