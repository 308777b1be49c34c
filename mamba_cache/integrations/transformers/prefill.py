"""Prefill: restores a prompt's cached prefix and computes the rest in as few forwards as it can."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache.integrations.transformers.capture import StateCapture
from mamba_cache.integrations.transformers.layers import (
    SequenceMemory,
    read_layers,
)
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.integrations.transformers.store import PrefixStore, SequenceRecord

__all__ = ["Prefiller"]


@dataclass(slots=True)
class Prefiller:
    """Computes prompts one at a time, each into a transformers cache."""

    _runner: ModelRunner
    _store: PrefixStore
    _capture: StateCapture | None  # None: each checkpoint ends a segment
    _segment_tokens: int  # maximum of one forward, a segment; a multiple of the block size
    _may_shrink: bool  # whether segments get smaller when a forward runs out of memory

    @property
    def min_tokens(self) -> int:
        """Minimum tokens of a segment: 2 if single tokens are not exact, else 1.

        A prompt of one token is an exception.
        """
        return self._store.config.min_computed_tokens

    def compute(
        self,
        tokens: npt.NDArray[np.int32],
        cache: Any,
        *,
        needs_logits: bool = False,
        **fields: Any,
    ) -> tuple[SequenceRecord, torch.Tensor]:
        """Restore the longest cached prefix of a prompt into a fresh cache, and compute the rest.

        Without ``needs_logits`` the whole prompt may be restored. A prompt whose forward runs out
        of memory begins again with smaller segments.

        Return the prompt's record, which the caller must close, and [1, vocabulary] logits after
        its last token; [1, 0] if the whole prompt was restored.
        """
        is_retry, size = False, self._store.layout.block_size_tokens
        # A hit ends at a block boundary, so it can leave one token only after whole blocks.
        may_leave_one = self.min_tokens > 1 and len(tokens) % size == 1 % size
        min_computed = self.min_tokens if needs_logits or may_leave_one else 0
        while True:
            key = self._runner.fingerprint.key
            record = self._store.open(tokens, key, min_computed=min_computed, **fields)
            if (restored := record.load()) is not None:
                self._store.layout.fill(cache, restored)
            start = record.match.skip_tokens
            positions = self._store.index.positions(record.sequence)
            record.positions = {position for position in positions if position > start}
            segments = self._plan(record.positions, start, len(tokens))
            if not is_retry:
                self._announce(record, min_computed)
            try:
                return record, self._run(record, segments, cache)
            except torch.OutOfMemoryError:
                if not self._shrink(segments):
                    raise
            record.close()
            vars(cache).clear()
            vars(cache).update(vars(self._runner.new_cache()))
            is_retry = True

    def _shrink(self, segments: Sequence[tuple[int, int]]) -> bool:
        """Halve the length of the longest segment; return whether that is possible."""
        longest = max((end - start for start, end in segments), default=0)
        size = self._store.layout.block_size_tokens
        smaller = longest // 2 // size * size
        if not self._may_shrink or not smaller:
            return False
        self._segment_tokens = smaller
        return True

    def _run(
        self, record: SequenceRecord, segments: Sequence[tuple[int, int]], cache: Any
    ) -> torch.Tensor:
        """Compute the segments; after each, publish the blocks and states that it completed."""
        logits, tiers = torch.empty(1, 1, 0), self._store.tiers
        for start, end in segments:
            with self._capturing(record, cache, start, end) as captured:
                tiers.begin_forward(end - start)
                logits = self._runner.forward(record.sequence.prompt[start:end], cache, start)
                tiers.end_forward()
            # Checked once the forward is enqueued, and before any token is returned.
            self._runner.fingerprint.confirm()
            self._store.counters["computed_tokens"] += end - start
            record.publish(read_layers(cache, self._store.layout.layers, end), captured)
        return logits[:, -1]

    def _capturing(
        self, record: SequenceRecord, cache: Any, start: int, end: int
    ) -> AbstractContextManager[Collection[int]]:
        """Capture states at checkpoints inside a segment from the forward in a ``with`` block."""
        inside = [position for position in record.positions if start < position < end]
        if not inside or self._capture is None:  # ``_plan`` may have dropped the cut at one
            return nullcontext(())
        room, slots = self._store.tensors.room, record.reserve_states(inside)
        rooms = {position: room(slot, position) for position, slot in slots.items()}
        return self._capture.during(cache, start, end - start, rooms) if rooms else nullcontext(())

    def recompute(self, tokens: npt.NDArray[np.int32]) -> SequenceMemory:
        """Compute a prefix without the prefix cache; return the resulting layers."""
        end, cache = len(tokens), self._runner.new_cache()
        for start, stop in self._plan((), 0, end):
            self._runner.forward(tokens[start:stop], cache, start)
        self._runner.fingerprint.confirm()  # changed weights must not count as wrong states
        return read_layers(cache, self._store.layout.layers, end)

    def _announce(self, record: SequenceRecord, min_computed: int) -> None:
        """Count a prompt, and announce it to listeners and policies."""
        store, sequence = self._store, record.sequence
        store.tell_admitted(sequence.request, sequence.hashes)
        store.index.count(sequence, record.match)
        store.index.announce(sequence, sequence.num_known - min_computed)

    def _plan(self, checkpoints: Collection[int], start: int, end: int) -> list[tuple[int, int]]:
        """Divide ``start`` to ``end`` into segments; without capture, at checkpoints too."""
        first = start // self._segment_tokens + 1
        cuts = {end, *range(first * self._segment_tokens, end, self._segment_tokens)}
        if self._capture is None:
            cuts |= {p for p in checkpoints if p < end}
        ends = sorted(cuts - {start})
        if self.min_tokens > 1:
            # Drop cuts that would leave a segment of one token.
            ends = [one for one, after in pairwise([*ends, 0]) if one + 1 != after]
            if len(ends) > 1 and ends[0] == start + 1:
                del ends[0]
        return [*pairwise([start, *ends])]
