"""Speculation: the device side of steps with drafts, and sampled tokens on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mamba_cache._torch import outside_inference_mode, to_device
from mamba_cache.config import CacheConfig
from mamba_cache.context.kernels import decode_numpy
from mamba_cache.context.request_table import Int64Array
from mamba_cache.context.step import Sampled, check_on_device
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.metadata import StepMetadata
from mamba_cache.states import kernels_for

__all__ = ["DeviceTokens", "Speculation", "check_sampled", "send_to_host"]


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """The tokens that a step sampled, on the device; the host does not wait for them.

    Attributes:
        tokens: [num_requests, num_speculative_tokens + 1] int64 on the context's device, in batch
            order. A row has a decoding request's accepted drafts, then the token sampled after
            them; or the token of a prefill that samples in column 0. With
            ``num_speculative_tokens`` 0 do not overwrite them before the next ``begin_step``.
        counts: [num_requests] int32 on the context's device, in batch order: the number of tokens
            that each decoding request takes, from 0 to its tokens in the step; entries of prefills
            are ignored. None with ``num_speculative_tokens`` 0: each request takes one token.
    """

    tokens: torch.Tensor
    counts: torch.Tensor | None = None


def check_sampled(
    given: DeviceTokens, num_requests: int, config: CacheConfig, device: torch.device
) -> None:
    """Check shape, dtype and device of a step's tokens, without waiting for the device."""
    shape, drafts = (num_requests, config.max_decode_tokens), config.num_speculative_tokens
    check_on_device("tokens", given.tokens, shape, (torch.int64,), device)
    if drafts:
        check_on_device("counts", given.counts, shape[:1], (torch.int32,), device)
    elif given.counts is not None:
        raise InvalidArgumentError(
            "counts of tokens on the device must be None with num_speculative_tokens of 0, got "
            f"{type(given.counts).__name__}"
        )
    # The tokens of two steps must end at most one block; CacheConfig checks it for drafts.
    elif config.block_size_tokens < 2:
        raise InvalidArgumentError(
            "tokens on the device need block_size_tokens of at least 2, got 1"
        )


def send_to_host(
    given: DeviceTokens,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Event | None]:
    """Enqueue copies of tokens and counts to the host; return them, and the event of their end."""
    # PyTorch makes non-blocking copies in pinned memory.
    tokens = given.tokens.to("cpu", non_blocking=True, copy=True)
    counts = None
    if given.counts is not None:
        counts = given.counts.to("cpu", non_blocking=True, copy=True)
    arrived: torch.Event | None = None
    if given.tokens.is_cuda:  # pragma: no cover - tests/gpu run it
        arrived = torch.Event(given.tokens.device)
        arrived.record()
    return tokens, counts, arrived


class Speculation:
    """The device side of steps with drafts: positions, last tokens and live rows of requests."""

    @outside_inference_mode
    def __init__(
        self,
        config: CacheConfig,
        device: torch.device,
        step_arrays: Mapping[str, np.ndarray[Any, Any]],
    ) -> None:
        self._config = config
        self._device = device
        self._rows = decode_numpy.DecodeRows(
            config.max_requests, config.live_rows_per_request, device, step_arrays
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
        """Advance the step's requests by their new tokens, given in batch order."""
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
        """Copy a request's device rows to its forks; return rows of live states to copy."""
        kept = self._rows
        places = self._send(np.array(rows, dtype=np.int64))
        cursor = kept.cursors[row].clone()  # the same call must not read and write one tensor
        kept.num_computed[places] = kept.num_computed[row].clone()
        kept.cursors[places] = cursor
        kept.last_tokens[places] = self._send(last_tokens)
        sources = (cursor + row * kept.ring).expand(len(rows)).contiguous()
        return sources, places * kept.ring + cursor

    def _send(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self._device)
