"""Checksums of tensors: kernel and twin agree, and every change is noticed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states.checksums import EntryChecksums, TensorChecksums, bytes_of
from mamba_cache.states.kernels import checksum, checksum_torch
from mamba_cache.states.kernels.checksum_torch import CHUNK_BYTES, ROUND_BYTES, plan_checksums

SIZES = [1, 3, 8, 16, 17, ROUND_BYTES, ROUND_BYTES + 8, 4 * ROUND_BYTES + 2, CHUNK_BYTES - 1,
         CHUNK_BYTES, CHUNK_BYTES + 5, 2 * CHUNK_BYTES + 48]  # fmt: skip


@pytest.fixture(params=["torch", "triton"])
def checksums_of(request):
    return lambda tensors: TensorChecksums(tensors, backend=request.param)


def heads_first(parts):
    return plan_checksums(
        [part[:, :CHUNK_BYTES] for part in parts] + [part[:, CHUNK_BYTES:] for part in parts]
    )


def measured(kernels, plan, expected, stride=1, phase=0):
    """Return the sums of a sample (7 for other chunks), and whether any sum differs."""
    heads, device = plan.bounds[len(plan.parts) // 2], plan.chunks.device
    sample = slice(0, 1), heads, range(heads + phase, plan.num_chunks, stride), plan.num_chunks
    row = expected.to("cpu" if kernels is checksum_torch else device, copy=True)
    entry = torch.tensor([[0, row.data_ptr()]], device=device)
    changed = torch.zeros(1, dtype=torch.int32, device=device)
    kernels.checksum(plan, entry, changed, *sample)
    is_changed = changed.item()
    row.fill_(7)
    kernels.checksum(plan, entry, None, *sample)
    return row.cpu(), is_changed


def parts_of(memory, sizes, offsets):
    starts = [sum(sizes[:i]) + sum(offsets[: i + 1]) for i in range(len(sizes))]
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]


@settings(max_examples=settings.default.max_examples // 5)  # the interpreter is slow
@given(
    sizes=st.lists(st.sampled_from(SIZES) | st.integers(1, 9999), min_size=1, max_size=3),
    offsets=st.lists(st.integers(0, 17), min_size=4, max_size=4),
    stride=st.integers(1, 5),
    data=st.data(),
)
def test_kernel_equals_its_twin(sizes, offsets, stride, data, device):
    """Tensors have any sizes and addresses, summed whole and in samples."""
    seed, phase = data.draw(st.integers(0, 2**31)), data.draw(st.integers(0, stride - 1))
    generator = torch.Generator().manual_seed(seed)
    count = sum(sizes) + sum(offsets)  # unused gaps included
    memory = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).to(device)
    parts = [part[None] for part in parts_of(memory, sizes, offsets)]
    plan = heads_first(parts)
    expected = torch.zeros(plan.num_chunks, dtype=torch.int64)
    everything, _ = measured(checksum_torch, plan, expected)
    # Addresses of parts do not change the sums.
    elsewhere = heads_first([part.clone() for part in parts])
    assert torch.equal(measured(checksum, elsewhere, expected)[0], everything)
    expected.copy_(everything)
    if data.draw(st.booleans()):
        expected[data.draw(st.integers(0, plan.num_chunks - 1))] += 1
    results = [
        measured(kernels, plan, expected, stride, phase) for kernels in (checksum, checksum_torch)
    ]
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    is_measured = results[0][0] != 7
    num_others = len(range(len(parts) + phase, plan.num_chunks, stride))
    assert int(is_measured.sum()) == len(parts) + num_others
    assert torch.equal(results[0][0][is_measured], everything[is_measured])


@pytest.mark.parametrize("kernels", [checksum, checksum_torch])
@pytest.mark.parametrize("phase", range(3))
def test_a_sample_is_all_heads_and_every_third_of_the_rest(kernels, phase, device):
    memory = torch.ones((1, 5 * CHUNK_BYTES + 9), dtype=torch.uint8, device=device)
    parts = [memory, memory[:, :30], memory[:, : 3 * CHUNK_BYTES]]
    plan = heads_first(parts)
    seen = measured(kernels, plan, torch.zeros(plan.num_chunks).long(), 3, phase)[0] != 7
    assert seen.nonzero().flatten().tolist() == [0, 1, 2, *range(3 + phase, 3 + 5 + 2, 3)]


@pytest.mark.parametrize("size", [1, 17, ROUND_BYTES + 3, CHUNK_BYTES + 9])
@pytest.mark.parametrize("bit", [0, 7])
def test_every_bit_counts(checksums_of, size, bit, device, generator):
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device)
    checksums = checksums_of([memory])
    before = checksums.measure()
    for index in {0, size // 2, size - 1}:
        memory[index] ^= 1 << bit
        checksums.start()
        assert not checksums.is_unchanged(), index
        memory[index] ^= 1 << bit
        checksums.start()
        assert checksums.is_unchanged()
    assert checksums.measure() == before


@pytest.mark.parametrize("distance", [1, 511, 512, 1024, 8192, 8193])
def test_where_a_value_stands_counts(checksums_of, distance, device):
    """Words are exchanged within a lane, across lanes and across chunks."""
    words = torch.arange(3 * CHUNK_BYTES // 8, dtype=torch.int64, device=device)
    checksums = checksums_of([words])
    before = checksums.measure()
    words[[5, 5 + distance]] = words[[5 + distance, 5]]
    checksums.start()
    assert not checksums.is_unchanged()
    assert checksums.measure() != before


def test_signs_do_not_cancel(checksums_of, device):
    """A product leaves the highest bit unchanged, so a shift spreads the bit first."""
    words = torch.ones(4 * ROUND_BYTES // 8, dtype=torch.int64, device=device)
    checksums = checksums_of([words])
    checksums.measure()
    for other in ([1 << 31], [1 << 63], [1 << 63, 1 << 31]):
        changed = words.clone()
        changed[3] ^= -(1 << 63)
        for bit in other:
            changed[3 + 512] ^= bit - (1 << 64) if bit >> 63 else bit
        before = words.clone()
        words.copy_(changed)
        checksums.start()
        assert not checksums.is_unchanged(), other
        words.copy_(before)


DTYPES = [torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
          torch.float64, torch.complex64]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes_are_read_by_their_bits(checksums_of, dtype, device):
    tensor = torch.zeros(33, dtype=dtype, device=device)
    checksums = checksums_of([tensor])
    checksums.measure()
    bytes_of(tensor)[-1] ^= 1
    checksums.start()
    assert not checksums.is_unchanged()


def test_strides_of_every_kind(checksums_of, device):
    """Transposed tensors are read in place, tensors with gaps copied, expanded ones read once."""
    base = torch.arange(96.0, device=device).view(8, 12)
    views = [base.t(), base[:, 1:5], base[::2], base[:1].expand(1000, 12), base[3, 4]]
    for view in views:
        checksums = checksums_of([view])
        checksums.measure()
        assert sum(part.numel() for part in checksums._plan.parts) <= view.numel() * 4
        base[2, 3] += 1  # a change in some views only
        checksums.start()
        is_in = bool((view == base[2, 3]).any())
        assert checksums.is_unchanged() != is_in
        base[2, 3] -= 1


def test_tensors_that_require_grad_or_are_inference_tensors(checksums_of, device):
    with torch.inference_mode():
        inference = torch.ones(5, device=device)
    parameter = torch.nn.Parameter(torch.ones(4, 4, device=device)[:, :2])
    checksums = checksums_of([inference, parameter])
    checksums.measure()
    with torch.inference_mode():
        checksums.start()
        assert checksums.is_unchanged()
        inference[3] = 2
        checksums.start()
    assert not checksums.is_unchanged()


def test_tensors_that_cannot_be_summed():
    with pytest.raises(InvalidArgumentError, match="one device"):
        TensorChecksums([])
    with pytest.raises(InvalidArgumentError, match="one device"):
        TensorChecksums([torch.ones(2), torch.ones(2, device="meta")])
    with pytest.raises(InvalidArgumentError, match="backend must be"):
        TensorChecksums([torch.ones(2)], backend="numpy")
    with pytest.raises(InvalidArgumentError, match="gaps"):
        bytes_of(torch.ones(4)[::2])
    with pytest.raises(InvalidArgumentError, match="no memory"):
        bytes_of(torch.eye(2).to_sparse())


class Entries:
    """Entries in device tensors with wide and narrow parts, and host rows for their checksums."""

    PLACES = (2, 0, 3)

    def __init__(self, backend, device):
        self.tensors = [
            torch.randint(0, 256, shape, dtype=torch.uint8).to(device)
            for shape in ((2, 4, CHUNK_BYTES + 48), (1, 4, 5, 7), (1, 4, 2 * CHUNK_BYTES))
        ]
        sizes = [tensor[:, 0].numel() for tensor in self.tensors]
        self.count = EntryChecksums.count(self.tensors)
        self.sums_start = 16 * -(-sum(sizes) // 16)
        row_bytes = self.sums_start + 8 * self.count
        # Kernels of a GPU read and write pinned host memory.
        is_gpu = device.type == "cuda"
        self.rows = torch.zeros((3, row_bytes), dtype=torch.uint8, pin_memory=is_gpu)
        table = [[place, self.rows[row].data_ptr()] for row, place in enumerate(self.PLACES)]
        self.table = torch.tensor(table, device=device)
        self.checksums = EntryChecksums(self.tensors, self.sums_start, programs=3, backend=backend)

    @property
    def sums(self):
        return self.rows[:, self.sums_start :].view(torch.int64)

    def write(self, which=slice(0, 3), chunks=None):
        self.checksums.measure(self.table, which, chunks or slice(0, self.count))
        self.wait()

    def compared(self, which=slice(0, 3), chunks=None):
        verdicts = torch.zeros(3, dtype=torch.int32, device=self.table.device)
        self.checksums.measure(self.table, which, chunks or slice(0, self.count), verdicts)
        return verdicts.tolist()

    def wait(self):
        if self.table.is_cuda:
            torch.cuda.synchronize()


@pytest.fixture(params=["torch", "triton"])
def entries(request, device):
    return Entries(request.param, device)


# Tensor, layer, byte, and the byte's chunk in the entry.
BYTES = [
    (0, 0, 0, 0), (0, 0, CHUNK_BYTES + 47, 1), (0, 1, 4095, 2), (1, 0, 34, 4),
    (2, 0, CHUNK_BYTES, 6), (2, 0, 2 * CHUNK_BYTES - 1, 6),
]  # fmt: skip


def test_entries_and_the_checksums_of_their_layers(entries, device):
    """Each chunk of an entry has a sum, independent of the other chunks and entries."""
    assert entries.count == 4 + 1 + 2
    entries.write()
    sums = entries.sums.clone()
    entries.rows.zero_()
    entries.checksums = EntryChecksums(entries.tensors, entries.sums_start, backend="torch")
    entries.write()
    assert torch.equal(sums, entries.sums)
    assert len(set(sums.flatten().tolist())) == sums.numel()
    entries.rows.zero_()
    entries.write(slice(1, 2), slice(2, 6))
    assert torch.equal(entries.sums[1, 2:6], sums[1, 2:6])
    assert int(entries.rows.count_nonzero()) == int(sums[1, 2:6].view(torch.uint8).count_nonzero())


@pytest.mark.parametrize("which", [slice(0, 3), slice(1, 2), slice(0, 0)])
@pytest.mark.parametrize("offset", [0, 1])
def test_checksums_are_fetched_from_their_rows(entries, which, offset):
    entries.rows.random_()
    sums = torch.full((3 * entries.count + offset,), -7, device=entries.table.device)
    room = sums[offset : offset + (which.stop - which.start) * entries.count].view(
        -1, entries.count
    )
    entries.checksums.fetch(entries.table, room, which)
    assert torch.equal(room.cpu(), entries.sums[which])
    assert int((sums == -7).sum()) == sums.numel() - room.numel()


def test_every_byte_of_an_entry_counts(entries):
    entries.write()
    compared = entries.compared
    assert compared() == [0, 0, 0]
    for tensor, layer, byte, chunk in BYTES:
        flat = entries.tensors[tensor].flatten(2)
        for place in (0, 1):
            flat[layer, place, byte] ^= 4
        assert compared(slice(1, 3), slice(chunk, chunk + 1)) == [0, 1, 0]
        assert compared(chunks=slice(0, chunk) if chunk else slice(1, 2)) == [0, 0, 0]
        for place in (0, 1):
            flat[layer, place, byte] ^= 4
    entries.sums[2, 3] ^= 1
    assert compared() == [0, 0, 1]
    assert compared(slice(0, 0)) == [0, 0, 0]
