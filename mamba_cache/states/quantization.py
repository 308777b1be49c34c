"""Slots that keep recurrent states in 8 bits: the choice, and what such a slot holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mamba_cache._checks import INT32_MAX, check_choice, check_int, check_names
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states.kernels import quantize_torch
from mamba_cache.states.spec import StateSpec, StateTensorSpec

__all__ = ["SlotQuantization", "SlotRounding", "dequantize_states", "quantize_states"]

SlotRounding = Literal["nearest", "stochastic"]
"""How a state's value becomes one of 255 codes."""

_STATE_DIMS = 3
_SCALES = "_scales"


@dataclass(frozen=True, slots=True)
class SlotQuantization:
    """Recurrent states in int8, with one float32 scale for each head and state column.

    In a column [head_dim] of a head's state, ``a`` is the largest magnitude, or 2**-100 if that is
    more. Its scale is ``a * (1 / 127)``, and the code of ``x`` is ``x * (127 / a)``, rounded, all
    in float32. A column that holds an infinity or a NaN, as float32 has it, comes back as NaN
    throughout: no code stands for either, and no other number would be honest.

    Attributes:
        rounding: "nearest" rounds halves to even. "stochastic" rounds up as often as the code is
            near to the higher one, so that errors average out; chance is a hash of the seed, the
            value and its place in the layer's state, so a state is stored alike in every slot.
        seed: For "stochastic"; from 0 to 2**31 - 1.
        tensors: Which tensors of a state, by the names in a ``StateSpec``. All others are kept as
            they are.

    Raises:
        InvalidArgumentError: The rounding is unknown, the seed out of range, or ``tensors`` are no
            different names.
    """

    rounding: SlotRounding = "nearest"
    seed: int = 0
    tensors: tuple[str, ...] = ("ssm",)

    def __post_init__(self) -> None:
        check_choice("rounding", self.rounding, ("nearest", "stochastic"))
        object.__setattr__(self, "seed", check_int("seed", self.seed, minimum=0, maximum=INT32_MAX))
        object.__setattr__(self, "tensors", check_names("tensors", self.tensors))

    @property
    def hash_seed(self) -> int | None:
        """The seed where it is used; None: nothing is left to chance."""
        return self.seed if self.rounding == "stochastic" else None

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
        return StateSpec(tuple(part for tensor in spec.tensors for part in self._parts_of(tensor)))

    def _parts_of(self, tensor: StateTensorSpec) -> tuple[StateTensorSpec, ...]:
        """Return what a slot holds of a tensor."""
        scales = self.scales_of(tensor.name)
        if scales is None:
            return (tensor,)
        heads, _, state_dim = tensor.shape
        return (
            StateTensorSpec(tensor.name, tensor.num_layers, tensor.shape, torch.int8),
            StateTensorSpec(scales, tensor.num_layers, (heads, state_dim), torch.float32),
        )


def quantize_states(
    states: torch.Tensor, quantization: SlotQuantization
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise SSM states, as they are stored in slots.

    Args:
        states: [..., heads, head_dim, state_dim], floating-point.
        quantization: How.

    Returns:
        Codes, int8, of the states' shape, and scales, float32 [..., heads, state_dim].
    """
    return quantize_torch.quantize(states, quantization.hash_seed)


def dequantize_states(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Turn codes back into states of ``dtype``, as they are restored: code times scale.

    Args:
        codes: [..., heads, head_dim, state_dim] int8.
        scales: [..., heads, state_dim] float32.
        dtype: Of the live states.
    """
    return quantize_torch.dequantize(codes, scales, dtype)
