"""Megatron Core's slots replaced by this package's, in a stand-in package of Megatron's layout."""

import importlib
import sys
from pathlib import Path

import pytest

from mamba_cache import MambaSlotAllocator, MambaSlotCapacityError
from mamba_cache.errors import MissingExtraError, UnsupportedVersionError
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

    def allocate_slots_batch(self, block_ids: list) -> list: ...
    def _evict_lru_slots_batch(self, num_needed, candidate_ids): ...
    def get_slot(self, block_id: int) -> int: ...
    def has_state(self, block_id: int) -> bool: ...
    def invalidate_block(self, block_id: int) -> None: ...
    def on_kv_blocks_deregistered(self, block_ids_list: list, hashes_to_delete: set): ...
    def store_from_tensors(self, block_id, layer_idx, ssm_state, conv_state): ...
    def store_from_live_batch(self, slots: list, request_indices: list): ...
    def restore_to_live(self, request_idx: int, block_id: int) -> bool: ...
    def register_block_hashes_batch(self, block_ids: list, hashes: list): ...
    def compute_and_store_offsets(self, req, current_id, skip_tokens, prefill_chunk_length,
                                  num_matched_blocks, matched_block_ids,
                                  overall_required_blocks): ...
    def get_intermediate_cpu_data(self): ...
    def transfer_intermediate_to_gpu(self, prefill_start: int, prefill_count: int): ...
    def commit_intermediate_states(self) -> None: ...
    def reset(self) -> None: ...
"""

CONTEXT = """
from types import SimpleNamespace

import torch

from .mamba_slot_allocator import MambaSlotAllocator
from .mamba_slot_allocator import MambaSlotCapacityError as Full


