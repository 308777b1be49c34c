"""The two kinds of embedders that a slot allocator must serve equally, with random data."""

from enum import Enum
from types import SimpleNamespace

import slot_rig
import torch
from slot_rig import live_bits, randomize, state_bits

from mamba_cache import CacheConfig, DynamicInferenceContext, MambaSlotAllocator, StateSpec

BLOCK, SSM_CHUNK, ALIGNMENT = 16, 4, 8
NUM_BLOCKS, MAX_REQUESTS, MAX_BLOCKS, SCRATCH = 41, 5, 8, 12
LAYERS, CONV, SSM, DTYPES = 3, (6, 4), (2, 3, 5), (torch.bfloat16, torch.float32)
PAUSED, DECODES, PREFILLS = 1, 1, 3  # rows 0; 1; 2, 3 and 4


class PrefixCachingEvictionPolicy(str, Enum):
    """An embedder's enum; only its values match this package's."""

    LRU = "lru"
    REF_ZERO = "ref_zero"


def namespace_context(policy, device="cpu"):
    """A context with the attributes of the Protocol only."""
    return slot_rig.make_context(
        NUM_BLOCKS,
        MAX_REQUESTS,
        device=device,
        block_size_tokens=BLOCK,
        prefix_caching_eviction_policy=policy,
        mamba_chunk_size=SSM_CHUNK,
        ssm_chunk_alignment=ALIGNMENT,
        max_mamba_intermediate_states_per_step=SCRATCH,
        gdp_num_householder=0,
        request_to_kv_block_ids=torch.empty(MAX_REQUESTS, MAX_BLOCKS, dtype=torch.int32),
        mamba_metadata=SimpleNamespace(
            request_to_mamba_state_idx=torch.empty(MAX_REQUESTS, dtype=torch.int32)
        ),
        mamba_conv_states=torch.empty(LAYERS, MAX_REQUESTS, *CONV, dtype=DTYPES[0], device=device),
        mamba_ssm_states=torch.empty(LAYERS, MAX_REQUESTS, *SSM, dtype=DTYPES[1], device=device),
        batch_dimensions=SimpleNamespace(),
    )


def package_context(policy, device="cpu"):
    """The package's context, as an embedder with a scratch uses it."""
    config = CacheConfig(
        block_size_tokens=BLOCK, ssm_chunk_size=SSM_CHUNK,
        max_requests=MAX_REQUESTS, max_tokens=64, max_sequence_length=BLOCK * MAX_BLOCKS,
        num_kv_blocks=NUM_BLOCKS - 1, max_slots=2, eviction_policy=policy.value,
    )  # fmt: skip
    spec = StateSpec.mamba(LAYERS, CONV, SSM, *DTYPES)
    context = DynamicInferenceContext(config, spec, device=device)
    context.prefix_caching_eviction_policy = policy
    context.ssm_chunk_alignment = ALIGNMENT
    context.max_mamba_intermediate_states_per_step = SCRATCH
    return context


CONTEXTS = {"namespace": namespace_context, "package": package_context}


def fill(context, generator):
    """Fill with random live states, permuted rows, distinct blocks, and hashes from 1001."""
    for tensor in (context.mamba_conv_states, context.mamba_ssm_states):
        randomize(tensor, generator)
    rows = torch.randperm(MAX_REQUESTS, generator=generator)
    context.mamba_metadata.request_to_mamba_state_idx[:] = rows
    blocks = torch.randperm(NUM_BLOCKS - 1, generator=generator)
    context.request_to_kv_block_ids[:] = blocks.reshape(MAX_REQUESTS, MAX_BLOCKS)
    context.kv_block_allocator.block_hashes[:] = torch.arange(NUM_BLOCKS) + 1001
    context.kv_block_allocator.block_timestamps[:] = torch.randperm(NUM_BLOCKS, generator=generator)
    context.paused_request_count = PAUSED
    context.batch_dimensions.prefill_req_count = PREFILLS
    context.batch_dimensions.decode_req_count = DECODES
    reported(context, [0] * PREFILLS)


def reported(context, counts):
    """Set the number of states that the forward wrote to the scratch, by prefill request."""
    context.mamba_metadata.intermediate_count = sum(counts)
    context.mamba_metadata.per_request_intermediate_counts = list(counts)


def make_allocator(context, generator, max_slots=6, **options):
    """An allocator with slots and scratch full of random bits."""
    allocator = MambaSlotAllocator(context, max_slots, LAYERS, CONV, SSM, *DTYPES, **options)
    for name in ("conv_states", "ssm_states", "intermediate_conv_out", "intermediate_ssm_out"):
        randomize(getattr(allocator, name), generator)
    return allocator


def record(allocator, row, prompt, finished, chunk, skip, matched, required):
    """Plan a prefill chunk's checkpoints; the last two arguments are in blocks, others tokens."""
    request = SimpleNamespace(prompt_tokens=range(prompt), finished_chunk_token_count=finished)
    allocator.compute_and_store_offsets(request, row, skip, chunk, matched, [], required)


def three_prefills(allocator, context):
    """Record two scratch states for row 2, one for row 4, and the ends of rows 3 and 4.

    Return the blocks of the scratch states, then the blocks of the prompts' ends.
    """
    table = context.request_to_kv_block_ids.tolist()
    record(allocator, 2, 5 * BLOCK + 1, 0, 5 * BLOCK + 1, 0, 2, 6)
    record(allocator, 3, BLOCK, 0, BLOCK, 0, 0, 1)
    record(allocator, 4, 3 * BLOCK, 0, 3 * BLOCK, 0, 1, 2)
    reported(context, [2, 0, 1])
    return [table[2][1], table[2][4], table[4][0]], [table[3][0], table[4][2]]


def request_bits(context, request):
    return live_bits(context, int(context.mamba_metadata.request_to_mamba_state_idx[request]))


def scratch_bits(allocator, index):
    return state_bits(allocator.intermediate_conv_out, allocator.intermediate_ssm_out, index)
