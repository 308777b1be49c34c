"""Compilation of kernels for a GPU, and widths of their accesses, which the interpreter ignores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MAX_SHARED_BYTES = 227 * 1024
"""Shared memory of one block on an H100 or H200."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_for_gpu.py")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_codes_are_stored_8_at_a_time_where_they_are_aligned(compiled):
    aligned, anywhere = compiled["codes"]
    assert "global.b8" not in aligned
    assert "global.v2.b32" in aligned
    assert "global.b8" in anywhere


def test_copies_access_16_bytes_where_they_fit(compiled):
    wide, in_graph, narrow = compiled["copies"]
    assert wide == in_graph == ["global.b64", "global.v2.b64"]
    assert narrow == ["global.b8", "global.v2.b64"]


def test_checksums_read_16_bytes_at_a_time_and_four_rounds_together(compiled):
    """Checksums of chunks, and of entries that are summed or compared."""
    for accesses in compiled["checksums"]:
        assert accesses.count(["ld", "v2.b64"]) == 4 * 2


def test_extraction_compiles_for_a_window_alone_and_a_state_alone(compiled):
    both, window, state = compiled["extraction"]
    assert window == ["global.b16"]
    assert state
    assert "global.b16" not in state
    assert both == sorted({*window, *state})


def test_kernels_of_align_copy_16_bytes_at_a_time(compiled):
    for accesses in compiled["align copies"]:
        assert accesses.count(["ld", "v2.b64"])
        assert accesses.count(["st", "v2.b64"])
    assert all(compiled["align plans"])


@pytest.mark.parametrize("kernel", ["attention", "attention of chunks"])
def test_attention_uses_matrix_units_and_fits_a_gpu(compiled, kernel):
    """The heads of Nemotron-H, Granite and Qwen3-Next, and odd ones in single precision."""
    uses_matrix_units, shared_bytes, spilled = zip(*compiled[kernel], strict=True)
    assert uses_matrix_units[:3] == (True,) * 3
    assert max(shared_bytes) < MAX_SHARED_BYTES
    assert spilled[:3] == (0,) * 3


def test_kernels_beside_attention_compile(compiled):
    assert compiled["combination"]
    assert compiled["writing"]
    assert compiled["sorting"] == 0  # spilled registers
