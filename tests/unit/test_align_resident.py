"""The resident state: what each call leaves in its slots, and what the layers are told."""

from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from align_rig import ResidentWorld, SlotWorld, engine_config
from align_states import Group, Model

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm import MambaHybridModelState

B = 8
MODEL = Model(B, num_drafts=2, groups=(Group(num_layers=1),), max_requests=4)


class World(ResidentWorld):
    """Slot s has columns 10 s + 1, ..., 10 s + 10, and calls are made one by one."""

    def add(self, slot, num_computed):
        self.state.add_request(slot, SimpleNamespace(num_computed_tokens=num_computed))

    def begin(self, slots, lengths, computed):
        for row, slot in enumerate(slots):
            self.tables[1][row] = torch.arange(10) + 10 * slot + 1
        self.batch = SimpleNamespace(
            num_reqs=len(slots),
            idx_mapping=self.on_device(slots),
            query_start_loc=self.on_device([0, *np.cumsum(lengths)]),
        )
        self.preprocess(self.on_device(computed))

    def end(self, sampled, computed):
        self.postprocess(self.on_device(sampled), self.on_device(computed))

    def column(self, slot, column):
        return self.states.temporal(0)[0][10 * slot + 1 + column].clone()

    @property
    def fields(self):
        state = self.state
        fields = (
            state._mamba_state_idx_gpu,
            state._mamba_src_col_gpu,
            state._mamba_src_off_gpu,
            state.num_accepted_tokens_gpu,
        )
        return list(zip(*(field.tolist() for field in fields), strict=True))


@pytest.fixture(params=["auto", "triton"])
def world(request, rng):
    return World(MODEL, rng, backend=request.param)


def test_before_the_first_request(world):
    assert world.fields == [(0, -1, 0, 1)] * 4
    assert world.state.num_accepted_tokens_gpu.dtype == torch.int32


@pytest.mark.parametrize(
    ("num_computed", "column"), [(0, -1), (1, 0), (B, 0), (B + 1, 1), (3 * B, 2)]
)
def test_columns_are_seeded_in_tokens_of_the_mamba_block(world, num_computed, column):
    """vLLM 53142, 55507: seeded by the attention block's size, three times as large here."""
    world.add(2, num_computed)
    assert world.fields[2] == (column, -1, 0, 1)


def test_a_recycled_slot_knows_nothing_of_its_last_tenant(world):
    world.add(2, 2 * B)
    world.begin([2], [3], [0, 0, 2 * B, 0])
    world.end([3], [0, 0, 2 * B + 3, 0])
    assert world.fields[2] == (2, 1, 0, 3)
    world.add(2, 0)
    assert world.fields[2] == (-1, -1, 0, 1)


def test_the_reset_at_a_boundary_is_seen_by_the_forward(world):
    world.add(1, B - 3)
    world.begin([1], [3], [0, B - 3, 0, 0])
    world.end([2], [0, B - 1, 0, 0])
    wanted = world.column(1, 1)
    world.begin([1], [3], [0, B - 1, 0, 0])
    assert world.fields[1] == (1, 0, 1, 1)
    told = world.state.prepare_attn(full_batch(world, [2]))
    assert told.num_accepted_tokens.tolist() == [1]
    assert torch.equal(world.column(1, 1), wanted)


def test_counts_follow_the_slot_when_the_batch_is_reordered(world):
    """vLLM 53919: condensing the batch moved counts before their copy had arrived."""
    for slot in (0, 3):
        world.add(slot, 1)
    world.begin([3, 0], [3, 3], [1, 0, 0, 1])
    world.end([3, 1], [2, 0, 0, 4])
    world.begin([0], [1], [2, 0, 0, 4])
    assert world.fields[0][2:] == (0, 1)
    world.begin([0, 3], [1, 3], [2, 0, 0, 4])
    assert world.fields[3][2:] == (2, 3)
    told = world.state.prepare_attn(full_batch(world, [0, 2]))
    assert told.num_accepted_tokens.tolist() == [1, 3]


def test_filtered_rows_are_skipped_everywhere(world):
    before = [storage.clone() for storage in world.states.storage]
    world.add(0, B)
    world.begin([-1, -1], [3, 9], [500] * 4)
    world.end([3, 2], [500] * 4)
    world.state.postprocess_state(world.batch.idx_mapping, 2)
    assert world.fields == [(0, -1, 0, 1), *[(0, -1, 0, 1)] * 3]
    assert world.state.prepare_attn(full_batch(world, [2, 0])).num_accepted_tokens.tolist() == [
        1,
        1,
    ]
    for got, want in zip(world.states.storage, before, strict=True):
        assert torch.equal(got, want)


