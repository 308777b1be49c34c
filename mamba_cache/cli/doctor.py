"""``mamba-cache doctor``: is all that the cache needs here, and does it work?"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from typing import Literal

import torch
import typer
from rich.table import Table
from rich.text import Text

from mamba_cache._extras import install_hint
from mamba_cache._version import __version__
from mamba_cache.bench.control import measure_admission, measure_evict_and_allocate
from mamba_cache.bench.copy import SHAPES, measure_copies
from mamba_cache.bench.measure import Measurement, print_json
from mamba_cache.cli.demo import play
from mamba_cache.cli.output import AsJson, console, make_table
from mamba_cache.states import StateCopier, StatePool

__all__ = ["CHECKS", "Check", "Status", "doctor", "run_checks"]

Status = Literal["ok", "slow", "failed", "absent"]
"""Only "failed" is an error; what is "absent" is not needed for the rest."""

_EXTRAS = {"transformers": "prefix caching for transformers models", "prometheus_client": "metrics"}
_SLOW_COPY = 1.15
_COPIED_SLOTS = 4
_KERNEL_SECONDS = 300
_STYLES = {"ok": "green", "slow": "yellow", "failed": "bold red", "absent": "dim"}


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found.

    Attributes:
        name: What was looked at.
        status: How it is.
        detail: What was found.
        advice: What to do about it; "" if nothing.
    """

    name: str
    status: Status
    detail: str
    advice: str = ""


def run_checks() -> Iterator[Check]:
    """Make every check, the quick ones first."""
    for check in CHECKS:
        yield from check()


def doctor(as_json: AsJson = False) -> None:
    """Check versions, the GPU, that kernels are exact, and what is slow.

    A GPU is not needed. What is slow or absent is shown with what to do about it; only what is
    wrong makes the exit code 1.
    """
    with console(stderr=True).status("looking at this machine"):
        checks = list(run_checks())
    counts = Counter(check.status for check in checks)
    if as_json:
        print_json({"passed": not counts["failed"], "checks": [asdict(one) for one in checks]})
    else:
        out = console()
        out.print(_table(checks))
        out.print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if counts["failed"]:
        raise typer.Exit(1)


def _table(checks: Sequence[Check]) -> Table:
    table = make_table(["check", "", "found"])
    for check in checks:
        found = f"{check.detail}\n-> {check.advice}" if check.advice else check.detail
        style = _STYLES[check.status]
        table.add_row(Text(check.name), Text(check.status, style=style), Text(found))
    return table


def _versions() -> Iterator[Check]:
    yield Check("mamba_cache", "ok", f"{__version__}, Python {platform.python_version()}")
    for package in ("torch", "numpy", "xxhash"):
        yield Check(package, "ok", metadata.version(package))
    if importlib.util.find_spec("triton"):
        yield Check("triton", "ok", metadata.version("triton"))
    else:
        advice = "on Linux: pip install triton, in the version that your torch asks for"
        yield Check("triton", "absent", "not installed; PyTorch copies states", advice)


def _extras() -> Iterator[Check]:
    for package, purpose in _EXTRAS.items():
        if importlib.util.find_spec(package):
            yield Check(package, "ok", f"{metadata.version(package)}, for {purpose}")
        else:
            extra = "metrics" if package == "prometheus_client" else package
            advice = f"if you want it: {install_hint(extra)}"
            yield Check(package, "absent", f"not installed; for {purpose}", advice)


def _gpu() -> Iterator[Check]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        advice = (
            ""
            if built
            else "if there is one: this torch is built without CUDA, install one with it"
        )
        yield Check("GPU", "absent", "none; all runs on the CPU", advice)
        return
    free, total = torch.cuda.mem_get_info()
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    yield Check("GPU", "ok", f"{torch.cuda.get_device_name()}, {memory}, CUDA {torch.version.cuda}")


