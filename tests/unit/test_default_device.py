"""Where tensors lie: where they were told, also under another default device of PyTorch.

Engines set one while they load a model. What lies on the host was made there then, and a GPU
refuses to pin it. Here it is the device that holds no data, so that nothing there can be read.
"""

from types import SimpleNamespace

import context_rig
import numpy as np
import pytest
import slot_rig
import torch
from align_rig import engine_config
from align_states import Model
from context_rig import BLOCK, MODEL, MODEL_CONFIG, generate, make_config, make_context

from mamba_cache import DeviceTokens
from mamba_cache._torch import to_device
from mamba_cache.cache import EveryNthBlock
from mamba_cache.integrations.vllm import CpuGpuBuffer, MambaHybridModelState
from mamba_cache.reference import HybridModel

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]


@pytest.fixture
def elsewhere():
    with torch.device("meta"):
        yield


def run_twice(context):
    runs = [generate(context, PROMPT, 3) for _ in range(2)]
    assert runs[1][2].skip_tokens == 3 * BLOCK
    return [(tokens, torch.stack(logits)) for tokens, logits, _ in runs]


def test_a_context_lies_where_it_was_told():
    wanted = run_twice(make_context())
    with torch.device("meta"):
        got = run_twice(make_context(device="cpu"))
    for (tokens, logits), (wanted_tokens, wanted_logits) in zip(got, wanted, strict=True):
        assert tokens == wanted_tokens
        assert torch.equal(logits, wanted_logits)


def test_the_rows_of_live_states_lie_on_the_host(elsewhere):
    rows = make_context().mamba_metadata.request_to_mamba_state_idx
    assert rows.device.type == "cpu"


def test_tokens_come_and_go_between_host_and_device(elsewhere):
    context = make_context(make_config(num_speculative_tokens=1), device="cpu")
    context_rig.add(context, "a", PROMPT)
    MODEL.forward(context.begin_step().metadata, context)
    context.commit_step({"a": 9})
    sampled = DeviceTokens(
        torch.tensor([[4, 5]], device="cpu"), torch.tensor([2], dtype=torch.int32, device="cpu")
    )
    for commit in ({"a": [4, 5]}, sampled):
        MODEL.forward(context.begin_step(drafts={"a": [4]}).metadata, context)
        context.commit_step(commit)
    assert context.collect_step() == {"a": [4, 5]}
    context.check_invariants()


def test_tokens_are_sent_to_the_device_that_was_named():
    with torch.device("cpu"):
        sent = to_device(torch.tensor([[1, 0], [2, 3]], device="cpu"), torch.device("meta"))
    assert (sent.device.type, sent.shape) == ("meta", (2, 2))


def test_planned_checkpoints_lie_on_the_host():
    context = slot_rig.make_context(
        block_size_tokens=4,
        ssm_chunk_alignment=4,
        paused_request_count=0,
        batch_dimensions=SimpleNamespace(prefill_req_count=1, decode_req_count=0),
        request_to_kv_block_ids=np.arange(3, dtype=np.int32)[None],
    )
    request = SimpleNamespace(prompt_tokens=range(12), finished_chunk_token_count=0)
    with torch.device("meta"):
        slots = slot_rig.make_allocator(context=context, placement=EveryNthBlock(1))
        slots.compute_and_store_offsets(request, 0, 0, 12, 0, [], 3)
        on_host, on_device = slots.get_intermediate_cpu_data(), slots.get_intermediate_gpu_data()
    for offsets, counts in (on_host, on_device):
        assert offsets.tolist() == [[4, 8, 0]]
        assert counts.tolist() == [2]


def test_a_buffer_lies_on_the_host_and_on_the_device(elsewhere):
    buffer = CpuGpuBuffer(3, dtype=torch.int32, device="cpu")
    buffer.np[:] = [4, 5, 6]
    assert buffer.copy_to_gpu().tolist() == [4, 5, 6]


def test_layers_are_told_on_the_host_which_requests_prefill(elsewhere):
    state = MambaHybridModelState(engine_config(Model(8, max_requests=3), {}), None, None, "cpu")
    batch = SimpleNamespace(
        num_reqs=2,
        num_tokens=2,
        idx_mapping=torch.tensor([2, 0], device="cpu"),
        num_scheduled_tokens=np.array([1, 5]),
        is_prefilling_np=np.array([False, True]),
        prefill_runs_as_decode_np=None,
        seq_lens_cpu_upper_bound=torch.tensor([4, 5], device="cpu"),
        num_draft_tokens_per_req=np.array([0, 0]),
    )
    assert state.prepare_attn(batch).is_prefilling.tolist() == [False, True]


def test_a_models_weights_are_those_of_its_seed(elsewhere):
    model = HybridModel(MODEL_CONFIG, dtype=torch.float64, seed=7, device="cpu")
    assert torch.equal(model.embedding, MODEL.embedding)
