"""The resident state: contents of its slots after each call, and attention metadata of the layers.

tests/property/test_align_steps.py holds drawn steps to the rules.
"""

from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from align_rig import ResidentWorld, engine_config
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

    def attention_metadata(self, drafts, mode=None, padding=0, as_decodes=None, **options):
        """Return the attention metadata of the last batch."""
        num_reqs = self.batch.num_reqs
        batch = SimpleNamespace(
            num_reqs=num_reqs,
            num_tokens=7,
            num_reqs_after_padding=num_reqs + padding,
            num_tokens_after_padding=7 + padding,
            idx_mapping=self.batch.idx_mapping,
            num_scheduled_tokens=np.full(num_reqs, 3),
            is_prefilling_np=np.arange(num_reqs) == 1,
            prefill_runs_as_decode_np=as_decodes,
            seq_lens_cpu_upper_bound=torch.arange(num_reqs + padding) + 20,
            num_draft_tokens_per_req=None if drafts is None else np.array(drafts),
        )
        return self.state.prepare_attn(batch, mode, **options)

    def column(self, slot, column):
        return self.states.temporal(0)[0][10 * slot + 1 + column].clone()

    @property
    def fields(self):
        """The running column, source column, bias and accepted count of each slot."""
        state = self.state
        fields = (
            state._mamba_state_idx_gpu,
            state._mamba_src_col_gpu,
            state._mamba_src_off_gpu,
            state.num_accepted_tokens_gpu,
        )
        return list(zip(*(field.tolist() for field in fields), strict=True))


@pytest.fixture
def world(rng):
    return World(MODEL, rng)


def test_block_tables_may_move(world):
    """Regression: raw addresses of tables that each step gathered anew pointed to freed memory."""
    world.add(0, B)
    world.begin([0], [1], [B] * 4)
    world.tables = [table.clone() for table in world.tables]
    world.add(3, 2 * B)
    wanted = world.column(3, 1)
    world.begin([3], [1], [0, 0, 0, 2 * B])
    assert torch.equal(world.column(3, 2), wanted)


def test_without_align_mode_only_counts_are_kept():
    config = engine_config(MODEL, {})
    config.cache_config = SimpleNamespace(mamba_cache_mode="none")
    state = MambaHybridModelState(config, None, None, "cpu")
    state.initialize_kv_cache(MODEL.kv_cache_config(), None)
    state.add_request(1, SimpleNamespace(num_computed_tokens=5))
    state.preprocess_state(None, (), None, None)
    state.postprocess_state(torch.tensor([1, -1]), torch.tensor([3, 2]), torch.tensor([9] * 4))
    assert state.num_accepted_tokens_gpu.tolist() == [1, 3, 1, 1]
    state.postprocess_state(torch.tensor([2, -1, 0]), 4)
    assert state.num_accepted_tokens_gpu.tolist() == [4, 3, 4, 1]
    state.postprocess_state(torch.tensor([2]), 0)
    assert state.num_accepted_tokens_gpu.tolist() == [4, 3, 1, 1]
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
    with pytest.raises(InvalidArgumentError, match=f"columns of {B} tokens.*got {2 * B}"):
        world.state.initialize_kv_cache(world.config, None)


@pytest.mark.parametrize("slot", [-1, 4])
def test_slots_out_of_range(world, slot):
    with pytest.raises(InvalidArgumentError, match=rf"in \[0, 4\), got {slot}"):
        world.add(slot, 0)


def test_columns_out_of_range_change_nothing(world):
    world.add(0, B)
    world.begin([0], [1], [B] * 4)
    before = world.fields
    with pytest.raises(InvalidArgumentError, match="row 0 has 10 columns"):
        world.end([1], [11 * B] * 4)
    with pytest.raises(InvalidArgumentError, match="row 0 has 10 columns"):
        world.begin([0], [1], [11 * B] * 4)
    assert world.fields == before


Mode = Enum("Mode", ["NONE", "FULL"])


def test_layers_get_rows_and_padding(world):
    world.batch = SimpleNamespace(num_reqs=3, idx_mapping=world.on_device([2, -1, 0]))
    world.state.postprocess_state(world.on_device([2]), 3)
    attn = world.attention_metadata([2, 1, 0], Mode.FULL, padding=2)
    assert (attn.num_reqs, attn.num_tokens, attn.max_query_len, attn.max_seq_len) == (5, 9, 3, 24)
    assert attn.num_accepted_tokens.tolist() == [3, 1, 1, 1, 1]
    assert attn.num_accepted_tokens.dtype == torch.int32
    assert attn.num_decode_draft_tokens_cpu.tolist() == [2, -1, 0, -1, -1]
    assert attn.is_prefilling.tolist() == [False, True, False, False, False]
    attn = world.attention_metadata([2, 1, 0], Mode.NONE, padding=2)
    assert (attn.num_reqs, attn.num_tokens, attn.max_seq_len) == (3, 7, 22)
    assert len(attn.num_accepted_tokens) == 3


def test_graphs_are_for_the_longest_sequence_and_without_speculation_have_no_drafts(world):
    world.batch = SimpleNamespace(num_reqs=1, idx_mapping=world.on_device([0]))
    attn = world.attention_metadata(None, "FULL", for_capture=True)
    assert attn.max_seq_len == MODEL.max_tokens
    assert attn.num_decode_draft_tokens_cpu.tolist() == [0]
    world.state._config.num_speculative_tokens = 0
    assert world.attention_metadata(None).num_decode_draft_tokens_cpu is None


def test_decodes_are_recognised_as_in_vllm(world):
    """Regression: a decode without drafts did not read the state behind the accepted draft."""
    world.batch = SimpleNamespace(num_reqs=3, idx_mapping=world.on_device([0, 1, 2]))
    assert world.attention_metadata(None).num_decode_draft_tokens_cpu.tolist() == [0, -1, 0]
    attn = world.attention_metadata([0, 2, 2], as_decodes=np.array([False, True, False]))
    assert attn.num_decode_draft_tokens_cpu.tolist() == [0, 2, 2]
    assert attn.is_prefilling.tolist() == [False] * 3
