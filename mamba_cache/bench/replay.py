"""The replay of a trace of requests: what it would hit, by the real control plane and no model.

Each request runs to its first token before the next one comes: the tokens of answers are in no
trace, so there would be nothing to find of them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from mamba_cache._checks import check_int, check_number
from mamba_cache.bench.bound import Bound, bound_of
from mamba_cache.bench.measure import describe_run, print_rows, progress_bar
from mamba_cache.bench.options import budget, count, gibibytes, one_of, rate, share
from mamba_cache.bench.replay_tiers import (
    CostMeter,
    Costs,
    TierSizes,
    engine_with_tiers,
    sizes_in_budgets,
)
from mamba_cache.bench.traces import (
    TOKENS_PER_HASH_ID,
    TraceRequest,
    prompt_tokens,
    read_trace,
)
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
    command.add_argument(
        "--block-size",
        type=count,
        metavar="N",
        help="tokens that a hash stands for; default: what the trace says, else 512",
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
        dest="state_shares",
        metavar="SHARE",
        help="how much of --cache-gb slots get, one or more to compare; default: 0.25",
        **many,
    )
    _add_tier_options(command)
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
    command.add_argument(
        "--bound",
        action="store_true",
        help="beside each figure the most that a cache could skip which knows the future; "
        "needs scipy",
    )


def _add_tier_options(command: Any) -> None:
    numbers = (
        ("--host-slots", "states that a tier in host memory has room for; default: no tiers"),
        ("--host-blocks", "KV blocks there, where --kv-blocks limits those of the GPU; default: "
         "as many more as there are states"),
        ("--disk-slots", "states on a disk below it; default: no disk"),
        ("--disk-blocks", "KV blocks there; default: likewise"),
    )  # fmt: skip
    for option, about in numbers:
        command.add_argument(option, type=count, metavar="N", help=about)
    for option, about in (
        ("--host-gb", "memory of the host tier, in place of both numbers"),
        ("--disk-gb", "of the disk, likewise"),
    ):
        command.add_argument(option, type=gibibytes, metavar="GIB", help=about)
    command.add_argument(
        "--host-state-share",
        type=share,
        default=0.75,
        metavar="SHARE",
        help="how much of both states get where KV blocks are limited; default: 0.75",
    )
    command.add_argument(
        "--disk-write-on-use",
        type=count,
        default=1,
        metavar="N",
        help="1: the disk gets all that the host tier keeps; 2: what is used; default: 1",
    )
    for option, about in (
        ("--prefill-rate", "prompt tokens that the model computes in a second; default: 12000"),
        ("--host-rate", "GB/s of loads from the host tier; default: 20"),
        ("--disk-rate", "GB/s of reads from the disk; default: 2"),
    ):
        command.add_argument(option, type=rate, metavar="X", help=about)


def run_replay(
    *,
    trace: str | None = None,
    workload: str = "conversations",
    limit: int | None = None,
    block_size: int | None = None,
    slots: Sequence[int | None] = (50, 200, None),
    kv_blocks: int | None = None,
    policies: Sequence[str] = tuple(POLICIES),
    placements: Sequence[str] = ("megatron", "last"),
    cache_gb: float | None = None,
    state_shares: Sequence[float] = (0.25,),
    host_slots: int | None = None,
    host_blocks: int | None = None,
    host_gb: float | None = None,
    disk_slots: int | None = None,
    disk_blocks: int | None = None,
    disk_gb: float | None = None,
    host_state_share: float = 0.75,
    disk_write_on_use: int = 1,
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
    _check_names("policies", policies, POLICIES)
    _check_names("placements", placements, PLACEMENTS)
    requests = _load(trace, workload, limit, block_size)
    size = requests[0].block_size
    shape = load_shape(model)
    rates = {"prefill_rate": prefill_rate, "host_rate": host_rate, "disk_rate": disk_rate}
    costs = Costs.of(shape, size, **rates)
    budgets: list[_Budget] = [_Budget(each, kv_blocks) for each in slots]
    split: dict[str, Any] = {}
    if cache_gb is not None:
        budgets = [
            _Budget(*split_budget(model, cache_gb, each, block_size=size), each)
            for each in state_shares
        ]
        split = {"cache_gb": cache_gb, "model": model}
        if len(state_shares) == 1:
            split["state_share"] = state_shares[0]
    tiers = _Tiers(
        host_slots, host_blocks, host_gb, disk_slots, disk_blocks, disk_gb, host_state_share,
        disk_write_on_use,
    )  # fmt: skip
    budgets = [each._replace(tiers=tiers.below(each, costs)) for each in budgets]
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
                policy=POLICIES[policy](),
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
    """What one replay has room for.

    Attributes:
        slots: Slots; None: enough.
        kv_blocks: KV blocks; None: enough.
        state_share: Which part of one budget the slots are; None: they are given.
        tiers: What is below; None: nothing.
    """

    slots: int | None
    kv_blocks: int | None
    state_share: float | None = None
    tiers: TierSizes | None = None

    def described(self) -> dict[str, Any]:
        """Return it as a record has it."""
        described: dict[str, Any] = {"slots": self.slots, "kv_blocks": self.kv_blocks}
        if self.state_share is not None:
            described["state_share"] = self.state_share
        return described if self.tiers is None else described | {"tiers": asdict(self.tiers)}


class _Tiers(NamedTuple):
    """What was asked of tiers: the options of the same names."""

    host_slots: int | None
    host_blocks: int | None
    host_gb: float | None
    disk_slots: int | None
    disk_blocks: int | None
    disk_gb: float | None
    state_share: float
    write_on_use: int

    def below(self, budget: _Budget, costs: Costs) -> TierSizes | None:
        """Return what lies below a budget of the GPU's; None: nothing.

        Raises:
            InvalidArgumentError: Numbers and sizes are given for one tier, or a disk alone.
        """
        for name, number, gb in (
            ("host", self.host_slots, self.host_gb),
            ("disk", self.disk_slots, self.disk_gb),
        ):
            if number is not None and gb is not None:
                raise InvalidArgumentError(f"give {name}_slots or {name}_gb, not both")
        if self.host_slots is None and self.host_gb is None:
            if self.disk_slots is not None or self.disk_gb is not None:
                raise InvalidArgumentError("a disk needs a host tier: give host_slots or host_gb")
            return None
        if budget.slots is None:
            return None
        sizes = sizes_in_budgets(
            costs,
            self.host_gb,
            self.disk_gb,
            state_share=self.state_share,
            keeps_kv=budget.kv_blocks is not None,
            write_on_use=self.write_on_use,
            host_states=self.host_slots,
            disk_states=self.disk_slots,
        )
        if budget.kv_blocks is None:
            return sizes
        ratio = budget.kv_blocks / max(budget.slots, 1)
        blocks = {"host_blocks": self.host_blocks, "disk_blocks": self.disk_blocks}
        states = {"host_blocks": self.host_slots, "disk_blocks": self.disk_slots}
        for name, number in blocks.items():
            likewise = states[name]
            if number is None and likewise is not None:
                blocks[name] = int(likewise * ratio)
        return replace(sizes, **{name: n for name, n in blocks.items() if n is not None})


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

    Args:
        model: As for ``mamba-cache plan``.
        cache_gb: The memory in GiB.
        state_share: How much of it slots get, from 0 to 1.
        block_size: Tokens of a block.

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
