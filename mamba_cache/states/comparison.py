"""Comparison of a saved prefix with the same prefix computed anew: states, keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from mamba_cache.errors import InvalidArgumentError

__all__ = ["PrefixContent", "PrefixDifference", "compare_prefixes"]

_MARGIN = 4
"""Over what two computations of the same prefix differ by, as in the probe of a model."""

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


def compare_prefixes(
    saved: PrefixContent,
    computed: PrefixContent,
    again: Callable[[], PrefixContent] | None = None,
    *,
    block_size_tokens: int,
    tolerance: float = 0.0,
) -> list[PrefixDifference]:
    """Find what of a saved prefix is not what the model computes.

    Equal bits are always right. Whether others are rounding is measured: a prefix that is computed
    twice, whole and in pieces, differs by rounding alone, and what is saved may differ by four
    times as much. Keys and values are compared token by token, so that a single token is not lost
    among the others.

    Args:
        saved: What the cache has.
        computed: The same tokens without the cache.
        again: Computes them once more, in other pieces; called if bits differ. None: nothing but
            ``tolerance`` is allowed.
        block_size_tokens: Tokens of a block.
        tolerance: What each may differ by besides, relative to its size.

    Returns:
        One difference at most for the state and for each block, the state's first; the layer that
        is furthest off stands for all.

    Raises:
        InvalidArgumentError: They are not of the same names, layers and shapes.
    """
    _check_alike(saved, computed)
    states = {
        name: [(a[None], b[None]) for a, b in zip(tensors, computed.states[name], strict=True)]
        for name, tensors in saved.states.items()
    }
    kv = list(zip(saved.kv_by_layer, computed.kv_by_layer, strict=True))
    if all(_are_equal(*pair) for pairs in (*states.values(), kv) for pair in pairs):
        return []
    other = None if again is None else again()
    if other is not None:
        _check_alike(saved, other)
    worst: dict[int | None, PrefixDifference] = {}
    for name, pairs in states.items():
        noisy = None if other is None else [each[None] for each in other.states[name]]
        limit = _limit(pairs, noisy, tolerance)
        for layer, pair in enumerate(pairs):
            _keep_worst(worst, pair, name, layer, limit, lambda _: None)
    limit = _limit(kv, None if other is None else other.kv_by_layer, tolerance)
    for index, pair in enumerate(kv):
        name, layer = ("keys", "values")[index % 2], index // 2
        _keep_worst(worst, pair, name, layer, limit, lambda token: token // block_size_tokens)
    return [worst[block] for block in sorted(worst, key=lambda b: -1 if b is None else b)]


def _keep_worst(  # noqa: PLR0917 (one tensor, and whose it is)
    worst: dict[int | None, PrefixDifference],
    pair: tuple[torch.Tensor, torch.Tensor],
    name: str,
    layer: int,
    limit: float,
    block_of: Callable[[int], int | None],
) -> None:
    """Note for each entry that a tensor's rows are of whether they are beyond the limit."""
    relative, largest = _differ(*pair)
    for row in (relative > limit).nonzero()[:, 0].tolist():
        block, value = block_of(row), relative[row].item()
        if block not in worst or value > worst[block].relative:
            worst[block] = PrefixDifference(block, name, layer, largest[row].item(), value, limit)


def _differ(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far each row, [n, ...], is off, relative to its size, and at most, [n]."""
    a, b = actual.flatten(1).double(), expected.flatten(1).double()
    tiny = torch.finfo(torch.float64).tiny
    norms = torch.linalg.vector_norm(a - b, dim=1)
    relative = norms / torch.linalg.vector_norm(b, dim=1).clamp_min(tiny)
    # What is no number is as far off as can be, unless both are the same bits.
    relative = relative.nan_to_num(nan=math.inf, posinf=math.inf)
    return relative, (a - b).abs().nan_to_num(nan=math.inf).amax(dim=1)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _limit(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    again: Iterable[torch.Tensor] | None,
    tolerance: float,
) -> float:
    """Return what rounding may make of tensors of one kind, over all layers."""
    if again is None or not pairs:
        return tolerance
    computed = [expected for _, expected in pairs]
    noise = max(_differ(*pair)[0].max().item() for pair in zip(again, computed, strict=True))
    # However the model computes, norms and scans are in float32 here and there.
    kept = computed[0].dtype if computed[0].is_floating_point() else torch.float32
    epsilon = max(torch.finfo(kept).eps, torch.finfo(torch.float32).eps)
    return tolerance + _MARGIN * (noise + epsilon)


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
