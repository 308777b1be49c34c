"""A context with quantised slots: budget, hits, refusals."""

import pytest
import torch
from context_rig import BLOCK, MODEL_CONFIG, VOCAB, generate, make_config, make_context, uncached
from slot_rig import make_context as make_embedder

from mamba_cache.context import DynamicInferenceContext
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.slots import MambaSlotAllocator
from mamba_cache.states import SlotQuantization, dequantize_states, quantize_states

PROMPT = [(7 * i * i + 3 * i) % VOCAB for i in range(5 * BLOCK + 3)]


def quantized_context(**changes):
    return make_context(make_config(slot_quantization="int8", **changes), poison=False)


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[: 4 * BLOCK]], ids=["inside", "at the end"])
def test_a_hit_is_near_a_miss_and_no_longer_equal(prompt):
    context = quantized_context()
    longer = [*prompt, 1, 2]
    generate(context, prompt, BLOCK)
    _, logits, admission = generate(context, longer, 1)
    assert admission.skip_tokens
    wanted = uncached(longer, 1)[1][0]
    error = (logits[0] - wanted).abs().max()
    assert 0 < error < 0.05 * wanted.abs().max()


def test_the_configurations_tensors_are_the_slots_own():
    assert make_context().slot_allocator.quantization is None
    assert quantized_context().slot_allocator.quantization == SlotQuantization(("ssm",))


def test_a_budget_holds_more_slots():
    spec = MODEL_CONFIG.state_spec(torch.float64)
    quantized = SlotQuantization().slot_spec(spec)
    budget = 40 * spec.bytes_per_slot / 2**30
    made = [
        DynamicInferenceContext(
            make_config(max_slots=None, mamba_cache_gb=budget, slot_quantization=choice),
            spec,
            MODEL_CONFIG.kv_spec(torch.float64),
        ).slot_allocator.max_slots
        for choice in (None, "int8")
    ]
    assert made == [40, 40 * spec.bytes_per_slot // quantized.bytes_per_slot]
    assert made[1] > made[0]


def test_one_layer_is_quantised_on_its_way_into_a_slot(generator):
    allocator = MambaSlotAllocator(
        make_embedder(), 4, 2, (3, 2), (2, 5, 3), torch.bfloat16, torch.float32,
        quantization=SlotQuantization(),
    )  # fmt: skip
    (slot,) = allocator.allocate_slots_batch([7])
    ssm = torch.randn(2, 5, 3, generator=generator)
    conv = torch.randn(3, 2, generator=generator).bfloat16()
    allocator.store_from_tensors(7, 1, ssm, conv)
    codes, scales = quantize_states(ssm)
    assert torch.equal(allocator.ssm_states[1, slot], codes)
    assert torch.equal(allocator.ssm_scales[1, slot], scales)
    assert torch.equal(allocator.conv_states[1, slot], conv)
    restored = dequantize_states(codes, scales, torch.float32)
    assert (restored - ssm).abs().max() <= scales.max() / 2 * 1.0001
    with pytest.raises(InvalidArgumentError, match="must be"):
        allocator.store_from_tensors(7, 1, codes, conv)
