"""Compile kernels for a GPU and print their memory accesses as JSON; no GPU is needed.

``test_compilation.py`` runs this in a separate process: Triton does not compile in a process
that interprets kernels.
"""

import json
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mamba_cache.integrations.transformers.batching.kernels import paged_attention, pieces
from mamba_cache.integrations.vllm import align_kernels
from mamba_cache.states.kernels import checksum, copy, extract, quantize

TARGET = GPUTarget("cuda", 90, 32)
# Nemotron-H, Granite, Qwen3-Next, and an odd shape: dtype, queries per head, head size, block.
HEADS = [("bf16", 4, 128, 256), ("bf16", 4, 64, 256), ("bf16", 8, 256, 256), ("fp32", 4, 40, 48)]


def build(kernel, types, constants, *, aligned=(), other="i32", **options):
    """Compile a kernel; ``types`` maps arguments to types, all others have type ``other``."""
    names = kernel.arg_names
    kinds = {name: types.get(name, other) for name in names}
    source = ASTSource(
        kernel,
        kinds | dict.fromkeys(constants, "constexpr"),
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=TARGET, options=options)


def stores(made):
    return sorted(set(re.findall(r"st[.](global\S+)", made.asm["ptx"])))


def accesses(made):
    return re.findall(r"(ld|st)[.]global[.](\S+)", made.asm["ptx"])


def spilled(made):
    return len(re.findall(r"st[.]local", made.asm["ptx"]))


def codes(alignment):
    rows, columns = quantize.stored_tile_sizes(64, 128)
    types = {
        "chunks": "*i64", "states": "*bf16", "codes": "*i8", "scales": "*fp32",
        "source_rows": "*i32", "destination_rows": "*i32",
    }  # fmt: skip
    constants = {
        "NUM_STATE_TILES": 1024, "TILES_PER_LAYER": 512, "IS_STORE": True,
        "HEAD_DIM": 64, "STATE_DIM": 128,
        "ROWS": rows, "COLUMNS": columns, "CODES_ALIGNMENT": alignment,
        "NARROW_WORD": tl.int64, "TILES_PER_CHUNK": 16, "PAIRS": 1,
    }  # fmt: skip
    # Alignment as Triton infers for aligned tensors; the kernel itself declares that of codes.
    aligned = ("chunks", "states", "scales", "states_layer_stride", "states_row_stride")
    options = quantize.STORE_OPTIONS
    return stores(build(copy._copy_kernel, types, constants, aligned=aligned, **options))


def copies(narrow, pairs):
    types = {"chunks": "*i64", "source_rows": "*i32", "destination_rows": "*i32"}
    constants = {"NARROW_WORD": narrow, "TILES_PER_CHUNK": 16, "PAIRS": pairs}
    constants |= dict.fromkeys(("states", "codes", "scales"))
    constants |= {"NUM_STATE_TILES": 0, "IS_STORE": False, "CODES_ALIGNMENT": 1}
    constants |= dict.fromkeys(("TILES_PER_LAYER", "HEAD_DIM", "STATE_DIM", "ROWS", "COLUMNS"), 1)
    return stores(build(copy._copy_kernel, types, constants, **copy._COPY_OPTIONS))


def checksums(compares):
    types = {"chunks": "*i64", "entries": "*i64", "changed": "*i32"}
    constants = {} if compares else {"changed": None}
    made = build(checksum._checksum_kernel, types, constants, num_warps=checksum.NUM_WARPS)
    return accesses(made)


def extraction(window, state):
    kernel = extract._extract_kernel
    types = {
        "slot_conv": "*i16", "live_conv": "*i16", "conv_input": "*i16", "slot_ssm": "*i32",
        "chunk_states": "*i32", **dict.fromkeys(kernel.arg_names[6:11], "*i32"),
    }  # fmt: skip
    constants = {
        "WIDTH": 3, "WIDTH_POWER_OF_2": 4, "CHANNELS": 256, "SLOT_ALIGNMENT": 16,
        "HEAD_DIM": 1, "STATE_DIM": 4096, "ROWS": 1, "COLUMNS": 1024, "ENTRIES": 1,
        "slot_scales": None,
    }  # fmt: skip
    if not window:
        constants |= dict.fromkeys(("slot_conv", "live_conv", "conv_input"))
    if not state:
        constants |= dict.fromkeys(("slot_ssm", "chunk_states"))
    aligned = ("chunk_states",) if state else ()
    return stores(build(kernel, types, constants, aligned=aligned, **extract._COPY_OPTIONS))


