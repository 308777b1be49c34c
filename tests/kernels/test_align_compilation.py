"""What the interpreter cannot show of align's kernels: that they compile for a GPU.

Triton compiles without a GPU, but not in a process that interprets kernels.
"""

import json
import os
import subprocess
import sys

PRINT_STORES = """
import json, re, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mamba_cache.integrations.vllm.kernels import align_columns

WIDE_POINTERS = {"chunks", "block_tables", "sources", "destinations", "sizes", "piece_bytes"}
WIDE_POINTERS |= {"num_rows", "row_strides"}
COUNTS = {"num_reqs", "num_padded", "num_chunks", "table_stride"}
COUNTS |= {"num_groups", "row_stride", "group_stride"}

def type_of(name, constants):
    if name in constants:
        return "constexpr"
    return "i32" if name in COUNTS else "*i64" if name in WIDE_POINTERS else "*i32"

def stores(kernel, word, rows):
    values = {"WORD": word, "ROWS": rows, "IS_MAPPED": True, "BLOCK_SIZE": 512, "TURNS": 16}
    values |= {"TILES_PER_CHUNK": 16, "BY_SLOT": True, "IS_SAMPLED": True}
    values |= {"COLUMNS": 3, "PADDED_COLUMNS": 4}
    names = kernel.arg_names
    constants = {name: value for name, value in values.items() if name in names}
    source = ASTSource(
        kernel,
        {name: type_of(name, constants) for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": align_columns._NUM_WARPS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return sorted(set(re.findall(r"st[.](global[.]\\S+)", compiled.asm["ptx"])))

found = {}
aligning = ("precopy", "postcopy", "precopy_resident", "postcopy_resident", "accept", "gather")
aligning += ("aligned_blocks",)
for kernel in (getattr(align_columns, f"_{name}_kernel") for name in (*aligning, "regions")):
    name = kernel.fn.__name__
    found[name] = stores(kernel, tl.int64, 64)
    found[name + " of many"] = stores(kernel, tl.int16, 1024)
print(json.dumps(found))
"""


def test_kernels_compile_and_copy_16_bytes_at_a_time(tmp_path):
    compiled = subprocess.run(
        [sys.executable, "-c", PRINT_STORES],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    found = json.loads(compiled.stdout)
    small = ("_accept", "_aligned", "_gather")
    copying = [name for name in found if not name.startswith(small)]
    assert len(copying) == 10
    for name in copying:
        assert "global.v2.b64" in found[name], name
