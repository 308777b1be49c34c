"""A minimal embedder of slots: a namespace with only the fields that a call reads."""

from types import SimpleNamespace

import numpy as np
import torch

from mamba_cache.cache import AdaptiveSlotPolicy, LruSlotPolicy, SlotEvictionPolicy, SlotPool
from mamba_cache.slots import MambaSlotAllocator

NUM_LAYERS, CONV, SSM = 2, (3, 2), (2, 5)
DTYPES = (torch.bfloat16, torch.float32)


class Chosen(LruSlotPolicy):
    """A policy that evicts the slots given by a test, in this order."""

    def __init__(self, victims=()):
        self.victims, self.offered = list(victims), None

    def choose(self, num_slots, slots, blocks, kv_blocks):
        self.offered = slots.tolist()
        return self.victims


class LastUsedPolicy(SlotEvictionPolicy):
    """A custom policy: evicts the state least recently stored or used by a hit first."""

    def __init__(self):
        self.reset(0)

    def choose(self, num_slots, slots, blocks, kv_blocks):
        order = self._last_use[slots].argsort(kind="stable")
        return slots[order[:num_slots]].tolist()

    def on_stored(self, slots):
        self._clock += 1
        self._last_use[list(slots)] = self._clock

    def on_consumed(self, slots):
        self.on_stored(slots)

    def reset(self, max_slots):
        self._clock, self._last_use = 0, np.zeros(max_slots, np.int64)


class Listening(AdaptiveSlotPolicy):
    """A policy that records the facts of requests and the proposals."""

    def __init__(self):
        self.requests, self.proposed = [], []
        super().__init__()

    def on_request(self, facts):
        self.requests.append(facts)
        return super().on_request(facts)

    def admit(self, proposals, num_free, slots):
        self.proposed += proposals
        return super().admit(proposals, num_free, slots)


def make_pool(max_slots, num_blocks, *, victims=(), **options):
    """A pool without tensors, over KV blocks that are neither used nor registered."""
    size = num_blocks if num_blocks in range(99) else 0  # tests also pass invalid numbers
    view = SimpleNamespace(
        pool_size=num_blocks,
        block_ref_counts=np.zeros(int(size), np.int32),
        block_timestamps=np.zeros(int(size), np.int64),
        block_hashes=np.full(int(size), -1),
    )
    return SlotPool(max_slots, view, policy=Chosen(victims), **options)


def make_context(num_blocks=12, max_requests=4, **fields):
    kv_blocks = SimpleNamespace(
        pool_size=num_blocks,
        block_ref_counts=torch.zeros(num_blocks, dtype=torch.int32),
        block_timestamps=torch.zeros(num_blocks, dtype=torch.int64),
        block_hashes=torch.full((num_blocks,), -1, dtype=torch.int64),
    )
    base = {"device": "cpu", "max_requests": max_requests, "kv_block_allocator": kv_blocks}
    return SimpleNamespace(**{**base, **fields})


def make_allocator(max_slots=4, *, context=None, policy=None, placement=None, **fields):
    return MambaSlotAllocator(
        make_context(**fields) if context is None else context,
        max_slots,
        NUM_LAYERS,
        CONV,
        SSM,
        *DTYPES,
        policy=policy,
        placement=placement,
    )


def randomize(tensor, generator):
    """Fill a tensor with random numbers that are never zero."""
    tensor.copy_(torch.rand(tensor.shape, generator=generator) + 1)


def add_live_states(context, generator):
    """Add live states to the context; request i has row max_requests - 1 - i."""
    rows = context.max_requests
    context.mamba_conv_states = torch.empty(NUM_LAYERS, rows, *CONV, dtype=DTYPES[0])
    context.mamba_ssm_states = torch.empty(NUM_LAYERS, rows, *SSM, dtype=DTYPES[1])
    randomize(context.mamba_conv_states, generator)
    randomize(context.mamba_ssm_states, generator)
    context.mamba_metadata = SimpleNamespace(
        request_to_mamba_state_idx=torch.arange(rows, dtype=torch.int32).flip(0),
        intermediate_count=0,
        per_request_intermediate_counts=[],
    )


def state_bits(conv_states, ssm_states, row):
    """The bits of one state, comparable with ==."""
    parts = (conv_states[:, row], ssm_states[:, row])
    return tuple(bytes(part.contiguous().view(torch.uint8).flatten().tolist()) for part in parts)


def slot_bits(allocator, slot):
    return state_bits(allocator.conv_states, allocator.ssm_states, slot)


def live_bits(context, row):
    return state_bits(context.mamba_conv_states, context.mamba_ssm_states, row)


def bookkeeping(pool):
    """The whole bookkeeping of a pool, to compare before and after a call."""
    return (
        pool.free_slots[: pool.free_count].tolist(),
        pool.block_to_slot.tolist(),
        pool.slot_to_block.tolist(),
        pool.pin_counts.tolist(),
        dict(pool.reserved),
        dict(getattr(pool, "hash_to_block_id", {})),
        pool.evicted_slots_total,
    )


def save(pool, *blocks):
    """Assign a slot to each block, and make the slots findable."""
    slots = pool.reserve_slots(blocks)
    assert pool.commit_reserved(slots, blocks) == slots
    return slots


def touch(allocator, *blocks):
    """Use the blocks one after another, so that the last block is the most recently used."""
    times = allocator.context.kv_block_allocator.block_timestamps
    for block in blocks:
        times[block] = int(times.max()) + 1


def full(*, slots=4, **options):
    """An allocator with slots for blocks 0 to slots - 1; block 0 is the least recently used."""
    allocator = make_allocator(slots, **options)
    for block in range(slots):
        allocator.allocate_slots_batch([block])
        touch(allocator, block)
    allocator.register_block_hashes_batch(range(slots), range(100, 100 + slots))
    return allocator
