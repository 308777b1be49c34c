"""Sizes of batches: how chunks are divided into rectangles, and which sizes have CUDA graphs."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

__all__ = ["RectangleCosts", "padded_sizes", "split_rows"]

_FORWARD_TOKENS = {"cpu": (0, 16), "cuda": (2048, 128)}
"""By device, in tokens computed: the least cost of a forward, and its cost beside its tokens.

On a GPU launches alone take as long as some 2,000 tokens, until it is measured; on a CPU a forward
costs little more than its tokens.
"""

_SIZES: dict[int, tuple[int, ...]] = {
    1: (
        *(64, 128, 160, 192, 224, 256, 288, 320, 352, 384, 448, 512, 640, 768, 896, 1024),
        *(1536, 2048, 2560, 3072, 4096, 4608, 5120, 6144, 7168, 8192),
    )
} | dict.fromkeys((2, 4, 8, 16, 32, 64), (64, 128, 256, 384))
"""Rows of rectangles that may be captured, and tokens of each row."""

_SHORT_TOKENS = 512
"""Of more tokens a forward's launches may wait for the GPU."""
_LONG_TOKENS = 1024
"""Of fewer tokens a forward takes hardly less time on the GPU."""


def padded_sizes(max_requests: int) -> tuple[int, ...]:
    """Return the sizes of decode batches: few enough to capture a CUDA graph for each."""
    sizes = {size for size in (1, 2, 4, 8, 12, 16, 24, 32, 48) if size < max_requests}
    sizes |= {*range(64, max_requests, 32), max_requests}
    return tuple(sorted(sizes))


class RectangleCosts:
    """What forwards over rectangles cost, in tokens: launches take as long as so many tokens.

    Up to so many tokens a rectangle is captured in a CUDA graph. Forwards show how many they are: a
    Granite-4-like model launches for 100 ms what the GPU computes in 75 (4,352 tokens, H100).
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._least, self._extra = _FORWARD_TOKENS.get(device.type, (0, 0))
        self._launch_seconds = math.inf  # minimum of short forwards
        self._token_seconds = math.inf  # minimum of long forwards, on the GPU
        self._timed: list[tuple[int, Any, Any]] = []  # tokens and events of long forwards

    def sizes(self, most_tokens: int) -> list[tuple[int, int]]:
        """Return rows and tokens of all rectangles up to ``most_tokens`` that are captured."""
        self._update()
        most = min(most_tokens, self._least)
        return [(rows, own) for rows in _SIZES for own in _SIZES[rows] if rows * own <= most]

    def captured(self, rows: int, tokens: int, most_tokens: int) -> tuple[int, int] | None:
        """Return rows and tokens of the rectangle that is captured for one; None: none is."""
        size = next((size for size in _SIZES if size >= rows), None)
        if size is None or tokens > _SIZES[size][-1]:
            return None
        own = _SIZES[size][bisect_left(_SIZES[size], tokens)]
        return (size, own) if size * own <= min(most_tokens, self._least) else None

    def split(
        self, lengths: Sequence[int], max_tokens: int, most_captured: int
    ) -> Iterator[tuple[int, int]]:
        """Divide rows, longest first, so that padding costs less than the forwards that it saves.

        Rectangles of up to ``most_captured`` tokens may be replayed from CUDA graphs. Yield the
        first row of each rectangle, and the one behind its last.
        """
        self._update()

        def cost(rows: int, tokens: int) -> int:
            size = self.captured(rows, tokens, most_captured)
            eager = max(rows * tokens, self._least)
            return self._extra + (eager if size is None else size[0] * size[1])

        yield from pairwise(split_rows(lengths, max_tokens, cost))

    def _update(self) -> None:
        """Take the times of forwards that have ended on the GPU."""
        while self._timed and self._timed[0][-1].query():  # pragma: no cover - tests/gpu run it
            tokens, begin, end = self._timed.pop(0)
            self._token_seconds = min(self._token_seconds, begin.elapsed_time(end) / 1e3 / tokens)
        if self._launch_seconds < math.inf and self._token_seconds < math.inf:
            self._least = int(self._launch_seconds / self._token_seconds)

    @contextmanager
    def launching(self, num_tokens: int) -> Iterator[None]:
        """Time the launches of a forward, the body, if it is short and not captured."""
        began = time.perf_counter()
        yield
        is_short = self._is_cuda and num_tokens <= _SHORT_TOKENS
        if is_short and not torch.cuda.is_current_stream_capturing():  # pragma: no cover
            self._launch_seconds = min(self._launch_seconds, time.perf_counter() - began)

    @contextmanager
    def computing(self, num_tokens: int) -> Iterator[None]:
        """Time what the body computes on the GPU, if it is long."""
        if not self._is_cuda or num_tokens < _LONG_TOKENS:
            yield
            return
        begin, end = (_event() for _ in range(2))  # pragma: no cover - tests/gpu run it
        begin.record()  # pragma: no cover - tests/gpu run it
        yield  # pragma: no cover
        end.record()  # pragma: no cover
        self._timed.append((num_tokens, begin, end))  # pragma: no cover


def _event() -> Any:  # pragma: no cover - tests/gpu run it
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def split_rows(sizes: Sequence[int], max_tokens: int, cost: Callable[[int, int], int]) -> list[int]:
    """Divide rows, longest first, into rectangles that take the least time together.

    A rectangle has at most ``max_tokens``, padding included, unless it has one row. ``cost`` is
    that of a forward over so many rows of so many tokens. Return the row with which each rectangle
    begins, ascending, and the number of rows.
    """
    costs, begins = [0], [0]  # of the first rows, and where the last rectangle of them begins
    for end in range(1, len(sizes) + 1):
        best, begin_of_best = -1, end - 1
        for begin in range(end - 1, -1, -1):
            tokens = sizes[begin] * (end - begin)
            if tokens > max_tokens and begin < end - 1:
                break  # more rows before it are longer still
            total = costs[begin] + cost(end - begin, sizes[begin])
            if best < 0 or total <= best:
                best, begin_of_best = total, begin
        costs.append(best)
        begins.append(begin_of_best)
    bounds = [len(sizes)]
    while bounds[-1]:
        bounds.append(begins[bounds[-1]])
    return bounds[::-1]
