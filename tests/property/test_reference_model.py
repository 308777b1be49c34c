"""The reference model's scan and convolution give equal bits for every cut of a sequence.

tests/unit/test_reference_model.py compares the model with its formulas.
"""

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.metadata import compute_chunk_metadata
from mamba_cache.reference.batch import place_taps
from mamba_cache.reference.mamba import causal_conv1d
from mamba_cache.reference.ssd import ChunkLayout, SSDInputs, ssd_chunk_scan

SEEDS = st.integers(0, 2**32 - 1)


def drawing(seed):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return normal


def cut(inputs, tokens):
    return SSDInputs(
        inputs.x[tokens], inputs.dt[tokens], inputs.a, inputs.b[tokens], inputs.c[tokens]
    )


def chunk_layout(start, num_tokens, chunk_size):
    """Return the chunks of one sequence from a position on."""
    parts = compute_chunk_metadata(np.array([0, num_tokens]), np.array([start]), chunk_size)
    ends, sequences, last = (torch.from_numpy(part).long() for part in parts)
    return ChunkLayout.build(ends, sequences, last, chunk_size, num_tokens)


@given(st.integers(2, 8), st.integers(1, 6), st.integers(1, 3), SEEDS, st.data())
def test_scan_resumed_on_the_chunk_grid_repeats_every_bit(
    num_chunks, chunk_size, groups, seed, data
):
    """Checkpoints lie on the chunk grid so that a resumed scan computes the same chunks."""
    normal, num_tokens = drawing(seed), num_chunks * chunk_size
    heads = 2 * groups
    inputs = SSDInputs(
        x=normal(num_tokens, heads, 3),
        dt=F.softplus(normal(num_tokens, heads) - 1),
        a=-normal(heads).exp(),
        b=normal(num_tokens, groups, 4),
        c=normal(num_tokens, groups, 4),
    )
    initial = normal(1, heads, 3, 4)
    y, states = ssd_chunk_scan(inputs, initial, chunk_layout(0, num_tokens, chunk_size))

    boundary = data.draw(st.integers(1, num_chunks - 1))
    at = boundary * chunk_size
    pieces = []
    for span in (slice(0, at), slice(at, num_tokens)):
        layout = chunk_layout(span.start, span.stop - span.start, chunk_size)
        pieces.append(ssd_chunk_scan(cut(inputs, span), initial, layout))
        initial = pieces[-1][1][-1:]
    assert torch.equal(torch.cat([piece[0] for piece in pieces]), y)
    assert torch.equal(torch.cat([piece[1] for piece in pieces]), states)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(2, 5), SEEDS)
def test_convolution_has_the_same_bits_however_a_sequence_is_cut(pieces, conv_kernel, seed):
    normal, dim = drawing(seed), 3
    inputs, window = normal(sum(pieces), dim), normal(1, dim, conv_kernel - 1)
    weight, bias = normal(dim, conv_kernel), normal(dim)

    def convolve(part, window):
        taps = place_taps(torch.tensor([0, len(part)]), len(part), conv_kernel)
        last = torch.tensor([len(part) - 1])
        return causal_conv1d(part, weight, bias, window, (taps, last))

    expected, expected_window = convolve(inputs, window)
    outputs = []
    for part in inputs.split(pieces):
        output, window = convolve(part, window)
        outputs.append(output)
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(window, expected_window)
