"""Computes prompts: restores what is cached, and runs the rest in segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mamba_cache.blocks import ExtraKey
from mamba_cache.integrations.transformers.layers import read_layers, write_layers
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
        is_checkpoint: The state at the end is saved.
    """

    start: int
    end: int
    is_checkpoint: bool


@dataclass(slots=True)
class Prefill:
    """A prompt that is being computed.

    Attributes:
        tokens: Its token ids.
        cache: The transformers cache that it is computed into.
        record: What of it is cached.
        segments: What is left to compute.
    """

    tokens: Sequence[int]
    cache: Any
    record: SequenceRecord
    segments: list[Segment]


class Prefiller:
    """Computes prompts into transformers caches.

    Args:
        runner: The model.
        store: What is cached.
        placement: Where states are saved.
        segment_tokens: The most that one forward computes, a multiple of the block size.
        is_stepwise: After the first forward, or after a restored state, the model must be given
            single tokens.
    """

    def __init__(
        self,
        runner: ModelRunner,
        store: PrefixStore,
        *,
        placement: CheckpointPlacement,
        segment_tokens: int,
        is_stepwise: bool,
    ) -> None:
        self._runner = runner
        self._store = store
        self._placement = placement
        self._segment_tokens = segment_tokens
        self._is_stepwise = is_stepwise

    def begin(
        self,
        tokens: Sequence[int],
        cache: Any,
        *,
        end: int,
        min_computed: int,
        cache_salt: ExtraKey,
    ) -> Prefill:
        """Restores the longest cached prefix of a prompt and plans the rest.

        Args:
            tokens: Token ids of the prompt.
            cache: A fresh transformers cache; it is filled.
            end: How many of the tokens are to be restored or computed.
            min_computed: How many are to be computed in any case, those after ``end`` included.
            cache_salt: Prompts of different salts never match.

        Returns:
            The prompt; close its record when it is done.

        Raises:
            InvalidArgumentError: The tokens or the salt are of a wrong kind, or the cache is.
        """
        record = self._store.open(
            tokens,
            cache_salt=cache_salt,
            lora_id=self._runner.adapters(),
            min_computed=min_computed,
        )
        try:
            restored = record.load()
            if restored is not None:
                write_layers(cache, self._store.layout.layers, restored)
            segments = self._plan(record, len(tokens), end)  # a placement may raise
        except BaseException:
            record.close()
            raise
        self._store.counters.count_admission(record.match)
        return Prefill(tokens, cache, record, segments)

    def run(self, prefill: Prefill, segments: Sequence[Segment]) -> None:
        """Computes segments, and caches what they complete after each."""
        size = self._store.layout.block_size_tokens
        for segment in segments:
            tokens = prefill.tokens[segment.start : segment.end]
            self._runner.forward(tokens, prefill.cache, segment.start)
            self._store.counters.computed_tokens += len(tokens)
            if segment.end % size == 0 or segment is segments[-1]:
                memory = read_layers(prefill.cache, self._store.layout.layers, segment.end)
                prefill.record.publish(memory, segment.end, has_state=segment.is_checkpoint)

    def _plan(self, record: SequenceRecord, num_tokens: int, end: int) -> list[Segment]:
        size, start = self._store.layout.block_size_tokens, record.match.skip_tokens
        facts = PlacementFacts(
            prompt_tokens=num_tokens,
            block_size_tokens=size,
            num_matched_blocks=record.match.kv_matched_blocks,
            num_required_blocks=-(-num_tokens // size),
        )
        checkpoints = {p for p in placed_positions(self._placement, facts) if start < p <= end}
        cuts = self._step_cuts if self._is_stepwise else self._segment_cuts
        ends = sorted({*cuts(checkpoints, start, end), end} - {start})
        return [
            Segment(begin, stop, stop in checkpoints)
            for begin, stop in zip([start, *ends], ends, strict=False)
        ]

    def _segment_cuts(self, checkpoints: set[int], start: int, end: int) -> set[int]:
        first = start // self._segment_tokens + 1
        grid = range(first * self._segment_tokens, end, self._segment_tokens)
        return checkpoints.union(grid)

    def _step_cuts(self, checkpoints: set[int], start: int, end: int) -> set[int]:
        """Single tokens, but for the first forward of all, which goes to the first checkpoint."""
        first = start if start else min(checkpoints, default=end)
        return set(range(first, end)) or {end}
