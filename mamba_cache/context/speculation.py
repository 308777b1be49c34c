"""Speculation: drafts that a step verifies, and what the device does when it begins and ends."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from mamba_cache._checks import check_int, is_unreadable
from mamba_cache._torch import outside_inference_mode, to_device
from mamba_cache.config import CacheConfig
from mamba_cache.context.kernels import decode_numpy
from mamba_cache.context.request_table import DecodingGroup, Int64Array, RequestTable
from mamba_cache.context.requests import RequestPreparer
from mamba_cache.context.step import DecodeWork
from mamba_cache.errors import InvalidArgumentError, SequenceLengthError
from mamba_cache.metadata import StepMetadata
from mamba_cache.states import kernels_for

__all__ = [
    "DeviceTokens",
    "Drafts",
    "NewTokens",
    "Sampled",
    "SentTokens",
    "Speculation",
    "check_accepted",
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
class DeviceTokens:
    """What a step sampled, where it was sampled: nobody waits for it.

    Attributes:
        tokens: [num_requests, num_speculative_tokens + 1] int64 on the context's device, in batch
            order. A decoding request's accepted drafts, then the token sampled after them; a
            prefill that samples has its token in column 0.
        counts: [num_requests] int32, likewise. How many of them each decoding request takes, from
            0 to its tokens in the step; entries of prefills are not looked at.
    """

    tokens: torch.Tensor
    counts: torch.Tensor


class SentTokens:
    """Tokens on their way to the host."""

    def __init__(self, given: DeviceTokens) -> None:
        # Of what is not waited for PyTorch makes copies in pinned memory.
        self._tokens, self._counts = (
            tensor.to("cpu", non_blocking=True, copy=True)
            for tensor in (given.tokens, given.counts)
        )
        self._event: torch.Event | None = None
        if given.tokens.is_cuda:  # pragma: no cover - tests/gpu run it
            self._event = torch.Event(given.tokens.device)
            self._event.record()

    def wait(self) -> tuple[Int64Array, np.ndarray[Any, np.dtype[np.int32]]]:
        """Wait until they are there; return each request's tokens, unused ones too, and counts."""
        if self._event is not None:  # pragma: no cover - tests/gpu run it
            self._event.synchronize()
        return self._tokens.numpy(), self._counts.numpy()


class Speculation:
    """The device's side of steps with drafts."""

    @outside_inference_mode
    def __init__(self, config: CacheConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._rows = decode_numpy.DecodeRows.make(
            config.max_requests, config.live_rows_per_request, device
        )
        self._kernels = kernels_for(
            "auto", device, kernels="mamba_cache.context.kernels.decode", twins=decode_numpy
        )

    def describe(
        self, metadata: StepMetadata, drafts: torch.Tensor | None, *, is_exact: bool
    ) -> None:
        """Complete a step's metadata on the device."""
        if not metadata.num_decodes:
            return
        is_known = is_exact and self._device.type == "cpu"
        if is_known:
            decode_numpy.describe_live_rows(self._rows, metadata)
        else:
            self._kernels.describe_decodes(
                self._rows, metadata, drafts, self._config.block_size_tokens
            )

    def advance(self, metadata: StepMetadata, sampled: Sampled | DeviceTokens) -> None:
        """Move the step's requests past the tokens, in batch order, that became part of them."""
        is_on_device = isinstance(sampled, DeviceTokens)
        given: Any = sampled
        tokens, counts = (given.tokens, given.counts) if is_on_device else given
        if counts is None:
            counts = np.ones(len(tokens), dtype=np.int64)
        if self._device.type == "cpu":
            decode_numpy.advance_rows(self._rows, metadata, tokens, counts)
            return
        if not is_on_device:
            table = np.zeros((len(tokens), self._config.max_decode_tokens), dtype=np.int64)
            table[:, : tokens.shape[1]] = tokens
            tokens, counts = self._send(table), self._send(counts.astype(np.int32))
        self._kernels.advance_rows(self._rows, metadata, tokens, counts)

    def fork(
        self, row: int, rows: Sequence[int], last_tokens: Int64Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Have the device know requests that go on from where another stands."""
        kept = self._rows
        places = self._send(np.array(rows, dtype=np.int64))
        cursor = kept.cursors[row].clone()  # what is written may not be read in the same call
        kept.num_computed[places] = kept.num_computed[row].clone()
        kept.cursors[places] = cursor
        kept.last_tokens[places] = self._send(last_tokens)
        sources = (cursor + row * kept.ring).expand(len(rows)).contiguous()
        return sources, places * kept.ring + cursor

    def _send(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self._device)

    def check_sampled(self, sampled: DeviceTokens, num_requests: int) -> None:
        """Check what can be checked of a step's tokens without waiting for the device."""
        shape, device = (num_requests, self._config.max_decode_tokens), self._device
        _check_on_device("tokens", sampled.tokens, shape, (torch.int64,), device)
        _check_on_device("counts", sampled.counts, shape[:1], (torch.int32,), device)


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
    longest, count = int(np.maximum.reduce(most, initial=0)), len(group.ids)
    if longest >= room:
        _refuse_length(table, group, most, room)
    given: Int64Array | None = None
    lengths: Int64Array | None = None
    each = 1  # tokens of each request, at most
    if isinstance(drafts, torch.Tensor):
        shape, each = (config.max_requests, width), 1 + width
        _check_on_device("drafts", drafts, shape, (torch.int32, torch.int64), device)
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
    unexpected = drafts.keys() - group.id_set
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
        return array.astype(np.int64)  # not the caller's, who may write into that
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
    id_set: Set[Hashable],
    preparer: RequestPreparer,
) -> Sampled:
    """Return the sampled tokens that a caller gives as arrays, checked but for the drafts."""
    if not isinstance(new_tokens, Mapping):
        return _read_array(new_tokens, counts, len(ids), preparer)
    if counts is not None:
        raise InvalidArgumentError("counts belong to tokens in an array, not to a mapping")
    if tuple(new_tokens) == ids:  # the usual order, which is read in half of the time
        values = [*new_tokens.values()]
    elif new_tokens.keys() == id_set:
        values = [new_tokens[request_id] for request_id in ids]
    else:
        missing, unexpected = id_set - new_tokens.keys(), new_tokens.keys() - id_set
        raise InvalidArgumentError(
            f"new_tokens must name just the requests that sample, Step.sampling_ids: "
            f"missing {sorted(map(repr, missing))}, unexpected {sorted(map(repr, unexpected))}"
        )
    if set(map(type, values)) <= {int}:
        return preparer.read_tokens(values).astype(np.int64)[:, None], None
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


def check_accepted(work: DecodeWork, sampled: Sampled, ids: Sequence[Hashable]) -> None:
    """Check that each request's new tokens can follow from what it computed."""
    tokens, counts = sampled
    if counts is None:
        return
    num_decodes = len(work.group.ids)
    # Unless lengths differ it suffices that nobody takes more tokens than everybody computed.
    if work.lengths is not None or num_decodes < len(ids) or tokens.shape[1] > work.width:
        most = np.ones(len(ids), dtype=np.int64)
        most[:num_decodes] = work.width if work.lengths is None else work.lengths
        least = most.copy()
        least[:num_decodes] = 0
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


def _check_on_device(
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
