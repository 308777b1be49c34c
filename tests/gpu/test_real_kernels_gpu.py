"""``examples/real_kernels.py`` on a GPU, with the kernels that are installed there.

Megatron Core's come from the newest wheel in the folder that MEGATRON_WHEELS names, if it is set.
"""

import importlib
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from gpu_rig import assert_same_bits
from megatron_rig import find_wheels, megatron_core
from real_kernels_rig import off_the_reference
from sources import load_example

from mamba_cache.reference import HybridModelConfig

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # of missing packages

SHAPE = HybridModelConfig(
    layer_pattern="MM*-M",
    hidden_size=256,
    num_attention_heads=8,
    num_kv_heads=2,
    attention_head_dim=64,
    mamba_num_heads=16,
    mamba_head_dim=64,
    ssm_state_size=128,
    num_groups=2,
    ssm_chunk_size=256,
)
CLOSE = {torch.float32: 5e-2, torch.bfloat16: 0.3}
"""Allowed error of logits and states: kernels use TF32 for float32. Without states it is 1."""


@pytest.fixture(autouse=True)
def compiled_anew():
    """PyTorch recompiles a function for at most eight kinds of inputs, over all tests."""
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def example():
    return load_example("real_kernels")


@pytest.fixture(scope="module")
def kernels(example, tmp_path_factory):
    wheels = list(find_wheels().values())
    folder = tmp_path_factory.mktemp("megatron")
    with megatron_core(wheels[-1], folder) if wheels else nullcontext():
        yield example.find_kernels(can_run=True, skip=["vllm"])


def only(example, kernels, part):
    """Kernels of which one part is a package's and the others are reference functions."""
    if kernels.sources[part].startswith(example.REFERENCE):
        pytest.skip(f"{part}: {kernels.sources[part]}")
    return replace(example.find_kernels(can_run=False), **{part: getattr(kernels, part)})


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("part", ["scan", "update", "conv", "conv_update", "attention"])
def test_each_kernel_computes_what_the_reference_does(example, kernels, part, dtype):
    if part == "attention" and "flash" in kernels.sources[part] and dtype is torch.float32:
        pytest.skip("flash-attn takes half precision only")
    one = only(example, kernels, part)
    off = off_the_reference(example, one, shape=SHAPE, dtype=dtype, device="cuda")
    assert off < CLOSE[dtype]


def test_flex_attention_reads_block_tables(example):
    flex = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    kernels = replace(example.find_kernels(can_run=False), attention=example.flex_attention(flex))
    off = off_the_reference(example, kernels, shape=SHAPE, device="cuda")
    assert off < CLOSE[torch.float32]


def test_initial_states_that_are_left_out_are_noticed(example, kernels):
    right = only(example, kernels, "scan")

    def scan(inputs, states, batch):
        return right.scan(inputs, torch.zeros_like(states), batch)

    off = off_the_reference(example, replace(right, scan=scan), shape=SHAPE, device="cuda")
    assert off > 5 * CLOSE[torch.float32]


def test_rows_of_padding_are_left_alone(example, kernels, generator):
    update = only(example, kernels, "update").update
    drawn = torch.randn(6, 16, 64, 128, generator=generator).cuda()
    states, rows = drawn.clone(), torch.tensor([4, 0, -1, -1], dtype=torch.int32, device="cuda")

    def random(*shape):
        return torch.randn(*shape, generator=generator).cuda()

    inputs = example.ScanInputs(
        x=random(4, 16, 64), dt=random(4, 16), b=random(4, 2, 128), c=random(4, 2, 128),
        a=-random(16).abs(), d=random(16), dt_bias=random(16),
    )  # fmt: skip
    update(states, inputs, rows)
    kept = [1, 2, 3, 5]
    assert_same_bits(states[kept], drawn[kept])
    assert (states[[0, 4]] != drawn[[0, 4]]).any(dim=(1, 2, 3)).all()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_a_hit_equals_a_miss(example, kernels, dtype, capsys):
    if dtype is torch.float32:
        found = example.find_kernels(can_run=True, skip=["vllm", "flash-attn"])
        kernels = replace(kernels, attention=found.attention)
    sizes = example.Sizes(SHAPE, dtype, block=256, text=8 * 256, own=100, new=8, questions=3)
    found = example.compare(sizes, kernels, torch.device("cuda"))
    assert example.report(sizes, found) == 0, capsys.readouterr().out
    assert found.skipped == 31 * 256
