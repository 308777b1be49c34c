"""The interface of slots, rule by rule, for both kinds of embedders: states in slots."""

import pytest
import torch
from conformance_rig import (
    ALIGNMENT,
    BLOCK,
    CONTEXTS,
    DTYPES,
    MAX_BLOCKS,
    MAX_REQUESTS,
    PREFILLS,
    SSM,
    PrefixCachingEvictionPolicy,
    fill,
    make_allocator,
    record,
    reported,
    request_bits,
    scratch_bits,
    three_prefills,
)
from slot_rig import live_bits, slot_bits

from mamba_cache.cache import EveryNthBlock
from mamba_cache.errors import InvalidArgumentError, MambaSlotCapacityError, MissingStateError
from mamba_cache.slots import MambaSlotAllocator
from mamba_cache.states import StateCopier

FIRST_PREFILL = 2
PREFILL_ROWS = range(FIRST_PREFILL, FIRST_PREFILL + PREFILLS)


@pytest.fixture(params=CONTEXTS)
def context(request, generator):
    context = CONTEXTS[request.param](PrefixCachingEvictionPolicy.LRU)
    fill(context, generator)
    return context


@pytest.fixture
def allocator(context, generator):
    return make_allocator(context, generator)


def all_bits(context, allocator):
    return [live_bits(context, row) for row in range(MAX_REQUESTS)], [
        slot_bits(allocator, slot) for slot in range(allocator.max_slots)
    ]


def test_a_layer_is_written_alone(allocator, generator):
    [slot] = allocator.allocate_slots_batch([9])
    before = allocator.conv_states.clone(), allocator.ssm_states.clone()
    ssm = torch.rand(SSM, generator=generator)
    conv = torch.rand(before[0].shape[2:], generator=generator).to(DTYPES[0])
    allocator.store_from_tensors(9, 1, ssm, conv)
    before[0][1, slot], before[1][1, slot] = conv, ssm
    assert torch.equal(allocator.conv_states, before[0])
    assert torch.equal(allocator.ssm_states, before[1])
    with pytest.raises(MissingStateError):
        allocator.store_from_tensors(8, 1, ssm, conv)


def test_live_states_are_saved_and_restored_bit_by_bit(allocator, context):
    slots = allocator.allocate_slots_batch([9, 8])
    saved = [request_bits(context, request) for request in (4, 0)]
    live, others = all_bits(context, allocator)
    allocator.store_from_live_batch(slots, [4, 0])
    assert [slot_bits(allocator, slot) for slot in slots] == saved
    now_live, now_saved = all_bits(context, allocator)
    assert now_live == live
    assert [b for s, b in enumerate(now_saved) if s not in slots] == [
        b for s, b in enumerate(others) if s not in slots
    ]
    assert allocator.restore_to_live(2, 8) is True
    assert request_bits(context, 2) == saved[1]
    assert all_bits(context, allocator)[1] == now_saved
    rows = context.mamba_metadata.request_to_mamba_state_idx
    allocator.restore_slots(slots, [int(rows[3]), int(rows[1])])
    assert [request_bits(context, request) for request in (3, 1)] == saved


def test_the_mapping_to_live_rows_is_read_at_the_call(allocator, context):
    [slot] = allocator.allocate_slots_batch([9])
    rows = context.mamba_metadata.request_to_mamba_state_idx
    rows[0], rows[1] = int(rows[1]), int(rows[0])
    allocator.store_from_live_batch([slot], [1])
    assert slot_bits(allocator, slot) == live_bits(context, int(rows[1]))


