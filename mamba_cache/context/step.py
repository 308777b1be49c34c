"""Steps: what an embedder sees of them, what requests compute, and the tokens that they take."""

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
"""Tokens by request id; or [num_decodes, k] in the order of the batch, negative where there is
none, both known on the host; or a tensor [max_requests, num_speculative_tokens] by request row,
known on the device alone, negative likewise."""

NewTokens: TypeAlias = "Mapping[Hashable, Any] | torch.Tensor | Int64Array | Sequence[Any]"
"""Sampled tokens known on the host: by request id, or in the order of ``Step.sampling_ids``."""


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
        return (*ids, *[active.request_id for active, chunk in pairs if chunk.samples])


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


def plan_decodes(
    table: RequestTable,
    group: DecodingGroup,
    drafts: Drafts | None,
    *,
    is_in_doubt: bool,
    config: CacheConfig,
    preparer: RequestPreparer,
    device: torch.device,
) -> DecodeWork:
    """Return what a step computes of decoding requests, which have room for it.

    It is each one's last token and its drafts. Drafts that only the device knows are cut at the
    longest length. ``is_in_doubt`` says that the last step is uncollected.
    """
    width, room = config.num_speculative_tokens, config.max_sequence_length
    starts = most = table.num_computed[group.rows]
    if is_in_doubt:
        most = starts + table.num_in_doubt[group.rows]
    count = len(group.ids)
    longest = most.item(most.argmax()) if count else 0  # a quarter of the time of ``max``
    if longest >= room:
        _refuse_length(table, group, most, room)
    given: Int64Array | None = None
    lengths: Int64Array | None = None
    each = 1  # tokens of each request, at most
    if isinstance(drafts, torch.Tensor):
        shape, each = (config.max_requests, width), 1 + width
        check_on_device("drafts", drafts, shape, (torch.int32, torch.int64), device)
        if count and longest + each > room:
            lengths = np.minimum(each, room - most)
    elif drafts is not None:
        if isinstance(drafts, Mapping):
            given = _by_request(drafts, group, width, preparer)
        else:
            given = _in_order(drafts, group, width, preparer)
        each += given.shape[1]
        if np.count_nonzero(is_given := given >= 0) < given.size:
            lengths = np.count_nonzero(is_given, axis=1) + 1
    if lengths is None:
        ends, longest, total = most + each, longest + each, count * each
    else:
        ends, total = most + lengths, int(lengths.sum())
        longest = int(np.maximum.reduce(ends))
    if count and longest > room:
        index = int((ends > room).argmax())
        may_have = room - most.item(index) - 1
        raise InvalidArgumentError(
            f"request {group.ids[index]!r} has room for {may_have} drafts within "
            f"max_sequence_length ({room}), got {ends.item(index) - most.item(index) - 1}"
        )
    return DecodeWork(group, starts, most, ends, longest, total, each, lengths, given)


def _refuse_length(
    table: RequestTable, group: DecodingGroup, most: Int64Array, room: int
) -> NoReturn:
    """Refuse a step in which a request has no room for the token that it computes."""
    index = int((most >= room).argmax())
    may_have, hint = "has", "finish it"
    if table.num_in_doubt[group.rows[index]]:
        may_have, hint = "may have", "collect the last step"
    raise SequenceLengthError(
        f"request {group.ids[index]!r} {may_have} {most.item(index) + 1} tokens; "
        f"max_sequence_length is {room}: {hint}"
    )


def _by_request(
    drafts: Mapping[Hashable, Any], group: DecodingGroup, width: int, preparer: RequestPreparer
) -> Int64Array:
    """Return [n, width] drafts, -1 where there is none, of a mapping from ids to tokens."""
    unexpected = drafts.keys() - set(group.ids)
    if unexpected:
        raise InvalidArgumentError(
            f"drafts are for requests that decode in the step, got {sorted(map(repr, unexpected))}"
        )
    given, lengths = _by_id(drafts, group.ids, preparer, padding=-1)
    most = given.shape[1]
    if most > width:
        name = f"the number of drafts of {group.ids[int(lengths.argmax())]!r}"
        check_int(name, most, minimum=0, maximum=width)
    return given


