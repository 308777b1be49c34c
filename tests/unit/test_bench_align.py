"""The align benchmark: without a GPU it says so."""

import pytest
import torch

from mamba_cache.bench import __main__ as command


def test_without_a_gpu_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="times a GPU, and PyTorch finds none"):
        command.main(["align"])
