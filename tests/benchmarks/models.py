"""The measured models of transformers, and operations that measurements share.

Weights are random, because time does not depend on them.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from measuring import progress
from model_kernels import REFERENCE, kernels_of, library_versions, without_kernels

from mamba_cache.integrations.transformers import PrefixCache
from mamba_cache.integrations.transformers.library import transformers

_GIB = 2**30
_STATES_A_CALL = 3
"""More than a call saves, so that no state is evicted for lack of slots."""
_FILL_TOKENS = 1024
"""Tokens of one forward that fills a cache: the reference path has no memory for many."""


class Family(NamedTuple):
    """A model to measure."""

    model_type: str  # transformers' name of the configuration
    config: dict[str, Any]  # non-default settings
    dtype: torch.dtype = torch.bfloat16  # of the weights


FAMILIES = {
    "nemotron-h-8b": Family(
        "nemotron_h",
        {
            "hybrid_override_pattern": "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "chunk_size": 128,
            "max_position_embeddings": 131_072,
        },
    ),
    "granite-4-like": Family(
        "granitemoehybrid",
        {
            "layer_types": 4 * (5 * ["mamba"] + ["attention"] + 4 * ["mamba"]),
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 256,
            "vocab_size": 100_352,
            "intermediate_size": 512,
            "shared_intermediate_size": 1024,
            "num_hidden_layers": 40,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "max_position_embeddings": 131_072,
        },
    ),
    "qwen3-next-like": Family(
        "qwen3_next",
        {"num_hidden_layers": 24, "num_experts": 64, "max_position_embeddings": 131_072},
    ),
    "tiny": Family(
        "nemotron_h",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "hybrid_override_pattern": "M-M*-M-",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 16,
            "chunk_size": 32,
            "max_position_embeddings": 131_072,
        },
        dtype=torch.float32,
    ),
}


def add_family_option(command: Any) -> None:
    """Add ``--family`` to an ``ArgumentParser``."""
    about = f"the model's shape: {', '.join(FAMILIES)}; default: the first on a GPU, else tiny"
    command.add_argument("--family", choices=FAMILIES, metavar="NAME", help=about)


def make_subject(family: str | None, *, is_reference: bool = False) -> Subject:
    """Make a model on the GPU, or else on the CPU.

    Args:
        family: One of ``FAMILIES``. Default: the largest on a GPU, else the smallest.
        is_reference: Import it as if no kernels were installed.
    """
    transformers()  # imported before any progress output
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = family or ("nemotron-h-8b" if device == "cuda" else "tiny")
    progress(f"making {name} with random weights on {device}")
    with without_kernels() if is_reference else nullcontext():
        subject = Subject(make_model(FAMILIES[name], device), name)
    kernels = kernels_of(subject.model)
    if is_reference and set(kernels.values()) != {REFERENCE}:
        raise RuntimeError(f"the model was imported with kernels before: {kernels}")
    progress(f"kernels: {kernels}")
    return subject


def describe_subject(subject: Subject) -> dict[str, Any]:
    """Return the first fields of a model's results."""
    return {
        "family": subject.family_name,
        "parameters": sum(parameter.numel() for parameter in subject.model.parameters()),
        "versions": library_versions(),
        "kernels": kernels_of(subject.model),
    }


