"""Verification of hits: a sample of them is computed again without the cache, and compared."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import torch

from mamba_cache._checks import check_int
from mamba_cache.cache import BlockHashes, KVBlockAllocator, SlotPool
from mamba_cache.cache.sequence import CachedSequence, PrefixMatch, Request, TokenArray
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.tiers.entry import EntryKind

__all__ = [
    "MAX_WAITING",
    "RELATIVE_BOUNDS",
    "HitToVerify",
    "HitVerifier",
    "PrefixContent",
    "PrefixDifference",
    "VerificationStats",
    "compare_prefixes",
]

MAX_WAITING: Final = 64
"""Sampled hits that wait to be verified; a further one takes the place of the oldest."""

RELATIVE_BOUNDS: Final = {
    torch.float64: 1e-5,
    torch.float32: 1e-3,
    torch.float16: 0.05,
    torch.bfloat16: 0.2,
}
"""How large the norm of a difference may be, relative to the norm of what is computed anew.

The coarsest dtype of all tensors of a prefix counts: a float32 state of a bfloat16 model is rounded
as that model rounds. Models in float64 compute norms and scans in float32. Clean hits of 19 tiny
models stayed below 1e-6 in float32 and 1e-2 in both half precisions."""

_log = logging.getLogger("mamba_cache.verification")

_ByLayer: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
"""One tensor whose first axis is the layers, or a tensor for each."""


@dataclass(frozen=True, slots=True)
class PrefixContent:
    """What a model has in memory after the tokens of a prefix.

    Attributes:
        states: By name, as in ``StateSpec.tensors``, the state of each layer that has one: a tensor
            [num_layers, *shape], or a list of tensors.
        kv: Keys and values of each token: a tensor [num_layers, 2, num_tokens, num_kv_heads,
            head_dim], or a list that has for each layer its keys, then its values, [num_tokens,
            ...]. Empty where the cache keeps none.
    """

    states: Mapping[str, _ByLayer]
    kv: _ByLayer = ()


class PrefixDifference(NamedTuple):
    """An entry that is not what the model computes, and which of its tensors is furthest off."""

    relative: float  # the norm of the difference, relative to that of what was computed
    limit: float
    name: str  # as in ``PrefixContent.states``, or "keys" or "values"
    layer: int  # of that tensor, among those that have one
    block: int | None  # None: the state


@dataclass(frozen=True, slots=True, eq=False)
class HitToVerify:
    """A hit whose prefix is to be computed without the cache.

    Attributes:
        request: The request that resumed; adapters and multimodal items are as in it.
        tokens: [num_tokens] int32: the prefix that it did not compute.
        hashes: Of its blocks.
    """

    request: Request
    tokens: TokenArray
    hashes: BlockHashes


@dataclass(frozen=True, slots=True)
class VerificationStats:
    """What came of ``verify_hits``. Any thread may read it.

    Attributes:
        sampled: Hits that were chosen.
        verified: Those that were computed again and compared.
        skipped: Those that could not be: evicted or pushed out before, of other settings of the
            model, or there was no memory.
        differences: Entries that were not what the model computes, by kind: "state" and "kv". Each
            was removed. None are expected.
        waiting: Hits that wait, now.
    """

    sampled: int = 0
    verified: int = 0
    skipped: int = 0
    differences: Mapping[str, int] = field(default_factory=dict)
    waiting: int = 0


class HitVerifier:
    """Samples hits, compares them with what the model computes, and counts what came of it.

    It holds nothing of the cache: a hit that is evicted before its turn is not verified.
    """

    def __init__(
        self,
        rate: float,
        kv_blocks: KVBlockAllocator,
        slots: SlotPool,
        *,
        block_size_tokens: int,
        read: Callable[[int, list[int], int], PrefixContent],
        remove: Callable[[EntryKind, int, Request, bytes], object],
    ) -> None:
        self._rate = rate
        self._kv_blocks, self._slots = kv_blocks, slots
        self._block_size = block_size_tokens
        self._read, self._remove = read, remove
        self._random = random.Random()
        self._waiting: deque[HitToVerify] = deque()
        self.reset()

    def admitted(self, sequence: CachedSequence, match: PrefixMatch) -> None:
        """Choose a sequence that began to run, with the rate's probability, if it is a hit."""
        if match.miss_reason is not None or self._random.random() >= self._rate:
            return
        self._counts["sampled"] += 1
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._counts["skipped"] += 1
        prefix = sequence.tokens(0, match.skip_tokens).copy()
        hashes = sequence.hashes[: match.state_matched_blocks]
        self._waiting.append(HitToVerify(sequence.request, prefix, hashes))

    def verify(
        self,
        compute: Callable[[HitToVerify], PrefixContent | None],
        max_hits: int | None = None,
    ) -> int:
        """Verify hits that wait, the oldest first."""
        if max_hits is not None:
            check_int("max_hits", max_hits, minimum=1)
        count = 0
        while count != max_hits and (hit := self.take()) is not None:
            count += 1
            try:
                computed = compute(hit) if self.find(hit) is not None else None
            except torch.OutOfMemoryError:
                computed = None
            self.judge(hit, computed)
        return count

    def take(self) -> HitToVerify | None:
        """Return the hit that has waited longest; None if there is none."""
        return self._waiting.popleft() if self._waiting else None

    def find(self, hit: HitToVerify) -> tuple[list[int], int] | None:
        """Find the blocks and the slot that a hit resumed from, if all are still there."""
        blocks = self._kv_blocks.match_prefix(hit.hashes)
        slot = self._slots.get_slot(blocks[-1]) if len(blocks) == len(hit.hashes) else -1
        return None if slot < 0 else (blocks, slot)

    def judge(self, hit: HitToVerify, computed: PrefixContent | None) -> list[PrefixDifference]:
        """Compare a hit with the same prefix computed anew; log and remove what differs.

        ``computed`` is None if the prefix could not be computed, which is counted.
        """
        found = self.find(hit)
        if found is None or computed is None:
            self._counts["skipped"] += 1
            return []
        blocks, slot = found
        saved = self._read(slot, blocks, len(hit.tokens))
        differences = compare_prefixes(saved, computed, block_size_tokens=self._block_size)
        self._counts["verified"] += 1
        for each in differences:
            kind = EntryKind.STATE if each.block is None else EntryKind.KV
            index = len(blocks) - 1 if each.block is None else each.block
            digest = hit.hashes.digests[index]
            self._differences[kind.name.lower()] += 1
            _log.error(
                "a verified hit differs and is removed: request=%r kind=%s digest=%s tensor=%s "
                "layer=%d relative=%.3g limit=%.3g",
                hit.request.request_id,
                kind.name.lower(),
                digest.hex(),
                each.name,
                each.layer,
                each.relative,
                each.limit,
            )
            self._remove(kind, blocks[index], hit.request, digest)
        return differences

    def reset(self) -> None:
        """Forget all hits and counts."""
        self._waiting.clear()
        self._counts: Counter[str] = Counter()
        # Both from the start, so that a first difference is seen as a rise.
        kinds = ("state", "kv") if self._rate else ()
        self._differences = Counter(dict.fromkeys(kinds, 0))

    def stats(self) -> VerificationStats:
        """Return what was counted."""
        differences, waiting = dict(self._differences), len(self._waiting)
        return VerificationStats(**self._counts, differences=differences, waiting=waiting)


