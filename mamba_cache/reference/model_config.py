"""The shape of the reference hybrid model, its random weights, and the norm of its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from mamba_cache._checks import INT32_MAX, check_int
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states import KVCacheSpec, StateSpec

__all__ = ["HybridModelConfig", "WeightMaker", "rms_norm", "state_dtype_of"]

_NORM_EPS = 1e-5


def state_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and SSM states of a model with weights of ``dtype``.

    It is at least float32. If a state were rounded when saved to a slot, a hit would differ from a
    miss.
    """
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridModelConfig:
    """Sizes of a hybrid model of Mamba-2, attention and MLP layers.

    Attributes:
        layer_pattern: One character for each layer: "M" Mamba-2, "*" attention, "-" MLP.
        hidden_size: Width of the residual stream.
        num_attention_heads: Query heads; a multiple of ``num_kv_heads``.
        num_kv_heads: Key and value heads.
        attention_head_dim: Width of one attention head.
        mamba_num_heads: Heads of a Mamba-2 layer; a multiple of ``num_groups``.
        mamba_head_dim: Width of one Mamba-2 head.
        ssm_state_size: State of one channel of a Mamba-2 head.
        num_groups: Groups of Mamba-2 heads that share B and C.
        conv_kernel: Taps of the causal convolution; a conv state keeps the last
            ``conv_kernel - 1`` inputs.
        ssm_chunk_size: Tokens of one chunk of the SSM scan.
        mlp_size: Width of an MLP's hidden layer.
        vocab_size: Token ids; 256 for bytes.

    Raises:
        InvalidArgumentError: A size is out of range, or two sizes do not fit together.
    """

    layer_pattern: str = "M*M-"
    hidden_size: int = 64
    num_attention_heads: int = 4
    num_kv_heads: int = 2
    attention_head_dim: int = 16
    mamba_num_heads: int = 8
    mamba_head_dim: int = 16
    ssm_state_size: int = 16
    num_groups: int = 2
    conv_kernel: int = 4
    ssm_chunk_size: int = 64
    mlp_size: int = 128
    vocab_size: int = 256

    def __post_init__(self) -> None:
        is_text = isinstance(self.layer_pattern, str)
        if not is_text or not self.layer_pattern or set(self.layer_pattern) - set("M*-"):
            raise InvalidArgumentError(
                f"layer_pattern must be one or more of 'M', '*' and '-', got {self.layer_pattern!r}"
            )
        for field in fields(self):
            if field.type == "int":
                minimum = 2 if field.name == "conv_kernel" else 1
                size = check_int(
                    field.name, getattr(self, field.name), minimum=minimum, maximum=INT32_MAX
                )
                object.__setattr__(self, field.name, size)
        for name, of in (
            ("num_attention_heads", "num_kv_heads"),
            ("mamba_num_heads", "num_groups"),
        ):
            value, unit = getattr(self, name), getattr(self, of)
            if value % unit:
                raise InvalidArgumentError(
                    f"{name} must be a multiple of {of} ({unit}), got {value}"
                )

    @property
    def mamba_inner_size(self) -> int:
        """Channels of a Mamba-2 layer, over all its heads."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of a Mamba-2 layer's convolution: x, B and C together."""
        return self.mamba_inner_size + 2 * self.num_groups * self.ssm_state_size

    def state_spec(self, dtype: torch.dtype) -> StateSpec:
        """Return the spec of a slot for a model with weights of ``dtype``."""
        return StateSpec.mamba(
            self.layer_pattern.count("M"),
            (self.conv_dim, self.conv_kernel - 1),
            (self.mamba_num_heads, self.mamba_head_dim, self.ssm_state_size),
            dtype,
            state_dtype_of(dtype),
        )

    def kv_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """Return the spec of the KV cache for a model with weights of ``dtype``."""
        return KVCacheSpec(
            self.layer_pattern.count("*"), self.num_kv_heads, self.attention_head_dim, dtype
        )


class WeightMaker:
    """Draws a model's weights; a seed gives the same weights for every dtype and device."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def linear(self, num_outputs: int, num_inputs: int) -> Tensor:
        """Draw [num_outputs, num_inputs] weights that preserve the scale of the input."""
        return self.normal(num_outputs, num_inputs, scale=1 / math.sqrt(num_inputs))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw normal weights of standard deviation ``scale``."""
        drawn = torch.randn(*shape, generator=self._generator, dtype=torch.float64, device="cpu")
        return (drawn * scale).to(self.device, self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Draw uniform float64 numbers; the caller converts them to the final dtype."""
        drawn = torch.rand(*shape, generator=self._generator, dtype=torch.float64, device="cpu")
        return (low + (high - low) * drawn).to(self.device)


def rms_norm(inputs: Tensor, weight: Tensor) -> Tensor:
    """Scale the last axis to a root mean square of 1, then by ``weight``; sum in at least float32.

    The result has the dtype of ``weight``.
    """
    wide = inputs.to(state_dtype_of(inputs.dtype))
    scaled = F.rms_norm(wide, wide.shape[-1:], eps=_NORM_EPS)
    return scaled.to(weight.dtype) * weight
