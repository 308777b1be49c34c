"""The reference model's scan and convolution, however a batch is packed and cut.

Whole models, packed and cut in any way, are compared by tests/property/test_context_machine.py.
"""

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from packed_steps import ssd_naive

from mamba_cache.metadata import compute_chunk_metadata
from mamba_cache.reference.batch import place_windows
from mamba_cache.reference.mamba import causal_conv1d, causal_conv1d_step
from mamba_cache.reference.ssd import ChunkLayout, SSDInputs, ssd_chunk_scan, ssd_step

SEEDS = st.integers(0, 2**32 - 1)
# (tokens before this step, tokens of this step) of each sequence.
SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=4)


def drawing(seed):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return normal


def draw_ssd_inputs(normal, num_tokens, groups, heads_per_group):
    heads = groups * heads_per_group
    return SSDInputs(
        x=normal(num_tokens, heads, 3),
        dt=F.softplus(normal(num_tokens, heads) - 1),
        a=-normal(heads).exp(),
        b=normal(num_tokens, groups, 4),
        c=normal(num_tokens, groups, 4),
    )


def cut(inputs, tokens):
    return SSDInputs(
        inputs.x[tokens], inputs.dt[tokens], inputs.a, inputs.b[tokens], inputs.c[tokens]
    )


def chunk_layout(spans, chunk_size):
    starts, computed = starts_of(spans), [computed for computed, _ in spans]
    parts = compute_chunk_metadata(starts.numpy(), np.array(computed), chunk_size)
    ends, sequences, last = (torch.from_numpy(part).long() for part in parts)
    return ChunkLayout.build(ends, sequences, last, chunk_size, int(ends[-1])), ends[1:]


def starts_of(spans):
    return torch.tensor([0, *(count for _, count in spans)]).cumsum(0)


@given(SPANS, st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), SEEDS)
def test_chunked_scan_equals_the_recurrence(spans, chunk_size, groups, heads_per_group, seed):
    normal, starts = drawing(seed), starts_of(spans)
    inputs = draw_ssd_inputs(normal, int(starts[-1]), groups, heads_per_group)
    initial = normal(len(spans), groups * heads_per_group, 3, 4)
    layout, chunk_ends = chunk_layout(spans, chunk_size)
    y, states = ssd_chunk_scan(inputs, initial, layout)

    naive = [
        ssd_naive(cut(inputs, slice(starts[i], starts[i + 1])), initial[i])
        for i in range(len(spans))
    ]
    expected_states = torch.cat([each for _, each in naive])
    torch.testing.assert_close(y, torch.cat([each for each, _ in naive]), rtol=0, atol=1e-10)
    torch.testing.assert_close(states, expected_states[chunk_ends - 1], rtol=0, atol=1e-10)
    final, expected = states[layout.last_chunks], expected_states[starts[1:] - 1]
    torch.testing.assert_close(final, expected, rtol=0, atol=1e-10)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), SEEDS)
def test_step_equals_the_recurrence(num_sequences, groups, heads_per_group, seed):
    normal = drawing(seed)
    inputs = draw_ssd_inputs(normal, num_sequences, groups, heads_per_group)
    states = normal(num_sequences, groups * heads_per_group, 3, 4)
    y, after = ssd_step(inputs, states)
    for i in range(num_sequences):
        expected_y, expected = ssd_naive(cut(inputs, slice(i, i + 1)), states[i])
        torch.testing.assert_close(y[i], expected_y[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(after[i], expected[0], rtol=0, atol=1e-10)


@given(st.integers(2, 8), st.integers(1, 6), st.integers(1, 3), SEEDS, st.data())
def test_scan_resumed_on_the_chunk_grid_repeats_every_bit(
    num_chunks, chunk_size, groups, seed, data
):
    """Why checkpoints lie on the grid: a resumed scan computes the very chunks of a longer one."""
    normal, num_tokens = drawing(seed), num_chunks * chunk_size
    inputs, initial = draw_ssd_inputs(normal, num_tokens, groups, 2), normal(1, 2 * groups, 3, 4)
    y, states = ssd_chunk_scan(inputs, initial, chunk_layout([(0, num_tokens)], chunk_size)[0])

    boundary = data.draw(st.integers(1, num_chunks - 1))
    at = boundary * chunk_size
    pieces = []
    for span in (slice(0, at), slice(at, num_tokens)):
        layout, _ = chunk_layout([(span.start, span.stop - span.start)], chunk_size)
        pieces.append(ssd_chunk_scan(cut(inputs, span), initial, layout))
        initial = pieces[-1][1][-1:]
    assert torch.equal(torch.cat([piece[0] for piece in pieces]), y)
    assert torch.equal(torch.cat([piece[1] for piece in pieces]), states)


@given(SPANS, st.integers(2, 5), SEEDS)
def test_packed_convolution_equals_conv1d_of_each_sequence(spans, conv_kernel, seed):
    normal, starts, dim = drawing(seed), starts_of(spans), 3
    inputs, windows = normal(int(starts[-1]), dim), normal(len(spans), dim, conv_kernel - 1)
    weight, bias = normal(dim, conv_kernel), normal(dim)
    layout = place_windows(starts, len(inputs), conv_kernel)
    outputs, final = causal_conv1d(inputs, weight, bias, windows, layout)
    for i in range(len(spans)):
        whole = torch.cat([windows[i], inputs[starts[i] : starts[i + 1]].T], dim=1)
        expected = F.conv1d(whole, weight[:, None], bias, groups=dim).T
        torch.testing.assert_close(outputs[starts[i] : starts[i + 1]], expected, rtol=0, atol=1e-10)
        assert torch.equal(final[i], whole[:, 1 - conv_kernel :])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(2, 5), SEEDS)
def test_convolution_has_the_same_bits_however_a_sequence_is_cut(pieces, conv_kernel, seed):
    normal, dim = drawing(seed), 3
    inputs, window = normal(sum(pieces), dim), normal(1, dim, conv_kernel - 1)
    weight, bias = normal(dim, conv_kernel), normal(dim)

    def convolve(part, window):
        layout = place_windows(torch.tensor([0, len(part)]), len(part), conv_kernel)
        return causal_conv1d(part, weight, bias, window, layout)

    expected, expected_window = convolve(inputs, window)
    outputs = []
    for part in inputs.split(pieces):
        step = len(part) == 1
        output, window = (
            causal_conv1d_step(part, weight, bias, window) if step else convolve(part, window)
        )
        outputs.append(output)
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(window, expected_window)
