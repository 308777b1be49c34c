"""Device work between two steps with drafts, compared with loops over plain Python values."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_plans import decode_work, make_buffers, make_table, part

from mamba_cache._torch import PAD_SLOT_ID
from mamba_cache.cache.sequence import Checkpoint
from mamba_cache.context.kernels import decode, decode_numpy
from mamba_cache.context.kernels.decode_numpy import DecodeRows

MAX_REQUESTS, BLOCK, BLOCKS, CHUNK = 6, 12, 8, 4


@pytest.fixture(params=[decode, decode_numpy], ids=["triton", "numpy"], scope="module")
def kernels(request):
    return request.param


@pytest.fixture(scope="module")
def device(kernels, device):
    """The numpy kernels run on the CPU only."""
    return torch.device("cpu") if kernels is decode_numpy else device


@dataclass
class Case:
    """A step over rows whose lengths only the device has."""

    ring: int
    rows: list[int]
    num_decodes: int
    lengths: list[int]
    computed: list[int]
    cursors: list[int]
    last_tokens: list[int]
    drafts: list[list[int]]
    drafts_on_device: bool
    boundaries: dict[int, int]
    counts: list[int]
    tokens: list[list[int]]
    tables: list[list[int]]


@st.composite
def cases(draw):
    most = draw(st.integers(1, 4))
    count = draw(st.integers(1, MAX_REQUESTS))
    decodes = draw(st.integers(0, count))

    def ints(least, largest, size=MAX_REQUESTS):
        return draw(st.lists(st.integers(least, largest), min_size=size, max_size=size))

    computed = ints(0, BLOCK * BLOCKS - most - 8)
    rows = draw(st.permutations(range(MAX_REQUESTS)))[:count]
    chosen = draw(st.lists(st.sampled_from(range(count)), unique=True))
    return Case(
        ring=most + 2,
        rows=rows,
        num_decodes=decodes,
        lengths=[draw(st.integers(1, 1 + most if i < decodes else 7)) for i in range(count)],
        computed=computed,
        cursors=ints(0, most + 1),
        last_tokens=ints(0, 2**31 - 1),
        drafts=[ints(-1, 99, most) for _ in range(MAX_REQUESTS)],
        drafts_on_device=draw(st.booleans()),
        boundaries={i: max(1, computed[rows[i]] + draw(st.integers(-3, 6))) for i in chosen},
        counts=ints(-1, most + 2, count),
        tokens=[ints(0, 2**40, 1 + most) for _ in range(count)],
        tables=[ints(0, 2**27, BLOCKS) for _ in range(MAX_REQUESTS)],
    )


def tensors(case, device):
    """Return the rows and the metadata of a case, with poisoned padding."""
    table = make_table(torch.tensor(case.tables, dtype=torch.int32).numpy())
    buffers = make_buffers(
        table,
        device,
        block_size_tokens=BLOCK,
        ssm_chunk_size=CHUNK,
        max_tokens=64,
        checkpoints_per_step=0,
        max_decode_tokens=case.ring - 1,
        live_rows_per_request=case.ring,
    )
    slices = [
        part(row, 0 if i < case.num_decodes else case.computed[row], host_tokens(case, i))
        for i, row in enumerate(case.rows)
    ]
    work = decode_work(slices[: case.num_decodes], table, BLOCK)
    saved = [(i, Checkpoint(p, 50 + i)) for i, p in case.boundaries.items()]
    rows = DecodeRows(MAX_REQUESTS, case.ring, device, buffers.host_arrays)
    rows.num_computed[:] = torch.tensor(case.computed)
    rows.cursors[:] = torch.tensor(case.cursors)
    rows.last_tokens[:] = torch.tensor(case.last_tokens)
    return rows, buffers.fill(work, slices[case.num_decodes :], saved)


def host_tokens(case, index):
    drafts = [max(0, token) for token in case.drafts[case.rows[index]]]
    return torch.tensor([7, *drafts, 8, 9, 8, 9, 8, 9][: case.lengths[index]]).numpy()


def drafts_of(case, device):
    return torch.tensor(case.drafts, device=device) if case.drafts_on_device else None


@given(case=cases())
def test_metadata_of_decoding_requests(kernels, device, case):
    rows, metadata = tensors(case, device)
    fields = {name: getattr(metadata, name) for name in metadata.__slots__}
    wanted = {n: value.tolist() for n, value in fields.items() if isinstance(value, torch.Tensor)}
    if case.num_decodes:
        kernels.describe_decodes(rows, metadata, drafts_of(case, device), BLOCK)
    packed = 0
    for index, row in enumerate(case.rows[: case.num_decodes]):
        computed, cursor, length = case.computed[row], case.cursors[row], case.lengths[index]
        wanted["num_computed_tokens"][index] = computed
        wanted["seq_lens"][index] = computed + length
        ring = [row * case.ring + (cursor + j) % case.ring for j in range(case.ring)]
        wanted["state_rows"][index], wanted["decode_state_rows"][index] = ring[0], ring
        tokens = [case.last_tokens[row], *(max(0, token) for token in case.drafts[row])]
        for position, token in enumerate(tokens[:length], computed):
            block = case.tables[row][position // BLOCK]
            wanted["token_ids"][packed] = token
            wanted["positions"][packed] = position
            wanted["kv_slot_mapping"][packed] = block * BLOCK + position % BLOCK
            packed += 1
    for name, values in wanted.items():
        assert getattr(metadata, name).tolist() == values, name


@given(case=cases())
def test_requests_advance_past_their_new_tokens(kernels, device, case):
    rows, metadata = tensors(case, device)
    sent = metadata.boundary_slots.tolist()
    tokens = torch.tensor(case.tokens, device=device)
    counts = torch.tensor(case.counts, dtype=torch.int32, device=device)
    kernels.advance_rows(rows, metadata, tokens, counts)
    computed, cursors, last = list(case.computed), list(case.cursors), list(case.last_tokens)
    saved = [PAD_SLOT_ID] * MAX_REQUESTS
    slots = list(sent)
    entries = {index: entry for entry, index in enumerate(case.boundaries)}
    for index, row in enumerate(case.rows):
        length = case.lengths[index]
        if index >= case.num_decodes:
            computed[row], cursors[row], last[row] = (
                computed[row] + length,
                0,
                case.tokens[index][0],
            )
            if index in entries:
                saved[entries[index]] = row * case.ring
            continue
        accepted = max(0, min(case.counts[index], length))
        if index in entries:
            ahead = case.boundaries[index] - case.computed[row]
            reached = 0 < ahead <= accepted
            place = row * case.ring + (case.cursors[row] + ahead) % case.ring
            saved[entries[index]] = place if reached else PAD_SLOT_ID
            slots[entries[index]] = 50 + index if reached else PAD_SLOT_ID
        computed[row] += accepted
        cursors[row] = (cursors[row] + accepted) % case.ring
        if accepted:
            last[row] = case.tokens[index][accepted - 1]
    assert rows.num_computed.tolist() == computed
    assert rows.cursors.tolist() == cursors
    assert rows.last_tokens.tolist() == last
    assert metadata.boundary_rows.tolist() == saved
    assert metadata.boundary_slots.tolist() == slots
