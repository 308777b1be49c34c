"""Ranks that hold shards of the same states, driven by one random stream of requests.

The model is a stand-in whose state advances element by element, in whole numbers that float64 holds
exactly: what a rank computes for its heads and channels is what one process computes for them.
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from faulty_store import FaultyStore, Trouble
from fingerprints import fingerprint

from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, Request, RequestStatus
from mamba_cache.errors import CapacityError
from mamba_cache.integrations.distributed import (
    GroupAgreement,
    agree_on_num_slots,
)
from mamba_cache.reference import HybridModel, HybridModelConfig
from mamba_cache.slots import ConsumedSlotPolicy
from mamba_cache.states import StateSpec
from mamba_cache.stores import MemoryStore, StoreFault
from mamba_cache.tiers import (
    EntryKind,
    LoadPlanner,
    ModelIdentity,
    Numerics,
    ParallelRank,
    Rates,
)

LAYERS, HEADS, CHANNELS, VOCAB, MODULUS = 2, 8, 16, 50, 65521
BLOCK, CHUNK, MAX_GENERATED = 4, 2, 8
MODEL_AXIS = 2  # of heads and channels, in [layers, rows, heads or channels, ...]
EVERY = (1, 2, 5, 16)


@dataclass(frozen=True)
class Shard:
    """One of ``count`` equal parts of the heads and channels."""

    index: int = 0
    count: int = 1

    def of(self, tensor):
        return tensor.chunk(self.count)[self.index]


CONFIG = CacheConfig(
    block_size_tokens=BLOCK, ssm_chunk_size=CHUNK, max_requests=4, max_tokens=160,
    max_sequence_length=48, num_kv_blocks=50, max_slots=7, vocab_size=VOCAB,
    hash_secret=b"the same on every rank",
)  # fmt: skip


def make_context(state_spec, kv_spec=None, device="cpu"):
    """A small cache full of NaN, so that a state that nobody wrote shows."""
    policy = ConsumedSlotPolicy()
    context = DynamicInferenceContext(
        CONFIG, state_spec, kv_spec, device=device, slot_policy=policy
    )
    for tensor in states(context).values():
        tensor.fill_(torch.nan)
    return context


def shard_spec(shard):
    conv, ssm = (CHANNELS // shard.count, 3), (HEADS // shard.count, 2, 2)
    return StateSpec.mamba(LAYERS, conv, ssm, torch.float64, torch.float64)


def states(context):
    slots = context.slot_allocator
    return {
        "live conv": context.mamba_conv_states,
        "live ssm": context.mamba_ssm_states,
        "saved conv": slots.conv_states,
        "saved ssm": slots.ssm_states,
    }


class ShardModel:
    """Advances the live states of a shard, and saves them at checkpoints."""

    def __init__(self, shard, device="cpu"):
        def draw(*shape):
            return torch.randint(1, MODULUS, shape, generator=generator).double()

        generator = torch.Generator().manual_seed(11)
        weights = [(draw(CHANNELS), draw(HEADS, 2, 2)) for _ in range(LAYERS)]
        self._weights = [[shard.of(w).to(device) for w in layer] for layer in weights]

    def forward(self, metadata, context):
        tokens = metadata.token_ids[: metadata.num_tokens].double() + 1
        rows = metadata.state_rows[: metadata.num_requests].tolist()
        for layer, (conv_weight, ssm_weight) in enumerate(self._weights):
            conv_input = tokens[:, None] * conv_weight % MODULUS
            ssm_input = tokens[:, None, None, None] * ssm_weight % MODULUS
            self._prefill(layer, conv_input, ssm_input, metadata, rows, context)
            for i, row in enumerate(rows[: metadata.num_decodes]):
                self._advance(context, layer, row, conv_input[i : i + 1])
                ssm = context.mamba_ssm_states[layer, row]
                ssm.copy_((ssm * 3 + ssm_input[i]) % MODULUS)

    def _prefill(self, layer, conv_input, ssm_input, metadata, rows, context):
        first, bounds = metadata.num_decodes, metadata.cu_chunk_seqlens.tolist()
        state_of = {row: context.mamba_ssm_states[layer, row] for row in rows[first:]}
        chunk_states = []
        for chunk in range(metadata.num_chunks):
            row = rows[first + int(metadata.chunk_seq_idx[chunk])]
            for token in range(first + bounds[chunk], first + bounds[chunk + 1]):
                state_of[row] = (state_of[row] * 3 + ssm_input[token]) % MODULUS
            chunk_states.append(state_of[row])
        if chunk_states:
            conv = conv_input[first:]
            context.extract_checkpoint_states(layer, torch.stack(chunk_states), conv, metadata)
        for i, row in enumerate(rows[first:], start=first):
            start, end = metadata.query_start_loc[i : i + 2].tolist()
            self._advance(context, layer, row, conv_input[start:end])
            context.mamba_ssm_states[layer, row] = state_of[row]

    def _advance(self, context, layer, row, conv_input):
        window = context.mamba_conv_states[layer, row]
        window.copy_(torch.cat([window, conv_input.T], dim=1)[:, -window.shape[1] :])


class Stream:
    """Requests drawn from a seed, one step after the other: the same calls wherever it runs."""

    def __init__(self, context, model, seed):
        self.context = context
        self.num_skipped = 0
        self._model = model
        self._rng = random.Random(seed)
        self._texts = [self._tokens(30) for _ in range(4)]
        self._num_left = {}  # tokens to generate, by request

    def step(self):
        self._admit()
        for name, status in self._statuses():
            if status is RequestStatus.PREFILLING:
                self._try(self.context.schedule_prefill, name)
            elif status is RequestStatus.PREEMPTED:
                self._try(self.context.resume_request, name)
        self._compute()
        for name, status in self._statuses():
            if self._num_left[name] <= 0:
                self.context.finish(name)
                del self._num_left[name]
            elif status is not RequestStatus.PREEMPTED and self._rng.random() < 0.03:
                self.context.preempt(name)

    def _admit(self):
        start = self._rng.choice(self._texts)[: self._rng.randrange(4, 30)]
        prompt = start + self._tokens(self._rng.randrange(1, 8))
        name = f"request {self._rng.random()}"
        hint = self._rng.choice([None, True, False])
        request = Request(request_id=name, prompt_tokens=prompt, will_continue=hint)
        found = self._try(
            self.context.add_request, request, chunk_tokens=self._rng.choice([None, BLOCK])
        )
        if found:
            self._num_left[name] = self._rng.randrange(1, MAX_GENERATED)
            self.num_skipped += found.skip_tokens

    def _compute(self):
        if all(status is RequestStatus.PREEMPTED for _, status in self._statuses()):
            return
        step = self.context.begin_step()
        logits = self._model.forward(step.metadata, self.context)
        if self._rng.random() < 0.05:
            self.context.abort_step()
            return
        for name in step.sampling_ids:
            self._num_left[name] -= 1
        self.context.commit_step(self._sample(step, logits))

    def _sample(self, step, logits):
        if logits is None:
            return {name: self._tokens(1)[0] for name in step.sampling_ids}
        tokens = zip(step.requests, logits.argmax(dim=1).tolist(), strict=True)
        return {request.request_id: token for request, token in tokens if request.samples}

    def _statuses(self):
        return [(name, self.context.status(name)) for name in self._num_left]

    def _try(self, call, *args, **options):
        try:
            return call(*args, **options)
        except CapacityError:
            return None

    def _tokens(self, count):
        return [self._rng.randrange(VOCAB) for _ in range(count)]


def drive(context, model, seed, num_steps):
    """Runs a stream; the fingerprint after each step, and the states after every 50th."""
    stream = Stream(context, model, seed)
    fingerprints, snapshots = [], []
    for number in range(1, num_steps + 1):
        stream.step()
        fingerprints.append(fingerprint(context))
        if number % 50 == 0:
            snapshots.append({k: t.cpu().clone() for k, t in states(context).items()})
    assert stream.num_skipped > num_steps, "without hits the stream shows nothing"
    assert context.slot_allocator.evicted_slots_total > num_steps // 4
    return fingerprints, snapshots


def run_alone(seed, num_steps):
    """The same in one process that holds everything."""
    return drive(make_context(shard_spec(Shard())), ShardModel(Shard()), seed, num_steps)


def join(rank, world_size, folder, backend):
    """Makes this process a rank; the device that it computes on."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        device_id=device,
    )
    return device or "cpu"


