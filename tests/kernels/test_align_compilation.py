"""What the interpreter cannot show of align's kernels: that they compile for a GPU.

Triton compiles without a GPU, but not in a process that interprets kernels.
"""

import json
import os
import subprocess
import sys

PRINT_ACCESSES = """
import json, re, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mamba_cache.integrations.vllm.kernels import align_columns as kernels

TYPES = {"facts": "*i64", "pointers": "*i64"}
TYPES |= dict.fromkeys(("num_reqs", "num_groups", "row_stride", "entry_ints"), "i32")

def accesses(kernel, *absent, **constants):
    constants |= dict.fromkeys(absent)
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else TYPES.get(name, "*i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": kernels._NUM_WARPS}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return re.findall(r"(?:ld|st)[.]global[.]\\S+", ptx)

few = {"BLOCK_SIZE": 512, "BY_SLOT": True, "ROWS": 64}
many = {"BLOCK_SIZE": 512, "BY_SLOT": False, "ROWS": 1024}
resident = "query_start_loc", "num_computed", "num_accepted"
accesses(kernels._precopy_kernel, **few)
accesses(kernels._precopy_kernel, "idx_mapping", *resident, **many)
accesses(kernels._postcopy_kernel, "num_scheduled", "num_drafts", **few)
accesses(kernels._postcopy_kernel, "idx_mapping", "num_sampled", **many)
print(json.dumps([accesses(kernels._copy_kernel, WORD=word) for word in (tl.int8, tl.int64)]))
"""


def test_kernels_compile_and_copy_16_bytes_at_a_time(tmp_path):
    compiled = subprocess.run(
        [sys.executable, "-c", PRINT_ACCESSES],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    for found in json.loads(compiled.stdout):
        assert {"ld.global.v2.b64", "st.global.v2.b64"} <= set(found)
