"""Extractions of checkpoint states, by kernel and twin: equal to a loop, or refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states import CHECKPOINT_FIELDS, PAD_SLOT_ID, plan_extraction
from mamba_cache.states.kernels import extract

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
PADDING = (-1, -1, -1, -1, PAD_SLOT_ID)
NUM_TOKENS = 30
WINDOW, STATE = ("slot_conv", "live_conv", "conv_input"), ("slot_ssm", "chunk_states")


def as_bytes(tensor):
    if tensor is None:
        return torch.empty(0)
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)


@st.composite
def layers(draw):
    """Draw the tensors of one layer: random bits, some as views of wider memory."""
    conv_dim = draw(st.sampled_from([1, 6, 16, 300]))
    width = draw(st.integers(1, 5))
    state = draw(st.sampled_from([(), (1,), (7, 3), (2, 3, 5), (4, 16, 33), (2, 1, 3, 2)]))
    conv_dtype, ssm_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    num_slots, num_rows, num_chunks = (draw(st.integers(0, 6)) for _ in range(3))
    num_tokens = draw(st.sampled_from([0, NUM_TOKENS, NUM_TOKENS]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def random(shape, dtype):
        size = math.prod(shape)
        bits = torch.from_numpy(rng.integers(0, 256, (size + 1) * dtype.itemsize, np.uint8))
        return bits.view(dtype)[:size].view(shape).to(DEVICE)

    def pitched(shape, dtype):
        step = draw(st.integers(1, 2))
        return random((shape[0] * step, *shape[1:]), dtype)[::step]

    # A token shift keeps one input, and may do so without an axis for it.
    window = draw(st.sampled_from([(conv_dim, width), (conv_dim, width), (conv_dim,)]))
    inputs = random((num_tokens, conv_dim + draw(st.integers(0, 3))), conv_dtype)[:, -conv_dim:]
    layer = {
        "slot_conv": pitched((num_slots, *window), conv_dtype),
        "slot_ssm": pitched((num_slots, *state), ssm_dtype),
        "live_conv": pitched((num_rows, *window), conv_dtype),
        "chunk_states": pitched((num_chunks, *state), ssm_dtype),
        "conv_input": draw(st.sampled_from([inputs, inputs.T.contiguous().T])),
    }
    # A short convolution keeps nothing else, and some recurrences have no convolution.
    absent = draw(st.sampled_from([(), (), WINDOW, STATE]))
    return {name: None if name in absent else tensor for name, tensor in layer.items()}


@st.composite
def checkpoints(draw, layer):
    """Draw (chunk, conv end, sequence start, row, slot) of each entry, with padding."""
    sizes = {name: 1 if tensor is None else len(tensor) for name, tensor in layer.items()}
    num_slots = max(sizes["slot_conv"], sizes["slot_ssm"])
    # Without rows to read or slots to write, all entries are padding.
    slots = []
    if all(sizes.values()):
        slots = draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=6))
    entries = []
    for slot in slots:
        start = draw(st.integers(0, NUM_TOKENS - 1))
        end = draw(st.integers(start + 1, NUM_TOKENS))
        chunk = draw(st.integers(0, sizes["chunk_states"] - 1))
        entries.append((chunk, end, start, draw(st.integers(0, sizes["live_conv"] - 1)), slot))
    entries += [PADDING] * draw(st.integers(0, 3))
    return draw(st.permutations(entries))


@pytest.mark.parametrize(
    ("backend", "entries_per_program"), [("torch", 1), ("triton", 1), ("triton", 2)]
)
@given(st.data(), layers(), st.sampled_from([torch.int32, torch.int64]))
def test_every_bit_of_every_slot(backend, entries_per_program, data, layer, index_dtype):
    entries = data.draw(checkpoints(layer))
    expected = {name: as_bytes(tensor).clone() for name, tensor in layer.items()}
    for chunk, end, start, row, slot in entries:
        if slot != PAD_SLOT_ID and layer["slot_conv"] is not None:
            old = layer["live_conv"][row]
            inputs = torch.cat([old.view(len(old), -1).T, layer["conv_input"][start:end]])
            window = inputs[-old.view(len(old), -1).shape[1] :].T
            expected["slot_conv"][slot] = as_bytes(window.reshape(old.shape))
        if slot != PAD_SLOT_ID and layer["slot_ssm"] is not None:
            expected["slot_ssm"][slot] = as_bytes(layer["chunk_states"][chunk])
    table = torch.tensor(entries, dtype=index_dtype, device=DEVICE).reshape(
        -1, len(CHECKPOINT_FIELDS)
    )
    fields = tuple(table.T.contiguous())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract, "entries_per_program", lambda *_, **__: entries_per_program)
        plan_extraction(**layer, fields=fields, backend=backend)()
    for name, tensor in layer.items():
        assert torch.equal(as_bytes(tensor), expected[name]), name


SSM = (2, 3, 5)
SHAPES = {
    "slot_conv": (5, 6, 4), "slot_ssm": (5, *SSM), "live_conv": (7, 6, 4),
    "chunk_states": (9, *SSM), "conv_input": (40, 6),
}  # fmt: skip
INT8 = {"slot_ssm": torch.zeros(5, *SSM, dtype=torch.int8), "slot_scales": torch.zeros(5, 2, 5)}
HANDED_OVER = ("chunk_states", "conv_input")
REFUSED = [
    # Rounding would change the state.
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
    """Regression: without live rows the twin raised an IndexError."""
    given = {name: torch.ones(shape, device=device) for name, shape in SHAPES.items()}
    names = ("slot_conv", "slot_ssm") if empty.startswith("slot") else (empty,)
    given |= {name: given[name][:0] for name in names}
    padding = torch.full((2,), -1, dtype=torch.int32, device=device)
    plan_extraction(**given, fields=(padding,) * len(CHECKPOINT_FIELDS), backend=backend)()
    assert all((tensor == 1).all() for tensor in given.values())
