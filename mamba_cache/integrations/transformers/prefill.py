"""Prefill: what is cached is restored, and the rest runs in as few forwards as it can."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache.cache import ExtraKey
from mamba_cache.context.stats import count_admission
from mamba_cache.integrations.transformers.capture import StateCapture
from mamba_cache.integrations.transformers.layers import (
    CacheFiller,
    SequenceMemory,
    read_layers,
)
from mamba_cache.integrations.transformers.prompts import PromptHint
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.integrations.transformers.store import PrefixStore, SequenceRecord

__all__ = ["Prefill", "PrefillTask", "Prefiller", "Segment"]

_NO_HINT = PromptHint()


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that one forward computes."""

    start: int  # position of the first one
    end: int  # position after the last one
    # Positions inside it, or at its end, whose states are kept: multiples of the block size.
    checkpoints: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTask:
    """What is to be computed, or restored, of a prompt.

    Attributes:
        tokens: Token ids of the prompt.
        end: How many of the tokens are to be restored or computed.
        min_computed: How many are to be computed in any case, those after ``end`` included.
        cache_salt: Prompts of different salts never match.
        hint: What its sender says of it.
        checkpoints: Positions whose states are kept in any case; one inside a block stands for the
            block's beginning.
    """

    tokens: npt.NDArray[np.int32]
    end: int
    min_computed: int
    cache_salt: ExtraKey
    hint: PromptHint = _NO_HINT
    checkpoints: Collection[int] = ()


@dataclass(slots=True)
class Prefill:
    """A prompt that is being computed."""

    tokens: npt.NDArray[np.int32]  # its token ids
    cache: Any  # the transformers cache that it is computed into
    record: SequenceRecord  # what of it is cached
    segments: list[Segment]  # what was left to compute; empty if all of it was restored
    saves_end: bool  # a state is wanted where the prompt ends, and that is a block boundary
    output: Any = None  # what the caller's own forward of the last segment returned
    captured: Collection[int] = ()  # positions whose states that forward wrote into their slots


