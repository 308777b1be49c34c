"""Prompts in rectangles, from CUDA graphs and without: hits, mixed lengths, and decode steps.

``python tests/benchmarks/bench_rectangles.py --family nemotron-h-8b --json FILE`` takes about two
minutes on an H100. Each value but the first batch is warm: its shape was computed before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from measuring import Measurement, parser_for, progress, report
from models import Subject, add_family_option, describe_subject, make_subject
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from mamba_cache.integrations.transformers import PrefixCache

_FULL, _TINY = (4096, 256, 2048, 128, 384, 32), (64, 32, 64, 8, 24, 3)
"""Cached and new tokens of a hit; shared, min own and max own tokens, and rows of a batch."""
_MORE_TOKENS = 28
"""Extra tokens that make prompts no multiple of a chunk."""
_ANSWER_TOKENS = {True: 127, False: 8}
"""Answer tokens after the first, timed beside plain transformers, by whether on a GPU."""


class _Times:
    """Times calls of ``generate_batch``."""

    def __init__(self, subject: Subject, cache: PrefixCache, rounds: int, rows: int) -> None:
        self._subject, self._cache, self._rounds, self._rows = subject, cache, rounds, rows
        self.figures: list[Measurement] = []

    def draw(self, length: int) -> list[int]:
        """Return fresh random tokens."""
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
            for extra in (0, _MORE_TOKENS):

                def call(is_eager: bool = is_eager, extra: int = extra) -> Callable[[], None]:
                    prompt = [*stem, *self.draw(suffix + extra)]
                    return lambda: self.run([prompt], is_eager=is_eager)

                self.measure(f"hit of {prefix:,} + {suffix + extra} tokens, {way}", call)

    def compare_with_plain(self, prefix: int, suffix: int) -> None:
        """Time first tokens of ``generate``: plain, at a miss, and at hits; and a long answer."""
        subject, cache = self._subject, self._cache
        stem = subject.random(prefix)
        for extra in (0, _MORE_TOKENS):
            ways: dict[str, list[float]] = {"plain": [], "miss": [], "hit": []}
            for _ in range(self._rounds + 4):  # a long prompt has its graph at its fourth use
                prompts = [subject.random(prefix + suffix + extra) for _ in range(2)]
                hit = torch.cat([stem, subject.random(suffix + extra)], dim=1)
                for way, llm, prompt in (
                    ("plain", subject.model, prompts[0]),
                    ("miss", cache, prompts[1]),
                    ("hit", cache, hit),
                ):
                    ways[way].append(subject.first_token(llm, prompt).seconds)
            title = f"{prefix:,} + {suffix + extra} tokens"
            plain, miss, hit = (statistics.median(one[4:]) * 1e3 for one in ways.values())
            self.figures += [
                Measurement(f"first token, plain, {title}", plain, "ms"),
                Measurement(f"first token, miss, {title}", miss, "ms"),
                Measurement(f"first token, hit, {title}", hit, "ms"),
                Measurement(f"miss over plain, {title}", miss / plain, "x"),
                Measurement(f"plain over hit, {title}", plain / hit, "x"),
            ]
            if replay := subject.capture(subject.random(suffix + extra), subject.fill(stem)):
                seconds = [subject.time(replay) for _ in range(5)]
                title = f"one CUDA graph of the new tokens, {title}"
                self.figures.append(Measurement(title, statistics.median(seconds) * 1e3, "ms"))
        found, more = [], _ANSWER_TOKENS[subject.is_cuda]
        for llm in (subject.model, cache):
            prompts = [subject.random(suffix) for _ in range(4)]
            times = []
            for prompt, count in zip(prompts, (2, 2, 1, 1 + more), strict=True):
                call = partial(subject.generate, llm, prompt, max_new_tokens=count)
                times.append(subject.time(call))
            found.append(times[3] - times[2])
        self.figures += [
            Measurement(f"{more} tokens of one request, plain", found[0] * 1e3, "ms"),
            Measurement(f"{more} tokens of one request", found[1] * 1e3, "ms"),
            Measurement("plain over ours, one request", found[0] / found[1], "x"),
        ]

    def time_burst(self, shared: int, own: int, count: int) -> None:
        """Time first tokens of many prompts, relative to a plain forward of as many new tokens."""
        stem = self.draw(shared)
        self.run([[*stem, *self.draw(own)]], is_eager=True)

        def call() -> Callable[[], None]:
            prompts = [[*stem, *self.draw(own)] for _ in range(count)]
            return lambda: self.run(prompts, is_eager=False)

        title = f"{count} x ({shared:,} shared + {own} own)"
        burst = self.measure(f"first tokens of {title}", call)
        rows = self._subject.random(count * own).view(count, own)
        times = []
        for _ in range(self._rounds + 1):
            forward = partial(self._subject.logits, rows, self._subject.new_cache())
            times.append(self._subject.time(forward) * 1e3)
        plain = statistics.median(times[1:])
        self.figures.append(Measurement(f"plain forward of {count} x {own} tokens", plain, "ms"))
        self.figures.append(Measurement(f"burst over plain, {title}", burst / plain, "x"))

    def compare_batches(self, own: int) -> None:
        """Time the first three batches after the preparation."""
        times = []
        for _ in range(3):
            prompts = [self.draw(own) for _ in range(self._rows)]
            times.append(self._subject.time(partial(self.run, prompts, is_eager=False)))
        self.figures.append(Measurement("first batch", times[0] * 1e3, "ms"))
        self.figures.append(Measurement("first batch over the third", times[0] / times[2], "x"))

    def compare_lengths(self, shared: int, low: int, high: int) -> None:
        """Time all first tokens of prompts of many lengths, beside as many equal ones."""
        stem = self.draw(shared)
        self.run([[*stem, *self.draw(low)]], is_eager=True)
        generator = torch.Generator().manual_seed(0)
        mixed = torch.randint(low, high + 1, (self._rows,), generator=generator).tolist()
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
        for rows in (1, self._rows, 2 * self._rows):
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
    prefix, suffix, shared, low, high, rows = _TINY if subject.family_name == "tiny" else _FULL
    # Prompts of several calls fit; states that no other prompt uses are evicted.
    tokens = 4 * (prefix + suffix) * (options.rounds + 4) + 6 * rows * (shared + high)
    cache = subject.prefix_cache(
        num_tokens=tokens, num_calls=2 * rows, max_requests=2 * rows, reuse_answers=False
    )
    figures = [Measurement("prepare_batches", subject.time(cache.prepare_batches) * 1e3, "ms")]
    times = _Times(subject, cache, options.rounds, rows)
    times.compare_batches(suffix)
    times.compare_hits(prefix, suffix)
    times.compare_with_plain(prefix, suffix)
    times.time_burst(shared, suffix, 2 * rows)
    times.compare_lengths(shared, low, high)
    times.time_decoding(16 if subject.is_cuda else 2)
    stats = cache.batch_stats()
    assert stats is not None
    more = describe_subject(subject) | {"batch_stats": asdict(stats)}
    return report("rectangles", [*figures, *times.figures], options.json, **more)


if __name__ == "__main__":
    main()
