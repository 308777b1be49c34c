"""``mamba-cache plan``: budgets for a model, a GPU and a workload."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from mamba_cache._checks import check_int, check_number
from mamba_cache.cli.output import AsJson, console, make_table, print_json, size_text
from mamba_cache.cli.replay import run_replay
from mamba_cache.cli.traces import read_trace
from mamba_cache.config import CacheConfig
from mamba_cache.errors import BudgetError, InvalidArgumentError
from mamba_cache.integrations.model_shapes import BUILT_IN, ModelShape, load_shape
from mamba_cache.slots import MegatronPlacement, PlacementFacts
from mamba_cache.states import SlotQuantization

__all__ = [
    "GpuMemory",
    "Plan",
    "SplitOfTrace",
    "Workload",
    "make_plan",
    "plan",
    "plan_report",
    "split_by_trace",
    "suggest_block_size",
]

_GIB = 2**30
_MOST_GIB = 10**6
_MOST_BLOCK = 2**16
"""A plan goes through the lengths that prompts can have within a block."""

_USUAL_BLOCK = 256
_USUAL_LENGTH = 32_768
"""Tokens of the longest sequence, unless the mean is above."""

_SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
"""Shares of slots to try with a trace."""

_BLOCKS_PER_PREFIX = 8
"""Blocks that a shared prefix should have at least: one may be lost at its end."""

_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face config.json or its folder; the hub id of a model in this machine's "
        f"cache of the hub; or one of {', '.join(BUILT_IN)}. Nothing is downloaded.",
    ),
]
_Gib = partial(typer.Option, min=0, metavar="GIB")
_Memory = Annotated[
    float | None, _Gib(help="GPU memory, GiB of 2**30 bytes. Default: this machine's GPU.")
]
_Weights = Annotated[
    float | None,
    _Gib(
        help="The model's weights in GiB. Default: the files beside the config.json, or else all "
        "parameters in the configuration's dtype."
    ),
]
_Reserve = Annotated[
    float,
    typer.Option(
        metavar="X", min=0, max=1, help="Share of the memory for activations and all else."
    ),
]
_Count = partial(typer.Option, metavar="N", min=1)
_Prompt = Annotated[int, _Count(help="Tokens of a prompt, on average.")]
_Output = Annotated[int, _Count(help="Tokens of an answer, on average.")]
_Concurrency = Annotated[int, _Count(help="Requests that run at once.")]
_Shared = Annotated[
    int, typer.Option(metavar="N", min=0, help="Tokens that all prompts begin with.")
]
_BlockSize = Annotated[
    int | None, _Count(max=_MOST_BLOCK, help="Tokens of a block. Default: suggested.")
]
_Int8 = Annotated[bool, typer.Option("--int8", help="Keep saved states in 8 bits.")]
_Trace = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Requests to replay (as for `replay`): divides the memory as they hit the most.",
    ),
]
_Limit = Annotated[int, _Count(help="Requests of the trace to replay.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked of an engine, on average.

    Attributes:
        prompt_tokens: Tokens of a prompt.
        output_tokens: Tokens of an answer.
        concurrency: Requests that run at once.
        shared_tokens: Tokens that all prompts begin with, such as a system prompt.

    Raises:
        InvalidArgumentError: A number is out of range, or more is shared than prompts have.
    """

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "concurrency"):
            check_int(name, getattr(self, name), minimum=1)
        check_int("shared_tokens", self.shared_tokens, minimum=0, maximum=self.prompt_tokens)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of a GPU and what is not the cache's, in bytes.

    Attributes:
        total_bytes: All of it.
        weight_bytes: The model's weights.
        reserved_bytes: Left for activations and all else.
    """

    total_bytes: int
    weight_bytes: int
    reserved_bytes: int

    @property
    def room_bytes(self) -> int:
        """What is left for states, keys and values; below 0 if the weights do not fit."""
        return self.total_bytes - self.weight_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to divide a GPU's memory.

    A *sequence* is a prompt and its answer, running or only cached: it holds KV blocks of its own
    and the slots of its checkpoints. Blocks without a state cannot be skipped and a state without
    its blocks cannot be found, so both budgets are made for equally many sequences.

    Attributes:
        config: The settings to make a context with.
        memory: What there is to divide.
        bytes_per_slot: Bytes of one saved state.
        bytes_per_state: Bytes of one live state; more than a slot's if slots are int8.
        bytes_per_block: Bytes of one KV block.
        num_sequences: Sequences that the cache holds.
        first_checkpoints: States that the first prompt and its answer save, on average over prompts
            that are up to half a block shorter or longer than the mean.
        later_checkpoints: The same when the shared prefix is cached.
    """

    config: CacheConfig
    memory: GpuMemory
    bytes_per_slot: int
    bytes_per_state: int
    bytes_per_block: int
    num_sequences: int
    first_checkpoints: float
    later_checkpoints: float

    @property
    def idle_sequences(self) -> int:
        """Sequences that stay cached while ``max_requests`` others run."""
        return self.num_sequences - self.config.max_requests

    @property
    def live_bytes(self) -> int:
        """Bytes of the live states."""
        return self.config.max_requests * self.bytes_per_state

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV blocks, the dummy block included: ``kv_cache_gb`` in bytes."""
        return ((self.config.num_kv_blocks or 0) + 1) * self.bytes_per_block

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots: ``mamba_cache_gb`` in bytes."""
        return (self.config.max_slots or 0) * self.bytes_per_slot


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOfTrace:
    """How a trace hits with several splits of one budget.

    Attributes:
        cache_gb: The budget for slots and KV blocks together, in GiB.
        requests: Requests replayed.
        hit_rates: Of each share of slots that was tried, the share of prompt tokens that hit.
        best_share: The share that hit the most.
        unlimited_hit_rate: The same with room for everything.
    """

    cache_gb: float
    requests: int
    hit_rates: dict[float, float]
    best_share: float
    unlimited_hit_rate: float


