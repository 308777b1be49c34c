"""States of several kinds on a GPU: CUDA graphs, and a hit that equals a miss.

Their copies run on the device in tests/kernels/test_state_copy.py.
"""

import pytest
import torch
from context_rig import BLOCK, generate, make_context, saved_prefix_lengths
from gpu_rig import assert_same_bits, random_bits_, waiting_raises
from kinds_rig import MODELS, KindsModel

from mamba_cache import CacheConfig, DynamicInferenceContext, Request
from mamba_cache.cache import EveryNthBlock
from mamba_cache.states import LayerKind, StateSpec

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
RWKV7 = LayerKind(
    "rwkv7", 2, [("shift", (2050,), BF16), ("wkv", (32, 64, 64), F32), ("ffn_shift", (2050,), BF16)]
)
PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 3)]


@pytest.mark.parametrize("name", MODELS)
def test_a_hit_equals_a_miss(name):
    patterns = {
        "gdn": "GG",
        "rwkv7": "RR",
        "short_conv": "C*C",
        "mixed": "GMC*G",
        "every": "KRM*CG",
    }
    model = KindsModel(patterns[name], device="cuda")
    context = make_context(model=model, device="cuda", placement=EveryNthBlock(1))
    tokens, logits, history = model.answer(PROMPT, 3)
    for number in range(2):
        run = generate(context, PROMPT, 3, model=model, request_id=number)
        assert run[2].skip_tokens == number * 3 * BLOCK
        assert run[0] == tokens
        torch.testing.assert_close(torch.stack(run[1]), torch.stack(logits), rtol=0, atol=1e-9)
    assert saved_prefix_lengths(context, PROMPT) == [1, 2, 3]
    add = context.add_request(Request(request_id="again", prompt_tokens=PROMPT))
    row = context.begin_step().requests[0].row
    for name, tensor in context.live_states.tensors.items():
        expected = history[add.skip_tokens - 1][name]
        torch.testing.assert_close(tensor[:, row], expected, rtol=0, atol=1e-6)


def test_a_captured_graph_hands_over_every_kind():
    kinds = LayerKind("gdn", 2, [("conv", (70, 3), BF16), ("recurrent", (2, 8, 16), F32)]), RWKV7
    context = DynamicInferenceContext(
        CacheConfig(
            block_size_tokens=8, ssm_chunk_size=4, max_requests=2, max_tokens=64,
            max_sequence_length=64, num_kv_blocks=20, max_slots=8,
        ),
        StateSpec.of(*kinds),
        device="cuda",
        placement=EveryNthBlock(1),
    )  # fmt: skip
    handed_over = {}
    for kind in kinds:
        for name, shape, dtype in kind.tensors:
            is_window = name not in ("recurrent", "wkv")
            size = (kind.num_layers, 64, *(shape[:1] if is_window else shape))
            handed_over[kind.name, name] = torch.empty(size, dtype=dtype, device="cuda")

    def launch(metadata):
        for kind in kinds:
            for layer in range(kind.num_layers):
                given = {name: handed_over[kind.name, name][layer] for name in kind.names}
                states = {n: given.pop(n) for n in ("recurrent", "wkv") if n in given}
                context.extract_states(kind.name, layer, states, given, metadata)

    context.add_request(Request(request_id="captured", prompt_tokens=range(30)))
    metadata = context.begin_step().metadata
    with context.capture_extractions():
        launch(metadata)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with context.capture_extractions() as captured, torch.cuda.graph(graph):
        launch(metadata)
    context.abort_step()
    context.finish("captured")

    context.add_request(Request(request_id="replayed", prompt_tokens=range(1, 30)))
    metadata = context.begin_step().metadata
    for tensor in handed_over.values():
        random_bits_(tensor)
    with waiting_raises():
        graph.replay()
        context.count_extractions(captured)
    context.commit_step({"replayed": 1})
    assert context.stats().unwritten_states == 0
    saved = context.slot_allocator.states
    entries = zip(
        metadata.checkpoint_slots[: metadata.num_checkpoints].tolist(),
        metadata.checkpoint_chunks.tolist(),
        metadata.checkpoint_conv_ends.tolist(),
        strict=False,
    )
    assert metadata.num_checkpoints == 3
    for slot, chunk, end in entries:
        for kind in kinds:
            for name, shape, _ in kind.tensors:
                given = handed_over[kind.name, name]
                expected = given[:, chunk]
                if name not in ("recurrent", "wkv"):
                    width = shape[1] if len(shape) == 2 else 1
                    expected = given[:, end - width : end].transpose(1, 2)
                stored = saved[f"{kind.name}.{name}"][:, slot]
                assert_same_bits(stored, expected.reshape(stored.shape).contiguous())
