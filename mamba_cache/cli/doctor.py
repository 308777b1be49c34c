"""``mamba-cache doctor``: checks of packages, of the GPU, and that a hit equals a miss."""

from __future__ import annotations

import importlib.util
import platform
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Literal

import torch

from mamba_cache._extras import install_hint
from mamba_cache._version import __version__
from mamba_cache.cli.output import Report, table
from mamba_cache.config import CacheConfig
from mamba_cache.reference import Engine, HybridModel, HybridModelConfig, SamplingParams

__all__ = ["Check", "check_hits", "check_machine", "doctor"]

_OPTIONAL = {
    "triton": ("", "kernels; without it PyTorch copies states"),
    "transformers": ("transformers", "prefix caching for transformers models"),
    "prometheus_client": ("metrics", "metrics"),
}
"""Optional packages, the extra that installs each, and its purpose."""

_BLOCK = 128
_HIT_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check, with advice. The cache works without a part that is absent."""

    name: str
    status: Literal["ok", "failed", "absent"]
    detail: str
    advice: str = ""


def doctor(options: Namespace) -> Report:
    """Check versions, extras, the GPU, and that a hit equals a miss.

    A GPU is not needed. An absent part is shown with advice; only a failed check makes the exit
    code 1.
    """
    checks = list(check_machine())
    counts = Counter(check.status for check in checks)
    rows: list[tuple[str, str, str]] = []
    for check in checks:
        rows.append((check.name, check.status, check.detail))
        if check.advice:
            rows.append(("", "", f"-> {check.advice}"))
    text = table(["check", "", "found"], rows) + "\n"
    text += ", ".join(f"{count} {status}" for status, count in counts.items())
    passed = not counts["failed"]
    return Report({"passed": passed, "checks": [asdict(one) for one in checks]}, text, passed)


def check_machine() -> Iterator[Check]:
    """Check versions and the GPU, and try a hit."""
    yield Check("mamba_cache", "ok", f"{__version__}, Python {platform.python_version()}")
    for package in ("torch", "numpy", "xxhash"):
        yield Check(package, "ok", metadata.version(package))
    for package, (extra, purpose) in _OPTIONAL.items():
        if importlib.util.find_spec(package):
            yield Check(package, "ok", f"{metadata.version(package)}, for {purpose}")
            continue
        advice = "on Linux: pip install triton, in the version that your torch asks for"
        if extra:
            advice = f"if you want it: {install_hint(extra)}"
        yield Check(package, "absent", f"not installed; for {purpose}", advice)
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        found = f"{torch.cuda.get_device_name()}, {memory}, CUDA {torch.version.cuda}"
        yield Check("GPU", "ok", found)
    else:
        has_backend = torch.version.cuda or torch.version.hip
        advice = "if there is one: this torch is built without CUDA, install one with it"
        yield Check("GPU", "absent", "none; all runs on the CPU", "" if has_backend else advice)
    yield check_hits()


def check_hits() -> Check:
    """Check that a tiny model gives equal answers with and without a cache."""
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    model = HybridModel(HybridModelConfig(layer_pattern="M*MM-"), dtype=torch.float64, seed=0)
    config = CacheConfig(
        block_size_tokens=_BLOCK,
        ssm_chunk_size=model.config.ssm_chunk_size,
        max_requests=1,
        max_tokens=2048,
        max_sequence_length=2048,
        num_kv_blocks=64,
        max_slots=16,
    )
    shared = [number % 251 for number in range(8 * _BLOCK)]
    prompts = [[*shared, *range(number, number + 60)] for number in range(_HIT_PROMPTS)]
    cached, plain = (
        Engine(model, each).generate(prompts, SamplingParams(max_new_tokens=16))
        for each in (config, replace(config, enable_prefix_caching=False))
    )
    skipped = sum(answer.skipped_tokens for answer in cached)
    is_equal = [answer.tokens for answer in cached] == [answer.tokens for answer in plain]
    detail = f"{skipped:,} tokens skipped over {_HIT_PROMPTS} prompts, "
    if is_equal and skipped:
        return Check("a hit equals a miss", "ok", f"{detail}the same answers")
    detail += "other answers" if skipped else "no hit"
    advice = "do not trust hits on this machine; report it with this table"
    return Check("a hit equals a miss", "failed", detail, advice)
