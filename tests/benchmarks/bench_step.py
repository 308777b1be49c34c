"""Times a step on the host: bookkeeping of decoding requests, and of a prompt's whole life.

    python tests/benchmarks/bench_step.py --json step.json

No model runs here. All of it is single-threaded, and process time is measured, so that other work
on the machine does not count. Steps of the context and of a plain loop take turns in one run, so
their ratio holds on a slower or busy machine.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import xxhash
from measuring import Measurement, parser_for, progress, report

from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, Request
from mamba_cache.reference.no_model import NoModel, count_as_computed

_NUM_REQUESTS = (1, 16, 64, 256, 1_024)
_NUM_DRAFTS = 3
_STEPS_IN_TURN = 10
_BLOCK = 256
_LIVES = ((512, 256), (32_768, 256), (32_768, 16))
_MAX_SEQUENCE = 32_768


def measure_decode_steps(
    num_requests: Sequence[int] = _NUM_REQUESTS, *, runs: int = 300
) -> Iterator[Measurement]:
    """Time ``begin_step`` and ``commit_step`` beside a plain loop over request objects.

    The requests stand at different places of their blocks, so that each step fills some. Tokens
    and drafts are given as arrays, and no states are saved; with default settings they are saved,
    and tokens are given by name.
    """
    for count in num_requests:
        progress(f"decode with {count:,} requests")
        lengths = [_BLOCK + 1 + 211 * i % (_BLOCK - 1) for i in range(count)]
        loop = _LoopOfSteps(lengths)
        plain = _ContextOfSteps(lengths, num_drafts=0)
        drafting = _ContextOfSteps(lengths, num_drafts=_NUM_DRAFTS)
        default = _ContextOfSteps(lengths, num_drafts=0, is_default=True)
        with _one_thread():
            steps = [loop.step, plain.step, drafting.step, default.step]
            times = _interleaved(steps, runs)
        yield from _compared(count, times, runs)


def measure_prompt_lives(
    lives: Sequence[tuple[int, int]] = _LIVES, *, runs: int = 60
) -> Iterator[Measurement]:
    """Time adding a fresh prompt, its one step, and its end.

    Args:
        lives: Pairs of prompt tokens and tokens of a block.
        runs: Number of timings of each pair.
    """
    for num_tokens, block_size in lives:
        progress(f"lives of {num_tokens:,} tokens in blocks of {block_size}")
        with _one_thread():
            parts = np.array(_lives(num_tokens, block_size, runs)) * 1e3
        names = ("add", "begin", "commit", "finish")
        medians = np.median(parts, axis=0)
        detail = ", ".join(f"{n} {ms:.2f}" for n, ms in zip(names, medians, strict=True))
        yield Measurement(
            f"add, step and finish {num_tokens:,} tokens, block {block_size}",
            statistics.median(parts.sum(axis=1).tolist()),
            "ms",
            runs=runs,
            detail=detail,
        )


class PlainLoop:
    """The bookkeeping of plain engines: each part is a loop over request objects.

    In the style of nano-vllm: a step allocates blocks where requests open one, gathers five lists
    and a padded block table into tensors, appends the sampled tokens, and hashes the full blocks.

    Args:
        lengths: Tokens of each prompt.
        num_blocks: Blocks of the pool.
        block_size: Tokens of a block.
    """

    def __init__(self, lengths: Sequence[int], num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._free = deque(range(num_blocks))
        self._block_of_hash: dict[bytes, int] = {}
        self._digest = xxhash.xxh3_128_digest  # nano-vllm uses xxh64
        self.running = deque(_PlainRequest([1] * length) for length in lengths)
        for request in self.running:
            for _ in range(-(-len(request.tokens) // block_size)):
                request.blocks.append(self._free.popleft())
            for index in range(len(request.tokens) // block_size):
                self._hash(request, index)

    def begin(self) -> tuple[list[_PlainRequest], list[torch.Tensor]]:
        """Schedule all requests; return them, and the model's inputs."""
        scheduled = []
        while self.running:
            request = self.running.popleft()
            length = len(request.tokens)
            if length % self._block_size == 1 and length > len(request.blocks) * self._block_size:
                request.blocks.append(self._free.popleft())
            scheduled.append(request)
        self.running.extend(scheduled)
        input_ids, positions, lengths, slots, temperatures = [], [], [], [], []
        for request in scheduled:
            length = len(request.tokens)
            input_ids.append(request.last_token)
            positions.append(length - 1)
            lengths.append(length)
            slots.append(request.blocks[-1] * self._block_size + (length - 1) % self._block_size)
            temperatures.append(request.temperature)
        longest = max(len(request.blocks) for request in scheduled)
        tables = [r.blocks + [-1] * (longest - len(r.blocks)) for r in scheduled]
        return scheduled, [
            torch.tensor(input_ids, dtype=torch.int64),
            torch.tensor(positions, dtype=torch.int64),
            torch.tensor(slots, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor(temperatures, dtype=torch.float32),
            torch.tensor(tables, dtype=torch.int32),
        ]

    def commit(self, scheduled: Sequence[_PlainRequest], tokens: Sequence[int]) -> None:
        """Append each request's token; hash the block that it fills; detect the request's end."""
        for request, token in zip(scheduled, tokens, strict=True):
            request.append(token)
            if len(request.tokens) % self._block_size == 0:
                self._hash(request, len(request.tokens) // self._block_size - 1)
            if token == request.stop_token or len(request.tokens) == request.max_tokens:
                self.running.remove(request)
                self._free.extend(request.blocks)

    def _hash(self, request: _PlainRequest, index: int) -> None:
        start = index * self._block_size
        tokens = np.array(request.tokens[start : start + self._block_size], dtype=np.int32)
        request.parent = self._digest(request.parent + tokens.tobytes())
        self._block_of_hash[request.parent] = request.blocks[index]


class _PlainRequest:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.last_token = tokens[-1]
        self.blocks: list[int] = []
        self.parent = b""
        self.temperature = 1.0
        self.stop_token = -1
        self.max_tokens = 1 << 30

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.last_token = token


class _LoopOfSteps:
    def __init__(self, lengths: Sequence[int]) -> None:
        self._loop = PlainLoop(lengths, 16 * len(lengths), _BLOCK)
        self._rng = np.random.default_rng()

    def step(self) -> float:
        tokens = self._rng.integers(0, 1_000, len(self._loop.running)).tolist()
        start = time.process_time()
        scheduled, _ = self._loop.begin()
        self._loop.commit(scheduled, tokens)
        return time.process_time() - start


class _ContextOfSteps:
    """Requests that decode; with drafts each step accepts one draft and adds the next token."""

    def __init__(
        self, lengths: Sequence[int], *, num_drafts: int, is_default: bool = False
    ) -> None:
        count = len(lengths)
        self._is_default = is_default
        self._rng = np.random.default_rng()
        self._num_drafts = num_drafts
        self._count = count
        self._context = DynamicInferenceContext(
            CacheConfig(
                block_size_tokens=_BLOCK,
                max_requests=count,
                max_tokens=max(8_192, (1 + num_drafts) * count),
                max_sequence_length=_MAX_SEQUENCE,
                num_kv_blocks=64 * count,
                max_slots=8 * count,
                save_decode_states=is_default,
                num_speculative_tokens=num_drafts,
            ),
            NoModel().state_spec(torch.float32),
        )
        for request_id, length in enumerate(lengths):
            tokens = self._rng.integers(0, 1_000, length, dtype=np.int32)
            self._context.add_request(Request(request_id=request_id, prompt_tokens=tokens))
            count_as_computed(self._context, self._context.begin_step([]).metadata)
            self._context.commit_step({request_id: 1})

    def step(self) -> float:
        tokens = self._rng.integers(0, 1_000, (self._count, 2))
        drafts = counts = None
        if self._num_drafts:
            drafts = self._rng.integers(0, 1_000, (self._count, self._num_drafts))
            tokens[:, 0], counts = drafts[:, 0], np.full(self._count, 2)
        else:
            tokens = tokens[:, 0]
        given = dict(enumerate(tokens.tolist())) if self._is_default else tokens
        start = time.process_time()
        self._context.begin_step(drafts=drafts)
        self._context.commit_step(given, counts)
        return time.process_time() - start


def _compared(count: int, times: Sequence[list[float]], runs: int) -> Iterator[Measurement]:
    loop, plain, drafting, default = times
    loop_us = statistics.mean(loop) * 1e6
    for name, seconds in (
        ("", plain),
        (f" and {_NUM_DRAFTS} drafts each", drafting),
        (", default settings", default),
    ):
        own = statistics.mean(seconds) * 1e6  # a median would omit steps that end blocks
        yield Measurement(
            f"begin and commit a step, {count:,} requests{name}",
            own,
            "us",
            runs=runs,
            detail=f"{own / count:,.2f} us a request",
        )
        yield Measurement(
            f"the same over a plain loop, {count:,} requests{name}",
            own / loop_us,
            "x",
            runs=runs,
            detail=f"{own:,.0f} us, loop {loop_us:,.0f} us",
        )


def _lives(num_tokens: int, block_size: int, runs: int) -> list[list[float]]:
    context = DynamicInferenceContext(
        CacheConfig(
            block_size_tokens=block_size,
            max_requests=64,
            ssm_chunk_size=min(256, block_size),
            max_tokens=num_tokens + 64,
            max_sequence_length=2 * num_tokens,
            num_kv_blocks=(runs + 2) * (num_tokens // block_size + 1),
            max_slots=64,
        ),
        NoModel().state_spec(torch.float32),
    )
    rng = np.random.default_rng()
    lives = []
    for number in range(runs + 1):
        prompt = rng.integers(0, 2**31, num_tokens, dtype=np.int32)
        times = [time.process_time()]
        context.add_request(Request(request_id=number, prompt_tokens=prompt))
        times.append(time.process_time())
        step = context.begin_step()
        times.append(time.process_time())
        count_as_computed(context, step.metadata)
        computed = time.process_time()
        context.commit_step({number: 1})
        committed = time.process_time()
        context.finish(number)
        parts = np.diff(times).tolist()
        lives.append([*parts, committed - computed, time.process_time() - committed])
    return lives[1:]


def _interleaved(steps: Sequence[Callable[[], float]], runs: int) -> list[list[float]]:
    """Return the seconds of each kind of step; kinds take turns, a few steps each."""
    times: list[list[float]] = [[] for _ in steps]
    while len(times[-1]) < runs:
        for seconds, step in zip(times, steps, strict=True):
            step()  # refill the processor's caches after the other kinds
            seconds += [step() for _ in range(min(_STEPS_IN_TURN, runs - len(seconds)))]
    return times


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit PyTorch to one thread, so that process time is the time of one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    options = parser_for(__doc__).parse_args()
    report("step", [*measure_decode_steps(), *measure_prompt_lives()], options.json)
