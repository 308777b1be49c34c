"""Verification of hits: a sample of them is computed again without the cache, and compared."""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from mamba_cache.blocks import BlockHashes, KVBlockAllocator
from mamba_cache.context.requests import ActiveRequest, Admission, Request, TokenArray
from mamba_cache.slots import SlotPool
from mamba_cache.states import PrefixDifference

__all__ = [
    "MAX_WAITING",
    "HitSampler",
    "HitToVerify",
    "SkippedVerification",
    "VerificationStats",
    "log_difference",
]

MAX_WAITING = 64
"""Hits that wait to be verified; more are dropped and counted."""

_log = logging.getLogger("mamba_cache.verification")


class SkippedVerification:
    """Why a sampled hit was not verified. Each is counted."""

    QUEUE_FULL = "queue_full"
    """As many as may wait were waiting."""

    GONE = "gone"
    """What it resumed from was evicted before its turn came."""

    SETTINGS = "settings"
    """The model has other adapters or settings than it had then."""

    FAILED = "failed"
    """The prefix could not be computed: there was no memory for it, for example."""


@dataclass(frozen=True, slots=True, eq=False)
class HitToVerify:
    """A hit whose prefix is to be computed without the cache.

    Attributes:
        request: The request that resumed; adapters and multimodal items are as in it.
        tokens: [num_tokens] int32: the prefix that it did not compute.
        hashes: Of its complete blocks.
    """

    request: Request
    tokens: TokenArray
    hashes: BlockHashes

    @property
    def request_id(self) -> Hashable:
        """The request's name."""
        return self.request.request_id

    def digest(self, index: int) -> bytes:
        """Return the digest of a block of it."""
        return self.hashes.digest(index)

    def find(self, kv_blocks: KVBlockAllocator, slots: SlotPool) -> tuple[list[int], int] | None:
        """Find the blocks and the slot that it resumed from, if all are still there."""
        blocks = kv_blocks.match_prefix(self.hashes)
        if len(blocks) < len(self.hashes):
            return None
        slot = slots.get_slot(blocks[-1])
        return None if slot < 0 else (blocks, slot)


@dataclass(frozen=True, slots=True)
class VerificationStats:
    """What came of ``verify_hits``. Any thread may read it.

    Attributes:
        sampled: Hits that were chosen.
        verified: Those that were computed again and compared.
        skipped: Those that could not be, by reason (``SkippedVerification``).
        differences: Entries that were not what the model computes, by kind: "state" and "kv". Each
            was removed. None are expected.
        waiting: Hits that wait, now.
    """

    sampled: int = 0
    verified: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    differences: Mapping[str, int] = field(default_factory=dict)
    waiting: int = 0


class HitSampler:
    """Chooses hits to be verified, keeps them until their turn comes, and counts what came of it.

    It holds nothing of the cache: what is evicted before its turn comes is not verified.

    Args:
        rate: What part of the hits is chosen, from 0 to 1.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._random = random.Random()
        self._waiting: deque[HitToVerify] = deque()
        self.reset()

    def chooses(self) -> bool:
        """Say whether a hit is to be verified, and count it then; one that finds no room is not."""
        if self._random.random() >= self._rate:
            return False
        self._sampled += 1
        if len(self._waiting) >= MAX_WAITING:
            self.skip(SkippedVerification.QUEUE_FULL)
            return False
        return True

    def add(self, hit: HitToVerify) -> None:
        """Have a chosen hit wait."""
        self._waiting.append(hit)

    def admitted(self, active: ActiveRequest, admission: Admission) -> None:
        """Hear of a request that began to run; it may be a hit."""
        if admission.miss_reason is not None or not self.chooses():
            return
        position = admission.skip_tokens
        hashes = active.hashes[: admission.state_matched_blocks]
        self.add(HitToVerify(active.request, active.tokens(0, position), hashes))

    def take(self) -> HitToVerify | None:
        """Return the hit that has waited longest; None if there is none."""
        return self._waiting.popleft() if self._waiting else None

    def skip(self, reason: str) -> None:
        """Count a hit that was not verified."""
        self._skipped[reason] += 1

    def count(self, kinds: list[str]) -> None:
        """Count a hit that was verified, and each entry that differed, by its kind."""
        self._verified += 1
        self._differences.update(kinds)

    def reset(self) -> None:
        """Forget all hits and counts."""
        self._waiting.clear()
        self._sampled = self._verified = 0
        self._skipped: Counter[str] = Counter()
        # Both from the start, so that a first difference is seen as a rise.
        self._differences: Counter[str] = Counter(state=0, kv=0)

    def stats(self) -> VerificationStats:
        """Return what was counted."""
        return VerificationStats(
            sampled=self._sampled,
            verified=self._verified,
            skipped=dict(self._skipped),
            differences=dict(self._differences),
            waiting=len(self._waiting),
        )


def log_difference(request_id: Hashable, digest: bytes, difference: PrefixDifference) -> str:
    """Log an entry that is not what the model computes, and return its kind, "state" or "kv"."""
    kind = "state" if difference.block is None else "kv"
    _log.error(
        "a verified hit differs and is removed: request=%r kind=%s digest=%s tensor=%s layer=%d "
        "largest_difference=%.3g relative=%.3g limit=%.3g",
        request_id,
        kind,
        digest.hex(),
        difference.name,
        difference.layer,
        difference.largest,
        difference.relative,
        difference.limit,
    )
    return kind
