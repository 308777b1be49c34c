"""The model behind a narrow interface: fresh caches, forwards and the fingerprint."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache._torch import to_device
from mamba_cache.errors import InvalidArgumentError, UnresumableModelError
from mamba_cache.integrations.transformers.fingerprint import ModelFingerprint, WeightsCheck
from mamba_cache.integrations.transformers.library import transformers

__all__ = ["ModelRunner"]

_Tokens = Sequence[int] | npt.NDArray[np.int32]


class ModelRunner:
    """Runs a causal language model of transformers over parts of a sequence."""

    def __init__(
        self, model: Any, weights_check: WeightsCheck = "full", variant: str | None = None
    ) -> None:
        library = transformers()
        if isinstance(model, (str, os.PathLike)):
            raise InvalidArgumentError(
                f"model must be a loaded model, got {str(model)!r}: load it with "
                f"AutoModelForCausalLM.from_pretrained({str(model)!r}), and give what that returns"
            )
        if not isinstance(model, library.PreTrainedModel) or not hasattr(model, "generate"):
            raise InvalidArgumentError(
                f"model must be a causal language model of transformers, got "
                f"{type(model).__name__} (of a PEFT model, give get_base_model(); instead of "
                "torch.compile(model), call model.compile() and give the model)"
            )
        self.model: Any = model
        self._accepts = set(inspect.signature(self.model.forward).parameters)
        names = [name for name in ("cache_params", "past_key_values") if name in self._accepts]
        if not names:
            raise InvalidArgumentError(f"{type(model).__name__}.forward takes no cache")
        self.cache_name = names[0]  # the argument of the model's forward that takes its cache
        self.check_mode()
        _check_rope(model)
        self.fingerprint = ModelFingerprint(model, weights_check, variant)

    @property
    def config(self) -> Any:
        """The configuration of the model's decoder."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def vocabulary(self) -> int:
        """The number of token ids in the model's vocabulary."""
        rows = getattr(self.model.get_input_embeddings(), "num_embeddings", None)
        return rows if isinstance(rows, int) else int(self.config.vocab_size)

    def check_mode(self) -> None:
        """Check that the model is not in training mode."""
        if self.model.training:
            raise InvalidArgumentError("the model must not be in training mode: call model.eval()")

    def new_cache(self) -> Any:
        """Return an empty cache, of the kind that ``generate`` makes."""
        return transformers().DynamicCache(config=self.config)

    def forward(
        self, tokens: _Tokens, cache: Any, start: int, *, logits_to_keep: int = 1
    ) -> torch.Tensor:
        """Compute tokens of one sequence from position ``start`` on: see ``forward_rows``."""
        ids = torch.from_numpy(np.array(tokens, dtype=np.int64)[None])
        ids = to_device(ids, self.model.device)
        positions = torch.arange(start, start + len(tokens), device=ids.device)
        return self.forward_rows(ids, positions[None], cache, logits_to_keep=logits_to_keep)

    def try_out(self) -> None:
        """Compute three tokens at once and then one more."""
        cache = self.new_cache()
        self.forward([0, 1, 2], cache, 0)
        self.forward([3], cache, 3)

    def placement(self) -> tuple[torch.device, torch.dtype]:
        """Return the model's device and dtype."""
        return self.model.device, self.model.dtype

    def forward_rows(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        *,
        logits_to_keep: int = 1,
    ) -> torch.Tensor:
        """Compute n tokens of each of several sequences, and return their logits.

        ``ids`` and ``positions`` are [rows, n] int64 on the model's device. Logits are [rows,
        tokens, vocabulary] of the last ``logits_to_keep`` tokens; of all tokens if that is 0 or the
        model does not take this argument.
        """
        options: dict[str, Any] = {self.cache_name: cache, "use_cache": True}
        if "logits_to_keep" in self._accepts:
            options["logits_to_keep"] = logits_to_keep
        if "position_ids" in self._accepts:  # not every model takes positions from its cache
            options["position_ids"] = positions
        with torch.no_grad():
            output = self.call(input_ids=ids, **options)
        logits: torch.Tensor = output.logits
        return logits

    @property
    def is_compiled(self) -> bool:
        """Whether ``model.compile()`` was called."""
        return getattr(self.model, "_compiled_call_impl", None) is not None

    def call(self, **inputs: Any) -> Any:
        """Call the model; ``Generation`` replaces this method by the forward it has intercepted."""
        # Each new length of a part of a prompt would compile the model again.
        return (self.model._call_impl if self.is_compiled else self.model)(**inputs)


def _check_rope(model: Any) -> None:
    """Check that a token's rotary embedding depends on its position alone."""
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in by_layer.items():
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                of_layers = f" for layers of type {layer_type!r}" if layer_type else ""
                raise UnresumableModelError(
                    f"{type(model).__name__}.{name} has rope_type {kind!r}{of_layers}: its "
                    "frequencies depend on the length of the sequence, so no prefix can be reused "
                    "in a longer one. Set rope_parameters of the configuration to a fixed kind, "
                    "such as 'default' or 'yarn'"
                )
