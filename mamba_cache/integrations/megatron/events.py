"""KV events of Megatron Core's contexts, whose own KV blocks announce nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.events import Listeners, Removed, Stored
from mamba_cache.slots import MambaSlotAllocator

__all__ = ["MegatronBooks"]


class MegatronBooks:
    """A context of Megatron Core with this package's slots, as an ``EventPublisher`` watches it.

    Methods of this one context, of its class's others not, are replaced by ones that tell what they
    did: ``add_request``, which registers a prompt's blocks, and of its KV allocator the
    registration and ``reset``. Megatron registers a block when its request is added, so routers
    hear of it a step before it is written.

    Example::

        megatron.install()
        context = DynamicInferenceContext(...)
        publisher.watch(MegatronBooks(context))

    Args:
        context: The context, before its first request.

    Attributes:
        slot_allocator: Its slots.
        kv_block_allocator: This object, which stands for its KV blocks.
        listeners: Those of its slots.
        block_size_tokens: Tokens of a KV block.
        block_hashes: [total_count] int64 tensor, CPU: Megatron's hash of each block, -1 for none.

    Raises:
        InvalidArgumentError: The context has other slots than this package's, or none.
    """

    def __init__(self, context: Any) -> None:
        slots = getattr(context, "mamba_slot_allocator", None)
        if not isinstance(slots, MambaSlotAllocator):
            raise InvalidArgumentError(
                f"the context's slots must be this package's, got {type(slots).__name__}: call "
                "mamba_cache.integrations.megatron.install() before it is made"
            )
        self.slot_allocator: MambaSlotAllocator = slots
        self.kv_block_allocator = self
        self.block_size_tokens = int(context.block_size_tokens)
        blocks = context.kv_block_allocator
        self.block_hashes: torch.Tensor = blocks.block_hashes
        self.listeners: Listeners = slots.listeners
        self._registered: set[int] = set()
        self._request: Any = None
        context.add_request = self._adding(context.add_request)
        blocks.register_kv_block_hashes = self._registering(blocks.register_kv_block_hashes)
        blocks.reset = self._resetting(blocks.reset)
        blocks.on_blocks_deregistered = self._deregistering(blocks.on_blocks_deregistered)

    def _tell(self, event: Stored | Removed) -> None:
        self.listeners.put(event)
        self.listeners.tell()

    def _adding(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(theirs)
        def add_request(req: Any, *args: Any, **kwargs: Any) -> Any:
            self._request = req
            try:
                return theirs(req, *args, **kwargs)
            finally:
                self._request = None

        return add_request

    def _registering(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(theirs)
        def register_kv_block_hashes(
            block_ids: list[int], block_hashes: list[int], *args: Any, **kwargs: Any
        ) -> Any:
            result = theirs(block_ids, block_hashes, *args, **kwargs)
            if block_ids and self._request is not None:
                self._tell_stored(list(block_ids), list(block_hashes))
            return result

        return register_kv_block_hashes

    def _tell_stored(self, block_ids: list[int], hashes: list[int]) -> None:
        """Tell of consecutive blocks of the request that is being added."""
        of_prompt, size = self._request.precomputed_block_hashes, self.block_size_tokens
        first = of_prompt.index(hashes[0])
        tokens = self._request.prompt_tokens[first * size : (first + len(hashes)) * size]
        self._registered.update(hashes)
        self._tell(
            Stored(
                "block",
                block_ids=tuple(block_ids),
                hash_ids=tuple(hashes),
                digests=(None,) * len(hashes),
                parent_hash=of_prompt[first - 1] if first else None,
                parent_digest=None,
                tokens=tokens.cpu().numpy().astype(np.int32),
                block_size_tokens=size,
            )
        )

    def _deregistering(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(theirs)
        def on_blocks_deregistered(block_ids: list[int], hashes: set[int]) -> None:
            theirs(block_ids, hashes)
            gone = tuple(hash_id for hash_id in hashes if hash_id in self._registered)
            self._registered.difference_update(gone)
            if gone:
                # Megatron says which hashes are gone, and not of which of the blocks each was.
                self._tell(_removed(gone))

        return on_blocks_deregistered

    def _resetting(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(theirs)
        def reset(*args: Any, **kwargs: Any) -> Any:
            result = theirs(*args, **kwargs)
            gone = tuple(self._registered)
            self._registered.clear()
            self._tell(_removed(gone, is_reset=True))
            return result

        return reset


def _removed(hashes: tuple[int, ...], *, is_reset: bool = False) -> Removed:
    nothing = (None,) * len(hashes)
    return Removed("block", (-1,) * len(hashes), hashes, digests=nothing, is_reset=is_reset)
