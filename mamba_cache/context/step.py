"""Steps: their public face, the work of decoding requests, and checks of sampled tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch

from mamba_cache._checks import check_int, is_unreadable
from mamba_cache.cache.sequence import Checkpoint
from mamba_cache.config import CacheConfig
from mamba_cache.context.request_table import DecodingGroup, Int64Array, RequestTable
from mamba_cache.context.requests import ActiveRequest, Chunk, RequestPreparer
from mamba_cache.errors import InvalidArgumentError, SequenceLengthError
from mamba_cache.metadata import StepMetadata

__all__ = [
    "CapturedExtractions",
    "DecodeWork",
    "Drafts",
    "Forks",
    "NewTokens",
    "Sampled",
    "ScheduledRequest",
    "Step",
    "check_accepted",
    "check_on_device",
    "plan_decodes",
    "read_sampled",
]

Drafts: TypeAlias = "Mapping[Hashable, Sequence[int]] | torch.Tensor | Int64Array | Sequence[Any]"
"""Draft tokens: by request id; or [num_decodes, k] in the order of the batch; or, on the device, a
tensor [max_requests, num_speculative_tokens] by request row. A negative item is no token."""

NewTokens: TypeAlias = "Mapping[Hashable, Any] | torch.Tensor | Int64Array | Sequence[Any]"
"""Sampled tokens on the host: by request id, or in the order of ``Step.sampling_ids``."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step.

    Attributes:
        request_id: Id of the request.
        row: The request's row in the block tables and the live states.
        start: Number of tokens computed before this step, without those of an uncollected step.
        num_tokens: Number of tokens computed in this step, drafts included.
        skip_tokens: Number of tokens skipped because a state is restored in this step.
        is_prefill: Whether the tokens are a chunk of the prompt.
        samples: Whether the last known token is computed, so that ``commit_step`` needs the next.
        drafts: Draft tokens of a decoding request; empty if they are on the device only.
        checkpoints: Pairs (position, slot) of the checkpoints inside a chunk, positions in tokens
            from the sequence's start; for embedders that write whole states to slots.
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
    """The tokens that a step computes for its n decoding requests."""

    group: DecodingGroup
    starts: Int64Array  # [n] computed tokens of each request, without those of an uncollected step
    max_starts: Int64Array  # [n] the same, plus the maximum number from an uncollected step
    ends: Int64Array  # [n] maximum position after the last token of this step
    longest: int  # the maximum of ``ends``
    num_tokens: int  # sum over all requests
    width: int = 1  # maximum number of tokens of one request
    lengths: Int64Array | None = None  # [n] number of tokens of each request; None: ``width``
    drafts: Int64Array | None = None  # [n, width - 1] drafts known on the host; -1: none
    crossing: Sequence[int] = ()  # indices of requests with tokens beyond their current block

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


class Step:
    """A step: its requests, and their tokens that the forward computes.

    Attributes:
        metadata: The tensors that the model's layers read.
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
        self._work = work  # of decoding requests
        self._actives = actives  # requests with chunks
        self._chunks = chunks  # one for each of ``actives``
        decoding = work.group.requests
        self._requests = (*decoding, *actives) if actives else decoding  # in batch order
        self._planned = planned  # checkpoints of decoding requests, by place in the batch
        self._is_advanced = False  # whether the sampled tokens are recorded on the device
        self._missing = set(layers)  # layers that have not handed over their states yet
        self._fields: tuple[torch.Tensor, ...] = ()  # of checkpoints inside chunks, once sliced
        self.metadata = metadata

    def __repr__(self) -> str:
        return f"Step(requests={self.requests!r})"

    @cached_property
    def requests(self) -> tuple[ScheduledRequest, ...]:
        """The batch in the order of the metadata's rows: decodes, then prefills; made lazily."""
        return (*self._work.describe(), *self.prefills)

    @cached_property
    def prefills(self) -> tuple[ScheduledRequest, ...]:
        """The chunks of prompts, which are the batch's last rows; made lazily."""
        return tuple(
            ScheduledRequest(
                request_id=active.request_id,
                row=chunk.row,
                start=chunk.start,
                num_tokens=len(chunk.token_ids),
                skip_tokens=chunk.start if chunk.is_first else 0,
                is_prefill=True,
                samples=chunk.samples,
                checkpoints=tuple((point.position, point.slot) for point in chunk.inside),
            )
            for active, chunk in zip(self._actives, self._chunks, strict=True)
        )

    @property
    def decode_rows(self) -> Int64Array:
        """[num decoding] int64: the rows of the decoding requests, in batch order."""
        return self._work.group.rows

    @property
    def request_ids(self) -> tuple[Hashable, ...]:
        """Ids of all requests, in batch order."""
        return tuple([active.request_id for active in self._requests])

    @property
    def sampling_ids(self) -> tuple[Hashable, ...]:
        """Ids of the requests whose next token ``commit_step`` needs, in batch order."""
        ids = self._work.group.ids
        if not self._actives:
            return ids
        pairs = zip(self._actives, self._chunks, strict=True)
        return (*ids, *[active.request_id for active, chunk in pairs if chunk.samples])


