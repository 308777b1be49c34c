"""Time to first token of a transformers model: plain, at a miss, and at a hit.

Weights are random, because time does not depend on them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mamba_cache.bench.measure import Measurement, progress
from mamba_cache.integrations.transformers import PrefixCache
from mamba_cache.integrations.transformers.library import transformers

__all__ = ["FAMILIES", "Family", "add_ttft_options", "make_model", "measure_ttft", "run_ttft"]


@dataclass(frozen=True, slots=True)
class Family:
    """A model to measure.

    Attributes:
        model_type: What transformers calls its configuration.
        config: The settings of it that are not defaults.
        dtype: Of the weights.
        speedup: How many times faster than plain a hit must be; None: no limit.
        peak_gib: GPU memory that a miss may need at most; None: no limit.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    speedup: float | None = None
    peak_gib: float | None = None


FAMILIES = {
    "nemotron-h-8b": Family(
        "nemotron_h",
        {
            "hybrid_override_pattern": "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
            "max_position_embeddings": 131_072,
        },
        speedup=14,
        peak_gib=40,
    ),
    "granite-4-like": Family(
        "granitemoehybrid",
        {
            "vocab_size": 100_352,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "shared_intermediate_size": 1024,
            "num_hidden_layers": 40,
            "layer_types": 4 * (5 * ["mamba"] + ["attention"] + 4 * ["mamba"]),
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 256,
            "max_position_embeddings": 131_072,
        },
        speedup=40,
    ),
    "qwen3-next-like": Family(
        "qwen3_next",
        {"num_hidden_layers": 24, "num_experts": 64, "max_position_embeddings": 131_072},
        speedup=10,
    ),
    "tiny": Family(
        "nemotron_h",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "hybrid_override_pattern": "M-M*-M-",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 16,
            "chunk_size": 32,
            "max_position_embeddings": 131_072,
        },
        dtype=torch.float32,
    ),
}


def add_ttft_options(command: Any) -> None:
    """Add what ``run_ttft`` takes to an ``ArgumentParser``."""
    default = "nemotron-h-8b" if torch.cuda.is_available() else "tiny"
    command.add_argument("--family", choices=list(FAMILIES), default=default)
    command.add_argument("--prefix", type=int, default=4096, help="tokens that prompts share")
    command.add_argument("--suffix", type=int, default=256, help="tokens of each prompt's own")


def run_ttft(*, family: str, prefix: int, suffix: int) -> list[Measurement]:
    """Make a model on the GPU, or else on the CPU, and measure it.

    Raises:
        MissingExtraError: transformers is not installed.
        UnsupportedVersionError: It is too old.
    """
    transformers()  # before anything is announced
    chosen = FAMILIES[family]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    progress(f"making {family} with random weights on {device}")
    return list(measure_ttft(make_model(chosen, device), chosen, prefix=prefix, suffix=suffix))


def make_model(family: Family, device: str) -> Any:
    """Make a model with random weights.

    Raises:
        MissingExtraError: transformers is not installed.
        UnsupportedVersionError: It is too old.
    """
    library = transformers()
    config = library.AutoConfig.for_model(family.model_type, **family.config)
    torch.manual_seed(0)
    with torch.device(device):
        model = library.AutoModelForCausalLM.from_config(config, dtype=family.dtype)
    return model.to(device).eval()