def compare_prefixes(
    saved: PrefixContent, computed: PrefixContent, *, block_size_tokens: int
) -> list[PrefixDifference]:
    """Find what of a saved prefix is not what the model computes.

    Each layer's state, and the keys and the values of each token, may differ by
    ``RELATIVE_BOUNDS``. Keys and values are compared token by token, so that a single token is not
    lost among the others.
    """
    parts = _parts_of(saved), _parts_of(computed)
    shapes = [[(*names, *rows.shape) for *names, rows in each] for each in parts]
    if shapes[0] != shapes[1]:
        raise InvalidArgumentError(
            f"a computed prefix must have the tensors of the saved one: {shapes[0]}, by name and "
            f"layer, got {shapes[1]}"
        )
    dtypes = {rows.dtype for each in parts for *_, rows in each}
    limit = max((RELATIVE_BOUNDS.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    tiny = torch.finfo(torch.float64).tiny
    worst: dict[int | None, PrefixDifference] = {}
    for (name, layer, is_kv, actual), (*_, expected) in zip(*parts, strict=True):
        if actual.dtype == expected.dtype and torch.equal(actual, expected):
            continue
        a, b = actual.flatten(1).double(), expected.flatten(1).double()
        norms = torch.linalg.vector_norm(a - b, dim=1)
        relative = norms / torch.linalg.vector_norm(b, dim=1).clamp_min(tiny)
        # What is no number is as far off as can be, unless both are the same bits.
        relative = relative.nan_to_num(nan=math.inf, posinf=math.inf)
        for row in (relative > limit).nonzero()[:, 0].tolist():
            block = row // block_size_tokens if is_kv else None
            each = PrefixDifference(relative[row].item(), limit, name, layer, block)
            worst[block] = max(worst.get(block, each), each)
    return [worst[block] for block in sorted(worst, key=lambda b: -1 if b is None else b)]


def _parts_of(content: PrefixContent) -> list[tuple[str, int, bool, torch.Tensor]]:
    """Return name, layer, whether it is KV, and rows [n, ...] to compare: a state, or tokens."""
    kv = content.kv.flatten(0, 1) if isinstance(content.kv, torch.Tensor) else content.kv
    states = [
        (name, layer, False, state[None])
        for name, tensors in sorted(content.states.items())
        for layer, state in enumerate(tensors)
    ]
    return states + [(("keys", "values")[i % 2], i // 2, True, x) for i, x in enumerate(kv)]
