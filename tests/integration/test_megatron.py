"""Megatron Core's slots replaced by this package's, in a stand-in package of Megatron's layout."""

import importlib
import sys
from pathlib import Path

import pytest

from mamba_cache import MambaSlotAllocator
from mamba_cache.errors import MambaSlotCapacityError, MissingExtraError, UnsupportedVersionError
from mamba_cache.integrations import megatron

CONTEXTS = "megatron.core.inference.contexts"

ALLOCATOR = """
import torch

MAX_INTERMEDIATE_OFFSETS_PER_REQUEST = 3


class MambaSlotCapacityError(RuntimeError):
    pass


class MambaSlotAllocator:
    def __init__(self, context, max_slots, num_mamba_layers, conv_states_shape, ssm_states_shape,
                 conv_states_dtype, ssm_states_dtype):
        raise AssertionError("Megatron's own slots are used")
"""

CONTEXT = """
from types import SimpleNamespace

import torch

from .mamba_slot_allocator import MambaSlotAllocator
from .mamba_slot_allocator import MambaSlotCapacityError as Full


class DynamicInferenceContext:
    mamba_conv_states = mamba_ssm_states = None

    def __init__(self):
        self.max_requests = 2
        self.block_size_tokens = self.mamba_chunk_size = 4
        self.prefix_caching_eviction_policy = "lru"
        self.device = "cpu"
        self.kv_block_allocator = SimpleNamespace(
            pool_size=4, block_ref_counts=torch.ones(4), block_timestamps=torch.zeros(4)
        )
        self.mamba_slot_allocator = MambaSlotAllocator(
            context=self, max_slots=1, num_mamba_layers=1, conv_states_shape=(2, 3),
            ssm_states_shape=(2, 2, 2), conv_states_dtype=torch.bfloat16,
            ssm_states_dtype=torch.float32,
        )
        self.kv_block_allocator.on_blocks_deregistered = (
            self.mamba_slot_allocator.on_kv_blocks_deregistered
        )
        self.request_to_kv_block_ids = self.mamba_metadata = self.batch_dimensions = None
        self.mamba_conv_states = self.mamba_ssm_states = None
        self.paused_request_count = 0

    def _compute_prefix_match(self, req, prefill_chunk_length): ...
    def _execute_pending_mamba_ops(self): ...
    def reset_mamba_state(self): ...

    def overfill(self):
        try:
            self.mamba_slot_allocator.allocate_slots_batch([0, 1])
        except Full as error:
            return error
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Puts a stand-in for Megatron Core on the path, and restores path and modules afterwards."""

    def write(allocator=ALLOCATOR, context=CONTEXT, *, version="9.9"):
        folder = tmp_path / Path(*CONTEXTS.split("."))
        folder.mkdir(parents=True)
        for package in (folder.parent, folder):
            (package / "__init__.py").touch()
        (folder.parent.parent / "__init__.py").write_text(f"__version__ = {version!r}")
        (folder / "dynamic_context.py").write_text(context)
        if allocator is not None:
            (folder / "mamba_slot_allocator.py").write_text(allocator)
        importlib.invalidate_caches()

    forget()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    megatron.uninstall()
    forget()


def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]


def load(name):
    return importlib.import_module(f"{CONTEXTS}.{name}")


@pytest.mark.parametrize("first", ["install", "import"])
def test_contexts_use_this_packages_slots(write, first):
    write()
    if first == "import":
        load("dynamic_context")
    megatron.install()
    context = load("dynamic_context").DynamicInferenceContext()
    assert type(context.mamba_slot_allocator) is MambaSlotAllocator
    error = context.overfill()
    assert type(error) is MambaSlotCapacityError
    assert (error.required, error.available) == (2, 1)
    home = load("mamba_slot_allocator")
    assert home.MambaSlotAllocator is MambaSlotAllocator
    assert home.MambaSlotCapacityError is MambaSlotCapacityError


