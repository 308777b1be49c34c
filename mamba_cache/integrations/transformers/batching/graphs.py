"""CUDA graphs of decode steps and rectangles, and the costs by which chunks form rectangles."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from mamba_cache.integrations.transformers.library import transformers

__all__ = ["GRAPH_DEVICES", "RectangleCosts", "StepGraphs", "padded_sizes", "split_rows"]

GRAPH_DEVICES = frozenset({"cuda"})

_WARM_UPS = 2
"""The first run compiles and tunes kernels; the second one runs as all later ones."""

_FIRST = -1
"""Stream priority of captured kernels: higher than that of the kernels that check weights."""

_NO_CALL = "no call has been made yet"

_MAX_MOVES = 2
"""After this many calls in a row with moved weights or changed settings nothing is captured."""

_FORWARD_TOKENS = {"cpu": (0, 16), "cuda": (2048, 128)}
"""By device: the minimum cost of a forward, and its fixed cost, both in computed tokens.

On a GPU the launches of one forward take as long as computing some 2,000 tokens; this is the value
until it is measured. On a CPU a forward costs little more than its tokens.
"""

_SIZES: dict[int, tuple[int, ...]] = {
    1: (
        *(64, 128, 160, 192, 224, 256, 288, 320, 352, 384, 448, 512, 640, 768, 896, 1024),
        *(1536, 2048, 2560, 3072, 4096, 4608, 5120, 6144, 7168, 8192),
    )
} | dict.fromkeys((2, 4, 8, 16, 32, 64), (64, 128, 256, 384))
"""Sizes of rectangles that may be captured: number of rows, and tokens per row."""

_NUM_LAUNCHES = 15
"""Launch time is the median of this many forwards, because some of the first tune kernels."""
_SHORT_TOKENS = 512
"""Launch time is measured up to this size: launches of longer forwards may wait for the GPU."""
_LONG_TOKENS = 1024
"""Time per token is measured from this size: below it GPU time hardly depends on the tokens."""


@dataclass(slots=True)
class _Graph:
    """A captured step and the logits that each replay leaves in the same place."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


