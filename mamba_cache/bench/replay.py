"""The replay of a trace of requests: what it would hit, by the real control plane and no model.

Each request runs to its first token before the next one comes: the tokens of answers are in no
trace, so there would be nothing to find of them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from mamba_cache._checks import check_int, check_number
from mamba_cache.bench.bound import Bound, bound_of
from mamba_cache.bench.measure import describe_run, print_rows, progress_bar
from mamba_cache.bench.options import budget, count, one_of, positive, share
from mamba_cache.bench.replay_tiers import CostMeter, Costs, TierSizes, engine_with_tiers
from mamba_cache.bench.traces import TOKENS_PER_HASH_ID, TraceRequest, prompt_tokens, read_trace
from mamba_cache.bench.workload import WORKLOADS
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
    "DecisionTimes",
    "add_replay_options",
    "print_replay",
    "replay",
    "run_replay",
    "split_budget",
]

PLACEMENTS: dict[str, Callable[[], CheckpointPlacement]] = {
    "megatron": MegatronPlacement,
    "last": LastBlock,
    "every": lambda: EveryNthBlock(1),
}
"""Placements by name."""

_MOST_GIB = 10**6
_STATE_SHARE = 0.75
"""What part of a tier's GiB states get where KV blocks are limited: ``host_state_share``."""

_FIRST_TOKEN = SamplingParams(max_new_tokens=1)


def add_replay_options(command: Any) -> None:
    """Add what ``run_replay`` takes to an ``ArgumentParser``."""
    add = command.add_argument
    many: dict[str, Any] = {"nargs": "+", "action": "extend"}
    add("--trace", metavar="FILE", help="JSON lines; default: a drawn workload")
    about = f"what is drawn: {', '.join(WORKLOADS)}; default: conversations"
    add("--workload", type=one_of(WORKLOADS), metavar="NAME", help=about)
    add("--limit", type=count, metavar="N", help="requests to replay, from the first")
    about = "tokens that a hash stands for; default: what the trace says, else 512"
    add("--block-size", type=count, metavar="N", help=about)
    about = "numbers, or unlimited; default: 50 200 unlimited"
    add("--slots", type=budget, metavar="N", help=about, **many)
    add("--kv-blocks", type=budget, metavar="N", help="a number; default: unlimited")
    about = f"eviction: {', '.join(SLOT_POLICIES)}; default: all"
    add("--policy", type=one_of(SLOT_POLICIES), dest="policies", metavar="NAME", help=about, **many)
    about = f"where states are saved: {', '.join(PLACEMENTS)}; default: megatron last"
    add("--placement", type=one_of(PLACEMENTS), dest="placements", metavar="NAME", help=about,
        **many)  # fmt: skip
    about = "memory for slots and KV blocks of --model's sizes, in place of both numbers"
    add("--cache-gb", type=positive, metavar="GIB", help=about)
    about = "how much of --cache-gb slots get, one or more to compare; default: 0.25"
    add("--state-share", type=share, dest="state_shares", metavar="SHARE", help=about, **many)
    about = "states that a tier in host memory has room for; default: no tiers"
    add("--host-slots", type=count, metavar="N", help=about)
    add("--host-gb", type=positive, metavar="GIB", help="memory of it, in place of the number")
    add("--disk-slots", type=count, metavar="N", help="states on a disk below it; default: none")
    add("--disk-gb", type=positive, metavar="GIB", help="the disk's size, in place of the number")
    about = "prompt tokens that the model computes in a second; default: 12000"
    add("--prefill-rate", type=positive, metavar="X", help=about)
    about = "GB/s of loads from the host tier; default: 20"
    add("--host-rate", type=positive, metavar="X", help=about)
    about = "GB/s of reads from the disk; default: 2"
    add("--disk-rate", type=positive, metavar="X", help=about)
    about = "as for mamba-cache plan; default: nemotron-h-8b"
    add("--model", metavar="MODEL", help=about)
    about = "tell with each request whether a longer one follows, wrongly so often; default: "
    about += "nothing is told"
    add("--hints-wrong", type=share, metavar="SHARE", help=about)
    add("--max-tokens", type=count, metavar="N", help="tokens of a step; default: 8192")
    about = "beside each figure the most that a cache could skip which knows the future; needs "
    about += "scipy"
    add("--bound", action="store_true", help=about)