def test_uninstalling_gives_every_module_its_own_back(write):
    """Two installs need one uninstall, and a ``with`` restores the state before it."""
    write()
    before = load("mamba_slot_allocator")
    own = (before.MambaSlotAllocator, before.MambaSlotCapacityError)
    megatron.uninstall()
    for _ in range(2):
        megatron.install()
        assert before.MambaSlotAllocator is MambaSlotAllocator
    with megatron.installed():
        pass
    assert before.MambaSlotAllocator is MambaSlotAllocator
    context = load("dynamic_context")  # it first sees Megatron's module with our classes in it
    for _ in range(2):
        megatron.uninstall()
        assert (before.MambaSlotAllocator, before.MambaSlotCapacityError) == own
        assert (context.MambaSlotAllocator, context.Full) == own
    with pytest.raises(AssertionError, match="Megatron's own slots are used"):
        context.DynamicInferenceContext()

    def fail():
        assert before.MambaSlotAllocator is MambaSlotAllocator
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), megatron.installed():
        fail()
    assert (context.MambaSlotAllocator, context.Full) == own


def test_a_version_without_a_capacity_error_of_its_own_has_one_meanwhile(write):
    context = CONTEXT.replace("import MambaSlotCapacityError as", "import _Other as")
    write(ALLOCATOR.replace("class MambaSlotCapacityError", "class _Other"), context)
    with megatron.installed():
        assert load("mamba_slot_allocator").MambaSlotCapacityError is MambaSlotCapacityError
    assert not hasattr(load("mamba_slot_allocator"), "MambaSlotCapacityError")


@pytest.mark.parametrize("version", ["0.19.2", "0.20.0rc0+d98e8a6", ""])
def test_later_versions_and_main_are_served(write, version):
    write(version=version)
    with megatron.installed():
        assert load("mamba_slot_allocator").MambaSlotAllocator is MambaSlotAllocator


LACKS = {
    "its version": (("9.9", "0.18.2"), r"Core 0.18.2 is older than 0\.19"),
    "another number of offsets": (
        ("REQUEST = 3", "REQUEST = 4"), r"lacks MAX_INTERMEDIATE_OFFSETS_PER_REQUEST=3"),
    "no restores of a step": (
        ("_execute_pending_mamba_ops", "_more"),
        r"lacks DynamicInferenceContext\._execute_pending_mamba_ops"),
    "more arguments": (
        ("ssm_states_dtype):", "ssm_states_dtype, prefix_cache_registry, more, and_more):"),
        "makes slots with prefix_cache_registry, more, and_more, which are not known here"),
}  # fmt: skip


@pytest.mark.parametrize("lack", LACKS.values(), ids=LACKS)
def test_a_version_that_lacks_what_is_replaced_is_refused(write, lack):
    (old, new), message = lack
    assert old in f"{ALLOCATOR} {CONTEXT} 9.9"
    version = "9.9".replace(old, new)
    write(ALLOCATOR.replace(old, new), CONTEXT.replace(old, new), version=version)
    with pytest.raises(UnsupportedVersionError, match=message):
        megatron.install()
    assert megatron.replaced() == []
    assert load("mamba_slot_allocator").MambaSlotAllocator is not MambaSlotAllocator


def test_a_version_without_slots_is_refused(write):
    write(allocator=None)
    with pytest.raises(UnsupportedVersionError, match=r"9\.9 has no module .*mamba_slot_allocator"):
        megatron.install()


@pytest.mark.parametrize("part", ["allocator", "context"])
def test_what_megatron_itself_lacks_is_not_taken_for_a_missing_module(write, part):
    sources = {"allocator": ALLOCATOR, "context": CONTEXT}
    write(**{part: sources[part].replace("import torch", "import not_installed_either")})
    with pytest.raises(ModuleNotFoundError, match="not_installed_either"):
        megatron.install()
    assert megatron.replaced() == []
    if part == "context":
        assert load("mamba_slot_allocator").MambaSlotAllocator is not MambaSlotAllocator


def test_the_methods_are_amended_and_given_back(write):
    write()
    context = load("dynamic_context").DynamicInferenceContext
    own = dict(vars(context))
    with megatron.installed():
        names = [name.rsplit(".", 1)[1] for name in megatron.replaced()]
        assert names[:2] == ["MambaSlotAllocator", "MambaSlotCapacityError"]
        assert names[2:] == [
            "_compute_prefix_match", "_execute_pending_mamba_ops", "reset_mamba_state",
        ]  # fmt: skip
        for name in names[2:]:
            assert vars(context)[name].__wrapped__ is own[name]
    assert dict(vars(context)) == own


@pytest.mark.parametrize("name", ["megatron", "megatron.core"])
def test_without_megatron_core_the_error_names_the_extra(write, monkeypatch, name):
    write()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"pip install -e \'\.\[megatron\]\'"):
        megatron.install()
    megatron.uninstall()