def run_shard(rank, world_size, folder, seed, num_steps, backend):
    """One rank with its shard of the stand-in's states; what it found is left in the folder."""
    device, shard = join(rank, world_size, folder, backend), Shard(rank, world_size)
    context = make_context(shard_spec(shard), device=device)
    fingerprints, snapshots = drive(context, ShardModel(shard, device), seed, num_steps)
    report = {
        "fingerprints": fingerprints,
        "snapshots": snapshots,
        "num_slots": agree_on_num_slots(10 + (rank * 7 + 3) % 5),
    }
    torch.save(report, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def run_model(rank, world_size, folder, seed, num_steps, backend):
    """One rank with the whole reference model, whose tokens come from its logits."""
    device = join(rank, world_size, folder, backend)
    config = HybridModelConfig(ssm_chunk_size=CHUNK, vocab_size=VOCAB)
    model = HybridModel(config, dtype=torch.bfloat16, device=device, seed=5)
    specs = config.state_spec(model.dtype), config.kv_spec(model.dtype)
    context = make_context(*specs, device=device)
    fingerprints, snapshots = drive(context, model, seed, num_steps)
    torch.save({"fingerprints": fingerprints, "snapshots": snapshots}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


class TieredRank:
    """One rank of the reference model over a host tier and a disk or a store of its own.

    Each rank has other budgets and other faults: it damages rows of its host tier, clears it, and
    has its disk fail, by a generator that no other rank has. Prompts are the same on all, and so
    are the tokens, which are those of the model without a cache.
    """

    def __init__(self, rank, world_size, folder, seed, device, **settings):
        self.rank, self.folder = rank, folder
        self._calls, self._faults = random.Random(seed), random.Random(f"{seed} {rank}")
        config = HybridModelConfig(ssm_chunk_size=CHUNK, vocab_size=VOCAB)
        self._model = HybridModel(config, dtype=torch.float64, device=device, seed=5)
        specs = config.state_spec(torch.float64), config.kv_spec(torch.float64)
        self._uncached = DynamicInferenceContext(
            replace(CONFIG, enable_prefix_caching=False, max_slots=0), *specs, device=device
        )
        small = replace(CONFIG, num_kv_blocks=26, max_slots=4, slot_policy="lru")
        tiers = {"num_host_blocks": 30 - 8 * rank, "num_host_states": 9 - 3 * rank, **settings}
        # A group of its own: of gloo, so that the GPU takes no part in agreeing.
        self.agreement = Counted(GroupAgreement(dist.new_group(backend="gloo")))
        self.context = DynamicInferenceContext(
            replace(small, **tiers),
            *specs,
            device=device,
            identity=ModelIdentity(
                name="model",
                weights="w",
                rank=ParallelRank(tensor=rank, tensor_size=world_size),
                numerics=Numerics.of(device),
            ),
            load_planner=LoadPlanner(Rates(1e18, 0.0, 1.0)),
            disk_planner=LoadPlanner(Rates(1e18, 0.0, 1.0)),
            agreement=self.agreement,
        )
        self._texts = [[self._calls.randrange(VOCAB) for _ in range(30)] for _ in range(6)]
        self._known = {}
        self.fingerprints, self.skipped, self.preempted = [], [], 0

    def damage(self):
        """What happens to the tiers of this rank alone."""
        host, draw = self.context.host_tier, self._faults.random()
        kind = self._faults.choice([EntryKind.KV, EntryKind.STATE])
        rows = sorted(host._entries[kind].pool._row_of.values())
        if draw < 0.1 and rows:
            host.memory[kind].row(self._faults.choice(rows))[self._faults.randrange(64)] ^= 1
        elif draw < 0.15 and rows:
            host._entries[kind].headers[self._faults.choice(rows), 100] ^= 1
        elif draw < 0.2:
            host.clear()
        elif draw < 0.4:
            self.context.wait_for_tiers()

    def ask_any(self, number):
        self.damage()
        text = self._calls.choice(self._texts)
        self.ask(number, text[: self._calls.randrange(9, 30)])

    def ask(self, number, prompt):
        """One request to its end; its tokens are those of a run without a cache."""
        request = Request(request_id=number, prompt_tokens=prompt)
        handle = self.context.prefetch(request, timeout_seconds=20)
        while not handle.is_done:
            self.context.poll_tiers()
        self.skipped.append(self.context.add_request(request).skip_tokens)
        while len(self.context.output(number)) < 3:
            status = self.context.status(number)
            if status is RequestStatus.PREEMPTED:
                self.context.resume_request(number)
            elif status is RequestStatus.PREFILLING:
                self.context.schedule_prefill(number)
            self.preempted += self.compute(self.context)
            self.fingerprints.append(fingerprint(self.context))
        assert self.context.finish(number) == self.wanted(prompt), (number, prompt)
        self.context.check_invariants()

    def ask_thrice(self):
        """The last time one rank's states are damaged, and none is on a GPU."""
        self.context.host_tier.clear()
        for number in ("first", "again", "hurt"):
            self.context.kv_block_allocator.reset()
            if number == "hurt" and self.rank == 1:
                rows = self.context.host_tier._entries[EntryKind.STATE].pool._row_of.values()
                for row in rows:
                    self.context.host_tier.memory[EntryKind.STATE].row(row)[7] ^= 1
            self.ask(number, self._texts[0])
            self.context.wait_for_tiers()

    def compute(self, context):
        step = context.begin_step()
        logits = self._model.forward(step.metadata, context)
        rows = zip(step.requests, logits.argmax(dim=1).tolist(), strict=True)
        tokens = {request.request_id: token for request, token in rows if request.samples}
        return len(context.commit_step(tokens))

    def wanted(self, prompt):
        """The first three tokens, computed once without a cache."""
        key = tuple(prompt)
        if key not in self._known:
            self._uncached.add_request(Request(request_id="only", prompt_tokens=prompt))
            for _ in range(3):
                self.compute(self._uncached)
            self._known[key] = self._uncached.finish("only")
        return self._known[key]


class Counted:
    """An agreement that counts how often it is asked."""

    def __init__(self, agreement):
        self._agreement, self.num_asked = agreement, 0

    def largest(self, values):
        self.num_asked += 1
        return self._agreement.largest(values)


def run_tiered(rank, world_size, folder, seed, num_requests, backend):
    """One rank over a host tier and a disk; what it did is left in the folder."""
    path = f"{folder}/disk {rank}"  # below one path, whose budget counts all, one may leave no room
    run_over(rank, world_size, folder, seed, num_requests, backend, disk_cache_path=path,
             disk_cache_gb=0.01 / (1 + rank), write_on_use=1)  # fmt: skip


def run_stored(rank, world_size, folder, seed, num_requests, backend):
    """One rank over a host tier and a store in its memory, which fails now and then."""
    store = FaultyStore(MemoryStore(), seed=seed + rank, sleep=lambda seconds: None)
    for call, fault in (("get_many_into", StoreFault.MISSING), ("put_many", StoreFault.FULL)):
        store.inject(call, Trouble.FAIL, probability=0.1, fault=fault)
    run_over(rank, world_size, folder, seed, num_requests, backend, store=store,
             write_on_use=1)  # fmt: skip


def run_tiered_and_stored(rank, world_size, folder, *arguments):
    """One rank, once over a disk and once over a store: a process takes long to start."""
    reports = []
    for work in (run_tiered, run_stored):
        own = Path(folder, work.__name__)
        own.mkdir(exist_ok=True)
        work(rank, world_size, str(own), *arguments)
        reports.append(torch.load(own / f"{rank}.pt"))
    torch.save(reports, f"{folder}/{rank}.pt")


def run_all(rank, world_size, folder, seed, num_steps, backend):
    """One rank with its shard, and after that over tiers of its own."""
    run_shard(rank, world_size, folder, seed, num_steps, backend)
    own = Path(folder, "tiers")
    own.mkdir(exist_ok=True)
    run_tiered_and_stored(rank, world_size, own, seed, 60, backend)


def run_over(rank, world_size, folder, seed, num_requests, backend, **settings):
    device = join(rank, world_size, folder, backend)
    assert GroupAgreement().largest([rank, -rank]) == [world_size - 1, 0]  # over the backend
    tiered = TieredRank(rank, world_size, folder, seed, device, **settings)
    for number in range(num_requests):
        tiered.ask_any(number)
    before = tiered.preempted
    tiered.ask_thrice()
    report = {
        "fingerprints": tiered.fingerprints,
        "skipped": tiered.skipped,
        "preempted": (before, tiered.preempted),
        "asked": tiered.agreement.num_asked,
        "stats": [
            (stats.name, stats.stored, stats.restored, stats.dropped, stats.refused)
            for stats in tiered.context.tier_stats()
        ],
    }
    tiered.context.close()
    torch.save(report, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def assert_resumed_alike(reports):
    """All ranks decided alike, resumed from tiers, and lost rows that others still had."""
    one, *others = reports
    for other in others:
        for name in ("fingerprints", "skipped", "preempted", "asked"):
            assert other[name] == one[name], name
        assert other["stats"] != one["stats"], "what happened to their tiers is not the same"
    for report in reports:
        assert report["skipped"][-2:] == [28, 28]
        assert report["preempted"][1] > report["preempted"][0], "of the damaged row"
        assert all(restored for _, _, restored, _, _ in report["stats"])


def spawn(work, world_size, folder, seed, num_steps, backend):
    """Runs ``work`` in processes of their own, each with its own hash seed; what they found."""
    arguments = (world_size, str(folder), seed, num_steps, backend)
    torch.multiprocessing.spawn(work, args=arguments, nprocs=world_size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def bits(tensor):
    """A tensor's bits, which compare where NaNs do not."""
    return tensor.contiguous().view(torch.uint8)


def assert_joined(reports, snapshots):
    """The shards of every snapshot are those of one process, side by side."""
    for number, snapshot in enumerate(snapshots):
        for name, whole in snapshot.items():
            shards = [report["snapshots"][number][name] for report in reports]
            joined = torch.cat(shards, dim=MODEL_AXIS)
            assert torch.equal(bits(joined), bits(whole)), (number, name)