class Prefiller:
    """Computes prompts into transformers caches.

    Args:
        runner: The model.
        store: What is cached.
        filler: Puts what is restored into caches.
        capture: Takes states out of a forward; None: a prompt is cut at its checkpoints.
        segment_tokens: The most that one forward computes, a multiple of the block size.
        may_shrink: ``segment_tokens`` is a guess, which a forward that ran out of memory corrects.
        min_tokens: What a forward of a prompt is given at least: 2 if single tokens are not
            exact, else 1. A prompt of one token is computed at once all the same.
    """

    def __init__(
        self,
        runner: ModelRunner,
        store: PrefixStore,
        *,
        filler: CacheFiller,
        capture: StateCapture | None,
        segment_tokens: int,
        may_shrink: bool,
        min_tokens: int,
    ) -> None:
        self._runner = runner
        self._store = store
        self.filler = filler
        self._capture = capture
        self._segment_tokens = segment_tokens
        self._may_shrink = may_shrink
        self.min_tokens = min_tokens

    def compute(
        self, task: PrefillTask, cache: Any, last_forward: Callable[[int], Any] | None = None
    ) -> Prefill:
        """Restore the longest cached prefix of a prompt, and compute the rest.

        A prompt whose forward runs out of memory begins again in smaller segments, if it can.

        Args:
            task: The prompt.
            cache: A fresh transformers cache; it is filled.
            last_forward: Computes the last segment, given its first position, in the place of the
                model. The caller publishes what that completes.

        Returns:
            The prompt; close its record when it is done.

        Raises:
            InvalidArgumentError: The tokens or the salt are of a wrong kind, or the cache is.
        """
        is_retry = False
        while True:
            prefill = self._begin(task, cache, is_retry=is_retry)
            try:
                self._run(prefill, last_forward)
            except torch.OutOfMemoryError:
                if not self._shrink(prefill):
                    raise
            else:
                return prefill
            prefill.record.close()
            vars(cache).clear()
            vars(cache).update(vars(self._runner.new_cache()))
            is_retry = True

    def _begin(self, task: PrefillTask, cache: Any, *, is_retry: bool) -> Prefill:
        """Restore what is cached, and plan the rest; a prompt that is tried again is counted."""
        tokens, end = task.tokens, task.end
        record = self._open(task, task.min_computed)
        if 0 < end - record.match.skip_tokens < self.min_tokens and record.match.skip_tokens:
            record.close()
            record = self._open(task, len(tokens) - end + self.min_tokens)
        if (restored := record.load()) is not None:
            self.filler.fill(cache, restored)
        positions = self._positions(record, task)
        segments = self._plan(positions, record.match.skip_tokens, end)
        if not is_retry:
            self._announce(record, task)
        return Prefill(tokens, cache, record, segments, len(tokens) in positions)

    def _shrink(self, prefill: Prefill) -> bool:
        """Make segments half as long as the longest of a prompt; return whether that can be."""
        longest = max((s.end - s.start for s in prefill.segments), default=0)
        size = self._store.layout.block_size_tokens
        smaller = longest // 2 // size * size
        if not self._may_shrink or not smaller:
            return False
        self._segment_tokens = smaller
        return True

    def _open(self, task: PrefillTask, min_computed: int) -> SequenceRecord:
        return self._store.open(
            task.tokens,
            cache_salt=task.cache_salt,
            lora_id=self._runner.fingerprint.key,
            min_computed=min_computed,
            hint=task.hint,
            checkpoints=task.checkpoints,
        )

    def _run(self, prefill: Prefill, last_forward: Callable[[int], Any] | None) -> None:
        """Compute the segments, and cache what they complete after each."""
        for segment in prefill.segments:
            tokens = prefill.tokens[segment.start : segment.end]
            is_last = segment is prefill.segments[-1]
            with self._capturing(prefill, segment) as captured:
                if is_last and last_forward is not None:
                    prefill.output = last_forward(segment.start)
                else:
                    self._runner.forward(tokens, prefill.cache, segment.start)
            # The forward is enqueued by now, and no token has left.
            self._runner.fingerprint.confirm()
            self._store.counters["computed_tokens"] += len(tokens)
            if is_last and last_forward is not None:
                prefill.captured = captured
                return
            is_end = is_last or segment.end in segment.checkpoints
            memory = read_layers(prefill.cache, self._store.layout.layers, segment.end)
            prefill.record.publish(memory, segment.end, captured=captured, is_end=is_end)

    @contextmanager
    def _capturing(self, prefill: Prefill, segment: Segment) -> Iterator[set[int]]:
        """Capture the states inside a segment from the forward that runs inside.

        Yields:
            A set that holds, once the forward has ended, the positions whose states were written
            into the slots that the prompt's record reserved.
        """
        inside = [position for position in segment.checkpoints if position < segment.end]
        rooms = prefill.record.reserve_states(inside) if inside else {}
        size, tiers = segment.end - segment.start, self._store.tiers
        with nullcontext() if tiers is None else tiers.timed(size):
            if not rooms or self._capture is None:
                yield set()
                return
            with self._capture.during(prefill.cache, segment.start, size, rooms) as captured:
                yield captured

    def recompute(self, tokens: npt.NDArray[np.int32]) -> SequenceMemory:
        """Compute a prefix without what is cached, and keep nothing of it.

        Returns:
            What the model's layers keep of it.
        """
        end, cache = len(tokens), self._runner.new_cache()
        for part in self._plan(set(), 0, end):
            self._runner.forward(tokens[part.start : part.end], cache, part.start)
        self._runner.fingerprint.confirm()  # of other weights nothing is known to be wrong
        return read_layers(cache, self._store.layout.layers, end)

    def _announce(self, record: SequenceRecord, task: PrefillTask) -> None:
        """Count a prompt, and tell listeners, the verification and policies of it."""
        self._store.tell_admitted(
            record.sequence.hashes,
            len(task.tokens),
            will_continue=task.hint.will_continue,
            cache_salt=task.cache_salt,
        )
        self._store.sample(record)
        count_admission(self._store.counters, record.match)
        self._store.index.announce(record.sequence, len(task.tokens) - task.min_computed)

    def _positions(self, record: SequenceRecord, task: PrefillTask) -> set[int]:
        """Decide after which tokens of a prompt beyond what is restored states are saved."""
        size = self._store.layout.block_size_tokens
        positions = self._store.index.positions(record.sequence)
        # Where the same prompt goes on from when it comes again.
        positions.add((len(task.tokens) - self.min_tokens) // size * size)
        if self.min_tokens > 1 and task.end - 1 in positions:  # it would leave a single token
            positions = positions - {task.end - 1} | {task.end - 1 - size}
        return {p for p in positions if p > record.match.skip_tokens}

    def _plan(self, checkpoints: set[int], start: int, end: int) -> list[Segment]:
        """Divide a part of a prompt because of the memory that it needs, and at checkpoints."""
        first = start // self._segment_tokens + 1
        cuts = {end, *range(first * self._segment_tokens, end, self._segment_tokens)}
        if self._capture is None:
            cuts |= {p for p in checkpoints if p < end}
        ends = sorted(cuts - {start})
        if self.min_tokens > 1:
            # No cut leaves a single token before it or after it.
            ends = [one for one, after in pairwise([*ends, 0]) if one + 1 != after]
            if len(ends) > 1 and ends[0] == start + 1:
                del ends[0]
        return [
            Segment(begin, stop, tuple(p for p in sorted(checkpoints) if begin < p <= stop))
            for begin, stop in pairwise([start, *ends])
        ]
