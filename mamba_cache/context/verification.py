"""Verification of hits: a sample is computed again without the cache, and compared."""

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
"""Maximum number of queued hits; a further hit replaces the oldest."""

RELATIVE_BOUNDS: Final = {
    torch.float64: 1e-5,
    torch.float32: 1e-3,
    torch.float16: 0.05,
    torch.bfloat16: 0.2,
}
"""Maximum norm of a difference, relative to the norm of the computed tensor, by dtype.

The bound of a prefix is that of its coarsest dtype: a float32 state of a bfloat16 model is rounded
like bfloat16. Models in float64 compute norms and scans in float32. Correct hits of 19 tiny models
stayed below 1e-6 in float32 and 1e-2 in both half precisions."""

_log = logging.getLogger("mamba_cache.verification")

_ByLayer: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
"""One tensor [num_layers, ...], or one tensor for each layer."""


@dataclass(frozen=True, slots=True)
class PrefixContent:
    """States, keys and values after the tokens of a prefix.

    Attributes:
        states: By name in ``StateSpec.tensors``, the states of all layers with this tensor: a
            tensor [num_layers, *shape], or a list of tensors.
        kv: Keys and values of each token: a tensor [num_layers, 2, num_tokens, num_kv_heads,
            head_dim], or a list with the keys and then the values of each layer, [num_tokens, ...].
            Empty if the cache has no KV tensor.
    """

    states: Mapping[str, _ByLayer]
    kv: _ByLayer = ()


class PrefixDifference(NamedTuple):
    """An entry that differs from the model's result, with the tensor that differs most."""

    relative: float  # norm of the difference / norm of the computed tensor
    limit: float
    name: str  # of the tensor in ``PrefixContent.states``, or "keys" or "values"
    layer: int  # index of the layer in that tensor
    block: int | None  # index of the block; None: the entry is the state


@dataclass(frozen=True, slots=True, eq=False)
class HitToVerify:
    """A hit whose prefix is to be computed without the cache.

    Attributes:
        request: The request that resumed, with its adapter and multimodal items.
        tokens: [num_tokens] int32: the prefix that was not computed.
        hashes: Hashes of the prefix's blocks.
    """

    request: Request
    tokens: TokenArray
    hashes: BlockHashes


@dataclass(frozen=True, slots=True)
class VerificationStats:
    """Results of ``verify_hits``. Any thread may read them.

    Attributes:
        sampled: Number of hits that were sampled.
        verified: Number of hits that were computed again and compared.
        skipped: Number of hits that could not be verified: evicted, replaced in the queue, of other
            settings of the model, or memory was short.
        differences: Number of entries that differed from the model's result, by kind: "state" and
            "kv". Each was removed. 0 is expected.
        waiting: Number of hits in the queue.
    """

    sampled: int = 0
    verified: int = 0
    skipped: int = 0
    differences: Mapping[str, int] = field(default_factory=dict)
    waiting: int = 0


class HitVerifier:
    """Samples hits, compares them with the model's results, and counts the outcomes.

    Queued hits hold no blocks or slots: a hit that is evicted in the queue is not verified.
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
        """Queue a sequence that began to run, if it is a hit, with probability ``rate``."""
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
        """Verify queued hits, oldest first; return their number."""
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
        """Remove and return the oldest queued hit; None if the queue is empty."""
        return self._waiting.popleft() if self._waiting else None

    def find(self, hit: HitToVerify) -> tuple[list[int], int] | None:
        """Return the blocks and the slot of a hit's prefix; None if it is no longer cached."""
        blocks = self._kv_blocks.match_prefix(hit.hashes)
        slot = self._slots.get_slot(blocks[-1]) if len(blocks) == len(hit.hashes) else -1
        return None if slot < 0 else (blocks, slot)

    def judge(self, hit: HitToVerify, computed: PrefixContent | None) -> list[PrefixDifference]:
        """Compare a hit with the same prefix computed again; log and remove entries that differ.

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
        """Clear the queue and all counts."""
        self._waiting.clear()
        self._counts: Counter[str] = Counter()
        # Both kinds begin at 0, so that metrics show the first difference as an increase.
        kinds = ("state", "kv") if self._rate else ()
        self._differences = Counter(dict.fromkeys(kinds, 0))

    def stats(self) -> VerificationStats:
        """Return all counts."""
        differences, waiting = dict(self._differences), len(self._waiting)
        return VerificationStats(**self._counts, differences=differences, waiting=waiting)


def compare_prefixes(
    saved: PrefixContent, computed: PrefixContent, *, block_size_tokens: int
) -> list[PrefixDifference]:
    """Return the entries of a saved prefix that differ from the computed prefix.

    Each layer's state, and the keys and the values of each token, may differ by
    ``RELATIVE_BOUNDS``. Keys and values are compared token by token, because the norm over many
    tokens would hide a single wrong one.
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
        # NaN is the largest difference; tensors with the same bits were skipped above.
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
