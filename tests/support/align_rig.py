"""Worlds that execute an engine's steps, each on separate states, and an oracle.

The oracle is the plainest world: it applies the rules in loops over requests, groups and layers.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from align_engine import Engine
from align_states import NUM_COLUMNS, States

from mamba_cache.integrations.vllm import (
    CpuGpuBuffer,
    MambaBuffers,
    MambaHybridModelState,
    postprocess_mamba,
    postprocess_mamba_align_gpu,
    preprocess_mamba,
    stage_postprocess_inputs_to_gpu,
)


class Oracle:
    """The rules in plain loops."""

    def __init__(self, model, rng):
        self.model, self.states = model, States(model, rng)
        self.state_idx, self.accepted = {}, {}

    def before(self, step):
        for req_id in {*step.finished, *(step.preempted or ()), *step.resumed}:
            self.state_idx.pop(req_id, None)
        for request in step.added:
            self.accepted[request.req_id] = 1
        for request in step.batch:
            current = step.running_column(request)
            fresh = (request.num_computed_tokens - 1) // self.model.block_size
            previous = self.state_idx.get(request.req_id, fresh)
            self.state_idx[request.req_id] = current
            if previous not in (-1, current):
                self.copy(request, previous, current, self.accepted[request.req_id] - 1)
                self.accepted[request.req_id] = 1

    def after(self, step):
        for request in step.batch:
            accepted = self.accepted[request.req_id] = step.accepted(request)
            num_drafts = len(step.drafts.get(request.req_id, ()))
            num_scheduled = step.num_scheduled[request.req_id]
            running = request.num_computed_tokens + num_scheduled - num_drafts
            aligned = (running + accepted - 1) // self.model.block_size * self.model.block_size
            if aligned >= running:
                source = self.state_idx[request.req_id]
                destination = aligned // self.model.block_size - 1
                self.copy(request, source, destination, aligned - running)
                if source == destination:
                    self.accepted[request.req_id] = 1

    def copy(self, request, source, destination, bias):
        width = self.model.conv_width
        for group in range(len(self.model.groups)):
            ids = request.block_ids[1 + group]
            for conv in self.states.windows(group):
                conv[ids[destination], : width - bias] = conv[ids[source], bias:].clone()
            for ssm in self.states.temporal(group):
                ssm[ids[destination]] = ssm[ids[source + bias]].clone()


class HostWorld:
    """An engine that plans copies on the host before a step, and on host or device after it."""

    def __init__(
        self, model, rng, *, device="cpu", backend="auto", decides_on_device=False, by_kind=False
    ):
        self.model, self.states, self.device = model, States(model, rng, device), device
        self.config = model.kv_cache_config()
        # vLLM 0.32 on: functions by kind of layer; copies before a step may run on the device.
        self.by_kind = by_kind
        self.copy_funcs = {"mamba2": model.copy_funcs} if by_kind else model.copy_funcs
        self.cache_config = SimpleNamespace(enable_prefix_caching=True, mamba_cache_mode="align")
        self.bufs = MambaBuffers.create(
            model.max_requests,
            self.config,
            self.copy_funcs,
            partial(CpuGpuBuffer, device=device),
            device,
            decides_on_device,
        )
        self.bufs.preprocess.backend = backend
        if decides_on_device:
            self.bufs.postprocess_align.backend = backend
        self.state_idx, self.accepted = {}, {}
        self.tables = block_tables(model, device)

    def before(self, step):
        self.accepted.update({request.req_id: 1 for request in step.added})
        self.requests = {request.req_id: request for request in step.batch}
        counts = [self.accepted[req_id] for req_id in step.req_ids]
        self.input_batch = SimpleNamespace(
            req_ids=step.req_ids,
            num_accepted_tokens_cpu=np.array(counts, dtype=np.int32),
            block_table=[SimpleNamespace(get_device_tensor=rows_of(t)) for t in self.tables],
        )
        fill_tables(self.tables, [request.block_ids for request in step.batch])
        preprocess_mamba(
            step.scheduler_output(), self.config, self.cache_config, self.state_idx,
            self.input_batch, self.requests, self.states.forward_context(), self.copy_funcs,
            self.bufs.preprocess, self.bufs.postprocess_align if self.by_kind else None,
        )  # fmt: skip
        self.remember(step)

    def after(self, step):
        counts = self.input_batch.num_accepted_tokens_cpu
        counts[:] = [step.accepted(request) for request in step.batch]
        if self.bufs.postprocess_align:
            self.postprocess_on_device(step, counts)
        else:
            postprocess_mamba(
                step.scheduler_output(), self.config, self.cache_config, self.input_batch,
                self.requests, self.state_idx, self.model.num_drafts, len(step.batch),
                forward_context=self.states.forward_context(),
                mamba_state_copy_funcs=self.copy_funcs, copy_bufs=self.bufs.preprocess,
            )  # fmt: skip
        self.remember(step)

    def postprocess_on_device(self, step, counts):
        on_cpu = torch.from_numpy(counts)
        stage_postprocess_inputs_to_gpu(
            self.bufs.postprocess_align, step.scheduler_output(), step.req_ids, len(step.batch),
            self.requests, self.state_idx,
        )  # fmt: skip
        postprocess_mamba_align_gpu(
            bufs=self.bufs,
            num_reqs=len(step.batch),
            num_accepted_tokens_gpu=on_cpu.to(self.device, copy=True),
            num_accepted_tokens_cpu_tensor=on_cpu,
            input_batch=self.input_batch,
            kv_cache_config=self.config,
            forward_context=self.states.forward_context(),
            mamba_state_copy_funcs=self.copy_funcs,
        )
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize()

    def remember(self, step):
        counts = self.input_batch.num_accepted_tokens_cpu.tolist()
        self.accepted.update(zip(step.req_ids, counts, strict=True))


class ResidentWorld:
    """An engine whose bookkeeping stays on the device."""

    def __init__(self, model, rng, *, device="cpu", backend="auto"):
        self.model, self.states, self.device = model, States(model, rng, device), device
        self.config = model.kv_cache_config()
        self.state = MambaHybridModelState(
            engine_config(model, self.states.forward_context()),
            SimpleNamespace(get_mamba_state_copy_func=lambda: model.copy_funcs),
            None,
            device,
            backend=backend,
        )
        self.tables = block_tables(model, device)
        self.rng = np.random.default_rng(5)
        self.slots = {}

    def before(self, step):
        for request in step.added:
            self.slots[request.req_id] = request.slot
            self.state.add_request(request.slot, request)
        rows = [*step.batch, *([None] * int(self.rng.integers(3)))]
        self.rows = [rows[index] for index in self.rng.permutation(len(rows))]
        fill_tables(self.tables, [row.block_ids if row else None for row in self.rows])
        slots = [row.slot if row else -1 for row in self.rows]
        lengths = [step.num_scheduled[row.req_id] if row else 3 for row in self.rows]
        drafts = [len(step.drafts.get(row.req_id, ())) if row else 0 for row in self.rows]
        num_padded = len(self.rows) + int(self.rng.integers(3))
        self.batch = SimpleNamespace(
            num_reqs=len(self.rows),
            num_reqs_after_padding=num_padded,
            num_tokens=sum(lengths),
            num_tokens_after_padding=sum(lengths) + num_padded,
            idx_mapping=self.on_device(slots),
            query_start_loc=self.on_device([0, *np.cumsum(lengths)]),
            num_scheduled_tokens=np.array(lengths),
            num_draft_tokens_per_req=np.array(drafts),
            is_prefilling_np=np.zeros(len(self.rows), dtype=bool),
            seq_lens_cpu_upper_bound=torch.ones(num_padded, dtype=torch.int32),
        )
        self.preprocess(self.per_slot(step, lambda r: r.num_computed_tokens))
        if self.rows:
            self.check_counts(self.prepare("FULL"), num_padded)

    def check_counts(self, metadata, num_padded):
        known = self.accepted
        counts = [known[row.req_id] if row else 1 for row in self.rows]
        padding = [1] * (num_padded - len(counts))
        assert metadata.num_accepted_tokens.tolist() == [*counts, *padding]

    def preprocess(self, num_computed):
        self.state.preprocess_state(self.batch, self.tables, self.config, num_computed)

    def prepare(self, mode):
        return self.state.prepare_attn(self.batch, mode)

    def after(self, step):
        sampled = [step.sampled[row.req_id] if row else 9 for row in self.rows]
        num_computed = self.per_slot(step, step.tokens_after)
        self.postprocess(self.on_device(sampled), num_computed)

    def postprocess(self, sampled, num_computed):
        self.state.postprocess_state(self.batch.idx_mapping, sampled, num_computed)

    def per_slot(self, step, value):
        values = self.rng.integers(0, 1000, self.model.max_requests)
        for request in step.batch:
            values[request.slot] = value(request)
        return self.on_device(values)

    def on_device(self, values):
        return torch.tensor(np.asarray(values), dtype=torch.int32).to(self.device)

    @property
    def accepted(self):
        counts = self.state.num_accepted_tokens_gpu.tolist()
        return {req_id: counts[slot] for req_id, slot in self.slots.items()}

    @property
    def state_idx(self):
        columns = self.state._mamba_state_idx_gpu.tolist()
        return {req_id: columns[slot] for req_id, slot in self.slots.items()}


class SlotWorld(ResidentWorld):
    """A resident world of vLLM 0.32 on: block tables are bound once, by request slot."""

    def __init__(self, model, rng, **options):
        super().__init__(model, rng, **options)
        self.by_slot = block_tables(model, self.device)
        self.state._model = SimpleNamespace(
            get_mamba_state_copy_funcs=lambda kinds: dict.fromkeys(kinds, model.copy_funcs)
        )
        tables = SimpleNamespace(
            block_tables=[SimpleNamespace(gpu=table) for table in self.by_slot],
            input_block_tables=self.tables,
        )
        self.state.initialize_kv_cache(self.config, tables)

    def preprocess(self, num_computed):
        by_slot = [None] * self.model.max_requests
        for row in self.rows:
            if row:
                by_slot[row.slot] = row.block_ids
        fill_tables(self.by_slot, by_slot)
        for table in self.tables:
            table.zero_()  # with overlapping pipeline stages the next step owns them by then
        super().preprocess(num_computed)


def engine_config(model, forward_context):
    """vLLM's settings, with attention blocks three times as large as Mamba columns."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=3 * model.block_size,
            mamba_block_size=model.block_size,
            mamba_cache_mode="align",
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=model.max_requests),
        model_config=SimpleNamespace(max_model_len=model.max_tokens),
        compilation_config=SimpleNamespace(static_forward_context=forward_context),
        num_speculative_tokens=model.num_drafts,
    )


