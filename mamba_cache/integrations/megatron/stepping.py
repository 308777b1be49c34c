"""Wrapped methods of Megatron's inference context: no hit is wrong, and restores are one launch.

Each function wraps a method of Megatron's ``DynamicInferenceContext``. A context without slots of
this package keeps the behaviour of Megatron's method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mamba_cache.errors import MissingStateError
from mamba_cache.slots import MambaSlotAllocator
from mamba_cache.states import ZERO_SOURCE

__all__ = [
    "compute_prefix_match",
    "execute_pending_mamba_ops",
    "reset_mamba_state",
]


def compute_prefix_match(theirs: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Return a method that skips only tokens up to a saved state.

    Megatron Core never prefills a single token. If a match would leave a single token, Megatron
    drops the last matched block, even if the block before it has no state; the rest is then
    prefilled on a zero state. For later chunks of a prompt Megatron also skips tokens with cached
    keys and values, although no state is restored and the live state lies before these tokens.
    """

    @functools.wraps(theirs)
    def method(self: Any, req: Any, prefill_chunk_length: int, *args: Any, **kwargs: Any) -> Any:
        match = theirs(self, req, prefill_chunk_length, *args, **kwargs)
        slots = getattr(self, "mamba_slot_allocator", None)
        blocks, from_pool, allocated, required, skip_tokens, _ = match
        if not isinstance(slots, MambaSlotAllocator):
            return match
        is_first = not req.finished_chunk_token_count
        num_skipped = skip_tokens // self.block_size_tokens if is_first else 0
        while num_skipped and not slots.has_state(blocks[num_skipped - 1]):
            num_skipped -= 1
        skip_tokens = num_skipped * self.block_size_tokens
        computed = prefill_chunk_length - skip_tokens
        return blocks, from_pool, allocated, required, skip_tokens, computed

    return method


def execute_pending_mamba_ops(theirs: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a method that restores or zeroes the live states of new requests in one launch.

    Megatron restores the states one by one. If a saved state was evicted, Megatron zeroes the live
    state although the request's tokens are skipped.

    Raises:
        MissingStateError: By the method: a request skips tokens, and the state at their end was
            freed. Nothing was restored.
    """

    @functools.wraps(theirs)
    def method(self: Any) -> None:
        slots = self.mamba_slot_allocator
        if not isinstance(slots, MambaSlotAllocator):
            theirs(self)
            return
        if not self._pending_mamba_restores and not self._pending_mamba_zeros:
            return
        sources = dict.fromkeys(self._pending_mamba_zeros, ZERO_SOURCE)
        for request, block_id, row in self._pending_mamba_restores:
            sources[row] = slots.get_slot(block_id)
            if sources[row] < 0:
                raise MissingStateError(
                    f"request row {request} skips the tokens up to the end of block {block_id}, "
                    "whose state was freed before it was restored"
                )
        slots.restore_slots(list(sources.values()), list(sources))
        slots.policy.on_consumed([slot for slot in sources.values() if slot != ZERO_SOURCE])
        self._pending_mamba_restores.clear()
        self._pending_mamba_zeros.clear()

    return method


def reset_mamba_state(theirs: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a method that also drops the restores and checkpoints of requests ended by a reset.

    A reset that keeps the cache does not reset the slots, so the checkpoints of ended requests
    would take room in the scratch.
    """

    @functools.wraps(theirs)
    def method(self: Any) -> None:
        theirs(self)
        if isinstance(self.mamba_slot_allocator, MambaSlotAllocator):
            self._pending_mamba_restores.clear()
            self._pending_mamba_zeros.clear()
            self.mamba_slot_allocator._clear_rows(0, self.max_requests)

    return method
