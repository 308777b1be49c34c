"""Times the first token: plain, at a miss, at hits, and of the new tokens alone.

    python tests/benchmarks/bench_ttft.py --prefix 1024 4096 16128 --chat --json ttft.json

Prompts are random and fresh in each round, so that a miss is a miss. A round times each way once,
so that all ways meet the same load of the machine. The first rounds are not timed: kernels are
compiled and tuned in them, and shapes are captured as CUDA graphs at their second use.
"""

from __future__ import annotations

import gc
import statistics
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from chat import Chat, measure_chat
from measuring import Measurement, parser_for, progress, report
from models import (
    FirstToken,
    Subject,
    add_family_option,
    copy_of,
    describe_subject,
    evictions,
    make_subject,
)

from mamba_cache.errors import MambaCacheError
from mamba_cache.integrations.transformers import PrefixCache

_DEFAULT_PREFIX = 4096
_ANSWER_TOKENS = 8
_HITS_A_ROUND = 4
_CALLS_A_ROUND = _HITS_A_ROUND + 6
_CHATS = 3
_WARM_UPS = 4
"""Rounds that are not timed: kernels are tuned, and long prompts have their graph in the fourth."""

_PLAIN = "plain transformers"
_FIRST = "first prompt of an empty cache"
_MISS = "miss"
_SECOND = "second sighting"
_HIT = "hit"
_BATCHED = "hit, through generate_batch"
_IDENTICAL = "identical prompt"
_TURN = "next turn"
_BARE = "the new tokens alone"
_FILLED = "the new tokens alone, through generate"
_GRAPH = "the new tokens alone, one CUDA graph"
_WAYS = (
    _PLAIN, _FIRST, _MISS, _SECOND, _HIT, _BATCHED, _IDENTICAL, _TURN, _BARE, _FILLED, _GRAPH,
)  # fmt: skip


def break_even(gains: dict[int, float]) -> tuple[float | None, str]:
    """Return the min number of cached tokens with which a hit beats plain transformers.

    Args:
        gains: Time by which the hit is faster, by number of cached tokens.

    Returns:
        The number, between two measured ones where the gain changes its sign, or None if the hit
        with the most cached tokens does not win; and a text of its basis.
    """
    lengths = sorted(gains)
    losing = [length for length in lengths if gains[length] <= 0]
    if not losing:
        return lengths[0], "a hit wins at each measured length; this is the shortest"
    below = losing[-1]
    if below == lengths[-1]:
        return None, f"a hit does not win up to {below:,} cached tokens"
    above = lengths[lengths.index(below) + 1]
    share = -gains[below] / (gains[above] - gains[below])
    tokens = below + share * (above - below)
    return tokens, f"between {below:,} and {above:,} cached tokens"


