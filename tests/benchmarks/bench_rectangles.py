"""Prompts in rectangles, from CUDA graphs and without: hits, mixed lengths, and decode steps.

``python tests/benchmarks/bench_rectangles.py --family nemotron-h-8b --json FILE`` takes less than
two minutes on an H200. Each value is warm: its shape was computed before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from measuring import Measurement, parser_for, progress, report
from models import Subject, add_family_option, describe_subject, make_subject
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from mamba_cache.integrations.transformers import PrefixCache

_FULL, _TINY = (4096, 256, 2048, 128, 384, 32), (64, 32, 64, 8, 24, 3)
"""Cached and new tokens of a hit; shared tokens, fewest and most own ones, and rows of a batch."""


class _Times:
    """Times calls of ``generate_batch``."""

    def __init__(self, subject: Subject, cache: PrefixCache, rounds: int, rows: int) -> None:
        self._subject, self._cache, self._rounds, self._rows = subject, cache, rounds, rows
        self.figures: list[Measurement] = []

    def draw(self, length: int) -> list[int]:
        """Return tokens that nobody has seen."""
        tokens: list[int] = self._subject.random(length)[0].tolist()
        return tokens

    def run(self, prompts: Sequence[Sequence[int]], *, is_eager: bool, new_tokens: int = 1) -> None:
        """Answer prompts."""
        config = ContinuousBatchingConfig(use_cuda_graph=not is_eager)
        self._cache.generate_batch(
            prompts, continuous_batching_config=config, max_new_tokens=new_tokens,
            do_sample=False, eos_token_id=None, progress_bar=False,
        )  # fmt: skip

    def measure(
        self, name: str, call: Callable[[], Callable[[], None]], scale: float = 1e3
    ) -> float:
        """Time calls, each made just before it runs; add their median after two warm ones."""
        seconds = [self._subject.time(call()) for _ in range(self._rounds + 2)][2:]
        value = statistics.median(seconds) * scale
        spread = f"{min(seconds) * scale:.1f} to {max(seconds) * scale:.1f}"
        self.figures.append(Measurement(name, value, "ms"))
        progress(f"{name}: {value:.1f} ms ({spread})")
        return value

    def compare_hits(self, prefix: int, suffix: int) -> None:
        """Time a hit, whose suffix is computed: eagerly, and from a graph."""
        stem = self.draw(prefix)
        self.run([[*stem, *self.draw(suffix)]], is_eager=True)
        for is_eager in (True, False):
            way = "eager" if is_eager else "graph"
            for extra in (0, 28):

                def call(is_eager: bool = is_eager, extra: int = extra) -> Callable[[], None]:
                    prompt = [*stem, *self.draw(suffix + extra)]
                    return lambda: self.run([prompt], is_eager=is_eager)

                self.measure(f"hit of {prefix:,} + {suffix + extra} tokens, {way}", call)

    def compare_lengths(self, shared: int, fewest: int, most: int) -> None:
        """Time all first tokens of prompts of many lengths, beside as many equal ones."""
        stem = self.draw(shared)
        self.run([[*stem, *self.draw(fewest)]], is_eager=True)
        generator = torch.Generator().manual_seed(0)
        mixed = torch.randint(fewest, most + 1, (self._rows,), generator=generator).tolist()
        equal = [sum(mixed) // self._rows] * self._rows
        found = []
        for name, lengths in (("equal", equal), ("mixed", mixed)):

            def call(lengths: list[int] = lengths) -> Callable[[], None]:
                prompts = [[*stem, *self.draw(length)] for length in lengths]
                return lambda: self.run(prompts, is_eager=False)

            title = f"first tokens of {self._rows} prompts after {shared:,} shared, {name} lengths"
            found.append(self.measure(title, call))
        self.figures.append(Measurement("mixed over equal lengths", found[1] / found[0], "x"))

    def time_decoding(self, steps: int) -> None:
        """Time the steps of one request, and of many."""
        for rows in (1, self._rows):
            times = []
            for count in (1, steps + 1):

                def call(count: int = count, rows: int = rows) -> Callable[[], None]:
                    prompts = [self.draw(64) for _ in range(rows)]
                    return lambda: self.run(prompts, is_eager=False, new_tokens=count)

                title = f"{count} tokens of {rows} requests"
                times.append(self.measure(title, call))
            step = (times[1] - times[0]) / steps
            self.figures.append(Measurement(f"decode step of {rows}", step, "ms"))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Make a model on the GPU, or else on the CPU, and measure."""
    parser = parser_for(__doc__)
    add_family_option(parser)
    parser.add_argument("--rounds", type=int, default=5, help="calls of each kind; default: 5")
    options = parser.parse_args(arguments)
    subject = make_subject(options.family)
    prefix, suffix, shared, fewest, most, rows = _TINY if subject.family_name == "tiny" else _FULL
    calls = (options.rounds + 2) * (4 + 6 * rows)
    tokens = prefix + shared + calls * most
    cache = subject.prefix_cache(
        num_tokens=tokens, num_calls=min(calls, 200), max_requests=rows, reuse_answers=False
    )
    figures = [Measurement("prepare_batches", subject.time(cache.prepare_batches) * 1e3, "ms")]
    times = _Times(subject, cache, options.rounds, rows)
    times.compare_hits(prefix, suffix)
    times.compare_lengths(shared, fewest, most)
    times.time_decoding(16 if subject.is_cuda else 2)
    stats = cache.batch_stats()
    assert stats is not None
    more = describe_subject(subject) | {"batch_stats": asdict(stats)}
    return report("rectangles", [*figures, *times.figures], options.json, **more)


if __name__ == "__main__":
    main()
