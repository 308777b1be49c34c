"""``mamba-cache replay``: what a trace of requests would hit, under budgets and policies.

The package's own control plane runs without a model. Each request runs to its first token before
the next one begins: a trace does not hold the tokens of answers.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final

import typer

from mamba_cache._checks import check_int
from mamba_cache.cli.bound import bound_of
from mamba_cache.cli.output import AsJson, console, make_table, print_json
from mamba_cache.cli.traces import TraceRequest, prompt_tokens, read_trace
from mamba_cache.config import CacheConfig
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference import Engine, SamplingParams
from mamba_cache.reference.no_model import NoModel
from mamba_cache.slots import (
    SLOT_POLICIES,
    CheckpointPlacement,
    EveryNthBlock,
    LastBlock,
    MegatronPlacement,
    PrefixSlotPolicy,
    SlotEvictionPolicy,
)

__all__ = ["PLACEMENTS", "DecisionTimes", "replay", "replay_config", "replay_engine", "run_replay"]

PLACEMENTS: dict[str, Callable[[], CheckpointPlacement]] = {
    "megatron": MegatronPlacement,
    "last": LastBlock,
    "every": lambda: EveryNthBlock(1),
}
"""Placements by name."""

_FIRST_TOKEN: Final = SamplingParams(max_new_tokens=1)
_UNLIMITED: Final = "unlimited"
_PROGRESS_SECONDS: Final = 20.0


def replay(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A file of JSON lines, or .gz.")],
    *,
    slots: Annotated[
        str, typer.Option(metavar="N,...", help="Budgets of slots: numbers, or unlimited.")
    ] = "50,200,unlimited",
    kv_blocks: Annotated[
        str, typer.Option(metavar="N", help="Budget of KV blocks: a number, or unlimited.")
    ] = _UNLIMITED,
    policy: Annotated[
        str, typer.Option(metavar="NAME,...", help=f"Eviction, of {', '.join(SLOT_POLICIES)}.")
    ] = ",".join(SLOT_POLICIES),
    placement: Annotated[
        str, typer.Option(metavar="NAME", help=f"Checkpoints: one of {', '.join(PLACEMENTS)}.")
    ] = "megatron",
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Requests to replay. Default: all.")
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens of a hash. Default: the trace's, else 512."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of a step.")] = 8192,
    bound: Annotated[
        bool,
        typer.Option("--bound", help="Add the most that any cache could skip; needs scipy."),
    ] = False,
    as_json: AsJson = False,
) -> None:
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
        progress=_progress_lines(),
    )
    if as_json:
        print_json(result)
    else:
        _show(result)
    if not result["passed"]:
        raise typer.Exit(1)


def run_replay(
    requests: Sequence[TraceRequest],
    *,
    slots: Sequence[int | None] = (50, 200, None),
    kv_blocks: int | None = None,
    policies: Sequence[str] = tuple(SLOT_POLICIES),
    placement: str = "megatron",
    max_tokens: int = 8192,
    bound: bool = False,
    progress: Callable[[float, str], None] = lambda share, what: None,
) -> dict[str, Any]:
    """Replay requests under every combination of policy and slots.

    Args:
        requests: In the order in which they come; all of one block size.
        slots: Budgets of slots; None never runs out.
        kv_blocks: The budget of KV blocks; None never runs out.
        policies: Names of ``SLOT_POLICIES``.
        placement: One name of ``PLACEMENTS``.
        max_tokens: Tokens of a step.
        bound: Whether each record has the linear program's bound.
        progress: Called before each request with the share that is done, and what runs.

    Returns:
        "records": what one replay counted, for each combination, with its budgets; "workload":
        what was replayed; "passed": whether every request found room.

    Raises:
        InvalidArgumentError: A setting is out of range.
        MissingExtraError: A bound is asked for and scipy is not installed.
    """
    _check_names("policies", policies, SLOT_POLICIES)
    _check_names("placement", [placement], PLACEMENTS)
    bounds = {
        states: bound_of(requests, states, num_blocks=kv_blocks)
        for states in (set(slots) if bound else ())
    }
    runs = [(policy, states) for policy in policies for states in slots]
    records: list[dict[str, Any]] = []
    for number, (policy, states) in enumerate(runs):
        engine = Engine(
            NoModel(),
            replay_config(requests, states, kv_blocks, max_tokens),
            slot_policy=SLOT_POLICIES[policy](),
            placement=PLACEMENTS[placement](),
        )
        what = f"{policy}, {_budget_text(states)} slots"
        record = replay_engine(engine, _watched(requests, progress, number, len(runs), what))
        if bound:
            found = bounds[states]
            record |= {
                "bound": round(found.token_hit_rate, 4),
                "bound_is_solved": found.is_solved,
            }
        records.append(
            {"placement": placement, "policy": policy, "slots": states, "kv_blocks": kv_blocks}
            | record
        )
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


def replay_engine(engine: Engine, requests: Iterable[TraceRequest]) -> dict[str, Any]:
    """Run requests one after the other, each to its first token.

    Args:
        engine: A new one, around ``NoModel``.
        requests: In the order in which they come.

    Returns:
        Counts of requests, tokens, states and evictions; "token_hit_rate": the share of prompt
        tokens that were skipped; "kv_hit_rate": the share whose KV blocks were found, an upper
        limit for it; "us_per_request": the median CPU time to hash, admit, schedule, commit and
        finish a request; "decision_us_mean" and "decision_us_worst": the policy's part of it.
    """
    seconds, failed, total = [], 0, 0
    decisions = DecisionTimes(engine.context.slot_allocator.policy)
    for request in requests:
        tokens = prompt_tokens(request)
        total += len(tokens)
        start = time.process_time()  # not wall time: other processes do not count
        engine.submit(
            tokens, _FIRST_TOKEN, will_continue=request.will_continue, cache_salt=request.tenant
        )
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


def replay_config(
    requests: Sequence[TraceRequest],
    max_slots: int | None,
    num_kv_blocks: int | None,
    max_tokens: int = 8192,
) -> CacheConfig:
    """Return settings for requests that come one at a time; a budget of None never runs out.

    A block has as many tokens as a hash id of the trace stands for.
    """
    check_int("max_tokens", max_tokens, minimum=1)
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


class DecisionTimes:
    """CPU seconds that a policy which knows prompts spends on each request.

    Reading the clock is subtracted, and Python's garbage collector waits during a call: its time
    depends on the whole process.

    Args:
        policy: Its methods are replaced by timed ones. Simple policies are not timed.

    Attributes:
        by_request: Seconds of each request so far.
    """

    _TIMED = ("on_request", "admit", "on_reserved", "on_published", "on_removed", "least_loss")

    def __init__(self, policy: SlotEvictionPolicy) -> None:
        self.by_request: list[float] = []
        self._spent = 0.0
        self._of_clock = min(-time.thread_time() + time.thread_time() for _ in range(1_000))
        if isinstance(policy, PrefixSlotPolicy):
            for name in self._TIMED:
                setattr(policy, name, self._timed(getattr(policy, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            collects = gc.isenabled()
            gc.disable()
            start = time.thread_time()
            try:
                return method(*args)
            finally:
                self._spent += time.thread_time() - start - self._of_clock
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
        return {
            "decision_us_mean": round(mean * 1e6, 1),
            "decision_us_worst": round(max(self.by_request) * 1e6, 1),
        }


def _show(result: dict[str, Any]) -> None:
    records, workload = result["records"], result["workload"]
    has_bound = any("bound" in record for record in records)
    header = ["policy", ">slots", ">hit", *([">bound"] if has_bound else []), ">saved", ">time"]
    table = make_table(header)
    for record in records:
        table.add_row(
            record["policy"],
            _budget_text(record["slots"]),
            f"{record['token_hit_rate']:.1%}",
            *([f"{record['bound']:.1%}"] if has_bound else []),
            f"{record['saved_states']:,}",
            f"{record['us_per_request']:,.0f} us",
        )
    out = console()
    out.print(table)
    out.print(
        f"{workload['requests']:,} requests, {workload['mean_prompt_tokens']:,.0f} prompt tokens "
        f"each; placement {records[0]['placement']}.\n"
        "hit: prompt tokens not computed; saved: states; time: CPU time of one request"
    )
    if has_bound:
        out.print("bound: an upper limit for any cache of this size, future requests known")
    failed = sum(record["failed_requests"] for record in records)
    if failed:
        out.print(f"{failed:,} requests failed: --kv-blocks does not hold them")


def _watched(
    requests: Sequence[TraceRequest],
    progress: Callable[[float, str], None],
    number: int,
    num_runs: int,
    what: str,
) -> Iterator[TraceRequest]:
    for index, request in enumerate(requests):
        progress((number + index / len(requests)) / num_runs, what)
        yield request


def _progress_lines() -> Callable[[float, str], None]:
    """Return what prints a line to stderr every 20 seconds."""
    last = time.monotonic()

    def progress(share: float, what: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PROGRESS_SECONDS:
            last = now
            print(f"replay: {share:.0%}, {what}", file=sys.stderr, flush=True)

    return progress


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