class PrefixTimes:
    """Times each way to get the first token of prompts that share a prefix, after a warm-up.

    Attributes:
        seconds: The times until the first token, by way.
        call_seconds: The times until the call that made it returned, by way.
        skipped: Tokens that the prefix cache did not compute again, by way.
        peak_bytes: Max GPU memory that a run allocated beyond its start, by way.
        stats: Counters of the prefix cache, without rounds of ``first prompt``.
        evictions: Entries that the cache evicted: with any, misses and hits are not as labelled.
    """

    def __init__(self, subject: Subject, prefix: int, suffix: int, rounds: int) -> None:
        self._subject = subject
        self._lengths = prefix, suffix
        self._rounds = rounds
        self._has_plain = True
        self._has_batches = False
        self._replay: Callable[[], object] | None = None
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.call_seconds: dict[str, list[float]] = defaultdict(list)
        self.skipped: dict[str, list[int]] = defaultdict(list)
        self.peak_bytes: dict[str, int] = defaultdict(int)
        self.stats: dict[str, float] = {}
        self.evictions = 0

    def run(self) -> None:
        """Time all rounds."""
        prefix, suffix = self._lengths
        num_rounds = self._rounds + _WARM_UPS
        filled = self._subject.fill(self._subject.random(prefix))
        self._replay = self._subject.capture(self._subject.random(suffix), filled)
        tokens_a_round = prefix + (_CALLS_A_ROUND + 1) * (suffix + _ANSWER_TOKENS)
        cache = self._subject.prefix_cache(
            num_tokens=num_rounds * tokens_a_round, num_calls=num_rounds * _CALLS_A_ROUND
        )
        with cache:
            try:
                cache.prepare_batches()
                self._has_batches = True
            except MambaCacheError as error:
                progress(f"no batches: {error}")
            for number in range(num_rounds):
                progress(f"{prefix:,} + {suffix:,} tokens: round {number + 1} of {num_rounds}")
                with _no_collections():
                    self._time_round(cache, filled, plain_first=number % 2 == 0)
                if number < _WARM_UPS:
                    self._forget()
            self.stats = _counts(cache)
            progress(f"{prefix:,} + {suffix:,} tokens: first prompts of an empty cache")
            for _ in range(self._rounds):
                with _no_collections():
                    self._time_first(cache)
            self.evictions += evictions(cache)

    def _time_round(self, cache: PrefixCache, filled: Any, *, plain_first: bool) -> None:
        subject, (prefix, suffix) = self._subject, self._lengths
        shared = subject.random(prefix)
        prompts = [
            torch.cat([shared, subject.random(suffix)], dim=1) for _ in range(_HITS_A_ROUND + 4)
        ]
        if plain_first:
            self._time_plain()
        self._time_cached(_MISS, cache, prompts[0])
        if not plain_first:
            self._time_plain()
        self._time_cached(_SECOND, cache, prompts[1])
        for prompt in prompts[2:-2]:
            self._time_cached(_HIT, cache, prompt)
            self._time_bare(prompt, filled)
        if self._has_batches:
            given = prompts[-2].tolist()
            call = partial(cache.generate_batch, given, max_new_tokens=1, do_sample=False)
            self.seconds[_BATCHED].append(subject.time(call))
        self._time_cached(_IDENTICAL, cache, prompts[-3])
        answered = subject.generate(cache, prompts[-1], max_new_tokens=_ANSWER_TOKENS)
        turn = torch.cat([answered, subject.random(suffix)], dim=1)
        self._time_cached(_TURN, cache, turn)

    def _time_bare(self, prompt: torch.Tensor, filled: Any) -> None:
        """Time the new tokens alone, over a transformers cache that holds the others."""
        new, past = prompt[:, self._lengths[0] :], copy_of(filled)
        with self._measured_memory(_BARE):
            self.seconds[_BARE].append(self._subject.time(lambda: self._subject.forward(new, past)))
        past = copy_of(filled)
        self._time(_FILLED, lambda: self._subject.first_token_filled(prompt, past))
        if self._replay is not None:
            self.seconds[_GRAPH].append(self._subject.time(self._replay))

    def _time_first(self, cache: PrefixCache) -> None:
        self._time_plain()
        self.evictions += evictions(cache)
        cache.reset()
        self._time_cached(_FIRST, cache, self._subject.random(sum(self._lengths)))

    def _time_plain(self) -> None:
        """Time plain transformers, until it runs out of memory."""
        if not self._has_plain:
            return
        prompt = self._subject.random(sum(self._lengths))
        try:
            self._time(_PLAIN, lambda: self._subject.first_token(self._subject.model, prompt))
        except torch.cuda.OutOfMemoryError:
            progress("plain transformers runs out of memory")
            self._has_plain = False
            self.seconds.pop(_PLAIN, None)
            self.call_seconds.pop(_PLAIN, None)
        if not self._has_plain:  # after the exception has released its frames
            gc.collect()
            torch.cuda.empty_cache()

    def _time_cached(self, way: str, cache: PrefixCache, prompt: torch.Tensor) -> None:
        before = cache.stats()
        self._time(way, lambda: self._subject.first_token(cache, prompt))
        after = cache.stats()
        self.skipped[way].append(after.skipped_tokens - before.skipped_tokens)

    def _time(self, way: str, run: Callable[[], FirstToken]) -> None:
        with self._measured_memory(way):
            first = run()
        self.seconds[way].append(first.seconds)
        self.call_seconds[way].append(first.call_seconds)

    @contextmanager
    def _measured_memory(self, way: str) -> Iterator[None]:
        self._subject.synchronize()
        used = 0
        if self._subject.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            used = torch.cuda.memory_allocated()
        yield
        if self._subject.is_cuda:
            taken = torch.cuda.max_memory_allocated() - used
            self.peak_bytes[way] = max(self.peak_bytes[way], taken)

    def _forget(self) -> None:
        """Drop the times of a warm-up round."""
        self.seconds.clear()
        self.call_seconds.clear()
        self.skipped.clear()
        self.peak_bytes.clear()


