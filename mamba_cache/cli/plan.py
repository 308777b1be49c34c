"""``mamba-cache plan``: budgets for a model, a GPU and a workload."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from mamba_cache._checks import check_int, check_number
from mamba_cache.cli.output import Option, Report, size_text, table
from mamba_cache.cli.replay import run_replay
from mamba_cache.cli.traces import read_trace
from mamba_cache.config import CacheConfig
from mamba_cache.errors import BudgetError, InvalidArgumentError
from mamba_cache.integrations.model_shapes import BUILT_IN, ModelShape, load_shape

__all__ = ["OPTIONS", "make_plan", "plan", "split_by_trace", "suggest_block_size"]

_GIB = 2**30
_MAX_GIB = 10**6
_RESERVED = 0.1
"""Share of the memory for activations and all else."""

_MAX_BLOCK = 2**16
"""Limit of the block size: a plan averages over all prompt lengths within a block."""

_USUAL_BLOCK = 256
_USUAL_LENGTH = 32_768
"""Tokens of the longest sequence, unless the mean is longer."""

_SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
"""Shares of slots to try with a trace."""

_MAX_REPLAYED = 4000
"""Maximum number of requests of a trace to replay."""

_BLOCKS_PER_PREFIX = 8
"""Minimum number of blocks of a shared prefix: one may be lost at its end."""


OPTIONS: tuple[Option, ...] = (
    ("model", "MODEL", None, "a Hugging Face config.json or its folder; the hub id of a model in "
     f"this machine's cache of the hub; or one of {', '.join(BUILT_IN)}. Nothing is downloaded"),
    ("--memory", "GIB", None, "GPU memory, GiB of 2**30 bytes (default: this machine's GPU)"),
    ("--prompt", "N", 4096, "tokens of a prompt, on average"),
    ("--output", "N", 512, "tokens of an answer, on average"),
    ("--concurrency", "N", 32, "requests that run at once"),
    ("--shared", "N", 0, "tokens that all prompts begin with"),
    ("--block-size", "N", None, "tokens of a block (default: suggested)"),
    ("--trace", "FILE", None, f"requests to replay (as for `replay`; the first {_MAX_REPLAYED:,}): "
     "the plan divides the memory for the most hits"),
)  # fmt: skip


def plan(options: Namespace) -> Report:
    """Suggest budgets: how many slots and KV blocks, and how large a block.

    Nothing is allocated and no GPU is needed.
    """
    shape = load_shape(options.model)
    if options.memory is not None:
        memory = int(check_number("--memory", options.memory, maximum=_MAX_GIB) * _GIB)
    elif torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        raise InvalidArgumentError("this machine has no GPU whose memory to plan: give --memory")
    names = "prompt", "output", "concurrency", "shared", "block_size"
    made = make_plan(shape, memory, **{name: getattr(options, name) for name in names})
    counts = dict(made["config"])
    if options.trace is not None:
        made["trace"] = split = split_by_trace(made, options.trace)
        # The dummy block is added to the blocks that were replayed.
        del made["config"]["num_kv_blocks"], made["config"]["max_slots"]
        made["config"] |= {"cache_gb": split["cache_gb"], "state_share": split["best_share"]}
    return Report(made, _text_of(made, counts))


def suggest_block_size(ssm_chunk_size: int, prompt: int, shared: int = 0) -> int:
    """Return a block size: a multiple of the chunk, near 256, and small beside a shared prefix."""
    target = min(_USUAL_BLOCK, (shared or prompt) // _BLOCKS_PER_PREFIX)
    return max(target // ssm_chunk_size, 1) * ssm_chunk_size


def make_plan(
    shape: ModelShape,
    memory: int,
    *,
    prompt: int,
    output: int,
    concurrency: int,
    shared: int = 0,
    block_size: int | None = None,
) -> dict[str, Any]:
    """Divide a GPU's memory between live states, KV blocks and slots.

    A *sequence* is a prompt and its answer, running or only cached: it holds KV blocks of its own
    and the slots of its checkpoints. Blocks without a state cannot be skipped and a state without
    its blocks cannot be found, so both budgets are for the same number of sequences. Sizes are in
    bytes unless their names say otherwise.
    """
    for name, count in (("prompt", prompt), ("output", output), ("concurrency", concurrency)):
        check_int(f"--{name}", count, minimum=1)
    check_int("--shared", shared, minimum=0, maximum=prompt)
    if block_size is None:
        block_size = suggest_block_size(shape.ssm_chunk_size, prompt, shared)
    check_int("--block-size", block_size, minimum=1, maximum=_MAX_BLOCK)
    state = shape.state_spec.bytes_per_slot
    kv_block = shape.kv_spec.bytes_per_block(block_size)
    shared_blocks = shared // block_size
    own_blocks = -(-(prompt + output) // block_size) - shared_blocks
    first, later = (
        _mean_checkpoints(prompt, output, block_size, matched) for matched in (0, shared_blocks)
    )
    reserved = int(memory * _RESERVED)
    room = memory - shape.weight_bytes - reserved
    # The dummy block takes room too, and so does the state at the shared prefix's end.
    fixed = (shared_blocks + 1) * kv_block + (shared_blocks > 0) * state
    cached = own_blocks * kv_block + math.ceil(later * state)
    sequences = (room - fixed - concurrency * state) // max(cached, 1)
    if sequences < concurrency:
        limit = max((room - fixed) // (cached + state), 0)
        raise BudgetError(
            f"{memory / _GIB:.1f} GiB of GPU memory must hold {concurrency} requests at once, but "
            f"hold {limit} of {prompt + output:,} tokens, beside {shape.weight_bytes / _GIB:.1f} "
            f"GiB of weights and {reserved / _GIB:.1f} GiB for activations"
        )
    num_kv_blocks = shared_blocks + sequences * own_blocks
    max_slots = (shared_blocks > 0) + int(sequences * later)
    settings: dict[str, Any] = {
        "block_size_tokens": block_size,
        "ssm_chunk_size": shape.ssm_chunk_size,
        "max_requests": concurrency,
        "max_sequence_length": max(_USUAL_LENGTH, prompt + output),
        "num_kv_blocks": num_kv_blocks,
        "max_slots": max_slots,
    }
    CacheConfig(**settings)  # raises if they are invalid
    return {
        "model": shape.name,
        "mamba_layers": shape.num_state_layers,
        "attention_layers": shape.kv_spec.num_layers,
        "bytes_per_slot": state,
        "bytes_per_block": kv_block,
        "checkpoints_of_first_prompt": first,
        "checkpoints_of_later_prompts": later,
        "sequences": sequences,
        "idle_sequences": sequences - concurrency,
        "memory": {
            "total": memory,
            "weights": shape.weight_bytes,
            "reserved": reserved,
            "live_states": concurrency * state,
            "kv_blocks": (num_kv_blocks + 1) * kv_block,
            "slots": max_slots * state,
        },
        "trace": None,
        "config": settings,
        "prefix_cache": {
            "block_size_tokens": block_size,
            "mamba_cache_gb": math.ceil(max_slots * state / _GIB * 1000) / 1000,
            "kv_cache_gb": math.ceil(num_kv_blocks * kv_block / _GIB * 1000) / 1000,
        },
    }


def split_by_trace(made: Mapping[str, Any], trace: str) -> dict[str, Any]:
    """Replay the first requests of a trace with several splits of a plan's slots and KV blocks."""
    room = made["memory"]["slots"] + made["memory"]["kv_blocks"]
    slot_bytes = made["bytes_per_slot"]
    replayed = partial(run_replay, read_trace(trace, _MAX_REPLAYED), policies=["adaptive"])
    found = replayed(slots=[None])
    tokens = found["settings"]["block_size_tokens"]
    block = made["bytes_per_block"] * tokens // made["config"]["block_size_tokens"]
    rates: dict[float, float] = {}
    for share in _SHARES if block else (1.0,):
        slots = int(room * share) // slot_bytes
        blocks = int(room * (1 - share)) // block if block else None
        if not slots or blocks == 0:
            continue
        result = replayed(slots=[slots], kv_blocks=blocks)
        if result["passed"]:
            rates[share] = result["records"][0]["token_hit_rate"]
    if not rates:
        raise BudgetError(
            f"no split of {size_text(room)} holds a state of {size_text(slot_bytes)} beside the "
            "longest prompt of the trace"
        )
    return {
        "cache_gb": math.floor(room / _GIB * 1000) / 1000,
        "requests": found["workload"]["requests"],
        "hit_rates": rates,
        "best_share": max(rates, key=lambda share: (rates[share], -share)),
        "unlimited_hit_rate": found["records"][0]["token_hit_rate"],
    }


