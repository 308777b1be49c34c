"""Checkpoint extraction on a GPU: no waiting, large tensors, no scratch memory."""

import pytest
import torch
from gpu_rig import assert_same_bits, random_bits_, waiting_raises

from mamba_cache.states import plan_extraction

pytestmark = pytest.mark.gpu


def fields(checkpoints):
    return tuple(torch.tensor(checkpoints, dtype=torch.int32, device="cuda").T.contiguous())


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_extraction_waits_for_nothing_and_takes_no_memory():
    slots = random_bits_(empty(5, 6, 4)), random_bits_(empty(5, 2, 3, 5, dtype=torch.float32))
    live, states = random_bits_(empty(7, 6, 4)), random_bits_(empty(9, 2, 3, 5, dtype=torch.float))
    inputs = random_bits_(empty(40, 9))[:, 3:]
    entries = fields([(3, 20, 8, 2, 4), (-1,) * 5, (1, 10, 8, 6, 0)])
    with waiting_raises():
        plan_extraction(*slots, live, states, inputs, fields=entries)()
        taken = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        plan_extraction(*slots, live, states, inputs, fields=entries)()
        assert torch.cuda.max_memory_allocated() == taken
    assert_same_bits(slots[0][4], inputs[16:20].T)
    assert_same_bits(slots[0][0], torch.cat([live[6, :, 2:], inputs[8:10].T], dim=1))
    assert_same_bits(slots[1][4], states[3])
    assert_same_bits(slots[1][0], states[1])


def test_tensors_of_more_than_2_31_elements():
    conv_dim, width, state = 2**14, 4, (64, 64, 128)
    num_slots, num_tokens = 2**15 + 8, 2**17 + 16
    num_states = 2**12 + 8
    slot_ssm = random_bits_(empty(num_states, *state))
    states = random_bits_(empty(num_states, *state))
    slot_conv = random_bits_(empty(num_slots, conv_dim, width))
    live = random_bits_(empty(num_slots, conv_dim, width))
    inputs = random_bits_(empty(num_tokens, conv_dim))
    for tensor in (slot_ssm, states, slot_conv, live, inputs):
        assert tensor.numel() > 2**31
    last, end = num_states - 1, num_tokens - 1
    untouched = slot_ssm[last - 1].clone(), slot_conv[last - 1].clone()
    plan_extraction(
        slot_conv[:num_states],
        slot_ssm,
        live,
        states,
        inputs,
        fields=fields([(last, end, end - 2, num_slots - 1, last), (7, end, 0, 0, 3)]),
    )()
    assert_same_bits(slot_ssm[last], states[last])
    assert_same_bits(slot_ssm[3], states[7])
    window = torch.cat([live[-1, :, 2:], inputs[end - 2 : end].T], dim=1)
    assert_same_bits(slot_conv[last], window)
    assert_same_bits(slot_conv[3], inputs[end - width : end].T)
    assert_same_bits(slot_ssm[last - 1], untouched[0])
    assert_same_bits(slot_conv[last - 1], untouched[1])
