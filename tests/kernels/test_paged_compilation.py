"""That the attention to KV blocks compiles for a GPU, and uses its matrix units.

Triton compiles without a GPU, but not in a process that interprets kernels.
"""

import json
import os
import subprocess
import sys

PRINT_INSTRUCTIONS = """
import json, re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mamba_cache.integrations.transformers.batching.kernels import decode_inputs
from mamba_cache.integrations.transformers.batching.kernels import paged_attention as module

TARGET = GPUTarget("cuda", 90, 32)

def compiled(kernel, types, constants, aligned, warps):
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=TARGET, options={"num_warps": warps})

def attend(dtype, group, head_dim, block):
    types = dict.fromkeys(("query", "keys", "values"), f"*{dtype}")
    types |= dict.fromkeys(("sums", "peaks", "totals"), "*fp32")
    types |= {"tables": "*i32", "places": "*i64", "lengths": "*i32", "scale": "fp32"}
    types |= dict.fromkeys(("query_stride", "table_stride", "token_stride"), "i32")
    constants = {
        "KV_HEADS": 8, "GROUP": group, "GROUP_PAD": triton.next_power_of_2(max(group, 16)),
        "HEAD_DIM": head_dim, "HEAD_PAD": triton.next_power_of_2(max(head_dim, 16)),
        "BLOCK": block, "TILE": module._TILE, "SPLITS": 2,
    }
    aligned = ("query", "keys", "values", "query_stride", "token_stride")
    made = compiled(module._attend_kernel, types, constants, aligned, 4)
    ptx = made.asm["ptx"]
    return ["mma" in ptx, made.metadata.shared, len(re.findall(r"st[.]local", ptx))]

def attend_chunk(dtype, group, head_dim, block):
    types = dict.fromkeys(("query", "keys", "values", "output"), f"*{dtype}")
    types |= {"tables": "*i32", "scale": "fp32"}
    types |= dict.fromkeys(("places", "starts", "lengths"), "*i64")
    strides = ("row_stride", "head_stride", "query_stride", "table_stride", "token_stride")
    types |= dict.fromkeys((*strides, "num_tokens"), "i32")
    head_pad = triton.next_power_of_2(max(head_dim, 16))
    constants = {
        "KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "HEAD_PAD": head_pad,
        "BLOCK": block, "QUERIES": module._QUERIES, "TILE": module._TILE,
    }
    aligned = ("query", "keys", "values", "output", "row_stride", "head_stride", "query_stride")
    warps = module._num_warps(head_pad)
    made = compiled(module._chunk_kernel, types, constants, (*aligned, "token_stride"), warps)
    ptx = made.asm["ptx"]
    return ["mma" in ptx, made.metadata.shared, len(re.findall(r"st[.]local", ptx))]

combine = compiled(
    module._combine_kernel,
    {"sums": "*fp32", "peaks": "*fp32", "totals": "*fp32", "output": "*bf16"},
    {"GROUP": 4, "HEAD_DIM": 128, "HEAD_PAD": 128, "SPLITS": 2, "SPLITS_PAD": 2},
    ("sums", "output"), 1,
)
sort = compiled(
    decode_inputs._sort_kernel,
    {"rows_of_places": "*i32"}
    | dict.fromkeys(("token_ids", "positions", "kv_slots"), "*i64")
    | dict.fromkeys(("places_out", "tokens_out", "positions_out", "slots_out"), "*i64")
    | dict.fromkeys(("num_places", "num_rows", "place_stride"), "i32") | {"dummy_slot": "i64"},
    {"ROWS": decode_inputs._ROWS, "PLACES_PAD": 512}, (), 4,
)
write = compiled(
    decode_inputs._write_kernel,
    dict.fromkeys(("keys", "values", "pool"), "*bf16")
    | dict.fromkeys(("key_stride", "value_stride"), "i32")
    | {"slots": "*i64", "half_stride": "i64"},
    {"SIZE": 1024, "TILE": decode_inputs._TILE}, ("keys", "values", "pool"), 4,
)
print(json.dumps([
    attend_chunk("bf16", 4, 128, 256), attend_chunk("bf16", 4, 64, 256),
    attend_chunk("bf16", 8, 256, 256), attend_chunk("fp32", 4, 80, 48),
    attend("bf16", 4, 128, 256), attend("bf16", 4, 64, 256), attend("bf16", 8, 256, 256),
    attend("fp32", 4, 80, 48), bool(combine.asm["ptx"]),
    bool(write.asm["ptx"]),
    len(re.findall(r"st[.]local", sort.asm["ptx"])),
]))
"""

MOST_SHARED_BYTES = 227 * 1024
"""Of one block on an H100 or H200."""


def test_the_kernels_compile_for_a_gpu():
    """Nemotron-H's, Granite's and Qwen3-Next's heads, and odd ones in single precision."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", PRINT_INSTRUCTIONS],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    *kernels, combines, writes, spilled_when_sorted = json.loads(ran.stdout)
    assert combines
    assert writes
    assert spilled_when_sorted == 0
    assert max(shared for _, shared, _ in kernels) < MOST_SHARED_BYTES
    for in_half_precision in (kernels[:3], kernels[4:7]):
        assert [uses_matrix_units for uses_matrix_units, _, _ in in_half_precision] == [True] * 3
        assert [spilled for _, _, spilled in in_half_precision] == [0] * 3
