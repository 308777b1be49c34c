"""Times many requests at once: one by one, in static batches, batched.

    python tests/benchmarks/bench_serve.py --family nemotron-h-8b --json serve.json
    python tests/benchmarks/bench_serve.py --tiny

Each baseline is set up as its users set it up, on the same model and in the same run:
``model.generate`` called one by one; ``model.generate`` over batches padded on the left, at the
best of several sizes; ``PrefixCache.generate`` called one by one. Prompts have equal lengths in
some workloads, where static batches lose nothing to padding, and mixed ones in others.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import re
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from measuring import Measurement, parser_for, progress, report
from model_kernels import REFERENCE, kernels_of
from models import Subject, add_family_option, describe_subject, make_subject

from mamba_cache.integrations.transformers import PrefixCache
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.integrations.transformers.prompts import pad_prompts

WAYS = {
    "generate": "generate, one by one",
    "static": "static batches of generate",
    "cached": "PrefixCache.generate, one by one",
    "batch": "generate_batch",
}
"""The ways to answer requests, by name, with their titles in figures."""

WORKLOADS = {
    "shared": "requests of a shared prefix",
    "lengths": "the same, answers of mixed lengths",
    "mixed": "requests of a shared prefix, prompts of mixed lengths",
    "rollouts": "prompts with many samples each",
    "trainer": "prompts of mixed lengths, nothing shared, each in the list once for each sample",
}
"""The workloads by name, with descriptions."""

_SAMPLE = 2
_SECONDS_ON_A_GPU = 400
"""GPUs are often lent for ten minutes; the last measurement may take one of them."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Sizes of the workloads."""

    requests: int  # requests of the workloads with a shared prefix
    shared: int  # tokens of the shared prefix
    own: int  # own tokens of each prompt; the mean of mixed lengths
    own_range: tuple[int, int]  # min and max own tokens of mixed lengths
    new: int  # tokens of each answer of equal length
    min_new: int  # min tokens of an answer of mixed length
    max_new: int  # max tokens of an answer of mixed length, and tokens of a rollout answer
    prompts: int  # prompts of the rollouts
    samples: int  # answers to each rollout prompt
    trained: tuple[int, int, int]  # prompts of a trainer, min and max tokens of each
    trained_samples: int  # answers to each trainer prompt
    static_rows: tuple[int, ...]  # sizes of static batches to try
    decode_rows: tuple[int, ...]  # sizes of batches whose decode steps are timed
    steps: int  # decode steps to time
    # Requests whose first tokens are timed, with min and max own tokens.
    firsts: tuple[tuple[int, int, int], ...]


