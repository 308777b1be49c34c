"""Prefill: what is cached is restored, and the rest runs in as few forwards as it can."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache.blocks import ExtraKey
from mamba_cache.integrations.transformers.capture import StateCapture
from mamba_cache.integrations.transformers.costs import CostModel, fewest_winning
from mamba_cache.integrations.transformers.layers import (
    CacheFiller,
    SequenceMemory,
    read_layers,
)
from mamba_cache.integrations.transformers.prompts import PromptHint
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.integrations.transformers.store import PrefixStore, SequenceRecord
from mamba_cache.slots import CheckpointPlacement, PlacementFacts
from mamba_cache.slots.placement import placed_positions

__all__ = ["Prefill", "PrefillTask", "Prefiller", "Segment"]

_NO_HINT = PromptHint()

_DECODED = 8
"""Tokens at the end of a prefix that ``recompute`` takes one by one, as answers are computed."""


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
        min_computed: How many are to be computed in any case, those after ``end`` included; none if
            ``end`` is the prompt's, and the logits that follow are cached.
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

    @property
    def is_whole(self) -> bool:
        """Whether it ends where the prompt does."""
        return self.end == len(self.tokens)


@dataclass(slots=True)
class Prefill:
    """A prompt that is being computed."""

    tokens: npt.NDArray[np.int32]  # its token ids
    cache: Any  # the transformers cache that it is computed into
    record: SequenceRecord  # what of it is cached
    segments: list[Segment]  # what is left to compute; empty if all of it was restored
    # [1, vocabulary]: what follows, if all of it was restored and that is known.
    logits: torch.Tensor | None = None


class Prefiller:
    """Computes prompts into transformers caches.

    Args:
        runner: The model.
        store: What is cached.
        filler: Puts what is restored into caches.
        capture: Takes states out of a forward; None: a prompt is cut at its checkpoints.
        placement: Where states are saved.
        costs: Which hits and which of the placement's positions pay.
        segment_tokens: The most that one forward computes, a multiple of the block size.
        may_shrink: ``segment_tokens`` is a guess, which a forward that ran out of memory corrects.
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
        costs: CostModel,
        segment_tokens: int,
        may_shrink: bool,
        fewest_tokens: int,
    ) -> None:
        self._runner = runner
        self._store = store
        self._filler = filler
        self._capture = capture
        self._placement = placement
        self._costs = costs
        self._segment_tokens = segment_tokens
        self._may_shrink = may_shrink
        self.fewest_tokens = fewest_tokens

    def begin(self, task: PrefillTask, cache: Any, *, is_retry: bool = False) -> Prefill:
        """Restores the longest cached prefix of a prompt, if that pays, and plans the rest.

        Args:
            task: The prompt.
            cache: A fresh transformers cache; it is filled.
            is_retry: The prompt is counted already.

        Returns:
            The prompt; close its record when it is done.

        Raises:
            InvalidArgumentError: The tokens or the salt are of a wrong kind, or the cache is.
        """
        tokens, end, hint = task.tokens, task.end, task.hint
        record = self._open(task, task.min_computed)
        if 0 < end - record.match.skip_tokens < self.fewest_tokens and record.match.skip_tokens:
            record.close()
            record = self._open(task, len(tokens) - end + self.fewest_tokens)
        try:
            start, restored = self._start(record, end, is_retry), None
            if start:
                with self._costs.restore(self._restored_bytes(start)):
                    restored = record.load()
                    assert restored is not None
                    self._filler.fill(cache, restored)
            segments = self._plan(record, len(tokens), start, end, task.checkpoints)  # may raise
            size = self._store.layout.block_size_tokens
            record.asked = frozenset(p // size * size for p in task.checkpoints)
        except BaseException:
            record.close()
            raise
        if not is_retry:
            self._count(record, start, hint)
            num_left = 0 if task.is_whole else task.min_computed
            record.tell_policy(hint, len(tokens) - num_left)
        logits = None if restored is None else restored.logits
        return Prefill(tokens, cache, record, segments, logits)

    def compute(self, task: PrefillTask, cache: Any) -> Prefill:
        """Restores the longest cached prefix of a prompt, as ``begin`` does, and computes the rest.

        Returns:
            The prompt; close its record when it is done.
        """
        is_retry = False
        while True:
            prefill = self.begin(task, cache, is_retry=is_retry)
            try:
                self.run(prefill, prefill.segments)
            except BaseException as error:
                prefill.record.close()
                if not self.retry(prefill, error):
                    raise
                is_retry = True
            else:
                return prefill

    def retry(self, prefill: Prefill, error: BaseException) -> bool:
        """Prepare for computing a prompt again, in smaller segments, if that can help.

        Args:
            prefill: It failed. Its record is closed, and its cache is as fresh as it was.
            error: What was raised.

        Returns:
            Whether memory ran out, and it makes sense to begin again.
        """
        longest = max((s.end - s.start for s in prefill.segments), default=0)
        size = self._store.layout.block_size_tokens
        smaller = longest // 2 // size * size
        may_help = self._may_shrink and smaller > 0
        if not may_help or not isinstance(error, torch.OutOfMemoryError):
            return False
        self._segment_tokens = smaller
        prefill.record.close()
        vars(prefill.cache).clear()
        vars(prefill.cache).update(vars(self._runner.new_cache()))
        return True

    def _open(self, task: PrefillTask, min_computed: int) -> SequenceRecord:
        return self._store.open(
            task.tokens,
            cache_salt=task.cache_salt,
            lora_id=self._runner.fingerprint.key,
            min_computed=min_computed,
            with_logits=task.is_whole,
        )

    def run(self, prefill: Prefill, segments: Sequence[Segment]) -> None:
        """Compute segments, and cache what they complete after each."""
        for segment in segments:
            tokens = prefill.tokens[segment.start : segment.end]
            with self.captured(prefill, segment) as captured:
                logits = self._runner.forward(tokens, prefill.cache, segment.start)
            self._store.counters.computed_tokens += len(tokens)
            self._runner.fingerprint.confirm()
            is_end = segment.end in segment.checkpoints or segment is prefill.segments[-1]
            memory = read_layers(prefill.cache, self._store.layout.layers, segment.end)
            memory.logits = logits[:, -1] if self._runner.keeps_logits else None
            prefill.record.publish(memory, segment.end, captured=captured, is_end=is_end)

    @contextmanager
    def captured(self, prefill: Prefill, segment: Segment) -> Iterator[set[int]]:
        """Capture the states inside a segment from the forward that runs inside.

        Yields:
            A set that holds, once the forward has ended, the positions whose states were written
            into the slots that the prompt's record reserved.
        """
        inside = [position for position in segment.checkpoints if position < segment.end]
        rooms = prefill.record.reserve_states(inside) if inside else {}
        size = segment.end - segment.start
        if not rooms or self._capture is None:
            with self._costs.forward(size, segment.start):
                yield set()
            return
        self._costs.spent.splits += len(rooms)
        with (
            self._costs.forward(size, segment.start, len(rooms)),
            self._capture.during(prefill.cache, segment.start, size, rooms) as captured,
        ):
            yield captured

    def expected_saving(self, cached_tokens: int, new_tokens: int) -> float | None:
        """Return the seconds by which a hit is faster than none, None if that is not known."""
        return self._saving(cached_tokens, cached_tokens + new_tokens)

    def break_even_tokens(self, new_tokens: int) -> int | None:
        """Return from how many cached tokens on a hit wins, None if that is not known."""
        size = self._store.layout.block_size_tokens
        lengths = {size * step << power for power in range(12) for step in (2, 3)} | {size}
        gains = {n: self._saving(n, n + new_tokens) for n in lengths}
        tokens = fewest_winning({n: gain for n, gain in gains.items() if gain is not None})
        return None if tokens is None else math.ceil(tokens)

    def _start(self, record: SequenceRecord, end: int, is_retry: bool) -> int:
        """Decides how much of what was found is restored: all of it, or nothing."""
        found = record.match.skip_tokens
        # A prompt that ran out of memory needs more for more tokens.
        if not found or is_retry or self._costs.uses(self._saving(found, end)):
            return found
        return 0

    def recompute(
        self, tokens: npt.NDArray[np.int32], *, in_pieces: bool = False
    ) -> SequenceMemory:
        """Compute a prefix without what is cached, and keep nothing of it.

        Args:
            tokens: Its token ids.
            in_pieces: Compute it block by block, and its last tokens one by one if single tokens
                are exact, rather than in as few forwards as possible.

        Returns:
            What the model's layers keep of it, and the logits that follow.
        """
        end, size = len(tokens), self._store.layout.block_size_tokens
        cuts = {*self._segment_ends(0, end)}
        if in_pieces:
            cuts |= {*range(size, end, size)}
        if in_pieces and self.fewest_tokens == 1:
            cuts |= {*range(max(end - _DECODED, 1), end)}
        cache = self._runner.new_cache()
        for start, stop in pairwise([0, *self._divided(0, {*cuts, end})]):
            logits = self._runner.forward(tokens[start:stop], cache, start)
        self._runner.fingerprint.confirm()  # of other weights nothing is known to be wrong
        memory = read_layers(cache, self._store.layout.layers, end)
        memory.logits = logits[:, -1]
        return memory

    def _divided(self, start: int, ends: set[int]) -> list[int]:
        """Return where forwards end, none of which is given fewer tokens than it must be."""
        ordered = sorted(ends - {start})
        if self.fewest_tokens > 1:
            # No cut leaves a single token before it or after it.
            ordered = [one for one, after in pairwise([*ordered, 0]) if one + 1 != after]
            if len(ordered) > 1 and ordered[0] == start + 1:
                del ordered[0]
        return ordered

    def _count(self, record: SequenceRecord, start: int, hint: PromptHint) -> None:
        match, counters = record.match, self._store.counters
        tokens, chain, (salt, _) = record.prompt
        self._store.tell_admitted(
            chain.hashes, len(tokens), will_continue=hint.will_continue, cache_salt=salt
        )
        if self._store.watch is not None:
            self._store.watch.counted(record, start)
        if start or not match.skip_tokens:
            counters.count_admission(match)
            return
        counters.requests += 1
        counters.kv_matched_blocks += match.kv_matched_blocks
        self._costs.spent.declined_hits += 1
        self._costs.spent.declined_tokens += match.skip_tokens

    def _restored_bytes(self, num_tokens: int) -> int:
        layout = self._store.layout
        blocks = -(-num_tokens // layout.block_size_tokens)
        return layout.bytes_per_slot + blocks * layout.bytes_per_block

    def _saving(self, position: int, end: int) -> float | None:
        """Return the seconds that a state at ``position`` saves a prompt of ``end`` tokens."""
        restore = self._costs.restore_seconds(self._restored_bytes(position))
        whole = None if restore is None else self._seconds(0, end)
        rest = None if whole is None else self._seconds(position, end)
        if restore is None or whole is None or rest is None:
            return None
        return whole - rest - restore

    def _seconds(self, start: int, end: int) -> float | None:
        """Return what the forwards over a part of a prompt take, None if that is not known."""
        total, ends = 0.0, self._segment_ends(start, end)
        for begin, stop in pairwise([start, *ends, end]):
            if begin < stop:
                seconds = self._costs.forward_seconds(stop - begin, begin)
                if seconds is None:
                    return None
                total += seconds
        return total

    def _split_seconds(self, position: int, start: int, end: int) -> float | None:
        """Return what it takes to save a state inside a prompt, None if that is not known."""
        if self._capture is not None:
            return self._costs.cut_seconds()
        parts = self._seconds(start, position), self._seconds(position, end)
        whole = self._seconds(start, end)
        if whole is None or parts[0] is None or parts[1] is None:
            return None
        return max(parts[0] + parts[1] - whole, 0.0)

    def _pays(self, position: int, start: int, end: int) -> bool:
        """Says whether a state is worth its split, as far as is known."""
        saving = self._saving(position, end)
        cost = None if saving is None else self._split_seconds(position, start, end)
        if saving is None or cost is None or saving > cost:
            return True
        self._costs.spent.declined_splits += 1
        return False

    def _checkpoints(
        self,
        record: SequenceRecord,
        num_tokens: int,
        start: int,
        end: int,
        named: Collection[int],
    ) -> set[int]:
        """Decides after which of the tokens from ``start`` to ``end`` states are kept."""
        size, found = self._store.layout.block_size_tokens, record.match.skip_tokens
        facts = PlacementFacts(
            prompt_tokens=num_tokens,
            block_size_tokens=size,
            num_matched_blocks=record.match.kv_matched_blocks,
            num_required_blocks=-(-num_tokens // size),
        )
        # If what was found does not pay, nothing before it does.
        placed = {p for p in placed_positions(self._placement, facts) if found < p <= end}
        named = {p // size * size for p in named} - {found}
        positions = {p for p in placed if p == end or p in named or self._pays(p, start, end)}
        positions |= {p for p in named if start < p <= end}
        if self.fewest_tokens > 1 and end - 1 in positions:  # it would leave a single token
            positions = {p for p in positions - {end - 1} | {end - 1 - size} if p > start}
        return positions

    def _plan(
        self,
        record: SequenceRecord,
        num_tokens: int,
        start: int,
        end: int,
        named: Collection[int],
    ) -> list[Segment]:
        checkpoints = self._checkpoints(record, num_tokens, start, end, named)
        cuts = set(self._segment_ends(start, end))
        if self._capture is None:
            splits = checkpoints - cuts - {end}
            for position in splits:
                self._costs.spent.splits += 1
                self._costs.spent.seconds_splitting += (
                    self._split_seconds(position, start, end) or 0.0
                )
            cuts |= splits
        ends = self._divided(start, {*cuts, end})
        return [
            Segment(begin, stop, tuple(p for p in sorted(checkpoints) if begin < p <= stop))
            for begin, stop in zip([start, *ends], ends, strict=False)
        ]

    def _segment_ends(self, start: int, end: int) -> range:
        """Return where a part of a prompt is divided because of the memory that it needs."""
        first = start // self._segment_tokens + 1
        return range(first * self._segment_tokens, end, self._segment_tokens)
