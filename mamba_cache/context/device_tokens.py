"""Sampled tokens on their way between the device and the bookkeeping on the host."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mamba_cache.context.request_rows import Int64Array
from mamba_cache.errors import InvalidArgumentError

__all__ = ["DeviceTokens", "SentTokens", "TokenExchange"]

_PINNED_BUFFERS = 4


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


class TokenExchange:
    """Brings tokens to the device and back through pinned memory, without waiting.

    Args:
        max_requests: Requests of a step at most.
        max_decode_tokens: Tokens of a decoding request at most.
        device: Where steps are computed.
    """

    def __init__(self, max_requests: int, max_decode_tokens: int, device: torch.device) -> None:
        self._width = max_decode_tokens
        self._device = device
        self._buffers = itertools.cycle(
            [_Buffer(max_requests, max_decode_tokens, device) for _ in range(_PINNED_BUFFERS)]
        )

    def zero_(self) -> None:
        """Clear all tokens on the host; none may be on its way."""
        for _ in range(_PINNED_BUFFERS):
            buffer = next(self._buffers)
            buffer.wait()
            buffer.tokens.zero_()
            buffer.counts.zero_()

    def to_device(self, tokens: Int64Array, counts: Int64Array) -> DeviceTokens:
        """Enqueue the copy of each request's new tokens to the device.

        Args:
            tokens: [num_requests, k] tokens, k at most ``max_decode_tokens``, in batch order.
            counts: [num_requests] how many of them each takes.
        """
        buffer = next(self._buffers)
        buffer.wait()
        count, width = len(tokens), min(self._width, tokens.shape[1])
        buffer.tokens.numpy()[:count, :width] = tokens[:, :width]
        buffer.counts.numpy()[:count] = counts
        sent = DeviceTokens(
            buffer.tokens[:count].to(self._device, non_blocking=True),
            buffer.counts[:count].to(self._device, non_blocking=True),
        )
        buffer.mark()
        return sent

    def to_host(self, given: DeviceTokens) -> SentTokens:
        """Enqueue the copy of tokens to the host."""
        buffer = next(self._buffers)
        buffer.wait()
        count = len(given.tokens)
        buffer.tokens[:count].copy_(given.tokens, non_blocking=True)
        buffer.counts[:count].copy_(given.counts, non_blocking=True)
        buffer.mark()
        return SentTokens(buffer, count)

    def check(self, given: DeviceTokens, num_requests: int) -> None:
        """Check what can be checked of a step's tokens without waiting for the device.

        Raises:
            InvalidArgumentError: A tensor has another shape or dtype, or is elsewhere.
        """
        self._check("tokens", given.tokens, (num_requests, self._width), torch.int64)
        self._check("counts", given.counts, (num_requests,), torch.int32)

    def _check(self, name: str, tensor: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        wanted = f"{name} must be a contiguous tensor of {list(shape)} {dtype} on {self._device}"
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"{wanted}, got {type(tensor).__name__}")
        fits = tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.is_contiguous()
        if not fits or tensor.device.type != self._device.type:
            raise InvalidArgumentError(
                f"{wanted}, got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )


class SentTokens:
    """Tokens on their way to the host.

    Args:
        buffer: Where they arrive.
        count: Requests.
    """

    def __init__(self, buffer: _Buffer, count: int) -> None:
        self._buffer = buffer
        self._count = count

    def wait(self) -> tuple[Int64Array, np.ndarray[Any, np.dtype[np.int32]]]:
        """Wait until they are there; return each request's tokens, unused ones too, and counts."""
        self._buffer.wait()
        tokens, counts = self._buffer.tokens[: self._count], self._buffer.counts[: self._count]
        return tokens.numpy(), counts.numpy()


class _Buffer:
    """Memory on the host, pinned where the device is a GPU, and the event of its last copy."""

    def __init__(self, max_requests: int, max_decode_tokens: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        shape = max_requests, max_decode_tokens
        self.tokens = torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self.counts = torch.zeros(max_requests, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._event: Any = torch.Event(device) if on_gpu else None

    def wait(self) -> None:
        """Wait until the last copy is done."""
        if self._event is not None:  # pragma: no cover - tests/gpu run it
            self._event.synchronize()

    def mark(self) -> None:
        """Remember the copy that has just been enqueued."""
        if self._event is not None:  # pragma: no cover - tests/gpu run it
            self._event.record()
