"""Precision of matrix products by PyTorch's settings of the process."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from mamba_cache._torch import all_digits, float32_precision, has_all_digits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MATMUL = {CPU: torch.backends.mkldnn.matmul, CUDA: torch.backends.cuda.matmul}


@pytest.fixture(autouse=True)
def settings():
    """Restore the settings after each test."""
    before = {device: matmul.fp32_precision for device, matmul in MATMUL.items()}
    yield
    for device, matmul in MATMUL.items():
        matmul.fp32_precision = before[device]


@pytest.mark.parametrize("own", MATMUL, ids=str)
@pytest.mark.parametrize(
    ("setting", "name"), [("none", "highest"), ("ieee", "highest"), ("tf32", "high")]
)
def test_each_device_has_a_separate_precision(own, setting, name) -> None:
    MATMUL[own].fp32_precision = setting
    found = {device: float32_precision(device) for device in MATMUL}
    assert found == dict.fromkeys(MATMUL, "highest") | {own: name}


def test_all_digits_are_there_until_the_end_of_the_block() -> None:
    MATMUL[CPU].fp32_precision = "tf32"
    with torch.autocast("cpu", torch.bfloat16):
        with all_digits(CPU):
            assert has_all_digits(CPU)
        assert MATMUL[CPU].fp32_precision == "tf32"
        assert torch.is_autocast_enabled("cpu")
        with contextlib.suppress(ZeroDivisionError), all_digits(CPU):
            raise ZeroDivisionError
        assert MATMUL[CPU].fp32_precision == "tf32"
    assert not has_all_digits(CPU)


def test_bfloat16_is_medium() -> None:
    MATMUL[CPU].fp32_precision = "bf16"
    assert (float32_precision(CPU), float32_precision(CUDA)) == ("medium", "highest")


def test_autocast_leaves_out_digits() -> None:
    with torch.autocast("cpu", torch.float16):
        assert (has_all_digits(CPU), has_all_digits(CUDA)) == (False, True)
        with all_digits(CPU):
            assert has_all_digits(CPU)
    assert has_all_digits(CPU)


def test_full_precision_changes_no_setting(monkeypatch) -> None:
    MATMUL[CPU].fp32_precision = "ieee"
    monkeypatch.setattr("mamba_cache._torch._set", None)
    with all_digits(CPU):
        assert has_all_digits(CPU)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_pytorch_before_2_9_has_one_setting_for_all(precision, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends, "mkldnn", SimpleNamespace())
    now = [precision]
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: now[-1])
    monkeypatch.setattr(torch, "set_float32_matmul_precision", now.append)
    assert float32_precision(CPU) == precision
    with all_digits(CPU):
        assert has_all_digits(CPU)
    assert now[-1] == precision
