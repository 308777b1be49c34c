"""What a cache tells its listeners: requests admitted, blocks and states stored and removed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from mamba_cache._guard import mark_outside
from mamba_cache.errors import InvalidArgumentError

__all__ = ["Admitted", "Event", "Listener", "Listeners", "Removed", "Stored"]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request was admitted: it was matched, and its memory is reserved.

    Attributes:
        request_id: Its id; None for a prompt of ``PrefixCache``, which has none.
        num_tokens: Tokens of its prompt.
        digests: The digest of each complete block of the prompt.
        block_size_tokens: Tokens of a block.
        will_continue: Whether its sender says that a longer prompt will follow; None: unknown.
        cache_salt: Requests with different salts share nothing.
    """

    request_id: Hashable
    num_tokens: int
    digests: Sequence[bytes]
    block_size_tokens: int
    will_continue: bool | None = None
    cache_salt: str | bytes | int | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks or states became findable.

    Blocks of one event are consecutive blocks of one sequence.

    Attributes:
        kind: "block" or "state".
        block_ids: The blocks; of states, the blocks at whose ends they were saved.
        digests: The digest of each block.
        slots: The slot of each state.
        parent_digest: Digest of the block before the first one; None at a sequence's start.
        tokens: [num_blocks * block_size_tokens] int32 array, the blocks' tokens in order. None if
            they were not given.
        extra_keys: What else the hash of each block is made of, as vLLM lists it: the adapter,
            pairs (key, offset in the block) of multimodal inputs, and in a first block the salt.
            None for a block, or for all, without any.
        block_size_tokens: Tokens of each block; None if ``tokens`` is.
    """

    kind: Literal["block", "state"]
    block_ids: tuple[int, ...]
    digests: tuple[bytes, ...]
    slots: tuple[int, ...] = ()
    parent_digest: bytes | None = None
    tokens: Any = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    block_size_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks or states are no longer findable.

    Attributes:
        kind: "block" or "state".
        block_ids: The blocks, in the order of removal; of states, the blocks at their ends.
        digests: The digest of each block.
        slots: The slot of each state.
        is_reset: All blocks, or all states, were removed.
    """

    kind: Literal["block", "state"]
    block_ids: tuple[int, ...]
    digests: tuple[bytes, ...]
    slots: tuple[int, ...] = ()
    is_reset: bool = False


Event: TypeAlias = Admitted | Stored | Removed
Listener: TypeAlias = Callable[[Any], object]
"""Called with each event that it was added for, in order."""

_KINDS: Final[tuple[type, ...]] = (Admitted, Stored, Removed)


class Listeners:
    """The listeners of one cache.

    Events are delivered after the bookkeeping of a call is done. A listener must not call methods
    that change the cache. If a listener raises, the others still get the event; then the first
    error goes on to the caller.
    """

    def __init__(self) -> None:
        self._listeners: dict[type, list[Listener]] = {kind: [] for kind in _KINDS}
        self.waiting: deque[Event] = deque()  # events to deliver, the oldest first
        self.is_held = False  # whether events wait

    def add(self, listener: Listener, *kinds: type) -> None:
        """Add a listener.

        Args:
            listener: Called with each event.
            kinds: The event classes that it gets: ``Admitted``, ``Stored``, ``Removed``. Default:
                all.

        Raises:
            InvalidArgumentError: The listener is not callable, or a kind is no event class.
        """
        if not callable(listener):
            raise InvalidArgumentError(f"a listener must be callable, got {listener!r}")
        unknown = [kind for kind in kinds if kind not in _KINDS]
        if unknown:
            names = [kind.__name__ for kind in _KINDS]
            raise InvalidArgumentError(f"kinds of events are {names}, got {unknown}")
        for kind in kinds or _KINDS:
            self._listeners[kind].append(listener)

    def remove(self, listener: Listener) -> None:
        """Remove a listener; it may be unknown."""
        for listeners in self._listeners.values():
            listeners[:] = [each for each in listeners if each != listener]

    def wants(self, kind: type) -> bool:
        """Return whether a listener gets events of this class."""
        return bool(self._listeners[kind])

    def put(self, event: Event) -> None:
        """Queue an event for ``tell``."""
        if self._listeners[type(event)]:
            self.waiting.append(event)

    def tell(self) -> None:
        """Deliver the queued events, unless they are held.

        Raises:
            BaseException: The first error of a listener, after all were called.
        """
        failure: BaseException | None = None
        while self.waiting and not self.is_held:
            event = self.waiting.popleft()
            for listener in list(self._listeners[type(event)]):
                try:
                    listener(event)
                except BaseException as error:  # noqa: PERF203 - the others must be called
                    failure = failure or error
        if failure is not None:
            mark_outside(failure)
            raise failure