@dataclass(slots=True)
class StepGraphs:
    """CUDA graphs of steps: ``run`` replays a step's graph, or computes the step without one.

    The key of a decode step is its number of rows; the key of a rectangle is its shape.

    A graph reads and writes fixed addresses, so moved weights or changed settings drop all graphs.
    All graphs share one memory pool, so a replay may overwrite the logits of another.
    """

    device: torch.device  # where steps run
    counts: Counter[str]  # captures, replays and eager runs, by fields of ``BatchStats``
    warm_up_seconds: float = 0.0  # time of all captures, with the eager runs before them
    num_bytes: int = 0  # device memory of the graphs
    eager_reason: str = ""  # why the last eager decode step had no graph
    _graphs: dict[Hashable, _Graph] = field(default_factory=dict)
    _used: set[Hashable] = field(default_factory=set)  # shapes used since graphs were dropped
    _made_for: Hashable = None  # addresses and settings for which the graphs are right
    _moves: int = 0  # calls in a row with moved weights or changed settings
    _reason: str = _NO_CALL  # why this call uses no graphs; empty if it does
    _refusals: dict[str, str] = field(default_factory=dict)  # why a kind cannot be captured
    _stream: Any = None  # the stream of all captures

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of decode batches that have a graph now."""
        return tuple(sorted(key for key in self._graphs if isinstance(key, int)))

    @property
    def num_shapes(self) -> int:
        """The number of rectangle shapes that have a graph now."""
        return len(self._graphs) - len(self.sizes)

    def begin(self, made_for: Hashable, is_eager: str = "") -> None:
        """Drop graphs if ``made_for`` has changed; to be called before each call's first step.

        ``made_for`` has the addresses of the weights and the key of the settings. ``is_eager`` is
        the reason for using no graphs in this call; empty: graphs are used.
        """
        is_moved = self._made_for is not None and made_for != self._made_for
        self._moves = self._moves + 1 if is_moved else 0
        if made_for != self._made_for:
            self._drop()
            self._made_for = made_for
        self._reason = is_eager
        if is_eager:
            return
        if self.device.type not in GRAPH_DEVICES:
            self._reason = f"CUDA graphs need a CUDA device, the model is on {self.device}"
        elif self._moves >= _MAX_MOVES:
            self._reason = "the model's weights move, or its settings change, from call to call"

    def why_eager(self, kind: str) -> str:
        """Return why no steps of a kind, "decode" or "prefill", use graphs; empty if they do."""
        return self._reason or self._refusals.get(kind, "")

    def prepare(
        self,
        sizes: Sequence[int],
        compute: Callable[[int], torch.Tensor],
        quiet: Callable[[], None],
        *,
        shows_progress: bool = False,
    ) -> None:
        """Capture a decode step for each size without a graph; to be called while no request runs.

        ``compute`` computes a decode step of a given size. ``quiet`` marks all rows idle, so that
        ``compute`` changes no request. If a capture fails, for example because the model waits for
        the device, decode steps run eagerly from then on, and ``why_eager`` returns the reason.
        """
        missing = [size for size in sorted(sizes, reverse=True) if size not in self._graphs]
        if missing and not self.why_eager("decode"):  # pragma: no cover - tests/gpu run it
            began = time.perf_counter()
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            options = {"disable": not shows_progress, "desc": "Capturing decode steps"}
            with transformers().utils.logging.tqdm(missing, **options) as bar:
                for size in bar:  # the largest first, so that smaller ones reuse its memory
                    try:
                        stream.wait_stream(torch.cuda.current_stream(self.device))
                        with torch.cuda.stream(stream):
                            for _ in range(_WARM_UPS):
                                quiet()
                                compute(size)
                        torch.cuda.current_stream(self.device).wait_stream(stream)
                    except Exception as error:
                        self._refuse("decode", error)
                    if self.why_eager("decode") or not self.capture(size, partial(compute, size)):
                        break
            quiet()
            torch.cuda.synchronize(self.device)
            self.warm_up_seconds += time.perf_counter() - began

    def capture(  # pragma: no cover - tests/gpu run it
        self, key: Hashable, compute: Callable[[], torch.Tensor]
    ) -> bool:
        """Capture a step that has run eagerly before; return whether the capture succeeded."""
        kind, graph = _kind_of(key), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        pool = next((one.graph.pool() for one in self._graphs.values()), None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device, priority=_FIRST)  # type: ignore[no-untyped-call]
        mode = "thread_local"
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode=mode):
                before = torch.cuda.memory_reserved(self.device)  # entering has emptied the cache
                logits = compute()
        except Exception as error:
            self._refuse(kind, error)
            return False
        self._graphs[key] = _Graph(graph, logits)
        self.counts["captures"] += 1
        self.num_bytes += max(torch.cuda.memory_reserved(self.device) - before, 0)
        return True

    def _refuse(self, kind: str, error: BaseException) -> None:  # pragma: no cover
        """Record why steps of a kind cannot be captured, and drop the graphs of that kind."""
        torch.cuda.synchronize(self.device)
        for key in [key for key in self._graphs if _kind_of(key) == kind]:
            del self._graphs[key]
        while error.__context__ is not None:  # the first error: ending the capture then fails too
            error = error.__context__
        self._refusals[kind] = f"the model's {kind} step cannot be captured: {error!r}"

    def use(self, key: Hashable, compute: Callable[[], torch.Tensor]) -> None:
        """Record a use of a rectangle's shape before ``run``; capture the shape at its second use.

        ``compute`` computes the rectangle from tensors that live as long as the graph.
        """
        if self.why_eager("prefill"):
            return
        if key in self._used and key not in self._graphs:  # pragma: no cover - tests/gpu
            began = time.perf_counter()
            self.capture(key, compute)
            self.warm_up_seconds += time.perf_counter() - began
        self._used.add(key)

    def run(self, key: Hashable, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Replay a step's graph, or call ``compute``; the next step may overwrite the logits."""
        kind = _kind_of(key)
        reason = self.why_eager(kind)
        found = None if reason else self._graphs.get(key)
        if found is None:
            if kind == "decode":
                self.eager_reason = reason or f"no graph was captured for {key} rows"
            self.counts["eager_steps" if kind == "decode" else "eager_prefills"] += 1
            return compute()
        found.graph.replay()  # pragma: no cover - tests/gpu run it
        self.counts["replays" if kind == "decode" else "prefill_replays"] += 1  # pragma: no cover
        return found.logits  # pragma: no cover

    def forget(self) -> None:
        """Drop all graphs, and the record of moves and warm-ups."""
        self._drop()
        self._made_for, self._moves, self._reason = None, 0, _NO_CALL
        self.warm_up_seconds, self.eager_reason = 0.0, ""

    def _drop(self) -> None:
        self._graphs.clear()
        self._used.clear()
        self._refusals.clear()
        self.num_bytes = 0


def _kind_of(key: Hashable) -> str:
    return "decode" if isinstance(key, int) else "prefill"


def padded_sizes(max_requests: int) -> tuple[int, ...]:
    """Return the sizes of decode batches, few enough to capture a CUDA graph of each size."""
    sizes = {size for size in (1, 2, 4, 8, 12, 16, 24, 32, 48) if size < max_requests}
    sizes |= {*range(64, max_requests, 32), max_requests}
    return tuple(sorted(sizes))


