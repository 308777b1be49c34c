"""Real kernels under ``DynamicInferenceContext``: a packed scan, a decode step, paged attention.

The layers below are the reference model's, with the kernels of engines instead of its PyTorch
functions: a packed SSD scan with the signature of Megatron Core or vLLM, whose inputs come from
``StepMetadata`` and whose raw chunk states go to ``extract_checkpoint_states``; a decode step that
updates live states in place by this package's rows; attention over block tables. Each kernel is
optional: a missing kernel, or one without a GPU, is replaced by the reference function. At the end
the example compares answers with the cache and without.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from mamba_cache import CacheConfig, DynamicInferenceContext, Request, RequestStatus
from mamba_cache.reference import HybridModel, HybridModelConfig
from mamba_cache.reference.attention import AttentionLayer, attend
from mamba_cache.reference.batch import PackedBatch, place_taps
from mamba_cache.reference.mamba import Mamba2Layer, causal_conv1d
from mamba_cache.reference.model_config import rms_norm
from mamba_cache.reference.ssd import ChunkLayout, SSDInputs, ssd_chunk_scan

REFERENCE = "reference (PyTorch)"
LIMITS = {torch.float32: 2e-3, torch.bfloat16: 5e-2}
"""Maximum difference to the reference functions' states, relative to the largest magnitude."""


@dataclass(frozen=True)
class ScanInputs:
    """Inputs of a scan and of a decode step for packed tokens, besides the states.

    Attributes:
        x: [num_tokens, heads, head_dim].
        dt: [num_tokens, heads], before the bias and softplus.
        b: [num_tokens, groups, state_size].
        c: [num_tokens, groups, state_size].
        a: [heads], negative.
        d: [heads].
        dt_bias: [heads].
    """

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    a: Tensor
    d: Tensor
    dt_bias: Tensor


@dataclass(frozen=True)
class Kernels:
    """The functions that the layers call.

    Attributes:
        scan: (inputs, initial_states [prefills, heads, head_dim, state_size], batch) -> outputs,
            and the states at the ends of all chunks.
        update: (ssm_states, inputs, rows) -> outputs; updates these live-state rows.
        conv: (inputs, weight, bias, windows, batch) -> outputs after SiLU.
        conv_update: (inputs, conv_states, weight, bias, rows) -> outputs after SiLU; updates rows.
        attention: (queries, one layer's kv_cache, batch) -> outputs.
        sources: The origin of each function.
    """

    scan: Callable[[ScanInputs, Tensor, PackedBatch], tuple[Tensor, Tensor]]
    update: Callable[[Tensor, ScanInputs, Tensor], Tensor]
    conv: Callable[[Tensor, Tensor, Tensor, Tensor, PackedBatch], Tensor]
    conv_update: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, PackedBatch], Tensor]
    sources: dict[str, str]


# The reference functions, used where a kernel is missing.


def reference_scan(
    inputs: ScanInputs, initial_states: Tensor, batch: PackedBatch
) -> tuple[Tensor, Tensor]:
    """Scan in PyTorch."""
    y, chunk_states = ssd_chunk_scan(_ssd_inputs(inputs), initial_states, batch.prefills)
    return y + inputs.d[:, None] * inputs.x, chunk_states


def reference_update(states: Tensor, inputs: ScanInputs, rows: Tensor) -> Tensor:
    """Decode in PyTorch."""
    tokens = torch.arange(len(rows) + 1, device=rows.device)
    each_alone = ChunkLayout.build(tokens, tokens[:-1], tokens[:-1], 1, len(rows))
    y, after = ssd_chunk_scan(_ssd_inputs(inputs), states[rows.long()], each_alone)
    states[rows.long()] = after
    return y + inputs.d[:, None] * inputs.x


def reference_conv(
    inputs: Tensor, weight: Tensor, bias: Tensor, windows: Tensor, batch: PackedBatch
) -> Tensor:
    """Convolve packed prompts in PyTorch."""
    starts = _prefill_starts(batch)
    places = place_taps(starts, len(inputs), weight.shape[1]), starts[1:] - 1
    return F.silu(causal_conv1d(inputs, weight, bias, windows, places)[0])


def reference_conv_update(
    inputs: Tensor, states: Tensor, weight: Tensor, bias: Tensor, rows: Tensor
) -> Tensor:
    """Convolve one token of each request in PyTorch."""
    tokens = torch.arange(len(rows) + 1, device=rows.device)
    places = place_taps(tokens, len(rows), weight.shape[1]), tokens[:-1]
    mixed, states[rows.long()] = causal_conv1d(inputs, weight, bias, states[rows.long()], places)
    return F.silu(mixed)


