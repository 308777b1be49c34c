"""Tiny models of transformers, caches around them, and prompts."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_transformers_*"]


@pytest.fixture(scope="module")
def nemotron():
    """A model whose answers are remembered."""
    return importlib.import_module("batch_rig").subject("nemotron_h")


@pytest.fixture
def model():
    """A model of the test's own."""
    return importlib.import_module("transformers_rig").make_model("nemotron_h")


@pytest.fixture
def cache(model):
    return importlib.import_module("transformers_rig").make_cache(model)


@pytest.fixture
def prompt(generator):
    """Four blocks and a little more."""
    rig = importlib.import_module("transformers_rig")
    return rig.text(generator, 4 * rig.BLOCK + 3)