class DynamicInferenceContext:
    max_requests = 2
    device = "cpu"
    kv_block_allocator = SimpleNamespace(
        pool_size=4, block_ref_counts=torch.ones(4), block_timestamps=torch.zeros(4)
    )

    def __init__(self):
        self.slots = MambaSlotAllocator(
            context=self, max_slots=1, num_mamba_layers=1, conv_states_shape=(2, 3),
            ssm_states_shape=(2, 2, 2), conv_states_dtype=torch.bfloat16,
            ssm_states_dtype=torch.float32,
        )

    def overfill(self):
        try:
            self.slots.allocate_slots_batch([0, 1])
        except Full as error:
            return error
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Puts a stand-in of Megatron Core on the path, and everything back afterwards."""

    def write(allocator=ALLOCATOR, context=CONTEXT, version="9.9"):
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
    assert type(context.slots) is MambaSlotAllocator
    error = context.overfill()
    assert type(error) is MambaSlotCapacityError
    assert (error.required, error.available) == (2, 1)
    home = load("mamba_slot_allocator")
    assert home.MambaSlotAllocator is MambaSlotAllocator
    assert home.MambaSlotCapacityError is MambaSlotCapacityError


def test_uninstalling_gives_every_module_its_own_back(write):
    write()
    before = load("mamba_slot_allocator")
    own = (before.MambaSlotAllocator, before.MambaSlotCapacityError)
    megatron.install()
    context = load("dynamic_context")  # it first sees Megatron's module with our classes in it
    megatron.uninstall()
    assert (before.MambaSlotAllocator, before.MambaSlotCapacityError) == own
    assert (context.MambaSlotAllocator, context.Full) == own
    with pytest.raises(AssertionError, match="Megatron's own slots are used"):
        context.DynamicInferenceContext()


def test_doing_it_twice_does_nothing_more(write):
    write()
    own = load("mamba_slot_allocator").MambaSlotAllocator
    megatron.uninstall()
    for _ in range(2):
        megatron.install()
        assert load("mamba_slot_allocator").MambaSlotAllocator is MambaSlotAllocator
    for _ in range(2):
        megatron.uninstall()
        assert load("mamba_slot_allocator").MambaSlotAllocator is own


def test_a_with_block_leaves_things_as_they_were(write):
    write()
    own = load("mamba_slot_allocator").MambaSlotAllocator

    def fail():
        assert load("mamba_slot_allocator").MambaSlotAllocator is MambaSlotAllocator
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), megatron.installed():
        fail()
    assert load("mamba_slot_allocator").MambaSlotAllocator is own
    megatron.install()
    with megatron.installed():
        pass
    assert load("mamba_slot_allocator").MambaSlotAllocator is MambaSlotAllocator


def test_a_version_without_a_capacity_error_of_its_own_has_one_meanwhile(write):
    write(ALLOCATOR.replace("class MambaSlotCapacityError", "class _Other"), context="")
    with megatron.installed():
        assert load("mamba_slot_allocator").MambaSlotCapacityError is MambaSlotCapacityError
    assert not hasattr(load("mamba_slot_allocator"), "MambaSlotCapacityError")


DIFFERENCES = {
    "a further constructor parameter": (
        "ssm_states_dtype):",
        "ssm_states_dtype, prefix_cache_registry=None):",
        r"__init__ takes \['context', .*'prefix_cache_registry'\], not \['context', .*dtype'\]",
    ),
    "a further one by keyword": (
        "ssm_states_dtype):",
        "ssm_states_dtype, *, registry=None):",
        r"__init__ takes .*'registry'\], not",
    ),
    "constructor parameters in another order": (
        "max_slots, num_mamba_layers",
        "num_mamba_layers, max_slots",
        r"__init__ takes \['context', 'num_mamba_layers', 'max_slots'",
    ),
    "parameters in another order": (
        "ssm_state, conv_state",
        "conv_state, ssm_state",
        r"store_from_tensors takes .*'conv_state', 'ssm_state'\], not .*'ssm_state', 'conv_state'",
    ),
    "a further method": (
        "    def reset(self)",
        "    def allocate_slot(self, block_id): ...\n    def reset(self)",
        r"its allocate_slot\(block_id\) is unknown here",
    ),
    "a method that is gone": (
        "    def on_kv_blocks_deregistered(self, block_ids_list: list, hashes_to_delete: set): ...",
        "",
        "it has no on_kv_blocks_deregistered",
    ),
    "another number of offsets": (
        "REQUEST = 3",
        "REQUEST = 2",
        "MAX_INTERMEDIATE_OFFSETS_PER_REQUEST is 2, not 3",
    ),
    "no number of offsets": (
        "MAX_INTERMEDIATE_OFFSETS_PER_REQUEST = 3",
        "",
        "MAX_INTERMEDIATE_OFFSETS_PER_REQUEST is missing, not 3",
    ),
    "no such class": ("class MambaSlotAllocator", "class Slots", "no class MambaSlotAllocator"),
}


@pytest.mark.parametrize("difference", DIFFERENCES.values(), ids=DIFFERENCES)
def test_another_interface_is_refused_and_what_differs_is_named(write, difference):
    old, new, message = difference
    assert old in ALLOCATOR
    write(ALLOCATOR.replace(old, new), context="")
    with pytest.raises(UnsupportedVersionError, match=rf"Megatron Core 9\.9 .*{message}"):
        megatron.install()
    home = load("mamba_slot_allocator")
    assert getattr(home, "MambaSlotAllocator", None) is not MambaSlotAllocator
    assert home.MambaSlotCapacityError is not MambaSlotCapacityError


def test_all_differences_are_named_at_once(write):
    write(ALLOCATOR.replace("get_slot", "slot_of").replace("REQUEST = 3", "REQUEST = 4"))
    with pytest.raises(UnsupportedVersionError, match=r"is 4, not 3; .*no get_slot; .*slot_of"):
        megatron.install()


def test_a_version_without_slots_is_refused(write):
    write(allocator=None, context="")
    with pytest.raises(UnsupportedVersionError, match=r"9\.9 has no module .*mamba_slot_allocator"):
        megatron.install()


def test_what_megatron_itself_lacks_is_not_taken_for_a_missing_module(write):
    write("import not_installed_either")
    with pytest.raises(ModuleNotFoundError, match="not_installed_either"):
        megatron.install()


@pytest.mark.parametrize("name", ["megatron", "megatron.core"])
def test_without_megatron_core_the_error_says_what_to_install(write, monkeypatch, name):
    write()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match="pip install megatron-core"):
        megatron.install()
    megatron.uninstall()
