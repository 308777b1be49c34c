"""The plan of a cache for a model and a workload: plain arithmetic, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mamba_cache._checks import check_int
from mamba_cache.cli.model_shapes import ModelShape
from mamba_cache.config import CacheConfig
from mamba_cache.errors import BudgetError
from mamba_cache.slots import MegatronPlacement, PlacementFacts
from mamba_cache.states import SlotQuantization

__all__ = ["GpuMemory", "Plan", "Workload", "make_plan", "suggest_block_size"]

_GIB = 2**30
_USUAL_BLOCK = 256
_USUAL_LENGTH = 32_768
"""Tokens of the longest sequence, unless the mean is above."""

_BLOCKS_PER_PREFIX = 8
"""Blocks that a shared prefix should have at least: one may be lost at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked of an engine, on average.

    Attributes:
        prompt_tokens: Tokens of a prompt.
        output_tokens: Tokens of an answer.
        concurrency: Requests that run at once.
        shared_tokens: Tokens that all prompts begin with, such as a system prompt.

    Raises:
        InvalidArgumentError: A number is out of range, or more is shared than prompts have.
    """

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "concurrency"):
            check_int(name, getattr(self, name), minimum=1)
        check_int("shared_tokens", self.shared_tokens, minimum=0, maximum=self.prompt_tokens)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of a GPU and what is not the cache's, in bytes.

    Attributes:
        total_bytes: All of it.
        weight_bytes: The model's weights.
        reserved_bytes: Left for activations and all else.
    """

    total_bytes: int
    weight_bytes: int
    reserved_bytes: int

    @property
    def room_bytes(self) -> int:
        """What is left for states, keys and values; below 0 if the weights do not fit."""
        return self.total_bytes - self.weight_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to divide a GPU's memory.

    A *sequence* is a prompt and its answer, running or only cached: it holds KV blocks of its own
    and the slots of its checkpoints. Blocks without a state cannot be skipped and a state without
    its blocks cannot be found, so both budgets are made for equally many sequences.

    Attributes:
        config: The settings to make a context with.
        memory: What there is to divide.
        bytes_per_slot: Bytes of one saved state.
        bytes_per_state: Bytes of one live state; more than a slot's if slots are int8.
        bytes_per_block: Bytes of one KV block.
        bytes_per_logits: Bytes that a ``PrefixCache`` adds to each slot.
        num_sequences: Sequences that the cache holds.
        first_checkpoints: States that the first prompt and its answer save, on average over prompts
            that are up to half a block shorter or longer than the mean.
        later_checkpoints: The same when the shared prefix is cached.
    """

    config: CacheConfig
    memory: GpuMemory
    bytes_per_slot: int
    bytes_per_state: int
    bytes_per_block: int
    bytes_per_logits: int
    num_sequences: int
    first_checkpoints: float
    later_checkpoints: float

    @property
    def idle_sequences(self) -> int:
        """Sequences that stay cached while ``max_requests`` others run."""
        return self.num_sequences - self.config.max_requests

    @property
    def live_bytes(self) -> int:
        """Bytes of the live states."""
        return self.config.max_requests * self.bytes_per_state

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV blocks, the dummy block included: ``kv_cache_gb`` in bytes."""
        return ((self.config.num_kv_blocks or 0) + 1) * self.bytes_per_block

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots: ``mamba_cache_gb`` in bytes."""
        return (self.config.max_slots or 0) * self.bytes_per_slot


def suggest_block_size(ssm_chunk_size: int, workload: Workload) -> int:
    """Return a block size: a multiple of the chunk, near 256, and small beside what is shared.

    Args:
        ssm_chunk_size: Tokens of one chunk of the model's SSM kernels.
        workload: Its shared prefix, or else its prompts, should have eight blocks or more.
    """
    prefix = workload.shared_tokens or workload.prompt_tokens
    wanted = min(_USUAL_BLOCK, prefix // _BLOCKS_PER_PREFIX)
    return max(wanted // ssm_chunk_size, 1) * ssm_chunk_size


def make_plan(
    shape: ModelShape,
    workload: Workload,
    memory: GpuMemory,
    *,
    block_size_tokens: int | None = None,
    int8_slots: bool = False,
) -> Plan:
    """Divide a GPU's memory between live states, KV blocks and slots.

    Args:
        shape: What the model keeps.
        workload: What it is asked.
        memory: What there is.
        block_size_tokens: Default: ``suggest_block_size``.
        int8_slots: Whether slots keep SSM states in 8 bits.

    Raises:
        InvalidArgumentError: The block size does not fit the model's chunk, or its states cannot
            be kept in int8.
        BudgetError: The memory does not hold the workload; the message says how many requests fit.
    """
    block = block_size_tokens or suggest_block_size(shape.ssm_chunk_size, workload)
    slot = _slot_bytes(shape, int8_slots)
    kv_block = shape.kv_spec.bytes_per_block(block)
    shared = workload.shared_tokens // block
    own_blocks = -(-workload.sequence_tokens // block) - shared
    later = _mean_checkpoints(workload, block, matched_blocks=shared)
    num_sequences = _count_sequences(
        workload,
        memory,
        # The dummy block takes room too, and so does the state at the shared prefix's end.
        fixed_bytes=(shared + 1) * kv_block + (shared > 0) * slot,
        live_bytes=shape.state_spec.bytes_per_slot,
        cached_bytes=own_blocks * kv_block + math.ceil(later * slot),
    )
    return Plan(
        config=CacheConfig(
            block_size_tokens=block,
            max_requests=workload.concurrency,
            max_sequence_length=max(_USUAL_LENGTH, workload.sequence_tokens),
            num_kv_blocks=shared + num_sequences * own_blocks,
            max_slots=(shared > 0) + int(num_sequences * later),
            ssm_chunk_size=shape.ssm_chunk_size,
            slot_quantization="int8" if int8_slots else None,
        ),
        memory=memory,
        bytes_per_slot=slot,
        bytes_per_state=shape.state_spec.bytes_per_slot,
        bytes_per_block=kv_block,
        bytes_per_logits=shape.bytes_per_logits,
        num_sequences=num_sequences,
        first_checkpoints=_mean_checkpoints(workload, block, matched_blocks=0),
        later_checkpoints=later,
    )


def _slot_bytes(shape: ModelShape, int8_slots: bool) -> int:
    spec = SlotQuantization().slot_spec(shape.state_spec) if int8_slots else shape.state_spec
    return spec.bytes_per_slot


def _count_sequences(
    workload: Workload,
    memory: GpuMemory,
    *,
    fixed_bytes: int,
    live_bytes: int,
    cached_bytes: int,
) -> int:
    """Count the sequences that fit: each takes ``cached_bytes``, and while it runs ``live_bytes``.

    Raises:
        BudgetError: They are fewer than run at once.
    """
    room, running = memory.room_bytes - fixed_bytes, workload.concurrency
    count = (room - running * live_bytes) // max(cached_bytes, 1)
    if count < running:
        most = max(room // (cached_bytes + live_bytes), 0)
        raise BudgetError(
            f"{memory.total_bytes / _GIB:.1f} GiB of GPU memory must hold {running} requests at "
            f"once, but hold {most} of {workload.sequence_tokens:,} tokens, beside "
            f"{memory.weight_bytes / _GIB:.1f} GiB of weights and "
            f"{memory.reserved_bytes / _GIB:.1f} GiB for activations"
        )
    return count


def _mean_checkpoints(workload: Workload, block: int, *, matched_blocks: int) -> float:
    """Return how many states a prompt and its answer save, on average over a block of lengths.

    A prompt that just fills its last block saves one more than all others, so the mean length
    alone would not tell.
    """
    first = max(workload.prompt_tokens - block // 2, 1)
    counts = [
        _count_checkpoints(prompt, workload.output_tokens, block, matched_blocks)
        for prompt in range(first, first + block)
    ]
    return sum(counts) / block


def _count_checkpoints(prompt: int, output: int, block: int, matched_blocks: int) -> int:
    facts = PlacementFacts(
        prompt_tokens=prompt,
        block_size_tokens=block,
        num_matched_blocks=matched_blocks,
        num_required_blocks=-(-prompt // block),
    )
    positions = set(MegatronPlacement().positions(facts))
    in_prompt = sum(matched_blocks * block < p <= prompt for p in positions)
    # The last token of an answer is not computed; of the states that decoding saves, one is kept.
    crosses_a_boundary = (prompt + output - 1) // block > prompt // block
    return in_prompt + crosses_a_boundary