@dataclass(frozen=True, slots=True)
class Forks:
    """The result of ``fork``, for embedders with their own tensors by request row or KV block.

    Attributes:
        request_ids: Ids of the forks.
        source_row: Row of the forked request.
        rows: Rows of the forks.
        source_block: The KV block that the forked request has filled in part; None at a block
            boundary.
        blocks: The copy of ``source_block`` of each fork; empty at a block boundary.
    """

    request_ids: tuple[Hashable, ...]
    source_row: int
    rows: tuple[int, ...]
    source_block: int | None
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CapturedExtractions:
    """The layers whose states a CUDA graph extracts at each replay.

    ``DynamicInferenceContext.capture_extractions`` makes this. An embedder makes it itself if its
    own kernels write checkpoint states to slots.

    Attributes:
        lengths: For each layer, the number of chunks and of prefill tokens of the captured tensors,
            which limit the steps that can be replayed. Layers are numbered over all kinds, kind
            after kind in the spec's order.

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


def plan_decodes(
    table: RequestTable,
    group: DecodingGroup,
    drafts: Drafts | None,
    *,
    is_uncollected: bool,
    config: CacheConfig,
    preparer: RequestPreparer,
    device: torch.device,
) -> DecodeWork:
    """Return the tokens that a step computes for decoding requests: the last one and the drafts.

    Check that ``max_sequence_length`` has room for them; drafts on the device are cut to fit.
    ``is_uncollected`` is whether the last step is uncollected.
    """
    width, room = config.num_speculative_tokens, config.max_sequence_length
    starts = max_starts = table.num_computed[group.rows]
    if is_uncollected:
        max_starts = starts + table.num_uncollected[group.rows]
    count = len(group.ids)
    longest = max_starts.item(max_starts.argmax()) if count else 0  # 4 times as fast as ``max``
    if longest >= room:
        _refuse_length(table, group, max_starts, room)
    given: Int64Array | None = None
    lengths: Int64Array | None = None
    each = 1  # maximum number of tokens of one request
    if isinstance(drafts, torch.Tensor):
        shape, each = (config.max_requests, width), 1 + width
        check_on_device("drafts", drafts, shape, (torch.int32, torch.int64), device)
        if count and longest + each > room:
            lengths = np.minimum(each, room - max_starts)
    elif drafts is not None:
        if isinstance(drafts, Mapping):
            given = _by_request(drafts, group, width, preparer)
        else:
            given = _in_order(drafts, group, width, preparer)
        each += given.shape[1]
        if np.count_nonzero(is_given := given >= 0) < given.size:
            lengths = np.count_nonzero(is_given, axis=1) + 1
    if lengths is None:
        ends, longest, total = max_starts + each, longest + each, count * each
    else:
        ends, total = max_starts + lengths, int(lengths.sum())
        longest = int(np.maximum.reduce(ends))
    if count and longest > room:
        index = int((ends > room).argmax())
        start = max_starts.item(index)
        raise InvalidArgumentError(
            f"request {group.ids[index]!r} has room for {room - start - 1} drafts within "
            f"max_sequence_length ({room}), got {ends.item(index) - start - 1}"
        )
    return DecodeWork(group, starts, max_starts, ends, longest, total, each, lengths, given)


def _refuse_length(
    table: RequestTable, group: DecodingGroup, max_starts: Int64Array, room: int
) -> NoReturn:
    """Raise for the first request whose next token exceeds ``max_sequence_length``."""
    index = int((max_starts >= room).argmax())
    may_have, hint = "has", "finish it"
    if table.num_uncollected[group.rows[index]]:
        may_have, hint = "may have", "collect the last step"
    raise SequenceLengthError(
        f"request {group.ids[index]!r} {may_have} {max_starts.item(index) + 1} tokens; "
        f"max_sequence_length is {room}: {hint}"
    )


def _by_request(
    drafts: Mapping[Hashable, Any], group: DecodingGroup, width: int, preparer: RequestPreparer
) -> Int64Array:
    """Return the drafts of a mapping from ids to tokens as [n, k], padded with -1."""
    unexpected = drafts.keys() - set(group.ids)
    if unexpected:
        raise InvalidArgumentError(
            f"drafts are for requests that decode in the step, got {sorted(map(repr, unexpected))}"
        )
    given, lengths = _by_id(drafts, group.ids, preparer, padding=-1)
    if given.shape[1] > width:
        name = f"the number of drafts of {group.ids[int(lengths.argmax())]!r}"
        check_int(name, given.shape[1], minimum=0, maximum=width)
    return given


def _by_id(
    given: Mapping[Hashable, Any], ids: Sequence[Hashable], preparer: RequestPreparer, padding: int
) -> tuple[Int64Array, Int64Array]:
    """Return the tokens of ids as [n, k], padded with ``padding``, and the number of each id's."""
    lists = [_as_list(given.get(name, ())) for name in ids]
    tokens = preparer.read_tokens([*chain.from_iterable(lists)])
    lengths = np.array([len(each) for each in lists], dtype=np.int64)
    padded = np.full((len(ids), int(lengths.max(initial=0))), padding, dtype=np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = tokens
    return padded, lengths


def _in_order(
    drafts: Any, group: DecodingGroup, width: int, preparer: RequestPreparer
) -> Int64Array:
    """Return the drafts of the caller's array as [n, k], padded with -1."""
    array = _as_array("drafts", drafts)
    if not array.size and isinstance(drafts, (list, tuple)):
        array = np.zeros((len(drafts), 0), dtype=np.int64)
    shape = array.shape
    if len(shape) != 2 or shape[0] != len(group.ids) or shape[1] > width:
        raise InvalidArgumentError(
            "drafts must map request ids to tokens, or be a tensor by request row, or an array of "
            f"[{len(group.ids)}, at most {width}] ints in the order of the requests that decode, "
            f"got {type(drafts).__name__} of {array.dtype} {list(shape)}"
        )
    if preparer.are_tokens(array):
        return array.astype(np.int64)  # a copy: the caller may overwrite the array
    is_given = array >= 0
    if (is_given[:, 1:] & ~is_given[:, :-1]).any():
        raise InvalidArgumentError("a request's drafts must come before its negative entries")
    preparer.read_tokens(array[is_given])
    return np.where(is_given, array, -1).astype(np.int64)


Sampled: TypeAlias = tuple[Int64Array, "Int64Array | None"]
"""Checked tokens [n, k] in the order of ``Step.sampling_ids``, and the number of tokens that each
request takes, [n]; None: one."""


def read_sampled(
    new_tokens: object,
    counts: object,
    ids: Sequence[Hashable],
    preparer: RequestPreparer,
) -> Sampled:
    """Return the caller's sampled tokens as arrays; ``check_accepted`` compares drafts later."""
    if not isinstance(new_tokens, Mapping):
        return _read_array(new_tokens, counts, len(ids), preparer)
    if counts is not None:
        raise InvalidArgumentError("counts belong to tokens in an array, not to a mapping")
    if tuple(new_tokens) == ids:  # the usual order: reading it takes half the time
        values = tuple(new_tokens.values())
    elif new_tokens.keys() == (id_set := set(ids)):
        values = tuple([new_tokens[request_id] for request_id in ids])
    else:
        missing, unexpected = id_set - new_tokens.keys(), new_tokens.keys() - id_set
        raise InvalidArgumentError(
            f"new_tokens must name just the requests that sample, Step.sampling_ids: "
            f"missing {sorted(map(repr, missing))}, unexpected {sorted(map(repr, unexpected))}"
        )
    try:  # checking the type of each value would take as long
        return preparer.read_tokens(values).astype(np.int64)[:, None], None
    except InvalidArgumentError:
        pass  # a request has several tokens, or a value is no token
    tokens, lengths = _by_id(new_tokens, ids, preparer, padding=0)
    return (tokens if tokens.size else np.zeros((len(ids), 1), dtype=np.int64)), lengths


def _read_array(given: Any, counts: Any, num_ids: int, preparer: RequestPreparer) -> Sampled:
    tokens = _as_array("new_tokens", given)
    if counts is None:
        if tokens.shape != (num_ids,):
            raise InvalidArgumentError(
                f"new_tokens must be one token for each of the {num_ids} requests in "
                f"Step.sampling_ids, or map their ids to tokens, got {list(tokens.shape)}"
            )
        return preparer.read_tokens(tokens).astype(np.int64)[:, None], None
    taken = _as_array("counts", counts)
    width = tokens.shape[1] if tokens.ndim == 2 else 0
    if not num_ids and not tokens.size and not taken.size:
        return np.zeros((0, 1), dtype=np.int64), None
    if tokens.ndim != 2 or len(tokens) != num_ids or taken.shape != (num_ids,):
        raise InvalidArgumentError(
            f"with counts, new_tokens must be [{num_ids}, k] and counts [{num_ids}], in the order "
            f"of Step.sampling_ids, got {list(tokens.shape)} and {list(taken.shape)}"
        )
    taken = taken.astype(np.int64)
    largest = int(np.maximum.reduce(taken.view(np.uint64), initial=1))  # as uint64 -1 is huge
    if largest > width:
        raise InvalidArgumentError(f"counts must be ints in [0, {width}], got {taken.tolist()}")
    if not preparer.are_tokens(tokens[:, :largest]):
        preparer.read_tokens(tokens[np.arange(width) < taken[:, None]])
    return tokens[:, :largest].astype(np.int64, copy=False), taken


def _as_array(name: str, given: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return ints on the host as an array; refuse a tensor on another device."""
    requirement = (
        f"{name} must be ints in the order of the batch, in a numpy array, a tensor on the CPU or "
        "a list; tokens may also be in a mapping of request ids"
    )
    is_tensor = isinstance(given, torch.Tensor) and given.device.type == "cpu"
    if not is_tensor and not isinstance(given, (np.ndarray, list, tuple)):
        is_elsewhere = isinstance(given, torch.Tensor)
        where = f" on {given.device}: give DeviceTokens" if is_elsewhere else ""
        raise InvalidArgumentError(f"{requirement}, got {type(given).__name__}{where}")
    try:
        array = given.detach().numpy() if is_tensor else np.asarray(given)
    except Exception as error:
        if is_unreadable(error):
            raise InvalidArgumentError(f"{requirement}, got {given!r}") from error
        raise
    if not array.size and isinstance(given, (list, tuple)):
        array = array.astype(np.int64)  # numpy reads an empty list as floats
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{requirement}, got {array.dtype}")
    return array


def _as_list(tokens: Any) -> list[Any]:
    try:
        given = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    except Exception as error:
        if is_unreadable(error):  # a sparse or meta tensor
            raise InvalidArgumentError(f"tokens must be ints, got {tokens!r}") from error
        raise
    return [*given] if isinstance(given, (list, tuple)) else [given]


def check_accepted(
    work: DecodeWork,
    tokens: Int64Array,
    counts: Int64Array,
    ids: Sequence[Hashable],
    *,
    may_stay: bool,
) -> None:
    """Check that each request's new tokens are accepted drafts and one token after them.

    ``may_stay`` is whether decoding requests may take no token: with drafts the state from before
    the step is kept.
    """
    num_decodes, is_wider = len(work.group.ids), tokens.shape[1] > work.width
    # Not needed if each request may take any number of tokens up to the tokens' width.
    if not may_stay or work.lengths is not None or num_decodes < len(ids) or is_wider:
        maxima = np.ones(len(ids), dtype=np.int64)
        maxima[:num_decodes] = work.width if work.lengths is None else work.lengths
        minima = maxima.copy()
        minima[:num_decodes] = not may_stay
        for index in ((counts > maxima) | (counts < minima)).nonzero()[0][:1].tolist():
            name, longest = f"the number of new tokens of {ids[index]!r}", maxima.item(index)
            check_int(name, counts.item(index), minimum=minima.item(index), maximum=longest)
    width = tokens.shape[1] - 1
    if work.drafts is None or not width:  # drafts on the device cannot be compared here
        return
    is_wrong = tokens[:num_decodes, :-1] != work.drafts[:, :width]
    if not np.count_nonzero(is_wrong):
        return
    is_wrong &= np.arange(width) < counts[:num_decodes, None] - 1
    for index in is_wrong.any(axis=1).nonzero()[0][:1].tolist():
        its_drafts = work.drafts[index].tolist()
        raise InvalidArgumentError(
            f"the new tokens of {ids[index]!r} must be accepted drafts and one token "
            f"after them; its drafts are {[draft for draft in its_drafts if draft >= 0]}, got "
            f"{tokens[index, : counts.item(index)].tolist()}"
        )


def check_on_device(
    name: str,
    tensor: object,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check a tensor that kernels read without waiting for the device."""
    requirement = (
        f"{name} must be a contiguous tensor of {list(shape)} {' or '.join(map(str, dtypes))} on "
        f"{device}"
    )
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"{requirement}, got {type(tensor).__name__}")
    fits = tuple(tensor.shape) == shape and tensor.dtype in dtypes and tensor.is_contiguous()
    if not fits or tensor.device.type != device.type:
        raise InvalidArgumentError(
            f"{requirement}, got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )
