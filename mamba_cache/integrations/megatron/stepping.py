"""Methods of Megatron's inference context, amended: no hit is wrong, and restores are one launch.

Each function makes a method for ``DynamicInferenceContext`` from the one that it has. A context
whose slots are not of this package, or that has none, keeps Megatron's own way.
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
    """Has a request skip no more tokens than a saved state stands for.

    Megatron Core never prefills a single token, and takes one block less of a prompt
    that would leave one, whether that block has a state or not; where it has none, it prefills
    the rest on a state of zeros. And where a prompt goes on with another chunk, it skips what keys
    and values are cached of it, though no state is restored then and the live one stands before it.
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
    """Has all live states of a step's new requests restored or cleared in one launch.

    Megatron restores them one after the other, and clears the live state of a request whose saved
    state is gone although its tokens are skipped.

    Raises:
        MissingStateError: By the method: a request skips tokens, and the state at their end is
            gone. Nothing was restored.
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
    """Forgets the restores and checkpoints of requests that are gone after a reset.

    A reset that keeps the cache does not reset the slots, and where states were to be saved of
    such requests would take room in the scratch from others.
    """

    @functools.wraps(theirs)
    def method(self: Any) -> None:
        theirs(self)
        if isinstance(self.mamba_slot_allocator, MambaSlotAllocator):
            self._pending_mamba_restores.clear()
            self._pending_mamba_zeros.clear()
            self.mamba_slot_allocator._clear_rows(0, self.max_requests)

    return method
