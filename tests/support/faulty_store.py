"""A store for tests, with every kind of failure observed in real stores."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from memory_store import check_blobs, check_keys

from mamba_cache.stores import BlobStore, StoreFault, StoreHealth

__all__ = ["FaultyStore", "Trouble"]


class Trouble(str, Enum):
    """A failure of a call, or of one key in a call."""

    FAIL = "fail"
    """The call returns a ``StoreFault`` for the key."""

    DROP = "drop"
    """A put reports success and stores nothing. A remove reports success and removes nothing."""

    LOSE = "lose"
    """A blob is removed right after it was stored, as by an eviction or its holder's death."""

    FLIP = "flip"
    """A bit of the read blob is flipped."""

    TRUNCATE = "truncate"
    """Half of the blob is returned, with half of the size."""

    ZERO = "zero"
    """The second half of the read blob is zero; the size is right."""

    SWAP = "swap"
    """The read blob is that of another key read before."""

    TEAR = "tear"
    """Half of the buffer is written; the result is ``TRANSFER_FAILED``."""

    DELAY = "delay"
    """The whole call takes more time."""

    RAISE = "raise"
    """The whole call raises ``OSError``, which stores must not do."""

    HANG = "hang"
    """The whole call waits for ``release``, then goes on."""


_OF_CALLS = (Trouble.DELAY, Trouble.RAISE, Trouble.HANG)
_OF_PUTS = (Trouble.FAIL, Trouble.DROP, Trouble.LOSE)
_OF_GETS = (
    Trouble.FAIL,
    Trouble.FLIP,
    Trouble.TRUNCATE,
    Trouble.ZERO,
    Trouble.SWAP,
    Trouble.TEAR,
)
_TROUBLES = {
    "exists_many": (Trouble.FAIL, *_OF_CALLS),
    "put_many": (*_OF_PUTS, *_OF_CALLS),
    "get_many_into": (*_OF_GETS, *_OF_CALLS),
    "remove": (Trouble.FAIL, Trouble.DROP, *_OF_CALLS),
    "health": (Trouble.FAIL, *_OF_CALLS),
}


@dataclass(slots=True)
class _Rule:
    trouble: Trouble
    call: str
    probability: float
    times: int | None
    fault: StoreFault
    seconds: float
    matches: Callable[[str], bool]


