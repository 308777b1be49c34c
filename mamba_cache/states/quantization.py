"""Slots that keep recurrent states in int8: the choice, and what such a slot holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mamba_cache._checks import check_names
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states.spec import StateSpec, StateTensorSpec

__all__ = ["SlotQuantization"]

_STATE_DIMS = 3
_SCALES = "_scales"


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
        return name + _SCALES if name in self.tensors else None

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
            if name in self.tensors:
                scales = (shape[0], shape[2])
                parts.append(StateTensorSpec(name, layers, shape, torch.int8))
                parts.append(StateTensorSpec(name + _SCALES, layers, scales, torch.float32))
            else:
                parts.append(tensor)
        return StateSpec(tuple(parts))
