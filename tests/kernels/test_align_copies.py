"""Copies between columns, the kernels and their plain twins alike, compared by bits."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from align_states import Group, Model, States

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm import CpuGpuBuffer, MambaSpecDecodeGPUContext
from mamba_cache.integrations.vllm.kernels import align_columns
from mamba_cache.states import PAD_SLOT_ID

LARGE = Group(channels=700, conv_dtype=torch.float32, ssm_shape=(3, 3001), ssm_dtype=torch.float32)
ODD = Group(num_layers=1, channels=333, conv_dtype=torch.uint8, ssm_shape=(9001,), gap=1)


# On a GPU the plain twins have nothing to read from.
@pytest.fixture(params=["triton"] if torch.cuda.is_available() else ["torch", "triton"])
def backend(request):
    return request.param


def make_model(is_ds, *groups, num_drafts=4):
    return Model(4, num_drafts, 4, is_ds, groups, max_requests=2)


class Setup:
    """A context over random states, and a copy of them that a loop changes."""

    def __init__(self, model, device, backend, seed, **options):
        self.model = model
        self.states = States(model, np.random.default_rng(seed), device)
        self.expected = States(model, np.random.default_rng(seed))
        config = model.kv_cache_config()
        self.context = MambaSpecDecodeGPUContext.create(
            8, config, 2, device, lambda n, dtype: CpuGpuBuffer(n, dtype=dtype, device=device),
            backend=backend, **options,
        )  # fmt: skip
        tables = np.stack([np.random.default_rng(seed + g).permutation(20) for g in range(3)]) + 1
        self.blocks = tables.reshape(3, 2, 10)
        self.tables = torch.from_numpy(self.blocks).int().to(device)
        self.context.initialize_from_forward_context(
            config,
            self.states.forward_context(),
            model.copy_funcs,
            self.tables[: len(model.groups)],
        )

    def precopy(self, moves, rows=None):
        """Copies (source, destination, bias) of each row."""
        device = self.states.storage[0].device
        columns = torch.tensor(moves, dtype=torch.int32).T.to(device).contiguous()
        mapping = None if rows is None else torch.tensor(rows, device=device)
        num_reqs = len(moves if rows is None else rows)
        self.context.run_fused_precopy(num_reqs, columns[1], columns[0], columns[2], mapping)

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


@pytest.mark.parametrize("is_ds", [False, True], ids=["SD", "DS"])
@pytest.mark.parametrize("bias", [0, 1, 4])
@pytest.mark.parametrize("groups", [(LARGE,), (ODD, Group())], ids=["wide", "odd"])
def test_states_of_many_tiles(is_ds, bias, groups, device, backend, seed):
    setup = Setup(make_model(is_ds, *groups), device, backend, seed)
    setup.precopy([(2, 3, 0), (1, 0, bias)])
    setup.expect(0, 2, 3, 0)
    setup.expect(1, 1, 0, bias)
    setup.check()


@pytest.mark.parametrize("is_ds", [False, True], ids=["SD", "DS"])
@pytest.mark.parametrize("bias", [1, 2, 3, 7])
def test_wide_window_is_shifted_within_one_block(is_ds, bias, device, backend, seed):
    """vLLM 50729: a shift onto itself as a parallel copy raced."""
    setup = Setup(make_model(is_ds, LARGE, num_drafts=7), device, backend, seed)
    one = torch.ones(1, dtype=torch.int32, device=device)
    # 8 tokens are in the state of column 1, and the column ends after `bias` accepted drafts.
    setup.context.run_fused_postprocess(
        1, one * (bias + 1), one, one * 0, one * (8 - bias), one * 0
    )
    setup.expect(0, 1, 1, bias)
    setup.check()
    assert setup.context.num_accepted_tokens_out[0] == 1


@pytest.mark.parametrize("is_ds", [False, True], ids=["SD", "DS"])
def test_two_columns_that_are_one_block(is_ds, device, backend, seed):
    """A shared prefix: the copy is a shift within a block although the columns differ."""
    setup = Setup(make_model(is_ds, LARGE), device, backend, seed)
    setup.tables[:, 0, 2] = setup.tables[:, 0, 1]
    setup.blocks[:, 0, 2] = setup.blocks[:, 0, 1]
    setup.precopy([(2, 1, 2)])
    setup.expect(0, 2, 1, 2)
    setup.check()


def test_skipped_rows_and_padded_columns_are_left_alone(device, backend, seed):
    setup = Setup(make_model(False, LARGE), device, backend, seed)
    setup.tables[:, 1, 5] = PAD_SLOT_ID
    setup.precopy([(2, 4, 1), (2, 5, 0)])
    setup.expect(0, 2, 4, 1)
    setup.precopy([(-1, 3, 0), (1, 3, 2)], rows=[0, -1])
    setup.check()


@pytest.mark.parametrize("is_by_slot", [False, True], ids=["by row", "by slot"])
def test_a_row_is_not_its_slot(is_by_slot, device, backend, seed):
    """vLLM 53919: what belongs to a request moved with its row of the batch.

    Block tables have rows of the batch in engines before vLLM 0.32, and request slots since.
    """
    setup = Setup(make_model(False, LARGE), device, backend, seed)
    setup.context.table.is_by_slot = is_by_slot
    setup.precopy([(1, 2, 0), (3, 4, 2)], rows=[1, 0])
    setup.expect(1 if is_by_slot else 0, 3, 4, 2)
    setup.expect(0 if is_by_slot else 1, 1, 2, 0)
    setup.check()


def test_saves_by_slot_write_the_counts_that_they_read(device, backend, seed):
    """vLLM 0.32's ``run_fused_postprocess_align``: slots 1 and 0 of a batch of three rows."""
    setup = Setup(make_model(False, LARGE, ODD), device, backend, seed)
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    counts = ints([3, 4])
    # 7 tokens and one draft in column 1; 5 tokens and three drafts, all in column 1.
    mapping = ints([1, -1, 0])
    setup.context.run_fused_postprocess_align(3, counts, ints([2, 1]), ints([9, 8]), mapping)
    setup.expect(1, 1, 1, 3)
    setup.expect(0, 2, 1, 1)
    setup.check()
    assert counts.tolist() == [3, 1]


