"""Specs: the tensors of a state and of a KV block, and the number of slots in a budget."""

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
        name: Name of the tensor in a ``StatePool``: "kind.tensor" if the ``LayerKind`` of its
            layers has a name, else "tensor".
        num_layers: Number of layers with this tensor; 0 if a pipeline stage has none.
        shape: Shape of one layer's part of one state.
        dtype: A floating-point or integer dtype: that of the state in the model's kernel. Another
            dtype would round the state.

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
        """Size in bytes of one layer's part of one state."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of a model with equal state tensors, such as all its Gated DeltaNet layers.

    Attributes:
        name: Name of the kind, without a dot. "" if the model has one kind of layers: then the
            names of tensors have no prefix.
        num_layers: Number of layers; 0 if a pipeline stage has none.
        tensors: Name, shape and dtype of each state tensor of one layer, as for
            ``StateTensorSpec``. The names have no dot.

    Raises:
        InvalidArgumentError: A name is no string, is empty or has a dot, two tensors have one name,
            there is no tensor, or a shape or dtype is invalid.
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
        """Return the name in a ``StatePool`` of a tensor of these layers."""
        return f"{self.name}.{tensor}" if self.name else tensor


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The tensors that make up a state.

    ``StateSpec.mamba`` is for models whose only layers with a state are Mamba layers.
    ``StateSpec.of`` is for all other models.

    Attributes:
        tensors: At least one tensor; names are different.

    Raises:
        InvalidArgumentError: There is no tensor, or two tensors have one name.
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
            num_layers: Number of Mamba layers of the model, or of this pipeline stage.
            conv_shape: Shape of "conv" in one layer, usually [conv_dim, window].
            ssm_shape: Shape of "ssm" in one layer, usually [heads, head_dim, state_dim].
            conv_dtype: Dtype of the convolution window.
            ssm_dtype: Dtype of the state in the SSM kernel.

        Raises:
            InvalidArgumentError: As in ``StateTensorSpec``.
        """
        conv = StateTensorSpec("conv", num_layers, _as_shape("conv", conv_shape), conv_dtype)
        ssm = StateTensorSpec("ssm", num_layers, _as_shape("ssm", ssm_shape), ssm_dtype)
        return cls((conv, ssm))

    @classmethod
    def of(cls, *kinds: LayerKind) -> StateSpec:
        """Describe a model by the kinds of its layers that have a state.

        Args:
            *kinds: At least one kind; names are different.

        Raises:
            InvalidArgumentError: There is no kind, two have one name, or one is no ``LayerKind``.
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
        """The kinds of layers, taken from the tensors' names, in the order of first tensors.

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
        """Whether the spec is equal to one that ``StateSpec.mamba`` makes."""
        conv, ssm = self.tensors[0], self.tensors[-1]
        names = [tensor.name for tensor in self.tensors]
        return names == ["conv", "ssm"] and conv.num_layers == ssm.num_layers

    @property
    def bytes_per_slot(self) -> int:
        """Size in bytes of one state: all tensors, all layers."""
        return sum(tensor.num_layers * tensor.layer_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class SlotQuantization:
    """Recurrent states in int8, with one float32 scale for each head and state column.

    For a column [head_dim] of a head's state, let ``a`` be the maximum of all magnitudes and
    2**-100. The scale is ``a * (1 / 127)``. The code of ``x`` is ``x * (127 / a)``, rounded to
    nearest, halves to even. All is computed in float32. A column with an infinity or a NaN in
    float32 is restored as NaN throughout, because no code represents them.

    Attributes:
        tensors: Names in the ``StateSpec`` of the tensors to quantise. Others are stored unchanged.

    Raises:
        InvalidArgumentError: ``tensors`` are no different names.
    """

    tensors: tuple[str, ...] = ("ssm",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", check_names("tensors", self.tensors))

    def scales_of(self, name: str) -> str | None:
        """Return the name of a tensor's scales in a slot; None if the tensor is not quantised."""
        return f"{name}_scales" if name in self.tensors else None

    def slot_spec(self, spec: StateSpec) -> StateSpec:
        """Return the spec of quantised slots: codes in int8, each followed by "<name>_scales".

        Args:
            spec: Spec of live states. Each of ``tensors`` is floating-point and
                [heads, head_dim, state_dim].

        Raises:
            InvalidArgumentError: A tensor is not in the spec, or has another dtype or shape.
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
    """Shape and dtype of the keys and values of the attention layers.

    Attributes:
        num_layers: Number of attention layers of the model; may be 0.
        num_kv_heads: Number of heads of keys, and of values.
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
        """Return the size in bytes of ``block_size_tokens`` tokens' keys and values, all layers.

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
        """Allocate a KV cache filled with zeros.

        Returns:
            [num_layers, 2, num_blocks, block_size_tokens, num_kv_heads, head_dim] of the spec's
            dtype on ``device``; index 0 of the second axis holds keys, index 1 values.

        Raises:
            InvalidArgumentError: A count is not a positive int.
            BudgetError: The device has not enough memory.
        """
        num_blocks = check_int("num_blocks", num_blocks, minimum=1)
        block_size_tokens = check_int("block_size_tokens", block_size_tokens, minimum=1)
        num_bytes = num_blocks * self.bytes_per_block(block_size_tokens)
        check_device_room(num_bytes, {"num_blocks": num_blocks}, device)
        token_shape = (self.num_kv_heads, self.head_dim)
        shape = (self.num_layers, 2, num_blocks, block_size_tokens, *token_shape)
        return torch.zeros(shape, dtype=self.dtype, device=device)


def slots_in_budget(budget_gb: float, spec: StateSpec) -> int:
    """Return the number of slots that fit into ``budget_gb`` GiB (2**30 bytes).

    Returns:
        At least 1; or 0 if the spec has no layers, so that there is nothing to save.

    Raises:
        BudgetError: No slot fits into the budget.
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
