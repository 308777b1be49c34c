"""The prefix cache of one model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from mamba_cache._guard import CallGuard, guarded
from mamba_cache.blocks import ExtraKey
from mamba_cache.context import CacheStats
from mamba_cache.errors import (
    BudgetError,
    InvalidArgumentError,
    ModelChangedError,
    StepOrderError,
    UnresumableModelError,
)
from mamba_cache.integrations.transformers.generation import Generation, remove_hooks
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.integrations.transformers.prefill import Prefiller
from mamba_cache.integrations.transformers.probe import probe
from mamba_cache.integrations.transformers.prompts import (
    check_options,
    pad_prompts,
    setting,
    split_rows,
)
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.integrations.transformers.store import PrefixStore
from mamba_cache.integrations.transformers.tensors import PrefixLayout
from mamba_cache.slots import (
    CheckpointPlacement,
    ConsumedSlotPolicy,
    MegatronPlacement,
    SlotEvictionPolicy,
)

__all__ = ["PrefixCache"]

_GIB = 2**30
_BLOCKS_WITHOUT_MEMORY = 2**18
"""KV blocks of a model without attention: only their books take room."""


class PrefixCache:
    """Reuses the prefixes of prompts that a transformers model has computed before.

    One thread uses the model at a time through it; others wait. Whatever breaks a call off, what it
    held is given back and the books are proved, or every later call raises ``PoisonedError`` until
    ``reset``; the model itself is free of it then.

    Args:
        model: A causal language model of transformers with linear-attention layers. It stays
            usable on its own.
        mamba_cache_gb: Budget for saved states in GiB (2**30 bytes).
        kv_cache_gb: Budget for keys and values in GiB. Not used by models without attention.
        block_size_tokens: Tokens of a block; a multiple of the model's SSM chunk.
        segment_tokens: The most that one forward computes of a prompt; a multiple of
            ``block_size_tokens``. Fewer need less memory.
        eviction: Which saved states are given up first. Default: the longest unused.
        placement: Where states are saved. Default: Megatron's three positions.
        on_unresumable: What to do with a model that does not go on correctly from a saved state
            when given several tokens at once: "error" raises, "step" gives it single tokens then,
            which is slow and exact.

    Raises:
        InvalidArgumentError: The model is of a kind that cannot be cached, or a setting is out of
            range.
        UnresumableModelError: The model does not go on correctly from a saved state.
        BudgetError: A budget does not hold one state, or one block.
        MissingExtraError: transformers is not installed.
        UnsupportedVersionError: It is too old.
    """

    def __init__(
        self,
        model: Any,
        *,
        mamba_cache_gb: float,
        kv_cache_gb: float,
        block_size_tokens: int = 256,
        segment_tokens: int = 1024,
        eviction: SlotEvictionPolicy | None = None,
        placement: CheckpointPlacement | None = None,
        on_unresumable: Literal["error", "step"] = "error",
    ) -> None:
        self._runner = ModelRunner(model)
        _check_sizes(block_size_tokens, segment_tokens, self._runner.chunk_size)
        layout, fault = _probe(self._runner, block_size_tokens, on_unresumable)
        self._store = PrefixStore(
            layout,
            num_slots=_count("mamba_cache_gb", mamba_cache_gb, layout.bytes_per_slot, "state"),
            num_blocks=_count("kv_cache_gb", kv_cache_gb, layout.bytes_per_block, "KV block"),
            eviction=eviction or ConsumedSlotPolicy(),
        )
        self._prefiller = Prefiller(
            self._runner,
            self._store,
            placement=placement or MegatronPlacement(),
            segment_tokens=segment_tokens,
            is_stepwise=fault is not None,
        )
        self._guard = CallGuard(self._take_back)
        self._store.join(self._guard)
        self._is_closed = False
        self._home = self._runner.placement()
        self._weights = self._runner.weights()

    def __enter__(self) -> PrefixCache:
        """Returns itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the cache."""
        self.close()

    @guarded(waits=True, trusts=())
    def generate(self, inputs: Any = None, *, cache_salt: ExtraKey = None, **options: Any) -> Any:
        """Does what ``model.generate`` does, and computes only what is not cached.

        Args:
            inputs: Token ids, also accepted as ``input_ids``: a tensor [rows, length], padded on
                the left, or a list of prompts of any lengths, each a list of ints.
            cache_salt: Prompts of different salts never share anything.
            options: All else that ``model.generate`` takes.

        Returns:
            What ``model.generate`` returns.

        Raises:
            InvalidArgumentError: The prompts are malformed, or an option cannot be served.
            ModelChangedError: The model was moved, or its weights are others.
            StepOrderError: The cache is closed.
        """
        self._check_ready()
        model = self._runner.model
        config = options.get("generation_config") or model.generation_config
        check_options(options, config)
        ids = self._read_prompts(inputs, options, config)
        with self._watch(options, config, cache_salt) as generation:
            criteria = [*(options.pop("stopping_criteria", None) or ()), generation.watch]
            listed = transformers().StoppingCriteriaList(criteria)
            output = model.generate(ids, stopping_criteria=listed, **options)
            generation.publish()
        return output

    @guarded(waits=True, trusts=())
    def prefill(self, input_ids: Any, *, cache_salt: ExtraKey = None) -> Any:
        """Computes a prompt, for those who call the model themselves.

        Args:
            input_ids: Token ids of one prompt: a tensor [1, length] or [length], or a list of ints.
            cache_salt: Prompts of different salts never share anything.

        Returns:
            A transformers cache that all of the tokens have gone through, to be passed to the
            model's forward with the tokens that follow. The caller owns it.

        Raises:
            InvalidArgumentError: The prompt is malformed.
            ModelChangedError: The model was moved, or its weights are others.
            StepOrderError: The cache is closed.
        """
        self._check_ready()
        is_tensor = isinstance(input_ids, torch.Tensor)
        ids = input_ids if is_tensor else torch.as_tensor(input_ids, device="cpu")
        prompts = split_rows(ids[None] if ids.dim() == 1 else ids)
        if len(prompts) > 1:
            raise InvalidArgumentError(f"prefill takes one prompt, got {len(prompts)} rows")
        prompt = prompts[0]
        past = self._runner.new_cache()
        prefill = self._prefiller.begin(
            prompt.tokens, past, end=len(prompt.tokens), min_computed=0, cache_salt=cache_salt
        )
        try:
            self._prefiller.run(prefill, prefill.segments)
        finally:
            prefill.record.close()
        return past

    def stats(self) -> CacheStats:
        """Returns what the cache did so far and what it holds now."""
        return self._store.stats()

    def reset(self) -> None:
        """Forgets every prefix and every count, as after a change of the model's weights.

        Raises:
            ModelChangedError: The model was moved, so that it needs another cache.
            StepOrderError: The cache is closed.
        """
        self._check_home()
        self._renew()

    @guarded(renews=True, waits=True)
    def close(self) -> None:
        """Gives the memory back; after it the cache cannot be used. The model can."""
        self._is_closed = True
        remove_hooks(self._runner.model, self._store)
        self._store.reset()
        self._store.tensors.clear()

    @guarded(waits=True, trusts=())
    def check_invariants(self) -> None:
        """Checks the books.

        Raises:
            InvariantError: They contradict themselves: a bug in this package.
        """
        self._store.check_invariants()

    @guarded(renews=True, waits=True)
    def _renew(self) -> None:
        remove_hooks(self._runner.model, self._store)
        self._store.reset()
        self._weights = self._runner.weights()

    def _take_back(self) -> None:
        """Give back what a call that broke off held, and prove the books."""
        remove_hooks(self._runner.model, self._store)
        self._store.let_go()
        self._store.check_invariants()

    def _check_ready(self) -> None:
        self._check_home()
        self._runner.check_mode()
        if self._runner.weights() != self._weights:
            raise ModelChangedError(
                "the model's weights are not those that the cached prefixes were computed with: "
                "call reset() to forget those"
            )

    def _check_home(self) -> None:
        if self._is_closed:
            raise StepOrderError("the cache is closed: make a new one")
        device, dtype = self._runner.placement()
        if (device, dtype) != self._home:
            raise ModelChangedError(
                f"the model was on {self._home[0]} in {self._home[1]} when the cache was made and "
                f"is on {device} in {dtype} now: make a new cache"
            )

    def _read_prompts(self, inputs: Any, options: dict[str, Any], config: Any) -> torch.Tensor:
        """Returns the prompts as one tensor, and adds to ``options`` the mask of a list's."""
        given = options.pop("input_ids", None)
        if (inputs is None) == (given is None):
            raise InvalidArgumentError("give prompts either as inputs or as input_ids, not both")
        prompts = given if inputs is None else inputs
        if isinstance(prompts, torch.Tensor):
            split_rows(prompts, options.get("attention_mask"))
            return prompts
        if not isinstance(prompts, Sequence) or options.get("attention_mask") is not None:
            raise InvalidArgumentError(
                f"prompts must be a tensor of token ids, or without attention_mask a list of "
                f"lists of them, got {type(prompts).__name__}"
            )
        pad = setting("pad_token_id", options, config)
        ids, options["attention_mask"] = pad_prompts(
            prompts, 0 if pad is None else pad, self._runner.model.device
        )
        return ids

    def _watch(self, options: dict[str, Any], config: Any, cache_salt: ExtraKey) -> Generation:
        eos = setting("eos_token_id", options, config)
        return Generation(
            self._runner,
            self._prefiller,
            self._store,
            cache_salt=cache_salt,
            eos_token_ids=eos if isinstance(eos, Sequence) else [eos],
            follows_rows=(setting("num_beams", options, config) or 1) == 1,
        )


