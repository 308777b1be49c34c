"""The host tier on a GPU: pinned memory, streams of its own, checksums on the device."""

import bench_tiers
import context_rig
import pytest
import torch
from context_rig import BLOCK, VOCAB, assert_same_run, make_config
from gpu_rig import BUSY_CYCLES, assert_same_bits, held_stream, random_bits_, waiting_raises
from tier_rig import KV, STATE, cached_rows, flip, host_stats, make_tiered

from mamba_cache.context import Request, RequestStatus
from mamba_cache.tiers.cuda import PIECE_BYTES, CudaTransfers, pinner_for
from mamba_cache.tiers.host import HostTier
from mamba_cache.tiers.memory import RowMemory
from mamba_cache.tiers.transfers import CopyJob, RowLayout

pytestmark = pytest.mark.gpu

PROMPT = [(3 * i * i + 2 * i) % VOCAB for i in range(3 * BLOCK + 6)]
OTHERS = [[(5 * i + k) % VOCAB for i in range(3 * BLOCK + 6)] for k in range(1, 6)]
DEVICE = torch.device("cuda")


class Rig:
    """Entries of odd shapes, some too narrow for wide accesses, in a few pieces and in many."""

    def __init__(self, piece_bytes):
        shapes = {
            KV: [((4, 50, 8, 2, 96), torch.bfloat16)],
            STATE: [
                ((3, 20, 5, 7), torch.bfloat16),
                ((3, 20, 70_001), torch.float32),
                ((1, 20, 300_000), torch.uint8),
            ],
        }
        self.tensors = {
            kind: [
                random_bits_(torch.empty(shape, dtype=dtype, device=DEVICE))
                for shape, dtype in each
            ]
            for kind, each in shapes.items()
        }
        self.layouts = {kind: RowLayout(t, sums_chunks=True) for kind, t in self.tensors.items()}
        memory = [
            RowMemory(self.layouts[kind].row_bytes, self.layouts[kind].checksums, count)
            for kind, count in ((KV, 50), (STATE, 20))
        ]
        self.host = HostTier(*memory, pinner=pinner_for(DEVICE))
        self.host.wait_for_memory()
        self.transfers = CudaTransfers(
            self.layouts, self.host.memory, DEVICE, piece_bytes=piece_bytes
        )
        self.jobs = [CopyJob(KV, place, 49 - place) for place in range(50)]
        self.jobs += [CopyJob(STATE, place, (7 * place) % 20) for place in range(20)]

    def copy(self):
        return {kind: [t.clone() for t in each] for kind, each in self.tensors.items()}


@pytest.fixture(params=[PIECE_BYTES, 2**18])
def rig(request):
    made = Rig(request.param)
    # Compiling at the first call takes longer than any GPU work below.
    made.transfers.spill(made.jobs).wait()
    made.transfers.load(made.jobs).wait()
    yield made
    made.transfers.wait()
    made.host.close()


def test_entries_come_back_to_the_bit(rig):
    before = rig.copy()
    with waiting_raises(), held_stream():  # a spill waits for enqueued work
        spilled = rig.transfers.spill(rig.jobs)
        assert not spilled.is_done()
    spilled.wait()
    for tensors in rig.tensors.values():
        for tensor in tensors:
            tensor.zero_()
    with waiting_raises(), held_stream():
        loaded = rig.transfers.load(rig.jobs)
        assert not loaded.is_done()
    after = rig.copy()  # the current stream waits for the load
    loaded.wait()
    assert loaded.damaged() == []
    assert loaded.seconds() > 0
    assert loaded.num_bytes == sum(rig.layouts[job.kind].row_bytes for job in rig.jobs)
    for kind, tensors in after.items():
        for tensor, old in zip(tensors, before[kind], strict=True):
            assert_same_bits(tensor, old)


def test_what_follows_a_load_waits_for_its_copies_and_not_for_their_comparison(rig):
    rig.transfers.spill(rig.jobs).wait()
    before = rig.copy()
    rig.copy()  # a held stream blocks the driver's allocations: this leaves some memory
    for tensors in rig.tensors.values():
        for tensor in tensors:
            tensor.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(rig.transfers._loading.launches), held_stream():
        with torch.cuda.stream(torch.cuda.default_stream()):
            ticket = rig.transfers.load(rig.jobs)
            after = rig.copy()
            torch.cuda.current_stream().synchronize()
        assert not ticket.is_done()
    ticket.wait()
    assert ticket.damaged() == []
    for kind, tensors in after.items():
        for tensor, old in zip(tensors, before[kind], strict=True):
            assert_same_bits(tensor, old)


def test_a_load_waits_for_earlier_reads_of_its_destination(rig):
    """A kernel that reads the destination when the load is enqueued reads the old bits."""
    rig.transfers.spill(rig.jobs).wait()
    [tensor] = rig.tensors[KV]
    random_bits_(tensor)
    old = tensor.clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    read = tensor.clone()
    rig.transfers.load(rig.jobs).wait()
    assert_same_bits(read, old)


def make_context():
    context = make_tiered(options={"device": "cuda"})
    context.wait_for_tiers()
    return context


def answer(context, model, prompt, num_tokens=2):
    """Greedy tokens and logits; nothing in the calls before a step's end waits for the GPU."""
    with waiting_raises():
        admission = context.add_request(Request(request_id="a", prompt_tokens=prompt))
    tokens, logits = [], []
    while len(tokens) < num_tokens:
        status = context.status("a")
        if status is RequestStatus.PREEMPTED:
            context.resume_request("a")
        elif status is RequestStatus.PREFILLING:
            context.schedule_prefill("a")
        with waiting_raises():
            step = context.begin_step()
        row = model.forward(step.metadata, context)[-1].cpu()
        if not context.commit_step([int(row.argmax())]):
            tokens.append(int(row.argmax()))
            logits.append(row)
    context.finish("a")
    return (tokens, logits), admission


@pytest.mark.parametrize("damages", [False, True])
def test_a_request_resumes_from_the_host(model, damages):
    context = make_context()
    for prompt in (PROMPT, *OTHERS):
        run, _ = answer(context, model, prompt)
        assert_same_run(run, prompt)
    context.wait_for_tiers()
    if damages:
        for row in cached_rows(context, STATE):
            flip(context, STATE, row, 77)
    run, admission = answer(context, model, PROMPT)
    assert_same_run(run, PROMPT)
    assert admission.loads_state
    stats = host_stats(context)
    assert (stats.restored > 0) != damages
    assert stats.refused.get("payload_digest", 0) == int(damages)
    context.check_invariants()
    context.wait_for_tiers()
    assert not any(context.host_tier.leases.values())
    context.host_tier.close()


def test_the_first_request_does_not_wait_for_the_memory(model):
    context = context_rig.make_context(make_config(host_cache_gb=4), device="cuda")
    run, _ = answer(context, model, PROMPT)
    assert_same_run(run, PROMPT)
    context.wait_for_tiers()
    [stats] = context.tier_stats()
    assert stats.ready_rows == stats.rows
    context.host_tier.close()


def test_the_benchmark_of_tiers_runs(tmp_path):
    """On a GPU the benchmark prints more figures than on a CPU."""
    parts = ["copies", "first", "disk", "ready"]
    options = ["--device", "cuda", "--small", "--disk-path", str(tmp_path), "--ready-gb", "0.01"]
    found = bench_tiers.main([*options, "--only", *parts])["measurements"]
    assert len({each["name"] for each in found}) == len(found) > len(parts)
    stages = [each["detail"] for each in found if "share of a plain copy" in each["name"]]
    assert len(stages) == 4
    assert all("the link takes" in stage for stage in stages)
