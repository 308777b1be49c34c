"""What the interpreter cannot show: that the kernel compiles for a GPU, and how wide it accesses.

Triton compiles without a GPU, but not in a process that interprets kernels.
"""

import json
import os
import subprocess
import sys

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


def test_kernel_compiles_and_accesses_16_bytes_where_they_fit(tmp_path):
    compiled = subprocess.run(
        [sys.executable, "-c", PRINT_STORES_BY_WIDTH],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    wide, in_graph, narrow = json.loads(compiled.stdout)
    assert wide == in_graph == ["global.b64", "global.v2.b64"]
    assert narrow == ["global.b8", "global.v2.b64"]