def test_one_count_for_all(world):
    world.add(2, 1)
    world.state.postprocess_state(world.on_device([2, -1, 0]), 3)
    assert [accepted for *_, accepted in world.fields] == [3, 1, 3, 1]
    world.state.postprocess_state(world.on_device([2]), 0)
    assert world.fields[2][3] == 1


def test_empty_batches_do_nothing(world):
    world.begin([], [], [7] * 4)
    world.end([], [7] * 4)
    assert world.fields == [(0, -1, 0, 1)] * 4


def test_block_tables_may_move(world):
    """Raw addresses of tables that were gathered anew each step pointed to freed memory."""
    world.add(0, B)
    world.begin([0], [1], [B] * 4)
    world.tables = [table.clone() for table in world.tables]
    world.add(0, 2 * B)
    wanted = world.column(3, 1)
    world.begin([3], [1], [0, 0, 0, 0])
    world.add(3, 2 * B)
    world.begin([3], [1], [0, 0, 0, 2 * B])
    assert torch.equal(world.column(3, 2), wanted)


def test_tables_by_slot_are_bound_once(rng):
    """From vLLM 0.32 on; what a step gives besides is of the batch, and not read."""
    world = SlotWorld(MODEL, rng)
    world.by_slot[1][3] = torch.arange(10) + 31
    world.state.add_request(3, SimpleNamespace(num_computed_tokens=B))
    world.batch = SimpleNamespace(
        num_reqs=1, idx_mapping=world.on_device([3]), query_start_loc=world.on_device([0, 1])
    )
    wanted = world.states.temporal(0)[0][31].clone()
    world.state.preprocess_state(world.batch, (), world.config, world.on_device([0, 0, 0, B]))
    assert torch.equal(world.states.temporal(0)[0][32], wanted)
    assert world.state._context.index_tables.tensors[0].data_ptr() == world.tables[1].data_ptr()


def test_tables_by_slot_must_have_the_columns_that_requests_are_added_by(rng):
    world = ResidentWorld(MODEL, rng)
    with pytest.raises(InvalidArgumentError, match=f"columns of {B} tokens.*got {2 * B}"):
        world.state.initialize_kv_cache(Model(2 * B).kv_cache_config(), None)


def test_without_align_mode_only_counts_are_kept():
    config = engine_config(MODEL, {})
    config.cache_config = SimpleNamespace(mamba_cache_mode="none")
    state = MambaHybridModelState(config, None, None, "cpu")
    state.initialize_kv_cache(MODEL.kv_cache_config(), None)
    state.add_request(1, SimpleNamespace(num_computed_tokens=5))
    state.preprocess_state(None, (), None, None)
    state.postprocess_state(torch.tensor([1, -1]), torch.tensor([3, 2]), torch.tensor([9] * 4))
    assert state.num_accepted_tokens_gpu.tolist() == [1, 3, 1, 1]
    assert not hasattr(state, "_mamba_state_idx_gpu")


def test_the_tokens_of_a_column_must_be_known():
    config = engine_config(MODEL, {})
    config.cache_config = SimpleNamespace(mamba_cache_mode="align", block_size=24)
    with pytest.raises(InvalidArgumentError, match=r"mamba_block_size must give.*got None"):
        MambaHybridModelState(config, None, None, "cpu")
    state = MambaHybridModelState(
        config, None, None, "cpu", kv_cache_config=MODEL.kv_cache_config()
    )
    state.add_request(0, SimpleNamespace(num_computed_tokens=2 * B))
    assert state._mamba_state_idx_gpu[0] == 1


def test_groups_must_have_the_columns_that_requests_were_added_by(world):
    world.config = Model(2 * B).kv_cache_config()
    with pytest.raises(InvalidArgumentError, match=f"columns of {B} tokens.*got {2 * B}"):
        world.begin([0], [1], [0] * 4)


@pytest.mark.parametrize("slot", [-1, 4])
def test_slots_out_of_range(world, slot):
    with pytest.raises(InvalidArgumentError, match=rf"in \[0, 4\), got {slot}"):
        world.add(slot, 0)


def test_checked_columns_change_nothing(rng):
    world = World(MODEL, rng)
    checked = MambaHybridModelState(
        engine_config(MODEL, world.states.forward_context()),
        world.state._model, None, "cpu", check_columns=True,
    )  # fmt: skip
    world.state = checked
    world.add(0, B)
    world.begin([0], [1], [B] * 4)
    before = world.fields
    with pytest.raises(InvalidArgumentError, match="row 0 copies"):
        world.end([1], [11 * B] * 4)
    assert world.fields == before
    with pytest.raises(InvalidArgumentError, match="row 0 copies"):
        world.begin([0], [1], [11 * B] * 4)
    assert world.fields == before


Mode = Enum("Mode", ["NONE", "FULL"])


