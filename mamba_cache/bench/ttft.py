"""The benchmark of the time to first token: plain, at a miss, at hits, and of what is new alone.

Prompts are random and fresh in each round, so that a miss is a miss, and a round times each way
once, so that all of them see the same machine.
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

from mamba_cache.bench.measure import Measurement, as_dicts, progress
from mamba_cache.bench.options import count
from mamba_cache.bench.ttft_chat import Chat, measure_chat
from mamba_cache.bench.ttft_model import (
    FirstToken,
    Subject,
    add_family_option,
    copy_of,
    describe_subject,
    evictions,
    make_subject,
)
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.transformers import PrefixCache
from mamba_cache.integrations.transformers.costs import fewest_winning

__all__ = ["PrefixTimes", "add_ttft_options", "break_even", "run_ttft"]

_DEFAULT_PREFIX = 4096
_ANSWER_TOKENS = 8
_HITS_A_ROUND = 4
_CALLS_A_ROUND = _HITS_A_ROUND + 5
_CHATS = 3

_PLAIN = "plain transformers"
_FIRST = "first prompt of an empty cache"
_MISS = "miss"
_SECOND = "second sighting"
_HIT = "hit"
_IDENTICAL = "identical prompt"
_TURN = "next turn"
_BARE = "the new tokens alone"
_FILLED = "the new tokens alone, through generate"
_WAYS = (_PLAIN, _FIRST, _MISS, _SECOND, _HIT, _IDENTICAL, _TURN, _BARE, _FILLED)


def add_ttft_options(command: Any) -> None:
    """Add what ``run_ttft`` takes to an ``ArgumentParser``."""
    add = command.add_argument
    add_family_option(command)
    about = f"tokens that prompts share; default: {_DEFAULT_PREFIX}, or with --chat none"
    add("--prefix", type=count, nargs="+", action="extend", metavar="N", help=about)
    add("--suffix", type=count, metavar="N", help="tokens of each prompt's own; default: 256")
    add("--rounds", type=count, metavar="N", help="how often each way is timed; default: 5")
    about = "time chats of two users and eight turns as well"
    add("--chat", action="store_true", help=about)
    about = "transformers' reference path, as if no kernels were installed"
    add("--reference", action="store_true", help=about)


def run_ttft(
    *,
    family: str | None = None,
    prefix: Sequence[int] | None = None,
    suffix: int = 256,
    rounds: int = 5,
    chat: bool = False,
    reference: bool = False,
) -> dict[str, Any]:
    """Make a model on the GPU, or else on the CPU, and measure it.

    It takes what ``add_ttft_options`` adds.

    Returns:
        What ``--json`` prints: the machine, versions and kernels, the figures with their limits,
        and each single time in milliseconds.

    Raises:
        InvalidArgumentError: A number is below 1, or kernels that ``reference`` must not use were
            imported before.
        MissingExtraError: transformers is not installed.
        UnsupportedVersionError: It is too old.
    """
    prefixes = sorted(set(prefix or ([] if chat else [_DEFAULT_PREFIX])))
    if min([suffix, rounds, *prefixes]) < 1:
        raise InvalidArgumentError(
            f"prefix, suffix and rounds must be at least 1, got {prefixes}, {suffix}, {rounds}"
        )
    subject = make_subject(family, is_reference=reference)
    report = _Report(subject, suffix, rounds)
    for length in prefixes:
        report.measure(f"{length:,} + {suffix:,} tokens", partial(report.add_prefix, length))
    report.add_break_even()
    if chat:
        report.measure("chat", report.add_chat)
    return describe_subject("ttft", subject) | {"rounds": rounds, **report.result()}


def break_even(gains: dict[int, float]) -> tuple[float | None, str]:
    """Return the fewest cached tokens from which on a hit beats plain transformers.

    Args:
        gains: By the number of cached tokens, the time by which the hit is faster.

    Returns:
        The number, between two measured ones where the gain changes its sign, or None if the hit
        with the most cached tokens does not win; and what it rests on.
    """
    tokens, lengths = fewest_winning(gains), sorted(gains)
    if tokens is None:
        return None, f"a hit does not win up to {lengths[-1]:,} cached tokens"
    if tokens == lengths[0]:
        return tokens, "a hit wins at each measured length; this is the shortest"
    below = max(length for length in lengths if length <= tokens)
    above = min(length for length in lengths if length > tokens)
    return tokens, f"between {below:,} and {above:,} cached tokens"


class PrefixTimes:
    """Times each way to get the first token of prompts that share a prefix, after a warm-up round.

    Attributes:
        seconds: The times until the first token, by way.
        call_seconds: The times until the call that made it returned, by way.
        skipped: Tokens that the prefix cache did not compute again, by way.
        declined: Hits that it declined, because it took them to lose, by way.
        expected_saving: Seconds that a hit saves by its own measurements; None: it does not know.
        peak_bytes: The most GPU memory that a run took beside what it found, by way.
        stats: What the prefix cache counted, rounds of ``first prompt`` left out.
        evictions: What the prefix cache gave up: with any, misses and hits are not what they seem.
    """

    def __init__(self, subject: Subject, prefix: int, suffix: int, rounds: int) -> None:
        self._subject = subject
        self._lengths = prefix, suffix
        self._rounds = rounds
        self._has_plain = True
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.call_seconds: dict[str, list[float]] = defaultdict(list)
        self.skipped: dict[str, list[int]] = defaultdict(list)
        self.declined: dict[str, int] = defaultdict(int)
        self.expected_saving: float | None = None
        self.peak_bytes: dict[str, int] = defaultdict(int)
        self.stats: dict[str, float] = {}
        self.evictions = 0

    def run(self) -> None:
        """Time all rounds."""
        prefix, suffix = self._lengths
        num_rounds = self._rounds + 1
        filled = self._subject.fill(self._subject.random(prefix))
        tokens_a_round = prefix + (_CALLS_A_ROUND + 1) * (suffix + _ANSWER_TOKENS)
        cache = self._subject.prefix_cache(
            num_tokens=num_rounds * tokens_a_round, num_calls=num_rounds * _CALLS_A_ROUND
        )
        with cache:
            for number in range(num_rounds):
                progress(f"{prefix:,} + {suffix:,} tokens: round {number} of {self._rounds}")
                with _no_collections():
                    self._time_round(cache, filled, plain_first=number % 2 == 0)
                if not number:
                    self._forget()
            self.stats = _counts(cache)
            self.expected_saving = cache.expected_saving(prefix, suffix)
            progress(f"{prefix:,} + {suffix:,} tokens: first prompts of an empty cache")
            for _ in range(self._rounds):
                with _no_collections():
                    self._time_first(cache)
            self.evictions += evictions(cache)

    def _time_round(self, cache: PrefixCache, filled: Any, *, plain_first: bool) -> None:
        subject, (prefix, suffix) = self._subject, self._lengths
        shared = subject.random(prefix)
        prompts = [
            torch.cat([shared, subject.random(suffix)], dim=1) for _ in range(_HITS_A_ROUND + 3)
        ]
        if plain_first:
            self._time_plain()
        self._time_cached(_MISS, cache, prompts[0])
        if not plain_first:
            self._time_plain()
        self._time_cached(_SECOND, cache, prompts[1])
        for prompt in prompts[2:-1]:
            self._time_cached(_HIT, cache, prompt)
            self._time_bare(prompt, filled)
        self._time_cached(_IDENTICAL, cache, prompts[-2])
        answered = subject.generate(cache, prompts[-1], max_new_tokens=_ANSWER_TOKENS)
        turn = torch.cat([answered, subject.random(suffix)], dim=1)
        self._time_cached(_TURN, cache, turn)

    def _time_bare(self, prompt: torch.Tensor, filled: Any) -> None:
        """Time the new tokens alone, over what plain transformers has computed of others."""
        new, past = prompt[:, self._lengths[0] :], copy_of(filled)
        with self._measured_memory(_BARE):
            self.seconds[_BARE].append(self._subject.time(lambda: self._subject.forward(new, past)))
        past = copy_of(filled)
        self._time(_FILLED, lambda: self._subject.first_token_filled(prompt, past))

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
        if not self._has_plain:  # once the exception has let go of its frames
            gc.collect()
            torch.cuda.empty_cache()

    def _time_cached(self, way: str, cache: PrefixCache, prompt: torch.Tensor) -> None:
        before = cache.stats()
        self._time(way, lambda: self._subject.first_token(cache, prompt))
        after = cache.stats()
        self.skipped[way].append(after.skipped_tokens - before.skipped_tokens)
        self.declined[way] += after.declined_hits - before.declined_hits

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
        """Forget the times of the round that warmed up: kernels were compiled and tuned in it."""
        self.seconds.clear()
        self.call_seconds.clear()
        self.skipped.clear()
        self.declined.clear()
        self.peak_bytes.clear()


class _Report:
    """The figures of one model."""

    def __init__(self, subject: Subject, suffix: int, rounds: int) -> None:
        self._subject = subject
        self._family = subject.family
        self._suffix = suffix
        self._rounds = rounds
        self._figures: list[Measurement] = []
        self._samples: dict[str, Any] = {}
        self._gains: dict[int, float] = {}
        self._expected_gains: dict[int, float] = {}
        self._failed: dict[str, str] = {}

    def result(self) -> dict[str, Any]:
        """Return the part of the result that is about figures."""
        return {
            "passed": not self._failed and all(one.passed for one in self._figures),
            "failed": self._failed,
            "measurements": as_dicts(self._figures),
            **self._samples,
        }

    def measure(self, title: str, add: Callable[[], None]) -> None:
        """Measure something; a failure is part of the result, and the rest is measured still."""
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
        self._figures += _times(times, title)
        self._figures += self._ratios(times, title, prefix)
        if _PLAIN in times.seconds:
            self._gains[prefix] = _median_ms(times, _PLAIN) - _median_ms(times, _HIT)
        if times.expected_saving is not None:
            self._expected_gains[prefix] = 1e3 * times.expected_saving
        self._samples.setdefault("stats", {})[title] = times.stats
        samples = self._samples.setdefault("samples_ms", {})
        samples[title] = {
            way: [round(1e3 * one, 3) for one in times.seconds[way]]
            for way in _WAYS
            if way in times.seconds
        }

    def add_break_even(self) -> None:
        """Add from how many cached tokens on a hit wins, as measured here and by the cache."""
        self._add_break_even("break_even", "break-even", self._gains)
        name = "break-even by the cache's own measurements"
        self._add_break_even("expected_break_even", name, self._expected_gains)

    def _add_break_even(self, key: str, name: str, gains: dict[int, float]) -> None:
        """Add one of them, unless nothing was measured."""
        if not gains:
            return
        tokens, detail = break_even(gains)
        in_ms = {str(prefix): round(gain, 3) for prefix, gain in sorted(gains.items())}
        self._samples[key] = {"cached_tokens": tokens, "detail": detail, "gains_ms": in_ms}
        if tokens is not None:
            self._figures.append(Measurement(name, tokens, "tokens", detail=detail))

    def add_chat(self) -> None:
        """Measure a chat."""
        figures, requests = measure_chat(self._subject, Chat(), min(self._rounds, _CHATS))
        self._figures += figures
        self._samples["chat"] = requests

    def _ratios(self, times: PrefixTimes, title: str, prefix: int) -> Iterator[Measurement]:
        is_cuda = self._subject.is_cuda  # a CPU has other work as well: no limits
        plain = _median_ms(times, _PLAIN) if _PLAIN in times.seconds else None
        hit, bare = _median_ms(times, _HIT), _median_ms(times, _BARE)
        # Each hit beside the bare forward that followed it: the host's speed comes and goes.
        pairs = zip(times.seconds[_HIT], times.seconds[_BARE], strict=True)
        beyond = {
            _HIT: statistics.median(1e3 * (one - other) for one, other in pairs),
            _TURN: _median_ms(times, _TURN) - bare,
        }
        if plain is not None:
            for way in (_MISS, _FIRST, _SECOND):
                limit = 1.05 if is_cuda and way != _SECOND else None
                ratio = _median_ms(times, way) / plain
                yield Measurement(f"{way} over plain, {title}", ratio, "x", limit)
        for way in (_HIT, _TURN):
            limit = 3.0 if is_cuda and way == _HIT else None
            name = f"{way} beyond the new tokens alone, {title}"
            yield Measurement(name, beyond[way], "ms", limit)
        if plain is not None:
            limit = self._family.speedup.get(prefix) if is_cuda else None
            name = f"hit, faster than plain, {title}"
            yield Measurement(name, plain / hit, "x", limit, at_least=True)
        for way in (_MISS, _PLAIN):
            if way in times.peak_bytes:
                limit = self._family.peak_gib if way == _MISS else None
                gib = times.peak_bytes[way] / 2**30
                name = f"{way}: memory beside weights and cache, {title}"
                yield Measurement(name, gib, "GiB", limit)
        yield Measurement(f"given up for lack of memory, {title}", times.evictions, "", 0)


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
        if times.declined.get(way):
            detail += f"; declined {times.declined[way]} of {len(seconds)} times"
        median = _median_ms(times, way)
        yield Measurement(f"{way}, {title}", median, "ms", runs=len(seconds), detail=detail)


def _counts(cache: PrefixCache) -> dict[str, float]:
    """Return the counters of a prefix cache, as far as they are numbers."""
    stats = cache.stats()
    values = {one.name: getattr(stats, one.name) for one in fields(stats)}
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def _median_ms(times: PrefixTimes, way: str) -> float:
    return statistics.median(times.seconds[way]) * 1e3


@contextmanager
def _no_collections() -> Iterator[None]:
    """Collect garbage before and not within, where it would strike one way or another."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
