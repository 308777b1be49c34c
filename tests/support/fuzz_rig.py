"""Wrong arguments, and every public call with one set of valid arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from context_rig import (
    BLOCK,
    MODEL,
    MODEL_CONFIG,
    add,
    generate,
    make_config,
    make_context,
    run_step,
)
from fingerprints import frozen
from kinds_rig import MIXED
from kv_rig import cache, prefix
from slot_rig import CONV, DTYPES, NUM_LAYERS, SSM, add_live_states
from slot_rig import full as full_slots

from mamba_cache import (
    BlockHasher,
    BlockHashes,
    CacheConfig,
    CapturedExtractions,
    EveryNthBlock,
    KVBlockAllocator,
    KVCacheSpec,
    LayerKind,
    Request,
    StateSpec,
    compute_block_hashes,
    compute_varlen_chunk_metadata,
)
from mamba_cache.cache import BlockHashChain, SlotPool
from mamba_cache.events import Listeners
from mamba_cache.states import (
    SlotQuantization,
    StateCopier,
    StatePool,
)

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
NAN = float("nan")

JUNK = [
    None, True, False, 0, 1, -1, 2, 1.5, NAN, float("inf"), -float("inf"), 1j,
    2**31, -(2**31) - 1, 2**63 - 1, 2**63, 2**200, -(2**200),
    "", "x", b"", b"x", (), [], [None], ["x"], [[1]], [NAN], [-1], [2**63], [2**200], [True],
    [0, 0], [1, 2, 3], {}, {1: 2}, {"x": None}, set(), frozenset([1]), range(3), object(), object,
    len, SimpleNamespace(), slice(None), Ellipsis, memoryview(b"ab"), (1, 2), [(0, 1)],
    np.float64(NAN), np.int64(-3), np.int8(1), np.bool_(True), np.array(3), np.array(NAN),
    np.empty(0), np.empty((0, 3), int), np.ones((2, 2), int), np.arange(6)[::2], np.array(["x"]),
    np.array([1.5, NAN]), np.array([2**63], np.uint64), np.array([None]), np.array([], "M8[s]"),
    torch.tensor(3), torch.tensor(NAN), torch.empty(0), torch.empty(0, dtype=torch.int32),
    torch.ones(2, 2, dtype=torch.int64), torch.arange(6)[::2], torch.arange(6).view(2, 3).t(),
    torch.tensor([1.5, NAN]), torch.tensor([True]), torch.tensor([1], dtype=torch.uint8),
    torch.empty(3, dtype=torch.int64, device="meta"), torch.empty(2, 3, device="meta"),
    torch.empty(2, 2, dtype=torch.bfloat16), torch.eye(2).to_sparse(),
    torch.zeros(2, dtype=torch.complex64), torch.float32, torch.device("meta"),
]  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A call with valid arguments."""

    make: Callable
    call: Callable
    arguments: Callable = lambda _: {}


def busy_context():
    """A context with a request in each status and cached prefixes, before a step."""
    context = make_context(make_config(max_tokens=60, num_kv_blocks=40, max_slots=6))
    generate(context, PROMPT, 1)
    add(context, "preempted", PROMPT)
    context.preempt("preempted")
    add(context, "decoding", PROMPT)
    run_step(context)
    add(context, "prefilling", [4] * 30, chunk_tokens=7)
    run_step(context)
    add(context, "scheduled", [5] * 20)
    return context


def context_in_step():
    context = busy_context()
    MODEL.forward(context.begin_step().metadata, context)
    return context


def kinds_in_step():
    """A context in a step whose layers hand over states by named kinds."""
    context = make_context(model=MIXED, placement=EveryNthBlock(1))
    add(context, "scheduled", PROMPT)
    context.begin_step()
    return context


def handed_over(context):
    """Arguments with the states that a layer of Gated DeltaNet hands over."""
    metadata = context._require_step().metadata
    conv, recurrent = (shape for _, shape, _ in context.live_states.spec.kinds[0].tensors)
    tokens, chunks = metadata.num_prefill_tokens, metadata.num_chunks
    return {
        "kind": "gdn",
        "layer": 1,
        "chunk_states": {"recurrent": torch.ones(chunks, *recurrent)},
        "window_inputs": {"conv": torch.ones(tokens, conv[0], dtype=torch.bfloat16)},
        "metadata": metadata,
    }


