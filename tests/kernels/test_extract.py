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
WHOLE = "give slot_conv, live_conv and conv_input together"
INT8 = {"slot_ssm": torch.zeros(5, *SSM, dtype=torch.int8), "slot_scales": torch.zeros(5, 2, 5)}
REFUSED = [
    # Rounded, it would be another state.
    *[({name: torch.zeros(SHAPES[name]).bfloat16()}, "must be") for name in SHAPES],
    *[
        ({name: torch.zeros(shape)}, f"{name} must|slot_ssm must")
        for name, shape in (
            ("slot_ssm", (4, *SSM)), ("chunk_states", (9, 2, 3, 4)), ("conv_input", (40, 7)),
            ("live_conv", (7, 6, 3)), ("chunk_states", ()), ("live_conv", ()),
        )
    ],
    ({name: torch.zeros(SHAPES[name]).unsqueeze(-1) for name in ("slot_conv", "live_conv")}, "W"),
    *[({name: None}, WHOLE) for name in SHAPES],
    (dict.fromkeys(SHAPES), WHOLE),
    ({"slot_conv": torch.zeros(5, 4, 6).mT}, "slot_conv must be .* with contiguous inner axes"),
    (INT8 | {"slot_ssm": torch.zeros(5, *SSM)}, "slot_ssm must be .* of torch.int8"),
    (INT8 | {"slot_scales": torch.zeros(5, 2, 5).double()}, "slot_scales must be"),
    (INT8 | {"slot_scales": torch.zeros(5, 2, 4)}, "slot_scales must be"),
    (INT8 | {"slot_scales": torch.zeros(4, 2, 5)}, "slot_scales must be"),
    (INT8 | {"slot_scales": torch.zeros(5, 5, 2).mT}, "slot_scales must be"),
    (INT8 | {"chunk_states": torch.zeros(9, 6, 5)}, r"must be \[heads, head_dim, state_dim\]"),
    ({"live_conv": torch.zeros(7, 6, 4, device="meta")}, "one device"),
    ({"chunk_states": [0]}, "states must be tensors"),
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
