"""``mamba-cache bench``: the benchmarks of ``mamba_cache.bench``, one command each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import torch
import typer

from mamba_cache.bench.align import run_align
from mamba_cache.bench.control import run_control
from mamba_cache.bench.copy import run_copy
from mamba_cache.bench.extraction import run_extraction
from mamba_cache.bench.measure import Measurement, print_json, print_table
from mamba_cache.bench.quantization import run_quantization
from mamba_cache.bench.quantized_copy import run_quantized_copies
from mamba_cache.bench.replay import PLACEMENTS, POLICIES, print_replay, run_replay
from mamba_cache.bench.soak import MODELS, print_soak, run_soak
from mamba_cache.bench.step import run_step
from mamba_cache.bench.ttft import print_ttft, run_ttft
from mamba_cache.bench.ttft_model import FAMILIES
from mamba_cache.bench.workload import WORKLOADS
from mamba_cache.cli import output
from mamba_cache.cli.output import AsJson, Command, Group, each_of, one_of

__all__ = ["align", "bench", "control", "copy", "quantization", "replay", "soak", "step", "ttft"]

bench = typer.Typer(
    cls=Group, no_args_is_help=True, help="Measure this machine; exit code 1 if a limit is missed."
)
"""The commands below ``bench``."""

_UNLIMITED = "unlimited"
_SLOTS = ["50", "200", _UNLIMITED]
_POLICIES = list(POLICIES)
_PLACEMENTS = ["megatron", "last"]

_Name = partial(typer.Option, metavar="NAME")
_Count = partial(typer.Option, metavar="N", min=1)
_Trace = Annotated[str | None, typer.Option(metavar="FILE", help="JSON lines. Default: drawn.")]
_Workload = Annotated[
    str,
    typer.Option(
        metavar="NAME", callback=one_of(WORKLOADS), help=f"What is drawn: {', '.join(WORKLOADS)}."
    ),
]
_Limit = Annotated[int | None, _Count(help="Requests to replay, from the first.")]
_Slots = Annotated[
    list[str], typer.Option(metavar="N", help="A number, or unlimited; may be repeated.")
]
_Blocks = Annotated[str, typer.Option(metavar="N", help="A number, or unlimited.")]
_Policies = Annotated[
    list[str],
    _Name(
        callback=each_of(POLICIES),
        help=f"Eviction: {', '.join(POLICIES)}; may be repeated.",
    ),
]
_Placements = Annotated[
    list[str],
    _Name(
        callback=each_of(PLACEMENTS),
        help=f"Where states are saved: {', '.join(PLACEMENTS)}; may be repeated.",
    ),
]


@bench.command(cls=Command)
def copy(as_json: AsJson = False) -> None:
    """Time state copies on a GPU, beside other ways to copy."""
    _report("copy", [*run_copy(), *run_extraction(), *run_quantized_copies()], as_json)


@bench.command(cls=Command)
def control(as_json: AsJson = False) -> None:
    """Time the decisions: blocks, slots, hashes, admission."""
    _report("control", run_control(), as_json)


@bench.command(cls=Command)
def step(as_json: AsJson = False) -> None:
    """Time a step's bookkeeping beside a plain loop, and a prompt's life."""
    _report("step", run_step(), as_json)


@bench.command(cls=Command)
def align(as_json: AsJson = False) -> None:
    """Time states in block tables on a GPU, beside a flat copy."""
    _report("align", run_align(), as_json)


@bench.command(cls=Command)
def quantization(as_json: AsJson = False) -> None:
    """Measure the errors of int8 slots: of states, and of logits after a hit."""
    _report("quantization", run_quantization(), as_json)


@bench.command(cls=Command)
def ttft(
    *,
    family: Annotated[
        str,
        typer.Option(
            metavar="NAME", callback=one_of(FAMILIES), help=f"Model: {', '.join(FAMILIES)}."
        ),
    ] = "nemotron-h-8b" if torch.cuda.is_available() else "tiny",
    prefix: Annotated[
        list[int] | None,
        _Count(help="Tokens that prompts share; may be repeated. Default: 4096, none with --chat."),
    ] = None,
    suffix: Annotated[int, _Count(help="Tokens of each prompt's own.")] = 256,
    rounds: Annotated[int, _Count(help="How often each way is timed.")] = 5,
    chat: Annotated[
        bool, typer.Option("--chat", help="Time a chat of two users and eight turns as well.")
    ] = False,
    reference: Annotated[
        bool, typer.Option("--reference", help="As if no kernels were installed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time the first token of a transformers model, with the cache and without."""
    result = run_ttft(
        family=family, prefix=prefix, suffix=suffix, rounds=rounds, chat=chat, reference=reference
    )
    _conclude(result, print_ttft, as_json)


@bench.command(cls=Command)
def replay(
    *,
    trace: _Trace = None,
    workload: _Workload = "conversations",
    limit: _Limit = None,
    slots: _Slots = _SLOTS,
    kv_blocks: _Blocks = _UNLIMITED,
    policy: _Policies = _POLICIES,
    placement: _Placements = _PLACEMENTS,
    max_tokens: Annotated[int, _Count(help="Tokens of a step.")] = 8192,
    as_json: AsJson = False,
) -> None:
    """Replay a trace of requests under budgets, policies and placements."""
    result = run_replay(
        trace=trace,
        workload=workload,
        limit=limit,
        slots=[_budget("--slots", number) for number in slots],
        kv_blocks=_budget("--kv-blocks", kv_blocks),
        policies=policy,
        placements=placement,
        max_tokens=max_tokens,
    )
    _conclude(result, print_replay, as_json)


@bench.command(cls=Command)
def soak(
    *,
    minutes: Annotated[float, typer.Option(metavar="N", help="How long, checks included.")] = 10.0,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", callback=one_of(MODELS), help=f"What computes: {', '.join(MODELS)}."
        ),
    ] = "none",
    device: Annotated[str, _Name(help="Where the tiny model runs.")] = "cpu",
    seed: Annotated[int, typer.Option(metavar="N", help="Of all that is drawn.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Serve requests for minutes or hours: what leaks, slows down or goes wrong?"""
    result = run_soak(minutes=minutes, model=model, device=device, seed=seed)
    _conclude(result, print_soak, as_json)


def _budget(option: str, text: str) -> int | None:
    """Return a budget; None if it never runs out."""
    if text == _UNLIMITED:
        return None
    if not text.isdecimal():
        message = f"must be a number or {_UNLIMITED!r}, got {text!r}"
        raise typer.BadParameter(message, param_hint=option)
    return int(text)


def _conclude(
    result: dict[str, Any], show: Callable[[dict[str, Any]], None], as_json: bool
) -> None:
    """Show a benchmark's own kind of result; exit with 1 if something went wrong."""
    (output.print_json if as_json else show)(result)
    if not result["passed"]:
        raise typer.Exit(1)


def _report(benchmark: str, measurements: Sequence[Measurement], as_json: bool) -> None:
    """Show the figures; exit with 1 if a limit was missed."""
    show = print_json if as_json else print_table
    show(benchmark, measurements)
    if not all(measurement.passed for measurement in measurements):
        raise typer.Exit(1)
