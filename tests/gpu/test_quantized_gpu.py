"""Quantised slots on a GPU: replay from a CUDA graph, no waiting, no scratch, large tensors."""

import pytest
import torch
from gpu_rig import assert_same_bits, random_bits_, waiting_raises

from mamba_cache.states import (
    ZERO_SOURCE,
    SlotQuantization,
    StateCopier,
    StatePool,
    StateSpec,
    plan_extraction,
    quantize_states,
)

pytestmark = pytest.mark.gpu

INT8 = SlotQuantization()
LARGE = (64, 64, 128)


def make_pools(dtype=torch.bfloat16, ssm=(16, 64, 128), rows=7):
    """Live states of normal values and slots of random bits, but for scales."""
    spec = StateSpec.mamba(3, (256, 4), ssm, torch.bfloat16, dtype)
    live = StatePool(spec, rows, device="cuda")
    slots = StatePool(INT8.slot_spec(spec), rows, device="cuda")
    random_bits_(live["conv"])
    live["ssm"].normal_()
    for name in ("conv", "ssm"):
        random_bits_(slots[name])
    slots["ssm_scales"].uniform_(0.1, 1)
    return list(live.tensors.values()), list(slots.tensors.values())


def on_device(rows):
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


def fields(checkpoints):
    return tuple(on_device(checkpoints).T.contiguous())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_calls_wait_for_nothing_and_take_no_memory(dtype):
    live, slots = make_pools(dtype)
    store = StateCopier(live, slots)
    restore = StateCopier(slots, live)
    entries = fields([(3, 20, 8, 2, 4), (-1,) * 5, (1, 10, 8, 6, 0)])
    inputs = random_bits_(torch.empty(40, 256, dtype=torch.bfloat16, device="cuda"))

    def call_all():
        store.copy([1, 2], [0, 5])
        restore.copy([0, ZERO_SOURCE], [3, 4])
        plan_extraction(
            slots[0][1], slots[1][1], live[0][1], live[1][0], inputs,
            fields=entries, slot_scales=slots[2][1],
        )()  # fmt: skip

    call_all()
    with waiting_raises():
        taken = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call_all()
        rows = 512  # the allocator's least piece, for rows that come from lists
        assert torch.cuda.max_memory_allocated() <= taken + rows
    codes, scales = quantize_states(live[1][0, 3])
    assert_same_bits(slots[1][1, 4], codes)
    assert_same_bits(slots[2][1, 4], scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies_of_more_than_2_31_elements(dtype):
    num_rows = 2**12 + 8
    spec = StateSpec.mamba(1, (8, 4), LARGE, torch.bfloat16, dtype)
    live = StatePool(spec, num_rows, device="cuda")
    slots = StatePool(INT8.slot_spec(spec), num_rows, device="cuda")
    assert live["ssm"].numel() > 2**31
    last = num_rows - 1
    for row in (0, 5, last):
        live["ssm"][:, row].normal_()
    random_bits_(slots["ssm"][:, last - 1])
    tensors = list(live.tensors.values()), list(slots.tensors.values())
    untouched = slots["ssm"][:, last - 1].clone()
    StateCopier(*tensors).copy([last, 5], [3, last])
    for row, slot in ((last, 3), (5, last)):
        codes, scales = quantize_states(live["ssm"][:, row])
        assert_same_bits(slots["ssm"][:, slot], codes)
        assert_same_bits(slots["ssm_scales"][:, slot], scales)
    assert_same_bits(slots["ssm"][:, last - 1], untouched)
    StateCopier(*reversed(tensors)).copy([last, 3], [0, last - 1])
    for slot, row in ((last, 0), (3, last - 1)):
        values = slots["ssm"][:, slot].float() * slots["ssm_scales"][:, slot].unsqueeze(-2)
        assert_same_bits(live["ssm"][:, row], values.to(dtype))


def test_extraction_of_more_than_2_31_elements():
    num_states = 2**12 + 8
    last = num_states - 1
    states = torch.empty(num_states, *LARGE, dtype=torch.bfloat16, device="cuda")
    assert states.numel() > 2**31
    states[[7, last]] = torch.randn(2, *LARGE, device="cuda").bfloat16()
    codes = torch.zeros(states.shape, dtype=torch.int8, device="cuda")
    scales = torch.zeros(num_states, LARGE[0], LARGE[2], device="cuda")
    windows = torch.zeros(num_states, 8, 4, dtype=torch.bfloat16, device="cuda")
    inputs = random_bits_(torch.empty(40, 8, dtype=torch.bfloat16, device="cuda"))
    plan_extraction(
        windows, codes, windows[:1].clone(), states, inputs,
        fields=fields([(last, 20, 8, 0, last), (7, 30, 8, 0, 3)]),
        slot_scales=scales,
    )()  # fmt: skip
    for chunk, slot, end in ((last, last, 20), (7, 3, 30)):
        wanted_codes, wanted_scales = quantize_states(states[chunk])
        assert_same_bits(codes[slot], wanted_codes)
        assert_same_bits(scales[slot], wanted_scales)
        assert_same_bits(windows[slot], inputs[end - 4 : end].T)
    assert codes[last - 1].count_nonzero() == scales[last - 1].count_nonzero() == 0
