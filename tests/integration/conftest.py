"""Tiny models of transformers, caches around them, and prompts."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_transformers_*"]


@pytest.fixture(scope="module")
def nemotron():
    """A shared model with memoised answers."""
    return importlib.import_module("batch_rig").subject("nemotron_h")


@pytest.fixture
def model():
    """A model of the test's own."""
    return importlib.import_module("transformers_rig").make_model("nemotron_h")


@pytest.fixture
def cache(model):
    return importlib.import_module("transformers_rig").make_cache(model)


@pytest.fixture
def ahead(monkeypatch):
    """Batches begin a step before the last one's tokens are on the host, as on a GPU."""
    module = importlib.import_module("mamba_cache.integrations.transformers.batching.batcher")
    monkeypatch.setattr(module, "_AHEAD_ON", ("cuda", "cpu"))


@pytest.fixture
def either_way(seed, request):
    """Batches begin ahead with every other seed."""
    if seed % 2:
        request.getfixturevalue("ahead")


@pytest.fixture
def prompt(generator):
    """A prompt of four blocks and a few tokens."""
    rig = importlib.import_module("transformers_rig")
    return rig.text(generator, 4 * rig.BLOCK + 3)