def full_batch(world, drafts, padding=0):
    num_reqs = world.batch.num_reqs
    drafts = None if drafts is None else np.array(drafts)
    return SimpleNamespace(
        num_reqs=num_reqs,
        num_tokens=7,
        num_reqs_after_padding=num_reqs + padding,
        num_tokens_after_padding=7 + padding,
        idx_mapping=world.batch.idx_mapping,
        num_scheduled_tokens=np.full(num_reqs, 3),
        is_prefilling_np=np.arange(num_reqs) == 1,
        seq_lens_cpu_upper_bound=torch.arange(num_reqs + padding) + 20,
        num_draft_tokens_per_req=drafts,
    )


def test_layers_are_told_of_rows_and_padding(world):
    world.batch = SimpleNamespace(num_reqs=3, idx_mapping=world.on_device([2, -1, 0]))
    world.state.postprocess_state(world.on_device([2]), 3)
    batch = full_batch(world, [2, 1, 0], padding=2)
    told = world.state.prepare_attn(batch, Mode.FULL)
    assert (told.num_reqs, told.num_tokens, told.max_query_len, told.max_seq_len) == (5, 9, 3, 24)
    assert told.num_accepted_tokens.tolist() == [3, 1, 1, 1, 1]
    assert told.num_accepted_tokens.dtype == torch.int32
    assert told.num_decode_draft_tokens_cpu.tolist() == [2, -1, -1, -1, -1]
    assert told.is_prefilling.tolist() == [False, True, False, False, False]
    told = world.state.prepare_attn(batch, Mode.NONE)
    assert (told.num_reqs, told.num_tokens, told.max_seq_len) == (3, 7, 22)
    assert len(told.num_accepted_tokens) == 3


def test_counts_are_gathered_with_the_columns_where_the_batch_is_the_same(world, monkeypatch):
    for slot in (0, 3):
        world.add(slot, 1)
    world.begin([3, 0], [3, 3], [1, 0, 0, 1])
    world.end([3, 2], [3, 0, 0, 4])
    batch = full_batch(world, [2, 2], padding=1)
    world.batch = batch
    world.tables[1][1] = torch.arange(10) + 1
    batch.idx_mapping, batch.num_reqs = world.on_device([0, 3]), 2
    batch.query_start_loc = world.on_device([0, 3, 6])
    world.preprocess(world.on_device([3, 0, 0, 4]))
    gather = world.state._kernels.gather_accepted
    calls = []
    counted = lambda *inputs: calls.append(1) or gather(*inputs)  # noqa: E731
    monkeypatch.setattr(world.state._kernels, "gather_accepted", counted)
    assert world.state.prepare_attn(batch, Mode.FULL).num_accepted_tokens.tolist() == [2, 3, 1]
    assert not calls
    assert world.state.prepare_attn(batch, Mode.FULL).num_accepted_tokens.tolist() == [2, 3, 1]
    assert calls


@pytest.mark.parametrize("change", ["add", "postprocess", "another batch", "more padding"])
def test_counts_that_were_gathered_are_dropped_when_they_no_longer_hold(world, change):
    world.add(0, 1)
    world.batch = SimpleNamespace(num_reqs=1, idx_mapping=world.on_device([0]))
    world.state.postprocess_state(world.batch.idx_mapping, 3)
    batch = full_batch(world, [2])
    batch.query_start_loc = world.on_device([0, 3])
    world.batch = batch
    world.preprocess(world.on_device([2] * 4))
    wanted = [3]
    if change == "add":
        world.add(0, 1)
        wanted = [1]
    elif change == "postprocess":
        world.state.postprocess_state(batch.idx_mapping, 2)
        wanted = [2]
    elif change == "another batch":
        batch = full_batch(world, [2])
        batch.idx_mapping, wanted = world.on_device([1]), [1]
    else:
        batch.num_reqs_after_padding, wanted = 3, [3, 1, 1]
        batch.seq_lens_cpu_upper_bound = torch.arange(3)
    assert world.state.prepare_attn(batch, Mode.FULL).num_accepted_tokens.tolist() == wanted


def test_a_captured_graph_is_for_the_longest_sequence(world):
    world.batch = SimpleNamespace(num_reqs=1, idx_mapping=world.on_device([0]))
    told = world.state.prepare_attn(full_batch(world, None), "FULL", for_capture=True)
    assert told.max_seq_len == MODEL.max_tokens
    assert told.num_decode_draft_tokens_cpu.tolist() == [-1]


def test_no_drafts_without_speculation(world):
    world.state._config.num_speculative_tokens = 0
    world.batch = SimpleNamespace(num_reqs=1, idx_mapping=world.on_device([0]))
    told = world.state.prepare_attn(full_batch(world, None))
    assert told.num_decode_draft_tokens_cpu is None
