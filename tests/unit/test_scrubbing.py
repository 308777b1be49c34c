"""Scrubbing leaves nothing of a finished salt in any tensor, and all that others need.

In place of a model stands one whose numbers say whose they are and where they come from: the key,
value and state after ``n`` tokens of a request are its salt's number plus ``n``. It checks what it
reads, so that a number too many that was cleared is noticed too.
"""

import numpy as np
import pytest
import torch
from object_graph import tensors_of

from mamba_cache import CacheConfig, DynamicInferenceContext, KVCacheSpec, Request, StateSpec
from mamba_cache.context import RequestStatus
from mamba_cache.slots import EveryNthBlock

BLOCK, CHUNK, LAYERS = 8, 4, 2
SALTS = {"a": 1_000_000, "b": 2_000_000}
SPREAD = 500_000


class Numbers:
    """Computes steps of a context, and checks what the steps before have left."""

    def __init__(self, context):
        self.context = context
        self.live = context.live_states

    def step(self, decode_ids=None, drafts=None, accepted=1):
        step = self.context.begin_step(decode_ids, drafts=drafts)
        self.forward(step)
        taken = {}
        for request in step.requests:
            if request.samples:
                count = 1 if request.is_prefill else min(accepted, request.num_tokens)
                tokens = [*request.drafts, self.token(request.request_id)]
                taken[request.request_id] = tokens[:count]
        self.context.commit_step(taken)

    def token(self, name):
        return SALTS[name[0]] + 7

    def forward(self, step):
        metadata, kv = step.metadata, self.context.kv_cache
        conv_input = torch.zeros(metadata.num_prefill_tokens, 6, dtype=torch.float64)
        chunk_states = torch.zeros(metadata.num_chunks, 2, 2, 4)
        live_conv, live_ssm = self.live["conv"], self.live["ssm"]
        finals, chunk = [], 0
        for index, request in enumerate(step.requests):
            base = SALTS[request.request_id[0]]
            start = int(metadata.num_computed_tokens[index])
            first, end = metadata.query_start_loc[index : index + 2].tolist()
            row = int(metadata.state_rows[index])
            self.check(request, live_ssm[:, row], base + start if start else 0)
            self.check(request, live_conv[:, row, :, -1], base + start if start else 0)
            for position in range(start):
                block = int(metadata.block_tables[index, position // BLOCK])
                self.check(request, kv[:, :, block, position % BLOCK], base + position + 1)
            for offset in range(end - first):
                numbers = base + start + offset + 1
                kv.flatten(2, 3)[:, :, int(metadata.kv_slot_mapping[first + offset])] = numbers
                if not request.is_prefill:
                    written = int(metadata.decode_state_rows[index, offset + 1])
                    live_conv[:, written] = live_ssm[:, written] = numbers
            if request.is_prefill:
                packed = first - metadata.num_decode_tokens
                length = end - first
                conv_input[packed : packed + length] = (
                    torch.arange(start, start + length)[:, None] + base + 1.0
                )
                while chunk < metadata.num_chunks and metadata.chunk_seq_idx[chunk] == (
                    index - metadata.num_decodes
                ):
                    chunk_end = int(metadata.cu_chunk_seqlens[chunk + 1]) - packed
                    chunk_states[chunk] = base + start + chunk_end
                    chunk += 1
                finals.append((row, base + start + length))
        for layer in range(LAYERS if metadata.num_prefills else 0):
            self.context.extract_checkpoint_states(layer, chunk_states, conv_input, metadata)
        for row, numbers in finals:
            live_conv[:, row] = live_ssm[:, row] = numbers

    def check(self, request, tensor, number):
        assert (tensor - number).abs().max() <= self.tolerance * number, (request, number)

    @property
    def tolerance(self):
        """int8 keeps a state that is one number everywhere to a rounding of float32."""
        return 1e-6 if self.context.slot_allocator.quantization else 0


def make_numbers(drafts=0, **changes):
    settings = {
        "block_size_tokens": BLOCK, "ssm_chunk_size": CHUNK, "max_requests": 6, "max_tokens": 256,
        "max_sequence_length": 96, "num_kv_blocks": 26, "max_slots": 12,
        "num_speculative_tokens": drafts,
    }  # fmt: skip
    return Numbers(
        DynamicInferenceContext(
            CacheConfig(**(settings | changes)),
            StateSpec.mamba(LAYERS, (6, 3), (2, 2, 4), torch.float64, torch.float32),
            KVCacheSpec(1, 1, 2, torch.float64),
            placement=EveryNthBlock(1),
        )
    )


def add(numbers, name, length, **options):
    tokens = np.full(length, SALTS[name[0]], dtype=np.int32) + np.arange(length, dtype=np.int32)
    request = Request(request_id=name, prompt_tokens=tokens, cache_salt=name[0])
    return numbers.context.add_request(request, **options)


def drafts_for(numbers, drafts):
    statuses = numbers.context.request_table
    names = [a.request_id for a in statuses if a.status is RequestStatus.DECODING]
    return {name: [numbers.token(name) + i for i in range(drafts)] for name in names}


def fill_with_a(numbers, drafts):
    """Salt "a" uses every block, slot and row, and leaves; nothing of it stays cached."""
    for round_ in range(3):
        names = [f"a{round_}{i}" for i in range(4)]
        for i, name in enumerate(names):
            add(numbers, name, 30 + 3 * i)
        for accepted in (1, 2, 3, 1):
            numbers.step(drafts=drafts_for(numbers, drafts), accepted=accepted)
        for name in names:
            numbers.context.finish(name)
    kv_blocks = numbers.context.kv_block_allocator
    kv_blocks.deregister_blocks(np.flatnonzero(np.asarray(kv_blocks.block_hashes) >= 0))


def begin_b(numbers, drafts):
    """Requests of salt "b" in every state that there is between two steps."""
    add(numbers, "b cached", 19)
    numbers.step()
    numbers.context.finish("b cached")
    add(numbers, "b decodes", 17)
    add(numbers, "b in chunks", 30, chunk_tokens=11)
    add(numbers, "b preempted", 12)
    numbers.step()
    numbers.context.preempt("b preempted")
    for accepted in (1, 2, 3):
        numbers.step(["b decodes"], drafts=drafts_for(numbers, drafts), accepted=accepted)
    numbers.context.schedule_prefill("b in chunks", chunk_tokens=9)
    assert add(numbers, "b hits", 41).skip_tokens >= 2 * BLOCK
    assert numbers.context.slot_allocator.num_reserved_slots > 0


def traces(context, salt):
    """Where numbers of a salt lie: what tensor, and how many."""
    low, quantization = SALTS[salt], context.slot_allocator.quantization
    # Rates in fixed point, ages, hash ids: a policy knows no tokens and no states.
    learned = {tensor.data_ptr() for tensor in tensors_of(context.slot_allocator.policy)}
    found = []
    for tensor in tensors_of(context):
        if tensor.data_ptr() in learned:
            continue
        if tensor.dtype.itemsize == 1:
            continue  # the memory of step tensors, and codes: both are looked at by themselves
        ranges = [(low - 100, low + SPREAD)]
        if quantization and tensor is context.slot_allocator.ssm_scales:
            ranges = [(low / 128, (low + SPREAD) / 126)]
        for least, most in ranges:
            count = int(((tensor >= least) & (tensor < most)).sum())
            if count:
                found.append((tuple(tensor.shape), tensor.dtype, count))
    return found


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("drafts", [0, 2])
def test_nothing_of_a_finished_salt_is_left(drafts, quantization):
    """Left were the rest of reused blocks, live states of drafts, and slots that are reserved."""
    numbers = make_numbers(drafts, slot_quantization=quantization)
    context = numbers.context
    fill_with_a(numbers, drafts)
    begin_b(numbers, drafts)
    assert traces(context, "a"), "or the test shows nothing"
    context.scrub()
    assert traces(context, "a") == []
    assert traces(context, "b")
    slots = context.slot_allocator
    is_cached = slots.slot_to_block >= 0
    for states in (slots.conv_states, slots.ssm_states):
        assert not states[:, ~is_cached].any()
        assert states[:, is_cached].any()
    context.check_invariants()
    context.resume_request("b preempted")
    for accepted in (3, 1, 2):  # these check all that they read
        numbers.step(drafts=drafts_for(numbers, drafts), accepted=accepted)
        for name in [a.request_id for a in context.request_table]:
            if context.status(name) is RequestStatus.PREFILLING:
                context.schedule_prefill(name)
    for name in ("b decodes", "b in chunks", "b hits", "b preempted"):
        context.finish(name)
    add(numbers, "b again", 30)
    numbers.step()


def test_a_salt_whose_requests_run_is_scrubbed_to_what_they_need():
    """Of its own finished requests too nothing is left beside what is cached."""
    numbers = make_numbers(enable_prefix_caching=False)
    add(numbers, "a first", 40)
    numbers.step()
    numbers.context.finish("a first")
    add(numbers, "a second", 11)
    numbers.step()
    numbers.context.scrub()
    kept = numbers.context.kv_cache[0, 0, :, :, 0, 0]
    assert sorted(kept[kept != 0].tolist()) == [SALTS["a"] + i + 1 for i in range(11)]
    assert np.count_nonzero(numbers.live["ssm"][:, :, 0, 0, 0]) == LAYERS
    numbers.step()


def test_without_requests_last_tokens_are_zero():
    numbers = make_numbers()
    add(numbers, "a", 11)
    numbers.step()
    assert numbers.context.request_table.last_tokens.any()
    numbers.context.finish("a")
    numbers.context.scrub()
    assert not numbers.context.request_table.last_tokens.any()


def test_reserved_slots_are_left_alone_unless_said():
    from mamba_cache.slots import scrub_free_slots  # noqa: PLC0415

    numbers = make_numbers()
    slots = numbers.context.slot_allocator
    slots.ssm_states.fill_(3)
    [slot] = slots.reserve_slots([0])
    scrub_free_slots(slots)
    assert slots.ssm_states[:, slot].all()
    assert torch.count_nonzero(slots.ssm_states) == slots.ssm_states[:, slot].numel()
    scrub_free_slots(slots, reserved=True)
    assert not slots.ssm_states.any()


def test_shared_blocks_past_the_restored_state_are_kept():
    """Their tokens are computed again, but their keys and values are not written again."""
    numbers = make_numbers()
    context = numbers.context
    add(numbers, "b first", 26)
    numbers.step()
    context.finish("b first")
    slots = context.slot_allocator
    cached = context.match(
        Request(
            request_id="b",
            prompt_tokens=np.arange(26, dtype=np.int32) + SALTS["b"],
            cache_salt="b",
        )
    ).block_ids
    for block in cached[1:]:
        slots.invalidate_block(block)
    found = add(numbers, "b second", 30)
    assert (found.kv_matched_blocks, found.skip_tokens) == (3, BLOCK)
    context.scrub()
    numbers.step()
    numbers.step()  # reads all keys and values


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_request_that_is_only_scheduled_has_no_live_state_yet(drafts):
    """Its row holds what the row's last request left until its step begins."""
    numbers = make_numbers(drafts, max_requests=1)
    add(numbers, "a", 12)
    numbers.step()
    numbers.context.finish("a")
    add(numbers, "b", 12)
    numbers.context.scrub()
    assert not any(tensor.any() for tensor in numbers.live.tensors.values())
    numbers.step()
    numbers.context.scrub()
    numbers.step()