def run_replay(
    *,
    trace: str | None = None,
    workload: str = "conversations",
    limit: int | None = None,
    block_size: int | None = None,
    slots: Sequence[int | None] = (50, 200, None),
    kv_blocks: int | None = None,
    policies: Sequence[str] = tuple(SLOT_POLICIES),
    placements: Sequence[str] = ("megatron", "last"),
    cache_gb: float | None = None,
    state_shares: Sequence[float] | None = None,
    host_slots: int | None = None,
    host_gb: float | None = None,
    disk_slots: int | None = None,
    disk_gb: float | None = None,
    model: str = "nemotron-h-8b",
    prefill_rate: float | None = None,
    host_rate: float | None = None,
    disk_rate: float | None = None,
    hints_wrong: float | None = None,
    max_tokens: int = 8192,
    bound: bool = False,
) -> dict[str, Any]:
    """Replay one trace under every combination of placement, policy and slots.

    It takes what ``add_replay_options`` adds; a budget of None never runs out, and has no tiers
    below it.

    Returns:
        "records": what ``replay`` returns for each combination, with its budgets; "workload": what
        was replayed; "passed": whether every request found room; and what every benchmark says of
        its run.

    Raises:
        InvalidArgumentError: The trace cannot be read, or a setting is out of range.
        MissingExtraError: A bound is asked for and scipy is not installed.
        OSError: There is no room for the files of a disk tier.
    """
    _check_names("policies", policies, SLOT_POLICIES)
    _check_names("placements", placements, PLACEMENTS)
    requests = _load(trace, workload, limit, block_size)
    size = requests[0].block_size
    shape = load_shape(model)
    rates = {"prefill_rate": prefill_rate, "host_rate": host_rate, "disk_rate": disk_rate}
    costs = Costs.of(shape, size, **rates)
    budgets: list[_Budget] = [_Budget(each, kv_blocks) for each in slots]
    split: dict[str, Any] = {}
    if cache_gb is None and state_shares is not None:
        raise InvalidArgumentError(f"state_shares divide cache_gb: give both, got {state_shares}")
    if cache_gb is not None:
        state_shares = (0.25,) if state_shares is None else state_shares
        budgets = [
            _Budget(*split_budget(model, cache_gb, each, block_size=size), each)
            for each in state_shares
        ]
        split = {"cache_gb": cache_gb, "model": model}
        if len(state_shares) == 1:
            split["state_share"] = state_shares[0]
    host, disk = _Room("host", host_slots, host_gb), _Room("disk", disk_slots, disk_gb)
    budgets = [each._replace(tiers=_tiers_below(each, host, disk, costs)) for each in budgets]
    hints = None if hints_wrong is None else _hints(requests, hints_wrong)
    bounds = {}
    for states, blocks in {_room(each) for each in budgets} if bound else ():
        bounds[states, blocks] = bound_of(requests, states, num_blocks=blocks)
    runs = list(product(placements, policies, budgets))
    records = []
    with progress_bar("replay", len(runs)) as show:
        for number, (placement, policy, each) in enumerate(runs):
            remark = f"{placement}, {policy}, {_say(each.slots)} slots"
            config = _fit(requests, each.slots, each.kv_blocks, max_tokens)
            told = _tell(requests, show, number, remark)
            with engine_with_tiers(
                config,
                each.tiers,
                costs,
                keeps_kv=each.kv_blocks is not None,
                policy=SLOT_POLICIES[policy](),
                placement=PLACEMENTS[placement](),
            ) as engine:
                record = replay(engine, told, hints, costs=costs)
            settings = {"placement": placement, "policy": policy}
            if bound:
                record |= _describe_bound(bounds[_room(each)])
            records.append(settings | each.described() | record)
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
            "block_size_tokens": size,
            "max_tokens": max_tokens,
            "hints_wrong": hints_wrong,
            **split,
        },
        "costs": asdict(costs) | {"model": model},
        "records": records,
    }


class _Budget(NamedTuple):
    """What one replay has room for."""

    slots: int | None  # None: enough
    kv_blocks: int | None  # None: enough
    state_share: float | None = None  # which part of one budget the slots are
    tiers: TierSizes | None = None

    def described(self) -> dict[str, Any]:
        """Return it as a record has it."""
        described: dict[str, Any] = {"slots": self.slots, "kv_blocks": self.kv_blocks}
        if self.state_share is not None:
            described["state_share"] = self.state_share
        return described if self.tiers is None else described | {"tiers": asdict(self.tiers)}


