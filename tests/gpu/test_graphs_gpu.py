"""The device's part of a step, captured once and replayed for batches of every kind."""

import pytest
import torch
from gpu_rig import assert_same_bits, random_bits_, waiting_raises

from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, Request
from mamba_cache.errors import StepOrderError, UnwrittenStateWarning
from mamba_cache.states import (
    PAD_SLOT_ID,
    ZERO_SOURCE,
    StateSpec,
    dequantize_states,
    quantize_states,
)

pytestmark = pytest.mark.gpu

BLOCK, CHUNK, LAYERS, CONV, SSM = 8, 4, 3, (6, 4), (2, 4, 5)


class CapturedStep:
    """Restores, extraction in every layer, and boundary copies of a context, in one CUDA graph."""

    def __init__(self, *, int8):
        self.int8 = int8
        self.context = DynamicInferenceContext(
            CacheConfig(
                block_size_tokens=BLOCK, ssm_chunk_size=CHUNK, max_requests=4, max_tokens=256,
                max_sequence_length=128, num_kv_blocks=100, max_slots=30,
                slot_quantization="int8" if int8 else None,
            ),
            StateSpec.mamba(LAYERS, CONV, SSM, torch.bfloat16, torch.float32),
            device="cuda",
        )  # fmt: skip
        self.slots = self.context.slot_allocator
        self.live = [self.context.live_states["conv"], self.context.live_states["ssm"]]
        self.saved = [self.slots.conv_states, self.slots.ssm_states]
        if int8:
            self.saved.append(self.slots.ssm_scales)
        self.chunk_states = torch.empty(LAYERS, 64 + 8, *SSM, device="cuda")
        self.conv_input = torch.empty(LAYERS, 256, CONV[0], dtype=torch.bfloat16, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        self.used = dict.fromkeys(("restored", "cleared", "extracted", "at boundaries"), 0)

    def launch(self, metadata):
        self.slots.restore_slots(metadata.restore_sources, metadata.restore_rows)
        for layer in range(LAYERS):
            self.context.extract_checkpoint_states(
                layer, self.chunk_states[layer], self.conv_input[layer], metadata
            )
        self.slots.live_to_slots(metadata.boundary_rows, metadata.boundary_slots)

    def capture(self):
        """Captures a step of one request, and aborts the step."""
        self.context.add_request(Request(request_id="captured", prompt_tokens=range(30)))
        metadata = self.context.begin_step().metadata
        with self.context.capture_extractions():
            self.launch(metadata)  # compiles
        torch.cuda.synchronize()
        with (
            self.context.capture_extractions() as self.extractions,
            torch.cuda.graph(self.graph),
        ):
            self.launch(metadata)
        self.context.abort_step()
        self.context.finish("captured")

    def as_saved(self, conv, ssm):
        return [conv, *(quantize_states(ssm) if self.int8 else [ssm])]

    def as_live(self, conv, ssm, *scales):
        return [conv, dequantize_states(ssm, *scales, torch.float32) if scales else ssm]

    def expected(self, metadata):
        """Live states and slots after the step, from the metadata by plain loops."""
        live = [tensor.clone() for tensor in self.live]
        saved = [tensor.clone() for tensor in self.saved]
        for source, row in pairs(metadata.restore_sources, metadata.restore_rows):
            self.used["cleared" if source == ZERO_SOURCE else "restored"] += 1
            restored = self.as_live(*(tensor[:, source] for tensor in saved))
            for to, from_ in zip(live, restored, strict=True):
                to[:, row] = 0 if source == ZERO_SOURCE else from_
        entries = (
            metadata.checkpoint_slots, metadata.checkpoint_chunks, metadata.checkpoint_seq_starts,
            metadata.checkpoint_conv_ends, metadata.checkpoint_rows,
        )  # fmt: skip
        for slot, chunk, start, end, row in pairs(*entries):
            self.used["extracted"] += 1
            inputs = self.conv_input[:, start:end].transpose(1, 2)
            window = torch.cat([live[0][:, row], inputs], dim=2)[:, :, -CONV[1] :]
            for to, from_ in zip(
                saved, self.as_saved(window, self.chunk_states[:, chunk]), strict=True
            ):
                to[:, slot] = from_
        for row, slot in pairs(metadata.boundary_rows, metadata.boundary_slots):
            self.used["at boundaries"] += 1
            for to, from_ in zip(saved, self.as_saved(*(t[:, row] for t in live)), strict=True):
                to[:, slot] = from_
        return live, saved

    def check_step(self):
        """Runs one step of the context with the graph in place of the model."""
        with waiting_raises():
            step = self.context.begin_step()
        for tensor in (self.live[0], self.conv_input):
            random_bits_(tensor)
        for tensor in (self.live[1], self.chunk_states):
            # Arithmetic keeps no payload of a NaN.
            tensor.normal_() if self.int8 else random_bits_(tensor)
        live, saved = self.expected(step.metadata)
        with waiting_raises():
            self.graph.replay()
            self.context.count_extractions(self.extractions)
            self.context.commit_step(dict.fromkeys(step.sampling_ids, 1))
        for tensor, want in zip((*self.live, *self.saved), (*live, *saved), strict=True):
            assert_same_bits(tensor, want)


def pairs(*columns):
    """The entries that are not padding."""
    entries = zip(*(column.tolist() for column in columns), strict=True)
    return [entry for entry in entries if PAD_SLOT_ID not in entry]


def test_a_graph_is_not_captured_without_saying_so():
    captured = CapturedStep(int8=False)
    context = captured.context
    context.add_request(Request(request_id="a", prompt_tokens=range(30)))
    metadata = context.begin_step().metadata
    lengths = metadata.num_chunks, metadata.num_prefill_tokens
    given = captured.chunk_states[0, : lengths[0]], captured.conv_input[0, : lengths[1]]
    with torch.cuda.graph(captured.graph):
        captured.conv_input.zero_()  # a graph must not be empty
        with pytest.raises(StepOrderError, match="capture_extractions"):
            context.extract_checkpoint_states(0, *given, metadata)
    context.abort_step()


def test_an_uncounted_replay_publishes_nothing():
    captured = CapturedStep(int8=False)
    captured.capture()
    context = captured.context
    context.add_request(Request(request_id="a", prompt_tokens=range(30)))
    context.begin_step()
    captured.graph.replay()
    with pytest.warns(UnwrittenStateWarning, match=r"layers \[0, 1, 2\]"):
        context.commit_step({"a": 1})
    assert context.stats().saved_states == 0
    assert context.stats().unwritten_states > 0


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
def test_graph_replays_with_other_fewer_and_no_requests(int8):
    captured = CapturedStep(int8=int8)
    captured.capture()
    context = captured.context
    for name, length in (("a", 30), ("b", 41), ("c", 64)):
        context.add_request(Request(request_id=name, prompt_tokens=range(length)))
    captured.check_step()
    for _ in range(12):  # decode only: no restores, and a boundary now and then
        captured.check_step()
    for name in "abc":
        context.finish(name)
    for name, length in (("d", 47), ("e", 80), ("f", 17), ("g", 3)):
        context.add_request(Request(request_id=name, prompt_tokens=range(length)))
    captured.check_step()
    context.finish("d")
    captured.check_step()
    assert all(captured.used.values()), captured.used
