"""The doctor's comparison of kernels with their twins notices what it is there to notice."""

import torch

from mamba_cache.cli import kernel_checks
from mamba_cache.cli.kernel_checks import KERNELS, check_kernels
from mamba_cache.states import StateCopier


def test_all_kernels_are_equal_to_their_twins():
    assert check_kernels() == dict.fromkeys(KERNELS, "")


def test_each_run_writes_something(device):
    """Else a kernel that does nothing would be equal to a twin that does nothing."""
    pools = {
        "copy": kernel_checks._pool(device, seed=1),
        "int8 store": kernel_checks._pool(device, seed=3, quantized=True),
        "int8 store, stochastic": kernel_checks._pool(device, seed=3, quantized=True),
        "int8 restore": kernel_checks._pool(device, seed=6),
        "extract": [t[0] for t in kernel_checks._pool(device, seed=7)],
        "extract to int8": [t[0] for t in kernel_checks._pool(device, seed=7, quantized=True)],
    }
    for name, before in pools.items():
        for tensor, old in zip(KERNELS[name](device, "torch"), before, strict=True):
            assert not torch.equal(tensor, old), name


def test_a_kernel_that_copies_too_little_is_noticed(monkeypatch):
    class Copier(StateCopier):
        def __init__(self, *tensors, backend):
            super().__init__(*tensors, backend=backend)
            self.num_pairs = 2 if backend == "triton" else 4

        def copy(self, sources, targets):
            super().copy(sources[: self.num_pairs], targets[: self.num_pairs])

    monkeypatch.setattr(kernel_checks, "StateCopier", Copier)
    faults = check_kernels()
    assert "differ from the PyTorch twin's" in faults.pop("copy")
    assert set(faults.values()) == {""}


def test_a_kernel_that_raises_is_named(monkeypatch):
    def run(device, backend):
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setitem(KERNELS, "copy", run)
    assert check_kernels()["copy"] == "RuntimeError: no such instruction"


def test_bits_are_compared_not_values(monkeypatch):
    def run(device, backend):
        return [torch.tensor([-0.0 if backend == "triton" else 0.0])]

    monkeypatch.setitem(KERNELS, "copy", run)
    assert check_kernels()["copy"] == "1 bytes differ from the PyTorch twin's"