class _Room(NamedTuple):
    """What was asked of a tier: a number of states, or GiB; neither: there is no such tier."""

    name: str
    states: int | None
    gb: float | None

    def entries(self, budget: _Budget, costs: Costs) -> tuple[int, int]:
        """Return the states and KV blocks that it holds below a budget of the GPU's."""
        if self.states is not None and self.gb is not None:
            raise InvalidArgumentError(f"give {self.name}_slots or {self.name}_gb, not both")
        if self.states is not None:
            # As many blocks to a state as on the GPU.
            ratio = (budget.kv_blocks or 0) / max(budget.slots or 0, 1)
            return self.states, int(self.states * ratio)
        share = _STATE_SHARE if budget.kv_blocks is not None and costs.block_bytes else 1.0
        room = check_number(f"{self.name}_gb", self.gb or 0.0, maximum=1e9) * 2**30
        states = int(room * share) // costs.state_bytes
        if self.gb is not None and not states:
            raise InvalidArgumentError(
                f"{self.name}_gb={self.gb} holds no state of {costs.state_bytes} bytes"
            )
        return states, int(room * (1 - share)) // costs.block_bytes if share < 1 else 0


def _tiers_below(budget: _Budget, host: _Room, disk: _Room, costs: Costs) -> TierSizes | None:
    """Return what lies below a budget of the GPU's; None: nothing."""
    if host.states is None and host.gb is None:
        if disk.states is not None or disk.gb is not None:
            raise InvalidArgumentError("a disk needs a host tier: give host_slots or host_gb")
        return None
    if budget.slots is None:
        return None
    return TierSizes(*host.entries(budget, costs), *disk.entries(budget, costs))


def _room(budget: _Budget) -> tuple[int | None, int | None]:
    """Return the states and KV blocks that all tiers together have room for."""
    slots, blocks, tiers = budget.slots, budget.kv_blocks, budget.tiers
    if tiers is not None and slots is not None:
        slots += tiers.host_states + tiers.disk_states
    if tiers is not None and blocks is not None:
        blocks += tiers.host_blocks + tiers.disk_blocks
    return slots, blocks


def _describe_bound(found: Bound) -> dict[str, Any]:
    return {"bound": round(found.token_hit_rate, 4), "bound_is_solved": found.is_solved}


def split_budget(
    model: str, cache_gb: float, state_share: float, *, block_size: int = TOKENS_PER_HASH_ID
) -> tuple[int, int]:
    """Return the slots and KV blocks that memory for both holds.

    Raises:
        InvalidArgumentError: The model is not known, or there is not room for one of each.
    """
    check_number("cache_gb", cache_gb, maximum=_MOST_GIB)
    check_number("state_share", state_share, maximum=1)
    shape = load_shape(model)
    room = cache_gb * 2**30
    slots = int(room * state_share) // shape.state_spec.bytes_per_slot
    blocks = int(room * (1 - state_share)) // shape.kv_spec.bytes_per_block(block_size)
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
        whole = request.whole_ids
        hints.append(bool(whole) and whole[-1] in later)
        later.update(whole)
    turned = np.random.default_rng(0).random(len(hints)) < wrong
    pairs = zip(reversed(hints), turned.tolist(), strict=True)
    return [hint != is_turned for hint, is_turned in pairs]


