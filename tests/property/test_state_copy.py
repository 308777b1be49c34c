"""State copies over drawn tensors and rows: kernel and twin leave what a plain loop leaves.

The kernel runs in Triton's interpreter, or on the GPU if there is one.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.states import PAD_SLOT_ID, ZERO_SOURCE, StateCopier
from mamba_cache.states.kernels import copy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool]


@st.composite
def pairs_of_rows(draw, num_sources, num_destinations):
    """Rows to copy: each destination once, some pairs padded, some sources "zero"."""
    destinations = draw(st.lists(st.integers(0, num_destinations - 1), unique=True, max_size=6))
    source = st.integers(ZERO_SOURCE, num_sources - 1)
    pairs = [(draw(source), destination) for destination in destinations]
    pairs += [(draw(source), PAD_SLOT_ID) for _ in range(draw(st.integers(0, 2)))]
    return draw(st.permutations(pairs))


@st.composite
def tensors(draw, kinds, num_rows, seed):
    """One tensor a kind: rows outermost, layers outermost, or with room after each row."""
    made = []
    for index, (layers, inner, dtype) in enumerate(kinds):
        order = draw(st.sampled_from(["layers", "rows", "pitched"]))
        outer = (num_rows, layers) if order == "rows" else (layers, num_rows)
        pitch = math.prod(inner) + (draw(st.integers(1, 5)) if order == "pitched" else 0)
        row = torch.empty(inner).stride()
        strides = torch.empty((*outer, pitch), device="meta").stride()[:2]
        size, shift = math.prod(outer) * pitch, draw(st.sampled_from([0, 1, 2, 4]))
        room = (size + shift + 1) * dtype.itemsize
        bits = np.random.default_rng([seed, index]).integers(0, 256, room, np.uint8)
        storage = torch.from_numpy(bits).to(DEVICE).view(dtype)
        view = storage.as_strided((*outer, *inner), (*strides, *row), shift)
        made.append(view.transpose(0, 1) if order == "rows" else view)
    return made


def as_bytes(tensor):
    return tensor.unsqueeze(-1).view(torch.uint8).cpu().numpy().copy()


KINDS = st.lists(
    st.tuples(
        st.integers(0, 3),
        # The last are more than one tile, as wide words and as narrow ones.
        st.lists(st.integers(1, 5), max_size=3).map(tuple) | st.sampled_from([(4097,), (9001,)]),
        st.sampled_from(DTYPES),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize(
    ("backend", "entries_per_program"), [("torch", 1), ("triton", 1), ("triton", 2)]
)
@given(st.data(), KINDS, st.integers(0, 5), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_every_byte_is_as_the_rows_say(
    backend, entries_per_program, data, kinds, num_sources, num_destinations, seed
):
    sources = data.draw(tensors(kinds, num_sources, seed))
    destinations = data.draw(tensors(kinds, num_destinations, seed + 1))
    pairs = data.draw(pairs_of_rows(num_sources, num_destinations))
    read = [as_bytes(tensor) for tensor in sources]
    expected = [as_bytes(tensor) for tensor in destinations]
    for source, destination in pairs:
        for from_, to in zip(read, expected, strict=True):
            if PAD_SLOT_ID not in (source, destination):
                to[:, destination] = 0 if source == ZERO_SOURCE else from_[:, source]
    copier = StateCopier(sources, destinations, backend=backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy, "entries_per_program", lambda *_, **__: entries_per_program)
        copier.copy([source for source, _ in pairs], [destination for _, destination in pairs])
    for tensor, want in zip(destinations, expected, strict=True):
        np.testing.assert_array_equal(as_bytes(tensor), want)
    for tensor, want in zip(sources, read, strict=True):
        np.testing.assert_array_equal(as_bytes(tensor), want)
