"""Extractions that are refused; tests/property/test_extraction.py holds the others to a loop."""

import pytest
import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states import CHECKPOINT_FIELDS, plan_extraction

SSM = (2, 3, 5)
SHAPES = {
    "slot_conv": (5, 6, 4), "slot_ssm": (5, *SSM), "live_conv": (7, 6, 4),
    "chunk_states": (9, *SSM), "conv_input": (40, 6),
}  # fmt: skip
INT8 = {"slot_ssm": torch.zeros(5, *SSM, dtype=torch.int8), "slot_scales": torch.zeros(5, 2, 5)}
HANDED_OVER = ("chunk_states", "conv_input")
REFUSED = [
    # Rounded, it would be another state.
    *[({name: torch.zeros(SHAPES[name]).bfloat16()}, f"{name} must be") for name in HANDED_OVER],
    *[({name: torch.zeros(SHAPES[name], device="meta")}, "on cpu, got") for name in HANDED_OVER],
    *[
        ({name: torch.zeros(shape)}, f"{name} must be")
        for name, shape in (
            ("chunk_states", (9, 2, 3, 4)), ("chunk_states", (9, 30)), ("conv_input", (40, 7)),
            ("conv_input", (40,)), ("conv_input", (40, 6, 4)),
        )
    ],
    ({"chunk_states": torch.zeros(9, 2, 5, 3).mT}, "chunk_states must have contiguous inner axes"),
    (INT8 | {"chunk_states": torch.zeros(9, 6, 5)}, "chunk_states must be"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=range(len(REFUSED)))
def test_tensors_that_do_not_fit_are_refused(changes, message):
    given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    fields = (torch.zeros(1, dtype=torch.int32),) * len(CHECKPOINT_FIELDS)
    plan_extraction(**given, fields=fields)()
    with pytest.raises(InvalidArgumentError, match=message):
        plan_extraction(**given | changes, fields=fields)


@pytest.mark.parametrize("empty", SHAPES)
def test_padding_where_there_is_nothing_to_read_or_write(backend, device, empty):
    """Without live rows the twin raised an IndexError."""
    given = {name: torch.ones(shape, device=device) for name, shape in SHAPES.items()}
    names = ("slot_conv", "slot_ssm") if empty.startswith("slot") else (empty,)
    given |= {name: given[name][:0] for name in names}
    padding = torch.full((2,), -1, dtype=torch.int32, device=device)
    plan_extraction(**given, fields=(padding,) * len(CHECKPOINT_FIELDS), backend=backend)()
    assert all((tensor == 1).all() for tensor in given.values())