def replay(
    engine: Engine,
    requests: Iterable[TraceRequest],
    hints: Sequence[bool] | None = None,
    *,
    costs: Costs | None = None,
) -> dict[str, Any]:
    """Run requests one after the other, each to its first token.

    Args:
        engine: A new one, around ``NoModel``.
        requests: In the order in which they come.
        hints: What each says of a longer one to follow; None: what the trace has.
        costs: What computing and loading take; None: times and FLOPs are not estimated.

    Returns:
        Counts of requests, tokens, states and evictions; "token_hit_rate": the share of prompt
        tokens that were skipped; "kv_hit_rate": the share whose keys and values were found, which
        is the most that states could make of it; "us_per_request": the median CPU time to hash,
        admit, schedule, commit and finish one; "decision_us_mean" and "decision_us_worst": the
        part of it that a policy which knows prompts takes; with ``costs``
        "saved_flops", "ttft_ms_mean", "ttft_ms_p95" and "uncached_ttft_ms_mean", estimated, and
        for each tier the requests that loaded from it and what it stored.
    """
    seconds, failed, total = [], 0, 0
    decisions = DecisionTimes(engine.context.slot_allocator.policy)
    meter = None if costs is None else CostMeter(engine, costs)
    for number, request in enumerate(requests):
        tokens = prompt_tokens(request)
        total += len(tokens)
        hint = request.will_continue if hints is None else hints[number]
        start = time.process_time()  # unlike the clock, it bears neighbours on the machine
        engine.submit(tokens, _FIRST_TOKEN, will_continue=hint, cache_salt=request.tenant)
        ends = [event.completion for event in engine.stream() if event.completion]
        seconds.append(time.process_time() - start)
        decisions.end_request()
        if meter is not None:
            meter.end_request(len(tokens))
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
        **({} if meter is None else meter.summary()),
    }


def print_replay(result: dict[str, Any]) -> None:
    """Print a result of ``run_replay`` as a table for people."""
    has_bound = any("bound" in record for record in result["records"])
    header = ("placement", "policy", "slots", "hit", *(["bound"] if has_bound else []),
              "saved", "1st token", "time")  # fmt: skip
    rows = [
        (
            record["placement"],
            record["policy"],
            _say_rooms(record),
            f"{record['token_hit_rate']:.1%}",
            *([f"{record['bound']:.1%}"] if has_bound else []),
            f"{record['saved_states']:,}",
            f"{record['ttft_ms_mean']:,.0f} ms",
            f"{record['us_per_request']:,.0f} us",
        )
        for record in result["records"]
    ]
    print_rows(header, rows)
    workload, costs = result["workload"], result["costs"]
    uncached = result["records"][0]["uncached_ttft_ms_mean"]
    print(
        f"{workload['requests']:,} requests, {workload['mean_prompt_tokens']:,.0f} prompt tokens "
        "each.\n"
        "hit: tokens not computed; saved: states; time: of a CPU for one request\n"
        f"1st token: estimated mean, {uncached:,.0f} ms without a cache, at "
        f"{costs['prefill_rate']:,.0f} tokens a second"
    )
    if has_bound:
        print("bound: what a cache could skip at most that knows all requests, also those to come")


def _say_rooms(record: Mapping[str, Any]) -> str:
    """Say how many states the GPU and its tiers hold, and what part of one budget slots have."""
    tiers = record.get("tiers")
    rooms = [record["slots"]]
    if tiers is not None:
        rooms += [tiers["host_states"], *([tiers["disk_states"]] if tiers["disk_states"] else [])]
    text = " + ".join(map(_say, rooms))
    return f"{text} ({record['state_share']:.0%})" if "state_share" in record else text


class DecisionTimes:
    """CPU seconds that a policy which knows prompts spends on each request.

    They are those of the thread that calls it: the threads of tiers work beside it. What reading
    the clock takes is none of it. Meanwhile Python's garbage collector waits: it looks at all that
    the process has, whoever's call it strikes in.

    Args:
        policy: Its methods are replaced by ones that are timed. Of simple ones nothing is.

    Attributes:
        by_request: Of each request so far.
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


def _load(
    trace: str | None, workload: str, limit: int | None, block_size: int | None = None
) -> list[TraceRequest]:
    if limit is not None:
        check_int("limit", limit, minimum=1)
    if trace is not None:
        return read_trace(trace, limit, block_size=block_size)
    if block_size is not None:
        raise InvalidArgumentError("block_size is for traces: drawn workloads have blocks of 512")
    _check_names("workload", [workload], WORKLOADS)
    draw = WORKLOADS[workload]
    return draw() if limit is None else draw(limit)


def _check_names(argument: str, given: Iterable[str], known: Iterable[str]) -> None:
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
    size = requests[0].block_size
    longest = max(request.input_length for request in requests) + 1
    names = {(request.tenant, hash_id) for request in requests for hash_id in request.hash_ids}
    # All blocks that can ever be cached, and those of the longest request beside them.
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


def _say(budget: int | None) -> str:
    return "unlimited" if budget is None else f"{budget:,}"
