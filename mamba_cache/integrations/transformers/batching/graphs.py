"""CUDA graphs of decode steps and rectangles, in one memory pool."""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

__all__ = ["GRAPH_DEVICES", "StepGraphs"]

GRAPH_DEVICES = frozenset({"cuda"})

_WARM_UPS = 2
"""The first run compiles and tunes kernels; the second one runs as all later ones."""

_FIRST = -1
"""The priority of captured kernels: those that check the weights meanwhile give way to them."""

_NO_CALL = "no call has been made yet"

_MAX_MOVES = 2
"""After so many calls in a row with moved weights nothing is captured."""


@dataclass(slots=True)
class _Graph:
    """A captured step and the logits that each replay leaves in the same place."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


@dataclass(slots=True)
class StepGraphs:
    """Captured steps, and eager computation of all others.

    The key of a decode step is its number of rows; the key of a rectangle is its shape. Steps read
    and write memory at fixed addresses. All graphs share one memory pool, so a replay may overwrite
    the logits of another.
    """

    device: torch.device  # where steps run
    counts: Counter[str]  # counts "captures", and "replays" and "eager_steps" of decode steps
    warm_up_seconds: float = 0.0  # time of all captures, with the runs before them
    num_bytes: int = 0  # memory that they took
    eager_reason: str = ""  # reason of the last eager decode step
    _graphs: dict[Hashable, _Graph] = field(default_factory=dict)
    _used: set[Hashable] = field(default_factory=set)  # keys that ran eagerly since the last move
    _made_for: Hashable = None
    _moves: int = 0  # calls in a row with moved weights
    _reason: str = _NO_CALL  # reason for capturing nothing in this call
    _refusals: dict[str, str] = field(default_factory=dict)  # of kinds that cannot be captured
    _stream: Any = None  # on which steps are captured

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of decode batches that have a graph now."""
        return tuple(sorted(key for key in self._graphs if isinstance(key, int)))

    @property
    def num_shapes(self) -> int:
        """How many shapes of rectangles have a graph now."""
        return len(self._graphs) - len(self.sizes)

    def begin(self, made_for: Hashable) -> None:
        """Drop graphs that are no longer right; call it before each call's first step.

        ``made_for`` are the addresses of the weights and the key of the settings.
        """
        is_moved = self._made_for is not None and made_for != self._made_for
        self._moves = self._moves + 1 if is_moved else 0
        if made_for != self._made_for:
            self._drop()
            self._made_for = made_for
        self._reason = ""
        if self.device.type not in GRAPH_DEVICES:
            self._reason = f"CUDA graphs need a CUDA device, the model is on {self.device}"
        elif self._moves >= _MAX_MOVES:
            self._reason = "the model's weights move, or its settings change, from call to call"

    def why_eager(self, kind: str) -> str:
        """Return why no steps of a kind, "decode" or "prefill", are captured; empty if they are."""
        return self._reason or self._refusals.get(kind, "")

    def prepare(
        self,
        sizes: Sequence[int],
        compute: Callable[[int], torch.Tensor],
        quiet: Callable[[], None],
        *,
        shows_progress: bool = False,
    ) -> None:
        """Capture a decode step for each size that has none; call it while no request runs.

        A model that cannot be captured, because it waits for the device or allocates otherwise each
        time, is computed eagerly from then on; ``why_eager`` says why. ``quiet`` marks all rows
        idle, so that ``compute``, which is given a size, changes no request.
        """
        missing = [size for size in sorted(sizes, reverse=True) if size not in self._graphs]
        if missing and not self.why_eager("decode"):
            self._capture_all(missing, compute, quiet, shows_progress)

    def _capture_all(  # pragma: no cover - tests/gpu run it
        self,
        sizes: Sequence[int],
        compute: Callable[[int], torch.Tensor],
        quiet: Callable[[], None],
        shows_progress: bool,
    ) -> None:
        began = time.perf_counter()
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        bars: Any = importlib.import_module("tqdm")  # which transformers needs anyway
        with bars.tqdm(sizes, disable=not shows_progress, desc="Capturing decode steps") as bar:
            for size in bar:  # the largest first, so that the others fit into its memory
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
        """Capture a step that has run already; nothing of it is computed. Return if it worked."""
        kind, graph = _kind_of(key), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        pool = next((one.graph.pool() for one in self._graphs.values()), None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device, priority=_FIRST)  # type: ignore[no-untyped-call]
        mode = "thread_local"
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode=mode):
                before = torch.cuda.memory_reserved(self.device)  # entering empties the cache
                logits = compute()
        except Exception as error:
            self._refuse(kind, error)
            return False
        self._graphs[key] = _Graph(graph, logits)
        self.counts["captures"] += 1
        self.num_bytes += max(torch.cuda.memory_reserved(self.device) - before, 0)
        return True

    def _refuse(self, kind: str, error: BaseException) -> None:  # pragma: no cover
        """Note why steps of a kind cannot be captured, and drop those that were."""
        torch.cuda.synchronize(self.device)
        for key in [key for key in self._graphs if _kind_of(key) == kind]:
            del self._graphs[key]
        while error.__context__ is not None:  # ending a failed capture fails as well
            error = error.__context__
        self._refusals[kind] = f"the model's {kind} step cannot be captured: {error!r}"

    def use(self, key: Hashable, compute: Callable[[], torch.Tensor]) -> None:
        """Note that a rectangle is about to be computed: its shape is captured at its second use.

        ``compute`` computes it from tensors that live as long as the graph.
        """
        if self.why_eager("prefill"):
            return
        if key in self._used and key not in self._graphs:  # pragma: no cover - tests/gpu
            began = time.perf_counter()
            self.capture(key, compute)
            self.warm_up_seconds += time.perf_counter() - began
        self._used.add(key)

    def run(
        self, key: Hashable, compute: Callable[[], torch.Tensor], *, is_eager: str = ""
    ) -> torch.Tensor:
        """Compute a step; return its logits, which the next step may overwrite.

        ``compute`` computes it from tensors that live as long as the graph; ``is_eager`` is the
        reason for using no graph, if any.
        """
        kind = _kind_of(key)
        found = None if is_eager else self._graphs.get(key)
        if found is None:
            if kind == "decode":
                self.eager_reason = (
                    is_eager or self.why_eager(kind) or f"no graph was captured for {key} rows"
                )
            self.counts["eager_steps" if kind == "decode" else "eager_prefills"] += 1
            return compute()
        found.graph.replay()  # pragma: no cover - tests/gpu run it
        self.counts["replays" if kind == "decode" else "prefill_replays"] += 1  # pragma: no cover
        return found.logits  # pragma: no cover

    def forget(self) -> None:
        """Drop all graphs and counts: the model was replaced."""
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
