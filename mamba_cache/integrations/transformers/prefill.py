"""Prefill: what is cached is restored, and the rest runs in as few forwards as it can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from mamba_cache.blocks import ExtraKey
from mamba_cache.integrations.transformers.capture import StateCapture
from mamba_cache.integrations.transformers.layers import CacheFiller, read_layers
from mamba_cache.integrations.transformers.replacement import put_back
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.integrations.transformers.store import PrefixStore, SequenceRecord
from mamba_cache.slots import CheckpointPlacement, PlacementFacts
from mamba_cache.slots.placement import placed_positions

__all__ = ["Prefill", "Prefiller", "Segment"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that one forward computes.

    Attributes:
        start: Position of the first one.
        end: Position after the last one.
        checkpoints: Positions inside it, or at its end, whose states are kept: multiples of the
            block size.
    """

    start: int
    end: int
    checkpoints: tuple[int, ...]


@dataclass(slots=True)
class Prefill:
    """A prompt that is being computed.

    Attributes:
        tokens: Its token ids.
        cache: The transformers cache that it is computed into.
        record: What of it is cached.
        segments: What is left to compute; empty if all of it was restored.
        logits: [1, vocabulary]: what follows, if all of it was restored and that is known.
    """

    tokens: Sequence[int]
    cache: Any
    record: SequenceRecord
    segments: list[Segment]
    logits: torch.Tensor | None = None


