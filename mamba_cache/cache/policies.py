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
    """Orders evictable slots; is called when a state is stored in a slot, or used by a hit.

    A subclass inherits hooks that do nothing.
    """

    __slots__ = ()

    def choose(
        self,
        num_slots: int,
        slots: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int32],
        kv_blocks: KVBlockView,
    ) -> list[int]:
        """Return the slots to evict, the first to go first. Changes nothing.

        Args:
            num_slots: How many are needed, 1 or more.
            slots: [evictable] int64, ascending: the slots that may be evicted.
            blocks: [evictable] int32. The block of each.
            kv_blocks: The KV blocks' owner, whose arrays are read as they are now.

        Returns:
            ``num_slots`` of ``slots``, or all if there are fewer.
        """
        ...

    def on_stored(self, slots: Sequence[int]) -> None:
        """Record that a state was put into each of the slots; there may be none."""
        return

    def on_consumed(self, slots: Sequence[int]) -> None:
        """Record that the states in the slots were used by a hit."""
        return

    def reset(self, max_slots: int) -> None:
        """Forget everything, before first use and whenever the pool of that size is emptied."""
        return


class PromptFacts(NamedTuple):
    """The facts of a request that a policy with knowledge of prompts gets.

    Attributes:
        hash_ids: The hash id of each complete block of its prompt.
        block_size_tokens: Tokens of a block.
        num_matched_blocks: Blocks found cached.
        num_usable_blocks: Blocks that could be skipped at most, were all of them cached.
        will_continue: Whether its sender says that a longer prompt will follow; None: nothing said.
        source: The source of the hint; equal sources are trusted alike.
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
        prompt: What ``on_request`` returned for the request.
        num_blocks: Blocks before the state's position.
        kind: Why it is proposed: at the "end" of a prompt or answer, where prompts "branch", or
            "inside" a prompt.
        is_asked: Whether the caller asked for it by its position, so that it is not refused.
        hash_ids: While a request decodes, the hash id of each block before the position but for
            the last one, which is not known yet; None: they are the prompt's.
    """

    prompt: Any
    num_blocks: int
    kind: Literal["end", "branch", "inside"] = "end"
    is_asked: bool = False
    hash_ids: Sequence[int] | None = None


class SlotPlan(NamedTuple):
    """What a policy that knows prompts decides on proposals.

    Attributes:
        accepted: For each proposal whether its state is worth a slot.
        victims: The slots to evict for those.
    """

    accepted: list[bool]
    victims: list[int]


@runtime_checkable
class PrefixSlotPolicy(SlotEvictionPolicy, Protocol):
    """An eviction policy that also knows the prompts, and may refuse states before they are saved.

    For policies that need it; of others the methods of ``SlotEvictionPolicy`` are called alone.
    """

    def on_request(self, facts: PromptFacts) -> Any:
        """Record a request that is about to run.

        Returns:
            What stands for its prompt in ``StateProposal``.
        """
        ...

    def admit(
        self, proposals: Sequence[StateProposal], num_free: int, slots: npt.NDArray[np.int64]
    ) -> SlotPlan:
        """Choose which of some states are saved, and which saved ones go for them.

        ``on_reserved`` or ``withdraw`` follows, before any other call but ``on_removed``.

        Args:
            proposals: One state or more.
            num_free: Free slots.
            slots: [evictable] int64, ascending: the slots that may be evicted.
        """
        ...

    def on_reserved(self, slots: Sequence[int | None]) -> None:
        """Record the slot of each accepted state, None for those that got none."""
        ...

    def withdraw(self) -> None:
        """Take back what the last ``admit`` decided: the call that asked for it broke off."""
        ...

    def on_published(
        self, slots: Sequence[int], hash_ids: Sequence[int], prefix_tokens: Sequence[int]
    ) -> None:
        """Record that states became findable, in place of ``on_stored``.

        Args:
            slots: The slots.
            hash_ids: The hash id of the block of each; one that is not positive stands for none.
            prefix_tokens: The tokens of the prefix that each state ends; 1 where it is unknown.
        """
        ...

    def on_removed(self, slots: Sequence[int]) -> None:
        """Record that slots hold or await no state any more, for whatever reason."""
        ...

    def least_loss(self, slots: npt.NDArray[np.int64]) -> int:
        """Return the place, in [n] cached slots, of the state whose loss frees KV most cheaply.

        That is the one of the lowest worth for each KV block that nothing but it needs.
        """
        ...

    def check_invariants(self, slots_taken: Sequence[int]) -> None:
        """Check the bookkeeping against itself, and against the slots that hold or await states.

        Raises:
            InvariantError: Something contradicts something else.
        """
        ...


class LruSlotPolicy(SlotEvictionPolicy):
    """The slot of the least recently used block goes first; of equal ones, the lower slot."""

    __slots__ = ()

    def choose(
        self, num_slots: int, slots: _Int64s, blocks: _Int32s, kv_blocks: KVBlockView
    ) -> list[int]:
        """Return the slots of the blocks that were used the longest ago."""
        times = as_host_array(kv_blocks.block_timestamps).take(blocks)
        if num_slots < len(times):  # sorting all of some thousand times costs more
            is_old = times <= np.partition(times, num_slots - 1)[num_slots - 1]
            slots, times = slots[is_old], times[is_old]
        chosen: list[int] = slots[times.argsort(kind="stable")[:num_slots]].tolist()
        return chosen


class RefZeroSlotPolicy(SlotEvictionPolicy):
    """Any slot may go first, because no request refers to its block; the lower ones do."""

    __slots__ = ()

    def choose(
        self, num_slots: int, slots: _Int64s, blocks: _Int32s, kv_blocks: KVBlockView
    ) -> list[int]:
        """Return the lowest slots."""
        chosen: list[int] = slots[:num_slots].tolist()
        return chosen


def policy_named(name: Any) -> SlotEvictionPolicy:
    """Make the policy for an embedder's setting."""
    value = getattr(name, "value", name)
    if value == EvictionPolicy.LRU:
        return LruSlotPolicy()
    if value == EvictionPolicy.REF_ZERO:
        return RefZeroSlotPolicy()
    allowed = [policy.value for policy in EvictionPolicy]
    raise InvalidArgumentError(f"the eviction policy must be one of {allowed}, got {name!r}")


def check_policy(policy: object) -> SlotEvictionPolicy:
    """Return what a caller gives as a policy, if it is one."""
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
