"""Real inference contexts of Megatron Core from its wheels, with or without a CUDA device."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import typing
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

WHEELS = "MEGATRON_WHEELS"
"""Environment variable with the path of a folder with wheels of megatron-core."""

BLOCK = 128
"""Tokens of a KV block, and of an SSM chunk."""

LAYERS = ["M", "*", "M", "M"]
CONV, SSM = (6, 4), (2, 3, 5)
DTYPES = (torch.bfloat16, torch.float32)
STATE_BYTES = LAYERS.count("M") * (24 * 2 + 30 * 4)


def find_wheels() -> dict[str, Path]:
    """Return the wheels by version; empty if the variable is not set or Python is too old."""
    folder = os.environ.get(WHEELS)
    if not folder or sys.version_info < (3, 11):
        return {}
    found = {}
    for path in Path(folder).glob("megatron_core-*.whl"):
        found[path.name.split("-")[1]] = path
    return dict(sorted(found.items()))


@contextmanager
def megatron_core(wheel: Path, folder: Path) -> Iterator[SimpleNamespace]:
    """Import Megatron Core from a wheel instead of any other, and unload it afterwards."""
    unpacked = folder / wheel.name.split("-")[1]
    if not unpacked.exists():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    if not hasattr(typing, "override"):  # Megatron Core needs Python 3.12
        typing.override = lambda method: method
    forget()
    sys.path.insert(0, str(unpacked))
    importlib.invalidate_caches()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about missing training dependencies
            parts = _parts()
        yield parts
    finally:
        sys.path.remove(str(unpacked))
        forget()


def forget() -> None:
    """Unload every module of Megatron."""
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]


def _parts() -> SimpleNamespace:
    """Import the modules of Megatron Core that the tests use."""
    inference = "megatron.core.inference."
    modules = {
        name: importlib.import_module(inference + path)
        for name, path in {
            "config": "config",
            "contexts": "contexts.dynamic_context",
            "slots": "contexts.mamba_slot_allocator",
            "requests": "inference_request",
            "sampling": "sampling_params",
        }.items()
    }
    transformer = importlib.import_module("megatron.core.transformer.transformer_config")
    version = importlib.import_module("megatron.core").__version__
    parts = SimpleNamespace(version=version, transformer=transformer, **modules)
    parts.extraction = importlib.import_module("megatron.core.ssm.ops.intermediate_extraction")
    return parts


class _HostFactories(TorchFunctionMode):
    """Creates tensors for CUDA devices, and pinned tensors, in plain host memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func in (torch.Tensor.to, torch.Tensor.cuda) and any(map(_is_cuda, args[1:])):
            return args[0]
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class _HostStream:
    """A stream or event whose work is done at once."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: True


@contextmanager
def host_for_cuda() -> Iterator[None]:
    """Replace the CUDA functions that Megatron's contexts call by host functions."""
    answers: dict[str, Any] = {
        "current_device": lambda: "cpu",
        "current_stream": _HostStream,
        "default_stream": _HostStream,
        "stream": lambda _stream: nullcontext(),
        "synchronize": lambda *_: None,
        "Stream": _HostStream,
        "Event": _HostStream,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(_HostFactories())
        yield


class ToyMamba:
    """Layers whose states depend on every token, computed on the host token by token."""

    def __init__(self, generator: torch.Generator) -> None:
        num_layers = LAYERS.count("M")
        self.decay = (torch.rand((num_layers, *SSM), generator=generator) * 0.1 + 0.9).numpy()
        self.weight = (torch.rand((num_layers, *SSM), generator=generator) + 0.5).numpy()
        self.channels = (torch.rand((num_layers, CONV[0]), generator=generator) + 0.5).numpy()
        self._known: dict[tuple[int, ...], bytes] = {}

    def ssm(self, state: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Return the SSM state, [layers, *SSM], after further tokens."""
        values = state.cpu().numpy()
        for token in tokens:
            values = values * self.decay + self.weight * np.float32(token)
        return torch.from_numpy(values)

    def conv(self, state: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Return the conv state, [layers, *CONV], after further tokens."""
        new = [self.channels * np.float32(token) for token in tokens[-CONV[1] :]]
        window = torch.from_numpy(np.stack(new, axis=-1)).to(state.dtype)
        return torch.cat([state.cpu(), window], dim=-1)[..., -CONV[1] :]

    def after(self, tokens: Sequence[int]) -> bytes:
        """Return the digest of the state after a prompt without a cache."""
        key = tuple(tokens)
        if key not in self._known:
            ssm = torch.from_numpy(np.zeros_like(self.decay))
            conv = torch.zeros((len(self.decay), *CONV), dtype=DTYPES[0])
            self._known[key] = bits(self.conv(conv, tokens), self.ssm(ssm, tokens))
        return self._known[key]


def bits(conv: torch.Tensor, ssm: torch.Tensor) -> bytes:
    """Return a digest of a state's bits, conv [layers, *CONV] and SSM [layers, *SSM]."""
    digest = hashlib.sha256()
    for part in (conv, ssm):
        digest.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()


class Server:
    """Drives a real context through the steps of Megatron's engine, with a toy model."""

    def __init__(
        self,
        parts: SimpleNamespace,
        generator: torch.Generator,
        *,
        num_blocks: int = 24,
        num_slots: int = 8,
        max_requests: int = 4,
        chunked: bool = False,
    ) -> None:
        self.parts = parts
        self.model = ToyMamba(generator)
        self.context = make_context(
            parts, num_blocks, num_slots, max_requests=max_requests, chunked=chunked
        )
        self.slots = self.context.mamba_slot_allocator
        self.prefix_of_hash: dict[int, list[int]] = {}
        self.running: list[SimpleNamespace] = []
        self._num_requests = 0

    def request(self, tokens: Sequence[int]) -> Any:
        """Create a request of Megatron, as its engine does."""
        self._num_requests += 1
        request = self.parts.requests.DynamicInferenceRequest(
            request_id=self._num_requests,
            prompt_tokens=torch.tensor(tokens, dtype=torch.int64, device=self._token_device),
            sampling_params=self.parts.sampling.SamplingParams(
                num_tokens_to_generate=8, termination_id=-1
            ),
            block_size_tokens=BLOCK,
            enable_prefix_caching=True,
        )
        for number, hash_id in enumerate(request.precomputed_block_hashes, start=1):
            self.prefix_of_hash[hash_id] = list(tokens[: number * BLOCK])
        return request

    @property
    def _token_device(self) -> str:
        return str(self.context.token_to_input_ids.device)

    def add(self, tokens: Sequence[int], *, chunk: int | None = None) -> int:
        """Add a request or its first chunk; return the number of skipped tokens."""
        return self._add(SimpleNamespace(request=self.request(tokens), tokens=list(tokens)), chunk)

    def go_on(self, *, chunk: int | None = None) -> int:
        """Add the next chunk of the request added last."""
        return self._add(self.running.pop(), chunk)

    def _add(self, one: SimpleNamespace, chunk: int | None) -> int:
        request, context, row = one.request, self.context, self.context.total_request_count
        assert request.finished_chunk_token_count or all(context.check_availability(request))
        length = request.remaining_prompt_length if chunk is None else chunk
        context.chunked_prefill_request_id = -1
        context.add_request(request, prefill_chunk_length=length)
        if chunk is not None:
            context.chunked_prefill_request_id = request.request_id
        skipped = int(context.request_kv_length_offsets[row]) - request.finished_chunk_token_count
        request.remaining_prompt_tokens = request.remaining_prompt_tokens[length:]
        request.finished_chunk_token_count += length
        one.computed = one.tokens[: request.finished_chunk_token_count]
        self.running.append(one)
        return skipped

    def forward_begins(self) -> None:
        """Prepare the context for the model's forward, which restores live states."""
        self.context.prefix_cache_lru_clock += 1
        self.context.initialize_attention_state()

    def forward_goes_on(self) -> None:
        """Run the model."""
        context = self.context
        tokens = context.current_input_and_position_ids()[0][0].tolist()
        num_decodes = context.batch_dimensions.decode_req_count
        self._decode(tokens[:num_decodes])
        if context.batch_dimensions.prefill_req_count:
            self._prefill(tokens[num_decodes:])

    def step(self) -> None:
        """Run a whole step, and check live and saved states after it."""
        self.forward_begins()
        self.forward_goes_on()
        self.check_live_states()
        self.slots.commit_intermediate_states()  # as the text generation controller does
        self.check_saved_states()

    def serve(self, tokens: Sequence[int]) -> None:
        """Serve a request that ends with its first token."""
        self.add(tokens)
        self.step()
        self.finish(0)

    def finish(self, *which: int) -> None:
        """Sample a token for each request, and end the requests at these places in the batch."""
        going = [0 if place in which else 1 for place in range(len(self.running))]
        sampled = [100 + place for place in range(len(self.running))]
        device = self._token_device
        self.context.update_requests(
            torch.tensor(going, dtype=torch.int32, device=device),
            torch.tensor(sampled, dtype=torch.int64, device=device),
        )
        for one, token in zip(self.running, sampled, strict=True):
            if not one.request.remaining_prompt_length:
                one.computed = [*one.computed, token]
        left = {one.request.request_id: one for one in self.running}
        ids = self.context.request_ids[: self.context.total_request_count].tolist()
        self.running = [left[request_id] for request_id in ids if request_id >= 0]
        if self.context.chunked_prefill_request_id >= 0:
            chunked = left[self.context.chunked_prefill_request_id]
            if chunked not in self.running:  # it has no row until the next chunk
                self.running.append(chunked)

    def _decode(self, tokens: Sequence[int]) -> None:
        table = self.context.mamba_metadata.request_to_mamba_state_idx
        for place, token in enumerate(tokens):
            row = int(table[self.context.paused_request_count + place])
            self._advance(row, [token])

    def _advance(self, row: int, tokens: Sequence[int]) -> torch.Tensor:
        """Advance a live state by tokens; return its SSM states."""
        conv, ssm = self.context.mamba_conv_states, self.context.mamba_ssm_states
        if tokens:
            conv[:, row] = self.model.conv(conv[:, row], tokens).to(conv.device)
            ssm[:, row] = self.model.ssm(ssm[:, row], tokens).to(ssm.device)
        return ssm[:, row].clone()

    def _prefill(self, tokens: Sequence[int]) -> None:
        """Compute the metadata's chunks one by one, and hand over states like the mixer."""
        context, meta = self.context, self.context.mamba_metadata
        bounds, of_chunk = meta.cu_chunk_seqlens.tolist(), meta.seq_idx_for_varlen.tolist()
        rows = meta.batch_indices_prefill.tolist()
        num_prefills = context.batch_dimensions.prefill_req_count
        raw = []
        for chunk, sequence in enumerate(of_chunk):
            is_real = sequence < num_prefills
            part = tokens[bounds[chunk] : bounds[chunk + 1]] if is_real else []
            raw.append(self._advance(max(rows[sequence], 0), part))
        self._hand_over(torch.stack(raw, dim=1), tokens)

    def _hand_over(self, raw: torch.Tensor, tokens: Sequence[int]) -> None:
        """Write states to the scratch, layer by layer, like ``mamba_mixer``."""
        meta = self.context.mamba_metadata
        count = len(meta.intermediate_chunk_indices)
        if hasattr(meta, "intermediate_real_count"):  # 0.19 writes no padding
            count = int(meta.intermediate_real_count)
        chunks = meta.intermediate_chunk_indices[:count].to(raw.device)
        ends = meta.intermediate_abs_positions[:count].tolist()
        if not count:
            return
        empty = torch.zeros((len(self.model.channels), *CONV), dtype=DTYPES[0])
        windows = [self.model.conv(empty, tokens[: max(end, CONV[1])]) for end in ends]
        conv = torch.stack(windows, dim=1).to(raw.device)
        for layer in range(LAYERS.count("M")):
            ssm_out = self.slots.intermediate_ssm_out[layer]
            ssm_out[:count].copy_(raw[layer][chunks])
            self.slots.intermediate_conv_out[layer][:count].copy_(conv[layer])

    def live_state(self, place: int) -> bytes:
        """Return the digest of the live state of the request at a place in the batch."""
        table = self.context.mamba_metadata.request_to_mamba_state_idx
        row = int(table[self.context.paused_request_count + place])
        return bits(self.context.mamba_conv_states[:, row], self.context.mamba_ssm_states[:, row])

    def check_live_states(self) -> None:
        """Compare live states with states of the same tokens without a cache."""
        for place, one in enumerate(self.running):
            assert self.live_state(place) == self.model.after(one.computed), f"request {place}"

    def check_saved_states(self) -> None:
        """Compare every findable state with the state of its hash's prefix."""
        for hash_id, block in self.slots.hash_to_block_id.items():
            slot = self.slots.get_slot(block)
            saved = bits(self.slots.conv_states[:, slot], self.slots.ssm_states[:, slot])
            prefix = self.prefix_of_hash[hash_id]
            assert saved == self.model.after(prefix), f"state after {len(prefix)} tokens"
        if hasattr(self.slots, "check_invariants"):
            self.slots.check_invariants()


@dataclass
class Steps:
    """Results of steps: skipped tokens by request, and findable states after each step."""

    skipped: list[int] = field(default_factory=list)
    found: list[set[int]] = field(default_factory=list)


def megatron_steps(server: Server, prompts: Sequence[int]) -> Steps:
    """Serve six requests: prefills, decodes, hits inside and at the end of prompts, releases."""
    steps = Steps()
    system, short = list(prompts[: 3 * BLOCK]), list(prompts[3 * BLOCK : 5 * BLOCK])
    rest = list(prompts[5 * BLOCK :])

    def step(*added: Sequence[int]) -> None:
        steps.skipped += [server.add(tokens) for tokens in added]
        server.step()
        steps.found.append(set(server.slots.hash_to_block_id))

    step(system + rest[:40], short)
    server.finish()
    step()  # both requests decode
    server.finish(0, 1)
    step(system + rest[: 2 * BLOCK + 17], short + rest[:50], short, rest[-BLOCK:])
    server.finish(0)
    step()
    server.finish(0, 1, 2)
    return steps


def random_tokens(generator: torch.Generator, count: int) -> list[int]:
    """Draw tokens from a range so large that prompts share none by chance."""
    return torch.randint(1, 2**20, (count,), generator=generator).tolist()


def make_context(
    parts: SimpleNamespace,
    num_blocks: int,
    num_slots: int,
    *,
    max_requests: int = 4,
    chunked: bool = False,
) -> Any:
    """Create a real context with these numbers of KV blocks and slots."""
    model = parts.transformer.TransformerConfig(
        num_layers=len(LAYERS), hidden_size=16, num_attention_heads=2, params_dtype=torch.float32
    )
    kv_block_bytes = 2 * LAYERS.count("*") * BLOCK * model.hidden_size * 4
    scratch = min(16, 3 * max_requests)  # also part of the budget
    gib = 2**30
    config = parts.config.InferenceConfig(
        block_size_tokens=BLOCK,
        buffer_size_gb=(num_blocks * (kv_block_bytes + STATE_BYTES) + 1) / gib,
        max_requests=max_requests,
        max_tokens=16 * BLOCK,
        max_sequence_length=16 * BLOCK,
        mamba_inference_state_config=parts.config.MambaInferenceStateConfig(
            LAYERS, CONV, SSM, *DTYPES, mamba_chunk_size=BLOCK
        ),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=True,
        prefix_caching_eviction_policy=parts.config.PrefixCachingEvictionPolicy.LRU,
        prefix_caching_mamba_gb=((num_slots + scratch) * STATE_BYTES + 1) / gib,
    )
    context = parts.contexts.DynamicInferenceContext(model, config)
    assert context.kv_block_allocator.total_count == num_blocks
    assert context.mamba_slot_allocator.max_slots == num_slots
    return context