_FULL = _Scale(
    requests=64, shared=2048, own=256, own_range=(64, 1024), new=128, min_new=16, max_new=512,
    prompts=8, samples=16, trained=(64, 256, 1024), trained_samples=8,
    static_rows=(32, 64, 128, 256, 512), decode_rows=(1, 8, 64), steps=64,
    firsts=((64, 256, 256), (64, 64, 1024), (32, 256, 256), (32, 128, 384)),
)  # fmt: skip
_TINY = _Scale(
    requests=6, shared=256, own=16, own_range=(4, 48), new=6, min_new=2, max_new=10,
    prompts=2, samples=3, trained=(3, 16, 64), trained_samples=2,
    static_rows=(3, 6), decode_rows=(1, 3), steps=8,
    firsts=((4, 16, 16), (4, 4, 48)),
)  # fmt: skip
_FIRST_ROUNDS = 4
"""How often first tokens are timed; the first round warms up."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive all at once."""

    name: str  # one of ``WORKLOADS``
    title: str  # its name in figures
    prompts: list[list[int]]  # the tokens of each prompt
    new_tokens: list[int]  # max tokens of each prompt's answers
    samples: int = 1  # answers to each prompt; several are sampled
    is_repeated: bool = False  # a batch repeats a prompt per sample, as trainers do
    # Tokens that end an answer. Empty: each answer has its max tokens.
    end_tokens: list[int] = field(default_factory=list)

    @property
    def num_answers(self) -> int:
        """Answers to all prompts."""
        return len(self.prompts) * self.samples

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    def options(self, prompt: int) -> dict[str, Any]:
        """Return the options of ``generate`` for an answer to a prompt."""
        options: dict[str, Any] = {"max_new_tokens": self.new_tokens[prompt], "do_sample": False}
        if self.samples > 1:
            # Rollouts are sampled from all tokens.
            options |= {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        if self.end_tokens:
            options["eos_token_id"] = self.end_tokens
        return options

    def cut(self, answer: Sequence[int], prompt: int) -> list[int]:
        """Return an answer without padding of static batches and tokens past its end."""
        kept = list(answer[: self.new_tokens[prompt]])
        ends = set(self.end_tokens)
        first = next((i for i, token in enumerate(kept) if token in ends), len(kept))
        return kept[: first + 1]

    def sample(self, size: int | None) -> list[int]:
        """Return some of the prompts, spread evenly over the lengths of their answers."""
        everyone = sorted(range(len(self.prompts)), key=lambda i: (self.new_tokens[i], i))
        if size is None or size >= len(everyone):
            return sorted(everyone)
        middles = [(2 * i + 1) * len(everyone) // (2 * size) for i in range(size)]
        return [everyone[i] for i in middles]


def mixed_lengths(drawn: random.Random, count: int, low: int, high: int, *, mean: int) -> list[int]:
    """Draw lengths from a log-normal distribution, cut at both ends, whose mean is given."""
    lengths = [
        min(max(round(mean * drawn.lognormvariate(-0.32, 0.8)), low), high) for _ in range(count)
    ]
    left = mean * count - sum(lengths)
    while left:  # so that the sum equals that of equal lengths
        place, step = drawn.randrange(count), 1 if left > 0 else -1
        if low <= lengths[place] + step <= high:
            lengths[place] += step
            left -= step
    return lengths


def make_workloads(
    names: Sequence[str], scale: _Scale, vocabulary: int, seed: int = 0
) -> list[Workload]:
    """Draw workloads, equal for equal seeds."""
    drawn = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [drawn.randrange(3, vocabulary) for _ in range(number)]

    made = []
    for name in WORKLOADS:
        if name == "rollouts":
            title = f"{scale.prompts} x {scale.samples} rollouts"
            prompts = [tokens(4 * scale.own) for _ in range(scale.prompts)]
            # An answer of a random model ends where any of these comes: on average after half its
            # max tokens, at a length that is not known before.
            ends = drawn.sample(range(3, vocabulary), 2 * vocabulary // scale.max_new)
            lengths = [scale.max_new] * scale.prompts
            workload = Workload(name, title, prompts, lengths, scale.samples, ends)
        elif name == "trainer":
            count, low, high = scale.trained
            title = f"{count} prompts of {low} to {high} x {scale.trained_samples} samples"
            prompts = [tokens(drawn.randint(low, high)) for _ in range(count)]
            lengths = [scale.new] * count
            workload = Workload(name, title, prompts, lengths, scale.trained_samples)
            workload = replace(workload, is_repeated=True)
        else:
            shared = tokens(scale.shared)
            own = [scale.own] * scale.requests
            title = f"{scale.requests} requests, {scale.new} new"
            if name == "mixed":
                own = mixed_lengths(drawn, scale.requests, *scale.own_range, mean=scale.own)
                title = f"{scale.requests} requests of {min(own)} to {max(own)}, {scale.new} new"
            prompts = [shared + tokens(number) for number in own]
            lengths = [scale.new] * scale.requests
            if name == "lengths":
                lengths = [drawn.randint(scale.min_new, scale.max_new) for _ in prompts]
                title = f"{scale.requests} requests, {scale.min_new} to {scale.max_new} new"
            workload = Workload(name, title, prompts, lengths)
        if name in names:
            made.append(workload)
    return made


@dataclass(slots=True)
class Outcome:
    """The result of one way for a workload, or for a part of it.

    Attributes:
        seconds: Total time.
        answers: The tokens of each answer, by prompt and number of the sample.
        first_seconds: Until each answer's first token was on the host: from the moment when all
            requests arrived, or from the beginning of the call if called one by one.
        step_seconds: From one token of an answer to the next.
        rows: Max answers computed side by side; 0: the way decides.
    """

    seconds: float = 0.0
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    first_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    rows: int = 1

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second."""
        return sum(map(len, self.answers.values())) / self.seconds

    def as_dict(self, workload: Workload) -> dict[str, Any]:
        """Return the figures for the JSON result."""
        return {
            "rows": self.rows,
            "answers": len(self.answers),
            "of": workload.num_answers,
            "new_tokens": sum(map(len, self.answers.values())),
            "seconds": round(self.seconds, 6),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "first_token_ms": _spread_ms(self.first_seconds),
            "all_first_tokens_ms": round(1e3 * max(self.first_seconds, default=0.0), 3),
            "step_ms": _spread_ms(self.step_seconds),
        }


class _Stamps:
    """A stopping criterion that stops nothing and records each token's time.

    ``generate`` itself waits for the device after each token, to check for the end of all answers.
    """

    def __init__(self, device: torch.device, wait: Callable[[], None]) -> None:
        self._device = device
        self._wait = wait
        self.at: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        self._wait()
        self.at.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=self._device)


def _answer_one_by_one(
    subject: Subject, llm: Any, workload: Workload, prompts: Sequence[int]
) -> Outcome:
    """Call ``generate`` of the model or of a prefix cache for one answer after the other."""
    outcome = Outcome()
    for prompt in prompts:
        ids = torch.tensor([workload.prompts[prompt]], device=subject.model.device)
        for number in range(workload.samples if len(prompts) == len(workload.prompts) else 1):
            first = subject.first_token(llm, ids, **workload.options(prompt))
            answer = workload.cut(first.ids[0, ids.shape[1] :].tolist(), prompt)
            outcome.answers[prompt, number] = answer
            outcome.seconds += first.call_seconds
            outcome.first_seconds.append(first.seconds)
            if len(answer) > 1:
                step = (first.call_seconds - first.seconds) / (len(answer) - 1)
                outcome.step_seconds.append(step)
    return outcome


def _answer_in_batches(
    subject: Subject, workload: Workload, rows: int, max_batches: int | None = None
) -> Outcome:
    """Call ``model.generate`` for batches in the order of arrival, one after the other."""
    model, outcome = subject.model, Outcome(rows=rows)
    size = max(1, rows // workload.samples)
    batches = [
        range(i, min(i + size, len(workload.prompts)))
        for i in range(0, len(workload.prompts), size)
    ]
    subject.synchronize()
    start = time.perf_counter()
    for batch in batches[:max_batches]:
        prompts = [workload.prompts[i] for i in batch]
        ids, mask = pad_prompts(prompts, 0, model.device)
        options = workload.options(batch[0])
        options["max_new_tokens"] = max(workload.new_tokens[i] for i in batch)
        stamps = _Stamps(model.device, subject.synchronize)
        found = model.generate(
            ids,
            attention_mask=mask,
            num_return_sequences=workload.samples,
            stopping_criteria=[stamps],
            **options,
        )
        answers = found[:, ids.shape[1] :].tolist()
        for place, answer in enumerate(answers):
            prompt, number = batch[place // workload.samples], place % workload.samples
            outcome.answers[prompt, number] = workload.cut(answer, prompt)
        outcome.first_seconds += [stamps.at[0] - start] * len(answers)
        outcome.step_seconds += _gaps(stamps.at)
    subject.synchronize()
    outcome.seconds = time.perf_counter() - start
    return outcome


def _answer_batched(subject: Subject, cache: PrefixCache, workload: Workload) -> Outcome:
    """Call ``generate_batch`` of a prefix cache for all requests."""
    outcome = Outcome(rows=0)
    times = workload.samples if workload.is_repeated else 1
    order = [i for i in range(len(workload.prompts)) for _ in range(times)]
    configs = [_config(workload, i) for i in order]
    subject.synchronize()
    start = time.perf_counter()
    found = cache.generate_batch(
        [workload.prompts[i] for i in order], generation_config=configs, record_timestamps=True
    )
    subject.synchronize()
    outcome.seconds = time.perf_counter() - start
    by_prompt: dict[tuple[int, ...], list[Any]] = {}
    for output in found.values():
        by_prompt.setdefault(tuple(output.prompt_ids), []).append(output)
    for prompt, tokens in enumerate(workload.prompts):
        for number, output in enumerate(by_prompt[tuple(tokens)]):
            if output.error is not None:
                raise RuntimeError(f"generate_batch failed for a request: {output.error}")
            outcome.answers[prompt, number] = workload.cut(output.generated_tokens, prompt)
            outcome.first_seconds.append(output.timestamps[0] - start)
            outcome.step_seconds += _gaps(output.timestamps)
    return outcome


def _time_decode_steps(subject: Subject, cache: PrefixCache, rows: int, steps: int) -> list[float]:
    """Return the seconds of each step in which exactly ``rows`` requests decode."""
    prompts = [subject.random(64)[0].tolist() for _ in range(rows)]
    config = _config(Workload("steps", "", prompts, [steps + 1] * rows), 0)
    found = cache.generate_batch(prompts, generation_config=config, record_timestamps=True)
    stamps = [output.timestamps for output in found.values()]
    all_from, until = max(one[0] for one in stamps), min(one[-1] for one in stamps)
    # Two tokens of one request are one step of all apart.
    times = [at for at in stamps[-1] if all_from <= at <= until]
    return _gaps(times)


def _config(workload: Workload, prompt: int) -> Any:
    options = workload.options(prompt)
    if not workload.is_repeated:
        options["num_return_sequences"] = workload.samples
    return transformers().GenerationConfig(pad_token_id=0, **options)


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return median and 99th percentile in milliseconds; empty without times."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    last = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return {
        "median": round(1e3 * statistics.median(ordered), 3),
        "p99": round(1e3 * last, 3),
    }


def compile_parts(model: torch.nn.Module) -> list[str]:
    """Compile norms, MLPs and experts in place; return the names of their classes.

    These compute each token by itself. Layers that read a cache are not compiled.
    """
    parts: list[torch.nn.Module] = []
    seen: set[torch.nn.Module] = set()
    for module in model.modules():  # a module before its children
        if module not in seen and re.search(r"(Norm|NormGated|MLP|MoE)$", type(module).__name__):
            parts.append(module)
            seen.update(module.modules())
    for part in parts:
        part.compile(dynamic=True)
    return sorted({type(part).__name__ for part in parts})


@dataclass(slots=True)
class _Report:
    """The figures of one model."""

    subject: Subject
    workloads: Sequence[Workload]
    ways: Sequence[str]
    sample: int | None
    seconds: float | None
    static_rows: Sequence[int]
    decode_rows: Sequence[int]
    max_requests: int
    scale: _Scale
    figures: list[Measurement] = field(default_factory=list)
    outcomes: dict[str, dict[str, list[Outcome]]] = field(default_factory=lambda: defaultdict(dict))
    failed: dict[str, str] = field(default_factory=dict)
    equal_seconds: dict[int, float] = field(default_factory=dict)
    is_lost: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    start: float = 0.0

    def result(self) -> dict[str, Any]:
        """Return the result without the figures."""
        return {
            "sample": self.sample,
            "seconds": round(time.perf_counter() - self.start, 1),
            "failed": self.failed,
            "workloads": {
                one.name: {
                    "prompts": len(one.prompts),
                    "prompt_tokens": [min(map(len, one.prompts)), one.longest],
                    "samples": one.samples,
                    "new_tokens": [min(one.new_tokens), max(one.new_tokens)],
                    "ways": {
                        way: [outcome.as_dict(one) for outcome in outcomes]
                        for way, outcomes in self.outcomes[one.name].items()
                    },
                }
                for one in self.workloads
            },
            **self.extra,
        }

    def run(self) -> None:
        self.start = time.perf_counter()
        subject, model = self.subject, self.subject.model
        if "generate" in self.ways:
            self._warm_up(lambda: subject.generate(model, self._fresh(1), max_new_tokens=8))
            for one in self.workloads:
                run = partial(_answer_one_by_one, subject, model, one, one.sample(self.sample))
                self._measure("generate", one, run)
        if "batch" in self.ways:
            self._attempt(WAYS["batch"], self._run_batch)
        if "static" in self.ways:
            self._warm_up(lambda: subject.generate(model, self._fresh(2), max_new_tokens=8))
            for one in self.workloads:
                self._measure_static(one)
        if "cached" in self.ways:
            self._attempt(WAYS["cached"], self._run_cached)
        for one in self.workloads:
            for way in self.ways:
                if way not in self.outcomes[one.name]:
                    self.failed.setdefault(f"{WAYS[way]}, {one.title}", "nothing was measured")
            self.figures += self._compare(one)

    def _measure(self, way: str, workload: Workload, run: Callable[[], Outcome]) -> None:
        def add() -> None:
            outcome = run()
            self.outcomes[workload.name].setdefault(way, []).append(outcome)
            part = f"{len(outcome.answers)} of {workload.num_answers} answers"
            rate = f"{outcome.tokens_per_second:,.0f} new tokens/s"
            total = time.perf_counter() - self.start
            progress(
                f"{workload.title}: {WAYS[way]}: {part} in {outcome.seconds:.1f} s, {rate} "
                f"({total:.0f} s so far)"
            )

        self._attempt(f"{WAYS[way]}, {workload.title}", add)

    def _measure_static(self, workload: Workload) -> None:
        max_batches = None if self.sample is None else 1
        sizes = sorted({min(rows, workload.num_answers) for rows in self.static_rows})
        for rows in sizes:
            run = partial(_answer_in_batches, self.subject, workload, rows, max_batches)
            self._measure("static", workload, run)

    def _run_cached(self) -> None:
        with self._make_cache() as cache:
            self._warm_up(lambda: self.subject.generate(cache, self._fresh(1), max_new_tokens=8))
            for one in self.workloads:
                chosen = one.sample(self.sample)
                others = [i for i in range(len(one.prompts)) if i not in chosen][:2]
                for other in others if one.samples == 1 else ():
                    # In a sample, most prompts would be the first with a shared prefix.
                    ids = torch.tensor([one.prompts[other]], device=self.subject.model.device)
                    self.subject.generate(cache, ids)
                run = partial(_answer_one_by_one, self.subject, cache, one, chosen)
                self._measure("cached", one, run)

    def _run_batch(self) -> None:
        with self._make_cache() as cache:
            seconds = self.subject.time(cache.prepare_batches)
            self.figures.append(Measurement("prepare_batches", 1e3 * seconds, "ms"))
            for number, first in enumerate(self.scale.firsts):
                count, low, high = first
                own = f"{low:,}" + (f" to {high:,}" if high > low else "")
                title = f"all first tokens, {count} x ({self.scale.shared:,} cached + {own})"
                run = partial(self._add_first_tokens, title, cache, first, is_first=not number)
                self._attempt(title, run)
            seconds = self.subject.time(lambda: self._warm_up_batches(cache))
            self.figures.append(
                Measurement("generate_batch: warm-up, CUDA graphs included", 1e3 * seconds, "ms")
            )
            for rows in self.decode_rows:
                title = f"generate_batch: decode step of {rows} requests, host time included"
                self._attempt(title, partial(self._add_decode_steps, title, cache, rows))
            for one in self.workloads:
                self._measure("batch", one, partial(_answer_batched, self.subject, cache, one))
            stats = cache.batch_stats()
            if stats is not None:
                self.extra["batch"] = json.loads(json.dumps(asdict(stats), default=str))

    def _add_decode_steps(self, title: str, cache: PrefixCache, rows: int) -> None:
        seconds = _time_decode_steps(self.subject, cache, rows, self.scale.steps)
        spread = _spread_ms(seconds)
        self.figures.append(
            Measurement(
                title,
                spread["median"],
                "ms",
                runs=len(seconds),
                detail=f"99th percentile {spread['p99']:.2f} ms",
            )
        )
        self.extra.setdefault("decode_step_ms", {})[str(rows)] = spread

    def _add_first_tokens(
        self, title: str, cache: PrefixCache, first: tuple[int, int, int], *, is_first: bool
    ) -> None:
        """Time until all requests have their first token; each round has new own tokens."""
        subject, scale, (count, low, high) = self.subject, self.scale, first
        lengths = mixed_lengths(random.Random(0), count, low, high, mean=scale.own)
        [shared] = subject.random(scale.shared).tolist()
        subject.generate(cache, torch.tensor([shared], device=subject.model.device))
        seconds = []
        for _ in range(_FIRST_ROUNDS):
            prompts = [shared + subject.random(length)[0].tolist() for length in lengths]
            call = partial(cache.generate_batch, prompts, max_new_tokens=1, do_sample=False)
            seconds.append(subject.time(call))
        if is_first:
            name, ratio = "generate_batch: first batch over the third", seconds[0] / seconds[2]
            self.figures.append(Measurement(name, ratio, "x"))
        median = statistics.median(seconds[1:])
        runs, detail = len(seconds) - 1, f"{sum(lengths):,} new tokens"
        self.figures.append(Measurement(title, 1e3 * median, "ms", runs=runs, detail=detail))
        in_ms = [round(1e3 * one, 3) for one in seconds]
        self.extra.setdefault("all_first_tokens_ms", {})[title] = in_ms
        if low == high:
            self.equal_seconds[count] = median
            self._compare_with_a_forward(title, median, count)
        elif count in self.equal_seconds:
            ratio = median / self.equal_seconds[count]  # equal lengths with as many tokens
            self.figures.append(Measurement(f"{title}, over equal lengths", ratio, "x"))

    def _compare_with_a_forward(self, title: str, seconds: float, rows: int) -> None:
        """Time one plain forward of as many new tokens, from nothing, warm."""
        subject = self.subject
        ids = torch.cat([subject.random(self.scale.own) for _ in range(rows)])
        times = [subject.time(lambda: subject.forward(ids, subject.new_cache())) for _ in range(3)]
        ratio = seconds / statistics.median(times[1:])
        self.figures.append(Measurement(f"{title}, over one plain forward", ratio, "x"))

    def _make_cache(self) -> PrefixCache:
        """Make a prefix cache that evicts no entry that a workload needs."""
        self._empty()
        tokens = max(
            sum(map(len, one.prompts)) + max(one.new_tokens) * one.num_answers
            for one in self.workloads
        )
        return self.subject.prefix_cache(
            num_tokens=2 * tokens,
            num_calls=max(len(one.prompts) for one in self.workloads) + 8,
            max_requests=self.max_requests,
        )

    def _compare(self, workload: Workload) -> Iterator[Measurement]:
        """Return the figures of a workload, the best of each way."""
        found = self.outcomes[workload.name]
        best = {
            way: max(outcomes, key=lambda one: one.tokens_per_second)
            for way in WAYS
            if (outcomes := found.get(way))
        }
        for way, outcome in best.items():
            yield from _figures_of(way, workload, outcome)
        for way in ("generate", "static"):
            if way in best and "batch" in best:
                ratio = best["batch"].tokens_per_second / best[way].tokens_per_second
                name = f"generate_batch over {WAYS[way]}, {workload.title}"
                yield Measurement(name, ratio, "x")
        if "cached" in best and "generate" in best:
            ratio = best["cached"].tokens_per_second / best["generate"].tokens_per_second
            name = f"{WAYS['cached']}, over {WAYS['generate']}, {workload.title}"
            yield Measurement(name, ratio, "x")
            steps = [one.step_seconds for one in (best["generate"], best["cached"])]
            if all(steps):
                plain, cached = map(statistics.median, steps)
                name = f"{WAYS['cached']}: from token to token, faster than {WAYS['generate']}"
                yield Measurement(f"{name}, {workload.title}", plain / cached, "x")
        if workload.samples == 1:
            yield from self._equality(workload, found)

    def _equality(
        self, workload: Workload, found: dict[str, list[Outcome]]
    ) -> Iterator[Measurement]:
        """Compare all ways' answers with the first way's, where both have them."""
        answers = {
            way: {key: answer for one in found[way] for key, answer in one.answers.items()}
            for way in WAYS
            if way in found
        }
        first, *others = answers or [""]
        for way in others:
            expected, actual = answers[first], answers[way]
            both = sorted(expected.keys() & actual.keys())
            if not both:
                continue
            equal = sum(expected[key] == actual[key] for key in both)
            share = statistics.fmean(_common(expected[key], actual[key]) for key in both)
            yield Measurement(
                f"{WAYS[way]}: answers equal to those of {WAYS[first]}, {workload.title}",
                100 * equal / len(both),
                "%",
                detail=f"{equal} of {len(both)}; equal tokens before the first other one: "
                f"{share:.0%}",
            )

    def _attempt(self, title: str, run: Callable[[], None]) -> None:
        """Run one measurement; record a failure in the result and go on."""
        if self.seconds is not None and time.perf_counter() - self.start > self.seconds:
            self.failed[title] = f"not begun: {self.seconds} s were over"
            return
        if self.is_lost:
            self.failed[title] = "not begun: the device had failed"
            return
        try:
            run()
        except torch.cuda.OutOfMemoryError as error:
            progress(f"{title}: out of memory")
            self.extra.setdefault("out_of_memory", {})[title] = str(error).partition(". ")[0]
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.failed[title] = f"{type(error).__name__}: {error}"
        try:
            self._empty()
        except RuntimeError as error:
            # An assertion in a kernel: the process cannot recover from it.
            self.is_lost = True
            self.failed.setdefault(title, f"{type(error).__name__}: {error}")

    def _warm_up(self, run: Callable[[], object]) -> None:
        """Compile and tune kernels before anything is timed."""
        self.subject.time(run)

    def _warm_up_batches(self, cache: PrefixCache) -> None:
        """Warm up batches with prompts that share a prefix, as long as the longest prompt."""
        _time_decode_steps(self.subject, cache, 2, 4)
        [stem], ends = self._fresh(1).tolist(), self._fresh(4).tolist()
        part = len(stem) // 9
        prompts = [stem[part:] + end[:part] for end in ends]
        cache.generate_batch(prompts, max_new_tokens=2, do_sample=False)

    def _fresh(self, rows: int) -> torch.Tensor:
        """Return fresh prompts as long as the longest prompt: [rows, length]."""
        length = max(one.longest for one in self.workloads)
        return torch.cat([self.subject.random(length) for _ in range(rows)])

    def _empty(self) -> None:
        gc.collect()
        if self.subject.is_cuda:
            torch.cuda.empty_cache()


def _figures_of(way: str, workload: Workload, outcome: Outcome) -> Iterator[Measurement]:
    name, answers = f"{WAYS[way]}, {workload.title}", len(outcome.answers)
    detail = f"{answers} of {workload.num_answers} answers in {outcome.seconds:.2f} s"
    if way == "static":
        detail += f"; batches of {outcome.rows}"
    yield Measurement(f"{name}: new tokens", outcome.tokens_per_second, "/s", detail=detail)
    for title, seconds in (
        ("time to first token", outcome.first_seconds),
        ("from token to token", outcome.step_seconds),
    ):
        if spread := _spread_ms(seconds):
            detail = f"99th percentile {spread['p99']:,.1f} ms"
            if way in ("generate", "cached") and seconds is outcome.first_seconds:
                detail += "; from its own call on"
            figure = spread["median"]
            yield Measurement(f"{name}: {title}", figure, "ms", runs=len(seconds), detail=detail)


def _common(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the share of two answers that is their common prefix."""
    same = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        same += 1
    return same / max(len(one), len(other), 1)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Make a model on the GPU, or else on the CPU, and measure ways to serve requests with it."""
    parser = parser_for(__doc__)
    add = parser.add_argument
    add_family_option(parser)
    about = "the same as --family tiny, and tiny workloads: seconds on a CPU, to see that all works"
    add("--tiny", dest="family", action="store_const", const="tiny", help=about)
    add("--workload", nargs="+", choices=WORKLOADS, help="workloads to run; default: all")
    add("--only", nargs="+", choices=WAYS, help="ways to run them; default: all")
    about = "number of prompts called one by one, with one batch of each size, in place of all; "
    about += f"default: {_SAMPLE}, or with tiny workloads all"
    add("--sample", type=int, metavar="N", help=about)
    about = "start no measurement after N seconds, report the results so far; default: on a GPU "
    about += f"{_SECONDS_ON_A_GPU}, with tiny workloads no limit"
    add("--seconds", type=int, metavar="N", help=about)
    add("--static-rows", type=int, nargs="+", metavar="N", help="sizes of static batches to try")
    about = "sizes of batches whose decode steps are timed"
    add("--decode-rows", type=int, nargs="+", metavar="N", help=about)
    about = "requests that generate_batch runs at once; default: 128"
    add("--max-requests", type=int, default=128, metavar="N", help=about)
    about = "compile the model's norms, MLPs and experts in place, for all ways alike"
    add("--compile", action="store_true", help=about)
    options = parser.parse_args(arguments)
    subject = make_subject(options.family)
    scale = _TINY if subject.family_name == "tiny" else _FULL
    compiled = compile_parts(subject.model) if options.compile else []
    if subject.is_cuda and REFERENCE in kernels_of(subject.model).values():
        progress("not all kernels are installed: the baselines are slower than what people run")
    names, size = options.workload or [*WORKLOADS], subject.model.config.vocab_size
    found = _Report(
        subject,
        workloads=make_workloads(names, scale, size),
        ways=[way for way in WAYS if way in (options.only or WAYS)],
        sample=options.sample if options.sample or scale is _TINY else _SAMPLE,
        seconds=options.seconds if options.seconds or scale is _TINY else _SECONDS_ON_A_GPU,
        static_rows=sorted(options.static_rows or scale.static_rows),
        decode_rows=sorted(options.decode_rows or scale.decode_rows),
        max_requests=options.max_requests,
        scale=scale,
    )
    found.run()
    more = describe_subject(subject) | {"compiled": compiled} | found.result()
    return report("serve", found.figures, options.json, **more)


if __name__ == "__main__":
    main()
