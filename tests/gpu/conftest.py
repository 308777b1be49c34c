"""Fixtures of tests on a GPU."""

from collections.abc import Iterator

import pytest
import torch
from context_rig import MODEL_CONFIG
from gpu_rig import waiting_raises

from mamba_cache.reference import HybridModel


@pytest.fixture(scope="session")
def model() -> HybridModel:
    """The model of ``context_rig``, the same weights, on the GPU."""
    return HybridModel(MODEL_CONFIG, dtype=torch.float64, device="cuda", seed=7)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Any wait for the device raises until the test ends."""
    with waiting_raises():
        yield
