"""Drafts on their way into a step, and what the device does when it begins and ends."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Protocol

import torch

from mamba_cache._checks import check_int, is_unreadable
from mamba_cache._lasting import lasting
from mamba_cache.config import CacheConfig
from mamba_cache.context.decode_rows import DecodeRows
from mamba_cache.context.device_tokens import DeviceTokens, SentTokens, TokenExchange
from mamba_cache.context.kernels import decode_torch
from mamba_cache.context.preparation import RequestPreparer
from mamba_cache.context.requests import ActiveRequest, Chunk
from mamba_cache.context.step import ScheduledRequest
from mamba_cache.errors import InvalidArgumentError, MissingExtraError
from mamba_cache.metadata import StepMetadata

__all__ = [
    "Drafts",
    "Speculation",
    "as_token_lists",
    "check_accepted",
    "check_drafts",
    "decode_chunks",
]

Drafts = Mapping[Hashable, Sequence[int]] | torch.Tensor
"""Tokens by request, known on the host; or [max_requests, num_speculative_tokens] integer tokens
by request row, known on the device alone, negative where there is none."""


class _Kernels(Protocol):
    """What ``kernels.decode`` and its twin have."""

    def describe_decodes(
        self, rows: DecodeRows, metadata: StepMetadata, drafts: torch.Tensor | None, block_size: int
    ) -> None:
        """Write what only the device knows into a step's metadata."""

    def advance_rows(
        self, rows: DecodeRows, metadata: StepMetadata, tokens: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Move each request of a step past the tokens that became part of it."""


class Speculation:
    """The device's side of steps with drafts.

    Args:
        config: Settings, with drafts.
        device: Where steps are computed.
    """

    @lasting
    def __init__(self, config: CacheConfig, device: torch.device) -> None:
        self._config = config
        self._rows = DecodeRows.make(config.max_requests, config.live_rows_per_request, device)
        self._exchange = TokenExchange(config.max_requests, config.max_decode_tokens, device)
        self._kernels = _kernels_for(device)

    def describe(self, metadata: StepMetadata, drafts: Drafts | None) -> None:
        """Complete a step's metadata on the device.

        Args:
            metadata: The step's.
            drafts: As checked before. Those of the host are in the metadata already.
        """
        if metadata.num_decodes:
            on_device = drafts if isinstance(drafts, torch.Tensor) else None
            self._kernels.describe_decodes(
                self._rows, metadata, on_device, self._config.block_size_tokens
            )

    def advance(self, metadata: StepMetadata, sampled: DeviceTokens) -> None:
        """Move the step's requests past the tokens that became part of them."""
        self._kernels.advance_rows(self._rows, metadata, sampled.tokens, sampled.counts)

    @property
    def cursors(self) -> torch.Tensor:
        """[max_requests] int32 on the device: which live state of each request is current."""
        return self._rows.cursors

    def scrub(self, decoding_rows: Sequence[int]) -> None:
        """Clear tokens on the host, and what is kept of rows whose requests do not decode.

        Args:
            decoding_rows: Rows of the requests that do.
        """
        self._exchange.zero_()
        for tensor in (self._rows.last_tokens, self._rows.num_computed, self._rows.cursors):
            kept = tensor[decoding_rows]
            tensor.zero_()
            tensor[decoding_rows] = kept

    def to_device(self, tokens: Sequence[Sequence[int]]) -> DeviceTokens:
        """Enqueue the copy of each request's new tokens to the device."""
        return self._exchange.to_device(tokens)

    def to_host(self, sampled: DeviceTokens) -> SentTokens:
        """Enqueue the copy of tokens to the host."""
        return self._exchange.to_host(sampled)

    def check_sampled(self, sampled: DeviceTokens, num_requests: int) -> None:
        """Check what can be checked of a step's tokens without waiting for the device.

        Raises:
            InvalidArgumentError: A tensor has another shape or dtype, or is elsewhere.
        """
        self._exchange.check(sampled, num_requests)


def check_drafts(
    drafts: object,
    decode_ids: Collection[Hashable],
    config: CacheConfig,
    preparer: RequestPreparer,
    device: torch.device,
) -> Drafts:
    """Return a step's drafts, checked.

    Args:
        drafts: What the caller gives; None: nobody has any.
        decode_ids: The requests that decode in the step.
        config: Settings.
        preparer: Checks tokens.
        device: Where steps are computed.

    Raises:
        InvalidArgumentError: They are neither a mapping of decoding requests to tokens nor a
            tensor of the right shape, or too many, or one is no token id.
    """
    if drafts is None:
        return {}
    most = config.num_speculative_tokens
    if isinstance(drafts, torch.Tensor):
        return _check_tensor(drafts, (config.max_requests, most), device)
    if not isinstance(drafts, Mapping):
        raise InvalidArgumentError(
            f"drafts must map request ids to tokens, or be a tensor, got {type(drafts).__name__}"
        )
    unexpected = drafts.keys() - set(decode_ids)
    if unexpected:
        raise InvalidArgumentError(
            f"drafts are for requests that decode in the step, got {sorted(map(repr, unexpected))}"
        )
    checked = {key: preparer.check_tokens(tokens).tolist() for key, tokens in drafts.items()}
    for request_id, tokens in checked.items():
        check_int(f"the number of drafts of {request_id!r}", len(tokens), minimum=0, maximum=most)
    return checked


def decode_chunks(
    decodes: Sequence[ActiveRequest], drafts: Drafts, max_sequence_length: int
) -> list[Chunk]:
    """Return what each decoding request computes: its last token and its drafts.

    Drafts that only the device knows are cut at the longest length.

    Args:
        decodes: Requests that have room for a token.
        drafts: Checked drafts.
        max_sequence_length: Tokens of one request.

    Raises:
        InvalidArgumentError: Drafts known on the host pass the longest length.
    """
    chunks = []
    for active in decodes:
        room = max_sequence_length - active.most_computed
        if isinstance(drafts, torch.Tensor):
            num_tokens = min(1 + drafts.shape[1], room)
            chunks.append(Chunk(active.num_computed, num_tokens, drafts=None))
            continue
        given = tuple(drafts.get(active.request_id, ()))
        if len(given) >= room:
            raise InvalidArgumentError(
                f"request {active.request_id!r} has room for {room - 1} drafts within "
                f"max_sequence_length ({max_sequence_length}), got {len(given)}"
            )
        chunks.append(Chunk(active.num_computed, 1 + len(given), drafts=given))
    return chunks


def as_token_lists(
    new_tokens: Mapping[Hashable, object], preparer: RequestPreparer
) -> dict[Hashable, list[int]]:
    """Return each request's new tokens as a list, checked: one int counts as a list of one.

    Raises:
        InvalidArgumentError: One is no token id.
    """
    lists = [_as_list(tokens) for tokens in new_tokens.values()]
    checked = iter(preparer.check_tokens([*chain.from_iterable(lists)]).tolist())
    return {
        request_id: list(islice(checked, len(tokens)))
        for request_id, tokens in zip(new_tokens, lists, strict=True)
    }


def _as_list(tokens: Any) -> list[Any]:
    try:
        given = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    except Exception as error:
        if is_unreadable(error):  # a tensor that is sparse, or without data
            raise InvalidArgumentError(f"tokens must be ints, got {tokens!r}") from error
        raise
    return [*given] if isinstance(given, (list, tuple)) else [given]


def check_accepted(scheduled: ScheduledRequest, chunk: Chunk, tokens: Sequence[int]) -> None:
    """Check that a request's new tokens can follow from what it computed.

    Args:
        scheduled: The request's part of the step.
        chunk: What it computed.
        tokens: Its new tokens.

    Raises:
        InvalidArgumentError: There are too many, or too few of a prefill, or one before the last
            is not the draft that was computed in its place.
    """
    least, most = (1, 1) if scheduled.is_prefill else (0, chunk.num_tokens)
    name = f"the number of new tokens of {scheduled.request_id!r}"
    check_int(name, len(tokens), minimum=least, maximum=most)
    drafts = chunk.drafts
    if drafts is not None and tuple(tokens[:-1]) != drafts[: max(0, len(tokens) - 1)]:
        raise InvalidArgumentError(
            f"the new tokens of {scheduled.request_id!r} must be accepted drafts and one token "
            f"after them; its drafts are {list(drafts)}, got {list(tokens)}"
        )


def _check_tensor(
    drafts: torch.Tensor, shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    is_int = drafts.dtype in (torch.int32, torch.int64)
    fits = tuple(drafts.shape) == shape and is_int and drafts.is_contiguous()
    if not fits or drafts.device.type != device.type or not shape[1]:
        raise InvalidArgumentError(
            f"drafts as a tensor must be contiguous, int32 or int64, {list(shape)} on {device}, "
            f"with num_speculative_tokens of at least 1; got {drafts.dtype} {list(drafts.shape)} "
            f"on {drafts.device}"
        )
    return drafts


def _kernels_for(device: torch.device) -> _Kernels:
    """Return what works on a device.

    Raises:
        MissingExtraError: It is a GPU, and Triton is not installed.
    """
    if device.type != "cuda":
        return decode_torch
    try:
        from mamba_cache.context.kernels import decode  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(
            "drafts on a GPU need triton, which is not installed: pip install triton (Linux only)"
        ) from error
    return decode
