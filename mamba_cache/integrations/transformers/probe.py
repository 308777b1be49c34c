"""The probe of a model: whether it resumes correctly from a saved state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mamba_cache._torch import all_digits
from mamba_cache.errors import UnresumableModelError
from mamba_cache.integrations.transformers.capture import StateCapture
from mamba_cache.integrations.transformers.layers import (
    PrefixLayout,
    PrefixTensors,
    SequenceMemory,
    learn_layers,
    read_layers,
)
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.states import StatePool

__all__ = ["distance", "probe", "random_tokens"]

_SUFFIX_TOKENS = 8
"""More than the window of a short convolution, and too few for a state to forget the prefix."""

_NOISY_RUNS = 3
_MARGIN = 4
"""Tolerated multiple of the noise. 84 good models, in float32 and bfloat16, differed by less than
0.8 times the noise; models that forget differ by more than 5,000 times in float32."""

_KERNEL_ROUNDINGS = 8
"""Rounding errors of float32 by which a kernel's sums may differ if it computes a sequence in two
parts, in addition to the noise: fla's gated delta rule differs by 7 (H200)."""

_TF32 = 2.0**-11
"""Rounding error of scan kernels on a GPU: they multiply float32 with ten bits, whatever PyTorch's
switches are. States of mamba_ssm that were cut within a chunk differ by 0.4 of this (H200)."""

_ROUNDED_SHARE = 1 / 64
"""Share of embedding values that are changed for noise in half precision. A sum in another order
mostly rounds to the same value there, so few values differ, by one unit in the last place."""


@dataclass(frozen=True, slots=True)
class _Trace:
    """One tensor of the model's cache, or the logits, after a run."""

    layer: int  # only layers before this one have changed the tensor
    name: str
    tensor: torch.Tensor
    token_axis: int | None = None  # if given, the tensor is compared for each token