def suggest_block_size(ssm_chunk_size: int, workload: Workload) -> int:
    """Return a block size: a multiple of the chunk, near 256, and small beside what is shared.

    Args:
        ssm_chunk_size: Tokens of one chunk of the model's SSM kernels.
        workload: Its shared prefix, or else its prompts, should have eight blocks or more.
    """
    prefix = workload.shared_tokens or workload.prompt_tokens
    wanted = min(_USUAL_BLOCK, prefix // _BLOCKS_PER_PREFIX)
    return max(wanted // ssm_chunk_size, 1) * ssm_chunk_size


def make_plan(
    shape: ModelShape,
    workload: Workload,
    memory: GpuMemory,
    *,
    block_size_tokens: int | None = None,
    int8_slots: bool = False,
) -> Plan:
    """Divide a GPU's memory between live states, KV blocks and slots, which may be int8.

    The default of the block size is that of ``suggest_block_size``.

    Raises:
        InvalidArgumentError: The block size does not fit the model's chunk, or its states cannot
            be kept in int8.
        BudgetError: The memory does not hold the workload; the message says how many requests fit.
    """
    block = block_size_tokens or suggest_block_size(shape.ssm_chunk_size, workload)
    spec = SlotQuantization().slot_spec(shape.state_spec) if int8_slots else shape.state_spec
    slot = spec.bytes_per_slot
    kv_block = shape.kv_spec.bytes_per_block(block)
    shared = workload.shared_tokens // block
    own_blocks = -(-workload.sequence_tokens // block) - shared
    later = _mean_checkpoints(workload, block, matched_blocks=shared)
    num_sequences = _count_sequences(
        workload,
        memory,
        # The dummy block takes room too, and so does the state at the shared prefix's end.
        fixed_bytes=(shared + 1) * kv_block + (shared > 0) * slot,
        live_bytes=shape.state_spec.bytes_per_slot,
        cached_bytes=own_blocks * kv_block + math.ceil(later * slot),
    )
    return Plan(
        config=CacheConfig(
            block_size_tokens=block,
            max_requests=workload.concurrency,
            max_sequence_length=max(_USUAL_LENGTH, workload.sequence_tokens),
            num_kv_blocks=shared + num_sequences * own_blocks,
            max_slots=(shared > 0) + int(num_sequences * later),
            ssm_chunk_size=shape.ssm_chunk_size,
            slot_quantization="int8" if int8_slots else None,
        ),
        memory=memory,
        bytes_per_slot=slot,
        bytes_per_state=shape.state_spec.bytes_per_slot,
        bytes_per_block=kv_block,
        num_sequences=num_sequences,
        first_checkpoints=_mean_checkpoints(workload, block, matched_blocks=0),
        later_checkpoints=later,
    )


def plan(
    model: _Model,
    *,
    memory: _Memory = None,
    weights: _Weights = None,
    reserve: _Reserve = 0.1,
    prompt: _Prompt = 4096,
    output: _Output = 512,
    concurrency: _Concurrency = 32,
    shared: _Shared = 0,
    block_size: _BlockSize = None,
    int8: _Int8 = False,
    trace: _Trace = None,
    limit: _Limit = 4000,
    as_json: AsJson = False,
) -> None:
    """Suggest budgets: how many slots and KV blocks, and how large a block.

    Nothing is allocated and no GPU is needed.
    """
    _check_shared(shared, prompt)
    shape = load_shape(model)
    workload = Workload(
        prompt_tokens=prompt, output_tokens=output, concurrency=concurrency, shared_tokens=shared
    )
    gpu = _memory(shape, memory, weights, reserve)
    made = make_plan(shape, workload, gpu, block_size_tokens=block_size, int8_slots=int8)
    split = None
    if trace is not None:
        split = split_by_trace(shape, made.slot_bytes + made.kv_bytes, trace, limit=limit,
                               slot_bytes=made.bytes_per_slot)  # fmt: skip
    report = plan_report(shape, made, split)
    if as_json:
        print_json(report)
    else:
        _show(shape, made, split)


def split_by_trace(
    shape: ModelShape, room: int, trace: str, *, limit: int, slot_bytes: int
) -> SplitOfTrace:
    """Replay the first requests of a trace with several splits of one budget, ``room`` bytes.

    Raises:
        InvalidArgumentError: The trace cannot be read.
        BudgetError: No split holds a slot and the longest prompt.
    """
    replayed = partial(run_replay, read_trace(trace, limit), policies=["adaptive"])
    found = replayed(slots=[None])
    block = shape.kv_spec.bytes_per_block(found["settings"]["block_size_tokens"])
    rates: dict[float, float] = {}
    for share in _SHARES if block else (1.0,):
        slots = int(room * share) // slot_bytes
        blocks = int(room * (1 - share)) // block if block else None
        if not slots or blocks == 0:
            continue
        result = replayed(slots=[slots], kv_blocks=blocks)
        if result["passed"]:
            rates[share] = result["records"][0]["token_hit_rate"]
    if not rates:
        raise BudgetError(
            f"no split of {size_text(room)} holds a state of {size_text(slot_bytes)} beside the "
            "longest prompt of the trace"
        )
    return SplitOfTrace(
        cache_gb=math.floor(room / _GIB * 1000) / 1000,
        requests=found["workload"]["requests"],
        hit_rates=rates,
        best_share=max(rates, key=lambda share: (rates[share], -share)),
        unlimited_hit_rate=found["records"][0]["token_hit_rate"],
    )


def plan_report(
    shape: ModelShape,
    made: Plan,
    split: SplitOfTrace | None = None,
) -> dict[str, Any]:
    """Return a plan as a JSON object; sizes in bytes unless they say otherwise."""
    return {
        "model": shape.name,
        "mamba_layers": shape.num_state_layers,
        "attention_layers": shape.kv_spec.num_layers,
        "bytes_per_slot": made.bytes_per_slot,
        "bytes_per_live_state": made.bytes_per_state,
        "bytes_per_block": made.bytes_per_block,
        "checkpoints_of_first_prompt": made.first_checkpoints,
        "checkpoints_of_later_prompts": made.later_checkpoints,
        "sequences": made.num_sequences,
        "idle_sequences": made.idle_sequences,
        "memory": {
            "total": made.memory.total_bytes,
            "weights": made.memory.weight_bytes,
            "reserved": made.memory.reserved_bytes,
            "live_states": made.live_bytes,
            "kv_blocks": made.kv_bytes,
            "slots": made.slot_bytes,
        },
        "trace": None if split is None else asdict(split),
        "config": _settings(made, split),
        "prefix_cache": _budgets(made),
    }


def _settings(made: Plan, split: SplitOfTrace | None = None) -> dict[str, int | float | str | None]:
    """Return the arguments of ``CacheConfig`` that the plan decides."""
    names = (
        "block_size_tokens",
        "ssm_chunk_size",
        "max_requests",
        "max_sequence_length",
        "num_kv_blocks",
        "max_slots",
        "slot_quantization",
    )
    settings = {name: getattr(made.config, name) for name in names}
    if split is not None:
        # The dummy block comes on top of what the trace was replayed with.
        del settings["num_kv_blocks"], settings["max_slots"]
        settings["cache_gb"] = split.cache_gb
        settings["state_share"] = split.best_share
    return {name: value for name, value in settings.items() if value is not None}


def _budgets(made: Plan) -> dict[str, int | float]:
    """Return the arguments of ``PrefixCache`` that the plan decides; budgets in GiB, rounded up."""
    blocks = (made.config.num_kv_blocks or 0) * made.bytes_per_block
    sizes = {"mamba_cache_gb": made.slot_bytes, "kv_cache_gb": blocks}
    budgets = {name: math.ceil(size / _GIB * 1000) / 1000 for name, size in sizes.items()}
    return {"block_size_tokens": made.config.block_size_tokens, **budgets}


def _check_shared(shared: int, prompt: int) -> None:
    """Check two options against each other, by the names that were typed."""
    if shared > prompt:
        raise InvalidArgumentError(f"--shared must be at most --prompt ({prompt}), got {shared}")


def _memory(
    shape: ModelShape, memory: float | None, weights: float | None, reserve: float
) -> GpuMemory:
    """Return what there is, of the arguments or of this machine."""
    if memory is not None:
        total = int(check_number("--memory", memory, maximum=_MOST_GIB) * _GIB)
    elif torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
    else:
        raise InvalidArgumentError("this machine has no GPU whose memory to plan: give --memory")
    weight_bytes = shape.weight_bytes
    if weights is not None:
        weight_bytes = int(check_number("--weights", weights, maximum=_MOST_GIB) * _GIB)
    return GpuMemory(total, weight_bytes, int(reserve * total))


def _show(shape: ModelShape, made: Plan, split: SplitOfTrace | None) -> None:
    out = console()
    layers, chunk = shape.num_state_layers, shape.ssm_chunk_size
    chunks = "no SSM chunks" if chunk == 1 else f"SSM chunks of {chunk} tokens"
    out.print(
        f"{shape.name}: {layers} layers with a state, {shape.kv_spec.num_layers} of attention, "
        f"{chunks}\n"
    )
    sizes = make_table(["what", ">size", "how many", ">together"])
    for row in _size_rows(made):
        sizes.add_row(*row)
    out.print(sizes)
    out.print(
        f"Room for {made.num_sequences:,} sequences: {made.config.max_requests:,} that run, and "
        f"{made.idle_sequences:,} that stay cached beside them."
    )
    out.print(
        f"States saved, on average: {made.first_checkpoints:.1f} by the first prompt and its "
        f"answer, {made.later_checkpoints:.1f} by each later one.\n"
    )
    if split is not None:
        _show_split(out, split)
    out.print(_call("CacheConfig", _settings(made, split)), markup=False)


def _show_split(out: Console, split: SplitOfTrace) -> None:
    table = make_table([">for states", ">tokens that hit", ""])
    for share, rate in split.hit_rates.items():
        mark = "best" if share == split.best_share else ""
        table.add_row(f"{share:.0%}", f"{rate:.1%}", mark)
    out.print(table)
    out.print(
        f"Replayed {split.requests:,} requests over {split.cache_gb:g} GiB; with room for "
        f"everything {split.unlimited_hit_rate:.1%} hit.\n"
    )


def _call(name: str, settings: Mapping[str, object]) -> str:
    """Return Python that makes what was planned."""
    given = [f"    {setting}={value!r},\n" for setting, value in settings.items()]
    return "".join([f"{name}(\n", *given, ")"])


def _size_rows(made: Plan) -> Iterator[tuple[str, str, str, str]]:
    config, memory = made.config, made.memory
    per_block = f"KV block of {config.block_size_tokens} tokens"
    for name, each, count, total in (
        ("live state", made.bytes_per_state, f"{config.max_requests:,}", made.live_bytes),
        (per_block, made.bytes_per_block, f"{config.num_kv_blocks:,} and a dummy", made.kv_bytes),
        ("slot", made.bytes_per_slot, f"{config.max_slots:,}", made.slot_bytes),
    ):
        yield name, size_text(each), count, size_text(total)
    yield "weights", "", "", size_text(memory.weight_bytes)
    yield "activations and all else", "", "", size_text(memory.reserved_bytes)
    used = made.live_bytes + made.kv_bytes + made.slot_bytes
    yield "not used", "", "", size_text(memory.room_bytes - used)
    yield "GPU", "", "", size_text(memory.total_bytes)


def _count_sequences(
    workload: Workload, memory: GpuMemory, *, fixed_bytes: int, live_bytes: int, cached_bytes: int
) -> int:
    """Count the sequences that fit: each takes ``cached_bytes``, and while it runs more."""
    room, running = memory.room_bytes - fixed_bytes, workload.concurrency
    count = (room - running * live_bytes) // max(cached_bytes, 1)
    if count < running:
        most = max(room // (cached_bytes + live_bytes), 0)
        raise BudgetError(
            f"{memory.total_bytes / _GIB:.1f} GiB of GPU memory must hold {running} requests at "
            f"once, but hold {most} of {workload.sequence_tokens:,} tokens, beside "
            f"{memory.weight_bytes / _GIB:.1f} GiB of weights and "
            f"{memory.reserved_bytes / _GIB:.1f} GiB for activations"
        )
    return count


def _mean_checkpoints(workload: Workload, block: int, *, matched_blocks: int) -> float:
    """Return how many states a prompt and its answer save, on average over a block of lengths.

    A prompt that just fills its last block saves one more than all others, so the mean length
    alone would not tell.
    """
    first = max(workload.prompt_tokens - block // 2, 1)
    counts = [
        _count_checkpoints(prompt, workload.output_tokens, block, matched_blocks)
        for prompt in range(first, first + block)
    ]
    return sum(counts) / block


def _count_checkpoints(prompt: int, output: int, block: int, matched_blocks: int) -> int:
    facts = PlacementFacts(
        prompt_tokens=prompt,
        block_size_tokens=block,
        num_matched_blocks=matched_blocks,
        num_required_blocks=-(-prompt // block),
    )
    positions = set(MegatronPlacement().positions(facts))
    in_prompt = sum(matched_blocks * block < p <= prompt for p in positions)
    # The last token of an answer is not computed; of the states that decoding saves, one is kept.
    crosses_a_boundary = (prompt + output - 1) // block > prompt // block
    return in_prompt + crosses_a_boundary
