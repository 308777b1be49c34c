"""``examples/real_kernels.py``: kernels of other packages over this package's metadata and rows.

The kernels of Megatron Core run in Triton's interpreter, from wheels in the folder that
MEGATRON_WHEELS names. Other signatures are stood in for by functions that compute token by token.
"""

import importlib
import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from megatron_rig import WHEELS, find_wheels, megatron_core
from packed_steps import ssd_naive
from real_kernels_rig import BLOCK, SHAPE, off_the_reference
from sources import load_example
from torch.nn.attention.flex_attention import flex_attention

from mamba_cache.reference.ssd import SSDInputs

unfused = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
CLOSE = 2e-5
"""How far logits may be from the reference model's; without a state they are 0.1 and more off."""


@pytest.fixture(scope="module")
def example():
    return load_example("real_kernels")


@pytest.fixture
def reference(example):
    return example.find_kernels(can_run=False)


def test_runs_with_installed_kernels_and_names_missing_ones(example, monkeypatch, capsys):
    monkeypatch.setattr(example.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(example.importlib.util, "find_spec", lambda name: None)
    small = replace(example.SMALL, model=SHAPE, block=BLOCK, text=4 * BLOCK, own=9, questions=2)
    monkeypatch.setattr(example, "SMALL", small)
    assert example.main() == 0
    printed = capsys.readouterr().out
    assert "scan         reference (PyTorch); no megatron-core; no vllm" in printed
    assert "FAILED" not in printed
    assert printed.count("\nok ") == 5
    for command in example.INSTALL.values():
        assert command in printed
    # Twice the whole text, and once all but a block.
    assert f"{11 * BLOCK:,} of " in printed


def test_the_stand_ins_are_the_reference_model(example, reference):
    assert off_the_reference(example, reference) < CLOSE


@unfused
def test_flex_attention_reads_block_tables(example, reference):
    kernels = replace(reference, attention=example.flex_attention(flex_attention))
    assert 0 < off_the_reference(example, kernels) < CLOSE


@unfused
def test_flex_attention_that_sees_too_little_is_noticed(example, reference, monkeypatch):
    paged = example._paged_mask

    def one_earlier(kind, kv_cache, batch):
        earlier = replace(batch.metadata, positions=batch.metadata.positions - 1)
        return paged(kind, kv_cache, replace(batch, metadata=earlier))

    monkeypatch.setattr(example, "_paged_mask", one_earlier)
    kernels = replace(reference, attention=example.flex_attention(flex_attention))
    assert not off_the_reference(example, kernels) < CLOSE


def token_by_token(x, dt, A, B, C, bounds, chunk_bounds, initial, out, D, dt_bias):
    """Scans each sequence by itself; returns the states at the ends of all chunks."""
    dt = torch.nn.functional.softplus(dt + dt_bias)
    ends, found = chunk_bounds.tolist()[1:], {}
    for number, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        part = slice(start, end)
        inputs = SSDInputs(x=x[part], dt=dt[part], a=A, b=B[part], c=C[part])
        y, states = ssd_naive(inputs, initial[number])
        out[part] = y + D[:, None] * x[part]
        found |= {at: states[at - start - 1] for at in ends if start < at <= end}
    return torch.stack([found[end] for end in ends])


def vllm_scan(
    x, dt, A, B, C, chunk_size, cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx, out,
    D=None, z=None, dt_bias=None, initial_states=None, dt_softplus=False,
    dt_limit=(0.0, float("inf")), return_intermediate_states=False, state_dtype=None,
):  # fmt: skip
    assert dt_softplus
    assert return_intermediate_states
    assert chunk_size == BLOCK
    states = token_by_token(
        x, dt, A, B, C, cu_seqlens, cu_chunk_seqlens, initial_states, out, D, dt_bias
    )
    assert len(cu_seqlens) == len(last_chunk_indices) + 1 == len(initial_states) + 1
    assert len(seq_idx) == len(states)
    return states.to(state_dtype)


def megatron_scan(
    x, dt, A, B, C, chunk_size, cu_chunk_seqlens, last_chunk_indices, seq_idx, out,
    D=None, z=None, dt_bias=None, initial_states=None, dt_softplus=False,
    dt_limit=(0.0, float("inf")), return_raw_states=False, state_dtype=None,
):  # fmt: skip
    bounds = torch.cat([cu_chunk_seqlens[:1], cu_chunk_seqlens[last_chunk_indices.long() + 1]])
    states = vllm_scan(
        x, dt, A, B, C, chunk_size, bounds, cu_chunk_seqlens, last_chunk_indices, seq_idx, out,
        D, z, dt_bias, initial_states, dt_softplus, dt_limit, return_raw_states, state_dtype,
    )  # fmt: skip
    assert seq_idx.tolist() == sorted(seq_idx.tolist())
    return states[last_chunk_indices.long()], states


def updating(null_block_id):
    """Makes a decode step that skips rows with a given number, as kernels of packages do."""

    def update(states, x, dt, A, B, C, D, dt_bias, dt_softplus, rows):
        assert dt_softplus
        y = torch.zeros_like(x)
        for i, row in enumerate(rows.tolist()):
            if row == null_block_id:
                continue
            inputs = SSDInputs(
                x=x[i : i + 1], dt=torch.nn.functional.softplus(dt[i, :, 0] + dt_bias[:, 0])[None],
                a=A[:, 0, 0], b=B[i : i + 1], c=C[i : i + 1],
            )  # fmt: skip
            one, after = ssd_naive(inputs, states[row])
            states[row] = after[0]
            y[i] = one[0] + D * x[i]
        return y

    return update


def mamba_ssm_update(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
    state_batch_indices=None,
):  # fmt: skip
    return updating(-1)(state, x, dt, A, B, C, D, dt_bias, dt_softplus, state_batch_indices)


def vllm_update(
    state, x, dt, A, B, C, D, dt_bias, z=None, dt_softplus=False, state_batch_indices=None,
    dst_state_batch_indices=None, null_block_id=0, out=None,
):  # fmt: skip
    update = updating(null_block_id)
    out.copy_(update(state, x, dt, A, B, C, D, dt_bias, dt_softplus, state_batch_indices))


@pytest.mark.parametrize("scan", [vllm_scan, megatron_scan])
@pytest.mark.parametrize("update", [vllm_update, mamba_ssm_update])
def test_functions_of_both_signatures_compute_the_same(example, reference, scan, update):
    kernels = replace(
        reference, scan=example.packed_scan(scan), update=example.state_update(update)
    )
    assert 0 < off_the_reference(example, kernels) < CLOSE


def test_padding_of_vllm_would_leave_the_first_row_out(example, reference):
    """vLLM pads with row 0 by default; row 0 belongs to a request here."""

    def by_default(*arguments, null_block_id=0, out=None, **options):
        vllm_update(*arguments, null_block_id=0, out=out, **options)

    kernels = replace(reference, update=example.state_update(by_default))
    assert not off_the_reference(example, kernels) < CLOSE


def later(call):
    bounds = call["cu_chunk_seqlens"]
    return (bounds + 1).clamp(max=bounds[-1])


WRONG = {
    "initial states left out": lambda call: call | {"initial_states": call["initial_states"] * 0},
    "chunks of other sequences": lambda call: call | {"seq_idx": call["seq_idx"].clamp(max=0)},
    "chunks that begin a token later": lambda call: call | {"cu_chunk_seqlens": later(call)},
}


WHEEL = find_wheels()
ENDS = {version: WHEEL[version] for version in sorted({*list(WHEEL)[:1], *list(WHEEL)[-1:]})}
"""The oldest wheel and the newest: they differ in how chunk states are asked for."""


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_real_kernels_gpu.py runs")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestMegatron:
    """Kernels of Megatron's wheels in Triton's interpreter: slow, so the model has few heads."""

    SHAPE = replace(SHAPE, mamba_num_heads=2, num_groups=1)

    @pytest.fixture(scope="class", params=list(ENDS) or ["no wheels"])
    def kernels(self, request, example, tmp_path_factory):
        assert WHEEL, f"{WHEELS} must name a folder with wheels"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MAMBA_DETERMINISTIC", "1")  # autotuning needs a driver
            patch.setattr(torch.cuda, "device", lambda index: nullcontext())
            patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
            with megatron_core(ENDS[request.param], tmp_path_factory.mktemp("megatron")):
                yield example.find_kernels(can_run=True, skip=["vllm", "mamba-ssm", "torch"])

    def test_they_compute_the_same(self, example, kernels):
        for part in ("scan", "update", "conv"):
            assert kernels.sources[part].startswith("megatron-core"), kernels.sources
        assert 0 < off_the_reference(example, kernels, shape=self.SHAPE) < CLOSE

    @pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
    def test_metadata_that_are_wrong_are_noticed(self, example, kernels, wrong):
        module, name = example.CANDIDATES["scan"][0].module, example.CANDIDATES["scan"][0].name
        right = getattr(importlib.import_module(module), name)

        def scan(*arguments, **call):
            return right(*arguments, **wrong(call))

        scan.__signature__ = example.inspect.signature(right)
        broken = replace(kernels, scan=example.packed_scan(scan))
        assert not off_the_reference(example, broken, shape=self.SHAPE) < 100 * CLOSE

    def test_a_hit_equals_a_miss(self, example, kernels):
        sizes = example.Sizes(
            self.SHAPE, torch.float32, block=BLOCK, text=3 * BLOCK, own=9, new=2, questions=2
        )
        found = example.compare(sizes, kernels, torch.device("cpu"))
        assert example.report(sizes, found) == 0
        assert found.skipped == 8 * BLOCK
        assert found.off_reference < CLOSE