def probe(
    runner: ModelRunner, block_size_tokens: int
) -> tuple[PrefixLayout, bool, StateCapture | None]:
    """Compare runs over random tokens that resume after one block with a run over all tokens.

    The resumed runs restore the block's end from a slot and a KV block. One computes the other
    tokens at once, one token by token, and one at once from a state captured inside a whole run.
    All tensors of the layers and the logits are compared. The tolerance is measured as noise: the
    differences between whole runs over embeddings with other rounding. Autocast and TF32
    are off meanwhile, because with few digits the sums of two kernels differ too much.

    Return the layout of slots and KV blocks; whether single tokens compute the same as a prefill,
    except for rounding (some models clamp their time steps in the prefill only); and the capture of
    states inside a forward, None if it does not work for the model's scans.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = random_tokens(runner, block_size_tokens + _SUFFIX_TOKENS, generator)
    prefix, suffix = tokens[:block_size_tokens], tokens[block_size_tokens:]
    layout, _ = _save_prefix(runner, prefix)  # with the dtypes under autocast, if it is on
    with all_digits(runner.model.device):
        is_step_exact, capture = _judge(runner, tokens, prefix, suffix)
    return layout, is_step_exact, capture


def _judge(
    runner: ModelRunner, tokens: list[int], prefix: list[int], suffix: list[int]
) -> tuple[bool, StateCapture | None]:
    """Return whether single tokens resume correctly, and the capture; raise if several do not."""
    layout, saved = _save_prefix(runner, prefix)
    whole = _run(runner, layout, None, [tokens])
    with _refused_if_it_fails(runner):
        steps = _differences(whole, _run(runner, layout, saved, [[token] for token in suffix]))
    capture = StateCapture(runner.model, layout.layers)
    epsilon = _rounding_of_sums(runner, capture)
    noise = _noise(runner, layout, tokens, whole)
    bounds = [_MARGIN * (value + epsilon) for value in noise]
    step_fault = _first_fault(runner, layout, whole, steps, bounds)
    try:
        split = _differences(whole, _run(runner, layout, saved, [suffix]))
        fault = _first_fault(runner, layout, whole, split, bounds)
    except Exception as error:  # a model that cannot resume may raise any exception
        fault = f"its forward raises {error!r}"
    if fault is not None:
        raise UnresumableModelError(
            f"{type(runner.model).__name__} does not go on correctly from a saved state when given "
            f"several tokens at once: {fault}. A newer transformers may do better"
        )
    captured = _save_captured(runner, layout, capture, tokens)
    if captured is None:
        return step_fault is None, None
    rest = _differences(whole, _run(runner, layout, captured, [suffix]))
    is_right = _first_fault(runner, layout, whole, rest, bounds) is None
    return step_fault is None, capture if is_right else None


def _noise(
    runner: ModelRunner, layout: PrefixLayout, tokens: list[int], whole: list[_Trace]
) -> list[float]:
    """Return the maximum difference of each trace of whole runs with rounded embeddings."""
    embedding = runner.model.get_input_embeddings()
    noise = [0.0] * len(whole)
    for seed in range(_NOISY_RUNS):
        generator = torch.Generator().manual_seed(seed)
        with embedding.register_forward_hook(partial(_round, generator)):
            noisy = _differences(whole, _run(runner, layout, None, [tokens]))
        noise = list(map(max, noise, noisy))
    return noise


def _rounding_of(dtype: torch.dtype) -> float:
    """Return the relative rounding error of a model of a dtype."""
    # A float64 model computes some scans, norms and softmaxes in float32. The layers amplify their
    # rounding errors as in a float32 model: with large weights to many times float32's epsilon. So
    # noise is added where it is amplified most, at the embeddings.
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def _rounding_of_sums(runner: ModelRunner, capture: StateCapture) -> float:
    """Return the relative rounding error of scans that are computed in two parts."""
    device, dtype = runner.placement()
    if dtype.itemsize < torch.float32.itemsize:
        return _rounding_of(dtype)
    if device.type != "cpu" and capture.has_kernels:
        return _TF32
    return _KERNEL_ROUNDINGS * _rounding_of(dtype)


def _round(
    generator: torch.Generator, module: torch.nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    """Change a module's outputs by one rounding error up or down; a forward hook."""
    share = 1.0 if output.dtype.itemsize >= torch.float32.itemsize else _ROUNDED_SHARE
    draws = torch.rand(output.shape, generator=generator, device="cpu")
    signs = (draws < share / 2).float() - (draws >= 1 - share / 2).float()
    factors = 1 + signs.to(output) * _rounding_of(output.dtype)
    return output * factors


def distance(expected: torch.Tensor, actual: torch.Tensor, token_axis: int | None = None) -> float:
    """Return the relative error of a tensor; with ``token_axis`` that of the worst token."""
    a, b = expected.double(), actual.double()
    axes = tuple(axis for axis in range(a.dim()) if axis != token_axis)
    size = torch.linalg.vector_norm(a, dim=axes)
    error = torch.linalg.vector_norm(b - a, dim=axes)
    return float((error / size.clamp_min(torch.finfo(a.dtype).tiny)).max())


def random_tokens(runner: ModelRunner, count: int, generator: torch.Generator) -> list[int]:
    """Return random tokens of the model's vocabulary."""
    tokens: list[int] = torch.randint(
        runner.config.vocab_size, (count,), generator=generator, device="cpu"
    ).tolist()
    return tokens


@contextmanager
def _refused_if_it_fails(runner: ModelRunner) -> Iterator[None]:
    """Turn any exception of a model's forward over a fresh cache into an error of the package."""
    try:
        yield
    except Exception as error:
        raise UnresumableModelError(
            f"{type(runner.model).__name__} cannot be run with {runner.cache_name} and random "
            f"tokens: its forward raises {error!r}"
        ) from error


