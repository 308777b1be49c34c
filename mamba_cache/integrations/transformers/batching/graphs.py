"""CUDA graphs of decode steps and small rectangles, in one memory pool, and why there are none."""

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
"""The first run compiles kernels and may time them; the second one runs as all later ones do."""

_NO_CALL = "where the model's weights lie is not known before a call"

_MAX_MOVES = 2
"""Calls in a row that find the weights elsewhere, after which nothing is captured any more."""


@dataclass(slots=True)
class _Graph:
    """A captured step and the logits that each replay leaves in the same place."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


@dataclass(slots=True)
class StepGraphs:
    """Steps that are replayed from CUDA graphs, where there are some.

    A step is named by what its code depends on beside tensors: decode steps by an int, the rows of
    the batch; others by their shapes. It is computed by a function that reads and writes memory at
    the same addresses each time. All graphs have one memory pool, so a replay may overwrite the
    logits of another.
    """

    device: torch.device  # where steps run
    counts: Counter[str]  # counts "captures", and "replays" and "eager_steps" of decode steps
    warm_up_seconds: float = 0.0  # time of all captures, with the runs before them
    num_bytes: int = 0  # memory that they took
    eager_reason: str = ""  # why the last decode step that was not replayed was not
    _graphs: dict[Hashable, _Graph] = field(default_factory=dict)
    _used: set[Hashable] = field(default_factory=set)  # steps that ran eagerly since the last move
    _made_for: Hashable = None
    _moves: int = 0  # calls in a row for which the weights were elsewhere
    _reason: str = _NO_CALL  # why none is captured in this call
    _refusals: dict[str, str] = field(default_factory=dict)  # why none ever is, by kind of step

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

        Args:
            made_for: What the graphs depend on beside the step: where the model's weights lie, and
                its settings.
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
        time, is computed eagerly from then on; ``why_eager`` says why.

        Args:
            sizes: Rows of the batches that are to come.
            compute: Computes a step of so many rows and returns its logits.
            quiet: Makes ``compute`` touch nothing that anybody needs.
            shows_progress: Show a progress bar.
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
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
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
        """Note why steps of a kind cannot be captured. Nothing of those that were may stay."""
        torch.cuda.synchronize(self.device)
        for key in [key for key in self._graphs if _kind_of(key) == kind]:
            del self._graphs[key]
        while error.__context__ is not None:  # the end of a capture that failed fails as well
            error = error.__context__
        self._refusals[kind] = f"the model's {kind} step cannot be captured: {error!r}"

    def run(
        self, key: Hashable, compute: Callable[[], torch.Tensor], *, is_eager: str = ""
    ) -> torch.Tensor:
        """Compute a step.

        Args:
            key: What it is called.
            compute: Computes it, and reads tensors that are there for as long as its graph is.
            is_eager: Why no graph is to be used, if so.

        Returns:
            Its logits, which the next step may overwrite.
        """
        kind = _kind_of(key)
        if kind == "prefill" and not is_eager and not self.why_eager(kind):
            if key in self._used and key not in self._graphs:  # pragma: no cover - tests/gpu
                began = time.perf_counter()
                self.capture(key, compute)
                self.warm_up_seconds += time.perf_counter() - began
            self._used.add(key)
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
        """Drop all graphs and what is known of them, as when the model has become another one."""
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