def align(kernel, *absent, **constants):
    types = {"facts": "*i64", "pointers": "*i64"}
    types |= dict.fromkeys(("num_reqs", "num_groups", "row_stride", "entry_ints"), "i32")
    options = {"other": "*i32", "num_warps": align_kernels._NUM_WARPS}
    return accesses(build(kernel, types, constants | dict.fromkeys(absent), **options))


def align_plans():
    few = {"BLOCK_SIZE": 512, "BY_SLOT": True, "ROWS": 64}
    many = {"BLOCK_SIZE": 512, "BY_SLOT": False, "ROWS": 1024}
    resident = "query_start_loc", "num_computed", "num_accepted"
    precopy, postcopy = align_kernels._precopy_kernel, align_kernels._postcopy_kernel
    return [
        align(precopy, **few),
        align(precopy, "idx_mapping", *resident, **many),
        align(postcopy, "num_scheduled", "num_drafts", **few),
        align(postcopy, "idx_mapping", "num_sampled", **many),
    ]


def attention(dtype, queries, group, head_dim, block, splits):
    types = dict.fromkeys(("query", "keys", "values", "output"), f"*{dtype}")
    types |= dict.fromkeys(("sums", "peaks", "totals"), "*fp32")
    types |= dict.fromkeys(("places", "starts", "lengths"), "*i64")
    types |= {"tables": "*i32", "scale": "fp32"}
    head_pad = triton.next_power_of_2(max(head_dim, 16))
    constants = {
        "KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "HEAD_PAD": head_pad, "BLOCK": block,
        "QUERIES": queries, "TILE": paged_attention._TILE, "SPLITS": splits,
    }  # fmt: skip
    aligned = ("query", "keys", "values", "output", "sums", "row_stride", "head_stride")
    aligned = (*aligned, "query_stride", "token_stride")
    kernel, (_, warps) = paged_attention._attend_kernel, paged_attention._tile_of(queries, head_pad)
    made = build(kernel, types, constants, aligned=aligned, num_warps=warps)
    return ["mma" in made.asm["ptx"], made.metadata.shared, spilled(made)]


def combination():
    types = {"sums": "*fp32", "peaks": "*fp32", "totals": "*fp32", "output": "*bf16"}
    constants = {
        "KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "HEAD_PAD": 128, "QUERIES": 64, "SPLITS": 2,
        "SPLITS_PAD": 2,
    }  # fmt: skip
    kernel = paged_attention._combine_kernel
    return stores(build(kernel, types, constants, aligned=("sums", "output"), num_warps=1))


def sorting():
    types = {"rows_of_places": "*i32", "dummy_slot": "i64"}
    types |= dict.fromkeys(("num_places", "num_rows", "place_stride"), "i32")
    constants = {"ROWS": pieces._SORTED_ROWS, "PLACES_PAD": 512}
    return spilled(build(pieces._sort_kernel, types, constants, other="*i64", num_warps=4))


def writing():
    types = dict.fromkeys(("keys", "values", "pool"), "*bf16")
    types |= {"slots": "*i64", "half_stride": "i64"}
    constants = {"SIZE": 1024, "TILE": paged_attention._WRITE_TILE}
    kernel = paged_attention._write_kernel
    return stores(build(kernel, types, constants, aligned=tuple(types)[:3], num_warps=4))


if __name__ == "__main__":
    found = {
        "codes": [codes(quantize.STORED_CODES), codes(1)],
        "copies": [copies(tl.int64, 1), copies(tl.int64, 64), copies(tl.int8, 1)],
        "checksums": [checksums(compares=False), checksums(compares=True)],
        "extraction": [
            extraction(window=True, state=True),
            extraction(window=True, state=False),
            extraction(window=False, state=True),
        ],
        "align copies": [align(align_kernels._copy_kernel, WORD=w) for w in (tl.int8, tl.int64)],
        "align plans": align_plans(),
        "attention": [attention(dtype, 16, *heads, 2) for dtype, *heads in HEADS],
        "attention of chunks": [
            attention(dtype, paged_attention._QUERIES, *heads, splits)
            for dtype, *heads in HEADS
            for splits in (1, 2)
        ],
        "combination": combination(),
        "sorting": sorting(),
        "writing": writing(),
    }  # fmt: skip
    print(json.dumps(found))