def _check_sizes(block_size_tokens: int, segment_tokens: int, chunk_size: int) -> None:
    sizes = (
        ("block_size_tokens", block_size_tokens, "the model's SSM chunk", chunk_size),
        ("segment_tokens", segment_tokens, "block_size_tokens", block_size_tokens),
    )
    for name, size, unit, multiple_of in sizes:
        is_int = isinstance(size, int) and not isinstance(size, bool)
        if not is_int or size < 1 or size % multiple_of:
            raise InvalidArgumentError(
                f"{name} must be a positive multiple of {unit} ({multiple_of}), got {size!r}"
            )


def _probe(
    runner: ModelRunner, block_size_tokens: int, on_unresumable: str
) -> tuple[PrefixLayout, str | None]:
    """Learns what the model keeps, and why several tokens do not go on from it, if so.

    Raises:
        InvalidArgumentError: ``on_unresumable`` is unknown, or ``probe`` refuses the model.
        UnresumableModelError: It does not go on correctly, and nothing is to be done about it.
    """
    if on_unresumable not in ("error", "step"):
        raise InvalidArgumentError(
            f"on_unresumable must be 'error' or 'step', got {on_unresumable!r}"
        )
    result = probe(runner, block_size_tokens)
    if result.fault and on_unresumable == "error":
        raise UnresumableModelError(
            f"{type(runner.model).__name__} does not go on correctly from a saved state when given "
            f"several tokens at once: {result.fault}. on_unresumable='step' gives it single "
            "tokens there, which is slow and exact; a newer transformers may do better"
        )
    return result.layout, result.fault


def _count(name: str, budget_gb: float, unit_bytes: int, unit: str) -> int:
    """Counts what a budget holds.

    Raises:
        InvalidArgumentError: The budget is no finite number >= 0.
        BudgetError: It holds nothing.
    """
    if not isinstance(budget_gb, (int, float)) or not 0 <= budget_gb < math.inf:
        raise InvalidArgumentError(f"{name} must be a finite number >= 0, got {budget_gb!r}")
    if not unit_bytes:
        return _BLOCKS_WITHOUT_MEMORY
    count = int(budget_gb * _GIB) // unit_bytes
    if not count:
        raise BudgetError(
            f"{name} must be at least {unit_bytes / _GIB:.3g} to hold one {unit} of "
            f"{unit_bytes} bytes, got {budget_gb}"
        )
    return count