def make_model(family: Family, device: str) -> Any:
    """Make a model with random weights whose answers never end by themselves."""
    library: Any = importlib.import_module("transformers")
    config = library.AutoConfig.for_model(family.model_type, **family.config)
    torch.manual_seed(0)
    with torch.device(device):
        model = library.AutoModelForCausalLM.from_config(config, dtype=family.dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(device).eval()


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Times until an answer's first token."""

    ids: torch.Tensor  # [1, length] int64: the prompt and the answer
    seconds: float  # until the host had the first token
    call_seconds: float  # until the call had returned and the device was done with its work


class _Streamer:
    """A streamer that records the time of the first token."""

    def __init__(self) -> None:
        self._num_puts = 0
        self.at = 0.0

    def put(self, _: object) -> None:
        """Take the prompt, and then each token once it is on the host."""
        self._num_puts += 1
        if self._num_puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Take the end of the answer."""


class Subject:
    """A model, fresh prompts for it, and the ways to compute them.

    Attributes:
        model: On the device where it is measured.
        family_name: Its name among ``FAMILIES``.
        family: Its entry in ``FAMILIES``.
        is_cuda: Whether the device is a GPU.
    """

    def __init__(self, model: Any, family: str = "tiny") -> None:
        self.model = model
        self.family_name, self.family = family, FAMILIES[family]
        self.is_cuda: bool = model.device.type == "cuda"
        accepts = set(inspect.signature(model.forward).parameters)
        self._cache_name = "cache_params" if "cache_params" in accepts else "past_key_values"
        self._takes_positions = "position_ids" in accepts
        self._takes_logits_to_keep = "logits_to_keep" in accepts

    def random(self, num_tokens: int) -> torch.Tensor:
        """Return fresh random tokens: [1, num_tokens] int64."""
        size = self.model.config.vocab_size
        return torch.randint(3, size, (1, num_tokens), device=self.model.device)

    def generate(self, llm: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
        """Call ``generate`` of the model or of a prefix cache, by default for one token."""
        options = {"max_new_tokens": 1, "do_sample": False, **options}
        ids: torch.Tensor = llm.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        return ids

    def first_token(self, llm: Any, prompt: torch.Tensor, **options: Any) -> FirstToken:
        """Call ``generate`` and time its first token."""
        streamer = _Streamer()
        self.synchronize()
        start = time.perf_counter()
        ids = self.generate(llm, prompt, streamer=streamer, **options)
        self.synchronize()
        return FirstToken(ids, streamer.at - start, time.perf_counter() - start)

    def first_token_filled(self, prompt: torch.Tensor, past: Any) -> FirstToken:
        """Time the model's first token over a cache that holds all but the new tokens."""
        return self.first_token(self.model, prompt, **{self._cache_name: past})

    def new_cache(self) -> Any:
        """Make an empty cache of transformers."""
        library: Any = importlib.import_module("transformers")
        return library.DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def forward(self, tokens: torch.Tensor, past: Any) -> int:
        """Compute tokens over a cache and return the next token."""
        return int(self.logits(tokens, past)[0, -1].argmax())

    def capture(self, tokens: torch.Tensor, filled: Any) -> Callable[[], object] | None:
        """Return a function that replays one CUDA graph of ``tokens`` over a filled cache.

        None without a GPU, and for a model that cannot be captured.
        """
        if not self.is_cuda:
            return None
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.logits(tokens, copy_of(filled))
            torch.cuda.synchronize()
            past, graph = copy_of(filled), torch.cuda.CUDAGraph()
            read = [
                dict(vars(layer)) for layer in past.layers
            ]  # the forward replaces keys and values
            with torch.cuda.graph(graph):
                written = self.logits(tokens, past)
        except RuntimeError as error:
            progress(f"the new tokens' forward cannot be captured: {error}")
            return None

        def replay(_: object = (tokens, read, past, written)) -> None:
            graph.replay()

        return replay

    def logits(self, tokens: torch.Tensor, past: Any) -> torch.Tensor:
        """Compute tokens over a cache; return the logits of the last one, or of all."""
        start = past.get_seq_length()
        options: dict[str, Any] = {self._cache_name: past, "use_cache": True}
        if self._takes_positions:
            end = start + tokens.shape[1]
            options["position_ids"] = torch.arange(start, end, device=tokens.device)[None]
        if self._takes_logits_to_keep:
            options["logits_to_keep"] = 1
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids=tokens, **options).logits
        return logits

    def fill(self, tokens: torch.Tensor, past: Any = None) -> Any:
        """Return a cache of the tokens of ``past`` and then tokens [1, length]."""
        past = self.new_cache() if past is None else past
        for part in torch.split(tokens, _FILL_TOKENS, dim=1):
            self.forward(part, past)
        return past

    def prefix_cache(self, *, num_tokens: int, num_calls: int, **settings: Any) -> PrefixCache:
        """Make a prefix cache that evicts nothing during one measurement.

        ``num_tokens`` different tokens go through it, in ``num_calls`` calls of ``generate``.
        """
        state_bytes, token_bytes = self._measure_memory()
        cache = PrefixCache(
            self.model,
            mamba_cache_gb=(num_calls * _STATES_A_CALL + 4) * state_bytes / _GIB,
            # In addition, each call may leave one or two unfinished blocks.
            kv_cache_gb=max((num_tokens + num_calls * 512 + 4096) * token_bytes, 1) / _GIB,
            **settings,
        )
        gib = cache.stats().bytes_per_slot / _GIB
        progress(f"a state takes {gib:.4f} GiB, a token {token_bytes:,.0f} bytes")
        return cache

    def time(self, run: Callable[[], object]) -> float:
        """Return the seconds until a call has returned and the device is done with its work."""
        self.synchronize()
        start = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def _measure_memory(self) -> tuple[int, float]:
        """Return the bytes of the states, and the bytes that each token adds."""
        past = self.fill(self.random(8))
        few = _bytes_of(past)
        many = _bytes_of(self.fill(self.random(8), past))
        token_bytes = (many - few) / 8
        return int(few - 8 * token_bytes), token_bytes


def copy_of(past: Any) -> Any:
    """Return a cache of transformers with tensors of its own."""
    return copy.deepcopy(past)


def evictions(cache: PrefixCache) -> int:
    """Return the number of blocks and states evicted, and of checkpoints skipped."""
    stats = cache.stats()
    return stats.evicted_blocks + stats.evicted_slots + stats.skipped_checkpoints


def _bytes_of(past: Any) -> int:
    """Return the bytes of all tensors in a cache of transformers."""
    found: dict[int, torch.Tensor] = {}
    left: list[Any] = [vars(layer) for layer in past.layers]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif isinstance(value, (dict, list, tuple)):
            left += value.values() if isinstance(value, dict) else value
    return sum(tensor.nbytes for tensor in found.values())
