"""Host side of a step in align mode: records, copies and refusals.

tests/property/test_align_steps.py holds drawn steps to the rules.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from align_states import Group, Model, States

from mamba_cache.errors import InvalidArgumentError, UnknownRequestError
from mamba_cache.integrations.vllm import (
    CpuGpuBuffer,
    MambaBuffers,
    cleanup_mamba_state_idx,
    postprocess_mamba,
    postprocess_mamba_align_gpu,
    postprocess_mamba_all,
    preprocess_mamba,
    stage_mamba_state_idx_to_gpu,
    stage_postprocess_inputs_to_gpu,
)

B = 8
MODEL = Model(B, num_drafts=2, groups=(Group(num_layers=1),), max_requests=2)


def make_buffer(n, dtype):
    return CpuGpuBuffer(n, dtype=dtype, device="cpu")


def scheduled(num_scheduled, drafts=None, finished=(), preempted=None, resumed=()):
    return SimpleNamespace(
        finished_req_ids=set(finished),
        preempted_req_ids=preempted,
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
        num_scheduled_tokens=num_scheduled,
        scheduled_spec_decode_tokens=drafts or {},
    )


class Worker:
    """One engine worker: requests "a" and "b", whose columns are blocks 1 to 10 and 11 to 20."""

    def __init__(self, rng):
        self.states = States(MODEL, rng)
        self.before = [storage.clone() for storage in self.states.storage]
        self.config = MODEL.kv_cache_config()
        self.cache_config = SimpleNamespace(enable_prefix_caching=True, mamba_cache_mode="align")
        self.state_idx = {}
        self.requests = {
            name: SimpleNamespace(
                num_computed_tokens=0, block_ids=[[], list(range(first, first + 10))]
            )
            for name, first in (("a", 1), ("b", 11))
        }
        self.bufs = self.make_bufs(2)

    def make_bufs(self, count):
        return MambaBuffers.create(
            count, self.config, MODEL.copy_funcs, make_buffer, "cpu", with_postprocess_align=True
        )

    def batch(self, names, accepted, **computed):
        """Return a batch of requests with these numbers of computed tokens."""
        self.input_batch = SimpleNamespace(
            req_ids=list(names), num_accepted_tokens_cpu=np.array(accepted, dtype=np.int32)
        )
        for name, count in computed.items():
            self.requests[name].num_computed_tokens = count

    def preprocess(self, output, align_ctx=None):
        preprocess_mamba(
            output, self.config, self.cache_config, self.state_idx, self.input_batch,
            self.requests, self.states.forward_context(), MODEL.copy_funcs, self.bufs.preprocess,
            align_ctx,
        )  # fmt: skip

    def postprocess(self, output, **changed):
        options = {
            "forward_context": self.states.forward_context(),
            "mamba_state_copy_funcs": MODEL.copy_funcs,
            "copy_bufs": self.bufs.preprocess,
        }
        postprocess_mamba(
            output, self.config, self.cache_config, self.input_batch, self.requests,
            self.state_idx, MODEL.num_drafts, len(self.input_batch.req_ids),
            **{**options, **changed},
        )  # fmt: skip

    @property
    def accepted(self):
        return self.input_batch.num_accepted_tokens_cpu.tolist()

    def is_untouched(self):
        pairs = zip(self.states.storage, self.before, strict=True)
        return all(torch.equal(got, want) for got, want in pairs)


@pytest.fixture
def worker(rng):
    return Worker(rng)


@pytest.mark.parametrize("preempted", [None, set(), {"preempted"}])
def test_columns_of_requests_that_left_are_forgotten(preempted):
    columns = {"finished": 1, "preempted": 2, "resumed": 3, "stays": 99}
    output = scheduled({}, finished=["finished"], preempted=preempted, resumed=["resumed", "new"])
    cleanup_mamba_state_idx(output, columns)
    kept = {"stays": 99} if preempted else {"preempted": 2, "stays": 99}
    assert columns == kept


def test_prefix_caching_is_required(worker):
    worker.cache_config.enable_prefix_caching = False
    worker.batch("a", [1])
    with pytest.raises(InvalidArgumentError, match="requires cache_config"):
        worker.preprocess(scheduled({"a": 1}))


@pytest.mark.parametrize("blocks", [[4], [4, 21], [21, 4]])
def test_columns_and_blocks_out_of_range_change_nothing(worker, blocks):
    """The second request of the batch is invalid, so the first one must not be processed either."""
    worker.state_idx.update(a=0, b=0)
    worker.requests["b"].block_ids = [[], blocks]
    worker.batch("ab", [2, 2], a=B, b=B)
    with pytest.raises(InvalidArgumentError, match="request 'b'"):
        worker.preprocess(scheduled({"a": 1, "b": 1}))
    assert (worker.state_idx, worker.accepted) == ({"a": 0, "b": 0}, [2, 2])
    assert worker.is_untouched()


def test_more_copies_than_the_buffers_hold(worker):
    worker.bufs = worker.make_bufs(0)
    worker.batch("a", [1], a=B)
    with pytest.raises(InvalidArgumentError, match="the copies of 0 requests, got 1"):
        worker.preprocess(scheduled({"a": 1}))


def test_states_that_moved_in_memory_are_found_again(worker, rng):
    worker.batch("a", [1], a=B)
    worker.preprocess(scheduled({"a": 1}))
    worker.states = States(MODEL, rng)
    wanted = worker.states.temporal(0)[0][2].clone()
    worker.batch("a", [1], a=2 * B)
    worker.preprocess(scheduled({"a": 1}))
    assert torch.equal(worker.states.temporal(0)[0][3], wanted)


@pytest.mark.parametrize("missing", ["forward_context", "mamba_state_copy_funcs", "copy_bufs"])
def test_align_mode_needs_the_states(worker, missing):
    worker.batch("a", [1])
    with pytest.raises(InvalidArgumentError, match="in 'align' mode postprocess_mamba requires"):
        worker.postprocess(scheduled({"a": 1}), **{missing: None})


def test_postprocess_without_preprocess_names_the_request(worker):
    worker.batch("a", [1])
    with pytest.raises(UnknownRequestError, match=r"has none of \['a'\]"):
        worker.postprocess(scheduled({"a": 1}))


@pytest.mark.parametrize("mode", ["all", "none"])
def test_all_mode_copies_nothing(worker, mode):
    worker.cache_config.mamba_cache_mode = mode
    worker.state_idx.update(a=5, b=5)
    worker.batch("ab", [3, 1], a=2 * B - 3)
    worker.postprocess(scheduled({"a": 3, "b": 1}))
    assert worker.state_idx == ({"a": 1} if mode == "all" else {"a": 5, "b": 5})
    assert worker.is_untouched()


def test_all_mode_looks_at_the_first_requests_alone(worker):
    worker.state_idx.update(a=5, b=5)
    worker.batch("ab", [1, 1])
    args = scheduled({"b": 3}), worker.config, worker.input_batch, worker.requests
    for num_spec_tokens, num_reqs, left in (
        (0, 2, {"a": 5, "b": 5}),
        (2, 1, {"b": 5}),
        (2, 2, {"b": 0}),
    ):
        postprocess_mamba_all(*args, worker.state_idx, num_spec_tokens, num_reqs)
        assert worker.state_idx == left


def test_an_engine_of_which_the_device_decides_copies_there_before_a_step_too(worker):
    """vLLM 0.32's ``align_ctx``. Nothing is sent in a step that moves no state."""
    context = worker.bufs.postprocess_align
    table = torch.arange(1, 21, dtype=torch.int32).view(2, 10)
    tables = [None, SimpleNamespace(get_device_tensor=lambda n: table[:n])]
    worker.batch("ab", [1, 3])
    worker.input_batch.block_table = tables
    worker.preprocess(scheduled({"a": 1, "b": 1}), context)
    assert (worker.accepted, context.is_initialized) == ([1, 3], False)
    worker.requests["b"].num_computed_tokens = B
    wanted = worker.states.temporal(0)[0][13].clone()
    worker.preprocess(scheduled({"a": 1, "b": 1}), context)
    assert worker.accepted == [1, 1]
    assert torch.equal(worker.states.temporal(0)[0][12], wanted)
    assert context.precopy_bufs[1].gpu.tolist() == [-1, 0]
    assert context.precopy_bufs[2].gpu.tolist() == [0, 2]
    assert not worker.bufs.preprocess.memories
    table[1, 2] = 99
    worker.requests["b"].num_computed_tokens = 2 * B
    with pytest.raises(InvalidArgumentError, match="row 1 has block 99 in Mamba group 0"):
        worker.preprocess(scheduled({"a": 1, "b": 1}), context)
    assert worker.state_idx == {"a": 0, "b": 1}