def block_tables(model, device):
    """A table for each KV cache group, filled with valid but wrong ids."""
    shape = model.max_requests + 2, NUM_COLUMNS
    return [torch.zeros(shape, dtype=torch.int32, device=device) for _ in (0, *model.groups)]


def rows_of(table):
    return lambda num_reqs: table[:num_reqs]


def fill_tables(tables, rows):
    for group, table in enumerate(tables[1:], start=1):
        table.zero_()
        for row, block_ids in enumerate(rows):
            if block_ids:
                table[row] = torch.tensor(block_ids[group], dtype=torch.int32)


def check_worlds(model, seed, step_seeds, make_worlds):
    """Run the same steps in all worlds, and compare each with the oracle after every call."""
    oracle = Oracle(model, np.random.default_rng(seed))
    worlds = [make(model, np.random.default_rng(seed)) for make in make_worlds]
    engine = Engine(model)
    for step_seed in step_seeds:
        step = engine.schedule(np.random.default_rng(step_seed))
        for call in ("before", "after"):
            for world in (oracle, *worlds):
                getattr(world, call)(step)
            for world in worlds:
                assert_same(world, oracle, step)
            if call == "before":
                for world in (oracle, *worlds):
                    world.states.write(step, np.random.default_rng(step_seed))
        engine.advance(step)
    return oracle


def assert_same(world, oracle, step):
    for got, want in zip(world.states.bits(), oracle.states.bits(), strict=True):
        assert torch.equal(got, want)
    for name in ("state_idx", "accepted"):
        got, want = getattr(world, name), getattr(oracle, name)
        assert {i: got[i] for i in step.req_ids} == {i: want[i] for i in step.req_ids}, name