def sdpa_attention(queries: Tensor, kv_cache: Tensor, batch: PackedBatch) -> Tensor:
    """Attend with PyTorch's scaled_dot_product_attention, over keys gathered by block tables."""
    metadata, n = batch.metadata, batch.metadata.num_decodes
    tables = _tables(kv_cache, batch).long()
    positions, outputs = metadata.positions[: metadata.num_tokens], []
    if n:
        outputs.append(attend(queries[:n, None], kv_cache, tables[:n], positions[:n, None])[:, 0])
    if metadata.num_prefills:  # chunk by chunk: a tile of queries of one request
        tiles = batch.prefills.split(queries[metadata.num_decode_tokens :])
        at = batch.prefills.split(positions[metadata.num_decode_tokens :])
        blocks = tables[n:][batch.prefills.sequences]
        pieces = [slice(i, i + 1) for i in range(len(tiles))]
        attended = [attend(tiles[i], kv_cache, blocks[i], at[i]) for i in pieces]
        outputs.append(batch.prefills.join(torch.cat(attended)))
    return torch.cat(outputs)


def _ssd_inputs(inputs: ScanInputs) -> SSDInputs:
    dt = F.softplus(inputs.dt + inputs.dt_bias)
    x, b, c = (each.to(dt.dtype) for each in (inputs.x, inputs.b, inputs.c))
    return SSDInputs(x=x, dt=dt, a=inputs.a, b=b, c=c)


def _prefill_starts(batch: PackedBatch) -> Tensor:
    metadata = batch.metadata
    starts = metadata.query_start_loc[metadata.num_decodes : metadata.num_requests + 1].long()
    return starts - metadata.num_decode_tokens


