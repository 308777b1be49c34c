"""States of any kinds: through slots, int8 copies, an engine, and calls in any order."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from context_machine import ContextMachine
from context_rig import UncachedRuns, make_config
from engine_rig import prompts_with_shared_prefixes, run_checked
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from kinds_rig import EVERY, MIXED, MODELS
from slot_rig import make_context as make_slot_context
from speculation_machine import SpeculationMachine

from mamba_cache.reference import Engine, NgramDrafter, SamplingParams
from mamba_cache.slots import MambaSlotAllocator
from mamba_cache.states import (
    PAD_SLOT_ID,
    ZERO_SOURCE,
    LayerKind,
    SlotQuantization,
    StateCopier,
    StatePool,
    StateSpec,
    StateTensorSpec,
    dequantize_states,
    quantize_states,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int32]
NUM_SLOTS, NUM_ROWS = 5, 4
SLOW = examples(12)


class MixedMachine(ContextMachine):
    """Gated DeltaNet, Mamba-2, short convolutions and attention in one model."""

    longest_answer = 6
    model, uncached = MIXED, UncachedRuns(6, model=MIXED)


TestMixedMachine = MixedMachine.TestCase
TestMixedMachine.settings = SLOW


class EveryKindSpeculationMachine(SpeculationMachine):
    """With drafts: each state after a draft lies in a live row of its own."""

    longest_answer = 8
    model, uncached = EVERY, UncachedRuns(16, model=EVERY)


TestEveryKindSpeculationMachine = EveryKindSpeculationMachine.TestCase
TestEveryKindSpeculationMachine.settings = SLOW


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@given(
    prompts=prompts_with_shared_prefixes(13),
    num_kv_blocks=st.sampled_from([11, 14, 60]),
    max_slots=st.sampled_from([1, 3, 40]),
    max_tokens=st.sampled_from([5, 13, 40]),
    drafts=st.sampled_from([0, 2]),
)
@SLOW
def test_an_engine_answers_as_the_model_alone(
    model, prompts, num_kv_blocks, max_slots, max_tokens, drafts
):
    config = make_config(
        num_kv_blocks=num_kv_blocks,
        max_slots=max_slots,
        max_tokens=max_tokens,
        num_speculative_tokens=drafts,
    )
    engine = Engine(model, config, drafter=NgramDrafter)
    for name, prompt in enumerate(prompts):
        engine.submit(prompt, SamplingParams(max_new_tokens=4), request_id=name)
    done = run_checked(engine)
    for name, prompt in enumerate(prompts):
        assert list(done[name].tokens) == model.answer(prompt, 4)[0]


@st.composite
def specs(draw, dtypes=DTYPES):
    """One to three kinds of zero to three layers; hardly a size is a multiple of 16 bytes."""
    shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
    tensor = st.tuples(shapes, st.sampled_from(dtypes))
    kinds = draw(st.lists(st.lists(tensor, min_size=1, max_size=3), min_size=1, max_size=3))
    return StateSpec.of(
        *(
            LayerKind(
                f"kind{k}",
                draw(st.integers(0, 3)),
                [(f"tensor{i}", *each) for i, each in enumerate(tensors)],
            )
            for k, tensors in enumerate(kinds)
        )
    )


def fill(pool, rng):
    """Random bits, of which integers and comparisons of bytes make nothing else."""
    for tensor in pool.tensors.values():
        bits = torch.from_numpy(rng.integers(0, 256, tensor.nbytes, np.uint8))
        tensor.view(-1).view(torch.uint8).copy_(bits)


def bits_of(pool, row):
    return {name: as_bytes(tensor[:, row]).clone() for name, tensor in pool.tensors.items()}


def as_bytes(tensor):
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)


def assert_bits(pool, row, expected):
    for name, tensor in pool.tensors.items():
        assert torch.equal(as_bytes(tensor[:, row]), expected[name]), (name, row)


@given(spec=specs(), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_slots_hold_every_bit_of_what_was_saved(spec, seed, data):
    """Saves and restores in any order, against dicts of bytes."""
    rng = np.random.default_rng(seed)
    live = StatePool(spec, NUM_ROWS, device=DEVICE)
    context = make_slot_context(
        9,
        NUM_ROWS,
        device=DEVICE,
        live_states=live.tensors,
        mamba_metadata=SimpleNamespace(request_to_mamba_state_idx=torch.arange(NUM_ROWS).flip(0)),
    )
    slots = MambaSlotAllocator.from_spec(context, NUM_SLOTS, spec)
    fill(slots.states, rng)
    in_slots = [bits_of(slots.states, slot) for slot in range(NUM_SLOTS)]
    targets = st.permutations(range(NUM_SLOTS))
    for _ in range(data.draw(st.integers(1, 4))):
        fill(live, rng)
        in_rows = [bits_of(live, row) for row in range(NUM_ROWS)]
        requests = data.draw(st.lists(st.integers(0, NUM_ROWS - 1), max_size=3))
        written = data.draw(targets)[: len(requests)]
        slots.store_from_live_batch(written, requests)
        for slot, request in zip(written, requests, strict=True):
            in_slots[slot] = in_rows[NUM_ROWS - 1 - request]
        source = st.integers(0, NUM_SLOTS - 1) | st.sampled_from([ZERO_SOURCE, PAD_SLOT_ID])
        rows = data.draw(st.permutations(range(NUM_ROWS)))[:2]
        sources = [data.draw(source) for _ in rows]
        slots.restore_slots(sources, rows)
        for slot, row in zip(sources, rows, strict=True):
            if slot == ZERO_SOURCE:
                in_rows[row] = {name: torch.zeros_like(b) for name, b in in_rows[row].items()}
            elif slot != PAD_SLOT_ID:
                in_rows[row] = in_slots[slot]
        for slot, expected in enumerate(in_slots):
            assert_bits(slots.states, slot, expected)
        for row, expected in enumerate(in_rows):
            assert_bits(live, row, expected)


# numpy, which interprets the kernel, warns of what random bits are as numbers.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ["torch", "triton"])
@given(
    spec=specs([torch.float16, torch.float32, torch.float64, torch.int8]),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_int8_for_some_of_the_tensors(backend, spec, seed, data):
    more = StateTensorSpec("more.state", data.draw(st.integers(0, 3)), (2, 5, 3), torch.float32)
    spec = StateSpec((*spec.tensors, more))
    able = [t.name for t in spec.tensors if len(t.shape) == 3 and t.dtype.is_floating_point]
    names = data.draw(st.lists(st.sampled_from(able), min_size=1, unique=True))
    quantization = SlotQuantization(names)
    generator = torch.Generator().manual_seed(seed)
    live = StatePool(spec, 3, device=DEVICE)
    slots = StatePool(quantization.slot_spec(spec), 4, device=DEVICE)
    for pool in (live, slots):
        for tensor in pool.tensors.values():
            drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 100
            tensor.copy_(drawn.to(tensor.dtype))
    untouched = bits_of(slots, 2)
    rows, targets = list(live.tensors.values()), list(slots.tensors.values())
    before = {name: tensor.clone() for name, tensor in live.tensors.items()}
    StateCopier(rows, targets, backend=backend).copy([2, 0], [1, 3])
    assert_bits(slots, 2, untouched)
    restorer = StateCopier(targets, rows, backend=backend)
    restorer.copy([1, ZERO_SOURCE], [0, 1])
    for name, states in before.items():
        if name not in names:
            assert torch.equal(slots[name][:, 1], states[:, 2])
            assert torch.equal(live[name][:, 0], states[:, 2])
        else:
            codes, scales = quantize_states(states[:, 2])
            assert torch.equal(slots[name][:, 1], codes)
            assert torch.equal(slots[f"{name}_scales"][:, 1], scales)
            assert torch.equal(live[name][:, 0], dequantize_states(codes, scales, states.dtype))
        assert not live[name][:, 1].any()
        assert torch.equal(live[name][:, 2], states[:, 2])