def test_staging_checks_requests_and_room(worker):
    context = worker.bufs.postprocess_align
    output = scheduled({"a": 3, "b": 1}, {"a": [7, 7]})
    worker.requests["b"].num_computed_tokens = 5
    columns = {"a": 0, "b": 1, "c": 2}
    inputs = worker.requests, columns
    stage_postprocess_inputs_to_gpu(context, output, ["a", "b"], 2, *inputs)
    buffers = context.postcopy_bufs
    staged = [[0, 1], [3, 1], [0, 5], [2, 0]]
    assert [buffer.gpu.tolist() for buffer in buffers] == staged
    with pytest.raises(UnknownRequestError, match=r"has none of \['d'\]"):
        stage_postprocess_inputs_to_gpu(context, output, ["b", "d"], 2, *inputs)
    with pytest.raises(UnknownRequestError, match=r"got \['c'\]"):
        stage_postprocess_inputs_to_gpu(context, output, ["b", "c"], 2, *inputs)
    with pytest.raises(InvalidArgumentError, match="holds 2 entries, got 3"):
        stage_mamba_state_idx_to_gpu(columns, ["a", "b", "c"], 3, buffers[0])
    assert [buffer.gpu.tolist() for buffer in buffers] == staged


def test_the_device_decides_only_with_a_context(worker):
    counts = torch.tensor([3, 3], dtype=torch.int32)
    arguments = {
        "num_accepted_tokens_gpu": counts,
        "num_accepted_tokens_cpu_tensor": counts.clone(),
        "input_batch": None,
        "kv_cache_config": worker.config,
        "forward_context": {},
        "mamba_state_copy_funcs": MODEL.copy_funcs,
    }
    postprocess_mamba_align_gpu(bufs=worker.bufs, num_reqs=0, **arguments)
    assert not worker.bufs.postprocess_align.is_initialized
    worker.bufs.postprocess_align.run_fused_postprocess(2, *[counts] * 5)
    assert worker.bufs.postprocess_align.num_accepted_tokens_out.tolist() == [0, 0]
    worker.bufs.postprocess_align = None
    with pytest.raises(InvalidArgumentError, match="with_postprocess_align=True"):
        postprocess_mamba_align_gpu(bufs=worker.bufs, num_reqs=1, **arguments)
