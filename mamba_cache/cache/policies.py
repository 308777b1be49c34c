"""Eviction policies: which cached slots are evicted when others are needed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from mamba_cache.config import EvictionPolicy
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.protocols import KVBlockView

__all__ = [
    "LruSlotPolicy",
    "PrefixSlotPolicy",
    "PromptFacts",
    "RefZeroSlotPolicy",
    "SlotEvictionPolicy",
    "SlotPlan",
    "StateProposal",
    "as_host_array",
    "check_policy",
    "policy_named",
]

_Int64s: TypeAlias = "npt.NDArray[np.int64]"
_Int32s: TypeAlias = "npt.NDArray[np.int32]"


@runtime_checkable
class SlotEvictionPolicy(Protocol):
    """Chooses slots to evict. Hooks report stored and used states; by default they do nothing."""

    __slots__ = ()

    def choose(
        self,
        num_slots: int,
        slots: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int32],
        kv_blocks: KVBlockView,
    ) -> list[int]:
        """Return slots to evict, in order of eviction; change nothing.

        Args:
            num_slots: Number of slots needed, >= 1.
            slots: [evictable] int64, ascending: the slots that may be evicted.
            blocks: [evictable] int32. The block of each slot.
            kv_blocks: The owner of the KV blocks, with its current arrays.

        Returns:
            ``num_slots`` of ``slots``, or all if there are fewer.
        """
        ...

    def on_stored(self, slots: Sequence[int]) -> None:
        """Record that a state was stored in each of the slots; the list may be empty."""
        return

    def on_consumed(self, slots: Sequence[int]) -> None:
        """Record that the states in the slots were used by a hit."""
        return

    def reset(self, max_slots: int) -> None:
        """Forget all records. Called before first use, and when the pool is emptied."""
        return


class PromptFacts(NamedTuple):
    """A request as a policy that uses prompts gets it.

    Attributes:
        hash_ids: Hash id of each complete block of the prompt.
        block_size_tokens: Number of tokens of a block.
        num_matched_blocks: Number of blocks found cached.
        num_usable_blocks: Number of blocks that could be skipped if all were cached.
        will_continue: The sender's hint whether a longer prompt will follow; None: no hint.
        source: Source of the hint; hints of one source are trusted equally.
    """

    hash_ids: Sequence[int]
    block_size_tokens: int
    num_matched_blocks: int
    num_usable_blocks: int
    will_continue: bool | None = None
    source: Hashable = None


class StateProposal(NamedTuple):
    """A state that could be saved.

    Attributes:
        prompt: The result of ``on_request`` for the request.
        num_blocks: Number of blocks before the state's position.
        kind: Where the position lies: at the "end" of a prompt or answer, where prompts "branch",
            or "inside" a prompt.
        is_asked: Whether the state must not be refused, as the caller requested its position.
        hash_ids: For a decoding request, the hash ids of the blocks before the position, without
            the last one, which is not known yet; None: use the prompt's.
    """

    prompt: Any
    num_blocks: int
    kind: Literal["end", "branch", "inside"] = "end"
    is_asked: bool = False
    hash_ids: Sequence[int] | None = None


class SlotPlan(NamedTuple):
    """The decision of a policy that uses prompts on a list of proposals.

    Attributes:
        accepted: For each proposal, whether its state is worth a slot.
        victims: The slots to evict for the accepted states.
    """

    accepted: list[bool]
    victims: list[int]


@runtime_checkable
class PrefixSlotPolicy(SlotEvictionPolicy, Protocol):
    """An eviction policy that uses prompts, and may refuse states before they are saved.

    A policy that does not need prompts implements only ``SlotEvictionPolicy``.
    """

    def on_request(self, facts: PromptFacts) -> Any:
        """Record a request that is about to run.

        Returns:
            A handle of the prompt, for ``StateProposal.prompt``.
        """
        ...

    def admit(
        self, proposals: Sequence[StateProposal], num_free: int, slots: npt.NDArray[np.int64]
    ) -> SlotPlan:
        """Decide which proposed states are saved, and which saved states are evicted for them.

        The next call is ``on_reserved`` or ``withdraw``; only ``on_removed`` may come between.

        Args:
            proposals: Proposed states, one or more.
            num_free: Number of free slots.
            slots: [evictable] int64, ascending: the slots that may be evicted.
        """
        ...

    def on_reserved(self, slots: Sequence[int | None]) -> None:
        """Record the slot of each accepted state; None: no slot was left."""
        ...

    def withdraw(self) -> None:
        """Undo the last ``admit``: the caller failed before it reserved the slots."""
        ...

    def on_published(
        self, slots: Sequence[int], hash_ids: Sequence[int], prefix_tokens: Sequence[int]
    ) -> None:
        """Record published states; called instead of ``on_stored``.

        Args:
            slots: The slots.
            hash_ids: Hash id of the block of each slot; an id <= 0 means none.
            prefix_tokens: Number of tokens of each state's prefix; 1 if unknown.
        """
        ...

    def on_removed(self, slots: Sequence[int]) -> None:
        """Record that slots no longer hold a state and are no longer reserved."""
        ...

    def least_loss(self, slots: npt.NDArray[np.int64]) -> int:
        """Return the index, in [n] cached slots, of the state to lose first for its KV blocks.

        That is the state of lowest worth per KV block that no other state needs.
        """
        ...

    def check_invariants(self, slots_taken: Sequence[int]) -> None:
        """Check that all bookkeeping agrees, also with the cached and reserved slots given.

        Raises:
            InvariantError: Two records contradict each other.
        """
        ...


class LruSlotPolicy(SlotEvictionPolicy):
    """Evicts the slot of the least recently used block; of equal ones, the lowest slot."""

    __slots__ = ()

    def choose(
        self, num_slots: int, slots: _Int64s, blocks: _Int32s, kv_blocks: KVBlockView
    ) -> list[int]:
        """Return the slots of the least recently used blocks."""
        times = as_host_array(kv_blocks.block_timestamps).take(blocks)
        if num_slots < len(times):  # sorting thousands of timestamps would take longer
            is_old = times <= np.partition(times, num_slots - 1)[num_slots - 1]
            slots, times = slots[is_old], times[is_old]
        chosen: list[int] = slots[times.argsort(kind="stable")[:num_slots]].tolist()
        return chosen


class RefZeroSlotPolicy(SlotEvictionPolicy):
    """Evicts the lowest slots. All are equal: no request refers to their blocks."""

    __slots__ = ()

    def choose(
        self, num_slots: int, slots: _Int64s, blocks: _Int32s, kv_blocks: KVBlockView
    ) -> list[int]:
        """Return the lowest slots."""
        chosen: list[int] = slots[:num_slots].tolist()
        return chosen


def policy_named(name: Any) -> SlotEvictionPolicy:
    """Create the policy that an embedder's setting names."""
    value = getattr(name, "value", name)
    if value == EvictionPolicy.LRU:
        return LruSlotPolicy()
    if value == EvictionPolicy.REF_ZERO:
        return RefZeroSlotPolicy()
    allowed = [policy.value for policy in EvictionPolicy]
    raise InvalidArgumentError(f"the eviction policy must be one of {allowed}, got {name!r}")


def check_policy(policy: object) -> SlotEvictionPolicy:
    """Return ``policy`` if it is a slot policy."""
    if isinstance(policy, SlotEvictionPolicy) and not isinstance(policy, type):
        return policy
    raise InvalidArgumentError(
        f"a slot policy must be an object with the methods of SlotEvictionPolicy, got {policy!r}"
    )


def as_host_array(values: Any) -> npt.NDArray[Any]:
    """Return an embedder's array or tensor as numpy, sharing its memory if it is on the host."""
    on_host = values.cpu() if getattr(values, "is_cuda", False) else values
    if isinstance(on_host, np.ndarray) or not hasattr(on_host, "numpy"):
        return np.asarray(on_host)
    array: npt.NDArray[Any] = on_host.numpy()  # several times faster than asarray for a tensor
    return array
