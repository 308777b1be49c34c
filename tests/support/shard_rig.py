"""Ranks that hold shards of the same states, driven by one random stream of requests.

The model is a stand-in whose state advances elementwise, in integers that float64 holds exactly: a
rank computes the same numbers for its heads and channels as a single process.
"""

import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing
from fingerprints import fingerprint
from slot_rig import LastUsedPolicy

from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, Request, RequestStatus
from mamba_cache.errors import CapacityError
from mamba_cache.integrations.distributed import GroupAgreement, agree_on_num_slots
from mamba_cache.states import StateSpec

LAYERS, HEADS, CHANNELS, VOCAB, MODULUS = 2, 8, 16, 50, 65521
BLOCK, CHUNK, MAX_GENERATED = 4, 2, 8
MODEL_AXIS = 2  # axis of heads and channels in [layers, rows, heads or channels, ...]


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


def make_context(state_spec, device="cpu"):
    """A small cache full of NaN, so that an unwritten state shows."""
    policy = LastUsedPolicy()
    context = DynamicInferenceContext(CONFIG, state_spec, device=device, slot_policy=policy)
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
        bounds = metadata.query_start_loc[: metadata.num_requests + 1].tolist()
        rows = metadata.state_rows[: metadata.num_requests].tolist()
        first = bounds[metadata.num_decodes]
        chunk_ends = metadata.cu_chunk_seqlens[1 : metadata.num_chunks + 1].tolist()
        for layer, (conv_weight, ssm_weight) in enumerate(self._weights):
            conv_input = tokens[:, None] * conv_weight % MODULUS
            ssm_input = tokens[:, None, None, None] * ssm_weight % MODULUS
            after = []  # state after each token
            for row, start, end in zip(rows, bounds, bounds[1:], strict=False):
                state = context.mamba_ssm_states[layer, row]
                for token in range(start, end):
                    state = (state * 3 + ssm_input[token]) % MODULUS
                    after.append(state)
            if chunk_ends:
                states = torch.stack([after[first + end - 1] for end in chunk_ends])
                context.extract_checkpoint_states(layer, states, conv_input[first:], metadata)
            for row, start, end in zip(rows, bounds, bounds[1:], strict=False):
                window = context.mamba_conv_states[layer, row]
                seen = torch.cat([window, conv_input[start:end].T], dim=1)
                window.copy_(seen[:, -window.shape[1] :])
                context.mamba_ssm_states[layer, row] = after[end - 1]


class Stream:
    """Random requests from a seed, step by step: the same calls in every process."""

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
        self._model.forward(step.metadata, self.context)
        if self._rng.random() < 0.05:
            self.context.abort_step()
            return
        for name in step.sampling_ids:
            self._num_left[name] -= 1
        self.context.commit_step({name: self._tokens(1)[0] for name in step.sampling_ids})

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
    """Run a stream; return fingerprints after each step, and states after every 50th step."""
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
    """Run the stream in a single process with whole states."""
    return drive(make_context(shard_spec(Shard())), ShardModel(Shard()), seed, num_steps)


def join(rank, world_size, folder, backend):
    """Make this process a rank; return its device."""
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
    """Run one rank with its shard of the states; save its report in the folder."""
    device, shard = join(rank, world_size, folder, backend), Shard(rank, world_size)
    assert GroupAgreement().largest([rank, -rank]) == [world_size - 1, 0]
    context = make_context(shard_spec(shard), device=device)
    fingerprints, snapshots = drive(context, ShardModel(shard, device), seed, num_steps)
    report = {
        "fingerprints": fingerprints,
        "snapshots": snapshots,
        "num_slots": agree_on_num_slots(10 + (rank * 7 + 3) % 5),
    }
    torch.save(report, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def spawn(work, world_size, folder, seed, num_steps, backend):
    """Run ``work`` in separate processes, each with its own hash seed; return their reports."""
    arguments = (world_size, str(folder), seed, num_steps, backend)
    torch.multiprocessing.spawn(work, args=arguments, nprocs=world_size)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def assert_joined(reports, snapshots):
    """The joined shards of every snapshot must equal the states of a single process."""
    for number, snapshot in enumerate(snapshots):
        for name, whole in snapshot.items():
            shards = [report["snapshots"][number][name] for report in reports]
            joined = torch.cat(shards, dim=MODEL_AXIS).contiguous()
            # Compared as bits, because NaNs are not equal.
            assert torch.equal(joined.view(torch.uint8), whole.view(torch.uint8)), (number, name)
