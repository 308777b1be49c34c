"""Old import paths lead to the same objects."""

import importlib
import re
import subprocess
import sys

import pytest
from sources import ROOT

OLD_PATHS = {
    "mamba_cache.align": "mamba_cache.integrations.vllm",
    "mamba_cache.metadata.mamba2": "mamba_cache.integrations.vllm.mamba2_attention",
}


@pytest.mark.parametrize("path", OLD_PATHS)
def test_an_old_path_exports_the_same_objects(path: str) -> None:
    old, new = importlib.import_module(path), importlib.import_module(OLD_PATHS[path])
    assert old.__all__ == new.__all__
    assert {name for name in old.__all__ if getattr(old, name) is not getattr(new, name)} == set()


def test_old_paths_can_be_imported_first_and_without_a_warning() -> None:
    program = "; ".join(f"import {path}" for path in OLD_PATHS)
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_the_page_on_architecture_lists_the_old_paths() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(mamba_cache[^|`]*)` \| `(mamba_cache[\w.]*)` \|$", page, re.MULTILINE)
    assert dict(rows) == OLD_PATHS
