"""Steps, forks and captured graphs: what an embedder sees of them, and what requests compute."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from mamba_cache.cache.sequence import Checkpoint
from mamba_cache.context.request_table import NO_REQUESTS, DecodingGroup, Int64Array
from mamba_cache.context.requests import ActiveRequest, Chunk
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.metadata import StepMetadata

__all__ = [
    "NOBODY_DECODES",
    "CapturedExtractions",
    "DecodeWork",
    "Forks",
    "ScheduledRequest",
    "Step",
]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step.

    Attributes:
        request_id: The request.
        row: Its row in the block tables and the live states.
        start: Tokens of its sequence before this step, as far as they are known on the host.
        num_tokens: Tokens computed in this step, drafts included.
        skip_tokens: Tokens that a state restored in this step made needless to compute.
        is_prefill: Whether the tokens are a chunk of the prompt rather than decoded ones.
        samples: Whether the last known token is computed, so that ``commit_step`` needs the next.
        drafts: Which of a decoding request's tokens are drafts; none where the device alone knows
            them.
        checkpoints: Of a chunk, the positions inside it at which a state is saved, in tokens from
            the sequence's start, each with its slot; for embedders that write whole states there.
    """

    request_id: Hashable
    row: int
    start: int
    num_tokens: int
    skip_tokens: int
    is_prefill: bool
    samples: bool
    drafts: tuple[int, ...] = ()
    checkpoints: tuple[tuple[int, int], ...] = ()


class DecodeWork(NamedTuple):
    """What a step computes of the requests that decode."""

    group: DecodingGroup  # the requests
    starts: Int64Array  # [n] tokens that each has computed, as far as they are known on the host
    most: Int64Array  # [n] likewise, or what it may be by what the device alone knows
    ends: Int64Array  # [n] the position after the last token of each, at most
    longest: int  # the largest of ``ends``
    num_tokens: int  # tokens of all of them together
    width: int = 1  # tokens that each computes at most
    lengths: Int64Array | None = None  # [n] tokens of each; None: ``width``
    drafts: Int64Array | None = None  # [n, width - 1] those known on the host; -1: none
    crossing: Sequence[int] = ()  # which have tokens beyond their current block

    def describe(self) -> list[ScheduledRequest]:
        """Return each request's part of the step."""
        count = len(self.group.ids)
        lengths = [self.width] * count if self.lengths is None else self.lengths.tolist()
        drafts: list[list[int]] = [[]] * count if self.drafts is None else self.drafts.tolist()
        return [
            ScheduledRequest(
                request_id=request_id,
                row=row,
                start=start,
                num_tokens=length,
                skip_tokens=0,
                is_prefill=False,
                samples=True,
                drafts=tuple(guessed[: length - 1]),
            )
            for request_id, row, start, length, guessed in zip(
                self.group.ids,
                self.group.rows.tolist(),
                self.starts.tolist(),
                lengths,
                drafts,
                strict=True,
            )
        ]


_NO_TOKENS: Int64Array = np.zeros(0, dtype=np.int64)

NOBODY_DECODES = DecodeWork(NO_REQUESTS, _NO_TOKENS, _NO_TOKENS, _NO_TOKENS, 0, 0)
"""What a step computes of requests that decode if there are none."""


class Step:
    """What the forward computes.

    Attributes:
        metadata: What the model's layers read.
    """

    def __init__(
        self,
        work: DecodeWork,
        actives: Sequence[ActiveRequest],
        chunks: Sequence[Chunk],
        planned: dict[int, Checkpoint],
        metadata: StepMetadata,
        *,
        layers: Iterable[int],
    ) -> None:
        self._work = work  # what is computed of the requests that decode
        self._actives = actives  # the requests of prompts
        self._chunks = chunks  # what is computed of them
        decoding = work.group.requests
        self._requests = (*decoding, *actives) if actives else decoding  # in the batch's order
        self._planned = planned  # states that decoding requests save, by their places in the batch
        self._is_advanced = False  # whether the device knows the sampled tokens
        self._missing = set(layers)  # those that have to hand over states, and have not
        self._fields: tuple[torch.Tensor, ...] = ()  # of its checkpoints inside chunks, once read
        self.metadata = metadata

    def __repr__(self) -> str:
        return f"Step(requests={self.requests!r})"

    @cached_property
    def requests(self) -> tuple[ScheduledRequest, ...]:
        """The batch in the order of the metadata's rows: decodes first, then prefills.

        It is made when it is first read.
        """
        return (*self._work.describe(), *self.prefills)

    @cached_property
    def prefills(self) -> tuple[ScheduledRequest, ...]:
        """The chunks of prompts, which come last in the batch; made when they are first read."""
        return tuple(
            ScheduledRequest(
                request_id=active.request_id,
                row=chunk.row,
                start=chunk.start,
                num_tokens=chunk.num_tokens,
                skip_tokens=chunk.start if chunk.is_first else 0,
                is_prefill=True,
                samples=chunk.samples,
                checkpoints=tuple((point.position, point.slot) for point in chunk.inside),
            )
            for active, chunk in zip(self._actives, self._chunks, strict=True)
        )

    @property
    def decode_rows(self) -> Int64Array:
        """[num decoding] int64: the rows of the requests that decode, in the same order."""
        return self._work.group.rows

    @property
    def request_ids(self) -> tuple[Hashable, ...]:
        """The requests' ids in the same order."""
        return tuple([active.request_id for active in self._requests])

    @property
    def sampling_ids(self) -> tuple[Hashable, ...]:
        """Requests whose next token must be given to ``commit_step``, in the same order."""
        ids = self._work.group.ids
        if not self._actives:
            return ids
        pairs = zip(self._actives, self._chunks, strict=True)
        return (*ids, *(active.request_id for active, chunk in pairs if chunk.samples))


@dataclass(frozen=True, slots=True)
class Forks:
    """What ``fork`` has made, for embedders with tensors of their own by request row or KV block.

    Attributes:
        request_ids: The new requests.
        source_row: The row of the request that was forked.
        rows: The rows of the new ones.
        source_block: The KV block that the forked request has filled in part; None if it stands at
            a block boundary.
        blocks: A KV block for each of the new requests, which holds what that one does; none if it
            stands at a block boundary.
    """

    request_ids: tuple[Hashable, ...]
    source_row: int
    rows: tuple[int, ...]
    source_block: int | None
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CapturedExtractions:
    """What a CUDA graph extracts at each of its replays.

    Made by ``DynamicInferenceContext.capture_extractions``. An embedder whose own kernels write
    checkpoint states into their slots makes it itself.

    Attributes:
        lengths: For each layer with a state, how many chunks and how many prefill tokens the
            captured tensors hold: no step with more can be replayed. With several kinds of layers
            they are numbered through, kind after kind in the spec's order.

    Raises:
        InvalidArgumentError: ``lengths`` does not map layers to two ints >= 0.
    """

    lengths: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_mapping = isinstance(self.lengths, dict)
        if not is_mapping or not all(map(_is_pair_of_counts, self.lengths.values())):
            raise InvalidArgumentError(
                "lengths must map each layer to a pair of ints >= 0, its chunks and its tokens, "
                f"got {self.lengths!r}"
            )


def _is_pair_of_counts(pair: Any) -> bool:
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    return is_pair and all(type(number) is int and number >= 0 for number in pair)