class _Report:
    """The figures of one model."""

    def __init__(self, subject: Subject, suffix: int, rounds: int) -> None:
        self._subject = subject
        self._suffix = suffix
        self._rounds = rounds
        self.figures: list[Measurement] = []
        self._samples: dict[str, Any] = {}
        self._gains: dict[int, float] = {}
        self._failed: dict[str, str] = {}

    def result(self) -> dict[str, Any]:
        """Return the result without the figures."""
        return {"failed": self._failed, **self._samples}

    def measure(self, title: str, add: Callable[[], None]) -> None:
        """Run one measurement; record a failure in the result and go on."""
        try:
            add()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._failed[title] = f"{type(error).__name__}: {error}"
        gc.collect()
        if self._subject.is_cuda:
            torch.cuda.empty_cache()

    def add_prefix(self, prefix: int) -> None:
        """Measure prompts that share ``prefix`` tokens."""
        times = PrefixTimes(self._subject, prefix, self._suffix, self._rounds)
        times.run()
        title = f"{prefix:,} + {self._suffix:,} tokens"
        self.figures += _times(times, title)
        self.figures += self._ratios(times, title)
        if _PLAIN in times.seconds:
            self._gains[prefix] = _median_ms(times, _PLAIN) - _median_ms(times, _HIT)
        self._samples.setdefault("stats", {})[title] = times.stats
        samples = self._samples.setdefault("samples_ms", {})
        samples[title] = {
            way: [round(1e3 * one, 3) for one in times.seconds[way]]
            for way in _WAYS
            if way in times.seconds
        }

    def add_break_even(self) -> None:
        """Add the break-even number of cached tokens, unless nothing was measured."""
        if not self._gains:
            return
        tokens, detail = break_even(self._gains)
        in_ms = {str(prefix): round(gain, 3) for prefix, gain in sorted(self._gains.items())}
        self._samples["break_even"] = {
            "cached_tokens": tokens, "detail": detail, "gains_ms": in_ms,
        }  # fmt: skip
        if tokens is not None:
            self.figures.append(Measurement("break-even", tokens, "tokens", detail=detail))

    def add_chat(self) -> None:
        """Measure a chat."""
        figures, requests = measure_chat(self._subject, Chat(), min(self._rounds, _CHATS))
        self.figures += figures
        self._samples["chat"] = requests

    def _ratios(self, times: PrefixTimes, title: str) -> Iterator[Measurement]:
        plain = _median_ms(times, _PLAIN) if _PLAIN in times.seconds else None
        hit, bare = _median_ms(times, _HIT), _median_ms(times, _BARE)
        # Each hit beside the bare forward after it, because the host's speed varies.
        pairs = zip(times.seconds[_HIT], times.seconds[_BARE], strict=True)
        beyond = {
            _HIT: statistics.median(1e3 * (one - other) for one, other in pairs),
            _TURN: _median_ms(times, _TURN) - bare,
        }
        if plain is not None:
            for way in (_MISS, _FIRST, _SECOND):
                ratio = _median_ms(times, way) / plain
                yield Measurement(f"{way} over plain, {title}", ratio, "x")
        for way in (_HIT, _TURN):
            name = f"{way} beyond the new tokens alone, {title}"
            yield Measurement(name, beyond[way], "ms")
        for way in (_HIT, _BATCHED):
            if way in times.seconds and _GRAPH in times.seconds:
                ratio = _median_ms(times, way) / _median_ms(times, _GRAPH)
                yield Measurement(f"{way}, over {_GRAPH}, {title}", ratio, "x")
        if plain is not None:
            name = f"hit, faster than plain, {title}"
            yield Measurement(name, plain / hit, "x")
        for way in (_MISS, _PLAIN):
            if way in times.peak_bytes:
                gib = times.peak_bytes[way] / 2**30
                name = f"{way}: memory beside weights and cache, {title}"
                yield Measurement(name, gib, "GiB")
        yield Measurement(f"given up for lack of memory, {title}", times.evictions, "")


def _times(times: PrefixTimes, title: str) -> Iterator[Measurement]:
    for way in _WAYS:
        if way not in times.seconds:
            continue
        seconds = times.seconds[way]
        detail = f"{min(seconds) * 1e3:,.1f} to {max(seconds) * 1e3:,.1f} ms"
        if way in times.skipped:
            skipped = statistics.median_low(times.skipped[way])
            detail += f"; {skipped:,} tokens skipped"
        if way in times.call_seconds:
            call = statistics.median(times.call_seconds[way]) * 1e3
            detail += f"; call {call:,.1f} ms"
        median = _median_ms(times, way)
        yield Measurement(f"{way}, {title}", median, "ms", runs=len(seconds), detail=detail)


def _counts(cache: PrefixCache) -> dict[str, float]:
    """Return the numeric counters of a prefix cache."""
    stats = cache.stats()
    values = {one.name: getattr(stats, one.name) for one in fields(stats)}
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def _median_ms(times: PrefixTimes, way: str) -> float:
    return statistics.median(times.seconds[way]) * 1e3


@contextmanager
def _no_collections() -> Iterator[None]:
    """Collect garbage before a round, not within, where it would slow down some way at random."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Make a model on the GPU, or else on the CPU, and measure it."""
    parser = parser_for(__doc__)
    add_family_option(parser)
    about = f"tokens that prompts share; default: {_DEFAULT_PREFIX}, or with --chat none"
    parser.add_argument("--prefix", type=int, nargs="+", metavar="N", help=about)
    parser.add_argument("--suffix", type=int, default=256, help="tokens of each prompt's own")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is timed")
    about = "time chats of two users and eight turns as well"
    parser.add_argument("--chat", action="store_true", help=about)
    about = "transformers' reference path, as if no kernels were installed"
    parser.add_argument("--reference", action="store_true", help=about)
    options = parser.parse_args(arguments)
    prefixes = sorted(set(options.prefix or ([] if options.chat else [_DEFAULT_PREFIX])))
    subject = make_subject(options.family, is_reference=options.reference)
    found = _Report(subject, options.suffix, options.rounds)
    for length in prefixes:
        title = f"{length:,} + {options.suffix:,} tokens"
        found.measure(title, partial(found.add_prefix, length))
    found.add_break_even()
    if options.chat:
        found.measure("chat", found.add_chat)
    more = describe_subject(subject) | {"rounds": options.rounds} | found.result()
    return report("ttft", found.figures, options.json, **more)


if __name__ == "__main__":
    main()
