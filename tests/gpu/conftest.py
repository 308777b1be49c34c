"""Fixtures of tests on a GPU."""

from collections.abc import Iterator

import pytest
from gpu_rig import waiting_raises


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Any wait for the device raises until the test ends."""
    with waiting_raises():
        yield
