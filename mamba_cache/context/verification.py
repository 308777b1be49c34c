"""Verification of hits: a sample of them is computed again without the cache, and compared."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch

from mamba_cache._checks import check_int
from mamba_cache.cache import BlockHashes, KVBlockAllocator, SlotPool
from mamba_cache.context.requests import ActiveRequest, Admission, Request, TokenArray
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

    @property
    def kv_by_layer(self) -> list[torch.Tensor]:
        """Keys and values in turn, layer by layer."""
        return [*(self.kv.flatten(0, 1) if isinstance(self.kv, torch.Tensor) else self.kv)]


@dataclass(frozen=True, slots=True)
class PrefixDifference:
    """An entry that is not what the model computes: a state, or a KV block.

    Attributes:
        block: The block that it is, or at whose end the state is; None: the state.
        name: The tensor that is furthest off, as in ``PrefixContent.states``, or "keys" or
            "values".
        layer: Of that tensor, among those that have one.
        largest: The largest difference of two numbers in it.
        relative: The norm of the difference, relative to that of what was computed.
        limit: What ``relative`` may be.
    """

    block: int | None
    name: str
    layer: int
    largest: float
    relative: float
    limit: float


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

    def sample(self, request: Request, tokens: TokenArray, hashes: BlockHashes) -> None:
        """Choose a hit with the rate's probability."""
        if not hashes or self._random.random() >= self._rate:
            return
        self._sampled += 1
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._skipped += 1
        prefix = tokens[: len(hashes) * self._block_size].copy()
        self._waiting.append(HitToVerify(request, prefix, hashes))

    def admitted(self, active: ActiveRequest, admission: Admission) -> None:
        """Sample a request that began to run, if it is a hit."""
        if admission.miss_reason is None:
            hashes = active.hashes[: admission.state_matched_blocks]
            self.sample(active.request, active.tokens(0, admission.skip_tokens), hashes)

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
            self._skipped += 1
            return []
        blocks, slot = found
        saved = self._read(slot, blocks, len(hit.tokens))
        differences = compare_prefixes(saved, computed, block_size_tokens=self._block_size)
        self._verified += 1
        for each in differences:
            kind = EntryKind.STATE if each.block is None else EntryKind.KV
            index = len(blocks) - 1 if each.block is None else each.block
            digest = hit.hashes.digest(index)
            self._differences[kind.name.lower()] += 1
            _log_difference(hit.request.request_id, kind, digest, each)
            self._remove(kind, blocks[index], hit.request, digest)
        return differences

    def reset(self) -> None:
        """Forget all hits and counts."""
        self._waiting.clear()
        self._sampled = self._verified = self._skipped = 0
        # Both from the start, so that a first difference is seen as a rise.
        self._differences: Counter[str] = Counter(state=0, kv=0)

    def stats(self) -> VerificationStats:
        """Return what was counted."""
        return VerificationStats(
            sampled=self._sampled,
            verified=self._verified,
            skipped=self._skipped,
            differences=dict(self._differences),
            waiting=len(self._waiting),
        )


def _log_difference(
    request_id: Hashable, kind: EntryKind, digest: bytes, difference: PrefixDifference
) -> None:
    _log.error(
        "a verified hit differs and is removed: request=%r kind=%s digest=%s tensor=%s layer=%d "
        "largest_difference=%.3g relative=%.3g limit=%.3g",
        request_id,
        kind.name.lower(),
        digest.hex(),
        difference.name,
        difference.layer,
        difference.largest,
        difference.relative,
        difference.limit,
    )


def compare_prefixes(
    saved: PrefixContent, computed: PrefixContent, *, block_size_tokens: int
) -> list[PrefixDifference]:
    """Find what of a saved prefix is not what the model computes.

    Each layer's state, and the keys and the values of each token, may differ by
    ``RELATIVE_BOUNDS``. Keys and values are compared token by token, so that a single token is not
    lost among the others.
    """
    _check_alike(saved, computed)
    limit = _bound_of([t for each in (saved, computed) for t in _tensors_of(each)])
    worst: dict[int | None, PrefixDifference] = {}
    for name, tensors in saved.states.items():
        for layer, (a, b) in enumerate(zip(tensors, computed.states[name], strict=True)):
            _keep_worst(worst, a[None], b[None], name, layer, limit, None)
    kv = zip(saved.kv_by_layer, computed.kv_by_layer, strict=True)
    for index, (a, b) in enumerate(kv):
        name = ("keys", "values")[index % 2]
        _keep_worst(worst, a, b, name, index // 2, limit, block_size_tokens)
    return [worst[block] for block in sorted(worst, key=lambda b: -1 if b is None else b)]


def _keep_worst(  # noqa: PLR0917 (two tensors, and whose they are)
    worst: dict[int | None, PrefixDifference],
    actual: torch.Tensor,
    expected: torch.Tensor,
    name: str,
    layer: int,
    limit: float,
    block_size: int | None,
) -> None:
    """Note for each entry that rows [n, ...] are of whether one is beyond the limit."""
    if actual.dtype == expected.dtype and torch.equal(actual, expected):
        return
    a, b = actual.flatten(1).double(), expected.flatten(1).double()
    tiny = torch.finfo(torch.float64).tiny
    norms = torch.linalg.vector_norm(a - b, dim=1)
    relative = norms / torch.linalg.vector_norm(b, dim=1).clamp_min(tiny)
    # What is no number is as far off as can be, unless both are the same bits.
    relative = relative.nan_to_num(nan=math.inf, posinf=math.inf)
    largest = (a - b).abs().nan_to_num(nan=math.inf).amax(dim=1)
    for row in (relative > limit).nonzero()[:, 0].tolist():
        block, value = None if block_size is None else row // block_size, relative[row].item()
        if block not in worst or value > worst[block].relative:
            worst[block] = PrefixDifference(block, name, layer, largest[row].item(), value, limit)


def _tensors_of(content: PrefixContent) -> list[torch.Tensor]:
    return [t for tensors in content.states.values() for t in tensors] + content.kv_by_layer


def _bound_of(tensors: Sequence[torch.Tensor]) -> float:
    """Return the bound of the coarsest dtype; of dtypes that have none, such as ints, 0."""
    return max((RELATIVE_BOUNDS.get(tensor.dtype, 0.0) for tensor in tensors), default=0.0)


def _check_alike(one: PrefixContent, other: PrefixContent) -> None:
    shapes = [
        {name: [tuple(each.shape) for each in tensors] for name, tensors in content.states.items()}
        | {"kv": [tuple(each.shape) for each in content.kv_by_layer]}
        for content in (one, other)
    ]
    if shapes[0] != shapes[1]:
        raise InvalidArgumentError(
            f"a computed prefix must have the tensors of the saved one: {shapes[0]}, by layer, "
            f"got {shapes[1]}"
        )
