"""Events for listeners: requests admitted, blocks and states stored and removed."""

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
        request_id: Id of the request; None for a prompt of ``PrefixCache``, which has no id.
        num_tokens: Number of tokens of the prompt.
        digests: Digest of each complete block of the prompt.
        block_size_tokens: Number of tokens of a block.
        will_continue: The sender's hint whether a longer prompt will follow; None: no hint.
        cache_salt: Salt of the request; requests with different salts share no entry.
    """

    request_id: Hashable
    num_tokens: int
    digests: Sequence[bytes]
    block_size_tokens: int
    will_continue: bool | None = None
    cache_salt: str | bytes | int | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks or states were published.

    Blocks of one event are consecutive blocks of one sequence.

    Attributes:
        kind: "block" or "state".
        block_ids: The blocks; for states, the block at whose end each state was saved.
        digests: Digest of each block.
        slots: Slot of each state.
        parent_digest: Digest of the block before the first one; None at a sequence's start.
        tokens: [num_blocks * block_size_tokens] int32 array, the blocks' tokens in order. None if
            they were not given.
        extra_keys: For each block the other inputs of its hash, as in vLLM: the adapter, pairs
            (key, offset in the block) of multimodal inputs, and in the first block the salt. None
            for a block without such inputs, or if no block has any.
        block_size_tokens: Number of tokens of each block; None if ``tokens`` is None.
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
    """Blocks or states were removed.

    Attributes:
        kind: "block" or "state".
        block_ids: The blocks in order of removal; for states, the block of each state.
        digests: Digest of each block.
        slots: Slot of each state.
        is_reset: Whether all blocks, or all states, were removed.
    """

    kind: Literal["block", "state"]
    block_ids: tuple[int, ...]
    digests: tuple[bytes, ...]
    slots: tuple[int, ...] = ()
    is_reset: bool = False


Event: TypeAlias = Admitted | Stored | Removed
Listener: TypeAlias = Callable[[Any], object]
"""Called with each event of the classes that the listener was added for, in order."""

_KINDS: Final[tuple[type, ...]] = (Admitted, Stored, Removed)


class Listeners:
    """The listeners of one cache.

    Events are delivered after the bookkeeping of a call is done. A listener must not call methods
    that change the cache. If a listener raises, the others still get the event; then the first
    error is raised to the caller.
    """

    def __init__(self) -> None:
        self._listeners: dict[type, list[Listener]] = {kind: [] for kind in _KINDS}
        self.waiting: deque[Event] = deque()  # events to deliver, oldest first
        self.is_held = False  # whether ``tell`` delivers no events

    def add(self, listener: Listener, *kinds: type) -> None:
        """Add a listener.

        Args:
            listener: Called with each event.
            kinds: The event classes to deliver: ``Admitted``, ``Stored``, ``Removed``. Default:
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
        """Remove a listener, if it was added."""
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