class RectangleCosts:
    """The cost of forwards over rectangles, in tokens: ``split`` groups chunks by it.

    An eager forward takes at least as long as the host needs to launch its kernels.
    ``_launch_tokens`` is the number of tokens that the GPU computes in that time, measured while
    forwards run. Up to this size rectangles are captured, because only these wait for launches: a
    Granite-4-like model takes 100 ms to launch and 75 ms to compute 4,352 tokens (H100).
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._launch_tokens, self._fixed_tokens = _FORWARD_TOKENS.get(device.type, (0, 0))
        self._launch_seconds: deque[float] = deque(maxlen=_NUM_LAUNCHES)  # of short forwards
        self._token_seconds = math.inf  # minimum GPU time per token of long forwards
        self._timed: list[tuple[int, Any, Any]] = []  # long forwards: tokens, start and end event

    def sizes(self, max_tokens: int) -> list[tuple[int, int]]:
        """Return rows and tokens per row of all sizes for graphs up to ``max_tokens`` tokens."""
        self._update()
        limit = min(max_tokens, self._launch_tokens)
        return [(rows, own) for rows in _SIZES for own in _SIZES[rows] if rows * own <= limit]

    def captured(self, rows: int, tokens: int, max_tokens: int) -> tuple[int, int] | None:
        """Return the size for graphs in which a rectangle fits; None if it is too large for one."""
        size = next((size for size in _SIZES if size >= rows), None)
        if size is None or tokens > _SIZES[size][-1]:
            return None
        own = _SIZES[size][bisect_left(_SIZES[size], tokens)]
        return (size, own) if size * own <= min(max_tokens, self._launch_tokens) else None

    def split(
        self, lengths: Sequence[int], max_tokens: int, max_captured: int
    ) -> Iterator[tuple[int, int]]:
        """Divide rows, sorted from the longest on, into the rectangles of the least total cost.

        Rectangles of up to ``max_captured`` tokens may be replayed from CUDA graphs. Yield the
        first row of each rectangle, and the row after its last.
        """
        self._update()

        def cost(rows: int, tokens: int) -> int:
            size = self.captured(rows, tokens, max_captured)
            eager = max(rows * tokens, self._launch_tokens)
            return self._fixed_tokens + (eager if size is None else size[0] * size[1])

        yield from pairwise(split_rows(lengths, max_tokens, cost))

    def _update(self) -> None:
        """Read the times of forwards that have finished on the GPU; update ``_launch_tokens``."""
        while self._timed and self._timed[0][-1].query():  # pragma: no cover - tests/gpu run it
            tokens, begin, end = self._timed.pop(0)
            self._token_seconds = min(self._token_seconds, begin.elapsed_time(end) / 1e3 / tokens)
        if self._launch_seconds and self._token_seconds < math.inf:
            self._launch_tokens = int(median(self._launch_seconds) / self._token_seconds)

    @contextmanager
    def launching(self, num_tokens: int, *, is_usual: bool) -> Iterator[None]:
        """Time the launches of the body, a forward, if it is short, usual and not being captured.

        In a usual rectangle rows differ in length and save states; others need fewer launches.
        """
        began = time.perf_counter()
        yield
        is_short = self._is_cuda and is_usual and num_tokens <= _SHORT_TOKENS
        if is_short and not torch.cuda.is_current_stream_capturing():  # pragma: no cover
            self._launch_seconds.append(time.perf_counter() - began)

    @contextmanager
    def computing(self, num_tokens: int) -> Iterator[None]:
        """Time a forward, the body, on the GPU if it is long."""
        if not self._is_cuda or num_tokens < _LONG_TOKENS:
            yield
            return
        kind = partial(torch.cuda.Event, enable_timing=True)  # pragma: no cover - tests/gpu run it
        begin, end = kind(), kind()  # pragma: no cover
        begin.record()  # pragma: no cover
        yield  # pragma: no cover
        end.record()  # pragma: no cover
        self._timed.append((num_tokens, begin, end))  # pragma: no cover


def split_rows(sizes: Sequence[int], max_tokens: int, cost: Callable[[int, int], int]) -> list[int]:
    """Divide rows, sorted from the longest on, into the rectangles of the least total cost.

    A rectangle of several rows has at most ``max_tokens`` tokens, padding included. ``cost`` takes
    the number of rows and the tokens per row of a forward. Return the first row of each rectangle,
    ascending, and the number of rows.
    """
    costs, begins = [0], [0]  # by number of rows: least cost, and where its last rectangle begins
    for end in range(1, len(sizes) + 1):
        best, begin_of_best = -1, end - 1
        for begin in range(end - 1, -1, -1):
            tokens = sizes[begin] * (end - begin)
            if tokens > max_tokens and begin < end - 1:
                break  # rows before this one are longer
            total = costs[begin] + cost(end - begin, sizes[begin])
            if best < 0 or total <= best:
                best, begin_of_best = total, begin
        costs.append(best)
        begins.append(begin_of_best)
    bounds = [len(sizes)]
    while bounds[-1]:
        bounds.append(begins[bounds[-1]])
    return bounds[::-1]
