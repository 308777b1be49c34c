"""Paged attention for models of transformers: the attention function and its registration."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mamba_cache.errors import InvalidArgumentError, ModelChangedError
from mamba_cache.integrations.transformers.batching.kernels import paged_attention_torch
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.integrations.transformers.replacement import original, replaced
from mamba_cache.states import kernels_for

__all__ = ["PAGED", "PagedAttention", "register_attention"]

PAGED = "mamba_cache_paged"
"""The name of the attention function in transformers' registries."""

_KERNELS = "mamba_cache.integrations.transformers.batching.kernels.paged_attention"
_UNSERVED = ("softcap", "sliding_window", "s_aux", "position_bias", "block_sequence_ids")
_FIELD = "_attn_implementation_internal"

_current = threading.local()
"""``attention`` of the thread that runs a batch; other threads use the usual attention."""


def register_attention() -> None:
    """Register the attention function with transformers.

    Other models are not affected. To be called before the fingerprint first reads a model, because
    it reads the registries.
    """
    attention, masks = _registries()
    if PAGED not in attention:
        attention.register(PAGED, _attend)
        masks.register(PAGED, _make_mask)


def _registries() -> tuple[Any, Any]:
    library = transformers()
    masks = library.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    return library.modeling_utils.ALL_ATTENTION_FUNCTIONS, masks


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to KV blocks; in other threads, call the usual attention function."""
    attention: PagedAttention | None = getattr(_current, "attention", None)
    if attention is not None:
        return attention.attend(query, options), None
    registry = _registries()[0]
    eager = sys.modules[type(module).__module__]
    usual = registry.get(_usual_of(getattr(module, "config", None))) or (
        eager.eager_attention_forward
    )
    output: tuple[torch.Tensor, torch.Tensor | None] = usual(
        module, query, key, value, attention_mask, **options
    )
    return output


def _usual_of(config: Any) -> str:
    """Return the attention of a configuration in threads that do not run a batch."""
    own = getattr(config, "__dict__", {})
    name = original(own, _FIELD) if _FIELD in own else None
    return name if isinstance(name, str) else "eager"


def _make_mask(**arguments: Any) -> Any:
    """Return no mask, because lengths limit each row; in other threads, the usual mask."""
    if getattr(_current, "attention", None) is not None:
        return None
    return _registries()[1][_usual_of(arguments.get("config"))](**arguments)


class PagedAttention:
    """Makes attention layers write and read a context's KV blocks during a forward.

    ``kv_cache`` is [num_layers, 2, num_blocks, block_size, kv_heads, head_dim].
    """

    def __init__(self, model: torch.nn.Module, kv_cache: torch.Tensor) -> None:
        self._kv_cache = kv_cache
        self._flat = kv_cache.flatten(2, 3)
        self._kernels = kernels_for(
            "auto", kv_cache.device, kernels=_KERNELS, twins=paged_attention_torch
        )
        of_modules: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        whole = {id(c): c for c in of_modules if hasattr(c, "get_text_config")}.values()
        of_text = [config.get_text_config(decoder=True) for config in whole]
        configs = {id(c): c for c in (*of_modules, *of_text) if hasattr(c, _FIELD)}
        self._configs = list(configs.values())
        self._layer = -1
        self._written: set[int] = set()  # layers whose keys and values the forward has written
        self._slots = self._places = torch.empty(0)
        self._seen: tuple[torch.Tensor, ...] = ()

    @contextmanager
    def during(
        self,
        slots: torch.Tensor,
        tables: torch.Tensor,
        places: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
    ) -> Iterator[None]:
        """Have the model attend to KV blocks in this thread while the body runs.

        ``slots``, [rows * n] int64, are the places of each row's n keys and values, counted in
        tokens of the pool. The other arguments are those of ``paged_attention``.
        """
        self._written = set()
        self._slots, self._places = slots, places
        self._seen = tables, places, starts, lengths
        with ExitStack() as undo:
            for config in self._configs:
                undo.enter_context(replaced(self, config, _FIELD, lambda _: PAGED))
            _current.attention = self
            undo.callback(setattr, _current, "attention", None)
            yield
            if len(self._written) < len(self._kv_cache):
                raise ModelChangedError(
                    "the model left nothing in its cache where keys and values are expected: a "
                    "layer was removed or replaced, so make a new prefix cache"
                )

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of new tokens; stands in for a cache layer's ``update``.

        ``keys`` and ``values`` are [rows, kv_heads, n, head_dim] each, and are returned unchanged.
        The attention of the same layer is called next.
        """
        self._layer = layer
        self._written.add(layer)
        self._kernels.write_tokens(self._flat[layer], self._slots, keys, values)
        return keys, values

    def attend(self, query: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Attend to the keys and values of the layer that was updated last.

        ``query`` is [rows, heads, n, head_dim], the result [rows, n, heads, head_dim]. ``options``
        are those that the model's layer passes to its attention function.
        """
        asked = [name for name in _UNSERVED if options.get(name) is not None]
        num_tokens = len(self._slots) // len(self._places)
        if query.shape[2:] != (num_tokens, self._kv_cache.shape[-1]):
            asked.append(f"queries [tokens, size of a head] {[*query.shape[2:]]}")
        if asked:
            raise InvalidArgumentError(
                f"generate_batch cannot serve this model: its attention needs {asked}, which "
                "attention over KV blocks does not support; generate serves it"
            )
        scaling = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        keys, values = self._kv_cache[self._layer]
        output: torch.Tensor = self._kernels.paged_attention(
            query, keys, values, *self._seen, scale
        )
        return output