def _text_of(made: Mapping[str, Any], counts: Mapping[str, Any]) -> str:
    """Return a plan as text; ``counts`` are its settings before a trace divided the memory."""
    memory, split, running = made["memory"], made["trace"], counts["max_requests"]
    chunk, slot = counts["ssm_chunk_size"], size_text(made["bytes_per_slot"])
    chunks = "no SSM chunks" if chunk == 1 else f"SSM chunks of {chunk} tokens"
    block = f"KV block of {counts['block_size_tokens']} tokens"
    blocks = f"{counts['num_kv_blocks']:,} and a dummy"
    unused = 2 * memory["total"] - sum(memory.values())
    rows = [
        ("live state", slot, f"{running:,}", memory["live_states"]),
        (block, size_text(made["bytes_per_block"]), blocks, memory["kv_blocks"]),
        ("slot", slot, f"{counts['max_slots']:,}", memory["slots"]),
        ("weights", "", "", memory["weights"]),
        ("activations and all else", "", "", memory["reserved"]),
        ("not used", "", "", unused),
        ("GPU", "", "", memory["total"]),
    ]
    parts = [
        f"\n{made['model']}: {made['mamba_layers']} layers with a state, "
        f"{made['attention_layers']} of attention, {chunks}",
        table(
            ["what", ">size", "how many", ">together"],
            [(what, each, many, size_text(together)) for what, each, many, together in rows],
        ),
        f"Room for {made['sequences']:,} sequences: {running:,} that run, and "
        f"{made['idle_sequences']:,} that stay cached beside them.\n"
        f"States saved, on average: {made['checkpoints_of_first_prompt']:.1f} by the first prompt "
        f"and its answer, {made['checkpoints_of_later_prompts']:.1f} by each later one.\n",
    ]
    if split is not None:
        parts += [
            table(
                [">for states", ">tokens that hit", ""],
                [
                    (f"{share:.0%}", f"{rate:.1%}", "best" if share == split["best_share"] else "")
                    for share, rate in split["hit_rates"].items()
                ],
            ),
            f"Replayed {split['requests']:,} requests over {split['cache_gb']:g} GiB; with room "
            f"for everything {split['unlimited_hit_rate']:.1%} hit.\n",
        ]
    settings = [f"    {name}={value!r}," for name, value in made["config"].items()]
    return "\n".join([*parts, "CacheConfig(", *settings, ")"])


def _mean_checkpoints(prompt: int, output: int, block: int, matched_blocks: int) -> float:
    """Return the mean number of states of a prompt and its answer, over all lengths in a block.

    They are the states of ``MegatronPlacement``, and one of the states that decoding saves.
    """
    lengths = max(prompt - block // 2, 1) + np.arange(block)
    complete, penultimate = lengths // block, (lengths - 1) // block
    saved = (
        complete > matched_blocks,
        (penultimate > matched_blocks) & (penultimate < complete),
        # The last token of an answer is not computed.
        (lengths + output - 1) // block > complete,
    )
    return float(sum(each.mean() for each in saved))