def test_blocks_of_the_running_columns_are_looked_up(device, backend, seed):
    """All groups at once, into a place that does not change."""
    setup = Setup(make_model(False, LARGE, ODD, num_drafts=2), device, backend, seed)
    lengths = torch.tensor([0, 9], dtype=torch.int32, device=device)
    found = setup.context.compute_aligned_state_indices(lengths, 2)
    wanted = [[blocks[0, 0:3].tolist(), blocks[1, 2:5].tolist()] for blocks in setup.blocks[:2]]
    assert found.tolist() == wanted
    assert found.data_ptr() == setup.context.aligned_state_indices.data_ptr()
    assert setup.context.aligned_state_indices.shape == (2, 8, 3)
    assert not setup.context.aligned_state_indices[:, 2:].any()
    assert setup.context.compute_aligned_state_indices(lengths, 0).shape == (2, 0, 3)
    assert setup.context.compute_aligned_state_indices(lengths, 1).tolist() == [
        [row] for row, _ in wanted
    ]
    with pytest.raises(InvalidArgumentError, match=r"in \[0, 2\] of an initialised context, got 3"):
        setup.context.compute_aligned_state_indices(lengths, 3)


@pytest.mark.parametrize("shares", [(1, 1), (4, 2), (6, 3)])
def test_programs_that_share_counters_copy_every_tile_once(shares, device, seed, monkeypatch):
    monkeypatch.setattr(align_columns, "_shares", lambda device: shares)
    setup = Setup(make_model(False, ODD, LARGE), device, "triton", seed)
    setup.precopy([(2, 3, 0), (1, 0, 2)])
    setup.expect(0, 2, 3, 0)
    setup.expect(1, 1, 0, 2)
    setup.check()
    setup.precopy([(5, 6, 1)])
    setup.expect(0, 5, 6, 1)
    setup.check()
    assert not setup.context.table.counters.any()


def test_parts_of_a_window_past_its_last_are_not_shifted_again(device, backend, seed):
    """A chunk has room for more tiles than a short window has."""
    setup = Setup(make_model(False, LARGE, num_drafts=1), device, backend, seed)
    setup.tables[:, 0, 2] = setup.tables[:, 0, 1]
    setup.blocks[:, 0, 2] = setup.blocks[:, 0, 1]
    setup.precopy([(2, 1, 1)])
    setup.expect(0, 2, 1, 1)
    setup.check()


