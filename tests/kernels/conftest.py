"""Where kernels run in these tests: on the GPU if there is one, else in Triton's interpreter."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """The kernel and its twin must pass the same tests."""
    return request.param
