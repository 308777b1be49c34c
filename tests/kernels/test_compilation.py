"""What the interpreter cannot show: that the kernel compiles for a GPU, and how wide it accesses.

Triton compiles without a GPU, but not in a process that interprets kernels.
"""

import os
import re
import subprocess
import sys

import pytest

COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mamba_cache.states.kernels.copy import _WORDS, _copy_kernel

word_bytes, alignment = int(sys.argv[1]), int(sys.argv[2])
constants = {
    "WORD": _WORDS[word_bytes], "ALIGNMENT": alignment,
    "WORDS_PER_ACCESS": alignment // word_bytes, "TILE_WORDS": 4096, "ZERO_SOURCE": -2,
}
types = {"num_tiles": "i32", "source_rows": "*i32", "destination_rows": "*i32"}
names = _copy_kernel.arg_names
source = ASTSource(
    _copy_kernel,
    {name: "constexpr" if name in constants else types.get(name, "*i64") for name in names},
    {(names.index(name),): value for name, value in constants.items()},
)
target = GPUTarget("cuda", 90, 32)
print(triton.compile(source, target=target, options={"num_warps": 8}).asm["ptx"])
"""


@pytest.mark.parametrize(
    ("word_bytes", "alignment", "access"),
    [(8, 16, "global.v2.b64"), (8, 8, "global.b64"), (1, 1, "global.b8")],
)
def test_kernel_compiles_and_accesses_as_wide_as_alignment_allows(
    word_bytes, alignment, access, tmp_path
):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    compiled = subprocess.run(
        [sys.executable, "-c", COMPILE, str(word_bytes), str(alignment)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    assert set(re.findall(r"st\.(\S+)", compiled.stdout)) == {access}
