"""The model behind a narrow interface: fresh caches, forwards, and what would make them stale."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.transformers.layers import LayerParts, learn_layers, read_layers
from mamba_cache.integrations.transformers.library import transformers

__all__ = ["ModelRunner"]


class ModelRunner:
    """Runs a model over parts of a sequence.

    Args:
        model: A causal language model of transformers.

    Attributes:
        model: As given.
        cache_name: The argument of the model's forward that takes its cache.

    Raises:
        InvalidArgumentError: It is no such model, has no cache, or is in training mode.
        MissingExtraError: transformers is not installed.
        UnsupportedVersionError: It is too old.
    """

    def __init__(self, model: Any) -> None:
        library = transformers()
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
        self.cache_name = names[0]
        self.check_mode()

    @property
    def config(self) -> Any:
        """The configuration of the model's decoder."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def vocabulary(self) -> int:
        """How many token ids the model knows."""
        rows = getattr(self.model.get_input_embeddings(), "num_embeddings", None)
        return rows if isinstance(rows, int) else int(self.config.vocab_size)

    @property
    def chunk_size(self) -> int:
        """Tokens of one chunk of the model's SSM kernels; 1 if its configuration names none."""
        for name in ("chunk_size", "mamba_chunk_size"):
            size = getattr(self.config, name, None)
            if isinstance(size, int):
                return size
        return 1

    def check_mode(self) -> None:
        """Checks that the model is not in training mode.

        Raises:
            InvalidArgumentError: It is, so that dropout would make each run another.
        """
        if self.model.training:
            raise InvalidArgumentError("the model must not be in training mode: call model.eval()")

    def new_cache(self) -> Any:
        """Makes an empty cache, as ``generate`` does."""
        return transformers().DynamicCache(config=self.config)

    def forward(self, tokens: Sequence[int], cache: Any, start: int) -> torch.Tensor:
        """Computes tokens of one sequence.

        Args:
            tokens: Their ids.
            cache: What the model's layers kept of the tokens before; it is updated.
            start: How many those are.

        Returns:
            [1, len(tokens), vocabulary] logits, or of the last token alone where the model can
            leave out the others.
        """
        return self._forward(tokens, cache, start, logits_to_keep=1)

    def forward_all(self, tokens: Sequence[int], cache: Any, start: int) -> torch.Tensor:
        """Does the same, and returns the logits of all tokens."""
        return self._forward(tokens, cache, start, logits_to_keep=0)

    def learn(self, cache: Any) -> tuple[LayerParts, ...]:
        """Finds out what each layer of a filled cache keeps.

        Raises:
            InvalidArgumentError: A layer is of a kind that is not known, none has a state, or they
                are on several devices.
        """
        layers = learn_layers(cache)
        memory = read_layers(cache, layers, 0)
        devices = {str(t.device) for t in (*memory.states, *memory.windows, *memory.tokens)}
        if len(devices) > 1:
            raise InvalidArgumentError(
                f"all layers of the model must be on one device, got {sorted(devices)}"
            )
        return layers

    def weights(self) -> int:
        """Digests which weights the model has: another value means others.

        It looks at addresses and version counters, not at the weights, so a write through
        ``.data`` goes unseen.
        """
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return hash(tuple((t.data_ptr(), _version(t)) for t in tensors))

    def placement(self) -> tuple[torch.device, torch.dtype]:
        """Returns the model's device and dtype."""
        return self.model.device, self.model.dtype

    def adapters(self) -> str | None:
        """Names the adapters that are switched on, None if the model has none."""
        found = {
            (str(state["_active_adapter"]), str(state.get("_disable_adapters")),
             str(state.get("merged_adapters")))
            for state in map(vars, self.model.modules())
            if "_active_adapter" in state
        }  # fmt: skip
        return str(sorted(found)) if found else None

    def _forward(
        self, tokens: Sequence[int], cache: Any, start: int, *, logits_to_keep: int
    ) -> torch.Tensor:
        ids = torch.tensor([tokens], device=self.model.device)
        options: dict[str, Any] = {self.cache_name: cache, "use_cache": True}
        if "logits_to_keep" in self._accepts:
            options["logits_to_keep"] = logits_to_keep
        if "position_ids" in self._accepts:  # not every model counts on from its cache
            positions = torch.arange(start, start + len(tokens), device=ids.device)
            options["position_ids"] = positions[None]
        with torch.no_grad():
            output = self._call(input_ids=ids, **options)
        self._output_type = type(output)
        logits: torch.Tensor = output.logits
        return logits

    def output(self, logits: torch.Tensor, cache: Any) -> Any:
        """Makes what the model's forward returns.

        Args:
            logits: [rows, tokens, vocabulary].
            cache: The transformers cache that it would have updated.
        """
        return self._output_type(**{"logits": logits, self.cache_name: cache})

    @property
    def is_compiled(self) -> bool:
        """Whether ``model.compile()`` was called."""
        return getattr(self.model, "_compiled_call_impl", None) is not None

    @property
    def _call(self) -> Any:
        # Parts of prompts have any length, and each new one would be compiled for itself.
        return self.model._call_impl if self.is_compiled else self.model


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
