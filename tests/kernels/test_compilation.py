"""What the interpreter cannot show: that the kernel compiles for a GPU, and how wide it accesses.

Triton compiles without a GPU, but not in a process that interprets kernels.
"""

import json
import os
import subprocess
import sys

PRINT_STORES_OF_CODES = """
import json, re, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mamba_cache.states.kernels.quantize import (
    STORE_OPTIONS, STORED_CODES, _quantized_copy_kernel, stored_tile_sizes,
)

names = _quantized_copy_kernel.arg_names
types = {"chunks": "*i64", "states": "*bf16", "codes": "*i8", "scales": "*fp32",
         "source_rows": "*i32", "destination_rows": "*i32"}

def stores(alignment):
    tile = stored_tile_sizes(64, 128)
    constants = {
        "IS_STORE": True, "HEAD_DIM": 64, "STATE_DIM": 128,
        "ROWS": tile.rows, "COLUMNS": tile.columns, "CODES_ALIGNMENT": alignment,
        "NARROW_WORD": tl.int64, "TILES_PER_CHUNK": 16, "PAIRS": 1,
    }
    # As Triton sees aligned tensors; what is said of codes is left to the kernel.
    aligned = ("chunks", "states", "scales", "states_layer_stride", "states_row_stride")
    source = ASTSource(
        _quantized_copy_kernel,
        {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=STORE_OPTIONS).asm["ptx"]
    return sorted(set(re.findall(r"st[.](global\\S+)", ptx)))

print(json.dumps([stores(STORED_CODES), stores(1)]))
"""

PRINT_STORES_BY_WIDTH = """
import json, re, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mamba_cache.states.kernels.copy import _NUM_WARPS, _copy_kernel

names = _copy_kernel.arg_names
types = {"chunks": "*i64", "num_pairs": "i32", "num_wide": "i32"}

def stores(narrow, pairs):
    constants = {"NARROW_WORD": narrow, "TILES_PER_CHUNK": 16, "PAIRS": pairs}
    source = ASTSource(
        _copy_kernel,
        {name: "constexpr" if name in constants else types.get(name, "*i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": _NUM_WARPS}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return sorted(set(re.findall(r"st[.](global\\S+)", ptx)))

print(json.dumps([stores(tl.int64, 1), stores(tl.int64, 64), stores(tl.int8, 1)]))
"""

PRINT_LOADS_OF_CHECKSUMS = """
import json, re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mamba_cache.states.kernels.checksum import NUM_WARPS, _checksum_kernel

types = {"chunks": "*i64", "expected": "*i64", "sums": "*i64", "changed": "*i32"}
names = _checksum_kernel.arg_names
source = ASTSource(_checksum_kernel, {name: types.get(name, "i32") for name in names})
options = {"num_warps": NUM_WARPS}
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
print(json.dumps(re.findall(r"ld[.](global\\S+)", ptx)))
"""

PRINT_ACCESSES_OF_ENTRIES = """
import json, re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mamba_cache.states.kernels.checksum import NUM_WARPS, _entries_kernel

types = {"chunks": "*i64", "entries": "*i64", "changed": "*i32"}
names = _entries_kernel.arg_names

def accesses(compares):
    source = ASTSource(
        _entries_kernel,
        {name: "constexpr" if name == "COMPARES" else types.get(name, "i32") for name in names},
        {(names.index("COMPARES"),): compares},
    )
    options = {"num_warps": NUM_WARPS}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return re.findall(r"(ld|st)[.]global[.](\\S+)", ptx)

print(json.dumps([accesses(False), accesses(True)]))
"""

PRINT_STORES_OF_EXTRACTION = """
import json, re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mamba_cache.states.kernels.extract import _COPY_OPTIONS, _extract_kernel

names = _extract_kernel.arg_names
WINDOW, STATE = ("slot_conv", "live_conv", "conv_input"), ("slot_ssm", "chunk_states")
sizes = {
    "WIDTH": 3, "WIDTH_POWER_OF_2": 4, "CHANNELS": 256, "SLOT_ALIGNMENT": 16,
    "HEAD_DIM": 1, "STATE_DIM": 4096, "ROWS": 1, "COLUMNS": 1024, "ENTRIES": 1,
}

def stores(window, state):
    types = {"slot_conv": "*i16", "live_conv": "*i16", "conv_input": "*i16", "slot_ssm": "*i32",
             "chunk_states": "*i32", **dict.fromkeys(names[6:11], "*i32")}
    constants = {**sizes, "slot_scales": None}
    constants |= {} if window else dict.fromkeys(WINDOW)
    constants |= {} if state else dict.fromkeys(STATE)
    source = ASTSource(
        _extract_kernel,
        {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index("chunk_states"),): [["tt.divisibility", 16]]} if state else {},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=_COPY_OPTIONS)
    return sorted(set(re.findall(r"st[.](global\\S+)", compiled.asm["ptx"])))

print(json.dumps([stores(True, True), stores(True, False), stores(False, True)]))
"""


def run_compiler(script, tmp_path):
    compiled = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    return json.loads(compiled.stdout)


def test_codes_are_stored_8_at_a_time_where_they_are_aligned(tmp_path):
    aligned, anywhere = run_compiler(PRINT_STORES_OF_CODES, tmp_path)
    assert "global.b8" not in aligned
    assert "global.v2.b32" in aligned
    assert "global.b8" in anywhere


def test_kernel_compiles_and_accesses_16_bytes_where_they_fit(tmp_path):
    wide, in_graph, narrow = run_compiler(PRINT_STORES_BY_WIDTH, tmp_path)
    assert wide == in_graph == ["global.b64", "global.v2.b64"]
    assert narrow == ["global.b8", "global.v2.b64"]


def test_checksums_read_16_bytes_at_a_time_and_four_rounds_together(tmp_path):
    loads = run_compiler(PRINT_LOADS_OF_CHECKSUMS, tmp_path)
    assert loads.count("global.v2.b64") == 4 * 2


def test_checksums_of_entries_do_so_too(tmp_path):
    for accesses in run_compiler(PRINT_ACCESSES_OF_ENTRIES, tmp_path):
        assert accesses.count(["ld", "v2.b64"]) == 4 * 2


def test_extraction_compiles_for_a_window_alone_and_a_state_alone(tmp_path):
    both, window, state = run_compiler(PRINT_STORES_OF_EXTRACTION, tmp_path)
    assert window == ["global.b16"]
    assert state
    assert "global.b16" not in state
    assert both == sorted({*window, *state})