def kv_pool():
    """A pool with used, cached and free blocks; one sequence branches."""
    pool = KVBlockAllocator(12)
    cache(pool, 1, 2, 3)
    cache(pool, 7)
    pool.allocate_memory_blocks(2)
    return pool


def slot_allocator():
    allocator = full_slots()
    add_live_states(allocator.context, torch.Generator().manual_seed(1))
    allocator.invalidate_block(0)
    allocator.reserve_slots([5])
    return allocator


def copier():
    generator = torch.Generator().manual_seed(2)
    sources = [torch.rand(2, 4, 3, generator=generator)]
    targets = [torch.rand(2, 5, 3, generator=generator)]
    return SimpleNamespace(copier=StateCopier(sources, targets), tensors=[*sources, *targets])


def request_of(context, call, **fields):
    return getattr(context, call)(Request(**fields))


def methods(prefix, make, **calls):
    """Targets for methods whose arguments do not depend on the object, by name."""
    return {
        f"{prefix}.{name}": Target(
            make,
            lambda it, name=name, **given: getattr(it, name)(**given),
            lambda _, arguments=arguments: dict(arguments),
        )
        for name, arguments in calls.items()
    }


def plain(function, **arguments):
    """A target for a function or a class."""
    return Target(lambda: None, lambda _, **given: function(**given), lambda _: dict(arguments))