def measure_ttft(
    model: Any, family: Family, *, prefix: int, suffix: int, runs: int = 5
) -> Iterator[Measurement]:
    """Measure one model, each figure over fresh random prompts.

    Args:
        model: On the device where it is measured.
        family: Its limits.
        prefix: Tokens that prompts share.
        suffix: Tokens of each prompt's own.
        runs: Runs of each kind; three times as many of those that hit.
    """
    bench = _Bench(model, prefix, suffix)
    title = f"{prefix:,} + {suffix:,} tokens"
    progress("hit")
    hit = bench.median_ms(bench.hit, 3 * runs)
    progress("a forward over a filled transformers cache")
    bare = bench.median_ms(bench.bare, 3 * runs)
    progress("miss")
    bench.reset_peak()
    miss = bench.median_ms(bench.miss, runs)
    peak = bench.peak_gib()
    bench.close()
    progress("plain transformers")
    plain = bench.median_plain_ms(runs)
    yield Measurement(f"hit, {title}", hit, "ms", runs=3 * runs)
    yield Measurement(f"forward of {suffix:,} tokens alone", bare, "ms", runs=3 * runs)
    yield Measurement("hit over that forward", hit / bare, "x", limit=1.10 if peak else None)
    yield Measurement(f"miss, {title}", miss, "ms", runs=runs)
    if peak:
        yield Measurement("peak memory of a miss", peak, "GiB", limit=family.peak_gib)
    if plain is not None:
        yield Measurement(f"plain transformers, {title}", plain, "ms", runs=runs)
        yield Measurement(
            "hit, faster than plain", plain / hit, "x", limit=family.speedup, at_least=True
        )


class _Bench:
    """Prompts, and the ways to compute them.

    Each way is a generator: what is before its ``yield`` is not timed.
    """

    def __init__(self, model: Any, prefix: int, suffix: int) -> None:
        self._model = model
        self._lengths = (prefix, suffix)
        self._is_cuda = model.device.type == "cuda"
        self._cache = PrefixCache(model, mamba_cache_gb=2, kv_cache_gb=1 if self._is_cuda else 0.25)
        self._shared = self._random(prefix)
        self._generate(self._cache, self._prompt())

    def hit(self) -> Iterator[None]:
        prompt = self._prompt()
        yield
        self._generate(self._cache, prompt)

    def bare(self) -> Iterator[None]:
        past = self._cache.prefill(self._shared)
        own = self._random(self._lengths[1])
        runner = self._cache._runner
        yield
        runner.forward(own[0].tolist(), past, self._lengths[0])[:, -1].argmax().item()

    def miss(self) -> Iterator[None]:
        prompt = self._random(sum(self._lengths))
        yield
        self._generate(self._cache, prompt)

    def plain(self) -> Iterator[None]:
        prompt = self._prompt()
        yield
        self._generate(self._model, prompt)

    def median_ms(self, way: Callable[[], Iterator[None]], runs: int) -> float:
        """Return the median time of ``runs`` runs in milliseconds, after one to warm up."""
        seconds = [self._time(way()) for _ in range(runs + 1)]
        return statistics.median(seconds[1:]) * 1e3

    def median_plain_ms(self, runs: int) -> float | None:
        """Return the same of plain transformers, or None if memory does not do for it."""
        try:
            return self.median_ms(self.plain, runs)
        except torch.cuda.OutOfMemoryError:
            progress("plain transformers runs out of memory")
            return None

    def reset_peak(self) -> None:
        """Forget the most memory that was in use so far."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        """Return the most GPU memory that was in use since, weights and cache included."""
        return torch.cuda.max_memory_allocated() / 2**30 if self._is_cuda else 0.0

    def close(self) -> None:
        """Give the cache's memory back."""
        self._cache.close()
        gc.collect()

    def _time(self, run: Iterator[None]) -> float:
        next(run)
        self._synchronize()
        start = time.perf_counter()
        next(run, None)
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def _random(self, length: int) -> torch.Tensor:
        size = self._model.config.vocab_size
        return torch.randint(3, size, (1, length), device=self._model.device)

    def _prompt(self) -> torch.Tensor:
        return torch.cat([self._shared, self._random(self._lengths[1])], dim=1)

    @staticmethod
    def _generate(who: Any, prompt: torch.Tensor) -> None:
        mask = torch.ones_like(prompt)
        who.generate(prompt, attention_mask=mask, max_new_tokens=1, do_sample=False)
