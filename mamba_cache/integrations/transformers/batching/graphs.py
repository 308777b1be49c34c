"""CUDA graphs of the decode step, one for each size of a batch, and why there are none."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["DecodeGraphs"]

_WARM_UPS = 2
"""The first run compiles kernels and may time them; the second one runs as all later ones do."""


@dataclass(slots=True)
class _Graph:
    """A captured step and the logits that each replay leaves in the same place."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


@dataclass(slots=True)
class DecodeGraphs:
    """Decode steps, replayed from CUDA graphs where there are some.

    Args:
        compute: Computes a step of so many rows and returns its logits; it reads and writes memory
            at the same addresses each time.
        quiet: Makes ``compute`` touch nothing that anybody needs, for warm-ups between steps.
        device: Where it runs.
        counts: Counts "captures", "replays" and "eager_steps".

    Attributes:
        warm_up_seconds: Time of all captures, with the runs before them.
        eager_reason: Why the last step that was not replayed was not; empty if there was none.
    """

    compute: Callable[[int], torch.Tensor]
    quiet: Callable[[], None]
    device: torch.device
    counts: Counter[str]
    warm_up_seconds: float = 0.0
    eager_reason: str = ""
    _graphs: dict[int, _Graph] = field(default_factory=dict)
    _made_for: Hashable = None
    _refusal: str = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of decode batches that have a graph now."""
        return tuple(sorted(self._graphs))

    def prepare(self, sizes: Sequence[int], made_for: Hashable) -> None:
        """Capture a graph for each size that has none; call it while no request runs.

        A model that cannot be captured, because it waits for the device or allocates otherwise each
        time, is computed eagerly from then on; ``eager_reason`` says why.

        Args:
            sizes: Rows of the batches that are to come.
            made_for: What the graphs depend on beside the step: where the model's weights lie, and
                its settings. If it is another than the last time, they are captured anew.
        """
        if made_for != self._made_for:
            self.forget()
            self._made_for = made_for
        if self.device.type != "cuda":
            self._refusal = f"CUDA graphs need a CUDA device, the model is on {self.device}"
        missing = [size for size in sorted(sizes, reverse=True) if size not in self._graphs]
        if self._refusal or not missing:
            return
        self._capture_all(missing)  # pragma: no cover - tests/gpu run it

    def _capture_all(self, sizes: Sequence[int]) -> None:  # pragma: no cover - tests/gpu run it
        began = time.perf_counter()
        try:
            for size in sizes:  # the largest first, so that the others fit into its memory
                self._graphs[size] = self._capture(size)
                self.counts["captures"] += 1
        except Exception as error:
            # Whatever a model does that cannot be captured. Nothing of it may stay.
            torch.cuda.synchronize(self.device)
            self._graphs.clear()
            cause: BaseException = error
            while cause.__context__ is not None:  # the end of a capture that failed fails as well
                cause = cause.__context__
            self._refusal = f"the model's decode step cannot be captured: {cause!r}"
        finally:
            self.quiet()
            torch.cuda.synchronize(self.device)
            self.warm_up_seconds += time.perf_counter() - began

    def _capture(self, size: int) -> _Graph:  # pragma: no cover - tests/gpu run it
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self.quiet()
                self.compute(size)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        pool = next((one.graph.pool() for one in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = self.compute(size)
        return _Graph(graph, logits)

    def run(self, size: int, *, is_eager: str = "") -> torch.Tensor:
        """Compute a step.

        Args:
            size: Rows of the batch.
            is_eager: Why no graph is to be used, if so.

        Returns:
            Its logits, which the next step may overwrite.
        """
        found = None if is_eager else self._graphs.get(size)
        if found is None:
            self.counts["eager_steps"] += 1
            self.eager_reason = (
                is_eager or self._refusal or f"no graph was captured for {size} rows"
            )
            return self.compute(size)
        found.graph.replay()  # pragma: no cover - tests/gpu run it
        self.counts["replays"] += 1  # pragma: no cover
        return found.logits  # pragma: no cover

    def forget(self) -> None:
        """Drop all graphs, as when the model has become another one."""
        self._graphs.clear()
        self._refusal = ""
        self._made_for = None
