"""What the interpreter cannot show: that the kernel compiles for a GPU, and how wide it accesses.

Triton compiles without a GPU, but not in a process that interprets kernels.
"""

import json
import os
import subprocess
import sys

PRINT_STORES_BY_ALIGNMENT = """
import json, re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mamba_cache.states.kernels.copy import _WORDS, _copy_kernel

names = _copy_kernel.arg_names
types = {"num_tiles": "i32", "source_rows": "*i32", "destination_rows": "*i32"}

def stores(alignment):
    word_bytes = min(alignment, 8)
    constants = {
        "WORD": _WORDS[word_bytes], "ALIGNMENT": alignment,
        "WORDS_PER_ACCESS": alignment // word_bytes, "TILE_WORDS": 4096, "ZERO_SOURCE": -2,
    }
    source = ASTSource(
        _copy_kernel,
        {name: "constexpr" if name in constants else types.get(name, "*i64") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": 8}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return sorted(set(re.findall(r"st[.](\\S+)", ptx)))

print(json.dumps({alignment: stores(alignment) for alignment in (16, 8, 1)}))
"""


def test_kernel_compiles_and_accesses_as_wide_as_alignment_allows(tmp_path):
    compiled = subprocess.run(
        [sys.executable, "-c", PRINT_STORES_BY_ALIGNMENT],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    assert json.loads(compiled.stdout) == {
        "16": ["global.v2.b64"],
        "8": ["global.b64"],
        "1": ["global.b8"],
    }