class FaultyStore:
    """A ``BlobStore`` in front of another one, with troubles that a test injects.

    ``injected`` counts troubles by call and trouble, such as ``("put_many", Trouble.DROP)``.
    """

    def __init__(
        self, store: BlobStore, *, seed: int = 0, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.name = store.name
        self.injected: Counter[tuple[str, Trouble]] = Counter()
        self.num_hanging = 0  # hanging calls now
        self._store = store
        self._random = random.Random(seed)
        self._sleep = sleep
        self._rules: list[_Rule] = []
        self._lock = threading.RLock()
        self._released = threading.Event()
        self._last_read = b""

    def inject(
        self,
        call: str,
        trouble: Trouble,
        *,
        probability: float = 1.0,
        times: int | None = None,
        fault: StoreFault = StoreFault.UNREACHABLE,
        seconds: float = 0.0,
        matches: Callable[[str], bool] = lambda key: True,
    ) -> None:
        """Inject a trouble into a call from now on. Of several ones the first one drawn happens.

        ``probability`` is for each key, or for each call if the trouble concerns the whole call.
        ``matches`` selects keys; ``times`` is the maximum number of injections.
        """
        assert trouble in _TROUBLES[call]
        with self._lock:
            self._rules.append(
                _Rule(Trouble(trouble), call, probability, times, fault, seconds, matches)
            )

    def heal(self) -> None:
        """Remove all troubles, and release hanging calls."""
        with self._lock:
            self._rules.clear()
        self.release()

    def release(self) -> None:
        """Let hanging calls go on; later calls hang again."""
        with self._lock:
            released, self._released = self._released, threading.Event()
        released.set()

    def register(self, memory: memoryview) -> StoreFault | None:
        """Forward the call."""
        return self._store.register(memory)

    def unregister(self, memory: memoryview) -> None:
        """Forward the call."""
        self._store.unregister(memory)

    def exists_many(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Forward the call, with the injected troubles."""
        check_keys(keys)
        self._meet_call("exists_many")
        rules = self._meet_keys("exists_many", keys)
        answers = self._store.exists_many(keys)
        return [rule.fault if rule else one for rule, one in zip(rules, answers, strict=True)]

    def put_many(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[StoreFault | None]:
        """Forward the call, with the injected troubles."""
        check_blobs(keys, buffers, writable=False)
        self._meet_call("put_many")
        rules = self._meet_keys("put_many", keys)
        stored = [i for i, rule in enumerate(rules) if not rule or rule.trouble is Trouble.LOSE]
        some = self._store.put_many([keys[i] for i in stored], [buffers[i] for i in stored])
        answers = dict(zip(stored, some, strict=True))
        lost = [keys[i] for i in stored if rules[i]]
        self._store.remove(lost)
        return [
            rule.fault if rule and rule.trouble is Trouble.FAIL else answers.get(i)
            for i, rule in enumerate(rules)
        ]

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[int | StoreFault]:
        """Forward the call, with the injected troubles."""
        check_blobs(keys, buffers, writable=True)
        self._meet_call("get_many_into")
        rules = self._meet_keys("get_many_into", keys)
        answers = self._store.get_many_into(keys, buffers)
        for i, (rule, buffer) in enumerate(zip(rules, buffers, strict=True)):
            size = answers[i]
            if isinstance(size, StoreFault):
                continue
            view = buffer.cast("B")
            read = bytes(view[:size])
            if rule:
                answers[i] = self._damage(rule, view, size)
            self._last_read = read
        return answers

    def remove(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Forward the call, with the injected troubles."""
        check_keys(keys)
        self._meet_call("remove")
        rules = self._meet_keys("remove", keys)
        removed = [i for i, rule in enumerate(rules) if not rule]
        answers = dict(zip(removed, self._store.remove([keys[i] for i in removed]), strict=True))
        return [
            rule.fault if rule and rule.trouble is Trouble.FAIL else answers.get(i)
            for i, rule in enumerate(rules)
        ]

    def health(self) -> StoreHealth:
        """Forward the call, with the injected troubles."""
        self._meet_call("health")
        rule = self._meet_keys("health", ["health"])[0]
        return StoreHealth(rule.fault, "injected") if rule else self._store.health()

    def close(self) -> None:
        """Release hanging calls, and forward the call."""
        self.release()
        self._store.close()

    def _meet_call(self, call: str) -> None:
        with self._lock:  # any later ``heal`` releases this call, too
            released, rule = self._released, self._draw(call, None)
        if rule is None:
            return
        if rule.trouble is Trouble.DELAY:
            self._sleep(rule.seconds)
        elif rule.trouble is Trouble.HANG:
            with self._lock:
                self.num_hanging += 1
            released.wait()
            with self._lock:
                self.num_hanging -= 1
        else:
            raise OSError(f"{call}: a trouble that was asked for")

    def _meet_keys(self, call: str, keys: Sequence[str]) -> list[_Rule | None]:
        return [self._draw(call, key) for key in keys]

    def _draw(self, call: str, key: str | None) -> _Rule | None:
        """Draw the trouble of a key or of a whole call."""
        with self._lock:
            for rule in self._rules:
                if (
                    rule.call == call
                    and (rule.trouble in _OF_CALLS) == (key is None)
                    and rule.times != 0
                    and (key is None or rule.matches(key))
                    and self._random.random() < rule.probability
                ):
                    if rule.times is not None:
                        rule.times -= 1
                    self.injected[call, rule.trouble] += 1
                    return rule
        return None

    def _damage(self, rule: _Rule, view: memoryview, size: int) -> int | StoreFault:
        half = size // 2
        if rule.trouble is Trouble.FAIL:
            return rule.fault
        if rule.trouble is Trouble.FLIP:
            with self._lock:
                bit = self._random.randrange(8 * size)
            view[bit // 8] ^= 1 << bit % 8
        elif rule.trouble is Trouble.SWAP:
            other = self._last_read[:size]
            view[: len(other)] = other
        else:
            view[half:size] = bytes(size - half)
        if rule.trouble is Trouble.TEAR:
            return StoreFault.TRANSFER_FAILED
        return half if rule.trouble is Trouble.TRUNCATE else size
