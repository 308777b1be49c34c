"""Batched state copies, by the kernel and its PyTorch twin, compared by bits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states import PAD_SLOT_ID, ZERO_SOURCE, StateCopier
from mamba_cache.states.kernels import copy

# (layers, inner shape, dtype) of the tensors of one state.
HYBRID = [(3, (10, 4), torch.bfloat16), (3, (2, 5, 8), torch.float32)]
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool]


def as_bytes(tensor):
    return tensor.unsqueeze(-1).view(torch.uint8)


def random_like(tensor, generator):
    """Fill with random bytes, including NaNs of every payload and bools from 0 to 255."""
    data = as_bytes(tensor)
    data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=generator))
    return tensor


def random_states(kinds, rows, generator, device="cpu"):
    shapes = [((layers, rows, *inner), dtype) for layers, inner, dtype in kinds]
    empty = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
    return [random_like(tensor, generator) for tensor in empty]


def snapshot(tensors):
    return [as_bytes(tensor).cpu().clone() for tensor in tensors]


def check_copy(sources, destinations, source_rows, destination_rows, backend):
    """Copy, and compare every byte of both sides with a loop over the pairs."""
    sources_before, expected = snapshot(sources), snapshot(destinations)
    for source, destination in zip(source_rows, destination_rows, strict=True):
        for read, write in zip(sources_before, expected, strict=True):
            if PAD_SLOT_ID not in (source, destination):
                write[:, destination] = 0 if source == ZERO_SOURCE else read[:, source]
    copier = StateCopier(sources, destinations, backend=backend)
    copier.copy(source_rows, destination_rows)
    for tensor, want in zip(snapshot(destinations), expected, strict=True):
        assert torch.equal(tensor, want)
    if sources[0] is not destinations[0]:
        for tensor, want in zip(snapshot(sources), sources_before, strict=True):
            assert torch.equal(tensor, want)


@st.composite
def pairs_of_rows(draw, num_sources, num_destinations):
    """Draw rows to copy: each destination once, some pairs padded, some sources "zero"."""
    destinations = draw(st.lists(st.integers(0, num_destinations - 1), unique=True, max_size=6))
    source = st.integers(ZERO_SOURCE, num_sources - 1)
    pairs = [(draw(source), destination) for destination in destinations]
    pairs += [(draw(source), PAD_SLOT_ID) for _ in range(draw(st.integers(0, 2)))]
    return draw(st.permutations(pairs))


@st.composite
def tensors(draw, kinds, num_rows, seed, device):
    """Draw one tensor per kind: rows outermost, layers outermost, or gaps after each row."""
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
        storage = torch.from_numpy(bits).to(device).view(dtype)
        view = storage.as_strided((*outer, *inner), (*strides, *row), shift)
        made.append(view.transpose(0, 1) if order == "rows" else view)
    return made


KINDS = st.lists(
    st.tuples(
        st.integers(0, 3),
        # The last ones have more than one tile, in wide words and in narrow ones.
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
def test_every_byte_equals_a_loop_over_the_rows(
    backend, entries_per_program, device, data, kinds, num_sources, num_destinations, seed
):
    """Tensors, strides and rows are drawn."""
    sources = data.draw(tensors(kinds, num_sources, seed, device))
    destinations = data.draw(tensors(kinds, num_destinations, seed + 1, device))
    pairs = data.draw(pairs_of_rows(num_sources, num_destinations))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy, "entries_per_program", lambda *_, **__: entries_per_program)
        check_copy(sources, destinations, *([each[i] for each in pairs] for i in (0, 1)), backend)


def test_offsets_past_int32(backend, device, generator):
    """Rows 2**31 and more bytes apart; on the CPU the memory between them is never touched."""
    far = torch.empty(2**32 + 128, dtype=torch.uint8, device=device)
    far_rows = far.as_strided((1, 3, 64), (0, 2**31 + 16, 1))
    near_rows = torch.empty(1, 3, 64, dtype=torch.uint8, device=device)
    rows = [random_like(near_rows, generator)], [random_like(far_rows, generator)]
    check_copy(*rows, [2, 0], [1, 2], backend)
    check_copy(rows[1], rows[0], [2, 1], [0, 1], backend)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("as_rows", [np.asarray, torch.from_numpy])
def test_rows_as_numpy_or_tensor(dtype, as_rows, backend, device, generator):
    sources = random_states(HYBRID, 5, generator, device)
    destinations = random_states(HYBRID, 7, generator, device)
    rows = [as_rows(np.array(values, dtype)) for values in ([3, -1, -2], [6, 0, 2])]
    StateCopier(sources, destinations, backend=backend).copy(*rows)
    for source, destination in zip(snapshot(sources), snapshot(destinations), strict=True):
        assert torch.equal(destination[:, 6], source[:, 3])
        assert destination[:, 2].count_nonzero() == 0


@pytest.mark.parametrize(
    ("source_rows", "destination_rows", "message"),
    [
        ([0, 1], [0], "equally many, got 2 and 1"),
        ([0, 5], [0, 1], r"source_rows must be in \[-2, 5\), got \[5\]"),
        ([0, 1], [0, 7], r"destination_rows must be in \[-1, 7\), got \[7\]"),
        ([0, 1, -1, 3], [2, 4, 2, 4], r"listed once, got \[4\] repeatedly"),
        ([0.0, 1.0], [0, 1], "source_rows must be ints, got 0.0"),
        ([True, False], [0, 1], "source_rows must be ints, got True"),
    ],
)
def test_bad_rows_raise_and_copy_nothing(
    source_rows, destination_rows, message, backend, device, generator
):
    destinations = random_states(HYBRID, 7, generator, device)
    before = snapshot(destinations)
    copier = StateCopier(random_states(HYBRID, 5, generator, device), destinations, backend=backend)
    with pytest.raises(InvalidArgumentError, match=message):
        copier.copy(source_rows, destination_rows)
    for tensor, want in zip(snapshot(destinations), before, strict=True):
        assert torch.equal(tensor, want)


def test_row_both_read_and_written_in_place_is_refused(backend, device, generator):
    states = random_states(HYBRID, 7, generator, device)
    before = snapshot(states)
    copier = StateCopier(states, states, backend=backend)
    with pytest.raises(InvalidArgumentError, match=r"both read and written, got \[3\]"):
        copier.copy([0, 3], [3, 5])
    for tensor, want in zip(snapshot(states), before, strict=True):
        assert torch.equal(tensor, want)
    check_copy(states, states, [0, 3, 0, ZERO_SOURCE], [3, PAD_SLOT_ID, 5, 6], backend)


def rows_of(rows, inner=(4,), dtype=torch.float32, layers=2):
    return torch.ones(layers, rows, *inner, dtype=dtype)


STATES = rows_of(3, (2, 5, 7))
CODES, SCALES = STATES.to(torch.int8), rows_of(3, (2, 7))


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([], [], "at least one source"),
        ([rows_of(3)], [], "as many destinations, got 1 and 0"),
        ([rows_of(3)], [rows_of(3, dtype=torch.bfloat16)], "agree in dtype"),
        ([rows_of(3)], [rows_of(3, inner=(2, 2))], "inner shape"),
        ([rows_of(3)], [rows_of(3, layers=1)], "layers"),
        ([rows_of(3), rows_of(4)], [rows_of(3), rows_of(3)], r"sources .* rows, got \[3, 4\]"),
        ([rows_of(3), rows_of(3)], [rows_of(3), rows_of(2)], r"destinations .* got \[3, 2\]"),
        ([rows_of(3, (4, 5)).mT], [rows_of(3, (5, 4))], "sources must be .* contiguous inner"),
        ([rows_of(3)], [rows_of(3, (8,))[..., ::2]], "destinations must be .* contiguous inner"),
        ([torch.ones(3)], [torch.ones(3)], r"\[num_layers, rows, \*inner\]"),
        ([rows_of(3)], [rows_of(3).to("meta")], r"one device, got \['cpu', 'meta'\]"),
        ([STATES], [STATES.bfloat16(), SCALES], "as many"),
        ([STATES], [CODES, SCALES[..., :3].contiguous()], "quantised states must"),
        ([STATES], [CODES[:, :2].contiguous(), SCALES], "equally many rows"),
        ([STATES.int()], [CODES, SCALES], "as many"),
        ([STATES.flatten(3)], [CODES, SCALES], "quantised states must"),
        ([STATES.flatten(3)], [CODES.flatten(3), SCALES], "quantised states must"),
        ([STATES], [CODES], "agree in dtype"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(sources, destinations, message):
    with pytest.raises(InvalidArgumentError, match=message):
        StateCopier(sources, destinations)
    with pytest.raises(InvalidArgumentError, match=r"must|as many"):
        StateCopier(destinations, sources)


def test_copier_keeps_its_tensors_alive(generator):
    """The plan holds raw addresses, so the copier must keep the tensors alive."""
    sources, destinations = random_states(HYBRID, 2, generator), random_states(HYBRID, 2, generator)
    expected = snapshot(sources)
    copier = StateCopier(sources, destinations)
    sources.clear()
    copier.copy([1], [0])
    for tensor, want in zip(snapshot(destinations), expected, strict=True):
        assert torch.equal(tensor[:, 0], want[:, 1])
