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

    def _compute_prefix_match(self, req, prefill_chunk_length):
        if req is None:
            return [], 0, 0, 0, 0, prefill_chunk_length
        (matched_block_ids, num_blocks_from_pool, already_allocated_blocks,
         overall_required_blocks, prefix_skip_tokens, effective_prefill_chunk_length) = req.match
        return (matched_block_ids, num_blocks_from_pool, already_allocated_blocks,
                overall_required_blocks, prefix_skip_tokens, effective_prefill_chunk_length)

    def add_request(self, req, prefill_chunk_length=None):
        self.kv_block_allocator.block_ref_counts[[0]] += 1
        self.kv_block_allocator.allocate_memory_blocks(1)

    def overfill(self):
        try:
            self.mamba_slot_allocator.allocate_slots_batch([0, 1])
        except Full as error:
            return error

    def release(self, rows):
        sa = self.mamba_slot_allocator
        sa._intermediate_counts_cpu[rows] = 0
"""

KV_BLOCKS = """
class KVBlockAllocator:
    def __init__(self):
        self.total_count = 4
        self.block_ref_counts = self.block_timestamps = self.block_hashes = None
        self.on_blocks_deregistered = None
"""

METADATA = """
class MambaMetadata:
    def __init__(self):
        self.request_to_mamba_state_idx = self.intermediate_count = None

    @property
    def per_request_intermediate_counts(self):
        return []
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Puts a stand-in of Megatron Core on the path, and everything back afterwards."""

    def write(allocator=ALLOCATOR, context=CONTEXT, *, version="9.9", kv_blocks=KV_BLOCKS):
        folder = tmp_path / Path(*CONTEXTS.split("."))
        metadata = folder / "attention_context" / "mamba_metadata.py"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(METADATA)
        for package in (folder.parent, folder):
            (package / "__init__.py").touch()
        (folder.parent.parent / "__init__.py").write_text(f"__version__ = {version!r}")
        (folder / "dynamic_context.py").write_text(context)
        (folder / "kv_block_allocator.py").write_text(kv_blocks)
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
    context = CONTEXT.replace("import MambaSlotCapacityError as", "import _Other as")
    write(ALLOCATOR.replace("class MambaSlotCapacityError", "class _Other"), context)
    with megatron.installed():
        assert load("mamba_slot_allocator").MambaSlotCapacityError is MambaSlotCapacityError
    assert not hasattr(load("mamba_slot_allocator"), "MambaSlotCapacityError")


UNUSED = {
    "parameters of other names": ("block_ids: list", "blocks: list"),
    "a further method that nobody calls": (
        "    def reset(",
        "    def more(self): ...\n    def reset(",
    ),
    "a method that nobody calls is gone": (
        "    def has_state(self, block_id: int) -> bool: ...",
        "",
    ),
}


@pytest.mark.parametrize("difference", UNUSED.values(), ids=UNUSED)
def test_what_megatron_does_not_use_makes_no_difference(write, difference):
    assert difference[0] in ALLOCATOR
    write(ALLOCATOR.replace(*difference))
    with megatron.installed():
        assert type(load("dynamic_context").DynamicInferenceContext().mamba_slot_allocator) is (
            MambaSlotAllocator
        )


OFFSETS = {
    "another number of offsets": ("REQUEST = 3", "REQUEST = 2", "is 2, not 3"),
    "no number of offsets": (
        "MAX_INTERMEDIATE_OFFSETS_PER_REQUEST = 3",
        "",
        "MAX_INTERMEDIATE_OFFSETS_PER_REQUEST is missing, not 3",
    ),
    "no such class": ("class MambaSlotAllocator", "class Slots", "no class MambaSlotAllocator"),
}


@pytest.mark.parametrize("difference", OFFSETS.values(), ids=OFFSETS)
def test_other_slots_are_refused(write, difference):
    old, new, message = difference
    write(ALLOCATOR.replace(old, new), context="")
    refused(message)


DIFFERENCES = {
    "a further constructor parameter": (
        "ssm_states_dtype=torch.float32,",
        "ssm_states_dtype=torch.float32, registry=1,",
        r"dynamic_context\.py:\d+ makes the slots by MambaSlotAllocator\(.*registry=1\)",
    ),
    "too few": (
        "max_slots=1, ",
        "",
        r"dynamic_context\.py:\d+ makes the slots by MambaSlotAllocator\(context=self, num",
    ),
    "a method that is unknown here": (
        "allocate_slots_batch([0, 1])",
        "allocate_some([0, 1])",
        r"dynamic_context\.py:\d+ uses allocate_some of the slots, which has nothing here",
    ),
    "another number of arguments": (
        "allocate_slots_batch([0, 1])",
        "allocate_slots_batch([0], [1])",
        r"calls self\.mamba_slot_allocator\.allocate_slots_batch\(\[0\], \[1\]\)",
    ),
    "an attribute that is called": (
        "allocate_slots_batch([0, 1])",
        "free_count()",
        r"calls self\.mamba_slot_allocator\.free_count\(\)",
    ),
    "a table of another name, under an alias": (
        "sa._intermediate_counts_cpu",
        "sa._intermediate_counts_of_mine",
        r"dynamic_context\.py:\d+ uses _intermediate_counts_of_mine",
    ),
    "no rows": (
        "self.max_requests = 2",
        "self.rows = 2",
        "its DynamicInferenceContext has no max_requests",
    ),
    "a match that returns less": (
        "return [], 0, 0, 0, 0, prefill_chunk_length",
        "return [], 0",
        "_compute_prefix_match is not the one",
    ),
    "a match of something else": (
        "(self, req, prefill_chunk_length)",
        "(self, req, start)",
        "_compute_prefix_match is not the one",
    ),
    "no match": ("_compute_prefix_match", "_match", "_compute_prefix_match is not the one"),
}


@pytest.mark.parametrize("difference", DIFFERENCES.values(), ids=DIFFERENCES)
def test_another_use_is_refused_and_what_differs_is_named(write, difference):
    old, new, message = difference
    assert old in CONTEXT
    write(context=CONTEXT.replace(old, new))
    refused(message)


def refused(message):
    with pytest.raises(UnsupportedVersionError, match=rf"Megatron Core 9\.9 .*{message}"):
        megatron.install()
    home = load("mamba_slot_allocator")
    assert getattr(home, "MambaSlotAllocator", None) is not MambaSlotAllocator
    assert home.MambaSlotCapacityError is not MambaSlotCapacityError
    assert megatron.replaced() == []


CALLS = {
    "allocate_slots_batch(*[[0, 1]])": True,
    "allocate_slots_batch(**{'block_ids': [0, 1]})": True,
    "allocate_slots_batch(block_ids=[0, 1])": True,
    "allocate_slots_batch(ids=[0, 1])": False,
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_are_judged_by_their_arguments(write, call):
    write(context=CONTEXT.replace("allocate_slots_batch([0, 1])", call))
    if CALLS[call]:
        with megatron.installed():
            context = load("dynamic_context").DynamicInferenceContext()
            assert type(context.overfill()) is MambaSlotCapacityError
    else:
        refused("calls self.mamba_slot_allocator.allocate_slots_batch")


def test_all_differences_are_named_at_once(write):
    context = CONTEXT.replace("allocate_slots_batch(", "allocate(")
    kv_blocks = KV_BLOCKS.replace("total_count", "count").replace("block_hashes", "hashes")
    write(ALLOCATOR.replace("REQUEST = 3", "REQUEST = 4"), context, kv_blocks=kv_blocks)
    refused(
        r"is 4, not 3; .*uses allocate .*; its KVBlockAllocator has no pool_size or total_count; "
        "its KVBlockAllocator has no block_hashes"
    )


def test_a_version_without_kv_blocks_of_that_name_is_refused(write):
    write(kv_blocks="")
    refused("it has no class KVBlockAllocator")


def test_a_context_that_cannot_be_imported_leaves_megatrons_slots(write):
    write(context=CONTEXT.replace("import torch", "import not_installed_either"))
    with pytest.raises(ModuleNotFoundError, match="not_installed_either"):
        megatron.install()
    assert load("mamba_slot_allocator").MambaSlotAllocator is not MambaSlotAllocator
    assert megatron.replaced() == []


def test_a_context_that_makes_room_first_holds_its_blocks_meanwhile(write):
    line = "        self.kv_block_allocator.block_ref_counts[[0]] += 1\n"
    assert line in CONTEXT
    write(context=CONTEXT.replace(line, ""))
    with megatron.installed():
        assert megatron.replaced()[-1].endswith(".add_request")  # it has no check_availability
    assert megatron.replaced() == []


def test_only_what_the_version_has_is_amended(write):
    write()
    context = load("dynamic_context").DynamicInferenceContext
    own = context._compute_prefix_match
    with megatron.installed():
        assert [name.rsplit(".", 1)[1] for name in megatron.replaced()] == [
            "MambaSlotAllocator", "MambaSlotCapacityError", "_compute_prefix_match"
        ]  # fmt: skip
        assert context._compute_prefix_match.__wrapped__ is own
    assert context._compute_prefix_match is own


def test_a_version_without_slots_is_refused(write):
    write(allocator=None)
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
    with pytest.raises(MissingExtraError, match=r"pip install -e \'\.\[megatron\]\'"):
        megatron.install()
    megatron.uninstall()
