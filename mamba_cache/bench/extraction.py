"""The benchmark of saving a prefill's checkpoints on a GPU: bandwidth, time, memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from mamba_cache.bench.copy import RUNS, flat_copy, gb_per_s, random_, random_pool, spec_of
from mamba_cache.bench.measure import Measurement, device_us, host_us, progress
from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, Request
from mamba_cache.metadata.step import StepMetadata
from mamba_cache.reference import HybridModel, HybridModelConfig
from mamba_cache.states import StatePool, StateSpec, extract_checkpoint_states

__all__ = ["measure_extraction", "measure_model_step", "run_extraction"]

_CHECKPOINTS = 64
_TOKENS = 16384
_SPARE_ROWS = 8
_STEP_RUNS = 7
_BLOCK = 128

# Nemotron-H-8B's layers, fewer of them, and a vocabulary of bytes: the share of a step is that of a
# layer. Attention, which would make the step longer, is left out.
_MODEL = HybridModelConfig(
    layer_pattern="M-M-",
    hidden_size=4096,
    mamba_num_heads=128,
    mamba_head_dim=64,
    ssm_state_size=128,
    num_groups=8,
    ssm_chunk_size=_BLOCK,
    mlp_size=21504,
)


def run_extraction() -> list[Measurement]:
    """Run every measurement, one after the other, on a GPU."""
    results = [
        one for dtype in (torch.float32, torch.bfloat16) for one in measure_extraction(dtype)
    ]
    return results + list(measure_model_step(_MODEL))


def measure_extraction(ssm_dtype: torch.dtype) -> Iterator[Measurement]:
    """Time taking one layer's checkpoints of a prefill step, against a flat copy."""
    name = f"extract {_CHECKPOINTS} checkpoints of {_TOKENS:,} tokens, {ssm_dtype}"
    progress(name)
    spec = spec_of(1, 10240, (128, 64, 128), ssm_dtype)
    layer = _Layer(spec)
    layer.check_bits()
    num_bytes = _CHECKPOINTS * spec.bytes_per_slot
    flat = device_us([partial(flat_copy, layer.slots["ssm"], layer.states, num_bytes)])
    own = device_us([layer.extract])
    detail = f"{own:,.1f} us, {gb_per_s(num_bytes, own)}, flat copy {flat:,.1f} us"
    share = f"{name}: share of the flat copy's GB/s"
    yield Measurement(share, flat / own, "x", 0.9, at_least=True, runs=RUNS, detail=detail)
    yield Measurement(f"{name}: host time of a call", host_us(layer.extract), "us", runs=RUNS)
    yield Measurement(f"{name}: scratch memory", _memory_taken(layer), "bytes", limit=0)


def measure_model_step(config: HybridModelConfig) -> Iterator[Measurement]:
    """Time a step of the reference model in bfloat16, with checkpoints to save and without."""
    name = f"a step of {_TOKENS:,} tokens that extracts {_CHECKPOINTS} checkpoints"
    progress(name)
    model = HybridModel(config, dtype=torch.bfloat16, device="cuda")
    context = _context(model)
    # Every other block's end, so that all checkpoints lie inside the chunk.
    positions = range(_BLOCK, _TOKENS, 2 * _BLOCK)
    prompt = torch.randint(256, (_TOKENS,)).tolist()
    context.add_request(
        Request(request_id=name, prompt_tokens=prompt, checkpoint_positions=positions)
    )
    metadata = context.begin_step().metadata
    assert int((metadata.checkpoint_slots >= 0).sum()) == _CHECKPOINTS
    saving, other = (
        device_us([partial(model.forward, metadata, caches)], runs=_STEP_RUNS)
        for caches in (context, _WithoutExtraction(context))
    )
    detail = f"{saving / 1e3:,.1f} ms, without {other / 1e3:,.1f} ms; layers {config.layer_pattern}"
    over = f"{name}: time over one that does not"
    yield Measurement(over, saving / other, "x", limit=1.02, runs=_STEP_RUNS, detail=detail)


class _WithoutExtraction:
    """Caches of a context that save no checkpoints."""

    def __init__(self, context: DynamicInferenceContext) -> None:
        self.kv_cache = context.kv_cache
        self.live_states = context.live_states

    def extract_checkpoint_states(
        self,
        layer: int,
        chunk_states: torch.Tensor,
        conv_input: torch.Tensor,
        metadata: StepMetadata,
    ) -> None:
        """Save nothing."""


class _Layer:
    """One layer's part of a prefill step, with random states and inputs."""

    def __init__(self, spec: StateSpec) -> None:
        pool: StatePool = random_pool(spec, _CHECKPOINTS + _SPARE_ROWS)
        self.slots = {name: tensor[0] for name, tensor in pool.tensors.items()}
        self.live = torch.empty_like(self.slots["conv"][:1])
        self.states = random_(torch.empty_like(self.slots["ssm"]))
        conv_dim = self.slots["conv"].shape[1]
        self.inputs = random_(torch.empty(_TOKENS, conv_dim, dtype=self.live.dtype, device="cuda"))
        self.order = torch.randperm(_CHECKPOINTS).int().cuda()
        self.entries = torch.arange(_CHECKPOINTS, dtype=torch.int32, device="cuda")
        self.ends = (self.entries + 1) * (_TOKENS // _CHECKPOINTS)
        self.zeros = torch.zeros_like(self.entries)

    def extract(self) -> None:
        extract_checkpoint_states(
            self.slots["conv"],
            self.slots["ssm"],
            self.live,
            self.states,
            self.inputs,
            checkpoint_chunks=self.entries,
            checkpoint_conv_ends=self.ends,
            checkpoint_seq_starts=self.zeros,
            checkpoint_rows=self.zeros,
            checkpoint_slots=self.order,
        )

    def check_bits(self) -> None:
        """Compare one extraction with what a loop would have taken."""
        self.extract()
        width = self.live.shape[2]
        for entry, (slot, end) in enumerate(
            zip(self.order.tolist(), self.ends.tolist(), strict=True)
        ):
            pairs = (
                (self.slots["ssm"][slot], self.states[entry]),
                (self.slots["conv"][slot], self.inputs[end - width : end].T.contiguous()),
            )
            for saved, wanted in pairs:
                assert torch.equal(saved.view(torch.uint8), wanted.view(torch.uint8))


def _memory_taken(layer: _Layer) -> int:
    """Return the bytes of GPU memory that an extraction takes while it runs."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer.extract()
    return torch.cuda.max_memory_allocated() - before


def _context(model: HybridModel) -> DynamicInferenceContext:
    config = CacheConfig(
        block_size_tokens=_BLOCK,
        ssm_chunk_size=_BLOCK,
        max_requests=1,
        max_tokens=_TOKENS,
        max_sequence_length=_TOKENS + _BLOCK,
        num_kv_blocks=_TOKENS // _BLOCK + 2,
        max_slots=_CHECKPOINTS + 2,
        max_checkpoints_per_step=_CHECKPOINTS,
    )
    state_spec, kv_spec = model.config.state_spec(model.dtype), model.config.kv_spec(model.dtype)
    return DynamicInferenceContext(config, state_spec, kv_spec, device="cuda")
