"""The report of kernels names the package that a model computes with, or the reference."""

import functools
import sys
from types import FunctionType, ModuleType

import pytest
import torch
import triton

from mamba_cache.bench.model_kernels import (
    KERNEL_PACKAGES,
    REFERENCE,
    kernels_of,
    library_versions,
    without_kernels,
)
from mamba_cache.errors import InvalidArgumentError


def function_of(module: str) -> FunctionType:
    """A function that says it was defined in ``module``."""

    def implementation() -> None:
        """Nothing."""

    implementation.__module__ = module
    return implementation


def decorated(func_name: str, implementation: FunctionType) -> FunctionType:
    """What transformers' ``use_kernel_func_from_hub_with_fallback`` leaves in a module."""

    @functools.wraps(function_of("transformers.models.some.modeling_some"))
    def wrapped() -> tuple[str, None]:
        return func_name, implementation()

    return wrapped


@pytest.fixture
def module(monkeypatch):
    """The modeling file of a model, and the packages that its kernels are from."""
    for name, version in (("mamba_ssm", "2.3"), ("fla", "0.6"), ("causal_conv1d", "1.7")):
        package = ModuleType(name)
        package.__version__ = version
        monkeypatch.setitem(sys.modules, name, package)
    modeling = ModuleType("modeling_some")
    monkeypatch.setitem(sys.modules, modeling.__name__, modeling)
    return modeling


def model_of(module):
    """A model with one layer that is defined in ``module``."""
    layer = type("Layer", (), {"__module__": module.__name__})()
    return type("Model", (), {"modules": lambda self: [layer]})()


def test_a_decorated_function_holds_its_implementation(module):
    module.scan = decorated("mamba_chunk_scan_combined", function_of("mamba_ssm.ops.triton.ssd"))
    module.conv = decorated("causal_conv1d_fn", function_of("transformers.models.some"))
    module.step = decorated("selective_state_update", function_of("mamba_ssm.ops.triton.update"))
    module.update = decorated("causal_conv1d_update", function_of("causal_conv1d.interface"))
    module.split = decorated("mamba_split_conv1d_scan_combined", function_of("mamba_ssm.ops"))
    assert kernels_of(model_of(module)) == {
        "scan": "mamba_ssm 2.3",
        "convolution": REFERENCE,
        "decode step": "mamba_ssm 2.3",
        "decode convolution": "causal_conv1d 1.7",
    }


def test_a_part_that_the_model_does_not_name_is_left_out(module):
    module.conv = decorated("causal_conv1d_fn", function_of("causal_conv1d.interface"))
    assert kernels_of(model_of(module)) == {"convolution": "causal_conv1d 1.7"}


@pytest.mark.parametrize("is_fast", [True, False])
def test_older_mamba_layers_take_all_kernels_or_none(module, is_fast):
    """Before transformers 5.17 they are globals, of which each may be there or not."""
    module.mamba_chunk_scan_combined = function_of("mamba_ssm.ops.triton.ssd")
    module.selective_state_update = function_of("mamba_ssm.ops.triton.update")
    module.causal_conv1d_fn = None
    module.is_fast_path_available = is_fast
    scan = "mamba_ssm 2.3" if is_fast else REFERENCE
    assert kernels_of(model_of(module)) == {
        "scan": scan,
        "convolution": REFERENCE,
        "decode step": scan,
    }


def test_older_delta_rule_layers_take_each_kernel_that_is_there(module):
    module.chunk_gated_delta_rule = function_of("fla.ops.gated_delta_rule.chunk")
    module.causal_conv1d_fn = None
    module.is_fast_path_available = False
    assert kernels_of(model_of(module)) == {"scan": "fla 0.6", "convolution": REFERENCE}


def test_this_environment_has_no_kernels():
    """As the tests' constraints say: so the real library is seen to be on its reference path."""
    pytest.importorskip("transformers", reason="needs the extra transformers")
    from mamba_cache.bench.ttft_model import FAMILIES, make_model  # noqa: PLC0415 - an extra

    for name, scan in (("tiny", "mamba2_chunk_scan"), ("qwen3-next-like", "torch_chunk")):
        model = make_model(FAMILIES[name], "meta")
        modeling = sys.modules[type(model).__module__]
        assert any(scan in function for function in vars(modeling)), "the library changed"
        assert set(kernels_of(model)) == {
            "scan", "convolution", "decode step", "decode convolution",
        }  # fmt: skip


def test_without_kernels_hides_packages_that_are_installed(tmp_path, monkeypatch):
    for name in KERNEL_PACKAGES:
        (tmp_path / f"{name}.py").write_text("")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with without_kernels():
        for name in KERNEL_PACKAGES:
            with pytest.raises(ImportError):
                __import__(name)
    for name in KERNEL_PACKAGES:
        assert __import__(name).__file__ == str(tmp_path / f"{name}.py")
        del sys.modules[name]  # monkeypatch would bring it back for the tests that follow


def test_without_kernels_is_refused_once_a_package_is_in_use(module):
    with (
        pytest.raises(InvalidArgumentError, match="causal_conv1d, fla, mamba_ssm"),
        without_kernels(),
    ):
        pass


def test_versions_are_those_that_run():
    transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
    versions = library_versions()
    assert versions.pop("torch") == torch.__version__
    assert versions == {"triton": triton.__version__, "transformers": transformers.__version__}