def _save_prefix(runner: ModelRunner, prefix: Sequence[int]) -> tuple[PrefixLayout, PrefixTensors]:
    """Compute one block; return the layout and the tensors in which the block is saved."""
    cache = runner.new_cache()
    with _refused_if_it_fails(runner):
        runner.forward(prefix, cache, 0)
    layers = learn_layers(cache)
    live = read_layers(cache, layers, len(prefix))
    layout = PrefixLayout(cache, layers, live, len(prefix))
    tensors = PrefixTensors(layout, StatePool(layout.state_spec, 1, device=layout.device), 1)
    tensors.save_state(0, live)
    tensors.save_tokens([0], live, 0, len(prefix))
    return layout, tensors


def _save_captured(
    runner: ModelRunner, layout: PrefixLayout, capture: StateCapture, tokens: Sequence[int]
) -> PrefixTensors | None:
    """Compute all tokens and save the first block; return None if its state was not captured."""
    block, cache = layout.block_size_tokens, runner.new_cache()
    tensors = PrefixTensors(layout, StatePool(layout.state_spec, 1, device=layout.device), 1)
    for tensor in tensors.states.tensors.values():
        tensor.view(torch.uint8).fill_(0xFF)  # NaN, so that unwritten values make a difference
    with capture.during(cache, 0, len(tokens), {block: tensors.room(0, block)}) as captured:
        runner.forward(tokens, cache, 0)
    tensors.save_tokens([0], read_layers(cache, layout.layers, len(tokens)), 0, block)
    return tensors if block in captured else None


def _run(
    runner: ModelRunner, layout: PrefixLayout, saved: PrefixTensors | None, parts: list[list[int]]
) -> list[_Trace]:
    """Compute ``parts`` after a saved block, if any; return the traces in the order of layers."""
    cache, position, logits = runner.new_cache(), 0, []
    if saved is not None:
        position = layout.block_size_tokens
        layout.fill(cache, saved.load(0, [0], position))
    for part in parts:
        logits.append(runner.forward(part, cache, position, logits_to_keep=0))
        position += len(part)
    memory = read_layers(cache, layout.layers, position)
    traces = _traces(layout, memory)
    last = torch.cat(logits, dim=1)[:, -_SUFFIX_TOKENS:]
    return [*traces, _Trace(len(layout.layers), "logits", last, 1)]


def _traces(layout: PrefixLayout, memory: SequenceMemory) -> list[_Trace]:
    states, windows, tokens = iter(memory.states), iter(memory.windows), iter(memory.tokens)
    traces = []
    for index, parts in enumerate(layout.layers):
        # Keys, values and inputs of a convolution depend on the layers before this one only.
        if parts.window or parts.has_tokens:
            for name in ("keys", "values"):
                kept = next(windows if parts.window else tokens)
                traces.append(_Trace(index, name, kept[:, :, -_SUFFIX_TOKENS:], 2))
        traces += [_Trace(index, "conv states", next(states)) for _ in parts.convs]
        traces += [_Trace(index + 1, "recurrent states", next(states)) for _ in parts.recurrents]
    return traces


def _differences(expected: list[_Trace], actual: list[_Trace]) -> list[float]:
    """Return the relative error of each trace."""
    return [
        distance(one.tensor, other.tensor, one.token_axis)
        for one, other in zip(expected, actual, strict=True)
    ]


def _first_fault(
    runner: ModelRunner,
    layout: PrefixLayout,
    traces: list[_Trace],
    differences: list[float],
    bounds: list[float],
) -> str | None:
    """Return a description of the first trace out of bounds; None if there is none."""
    pairs = zip(differences, bounds, strict=True)
    wrong = next((i for i, (difference, bound) in enumerate(pairs) if not difference <= bound), -1)
    if wrong < 0:
        return None
    linear = [i for i, parts in enumerate(layout.layers) if parts.convs or parts.recurrents]
    index = max((i for i in linear if i < traces[wrong].layer), default=linear[0])
    kinds = getattr(runner.config, "layer_types", None) or [x.kind for x in layout.layers]
    return (
        f"layer {index} of kind {kinds[index]!r} makes the {traces[wrong].name} that follow differ "
        f"from those of an unbroken run by {differences[wrong]:.1e} of their size"
    )
