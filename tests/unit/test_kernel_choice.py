"""The choice of kernels by device, for every package that has kernels."""

import sys
from types import ModuleType

import pytest
import torch

from mamba_cache.context.kernels import decode, decode_numpy
from mamba_cache.errors import InvalidArgumentError, MissingExtraError
from mamba_cache.integrations.vllm import align_kernels, copies
from mamba_cache.states import kernels_for
from mamba_cache.states.kernels import (
    checksum,
    checksum_torch,
    copy,
    extract,
    twins,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PAIRS = [
    (copy, twins),
    (extract, twins),
    (checksum, checksum_torch),
    (decode, decode_numpy),
    (align_kernels, copies),
]


@pytest.mark.parametrize(("kernels", "twins"), PAIRS, ids=lambda module: module.__name__)
def test_kernels_work_on_a_gpu_and_their_twins_elsewhere(kernels, twins):
    def choose(backend, device):
        return kernels_for(backend, device, kernels=kernels.__name__, twins=twins)

    assert choose("auto", GPU) is choose("triton", GPU) is choose("triton", CPU) is kernels
    assert choose("auto", CPU) is choose("torch", CPU) is choose("torch", GPU) is twins


def test_without_an_interpreter_kernels_need_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for backend, message in (
        ("triton", "needs tensors on a CUDA device, got cpu"),
        ("x", "must be 'auto', 'torch' or 'triton', got 'x'"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            kernels_for(backend, CPU, kernels=copy.__name__, twins=twins)
    assert kernels_for("triton", GPU, kernels=copy.__name__, twins=twins) is copy


def test_without_triton_only_the_twins_are_there(monkeypatch):
    twins = ModuleType("twins")
    monkeypatch.setitem(sys.modules, decode.__name__, None)
    with pytest.raises(MissingExtraError, match="pip install triton"):
        kernels_for("auto", GPU, kernels=decode.__name__, twins=twins)
    assert kernels_for("auto", CPU, kernels=decode.__name__, twins=twins) is twins


def test_the_vllm_adapters_twin_is_for_the_cpu_alone():
    assert copies.align_kernels_for("torch", CPU) is copies
    assert copies.align_kernels_for("auto", GPU) is align_kernels
    with pytest.raises(InvalidArgumentError, match="decides on the CPU"):
        copies.align_kernels_for("torch", GPU)