def _kernels() -> Iterator[Check]:
    """Compare kernels and twins, in another process: see ``kernel_checks``."""
    on_gpu = torch.cuda.is_available()
    if not importlib.util.find_spec("triton"):
        yield Check("kernels", "absent", "they need Triton")
        return
    environment = os.environ | ({} if on_gpu else {"TRITON_INTERPRET": "1"})
    command = [sys.executable, "-m", "mamba_cache.cli.kernel_checks"]
    try:
        result = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=_KERNEL_SECONDS,
        )
        faults: dict[str, str] = json.loads(result.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        words = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        advice = f"run it alone to see more: {' '.join(command)}"
        yield Check("kernels", "failed", words[-1] if words else "no result", advice)
        return
    where = "on the GPU" if on_gpu else "in Triton's interpreter, on the CPU"
    for name, fault in faults.items():
        advice = "use backend='torch' until it is understood, and report it with this table"
        equal = f"equal to its PyTorch twin bit for bit, {where}"
        yield Check(
            f"kernel: {name}", "failed" if fault else "ok", fault or equal, advice if fault else ""
        )


def _hits() -> Iterator[Check]:
    answers = list(play())
    skipped = sum(answer.skipped_tokens for answer in answers)
    detail = f"{skipped:,} tokens skipped over {len(answers)} prompts of the demo"
    if all(answer.outputs_match for answer in answers) and skipped:
        yield Check("a hit equals a miss", "ok", f"{detail}, the same answers")
    else:
        advice = "do not trust hits on this machine; report it with `mamba-cache demo --json`"
        yield Check("a hit equals a miss", "failed", f"{detail}, other answers", advice)


def _copies() -> Iterator[Check]:
    reference = SHAPES[0]
    num_bytes = _COPIED_SLOTS * reference.spec.bytes_per_slot
    if not torch.cuda.is_available():
        yield _cpu_copies()
        return
    needed = 8 * num_bytes
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        detail = f"needs {needed / 2**30:.1f} GiB of GPU memory, {free / 2**30:.1f} GiB are free"
        yield Check("state copies", "absent", detail, "run it while the GPU is idle")
        return
    ratio = next(iter(measure_copies(reference, [_COPIED_SLOTS])))
    detail = f"{ratio.value:.2f}x a flat copy's time: {ratio.detail}"
    if ratio.value <= _SLOW_COPY:
        yield Check("state copies", "ok", detail)
    else:
        advice = (
            f"above {_SLOW_COPY}x: is the GPU busy, or its clock held down? "
            "`mamba-cache bench copy` shows more"
        )
        yield Check("state copies", "slow", detail, advice)


def _cpu_copies() -> Check:
    """Time PyTorch's copies of a few states; there is no limit to hold them to."""
    spec = SHAPES[3].spec
    pools = [list(StatePool(spec, 2, device="cpu").tensors.values()) for _ in range(2)]
    copier = StateCopier(*pools)
    copier.copy([0], [0])
    start = time.perf_counter()
    copier.copy([1], [1])
    speed = 2 * spec.bytes_per_slot / (time.perf_counter() - start) / 1e9
    return Check("state copies", "ok", f"{speed:.1f} GB/s read and written, by PyTorch on the CPU")


def _decisions(measure: Callable[[], Iterator[Measurement]]) -> Iterator[Check]:
    one = next(iter(measure()))
    detail = f"{one.value:,.0f} us, the limit is {one.limit:,.0f} us"
    if one.passed:
        yield Check(one.name, "ok", detail)
    else:
        advice = "is the CPU busy or slow? `mamba-cache bench control` shows more"
        yield Check(one.name, "slow", detail, advice)


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    _versions,
    _extras,
    _gpu,
    _kernels,
    _hits,
    _copies,
    partial(_decisions, partial(measure_admission, runs=50)),
    partial(_decisions, partial(measure_evict_and_allocate, (10_000,), runs=200)),
)
"""In this order."""
