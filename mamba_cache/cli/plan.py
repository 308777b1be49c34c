"""``mamba-cache plan``: budgets for a model, a GPU and a workload."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any

import torch
import typer

from mamba_cache._checks import check_number
from mamba_cache.cli.built_in import BUILT_IN
from mamba_cache.cli.model_files import load_shape
from mamba_cache.cli.model_shapes import ModelShape
from mamba_cache.cli.output import AsJson, console, make_table, print_json, size_text
from mamba_cache.cli.planning import GpuMemory, Plan, Workload, make_plan
from mamba_cache.errors import InvalidArgumentError

__all__ = ["plan", "plan_report"]

_GIB = 2**30
_MOST_GIB = 10**6
_MOST_BLOCK = 2**16
"""A plan goes through the lengths that prompts can have within a block."""

_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face config.json or its folder; the hub id of a model in this machine's "
        f"cache of the hub; or one of {', '.join(BUILT_IN)}. Nothing is downloaded.",
    ),
]
_Gib = partial(typer.Option, min=0, metavar="GIB")
_Memory = Annotated[
    float | None, _Gib(help="GPU memory, GiB of 2**30 bytes. Default: this machine's GPU.")
]
_Weights = Annotated[
    float | None,
    _Gib(
        help="The model's weights in GiB. Default: those beside the config.json, or for a built-in "
        "model two bytes for each parameter."
    ),
]
_Reserve = Annotated[
    float,
    typer.Option(
        metavar="X", min=0, max=1, help="Share of the memory for activations and all else."
    ),
]
_Count = partial(typer.Option, metavar="N", min=1)
_Prompt = Annotated[int, _Count(help="Tokens of a prompt, on average.")]
_Output = Annotated[int, _Count(help="Tokens of an answer, on average.")]
_Concurrency = Annotated[int, _Count(help="Requests that run at once.")]
_Shared = Annotated[
    int, typer.Option(metavar="N", min=0, help="Tokens that all prompts begin with.")
]
_BlockSize = Annotated[
    int | None, _Count(max=_MOST_BLOCK, help="Tokens of a block. Default: suggested.")
]
_Int8 = Annotated[bool, typer.Option("--int8", help="Keep saved states in 8 bits.")]


def plan(
    model: _Model,
    *,
    memory: _Memory = None,
    weights: _Weights = None,
    reserve: _Reserve = 0.1,
    prompt: _Prompt = 4096,
    output: _Output = 512,
    concurrency: _Concurrency = 32,
    shared: _Shared = 0,
    block_size: _BlockSize = None,
    int8: _Int8 = False,
    as_json: AsJson = False,
) -> None:
    """Suggest budgets: how many slots and KV blocks, and how large a block.

    Nothing is allocated and no GPU is needed.
    """
    _check_shared(shared, prompt)
    shape = load_shape(model)
    workload = Workload(
        prompt_tokens=prompt,
        output_tokens=output,
        concurrency=concurrency,
        shared_tokens=shared,
    )
    gpu = _memory(shape, memory, weights, reserve)
    made = make_plan(shape, workload, gpu, block_size_tokens=block_size, int8_slots=int8)
    report = plan_report(shape, made)
    if as_json:
        print_json(report)
    else:
        _show(shape, made)


def plan_report(shape: ModelShape, made: Plan) -> dict[str, Any]:
    """Return a plan as a JSON object; sizes in bytes unless they say otherwise."""
    conv = shape.state_spec.tensors[0]
    return {
        "model": shape.name,
        "mamba_layers": conv.num_layers,
        "attention_layers": shape.kv_spec.num_layers,
        "bytes_per_slot": made.bytes_per_slot,
        "bytes_per_live_state": made.bytes_per_state,
        "bytes_per_block": made.bytes_per_block,
        "checkpoints_of_first_prompt": made.first_checkpoints,
        "checkpoints_of_later_prompts": made.later_checkpoints,
        "sequences": made.num_sequences,
        "idle_sequences": made.idle_sequences,
        "memory": {
            "total": made.memory.total_bytes,
            "weights": made.memory.weight_bytes,
            "reserved": made.memory.reserved_bytes,
            "live_states": made.live_bytes,
            "kv_blocks": made.kv_bytes,
            "slots": made.slot_bytes,
        },
        "config": _settings(made),
        "prefix_cache": _budgets(made),
    }


def _settings(made: Plan) -> dict[str, int | str | None]:
    """Return the arguments of ``CacheConfig`` that the plan decides."""
    names = (
        "block_size_tokens",
        "ssm_chunk_size",
        "max_requests",
        "max_sequence_length",
        "num_kv_blocks",
        "max_slots",
        "slot_quantization",
    )
    settings = {name: getattr(made.config, name) for name in names}
    return {name: value for name, value in settings.items() if value is not None}


def _budgets(made: Plan) -> dict[str, int | float]:
    """Return the arguments of ``PrefixCache`` that the plan decides; budgets in GiB, rounded up."""
    blocks = (made.config.num_kv_blocks or 0) * made.bytes_per_block
    logits = (made.config.max_slots or 0) * made.bytes_per_logits
    sizes = {"mamba_cache_gb": made.slot_bytes + logits, "kv_cache_gb": blocks}
    budgets = {name: math.ceil(size / _GIB * 1000) / 1000 for name, size in sizes.items()}
    return {"block_size_tokens": made.config.block_size_tokens, **budgets}


def _check_shared(shared: int, prompt: int) -> None:
    """Check two options against each other, by the names that were typed.

    Raises:
        InvalidArgumentError: More is shared than prompts have.
    """
    if shared > prompt:
        raise InvalidArgumentError(f"--shared must be at most --prompt ({prompt}), got {shared}")


def _memory(
    shape: ModelShape, memory: float | None, weights: float | None, reserve: float
) -> GpuMemory:
    """Return what there is, of the arguments or of this machine.

    Raises:
        InvalidArgumentError: Something is not given and cannot be found, or is out of range.
    """
    if memory is not None:
        total = int(check_number("--memory", memory, maximum=_MOST_GIB) * _GIB)
    elif torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
    else:
        raise InvalidArgumentError("this machine has no GPU whose memory to plan: give --memory")
    weight_bytes = shape.weight_bytes
    if weights is not None:
        weight_bytes = int(check_number("--weights", weights, maximum=_MOST_GIB) * _GIB)
    if weight_bytes is None:
        raise InvalidArgumentError(
            f"there are no *.safetensors beside {shape.name} to take the size from: give --weights"
        )
    return GpuMemory(total, weight_bytes, int(reserve * total))


def _show(shape: ModelShape, made: Plan) -> None:
    out = console()
    layers = shape.state_spec.tensors[0].num_layers
    out.print(
        f"{shape.name}: {layers} layers with a state, {shape.kv_spec.num_layers} of attention, "
        f"{_chunks_text(shape)}\n"
    )
    sizes = make_table(["what", ">size", "how many", ">together"])
    for row in _size_rows(made):
        sizes.add_row(*row)
    out.print(sizes)
    out.print(
        f"Room for {made.num_sequences:,} sequences: {made.config.max_requests:,} that run, and "
        f"{made.idle_sequences:,} that stay cached beside them."
    )
    out.print(
        f"States saved, on average: {made.first_checkpoints:.1f} by the first prompt and its "
        f"answer, {made.later_checkpoints:.1f} by each later one.\n"
    )
    out.print(_call("CacheConfig", _settings(made)), markup=False)


def _call(name: str, settings: Mapping[str, object]) -> str:
    """Return Python that makes what was planned."""
    given = [f"    {setting}={value!r},\n" for setting, value in settings.items()]
    return "".join([f"{name}(\n", *given, ")"])


def _chunks_text(shape: ModelShape) -> str:
    """Say what blocks must be multiples of."""
    if shape.ssm_chunk_size == 1:
        return "no SSM chunks"
    return f"SSM chunks of {shape.ssm_chunk_size} tokens"


def _size_rows(made: Plan) -> Iterator[tuple[str, str, str, str]]:
    config, memory = made.config, made.memory
    per_block = f"KV block of {config.block_size_tokens} tokens"
    for name, each, count, total in (
        ("live state", made.bytes_per_state, f"{config.max_requests:,}", made.live_bytes),
        (per_block, made.bytes_per_block, f"{config.num_kv_blocks:,} and a dummy", made.kv_bytes),
        ("slot", made.bytes_per_slot, f"{config.max_slots:,}", made.slot_bytes),
    ):
        yield name, size_text(each), count, size_text(total)
    yield "weights", "", "", size_text(memory.weight_bytes)
    yield "activations and all else", "", "", size_text(memory.reserved_bytes)
    used = made.live_bytes + made.kv_bytes + made.slot_bytes
    yield "not used", "", "", size_text(memory.room_bytes - used)
    yield "GPU", "", "", size_text(memory.total_bytes)
