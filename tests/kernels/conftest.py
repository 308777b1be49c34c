"""Device of the kernels in these tests: the GPU if there is one, else Triton's interpreter."""

import pytest
import torch

from mamba_cache.states.kernels import copy, extract


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(params=["torch", "triton", "triton as captured"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel, its twin, and the kernel as in a CUDA graph must pass the same tests.

    In a graph one program handles many list entries; here it handles few, so that a list takes
    several programs.
    """
    if request.param == "triton as captured":
        for kernels in (copy, extract):
            monkeypatch.setattr(kernels, "entries_per_program", lambda *_, **__: 2)
        return "triton"
    return request.param
