"""Eviction policies: which cached slots are given up when others are needed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from mamba_cache.config import EvictionPolicy
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.protocols import KVBlockView

__all__ = [
    "ConsumedSlotPolicy",
    "LruSlotPolicy",
    "PrefixSlotPolicy",
    "PromptFacts",
    "RefZeroSlotPolicy",
    "ScoreSlotPolicy",
    "SlotEvictionPolicy",
    "SlotPlan",
    "StateProposal",
    "as_host_array",
    "check_policy",
    "policy_named",
]

_Int64s: TypeAlias = "npt.NDArray[np.int64]"
_Int32s: TypeAlias = "npt.NDArray[np.int32]"

_SCORE_BITS = 31
"""Of a score's fraction: it tells ages apart up to about this power of two."""


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
            num_slots: How many are wanted, 1 or more.
            slots: [evictable] int64, ascending: the slots that may be evicted.
            blocks: [evictable] int32. The block of each.
            kv_blocks: The KV blocks' owner, whose arrays are read as they are now.

        Returns:
            ``num_slots`` of ``slots``, or all if there are fewer.
        """
        ...

    def on_stored(self, slots: Sequence[int], saved_tokens: Sequence[int]) -> None:
        """Record that a state was put into each of the slots.

        Args:
            slots: The slots; there may be none.
            saved_tokens: For each, the tokens from the state before it in the same prefix, or from
                the prefix's start, to this one: what a hit on this one saves that a hit on that one
                would not. 1 where that is unknown.
        """
        return

    def on_consumed(self, slots: Sequence[int]) -> None:
        """Record that the states in the slots were used by a hit."""
        return

    def reset(self, max_slots: int) -> None:
        """Forget everything, before first use and whenever the pool of that size is emptied."""
        return


class PromptFacts(NamedTuple):
    """What a policy that knows prompts is told of each request.

    Attributes:
        hash_ids: The hash id of each complete block of its prompt.
        block_size_tokens: Tokens of a block.
        num_matched_blocks: Blocks found cached.
        num_usable_blocks: Blocks that could be skipped at most, were all of them cached.
        will_continue: Whether its sender says that a longer prompt will follow; None: nothing said.
        source: Who says so; equal ones are trusted alike.
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
        self, slots: Sequence[int], hash_ids: Sequence[int], saved_tokens: Sequence[int]
    ) -> None:
        """Record that states became findable, in place of ``on_stored``.

        Args:
            slots: The slots.
            hash_ids: The hash id of the block of each; one that is not positive stands for none.
            saved_tokens: As in ``on_stored``.
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


class _LowestFirst(SlotEvictionPolicy):
    """Gives up the slots of the lowest keys, whatever these are; of equal ones the lower slots."""

    __slots__ = ()

    @abstractmethod
    def _keys(self, slots: _Int64s, blocks: _Int32s, kv_blocks: KVBlockView) -> _Int64s:
        """Return the key of each slot."""

    def choose(
        self, num_slots: int, slots: _Int64s, blocks: _Int32s, kv_blocks: KVBlockView
    ) -> list[int]:
        """Return the slots of the lowest keys, the lowest first."""
        keys = self._keys(slots, blocks, kv_blocks)
        if num_slots < len(keys):  # sorting all of some thousand keys costs more
            is_low = keys <= np.partition(keys, num_slots - 1)[num_slots - 1]
            slots, keys = slots[is_low], keys[is_low]
        chosen: list[int] = slots[keys.argsort(kind="stable")[:num_slots]].tolist()
        return chosen


class LruSlotPolicy(_LowestFirst):
    """The slot of the least recently used block goes first; of equal ones, the lower slot."""

    __slots__ = ()

    def _keys(self, slots: _Int64s, blocks: _Int32s, kv_blocks: KVBlockView) -> _Int64s:
        return as_host_array(kv_blocks.block_timestamps).take(blocks)


class RefZeroSlotPolicy(LruSlotPolicy):
    """Any slot may go first, because no request refers to its block; the lower ones do."""

    __slots__ = ()

    def _keys(self, slots: _Int64s, blocks: _Int32s, kv_blocks: KVBlockView) -> _Int64s:
        return slots


class ConsumedSlotPolicy(_LowestFirst):
    """The slot whose state has longest been neither stored nor used by a hit goes first.

    A hit refreshes the one state that it restored, not the states of all the blocks before it,
    which plain LRU keeps although nothing resumes from them. Of equal slots the lower goes first.
    """

    __slots__ = ("_clock", "_last_use")

    def __init__(self) -> None:
        self.reset(0)

    def _keys(self, slots: _Int64s, blocks: _Int32s, kv_blocks: KVBlockView) -> _Int64s:
        return self._last_use.take(slots)

    def on_stored(self, slots: Sequence[int], saved_tokens: Sequence[int]) -> None:
        """Make the slots the most recent."""
        self._touch(slots)

    def on_consumed(self, slots: Sequence[int]) -> None:
        """Make the slots the most recent."""
        self._touch(slots)

    def reset(self, max_slots: int) -> None:
        """Forget all uses."""
        self._clock = 0
        self._last_use = np.zeros(max_slots, np.int64)

    def _touch(self, slots: Sequence[int]) -> None:
        if slots:
            self._clock += 1
            self._last_use[list(slots)] = self._clock


class ScoreSlotPolicy(ConsumedSlotPolicy):
    """The slot whose state saves the fewest tokens for its age goes first.

    The score of a state is the tokens that it saves beyond the state before it in the same prefix,
    over its age: how many times, since it was stored or last consumed, a slot was. So a state that
    spares little beyond another one goes before one that spares much, and what is not used goes in
    the end. Where all save alike this is ``ConsumedSlotPolicy``. Of equal slots the lower goes
    first.
    """

    __slots__ = ("_saved_tokens",)

    def _keys(self, slots: _Int64s, blocks: _Int32s, kv_blocks: KVBlockView) -> _Int64s:
        ages = self._clock + 1 - self._last_use.take(slots)
        # Of integers, so that all ranks divide alike; below 2**62, for tokens are below 2**31.
        scores: _Int64s = (self._saved_tokens.take(slots) << _SCORE_BITS) // ages
        return scores

    def on_stored(self, slots: Sequence[int], saved_tokens: Sequence[int]) -> None:
        """Make the slots the most recent, and keep what their states save."""
        super().on_stored(slots, saved_tokens)
        self._saved_tokens[list(slots)] = saved_tokens

    def reset(self, max_slots: int) -> None:
        """Forget all uses, and what was saved."""
        super().reset(max_slots)
        self._saved_tokens = np.zeros(max_slots, np.int64)


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