def draw_chunk(rng):
    """Draw a chunk of a prompt, after a skipped or finished part."""
    prompt = int(rng.integers(1, BLOCK * MAX_BLOCKS + 1))
    if rng.random() < 0.3:
        prompt += -prompt % BLOCK
    finished = int(rng.integers(0, prompt)) if rng.random() < 0.5 else 0
    if rng.random() < 0.7:
        finished -= finished % ALIGNMENT
    chunk = prompt - finished if rng.random() < 0.6 else int(rng.integers(1, prompt - finished + 1))
    skip = 0 if finished else int(rng.integers(0, chunk)) // BLOCK * BLOCK
    matched = int(rng.integers(0, prompt // BLOCK + 1))
    return prompt, finished, chunk, skip, matched, -(-prompt // BLOCK)


def expected_checkpoints(prompt, finished, chunk, skip, matched, required):
    """Return offsets inside the chunk, their positions, and whether the prompt's end is saved."""
    start, length = finished + skip, chunk - skip
    candidates = {matched * BLOCK, prompt // BLOCK * BLOCK, (required - 1) * BLOCK}
    offsets = sorted(
        position - start
        for position in candidates
        if 0 < position - start < length and (position - start) % ALIGNMENT == 0
    )
    ends = finished + chunk >= prompt and prompt % BLOCK == 0
    return offsets, [start + offset for offset in offsets], ends


def test_checkpoints_of_a_chunk(allocator, context, rng):
    seen = set()
    for _ in range(500):
        row, chunk = int(rng.integers(MAX_REQUESTS)), draw_chunk(rng)
        offsets, positions, ends = expected_checkpoints(*chunk)
        table = context.request_to_kv_block_ids[row].tolist()
        allocator._has_intermediates = False
        record(allocator, row, *chunk)
        pad = 3 - len(offsets)
        assert allocator._intermediate_counts_cpu[row] == len(offsets), chunk
        assert allocator._intermediate_offsets_cpu[row].tolist()[: len(offsets)] == offsets, chunk
        blocks = [table[position // BLOCK - 1] for position in positions] + [-1] * pad
        assert allocator._intermediate_block_ids_cpu[row].tolist() == blocks, chunk
        eos = table[chunk[0] // BLOCK - 1] if ends else -1
        assert allocator._eos_cache_block_id_cpu[row] == eos, chunk
        assert allocator._has_intermediates is bool(offsets or ends), chunk
        seen.add((len(offsets), ends))
    assert seen == {(count, ends) for count in (0, 1, 2) for ends in (False, True)}


@pytest.mark.parametrize("get", ["get_intermediate_gpu_data", "get_intermediate_cpu_data"])
def test_the_forward_gets_the_prefill_requests(allocator, context, get):
    record(allocator, 0, 5 * BLOCK + 1, 0, 5 * BLOCK + 1, 0, 2, 6)  # a paused request
    record(allocator, 3, 5 * BLOCK + 1, 0, 5 * BLOCK + 1, 0, 2, 6)
    offsets, counts = getattr(allocator, get)()
    assert (offsets.dtype, counts.dtype) == (torch.int32, torch.int32)
    assert (offsets.shape, counts.tolist()) == ((PREFILLS, 3), [0, 2, 0])
    assert offsets[1].tolist()[:2] == [2 * BLOCK, 5 * BLOCK]
    moved, moved_counts = allocator.transfer_intermediate_to_gpu(FIRST_PREFILL, PREFILLS)
    assert (moved.tolist(), moved_counts.tolist()) == (offsets.tolist(), counts.tolist())
    context.batch_dimensions.prefill_req_count = 0
    assert getattr(allocator, get)() == (None, None)
    context.batch_dimensions.prefill_req_count = PREFILLS
    allocator._has_intermediates = False
    assert getattr(allocator, get)() == (None, None)


def test_a_commit_makes_every_state_findable_by_block_and_hash(allocator, context):
    inside, ends = three_prefills(allocator, context)
    expected = [scratch_bits(allocator, i) for i in range(3)]
    expected += [request_bits(context, request) for request in (3, 4)]
    allocator.commit_intermediate_states()
    slots = [allocator.get_slot(block) for block in inside + ends]
    assert [slot_bits(allocator, slot) for slot in slots] == expected
    assert allocator.hash_to_block_id == {1001 + block: block for block in inside + ends}
    assert allocator._has_intermediates is False
    for name in ("_intermediate_counts_cpu", "_intermediate_offsets_cpu"):
        assert not getattr(allocator, name)[FIRST_PREFILL:].any()
    for name in ("_intermediate_block_ids_cpu", "_eos_cache_block_id_cpu"):
        assert (getattr(allocator, name)[FIRST_PREFILL:] == -1).all()


STEPS = (
    "_collect_commit_data",
    "allocate_slots_batch",
    "_copy_intermediate_to_cache",
    "store_from_live_batch",
    "register_block_hashes_batch",
    "_clear_intermediate_state",
)


def spy(allocator, monkeypatch):
    """Record the calls of a commit's steps, and forward them."""
    calls = []

    def watch(name):
        step = getattr(allocator, name)

        def watched(*arguments):
            calls.append((name, *arguments))
            return step(*arguments)

        monkeypatch.setattr(allocator, name, watched)

    for name in STEPS:
        watch(name)
    return calls


def test_a_commit_goes_through_its_steps_on_self(allocator, context, monkeypatch):
    inside, ends = three_prefills(allocator, context)
    calls = spy(allocator, monkeypatch)
    allocator.commit_intermediate_states()
    slots = [allocator.get_slot(block) for block in inside + ends]
    assert calls == [
        ("_collect_commit_data",),
        ("allocate_slots_batch", inside + ends),
        ("_copy_intermediate_to_cache", [0, 1, 2], slots[:3]),
        ("store_from_live_batch", slots[3:], [3, 4]),
        ("register_block_hashes_batch", inside + ends, [1001 + b for b in inside + ends]),
        ("_clear_intermediate_state",),
    ]


def test_writes_of_an_embedder_into_the_tables_are_committed(allocator, context):
    allocator._intermediate_block_ids_cpu[3, :2] = torch.tensor([7, 6])
    allocator._eos_cache_block_id_cpu[2] = 0
    context.kv_block_allocator.block_hashes[6] = -1
    reported(context, [0, 2, 0])
    assert allocator._collect_commit_data() == ([7, 6], [0, 1], [0], [2], [1008, -1, 1001])
    allocator.commit_intermediate_states()
    assert [allocator.has_state(block) for block in (7, 6, 0)] == [True] * 3
    assert allocator.hash_to_block_id == {1008: 7, 1001: 0}


def whole(allocator, row, prompt):
    """Record an uncached prompt that is computed in one chunk."""
    record(allocator, row, prompt, 0, prompt, 0, 0, -(-prompt // BLOCK))


def test_checkpoints_that_the_scratch_has_no_row_for_are_counted(context, generator):
    """Checkpoints beyond three of a request are counted, too."""
    for row in (-1, MAX_REQUESTS, "a", 10**30):
        with pytest.raises(InvalidArgumentError, match=rf"current_id must be .*, got {row!r}"):
            whole(make_allocator(context, generator), row, BLOCK)
    table = context.request_to_kv_block_ids.tolist()
    allocator = make_allocator(context, generator, placement=EveryNthBlock(1))
    whole(allocator, 2, 5 * BLOCK - 1)
    assert allocator._intermediate_block_ids_cpu[2].tolist() == table[2][1:4]
    assert allocator.skipped_checkpoints_total == 1
    context.max_mamba_intermediate_states_per_step = 3
    allocator = make_allocator(context, generator, placement=EveryNthBlock(1))
    whole(allocator, 2, 3 * BLOCK + 1)
    whole(allocator, 3, 3 * BLOCK + 1)
    blocks = allocator._intermediate_block_ids_cpu
    assert blocks[2].tolist() == table[2][:3]
    assert allocator._intermediate_counts_cpu.tolist() == [0, 0, 3, 0, 0]
    assert allocator.skipped_checkpoints_total == 3
    whole(allocator, 2, BLOCK + 1)  # the row's old states make room for its new ones
    whole(allocator, 3, 3 * BLOCK + 1)
    assert blocks[2:4].tolist() == [[table[2][0], -1, -1], [*table[3][1:3], -1]]
    assert allocator._intermediate_offsets_cpu[3].tolist() == [2 * BLOCK, 3 * BLOCK, 0]
    assert allocator.skipped_checkpoints_total == 4


def test_states_that_the_scratch_has_no_row_for_are_not_committed(allocator, context):
    inside, ends = three_prefills(allocator, context)
    allocator.max_intermediate_count = 2  # as if an embedder had written the tables itself
    allocator.commit_intermediate_states()
    found = [allocator.has_state(block) for block in inside + ends]
    assert found == [True, True, False, True, True]
    assert allocator.skipped_checkpoints_total == 1


def test_stale_counts_of_an_earlier_forward_are_not_read(allocator, context):
    _, ends = three_prefills(allocator, context)
    context.mamba_metadata.intermediate_count = 0
    allocator.commit_intermediate_states()
    assert [*allocator.hash_to_block_id.values()] == ends


@pytest.mark.parametrize("row", [0, 4])
def test_rows_of_other_requests_than_those_that_prefill_are_kept(allocator, context, row):
    context.batch_dimensions.prefill_req_count = 1  # row 2
    for each in (row, 2):
        whole(allocator, each, 4 * BLOCK)
    reported(context, [0])
    allocator.commit_intermediate_states()
    assert allocator._intermediate_counts_cpu.nonzero().flatten().tolist() == [row]
    end = int(context.request_to_kv_block_ids[row, 3])
    assert allocator._eos_cache_block_id_cpu[[row, 2]].tolist() == [end, -1]


def test_a_commit_whose_copy_is_refused_leaves_nothing_findable(allocator, context):
    inside, ends = three_prefills(allocator, context)
    allocator.allocate_slots_batch(inside[2:])
    context.mamba_ssm_states = context.mamba_ssm_states.double()
    with pytest.raises(InvalidArgumentError, match="agree in dtype"):
        allocator.commit_intermediate_states()
    found = [allocator.has_state(block) for block in inside + ends]
    assert found == [False, False, True, False, False]
    assert allocator.hash_to_block_id == {}
    allocator.check_invariants()


def test_a_second_shortage_is_the_callers_to_see(allocator):
    def shortage(blocks):
        raise MambaSlotCapacityError(len(blocks), 1)

    allocator._collect_commit_data = lambda: ([4, 5], [0, 1], [], [], [40, 50])
    allocator.allocate_slots_batch = shortage
    with pytest.raises(MambaSlotCapacityError) as caught:
        allocator.commit_intermediate_states()
    assert caught.value.required == 1


def test_a_row_that_the_forward_leaves_out_holds_no_earlier_state(allocator, context):
    """The host cannot notice it: another request's state was published as this one's."""
    [first, *_], _ = three_prefills(allocator, context)
    allocator.commit_intermediate_states()
    for row in range(3):
        assert allocator.intermediate_conv_out[:, row].isnan().all()
        assert allocator.intermediate_ssm_out[:, row].isnan().all()
    assert not allocator.intermediate_ssm_out[:, 3:].isnan().all()
    saved = allocator.ssm_states[:, allocator.get_slot(first)].clone()
    three_prefills(allocator, context)
    allocator.intermediate_conv_out[:, 1:] = 1
    allocator.intermediate_ssm_out[:, 1:] = 1
    allocator.commit_intermediate_states()
    again = allocator.ssm_states[:, allocator.get_slot(first)]
    assert again.isnan().all()
    assert not torch.equal(again, saved)


def test_a_scratch_of_integers_is_cleared(context):
    context.mamba_conv_states, context.mamba_ssm_states = (
        torch.zeros(1, MAX_REQUESTS, *shape, dtype=torch.int32) for shape in ((2, 2), (1, 2, 2))
    )
    allocator = MambaSlotAllocator(context, 6, 1, (2, 2), (1, 2, 2), torch.int32, torch.int32)
    three_prefills(allocator, context)
    allocator.intermediate_ssm_out.fill_(5)
    allocator.commit_intermediate_states()
    rest = allocator.max_intermediate_count - 3
    assert allocator.intermediate_ssm_out[0, :, 0, 0, 0].tolist() == [0] * 3 + [5] * rest


def test_with_nothing_to_commit_the_tables_are_cleared(allocator, context):
    whole(allocator, 2, 5 * BLOCK - 1)
    reported(context, [0, 0, 0])
    allocator.commit_intermediate_states()
    assert allocator.num_cached_slots == 0
    assert not allocator._intermediate_counts_cpu.any()


@pytest.fixture
def launches(monkeypatch):
    """Record the number of row pairs of each copy."""
    sizes, copy = [], StateCopier.copy

    def counted(self, source_rows, destination_rows):
        sizes.append(len(source_rows))
        copy(self, source_rows, destination_rows)

    monkeypatch.setattr(StateCopier, "copy", counted)
    return sizes


def test_all_restores_of_a_step_are_one_launch(allocator, launches):
    """Megatron Core copied in a loop: layer by layer, tensor by tensor, for each request."""
    slots = allocator.allocate_slots_batch([7, 8, 9])
    allocator.restore_slots([slots[1], slots[2], slots[1]], [4, 0, 1])
    assert launches == [3]
    allocator.restore_to_live(3, 7)
    assert launches == [3, 1]


def test_a_commit_is_one_launch_for_the_scratch_and_one_for_live_states(
    allocator, context, launches
):
    three_prefills(allocator, context)
    allocator.commit_intermediate_states()
    assert launches == [3, 2]


class Recording:
    """A proxy that records which fields of its target are read."""

    def __init__(self, target, path, seen):
        self.__dict__.update(_target=target, _path=path, _seen=seen)

    def __getattr__(self, name):
        value = getattr(self._target, name)
        path = f"{self._path}{name}"
        self._seen.add(path)
        nested = ("kv_block_allocator", "mamba_metadata", "batch_dimensions")
        return Recording(value, f"{path}.", self._seen) if path in nested else value


FIELDS = """
    device max_requests block_size_tokens prefix_caching_eviction_policy mamba_chunk_size
    ssm_chunk_alignment max_mamba_intermediate_states_per_step gdp_num_householder
    kv_block_allocator kv_block_allocator.pool_size kv_block_allocator.block_ref_counts
    kv_block_allocator.block_timestamps kv_block_allocator.block_hashes request_to_kv_block_ids
    mamba_metadata mamba_metadata.request_to_mamba_state_idx mamba_metadata.intermediate_count
    mamba_metadata.per_request_intermediate_counts mamba_conv_states mamba_ssm_states
    batch_dimensions batch_dimensions.prefill_req_count batch_dimensions.decode_req_count
    paused_request_count
"""
OF_KV_BLOCK_ALLOCATOR = {"kv_block_allocator.attach_slots", "kv_block_allocator.listeners"}
"""Fields that only the package's own KV blocks have; others may lack them."""


def test_nothing_else_of_the_context_is_read(context, generator):
    seen = set()
    allocator = make_allocator(Recording(context, "", seen), generator, max_slots=3)
    blocks = three_prefills(allocator, context)
    allocator.get_intermediate_gpu_data()
    allocator.get_intermediate_cpu_data()
    allocator.commit_intermediate_states()
    allocator.restore_to_live(0, blocks[0][0])
    allocator.on_kv_blocks_deregistered([1], {2})
    allocator.invalidate_block(2)
    allocator.reset()
    assert seen - OF_KV_BLOCK_ALLOCATOR <= set(FIELDS.split())
    assert set(FIELDS.split()) - seen <= {"gdp_num_householder"}
