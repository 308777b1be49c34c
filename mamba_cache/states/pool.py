"""Room for many states: tensors only, no bookkeeping."""

from __future__ import annotations

import torch

from mamba_cache._checks import INT32_MAX, check_int, check_kind
from mamba_cache._torch import check_device_room, outside_inference_mode
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states.spec import StateSpec

__all__ = ["StatePool", "as_device"]


def as_device(device: torch.device | str) -> torch.device:
    """Return the ``torch.device`` of a name, checked.

    Raises:
        InvalidArgumentError: PyTorch knows no such device, or cannot use it here.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"device must name a PyTorch device, got {device!r}") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        is_built = torch.version.cuda or torch.version.hip
        why = "PyTorch finds no GPU" if is_built else "this PyTorch is built without CUDA"
        raise InvalidArgumentError(f"device {str(found)!r} cannot be used: {why}; use 'cpu'")
    return found


class StatePool:
    """Tensors for ``num_rows`` states, initially zero.

    There is one pool for live states and one for slots. The pool does not track which rows are in
    use.

    Attributes:
        spec: The tensors of one state.
        num_rows: Number of states that the pool has room for.
        device: Device of the tensors.
        tensors: By name, [num_layers, num_rows, *shape] of the tensor's dtype. Their addresses
            never change.

    Raises:
        InvalidArgumentError: ``num_rows`` is not an int >= 0, ``spec`` is no ``StateSpec``, or the
            device is unknown or cannot be used.
        BudgetError: The device has not enough memory.
    """

    @outside_inference_mode
    def __init__(self, spec: StateSpec, num_rows: int, *, device: torch.device | str) -> None:
        check_kind("spec", spec, StateSpec)
        self.spec = spec
        self.num_rows = check_int("num_rows", num_rows, minimum=0, maximum=INT32_MAX)
        device = as_device(device)
        check_device_room(self.num_rows * spec.bytes_per_slot, {"num_rows": num_rows}, device)
        self.tensors: dict[str, torch.Tensor] = {
            tensor.name: torch.zeros(
                (tensor.num_layers, self.num_rows, *tensor.shape), dtype=tensor.dtype, device=device
            )
            for tensor in spec.tensors
        }
        self.device = next(iter(self.tensors.values())).device

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the tensor called ``name``, [num_layers, num_rows, *shape].

        Raises:
            InvalidArgumentError: The spec has no such tensor.
        """
        if name not in self.tensors:
            raise InvalidArgumentError(f"a state has the tensors {[*self.tensors]}, got {name!r}")
        return self.tensors[name]

    def zero_(self) -> None:
        """Set all states to zero."""
        for tensor in self.tensors.values():
            tensor.zero_()
