"""Copies between columns, by the kernels and their plain twins, compared by bits."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from align_states import Group, Model, States

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm import CpuGpuBuffer, MambaSpecDecodeGPUContext, align_kernels
from mamba_cache.states import PAD_SLOT_ID

# Some tiles of 4 KiB and a partial tile; the second kind needs narrow words.
WIDE = Group(1, channels=300, conv_dtype=torch.float32, ssm_shape=(1301,))
ODD = Group(1, channels=333, conv_dtype=torch.uint8, ssm_shape=(5001,), ssm_dtype=torch.int8, gap=1)
ROWS = 4


# The plain twins cannot read GPU memory.
@pytest.fixture(params=["triton"] if torch.cuda.is_available() else ["torch", "triton"])
def backend(request):
    return request.param


layouts = pytest.mark.parametrize("is_ds", [False, True], ids=["SD", "DS"])


class Setup:
    """A context over random states, and a copy of the states that a plain loop changes."""

    def __init__(self, device, backend, seed, *groups, is_ds=False, num_drafts=4):
        self.device = device
        self.model = model = Model(4, num_drafts, 4, is_ds, groups, max_requests=ROWS)
        self.states = States(model, np.random.default_rng(seed), device)
        self.expected = States(model, np.random.default_rng(seed))
        config = model.kv_cache_config()
        self.context = MambaSpecDecodeGPUContext.create(
            ROWS, config, 2, device, partial(CpuGpuBuffer, device=device), backend=backend
        )
        ids = [np.random.default_rng(seed + g).permutation(ROWS * 10) + 1 for g in range(3)]
        self.blocks = np.stack(ids).reshape(3, ROWS, 10)
        self.tables = torch.from_numpy(self.blocks).int().to(device)
        tables = self.tables[: len(groups)]
        self.context.initialize_from_forward_context(
            config, self.states.forward_context(), model.copy_funcs, tables
        )

    def ints(self, *values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def precopy(self, *moves, rows=None):
        """Run the copies, given as (source, destination, bias) of each row."""
        sources, columns, biases = (self.ints(*each) for each in zip(*moves, strict=True))
        mapping = None if rows is None else self.ints(*rows)
        num_reqs = len(moves if rows is None else rows)
        self.context.run_fused_precopy(num_reqs, columns, sources, biases, mapping)

    def expect(self, row, source, destination, bias):
        width = self.model.conv_width
        for group in range(len(self.model.groups)):
            ids = self.blocks[group, row]
            for conv in self.expected.windows(group):
                conv[ids[destination], : width - bias] = conv[ids[source], bias:].clone()
            for ssm in self.expected.temporal(group):
                ssm[ids[destination]] = ssm[ids[source + bias]]

    def check(self):
        for got, want in zip(self.states.bits(), self.expected.bits(), strict=True):
            assert torch.equal(got, want)


@layouts
@pytest.mark.parametrize("groups", [(WIDE,), (ODD, Group())], ids=["wide", "odd"])
def test_states_of_many_tiles(is_ds, groups, device, backend, seed):
    """The last row has a shared prefix: a shift within a block although the columns differ."""
    setup = Setup(device, backend, seed, *groups, is_ds=is_ds)
    for blocks in (setup.tables, setup.blocks):
        blocks[:, 3, 2] = blocks[:, 3, 1]
    moves = [(2, 3, 0), (1, 0, 1), (5, 4, 4), (2, 1, 2)]
    setup.precopy(*moves)
    for row, move in enumerate(moves):
        setup.expect(row, *move)
    setup.check()


@pytest.mark.parametrize("is_in_place", [False, True])
def test_boundaries_that_a_step_has_crossed(is_in_place, device, backend, seed):
    """Decisions rest on a snapshot of the counts (vLLM 53919)."""
    setup = Setup(device, backend, seed, WIDE)
    counts = setup.ints(3, 1, 3, 3)
    if is_in_place:
        counts = setup.context.num_accepted_tokens_out.copy_(counts)
    # 5 and then 7 tokens; padding, whose boundary at 0 is no column's end; a state already in
    # place; and a state to shift.
    columns, scheduled, computed = setup.ints(1, 0, 0, 1), setup.ints(1, 0, 4, 0), (4, 0, 0, 6)
    setup.context.run_fused_postprocess(
        4, counts, columns, scheduled, setup.ints(*computed), setup.ints(0, 0, 0, 0)
    )
    setup.expect(3, 1, 1, 2)
    setup.check()
    assert setup.context.num_accepted_tokens_out.tolist() == [3, 1, 1, 1]


def test_skipped_rows_and_padded_columns_are_left_alone(device, backend, seed):
    setup = Setup(device, backend, seed, WIDE)
    setup.tables[:, 1, 5] = PAD_SLOT_ID
    setup.precopy((2, 4, 1), (2, 5, 0), (3, 3, 2), (-1, 0, 0))
    setup.expect(0, 2, 4, 1)
    setup.precopy((-1, 3, 0), (1, 3, 2), rows=[0, -1])
    setup.precopy((1, 2, 0), rows=[-1, -1])
    setup.check()


def test_blocks_of_the_running_columns_are_looked_up(device, seed):
    """One call looks up all groups, into a buffer with a fixed address."""
    setup = Setup(device, "auto", seed, WIDE, ODD, num_drafts=2)
    context, lengths = setup.context, setup.ints(0, 9)
    found = context.compute_aligned_state_indices(lengths, 2)
    wanted = [[blocks[0, 0:3].tolist(), blocks[1, 2:5].tolist()] for blocks in setup.blocks[:2]]
    assert found.tolist() == wanted
    assert found.data_ptr() == context.aligned_state_indices.data_ptr()
    assert context.aligned_state_indices.shape == (2, ROWS, 3)
    assert not context.aligned_state_indices[:, 2:].any()
    assert context.compute_aligned_state_indices(lengths, 0).shape == (2, 0, 3)
    with pytest.raises(InvalidArgumentError, match=r"in \[0, 2\] of an initialised context, got 3"):
        context.compute_aligned_state_indices(lengths, 3)


@pytest.mark.parametrize("parts", [1, 3])
def test_programs_that_share_a_state_copy_every_tile_once(parts, device, seed, monkeypatch):
    monkeypatch.setattr(align_kernels, "_max_parts", lambda *_: parts)
    setup = Setup(device, "triton", seed, ODD, WIDE)
    setup.precopy((2, 3, 0), (1, 0, 2))
    setup.expect(0, 2, 3, 0)
    setup.expect(1, 1, 0, 2)
    setup.precopy((5, 6, 1))
    setup.expect(0, 5, 6, 1)
    setup.check()


def test_block_tables_at_a_stride(device, backend, seed):
    """All groups share a row stride, and the first binding has fewer rows."""
    setup = Setup(device, backend, seed, ODD, Group())
    wide = torch.zeros(ROWS, 16, dtype=torch.int32, device=device)
    tables = [wide.clone() for _ in range(2)]
    for table, blocks in zip(tables, setup.tables, strict=False):
        table[:, 3:13] = blocks
    setup.context.bind_block_tables([table[:1, 3:13] for table in tables])
    setup.precopy((1, 2, 0), (5, 1, 1))
    setup.expect(0, 1, 2, 0)
    setup.expect(1, 5, 1, 1)
    setup.check()


def test_offsets_past_int32(device, backend):
    """Blocks more than 2**31 bytes apart; on the CPU the memory between is never touched."""
    model = Model(4, 0, 4, False, (Group(num_layers=1),))
    far = torch.empty(2**32 + 64, dtype=torch.uint8, device=device)
    state = far.as_strided((3, 16), (2**31 + 16, 1))
    state[0] = torch.arange(16, dtype=torch.uint8, device=device)
    conv = torch.arange(3 * 3 * 2, dtype=torch.uint8, device=device).view(3, 3, 2)
    config, make_buffer = model.kv_cache_config(), partial(CpuGpuBuffer, device=device)
    context = MambaSpecDecodeGPUContext.create(1, config, 2, device, make_buffer, backend=backend)
    tables = [torch.tensor([[0, 2]], dtype=torch.int32, device=device)]
    layers = {"mamba.0.0": SimpleNamespace(kv_cache=[conv, state])}
    context.initialize_from_forward_context(config, layers, model.copy_funcs, tables)
    column = torch.arange(2, dtype=torch.int32, device=device)
    context.run_fused_precopy(1, column[1:], column[:1], column[:1])
    assert state[2].tolist() == list(range(16))
    assert torch.equal(conv[2], conv[0])


# Kernels trust block tables; the twins check block tables.


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([(8, 1, 2)], "row 0 has 10 columns"),
        ([(4, 3, 0)], "row 0 has block 4000"),
        ([(1, 2, 0)] * (ROWS + 1), f"at most {ROWS}, got {ROWS + 1}"),
    ],
)
def test_columns_out_of_range_are_refused(moves, message, seed):
    setup = Setup("cpu", "torch", seed, ODD)
    setup.tables[:, 0, 4] = 4000
    with pytest.raises(InvalidArgumentError, match=message):
        setup.precopy(*moves)
    setup.check()


def test_rows_and_slots_out_of_range_are_refused(seed):
    setup = Setup("cpu", "torch", seed, ODD)
    whole = setup.context.block_tables
    setup.context.block_tables = [table[:2] for table in whole]
    with pytest.raises(InvalidArgumentError, match="row 2 has 0 columns"):
        setup.precopy(*[(1, 2, 0)] * 3)
    with pytest.raises(InvalidArgumentError, match="copies of 4 requests, got 5"):
        setup.precopy((1, 2, 0), rows=[0] * (ROWS + 1))
    one = setup.ints(1)
    with pytest.raises(InvalidArgumentError, match="row 0 has 10 columns"):
        setup.context.run_fused_postprocess(1, one, one * 3, one * 48, one * 0, one * 0)
    setup.check()
    assert not setup.context.num_accepted_tokens_out.any()