def _tables(kv_cache: Tensor, batch: PackedBatch) -> Tensor:
    metadata = batch.metadata
    num_blocks = -(-metadata.max_seq_len // kv_cache.shape[2])
    return metadata.block_tables[: metadata.num_requests, :num_blocks]


# Adapters of other packages' kernels to the signatures above.


def packed_scan(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Adapt ``mamba_chunk_scan_combined_varlen`` of Megatron Core or vLLM."""
    names = inspect.signature(function).parameters
    # Megatron Core from 0.19 on returns (final, raw); earlier versions and vLLM return raw only.
    is_pair = "return_raw_states" in names
    all_states = "return_raw_states" if is_pair else "return_intermediate_states"

    def scan(
        inputs: ScanInputs, initial_states: Tensor, batch: PackedBatch
    ) -> tuple[Tensor, Tensor]:
        metadata, y = batch.metadata, torch.empty_like(inputs.x)
        prefills, chunks = metadata.num_prefills, metadata.num_chunks
        options: dict[str, Any] = {all_states: True}
        if "cu_seqlens" in names:  # vLLM: counted from the prefill part's first token
            starts = metadata.query_start_loc[metadata.num_decodes : metadata.num_requests + 1]
            options["cu_seqlens"] = starts - metadata.num_decode_tokens
        states = function(
            inputs.x,
            inputs.dt,
            inputs.a,
            inputs.b,
            inputs.c,
            chunk_size=metadata.chunk_size,
            cu_chunk_seqlens=metadata.cu_chunk_seqlens[: chunks + 1],
            last_chunk_indices=metadata.last_chunk_indices[:prefills],
            seq_idx=metadata.chunk_seq_idx[:chunks],
            out=y,
            D=inputs.d,
            dt_bias=inputs.dt_bias,
            initial_states=initial_states,
            dt_softplus=True,
            state_dtype=initial_states.dtype,
            **options,
        )
        return y, states[1] if is_pair else states

    return scan


def state_update(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Adapt ``selective_state_update`` of mamba_ssm, Megatron Core or vLLM."""
    names = inspect.signature(function).parameters
    # Padding rows are -1, which mamba_ssm and Megatron skip; vLLM's default padding is row 0.
    fixed = {"null_block_id": -1} if "null_block_id" in names else {}

    def update(states: Tensor, inputs: ScanInputs, rows: Tensor) -> Tensor:
        heads, width, size = states.shape[1:]
        y = torch.empty_like(inputs.x)
        found = function(
            states,
            inputs.x,
            inputs.dt[:, :, None].expand(-1, -1, width),
            inputs.a[:, None, None].expand(heads, width, size),
            inputs.b,
            inputs.c,
            D=inputs.d[:, None].expand(heads, width),
            dt_bias=inputs.dt_bias[:, None].expand(heads, width),
            dt_softplus=True,
            state_batch_indices=rows,
            **(fixed | ({"out": y} if "out" in names else {})),
        )
        return y if found is None else found

    return update


def packed_conv(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt ``causal_conv1d_varlen_fn`` of Megatron Core."""

    def conv(
        inputs: Tensor, weight: Tensor, bias: Tensor, windows: Tensor, batch: PackedBatch
    ) -> Tensor:
        metadata = batch.metadata
        starts = metadata.query_start_loc[metadata.num_decodes : metadata.num_requests + 1]
        starts = starts - metadata.num_decode_tokens
        return function(inputs, weight, bias, starts, windows.contiguous())

    return conv


def conv_update(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt ``causal_conv1d_update`` of causal_conv1d."""

    def update(
        inputs: Tensor, states: Tensor, weight: Tensor, bias: Tensor, rows: Tensor
    ) -> Tensor:
        return function(inputs, states, weight, bias, "silu", conv_state_indices=rows)

    return update


def flash_attention(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt ``flash_attn_varlen_func``: blocks of 256 tokens, in half precision."""

    def attention(queries: Tensor, kv_cache: Tensor, batch: PackedBatch) -> Tensor:
        metadata, n = batch.metadata, batch.metadata.num_requests
        return function(
            queries,
            kv_cache[0],
            kv_cache[1],
            cu_seqlens_q=metadata.query_start_loc[: n + 1],
            cu_seqlens_k=F.pad(metadata.seq_lens[:n].cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=metadata.num_tokens,  # an upper bound known on the host
            max_seqlen_k=metadata.max_seq_len,
            causal=True,  # aligned at the end, like a chunk's tokens
            block_table=_tables(kv_cache, batch),
        )

    return attention


def flex_attention(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Adapt PyTorch's ``flex_attention``, which attends to the whole KV pool."""
    # BlockMask is not typed, and older PyTorch lacks the module.
    block_mask = importlib.import_module("torch.nn.attention.flex_attention").BlockMask
    # ``fullgraph``: uncompiled parts would compute other bits.
    compiled = functools.cache(lambda: torch.compile(function, fullgraph=True))
    last: list[Any] = [None, None]  # all layers of a step share a mask

    def attention(queries: Tensor, kv_cache: Tensor, batch: PackedBatch) -> Tensor:
        if last[0] is not batch:
            last[:] = batch, _paged_mask(block_mask, kv_cache, batch)
        call: Any = compiled() if queries.is_cuda else function
        keys, values = (each.flatten(0, 1).transpose(0, 1)[None] for each in kv_cache)
        padded = F.pad(queries, (0, 0, 0, 0, 0, last[1].seq_lengths[0] - len(queries)))
        # PyTorch's default tiles may need more shared memory than the GPU has.
        tiles = {"BLOCK_M": 64, "BLOCK_N": min(64, kv_cache.shape[2]), "num_stages": 1}
        found = call(
            padded.transpose(0, 1)[None],
            keys,
            values,
            block_mask=last[1],
            enable_gqa=True,
            kernel_options=tiles if queries.is_cuda else None,
        )
        attended: Tensor = found[0].transpose(0, 1)[: len(queries)]
        return attended

    return attention


def _paged_mask(block_mask: Any, kv_cache: Tensor, batch: PackedBatch) -> Any:
    """Return the mask of visible pool blocks for each tile of 128 queries, and of their tokens."""
    metadata, tile = batch.metadata, 128
    # Padded to powers of two: each length may be compiled.
    num_tokens = max(tile, 1 << (metadata.num_tokens - 1).bit_length())
    positions = metadata.positions[: metadata.num_tokens]
    positions = F.pad(positions, (0, num_tokens - metadata.num_tokens), value=-1)
    ends = metadata.query_start_loc[1 : metadata.num_requests + 1].contiguous()
    tokens = torch.arange(num_tokens, device=ends.device, dtype=ends.dtype)
    request = torch.searchsorted(ends, tokens, right=True).clamp(max=metadata.num_requests - 1)
    # [request, pool block] -> index of the block in the request's table, -1: not in the table. A
    # table's entries past its last block are the dummy block.
    tables, (pool, size) = _tables(kv_cache, batch).long(), kv_cache.shape[1:3]
    numbers = torch.arange(tables.shape[1], device=ends.device).expand_as(tables)
    number = torch.full((len(metadata.block_tables), pool), -1, device=ends.device)
    number.scatter_(1, tables, numbers)
    number[:, pool - 1] = -1
    number_of = number[request]
    is_seen = (number_of >= 0) & (number_of * size <= positions[:, None])
    # In sequence order, not pool order, so that sums are always rounded alike.
    unseen = len(tables) * tables.shape[1]
    rank = torch.where(is_seen, request[:, None] * tables.shape[1] + number_of, unseen)
    rank = torch.unflatten(rank, 0, (-1, tile)).amin(dim=1)

    def is_visible(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = number[request[query], key // size] * size + key % size
        return (at >= 0) & (at <= positions[query])

    return block_mask.from_kv_blocks(
        (rank < unseen).sum(dim=1, dtype=torch.int32)[None, None],
        rank.argsort(dim=1, stable=True).int()[None, None],
        BLOCK_SIZE=(tile, size),
        mask_mod=is_visible,
        seq_lengths=(num_tokens, pool * size),
    )


@dataclass(frozen=True)
class Candidate:
    """A kernel that may be installed.

    Attributes:
        package: The package's name for pip.
        module: The kernel's module.
        name: The kernel's name in the module.
        adapt: Adapts the kernel to the signature that the layers call.
    """

    package: str
    module: str
    name: str
    adapt: Callable[[Callable[..., Any]], Callable[..., Any]]


_MEGATRON, _VLLM = "megatron.core.ssm.ops.", "vllm.model_executor.layers.mamba.ops."
_SCAN, _UPDATE = "mamba_chunk_scan_combined_varlen", "selective_state_update"
CANDIDATES = {
    "scan": (
        Candidate("megatron-core", _MEGATRON + "ssd_combined", _SCAN, packed_scan),
        Candidate("vllm", _VLLM + "ssd_combined", _SCAN, packed_scan),
    ),
    "update": (
        Candidate("mamba-ssm", "mamba_ssm.ops.triton." + _UPDATE, _UPDATE, state_update),
        Candidate("megatron-core", _MEGATRON + "mamba_ssm", _UPDATE, state_update),
        Candidate("vllm", _VLLM + "mamba_ssm", _UPDATE, state_update),
    ),
    "conv": (
        Candidate(
            "megatron-core", _MEGATRON + "causal_conv1d_varlen", "causal_conv1d_varlen_fn",
            packed_conv,
        ),
    ),
    "conv_update": (
        Candidate("causal-conv1d", "causal_conv1d", "causal_conv1d_update", conv_update),
    ),
    "attention": (
        Candidate("flash-attn", "flash_attn", "flash_attn_varlen_func", flash_attention),
        Candidate("torch", "torch.nn.attention.flex_attention", "flex_attention", flex_attention),
    ),
}  # fmt: skip
REFERENCES = {
    "scan": reference_scan,
    "update": reference_update,
    "conv": reference_conv,
    "conv_update": reference_conv_update,
    "attention": sdpa_attention,
}
INSTALL = {
    "megatron-core": "pip install --no-deps megatron-core  # Python 3.12 or newer",
    "vllm": "pip install vllm",
    "mamba-ssm": "pip install mamba-ssm --no-build-isolation",
    "causal-conv1d": "pip install causal-conv1d --no-build-isolation",
    "flash-attn": "pip install flash-attn --no-build-isolation",
}


def find_kernels(*, can_run: bool, skip: Sequence[str] = ()) -> Kernels:
    """Return the first installed kernel of each part, or else its reference function.

    Args:
        can_run: Whether there is a GPU or Triton's interpreter; if not, nothing is imported.
        skip: Packages to skip.
    """
    parts: dict[str, Any] = {}
    sources = {}
    for part, candidates in CANDIDATES.items():
        parts[part], reasons = REFERENCES[part], []
        sources[part] = REFERENCE
        for candidate in candidates:
            if candidate.package in skip:
                continue
            function, text = _load(candidate, can_run=can_run)
            if function is not None:
                parts[part], sources[part] = candidate.adapt(function), text
                break
            reasons.append(text)
        if sources[part] == REFERENCE and reasons:
            sources[part] += "; " + "; ".join(reasons)
    return Kernels(**parts, sources=sources)


def _load(candidate: Candidate, *, can_run: bool) -> tuple[Callable[..., Any] | None, str]:
    """Return a kernel and its version, or None and the reason."""
    package, top = candidate.package, candidate.module.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        return None, f"no {package}"
    if not can_run:
        return None, f"{package} needs a GPU"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about missing training dependencies
            module = importlib.import_module(candidate.module)
        function = getattr(module, candidate.name)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return None, f"{package} cannot be imported here ({type(error).__name__}: {error})"
    version = getattr(importlib.import_module(top), "__version__", "")
    with suppress(importlib.metadata.PackageNotFoundError):  # unpacked, not installed
        version = importlib.metadata.version(package)
    return function, f"{package} {version}".strip() + f": {candidate.name}"


# The layers that replace those of the reference model.


class KernelMamba:
    """A Mamba-2 layer over kernels.

    Args:
        weights: The layer whose weights are used.
        kernels: The kernels to call.
    """

    def __init__(self, weights: Mamba2Layer, kernels: Kernels) -> None:
        self.weights, self.kernels, self.layer = weights, kernels, weights.layer

    def __call__(
        self, hidden: Tensor, batch: PackedBatch, context: DynamicInferenceContext
    ) -> Tensor:
        """Advance live states over packed tokens: decoding requests first, then prompts."""
        weights, config, metadata = self.weights, self.weights.config, batch.metadata
        gate, conv_input, dt = torch.split(
            F.linear(hidden, weights.in_proj),
            [config.mamba_inner_size, config.conv_dim, config.mamba_num_heads],
            dim=1,
        )
        conv_input, n = conv_input.contiguous(), metadata.num_decode_tokens
        outputs = []
        if metadata.num_decodes:
            outputs.append(self.decode(conv_input[:n], dt[:n], batch, context))
        if metadata.num_prefills:
            outputs.append(self.prefill(conv_input[n:], dt[n:], batch, context))
        gated = torch.cat(outputs).flatten(1) * F.silu(gate)
        grouped = torch.unflatten(gated, 1, (config.num_groups, -1))
        weight = weights.norm_weight.view(config.num_groups, -1)
        return F.linear(rms_norm(grouped, weight).flatten(1), weights.out_proj)

    def decode(
        self, conv_input: Tensor, dt: Tensor, batch: PackedBatch, context: DynamicInferenceContext
    ) -> Tensor:
        """Compute a token of each decoding request; update its live state in place."""
        weights, rows = self.weights, batch.metadata.state_rows[: batch.metadata.num_decodes]
        conv_live, ssm_live = self.live(context)
        mixed = self.kernels.conv_update(
            conv_input, conv_live, weights.conv_weight, weights.conv_bias, rows
        )
        return self.kernels.update(ssm_live, self.scan_inputs(mixed, dt), rows)

    def prefill(
        self, conv_input: Tensor, dt: Tensor, batch: PackedBatch, context: DynamicInferenceContext
    ) -> Tensor:
        """Compute prompt chunks from their live states, and hand over the chunk states."""
        weights, metadata = self.weights, batch.metadata
        conv_live, ssm_live = self.live(context)
        rows = batch.state_rows[metadata.num_decodes :]
        windows = conv_live[rows]
        mixed = self.kernels.conv(
            conv_input, weights.conv_weight, weights.conv_bias, windows, batch
        )
        inputs = self.scan_inputs(mixed, dt)
        y, chunk_states = self.kernels.scan(inputs, ssm_live[rows], batch)
        # Before the live state is overwritten: conv windows of checkpoints may need it.
        context.extract_checkpoint_states(self.layer, chunk_states, conv_input, metadata)
        before = torch.cat([windows.transpose(1, 2).flatten(0, 1), conv_input])
        starts, width = _prefill_starts(batch), windows.shape[2]
        taps = place_taps(starts, len(conv_input), 1 + width)
        conv_live[rows] = before[taps[1:, starts[1:] - 1].T].transpose(1, 2)
        ssm_live[rows] = chunk_states[batch.prefills.kept]
        return y

    def live(self, context: DynamicInferenceContext) -> tuple[Tensor, Tensor]:
        """Return this layer's live states."""
        return context.live_states["conv"][self.layer], context.live_states["ssm"][self.layer]

    def scan_inputs(self, mixed: Tensor, dt: Tensor) -> ScanInputs:
        """Split the convolution's output into x by head, and B and C by group."""
        weights, config = self.weights, self.weights.config
        shared = config.num_groups * config.ssm_state_size
        x, b, c = torch.split(mixed, [config.mamba_inner_size, shared, shared], dim=1)
        by_group = (config.num_groups, config.ssm_state_size)
        return ScanInputs(
            x=torch.unflatten(x, 1, (config.mamba_num_heads, config.mamba_head_dim)),
            dt=dt,
            b=torch.unflatten(b, 1, by_group),
            c=torch.unflatten(c, 1, by_group),
            a=weights.a,
            d=weights.d,
            dt_bias=weights.dt_bias,
        )


class KernelAttention:
    """An attention layer over a kernel that reads block tables.

    Args:
        weights: The layer whose weights are used.
        kernels: The kernels to call.
    """

    def __init__(self, weights: AttentionLayer, kernels: Kernels) -> None:
        self.weights, self.kernels = weights, kernels

    def __call__(
        self, hidden: Tensor, batch: PackedBatch, context: DynamicInferenceContext
    ) -> Tensor:
        """Write this step's keys and values, then attend from every packed token."""
        weights, config, metadata = self.weights, self.weights.config, batch.metadata
        heads, kv_heads = config.num_attention_heads, config.num_kv_heads
        projected = F.linear(hidden, weights.qkv_proj)
        projected = torch.unflatten(projected, 1, (heads + 2 * kv_heads, -1))
        queries, keys, values = torch.split(projected, [heads, kv_heads, kv_heads], dim=1)
        assert context.kv_cache is not None  # this model has attention layers
        kv_cache = context.kv_cache[weights.layer]
        places = metadata.kv_slot_mapping[: metadata.num_tokens]  # -1: the dummy block
        kv_cache.flatten(1, 2)[:, places] = torch.stack([keys, values])
        attended = self.kernels.attention(queries.contiguous(), kv_cache, batch)
        return F.linear(attended.flatten(1), weights.out_proj)


def with_kernels(model: HybridModel, kernels: Kernels) -> HybridModel:
    """Replace the layers of a model by layers with kernels; return the model."""
    layers: list[Any] = []
    for layer in model.layers:
        if isinstance(layer, Mamba2Layer):
            layers.append(KernelMamba(layer, kernels))
        elif isinstance(layer, AttentionLayer):
            layers.append(KernelAttention(layer, kernels))
        else:
            layers.append(layer)
    model.layers = layers
    return model


# Runs with the cache and without, and their comparison.


@dataclass(frozen=True)
class Sizes:
    """Sizes of the comparison.

    Attributes:
        model: The model's shape.
        dtype: Dtype of the weights.
        block: Tokens of a KV block, and of a chunk of the scan.
        text: Tokens that all prompts share at the start; two or more whole blocks.
        own: Tokens of each prompt after the shared ones.
        new: Tokens of each answer.
        questions: Number of prompts.
    """

    model: HybridModelConfig
    dtype: torch.dtype
    block: int
    text: int
    own: int = 40
    new: int = 8
    questions: int = 4


@dataclass(frozen=True)
class Run:
    """The result of one prompt.

    Attributes:
        tokens: The answer.
        skipped: Prompt tokens that were skipped.
        restored: SSM states of all layers before the first step's forward.
        state: Conv and SSM states of all layers at the prompt's end.
    """

    tokens: list[int]
    skipped: int
    restored: Tensor
    state: tuple[Tensor, Tensor]


def make_context(model: HybridModel, sizes: Sizes, *, is_cached: bool) -> DynamicInferenceContext:
    """Create the context for a comparison."""
    longest = sizes.text + sizes.own + sizes.new + sizes.block
    config = CacheConfig(
        block_size_tokens=sizes.block,
        ssm_chunk_size=sizes.block,
        max_requests=sizes.questions + 1,
        max_tokens=(sizes.questions + 1) * longest,
        max_sequence_length=longest,
        num_kv_blocks=(2 * sizes.questions + 4) * (-(-longest // sizes.block)),
        max_slots=4 * sizes.questions + 8,
        enable_prefix_caching=is_cached,
    )
    state_spec, kv_spec = model.config.state_spec(model.dtype), model.config.kv_spec(model.dtype)
    return DynamicInferenceContext(config, state_spec, kv_spec, device=model.device)


def answer(
    context: DynamicInferenceContext,
    model: HybridModel,
    prompt: Sequence[int],
    *,
    new: int,
    cut: int | None = None,
) -> Run:
    """Answer one prompt.

    Args:
        context: The context, without other requests.
        model: The model.
        prompt: The prompt's tokens.
        new: Number of tokens of the answer.
        cut: Number of prompt tokens in the first step; the rest is computed in a second step.
    """
    request = Request(request_id="one", prompt_tokens=prompt)
    admission = context.add_request(request, chunk_tokens=cut)
    restored: list[Tensor] = []
    state: tuple[Tensor, ...] = ()
    tokens: list[int] = []
    while len(tokens) < new:
        if context.status("one") is RequestStatus.PREFILLING:
            context.schedule_prefill("one")
        step = context.begin_step()
        rows = step.metadata.state_rows[:1].long()
        live = [context.live_states[name] for name in ("conv", "ssm")]
        restored = restored or [live[1][:, rows]]
        logits = model.forward(step.metadata, context)
        if not tokens:
            state = tuple(tensor[:, rows] for tensor in live)
        sampled: dict[Hashable, int] = {}
        if step.requests[0].samples:
            sampled["one"] = int(logits[-1].argmax())
        context.commit_step(sampled)
        tokens += sampled.values()
    context.finish("one")
    return Run(tokens, admission.skip_tokens, restored[0], (state[0], state[1]))


def answer_all(
    context: DynamicInferenceContext, model: HybridModel, prompts: Sequence[Sequence[int]], new: int
) -> tuple[list[list[int]], float]:
    """Answer prompts together; return their answers and the time in seconds."""
    _wait(model.device)
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        context.add_request(Request(request_id=number, prompt_tokens=prompt))
    for _ in range(new):
        step = context.begin_step()
        sampled = model.forward(step.metadata, context).argmax(dim=1).tolist()
        names = [part.request_id for part in step.requests]
        context.commit_step(dict(zip(names, sampled, strict=True)))
    answers = [context.finish(number)[-new:] for number in range(len(prompts))]
    _wait(model.device)
    return answers, time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Comparison:
    """Comparison of hits and misses. Differences are relative to the largest magnitude.

    Attributes:
        off_reference: Largest difference of a state from the reference functions' state.
        is_restored: Whether the restored state equals the scan's, bit for bit.
        is_repeated: Whether a hit at the text's end equals a miss computed in the same steps, bit
            for bit, in state and tokens.
        off_miss: Largest difference of a hit inside the text from the nearest miss.
        own_difference: Largest difference between misses of one prompt cut at different tokens.
        same_tokens: Prompts whose answers with the cache and without are equal.
        skipped: Prompt tokens that were skipped.
        seconds: Time to answer all prompts without the cache, and with it.
    """

    off_reference: float
    is_restored: bool
    is_repeated: bool
    off_miss: float
    own_difference: float
    same_tokens: int
    skipped: int
    seconds: tuple[float, float]


def compare(sizes: Sizes, kernels: Kernels, device: torch.device) -> Comparison:
    """Answer prompts with the cache and without, and compare."""
    saved: list[Tensor] = []

    def scan(inputs: ScanInputs, states: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        y, chunk_states = kernels.scan(inputs, states, batch)
        saved.append(chunk_states)
        return y, chunk_states

    plain = HybridModel(sizes.model, dtype=sizes.dtype, device=device)
    model = with_kernels(
        HybridModel(sizes.model, dtype=sizes.dtype, device=device), replace(kernels, scan=scan)
    )
    drawn = torch.randint(
        sizes.model.vocab_size,
        (sizes.text + (sizes.questions + 1) * sizes.own,),
        generator=torch.Generator().manual_seed(0),
    ).tolist()
    text, rest = drawn[: sizes.text], drawn[sizes.text :]
    own = [rest[i : i + sizes.own] for i in range(0, len(rest), sizes.own)]
    inside, end, new = sizes.text - sizes.block, sizes.text, sizes.new
    cached, uncached = (make_context(model, sizes, is_cached=each) for each in (True, False))

    answer(uncached, model, text, new=2)  # compiles and tunes the kernels
    saved.clear()
    answer(cached, model, text, new=1)  # saves a state inside the text and one at its end
    num_layers = sizes.model.layer_pattern.count("M")
    chunk = inside // sizes.block - 1
    expected = torch.stack([states[chunk] for states in saved[:num_layers]])[:, None]

    branch = text[:inside] + own[0]
    resumed = answer(cached, model, branch, new=new)
    cuts = (None, inside, sizes.block, end - 2 * sizes.block or None)
    misses = [answer(uncached, model, branch, new=new, cut=cut) for cut in cuts]
    reference = answer(make_context(plain, sizes, is_cached=False), plain, branch, new=new)

    prompts = [text + one for one in own[1:]]
    hit = answer(cached, model, prompts[0], new=new)
    again = answer(uncached, model, prompts[0], new=new, cut=end)

    answers, seconds, skipped = [], [], 0
    for context in (uncached, cached):
        for is_warm in (False, True):  # the first run compiles this batch's shapes
            before = context.stats().skipped_tokens
            if not is_warm and context is cached:
                continue  # it would cache more than the text
            found = answer_all(context, model, prompts, new)
        answers.append(found[0])
        seconds.append(found[1])
        skipped = context.stats().skipped_tokens - before
        context.check_invariants()
    others = [
        _distance(one.state, other.state)
        for number, one in enumerate(misses)
        for other in misses[:number]
    ]
    return Comparison(
        off_reference=max(_distance(one.state, reference.state) for one in [*misses, resumed]),
        is_restored=resumed.skipped == inside and torch.equal(resumed.restored, expected),
        is_repeated=hit.skipped == end
        and hit.tokens == again.tokens
        and all(map(torch.equal, hit.state, again.state)),
        off_miss=min(_distance(one.state, resumed.state) for one in misses),
        own_difference=max(others),
        same_tokens=sum(map(list.__eq__, *answers))
        + (resumed.tokens in [one.tokens for one in misses]),
        skipped=skipped + resumed.skipped,
        seconds=(seconds[0], seconds[1]),
    )


def _distance(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    """Return the largest difference, relative to the largest magnitude."""
    pairs = [(a.double(), b.double()) for a, b in zip(one, other, strict=True)]
    shares = [(a - b).abs().max() / b.abs().max() for a, b in pairs]
    return torch.stack(shares).max().item()  # NaN if any is


SMALL = Sizes(HybridModelConfig(), torch.float32, block=64, text=1024)
LARGE = Sizes(
    HybridModelConfig(
        layer_pattern="MM*-MM*-MM*-MM*-",
        hidden_size=2048,
        num_attention_heads=32,
        num_kv_heads=8,
        attention_head_dim=64,
        mamba_num_heads=64,
        mamba_head_dim=64,
        ssm_state_size=128,
        num_groups=8,
        ssm_chunk_size=256,
        mlp_size=8192,
    ),
    torch.bfloat16,
    block=256,
    text=8192,
    own=200,
    new=32,
    questions=4,
)


def main(arguments: Sequence[str] = ()) -> int:
    """Print the kernels found, compare hits with misses, and time both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--skip", nargs="*", default=(), metavar="PACKAGE", help="pass over these")
    skip = parser.parse_args(arguments).skip
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    kernels = find_kernels(can_run=device.type == "cuda" or is_interpreted, skip=skip)
    for part, source in kernels.sources.items():
        print(f"{part:12} {source}")
    missing = [name for name in INSTALL if f"no {name}" in "; ".join(kernels.sources.values())]
    for name in missing:
        print(f"{'':12} {INSTALL[name]}")
    sizes = LARGE if device.type == "cuda" else SMALL
    return report(sizes, compare(sizes, kernels, device))


def report(sizes: Sizes, found: Comparison) -> int:
    """Print a comparison; return 0 if a hit equals a miss."""
    inside, end = sizes.text - sizes.block, sizes.text
    limit = LIMITS[sizes.dtype]
    prompts = sizes.questions + 1
    checks = [
        (
            f"states beside the reference functions': {found.off_reference:.1e} (limit {limit:g})",
            found.off_reference <= limit,
        ),
        (f"the state restored at {inside:,} tokens is the scan's, bit for bit", found.is_restored),
        (
            f"a hit at {end:,} tokens is a miss computed in the same steps, state bit for bit and "
            "tokens",
            found.is_repeated,
        ),
        (
            f"a hit at {inside:,} tokens is {found.off_miss:.1e} off a miss; misses that are cut "
            f"elsewhere are {found.own_difference:.1e} apart",
            found.off_miss <= found.own_difference,
        ),
    ]
    agree = f"{found.same_tokens} of {prompts} answers are equal with the cache and without"
    if sizes.dtype is torch.bfloat16:
        # Other batches round differently, and a random model's best two tokens are often close.
        agree += f" in other batches, {sizes.dtype}"
    else:
        checks.append((agree, found.same_tokens == prompts))
    print()
    for text, is_right in checks:
        print(f"{'ok    ' if is_right else 'FAILED'} {text}")
    if sizes.dtype is torch.bfloat16:
        print(f"       {agree}")
    without, with_cache = found.seconds
    total = sizes.questions * (end + sizes.own) + inside + sizes.own
    print(f"\n{found.skipped:,} of {total:,} prompt tokens skipped.")
    print(
        f"{sizes.questions} questions side by side, answers of {sizes.new} tokens included: "
        f"{without:.3f} s without the cache, {with_cache:.3f} s with it."
    )
    return 0 if all(is_right for _, is_right in checks) else 1


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