class Prefiller:
    """Computes prompts into transformers caches.

    Args:
        runner: The model.
        store: What is cached.
        filler: Puts what is restored into caches.
        capture: Takes states out of a forward; None: a prompt is cut at its checkpoints.
        placement: Where states are saved.
        segment_tokens: The most that one forward computes, a multiple of the block size.
        may_shrink: ``segment_tokens`` is a guess, which a forward that ran out of memory corrects.
        is_stepwise: After the first forward, or after a restored state, the model must be given
            single tokens.
        is_step_exact: A single token leaves behind what it does in a prefill, but for rounding.

    Attributes:
        fewest_tokens: What a forward of a prompt is given at least: 2 if single tokens are not
            exact, else 1. A prompt of one token is computed at once all the same.
    """

    def __init__(
        self,
        runner: ModelRunner,
        store: PrefixStore,
        *,
        filler: CacheFiller,
        capture: StateCapture | None,
        placement: CheckpointPlacement,
        segment_tokens: int,
        may_shrink: bool,
        is_stepwise: bool,
        is_step_exact: bool = True,
    ) -> None:
        self._runner = runner
        self._store = store
        self._filler = filler
        self._capture = capture
        self._placement = placement
        self._segment_tokens = segment_tokens
        self._may_shrink = may_shrink
        self._is_stepwise = is_stepwise
        self.fewest_tokens = 1 if is_step_exact else 2

    def begin(
        self,
        tokens: Sequence[int],
        cache: Any,
        *,
        end: int,
        min_computed: int,
        cache_salt: ExtraKey,
        is_retry: bool = False,
    ) -> Prefill:
        """Restores the longest cached prefix of a prompt and plans the rest.

        Args:
            tokens: Token ids of the prompt.
            cache: A fresh transformers cache; it is filled.
            end: How many of the tokens are to be restored or computed.
            min_computed: How many are to be computed in any case, those after ``end`` included;
                none if ``end`` is the prompt's, and the logits that follow are cached.
            cache_salt: Prompts of different salts never match.
            is_retry: The prompt is counted already.

        Returns:
            The prompt; close its record when it is done.

        Raises:
            InvalidArgumentError: The tokens or the salt are of a wrong kind, or the cache is.
        """
        is_whole = end == len(tokens)
        record = self._open(tokens, cache_salt, min_computed, is_whole)
        if 0 < end - record.match.skip_tokens < self.fewest_tokens and record.match.skip_tokens:
            record.close()
            left = len(tokens) - end + self.fewest_tokens
            record = self._open(tokens, cache_salt, left, is_whole)
        try:
            restored = record.load()
            if restored is not None:
                self._filler.fill(cache, restored)
            segments = self._plan(record, len(tokens), end)  # a placement may raise
        except BaseException:
            record.close()
            raise
        if not is_retry:
            self._store.counters.count_admission(record.match)
        logits = None if restored is None else restored.logits
        return Prefill(tokens, cache, record, segments, logits)

    def compute(
        self,
        tokens: Sequence[int],
        cache: Any,
        *,
        end: int,
        min_computed: int,
        cache_salt: ExtraKey,
        is_retry: bool = False,
    ) -> Prefill:
        """Restores the longest cached prefix of a prompt and computes the rest.

        Args:
            tokens: As in ``begin``, like the others.
            cache: It is filled.
            end: How many of the tokens.
            min_computed: How many are to be computed in any case.
            cache_salt: Prompts of different salts never match.
            is_retry: The prompt is counted already.

        Returns:
            The prompt; close its record when it is done.
        """
        bounds = {"end": end, "min_computed": min_computed}
        prefill = self.begin(tokens, cache, **bounds, cache_salt=cache_salt, is_retry=is_retry)
        try:
            self.run(prefill, prefill.segments)
        except BaseException as error:
            prefill.record.close()
            if not self.retry(prefill, error):
                raise
        else:
            return prefill
        return self.compute(tokens, cache, **bounds, cache_salt=cache_salt, is_retry=True)

    def put_back(self) -> None:
        """Undoes what a forward that broke off has replaced in the model's code."""
        put_back(self._capture)

    def retry(self, prefill: Prefill, error: BaseException) -> bool:
        """Prepares for computing a prompt again, in smaller segments, if that can help.

        Args:
            prefill: It failed. Its record is closed, and its cache is as fresh as it was.
            error: What was raised.

        Returns:
            Whether memory ran out, and it makes sense to begin again.
        """
        longest = max((s.end - s.start for s in prefill.segments), default=0)
        size = self._store.layout.block_size_tokens
        smaller = longest // 2 // size * size
        may_help = self._may_shrink and not self._is_stepwise and smaller > 0
        if not may_help or not isinstance(error, torch.OutOfMemoryError):
            return False
        self._segment_tokens = smaller
        prefill.record.close()
        vars(prefill.cache).clear()
        vars(prefill.cache).update(vars(self._runner.new_cache()))
        return True

    def _open(
        self, tokens: Sequence[int], cache_salt: ExtraKey, min_computed: int, is_whole: bool
    ) -> SequenceRecord:
        return self._store.open(
            tokens,
            cache_salt=cache_salt,
            lora_id=self._runner.fingerprint.key,
            min_computed=min_computed,
            with_logits=is_whole,
        )

    def run(self, prefill: Prefill, segments: Sequence[Segment]) -> None:
        """Computes segments, and caches what they complete after each."""
        for segment in segments:
            tokens = prefill.tokens[segment.start : segment.end]
            with self.captured(prefill, segment) as captured:
                logits = self._runner.forward(tokens, prefill.cache, segment.start)
            self._store.counters.computed_tokens += len(tokens)
            self._runner.fingerprint.confirm()
            is_end = segment.end in segment.checkpoints or segment is prefill.segments[-1]
            memory = read_layers(prefill.cache, self._store.layout.layers, segment.end)
            memory.logits = logits[:, -1]
            prefill.record.publish(memory, segment.end, captured=captured, is_end=is_end)

    @contextmanager
    def captured(self, prefill: Prefill, segment: Segment) -> Iterator[set[int]]:
        """Captures the states inside a segment from the forward that runs inside.

        Yields:
            A set that holds, once the forward has ended, the positions whose states were written
            into the slots that the prompt's record reserved.
        """
        inside = [position for position in segment.checkpoints if position < segment.end]
        rooms = prefill.record.reserve_states(inside) if inside else {}
        if not rooms or self._capture is None:
            yield set()
            return
        size = segment.end - segment.start
        with self._capture.during(prefill.cache, segment.start, size, rooms) as captured:
            yield captured

    def _plan(self, record: SequenceRecord, num_tokens: int, end: int) -> list[Segment]:
        size, start = self._store.layout.block_size_tokens, record.match.skip_tokens
        facts = PlacementFacts(
            prompt_tokens=num_tokens,
            block_size_tokens=size,
            num_matched_blocks=record.match.kv_matched_blocks,
            num_required_blocks=-(-num_tokens // size),
        )
        positions = placed_positions(self._placement, facts)
        if self.fewest_tokens > 1 and end - 1 in positions:  # it would leave a single token
            positions = positions - {end - 1} | {end - 1 - size}
        checkpoints = {p for p in positions if start < p <= end}
        first = start // self._segment_tokens + 1
        cuts = set(range(first * self._segment_tokens, end, self._segment_tokens))
        if self._is_stepwise:
            cuts = self._step_cuts(checkpoints, start, end)
        elif self._capture is None:
            cuts |= checkpoints
        ends = sorted({*cuts, end} - {start})
        if self.fewest_tokens > 1:
            # No cut leaves a single token before it or after it.
            ends = [one for one, after in pairwise([*ends, 0]) if one + 1 != after]
            if len(ends) > 1 and ends[0] == start + 1:
                del ends[0]
        return [
            Segment(begin, stop, tuple(p for p in sorted(checkpoints) if begin < p <= stop))
            for begin, stop in zip([start, *ends], ends, strict=False)
        ]

    def _step_cuts(self, checkpoints: set[int], start: int, end: int) -> set[int]:
        """Single tokens, but for the first forward of all, which goes to the first checkpoint."""
        first = start if start else min(checkpoints, default=end)
        return set(range(first, end)) or {end}
