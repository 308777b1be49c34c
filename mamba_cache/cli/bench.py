"""``mamba-cache bench``: the benchmarks of ``mamba_cache.bench``, one command each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
import typer

from mamba_cache.bench.align import run_align
from mamba_cache.bench.control import run_control
from mamba_cache.bench.copy import run_copy
from mamba_cache.bench.measure import Measurement, print_json, print_table
from mamba_cache.bench.quantization import run_quantization
from mamba_cache.bench.quantized_copy import run_quantized_copies
from mamba_cache.bench.ttft import FAMILIES, run_ttft
from mamba_cache.cli.output import AsJson, one_of

__all__ = ["align", "bench", "control", "copy", "quantization", "ttft"]

bench = typer.Typer(no_args_is_help=True, help="Measure this machine; 1 if a limit is missed.")
"""The commands below ``bench``."""


@bench.command()
def copy(as_json: AsJson = False) -> None:
    """Time state copies on a GPU, beside other ways to copy."""
    _report("copy", [*run_copy(), *run_quantized_copies()], as_json)


@bench.command()
def control(as_json: AsJson = False) -> None:
    """Time the decisions: blocks, slots, hashes, admission."""
    _report("control", run_control(), as_json)


@bench.command()
def align(as_json: AsJson = False) -> None:
    """Time states in block tables on a GPU, beside a flat copy."""
    _report("align", run_align(), as_json)


@bench.command()
def quantization(as_json: AsJson = False) -> None:
    """Measure the errors of int8 slots: of states, and of logits after a hit."""
    _report("quantization", run_quantization(), as_json)


@bench.command()
def ttft(
    family: Annotated[
        str, typer.Option(callback=one_of(FAMILIES), help=f"Model: {', '.join(FAMILIES)}.")
    ] = "nemotron-h-8b" if torch.cuda.is_available() else "tiny",
    prefix: Annotated[int, typer.Option(min=1, help="Tokens that prompts share.")] = 4096,
    suffix: Annotated[int, typer.Option(min=1, help="Tokens of each prompt's own.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Time the first token of a transformers model, with the cache and without."""
    _report("ttft", run_ttft(family=family, prefix=prefix, suffix=suffix), as_json)


def _report(benchmark: str, measurements: Sequence[Measurement], as_json: bool) -> None:
    """Show the figures; exit with 1 if a limit was missed."""
    show = print_json if as_json else print_table
    show(benchmark, measurements)
    if not all(measurement.passed for measurement in measurements):
        raise typer.Exit(1)
