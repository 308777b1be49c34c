"""What one state and one KV block are made of, and how many of them a memory budget holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mamba_cache._checks import as_items, check_int, check_names
from mamba_cache._torch import check_device_room, outside_inference_mode
from mamba_cache.errors import BudgetError, InvalidArgumentError

__all__ = [
    "KVCacheSpec",
    "LayerKind",
    "SlotQuantization",
    "StateSpec",
    "StateTensorSpec",
    "slots_in_budget",
]

_GIB = 2**30
_STATE_DIMS = 3
_INT_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class StateTensorSpec:
    """One tensor of a state, the same in each of its layers.

    Attributes:
        name: What the tensor is called in a ``StatePool``: "kind.tensor" where its layers are of a
            kind that has a name, as in ``LayerKind``.
        num_layers: Layers that have it; 0 where a pipeline stage has none.
        shape: Shape of one layer's part of one state.
        dtype: A floating-point or integer dtype. It must be the one that the model's kernel keeps
            the state in: a state rounded on the way into the cache is not the same state.

    Raises:
        InvalidArgumentError: The name is empty, a size is out of range or the dtype is neither.
    """

    name: str
    num_layers: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidArgumentError(f"name must be a string that is not empty: {self.name!r}")
        num_layers = check_int("num_layers", self.num_layers, minimum=0)
        what = f"each size in the shape of {self.name!r}"
        sizes = [check_int(what, size, minimum=1) for size in _as_shape(self.name, self.shape)]
        object.__setattr__(self, "num_layers", num_layers)
        object.__setattr__(self, "shape", tuple(sizes))
        _check_dtype(self.dtype)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's part of one state."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of a model that keep the same tensors, such as all its Gated DeltaNet layers.

    Attributes:
        name: What the layers are called. "" where a model has one kind alone and its tensors need
            no prefix. It holds no dot.
        num_layers: How many there are; 0 where a pipeline stage has none.
        tensors: Name, shape and dtype of each tensor that one layer keeps, as ``StateTensorSpec``
            takes them. The names hold no dot.

    Raises:
        InvalidArgumentError: A name is no string, is empty or has a dot, two tensors share one,
            there is no tensor, or a shape or dtype is none.
    """

    name: str
    num_layers: int
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or "." in self.name:
            raise InvalidArgumentError(
                f"a kind's name must be a string without a dot, got {self.name!r}"
            )
        triples = as_items("tensors", self.tensors, "triples of a name, a shape and a dtype")
        if not all(isinstance(one, (tuple, list)) and len(one) == 3 for one in triples):
            raise InvalidArgumentError(
                f"each of tensors must be a name, a shape and a dtype, got {triples!r}"
            )
        checked = [StateTensorSpec(name, self.num_layers, *rest) for name, *rest in triples]
        names = [tensor.name for tensor in checked]
        if not names or len(set(names)) < len(names) or any("." in name for name in names):
            raise InvalidArgumentError(
                f"layers of a kind need tensors of different names without a dot, got {names}"
            )
        object.__setattr__(self, "num_layers", checked[0].num_layers)
        tensors = tuple((tensor.name, tensor.shape, tensor.dtype) for tensor in checked)
        object.__setattr__(self, "tensors", tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors within a layer."""
        return tuple(name for name, _, _ in self.tensors)

    def name_in_pool(self, tensor: str) -> str:
        """Return what a tensor of these layers is called in a ``StatePool``."""
        return f"{self.name}.{tensor}" if self.name else tensor


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The tensors that make up a state.

    ``StateSpec.mamba`` describes models whose only state is that of Mamba layers, and
    ``StateSpec.of`` any others.

    Attributes:
        tensors: At least one, each of a different name.

    Raises:
        InvalidArgumentError: There is none, or two share a name.
    """

    tensors: tuple[StateTensorSpec, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        names = [tensor.name for tensor in self.tensors]
        if not names or len(set(names)) < len(names):
            raise InvalidArgumentError(f"a state needs tensors of different names, got {names}")

    @classmethod
    def mamba(
        cls,
        num_layers: int,
        conv_shape: Sequence[int],
        ssm_shape: Sequence[int],
        conv_dtype: torch.dtype,
        ssm_dtype: torch.dtype,
    ) -> StateSpec:
        """Describe Mamba layers: a convolution window "conv" and an SSM state "ssm" in each.

        Args:
            num_layers: Mamba layers of the model, or of this pipeline stage.
            conv_shape: Usually [conv_dim, window].
            ssm_shape: Usually [heads, head_dim, state_dim].
            conv_dtype: Dtype of the convolution window.
            ssm_dtype: Dtype that the SSM kernel keeps its state in.

        Raises:
            InvalidArgumentError: As in ``StateTensorSpec``.
        """
        conv = StateTensorSpec("conv", num_layers, _as_shape("conv", conv_shape), conv_dtype)
        ssm = StateTensorSpec("ssm", num_layers, _as_shape("ssm", ssm_shape), ssm_dtype)
        return cls((conv, ssm))

    @classmethod
    def of(cls, *kinds: LayerKind) -> StateSpec:
        """Describe a model by the kinds of its layers that keep a state.

        Args:
            *kinds: At least one, each of a different name.

        Raises:
            InvalidArgumentError: There is none, two share a name, or one is no ``LayerKind``.
        """
        for kind in kinds:
            if not isinstance(kind, LayerKind):
                raise InvalidArgumentError(f"kinds must be LayerKinds, got {kind!r}")
        names = [kind.name for kind in kinds]
        if not names or len(set(names)) < len(names):
            raise InvalidArgumentError(f"a state needs kinds of different names, got {names}")
        return cls(
            tuple(
                StateTensorSpec(kind.name_in_pool(name), kind.num_layers, shape, dtype)
                for kind in kinds
                for name, shape, dtype in kind.tensors
            )
        )

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers, in the order of their first tensors, told by the tensors' names.

        Raises:
            InvalidArgumentError: Tensors of one kind differ in the number of layers.
        """
        groups: dict[str, list[tuple[str, StateTensorSpec]]] = {}
        for tensor in self.tensors:
            kind, _, name = tensor.name.rpartition(".")
            groups.setdefault(kind, []).append((name, tensor))
        kinds = []
        for kind, tensors in groups.items():
            num_layers, *others = {tensor.num_layers for _, tensor in tensors}
            if others:
                raise InvalidArgumentError(
                    f"tensors of one kind must have equally many layers, but those of {kind!r} "
                    f"have {[(tensor.name, tensor.num_layers) for _, tensor in tensors]}: give "
                    "layers of other kinds other names, as StateSpec.of does"
                )
            triples = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)
            kinds.append(LayerKind(kind, num_layers, triples))
        return tuple(kinds)

    @property
    def is_mamba(self) -> bool:
        """Whether ``StateSpec.mamba`` could have made it."""
        conv, ssm = self.tensors[0], self.tensors[-1]
        names = [tensor.name for tensor in self.tensors]
        return names == ["conv", "ssm"] and conv.num_layers == ssm.num_layers

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one whole state: all tensors, all layers."""
        return sum(tensor.num_layers * tensor.layer_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class SlotQuantization:
    """Recurrent states in int8, with one float32 scale for each head and state column.

    In a column [head_dim] of a head's state, ``a`` is the largest magnitude, or 2**-100 if that is
    more. Its scale is ``a * (1 / 127)``, and the code of ``x`` is ``x * (127 / a)``, rounded to
    nearest, halves to even, all in float32. A column that holds an infinity or a NaN in float32
    comes back as NaN throughout: no code stands for either.

    Attributes:
        tensors: Which tensors of a state, by the names in a ``StateSpec``. All others are kept as
            they are.

    Raises:
        InvalidArgumentError: ``tensors`` are no different names.
    """

    tensors: tuple[str, ...] = ("ssm",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", check_names("tensors", self.tensors))

    def scales_of(self, name: str) -> str | None:
        """Return what the scales of a tensor are called in a slot; None if it is kept as it is."""
        return f"{name}_scales" if name in self.tensors else None

    def slot_spec(self, spec: StateSpec) -> StateSpec:
        """Describe the slots of such states: codes in int8, and "..._scales" after them.

        Args:
            spec: Live states, those of ``tensors`` floating-point and [heads, head_dim, state_dim].

        Raises:
            InvalidArgumentError: The spec has no tensor of such a name, or one of another kind.
        """
        missing = set(self.tensors) - {tensor.name for tensor in spec.tensors}
        chosen = [tensor for tensor in spec.tensors if tensor.name in self.tensors]
        fits = all(len(t.shape) == _STATE_DIMS and t.dtype.is_floating_point for t in chosen)
        if missing or not fits:
            raise InvalidArgumentError(
                f"quantised slots need states of {[*self.tensors]}, floating-point and [heads, "
                f"head_dim, state_dim], got {spec}"
            )
        parts: list[StateTensorSpec] = []
        for tensor in spec.tensors:
            name, layers, shape = tensor.name, tensor.num_layers, tensor.shape
            scales = self.scales_of(name)
            if scales is None:
                parts.append(tensor)
            else:
                parts.append(StateTensorSpec(name, layers, shape, torch.int8))
                of_scales = (shape[0], shape[2])
                parts.append(StateTensorSpec(scales, layers, of_scales, torch.float32))
        return StateSpec(tuple(parts))


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What the attention layers keep of each token.

    Attributes:
        num_layers: Attention layers of the model; 0 if it has none.
        num_kv_heads: Heads of keys and of values.
        head_dim: Size of one head.
        dtype: Floating-point or integer dtype of keys and values.

    Raises:
        InvalidArgumentError: A size is out of range or the dtype is neither.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name, minimum in (("num_layers", 0), ("num_kv_heads", 1), ("head_dim", 1)):
            object.__setattr__(self, name, check_int(name, getattr(self, name), minimum=minimum))
        _check_dtype(self.dtype)

    def bytes_per_block(self, block_size_tokens: int) -> int:
        """Bytes of the keys and values of ``block_size_tokens`` tokens, over all layers.

        Raises:
            InvalidArgumentError: ``block_size_tokens`` is not a positive int.
        """
        block_size_tokens = check_int("block_size_tokens", block_size_tokens, minimum=1)
        token_values = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return token_values * block_size_tokens * self.dtype.itemsize

    @outside_inference_mode
    def allocate(
        self, num_blocks: int, block_size_tokens: int, device: torch.device | str
    ) -> torch.Tensor:
        """Make a KV cache, cleared.

        Returns:
            [num_layers, 2, num_blocks, block_size_tokens, num_kv_heads, head_dim] of the spec's
            dtype on ``device``; index 0 of the second axis holds keys, index 1 values.

        Raises:
            InvalidArgumentError: A count is not a positive int.
            BudgetError: The device's memory does not hold so many.
        """
        num_blocks = check_int("num_blocks", num_blocks, minimum=1)
        block_size_tokens = check_int("block_size_tokens", block_size_tokens, minimum=1)
        num_bytes = num_blocks * self.bytes_per_block(block_size_tokens)
        check_device_room(num_bytes, {"num_blocks": num_blocks}, device)
        token_shape = (self.num_kv_heads, self.head_dim)
        shape = (self.num_layers, 2, num_blocks, block_size_tokens, *token_shape)
        return torch.zeros(shape, dtype=self.dtype, device=device)


def slots_in_budget(budget_gb: float, spec: StateSpec) -> int:
    """Count the slots that a budget of ``budget_gb`` GiB (2**30 bytes) holds.

    Returns:
        At least 1, or 0 if the spec has no layers, because then there is nothing to save.

    Raises:
        BudgetError: The budget holds no slot.
        InvalidArgumentError: The budget is no finite number >= 0.
    """
    if not 0 <= budget_gb < math.inf:
        raise InvalidArgumentError(f"a budget must be a finite number >= 0, got {budget_gb!r}")
    slot_bytes = spec.bytes_per_slot
    if not slot_bytes:
        return 0
    num_slots = int(budget_gb * _GIB) // slot_bytes
    if not num_slots:
        raise BudgetError(
            f"a budget of {budget_gb} GiB is too small: it must be at least {slot_bytes / _GIB} "
            f"GiB to hold 1 slot of {slot_bytes} bytes"
        )
    return num_slots


def _as_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(as_items(f"the shape of {name!r}", shape, "sizes"))


def _check_dtype(dtype: torch.dtype) -> None:
    is_dtype = isinstance(dtype, torch.dtype)
    if not is_dtype or not (dtype.is_floating_point or dtype in _INT_DTYPES):
        raise InvalidArgumentError(f"dtype must be floating-point or integer, got {dtype!r}")
