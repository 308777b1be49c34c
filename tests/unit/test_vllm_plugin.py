"""The plugin where there is no vLLM; with a real one see tests/integration/test_vllm_real.py."""

import re
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace

import pytest
import torch
from sources import ROOT

from mamba_cache.errors import InvalidArgumentError, MissingExtraError, UnsupportedVersionError
from mamba_cache.integrations import vllm
from mamba_cache.integrations.vllm import align_on_host, plugin
from mamba_cache.integrations.vllm.plugin_checks import _Batch, copy_differences


@pytest.fixture
def modules(monkeypatch):
    """Modules by name, instead of those that are installed; others are missing."""
    found = {}

    def import_module(name):
        if name not in found:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found[name]

    monkeypatch.setattr(plugin.importlib, "import_module", import_module)
    return found


@pytest.mark.parametrize("value", [None, "", "0"])
def test_it_is_off_by_default(monkeypatch, modules, value):
    monkeypatch.delenv(plugin.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(plugin.SWITCH, value)
    plugin.load()
    assert vllm.replaced() == []


def test_the_switch_knows_two_values(monkeypatch):
    monkeypatch.setenv(plugin.SWITCH, "on")
    with pytest.raises(InvalidArgumentError, match="MAMBA_CACHE_VLLM must be 0 or 1, got 'on'"):
        plugin.load()


def test_without_vllm_it_says_so(monkeypatch, modules):
    monkeypatch.setenv(plugin.SWITCH, "1")
    with pytest.raises(MissingExtraError, match="vLLM is not installed"):
        plugin.load()
    with pytest.raises(MissingExtraError, match="pip install vllm"), vllm.installed():
        pass
    vllm.uninstall()
    assert vllm.replaced() == []


@pytest.mark.parametrize("name", ["vllm.v1.worker.mamba_utils", "vllm.v1.worker.gpu"])
def test_a_vllm_without_such_functions_is_refused(modules, monkeypatch, name):
    def missing(wanted):
        if wanted != "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return SimpleNamespace(__version__="0.9")

    monkeypatch.setattr(plugin.importlib, "import_module", missing)
    with pytest.raises(UnsupportedVersionError, match=re.escape(f"has no module {name}")):
        vllm.install()


def test_a_module_that_vllm_lacks_is_not_taken_for_an_old_version(modules, monkeypatch):
    def missing(wanted):
        if wanted != "vllm":
            raise ModuleNotFoundError("No module named 'numba'", name="numba")

    monkeypatch.setattr(plugin.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="numba"):
        vllm.install()


def test_the_entry_point_is_what_vllm_calls():
    """As the project declares it: what an old installation says is not known here."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    group = text.split('[project.entry-points."vllm.general_plugins"]\n')[1].split("\n\n")[0]
    entry = EntryPoint("mamba_cache", group.split('"')[1], "vllm.general_plugins")
    assert entry.load() is plugin.load


def test_engines_that_were_made_before_keep_vllms_own():
    """Known by their buffers, given by position or by name."""

    def ours(first, bufs=None, *, third=None):
        return "ours", first, bufs, third

    def theirs(*args, **kwargs):
        return "theirs", args, kwargs

    call = plugin._for_own_engines(ours, theirs, "bufs", int)
    assert call("a", 1, third=2) == ("ours", "a", 1, 2)
    assert call("a", bufs=1) == ("ours", "a", 1, None)
    assert call("a", "bufs") == ("theirs", ("a", "bufs"), {})
    assert call("a", bufs="b", third=2) == ("theirs", ("a",), {"bufs": "b", "third": 2})


def test_a_resident_state_that_was_made_before_keeps_vllms_own():
    called = []

    def theirs(*args):
        called.append(args)

    state = SimpleNamespace(_mamba_ctx=object(), recoverssm=None)
    plugin._preprocess(theirs)(state, "batch", "tables", "config", "computed")
    plugin._postprocess(theirs)(state, "mapping", 3)
    assert called == [(state, "batch", "tables", "config", "computed"), (state, "mapping", 3, None)]


def test_a_batch_is_compared_on_the_host_whatever_the_default_device():
    """Its states lay where an engine makes its tensors, and were copied by host addresses."""
    home = ModuleType("home")
    own = {name: getattr(vllm, name) for name in vllm.__all__}
    home.__dict__.update(vars(align_on_host) | own)
    home.UniformTypeKVCacheSpecs = SimpleNamespace
    home.is_conv_state_dim_first = lambda: False
    with torch.device("meta"):
        states = [state for layer in _Batch(home).layers.values() for state in layer.kv_cache]
        assert {state.device.type for state in states} == {"cpu"}
        assert copy_differences(home) == []