REQUEST = {
    "request_id": "new",
    "prompt_tokens": PROMPT,
    "cache_salt": "a",
    "lora_id": 3,
    "multimodal_keys": [(2, "cat")],
    "checkpoint_positions": [BLOCK],
}
WHOLE = Request(**REQUEST)
HASHES = prefix(5, 6)
ONE_TENSOR = ("x", (2, 3), torch.float32)
STATES = MODEL_CONFIG.state_spec(torch.float32)
TARGETS = {
    **{
        f"context.{name}, by field": Target(
            busy_context, partial(request_of, call=name), lambda _: dict(REQUEST)
        )
        for name in ("prepare", "match", "add_request")
    },
    **methods(
        "context",
        busy_context,
        prepare={"request": WHOLE},
        match={"request": WHOLE},
        add_request={"request": WHOLE, "chunk_tokens": 9, "checkpoint_positions": [2 * BLOCK]},
        resume_request={"request_id": "preempted", "chunk_tokens": 5},
        schedule_prefill={
            "request_id": "prefilling", "chunk_tokens": 5, "checkpoint_positions": [BLOCK],
        },
        begin_step={"decode_ids": ["decoding"], "drafts": {}},
        fork={"request_id": "decoding", "new_ids": ["fork"], "last_tokens": [1]},
        preempt={"request_id": "decoding"},
        finish={"request_id": "decoding"},
        status={"request_id": "decoding"},
        reset={"preserve_prefix_cache": True},
    ),
    **methods(
        "context",
        context_in_step,
        commit_step={"new_tokens": {"decoding": 1, "scheduled": 2}},
        count_extractions={"captured": CapturedExtractions({0: (99, 99)})},
    ),
    "context.commit_step, by token": Target(
        context_in_step,
        lambda it, token: it.commit_step({"decoding": token, "scheduled": 2}),
        lambda _: {"token": 1},
    ),
    "context.count_extractions, by length": Target(
        context_in_step,
        lambda it, lengths: it.count_extractions(CapturedExtractions(lengths)),
        lambda _: {"lengths": {0: (99, 99), 1: (99, 99)}},
    ),
    "context.extract_states": Target(
        kinds_in_step, lambda it, **given: it.extract_states(**given), handed_over
    ),
    **methods(
        "kv_blocks",
        kv_pool,
        allocate_memory_blocks={"num_blocks": 3},
        retain_memory_blocks={"block_ids": [0, 1]},
        release_memory_blocks={"block_ids": [4]},
        register_kv_block_hashes={
            "block_ids": [4, 5], "block_hashes": HASHES, "parent_digest": b"5",
        },
        match_prefix={"hashes": prefix(1, 2)},
        find_block={"digest": prefix(1).digests[0]},
        deregister_blocks={"block_ids": [0]},
    ),
    "kv_blocks": plain(
        KVBlockAllocator, pool_size=9, eviction_policy="lru", enable_prefix_caching=True
    ),
    "slot_pool": plain(SlotPool, max_slots=3, kv_blocks=KVBlockAllocator(5)),
    **methods("listeners", Listeners, add={"listener": lambda event: 0}),
    **methods(
        "slots",
        slot_allocator,
        get_slot={"block_id": 1},
        has_state={"block_id": 1},
        allocate_slots_batch={"block_ids": [6, 7]},
        reserve_slots={"block_ids": [6, 7]},
        invalidate_block={"block_id": 1},
        on_kv_blocks_deregistered={"block_ids": [1], "hashes_to_delete": [102]},
        register_block_hashes_batch={"block_ids": [1], "hashes": [103]},
        store_from_live_batch={"slots": [1], "request_indices": [0]},
        restore_slots={"sources": [1, 2], "rows": [0, 1]},
        restore_to_live={"request_idx": 0, "block_id": 1},
        store_from_tensors={
            "block_id": 1, "layer_idx": 1, "ssm_state": torch.ones(SSM, dtype=DTYPES[1]),
            "conv_state": torch.ones(CONV, dtype=DTYPES[0]),
        },
    ),
    "slots.commit_reserved": Target(
        slot_allocator,
        lambda it, **given: it.commit_reserved(**given),
        lambda it: {"slots": list(it.reserved), "block_ids": [7]},
    ),
    "slots.cancel_reserved": Target(
        slot_allocator,
        lambda it, **given: it.cancel_reserved(**given),
        lambda it: {"slots": list(it.reserved)},
    ),
    "hashes": plain(
        compute_block_hashes, tokens=[1, 2, 3, 4], block_size_tokens=2, cache_salt="a", lora_id=1,
        multimodal_keys=[(1, "cat")],
    ),
    "chain": plain(BlockHashChain, block_size_tokens=2, cache_salt="a", lora_id=1),
    **methods("chain", lambda: BlockHashChain(2), append={"tokens": [1, 2, 3]}),
    "hasher": plain(BlockHasher, algorithm="sha256", secret=b"x"),
    "digests": plain(BlockHashes, digests=list(HASHES.digests)),
    "config": plain(
        CacheConfig, block_size_tokens=8, ssm_chunk_size=8, max_requests=2, max_tokens=64,
        max_sequence_length=64, num_kv_blocks=4, max_slots=2,
        eviction_policy="lru", vocab_size=13, min_computed_tokens=1, max_checkpoints_per_step=3,
        num_speculative_tokens=1, slot_quantization=None, quantized_tensors=["ssm"],
        hash_algorithm="sha256", hash_secret=b"x",
    ),
    "state_spec": plain(
        StateSpec.mamba, num_layers=NUM_LAYERS, conv_shape=CONV, ssm_shape=SSM,
        conv_dtype=DTYPES[0], ssm_dtype=DTYPES[1],
    ),
    "state_spec.of": plain(
        lambda **kinds: StateSpec.of(*kinds.values()),
        first=LayerKind("a", 1, [ONE_TENSOR]), second=LayerKind("b", 2, [ONE_TENSOR]),
    ),
    "layer_kind": plain(LayerKind, name="gdn", num_layers=2, tensors=[("conv", CONV, DTYPES[0])]),
    "layer_kind, by tensor": plain(
        lambda name, shape, dtype: LayerKind("gdn", 2, [(name, shape, dtype)]),
        name="conv", shape=CONV, dtype=DTYPES[0],
    ),
    "quantization": plain(SlotQuantization, tensors=["ssm"]),
    "kv_spec": plain(KVCacheSpec, num_layers=1, num_kv_heads=1, head_dim=4, dtype=torch.float32),
    "placement": plain(EveryNthBlock, n=2),
    "states": plain(StatePool, spec=STATES, num_rows=2, device="cpu"),
    "copier": plain(
        StateCopier, sources=[torch.ones(2, 4, 3)], destinations=[torch.ones(2, 5, 3)]
    ),
    "copier.copy": Target(
        copier,
        lambda it, **given: it.copier.copy(**given),
        lambda _: {"source_rows": [0, 3], "destination_rows": [4, 1]},
    ),
    "chunks": plain(
        compute_varlen_chunk_metadata, query_start_loc=torch.tensor([0, 3, 9]), chunk_size=4
    ),
}  # fmt: skip


def state_of(thing):
    """The whole memory of a target, including its plain tensors."""
    if isinstance(thing, SimpleNamespace):
        return tuple(frozen(tensor) for tensor in thing.tensors)
    return frozen(thing)