def _by_id(
    given: Mapping[Hashable, Any], ids: Sequence[Hashable], preparer: RequestPreparer, padding: int
) -> tuple[Int64Array, Int64Array]:
    """Return [n, k] tokens of ids, none where there are none, and how many each has."""
    lists = [_as_list(given.get(name, ())) for name in ids]
    tokens = preparer.read_tokens([*chain.from_iterable(lists)])
    lengths = np.array([len(each) for each in lists], dtype=np.int64)
    padded = np.full((len(ids), int(lengths.max(initial=0))), padding, dtype=np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = tokens
    return padded, lengths


def _in_order(
    drafts: Any, group: DecodingGroup, width: int, preparer: RequestPreparer
) -> Int64Array:
    """Return [n, k] drafts of the caller's array, -1 where there is none."""
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
        return array.astype(np.int64)  # a copy: the caller may write to its own
    is_given = array >= 0
    if (is_given[:, 1:] & ~is_given[:, :-1]).any():
        raise InvalidArgumentError("a request's drafts must come before its negative entries")
    preparer.read_tokens(array[is_given])
    return np.where(is_given, array, -1).astype(np.int64)


Sampled: TypeAlias = tuple[Int64Array, "Int64Array | None"]
"""Checked tokens [n, k] in the order of ``Step.sampling_ids``, and how many of them each request
takes, [n]; None: one."""


def read_sampled(
    new_tokens: object,
    counts: object,
    ids: Sequence[Hashable],
    preparer: RequestPreparer,
) -> Sampled:
    """Return the sampled tokens that a caller gives as arrays, checked but for the drafts."""
    if not isinstance(new_tokens, Mapping):
        return _read_array(new_tokens, counts, len(ids), preparer)
    if counts is not None:
        raise InvalidArgumentError("counts belong to tokens in an array, not to a mapping")
    if tuple(new_tokens) == ids:  # the usual order, which is read in half of the time
        values = tuple(new_tokens.values())
    elif new_tokens.keys() == (id_set := set(ids)):
        values = tuple([new_tokens[request_id] for request_id in ids])
    else:
        missing, unexpected = id_set - new_tokens.keys(), new_tokens.keys() - id_set
        raise InvalidArgumentError(
            f"new_tokens must name just the requests that sample, Step.sampling_ids: "
            f"missing {sorted(map(repr, missing))}, unexpected {sorted(map(repr, unexpected))}"
        )
    try:  # a look at each value's type would take as long as this
        return preparer.read_tokens(values).astype(np.int64)[:, None], None
    except InvalidArgumentError:
        pass  # a request has several tokens, or one is none
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
    most = int(np.maximum.reduce(taken.view(np.uint64), initial=1))  # a negative one is the largest
    if most > width:
        raise InvalidArgumentError(f"counts must be ints in [0, {width}], got {taken.tolist()}")
    if not preparer.are_tokens(tokens[:, :most]):
        preparer.read_tokens(tokens[np.arange(width) < taken[:, None]])
    return tokens[:, :most].astype(np.int64, copy=False), taken


def _as_array(name: str, given: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return ints on the host as an array; what is on a device is not waited for."""
    wanted = (
        f"{name} must be ints in the order of the batch, in a numpy array, a tensor on the CPU or "
        "a list; tokens may also be in a mapping of request ids"
    )
    is_tensor = isinstance(given, torch.Tensor) and given.device.type == "cpu"
    if not is_tensor and not isinstance(given, (np.ndarray, list, tuple)):
        is_elsewhere = isinstance(given, torch.Tensor)
        where = f" on {given.device}: give DeviceTokens" if is_elsewhere else ""
        raise InvalidArgumentError(f"{wanted}, got {type(given).__name__}{where}")
    try:
        array = given.detach().numpy() if is_tensor else np.asarray(given)
    except Exception as error:
        if is_unreadable(error):
            raise InvalidArgumentError(f"{wanted}, got {given!r}") from error
        raise
    if not array.size and isinstance(given, (list, tuple)):
        array = array.astype(np.int64)  # of nothing numpy makes floats
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{wanted}, got {array.dtype}")
    return array


def _as_list(tokens: Any) -> list[Any]:
    try:
        given = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    except Exception as error:
        if is_unreadable(error):  # a tensor that is sparse, or without data
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
    """Check that each request's new tokens can follow from what it computed.

    ``may_stay`` says whether decoding requests may take none: with drafts they keep the state from
    before the step.
    """
    num_decodes, is_wider = len(work.group.ids), tokens.shape[1] > work.width
    # If lengths are equal, one comparison does: no request takes more tokens than were computed.
    if not may_stay or work.lengths is not None or num_decodes < len(ids) or is_wider:
        most = np.ones(len(ids), dtype=np.int64)
        most[:num_decodes] = work.width if work.lengths is None else work.lengths
        least = most.copy()
        least[:num_decodes] = not may_stay
        for index in ((counts > most) | (counts < least)).nonzero()[0][:1].tolist():
            name, longest = f"the number of new tokens of {ids[index]!r}", most.item(index)
            check_int(name, counts.item(index), minimum=least.item(index), maximum=longest)
    width = tokens.shape[1] - 1
    if work.drafts is None or not width:  # where there are some, the device alone knows them
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
    wanted = (
        f"{name} must be a contiguous tensor of {list(shape)} {' or '.join(map(str, dtypes))} on "
        f"{device}"
    )
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"{wanted}, got {type(tensor).__name__}")
    fits = tuple(tensor.shape) == shape and tensor.dtype in dtypes and tensor.is_contiguous()
    if not fits or tensor.device.type != device.type:
        raise InvalidArgumentError(
            f"{wanted}, got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )
