"""Old import paths lead to the same objects: pickles and ``isinstance`` know them."""

import importlib
import pickle
import re
import subprocess
import sys

import pytest
from sources import ROOT

from mamba_cache import reference
from mamba_cache.integrations import vllm

OLD_PACKAGES = {
    "mamba_cache.align": vllm,
    "mamba_cache.engine": reference,
    "mamba_cache.models": reference,
    "mamba_cache.metadata.mamba2": importlib.import_module(
        "mamba_cache.integrations.vllm.mamba2_attention"
    ),
}

# What each former submodule defined: one name is enough to know it by.
OLD_MODULES = {
    "mamba_cache.align.buffers": "MambaCopyBuffers",
    "mamba_cache.align.decisions": "StateMove",
    "mamba_cache.align.engine": "SchedulerOutput",
    "mamba_cache.align.gpu_context": "MambaSpecDecodeGPUContext",
    "mamba_cache.align.host": "preprocess_mamba",
    "mamba_cache.align.memory": "get_conv_copy_spec",
    "mamba_cache.align.resident": "MambaHybridModelState",
    "mamba_cache.align.spec": "MambaSpec",
    "mamba_cache.align.staging": "stage_postprocess_inputs_to_gpu",
    "mamba_cache.align.table": "StateTable",
    "mamba_cache.engine.drafting": "NgramDrafter",
    "mamba_cache.engine.engine": "Engine",
    "mamba_cache.engine.model": "LanguageModel",
    "mamba_cache.engine.progress": "token_progress",
    "mamba_cache.engine.requests": "EngineRequest",
    "mamba_cache.engine.results": "Completion",
    "mamba_cache.engine.sampling": "SamplingParams",
    "mamba_cache.engine.scheduler": "Scheduler",
    "mamba_cache.engine.verification": "verify",
    "mamba_cache.engine.waiting": "branch_positions",
    "mamba_cache.models.attention": "AttentionLayer",
    "mamba_cache.models.batch": "ModelCaches",
    "mamba_cache.models.config": "HybridModelConfig",
    "mamba_cache.models.conv": "causal_conv1d",
    "mamba_cache.models.hybrid": "HybridModel",
    "mamba_cache.models.mamba": "Mamba2Layer",
    "mamba_cache.models.ssd": "ssd_chunk_scan",
    "mamba_cache.models.ssd_naive": "ssd_naive",
    "mamba_cache.models.weights": "WeightMaker",
    "mamba_cache.metadata.mamba2": "Mamba2AttentionMetadataBuilder",
}

# All names that spec pages and guides told people to import from there.
SHOWN = {
    "mamba_cache.align": {
        "CpuGpuBuffer", "MambaBuffers", "MambaCopyBuffers", "MambaCopySpec",
        "MambaHybridAttnMetadata", "MambaHybridModelState", "MambaSpec",
        "MambaSpecDecodeGPUContext", "StateMove", "cleanup_mamba_state_idx", "get_conv_copy_spec",
        "get_conv_copy_spec_ds", "get_mamba_groups", "get_temporal_copy_spec", "postprocess_mamba",
        "postprocess_mamba_align_gpu", "postprocess_mamba_all", "preprocess_mamba",
        "stage_mamba_state_idx_to_gpu", "stage_postprocess_inputs_to_gpu",
        "stage_postprocess_metadata_to_gpu",
    },
    "mamba_cache.engine": {
        "Completion", "DecodingStats", "Drafter", "Engine", "FinishReason", "LanguageModel",
        "ModelShape", "NgramDrafter", "SamplingParams", "TokenEvent", "sample", "verify",
        "verify_greedy_on_device",
    },
    "mamba_cache.models": {"HybridModel", "HybridModelConfig", "ModelCaches"},
    "mamba_cache.metadata.mamba2": {
        "CommonAttentionMetadata", "Mamba2AttentionBackend", "Mamba2AttentionMetadata",
        "Mamba2AttentionMetadataBuilder",
    },
}  # fmt: skip


@pytest.mark.parametrize("path", OLD_PACKAGES)
def test_an_old_path_exports_the_same_objects(path: str) -> None:
    old, new = importlib.import_module(path), OLD_PACKAGES[path]
    assert SHOWN[path] <= set(old.__all__)
    assert {name for name in old.__all__ if getattr(old, name) is not getattr(new, name)} == set()


def test_a_former_submodule_is_the_module_in_its_place() -> None:
    for path, name in OLD_MODULES.items():
        found = getattr(importlib.import_module(path), name)
        assert getattr(sys.modules[found.__module__], name) is found, path
        assert not found.__module__.startswith(tuple(OLD_PACKAGES)), path
        if path not in OLD_PACKAGES:  # found by `from mamba_cache.engine import results`, too
            package, _, submodule = path.rpartition(".")
            assert getattr(sys.modules[package], submodule) is sys.modules[path], path


def test_old_submodules_can_be_imported_first_and_without_a_warning() -> None:
    program = "; ".join(f"from {path} import {name}" for path, name in OLD_MODULES.items())
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"cmamba_cache.engine.results\nFinishReason\n.", reference.FinishReason),
        (b"cmamba_cache.models.config\nHybridModelConfig\n.", reference.HybridModelConfig),
        (b"cmamba_cache.align.spec\nMambaSpec\n.", vllm.MambaSpec),
    ],
)
def test_an_old_pickle_is_read(payload: bytes, expected: type) -> None:
    """What was pickled names the module that defined it then."""
    assert pickle.loads(payload) is expected


def test_names_that_left_the_package_of_metadata_are_found_with_a_warning() -> None:
    metadata = importlib.import_module("mamba_cache.metadata")
    for name in SHOWN["mamba_cache.metadata.mamba2"]:
        with pytest.warns(DeprecationWarning, match=r"import it from mamba_cache\.integrations"):
            assert getattr(metadata, name) is getattr(vllm, name)
    with pytest.raises(AttributeError, match="no attribute 'Mamba3'"):
        _ = metadata.Mamba3


def test_the_page_on_architecture_lists_the_old_paths() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`mamba_cache[^|]*) \| `(mamba_cache[\w.]*)` \|$", page, re.MULTILINE)
    listed = {old: new for cell, new in rows for old in re.findall(r"`([\w.]+)`", cell)}
    assert listed == {old: new.__name__ for old, new in OLD_PACKAGES.items()}


@pytest.mark.parametrize(
    ("package", "old", "new"),
    [
        ("mamba_cache.context", "CacheMemory", "DynamicInferenceContext"),
        ("mamba_cache.metadata", "BoundaryEntry", "CheckpointEntry"),
    ],
)
def test_old_names_of_classes_lead_to_what_took_their_place(package, old, new):
    module = importlib.import_module(package)
    with pytest.warns(DeprecationWarning, match=f"{old} is an old name of {new}") as caught:
        assert getattr(module, old) is getattr(module, new)
    assert caught[0].filename == __file__  # it names who is to change, not the package
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        module.no_such_name  # noqa: B018