def test_nothing_to_do(device, backend, seed):
    setup = Setup(make_model(True, LARGE), device, backend, seed)
    setup.precopy([(3, 3, 2), (-1, 0, 0)])
    setup.precopy([(1, 2, 0)], rows=[-1, -1])
    one = torch.ones(1, dtype=torch.int32, device=device)
    setup.context.run_fused_postprocess(1, one * 3, one, one, one * 4, one * 0)  # 5, and then 7
    setup.check()
    assert setup.context.num_accepted_tokens_out[0] == 3


def test_rows_without_tokens_have_crossed_nothing(device, backend, seed):
    """Padding of a batch: the boundary at 0 is no column's end."""
    setup = Setup(make_model(False, LARGE), device, backend, seed)
    zeros = torch.zeros(2, dtype=torch.int32, device=device)
    setup.context.run_fused_postprocess(2, zeros + 1, zeros, zeros, zeros, zeros)
    setup.check()
    assert setup.context.num_accepted_tokens_out[:2].tolist() == [1, 1]


def test_a_state_that_is_where_it_belongs_resets_the_count(device, backend, seed):
    setup = Setup(make_model(False, LARGE), device, backend, seed)
    one = torch.ones(1, dtype=torch.int32, device=device)
    setup.context.run_fused_postprocess(1, one * 3, one * 0, one * 4, one * 0, one * 0)
    setup.check()
    assert setup.context.num_accepted_tokens_out[0] == 1


def test_counts_may_be_read_and_written_in_one_place(device, backend, seed):
    """vLLM 53919: decisions rest on a snapshot of the counts."""
    setup = Setup(make_model(False, LARGE), device, backend, seed)
    one = torch.ones(1, dtype=torch.int32, device=device)
    counts = setup.context.num_accepted_tokens_out
    counts[0] = 3
    setup.context.run_fused_postprocess(1, counts, one, one * 0, one * 6, one * 0)
    setup.expect(0, 1, 1, 2)
    setup.check()
    assert counts[0] == 1


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([(2, 10, 0)], "row 0 copies"),
        ([(2, -1, 0)], "row 0 copies"),
        ([(8, 1, 2)], "row 0 copies"),
        ([(1, 2, 0)] * 7, "row 6 copies"),  # the storage of the tables has 6
        ([(4, 3, 0)], "row 0 has block 4000 in column 4"),
    ],
)
def test_columns_out_of_range_are_refused_where_they_are_checked(
    moves, message, device, backend, seed
):
    setup = Setup(make_model(False, ODD), device, backend, seed, check_columns=True)
    setup.tables[:, 0, 4] = 4000
    with pytest.raises(InvalidArgumentError, match=message):
        setup.precopy(moves)
    setup.check()


def test_a_saved_column_out_of_range_is_refused_where_it_is_checked(device, backend, seed):
    setup = Setup(make_model(False, ODD), device, backend, seed, check_columns=True)
    one = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(InvalidArgumentError, match="row 0 copies"):
        setup.context.run_fused_postprocess(1, one, one * 3, one * 48, one * 0, one * 0)
    setup.check()
    assert setup.context.num_accepted_tokens_out[0] == 0


def test_block_tables_at_a_stride(device, backend, seed):
    """One row stride for all groups, and first bound by a batch of fewer rows."""
    model = make_model(False, ODD, Group())
    setup = Setup(model, device, backend, seed)
    wide = torch.zeros(2, 16, dtype=torch.int32, device=device)
    tables = [wide.clone() for _ in model.groups]
    for table, blocks in zip(tables, setup.tables, strict=False):
        table[:, 3:13] = blocks
    setup.context.table.block_tables.bind([table[:1, 3:13] for table in tables])
    setup.precopy([(1, 2, 0), (5, 1, 1)])
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
    context = MambaSpecDecodeGPUContext.create(
        1, model.kv_cache_config(), 2, device,
        lambda n, dtype: CpuGpuBuffer(n, dtype=dtype, device=device), backend=backend,
    )  # fmt: skip
    tables = [torch.tensor([[0, 2]], dtype=torch.int32, device=device)]
    layers = {"mamba.0.0": SimpleNamespace(kv_cache=[conv, state])}
    context.initialize_from_forward_context(
        model.kv_cache_config(), layers, model.copy_funcs, tables
    )
    column = torch.arange(2, dtype=torch.int32, device=device)
    context.run_fused_precopy(1, column[1:], column[:1], column[:1])
    assert state[2].tolist() == list(range(16))
    assert torch.equal(conv[2], conv[0])
