"""One call of ``generate``: its first forward goes on from the cache, and what it adds is kept."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mamba_cache.blocks import ExtraKey
from mamba_cache.integrations.transformers.layers import (
    SequenceMemory,
    read_layers,
    stack_memories,
    write_layers,
)
from mamba_cache.integrations.transformers.prefill import Prefill, Prefiller
from mamba_cache.integrations.transformers.prompts import Prompt, split_rows
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.integrations.transformers.store import PrefixStore

__all__ = ["Generation", "remove_hooks"]


@dataclass(slots=True)
class _Row:
    """One row of the batch that generates.

    Attributes:
        prompt: What it began with.
        prefill: How that was computed; rows of the same prompt share it.
        boundary: The last block boundary in its answer, 0 before the first.
        states: Its conv and recurrent states there.
        windows: Its windows there.
    """

    prompt: Prompt
    prefill: Prefill
    boundary: int = 0
    states: list[torch.Tensor] = field(default_factory=list)
    windows: list[torch.Tensor] = field(default_factory=list)


class Generation:
    """Stands in the way of the model's first forward, and watches the tokens that follow.

    ``generate`` prepares its inputs and an empty cache as ever and calls the model with the whole
    prompt. This fills that cache and passes on only the tokens that are left. So whatever
    ``generate`` does around it, it does as without a cache.

    Args:
        runner: The model.
        prefiller: Computes prompts.
        store: What is cached.
        cache_salt: Prompts of different salts never match.
        eos_token_ids: Tokens that end an answer.
        follows_rows: A row of the batch goes on with its own tokens, as in sampling; in beam
            search rows change places, and only prompts are cached.
    """

    def __init__(
        self,
        runner: ModelRunner,
        prefiller: Prefiller,
        store: PrefixStore,
        *,
        cache_salt: ExtraKey,
        eos_token_ids: Sequence[int],
        follows_rows: bool,
    ) -> None:
        self._runner = runner
        self._prefiller = prefiller
        self._store = store
        self._cache_salt = cache_salt
        self._eos = frozenset(eos_token_ids)
        self._follows_rows = follows_rows
        self._thread = threading.get_ident()
        self._rows: list[_Row] = []
        self._prefills: dict[tuple[int, ...], Prefill] = {}
        self._cache: Any = None
        self._ids: torch.Tensor | None = None

    def __enter__(self) -> Generation:
        """Arms the first forward."""
        self._hook = self._runner.model.register_forward_pre_hook(
            self._before_first_forward, with_kwargs=True
        )
        return self

    def __exit__(self, *exception: object) -> None:
        """Disarms it, and lets go of the prompts."""
        self._hook.remove()
        for prefill in self._prefills.values():
            prefill.record.close()

    def watch(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Keeps states at block boundaries; a stopping criterion that stops nothing.

        Args:
            input_ids: [rows, length] int64: all tokens so far, of which the last has not gone
                through the model.
            scores: Not read.

        Returns:
            [rows] bool, False.
        """
        is_first, self._ids = self._ids is None, input_ids
        if is_first:
            self._publish_prompts()
        elif self._follows_rows:
            self._keep_boundaries()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def publish(self) -> None:
        """Makes the answers findable, once ``generate`` has returned."""
        if self._ids is None or not self._follows_rows:
            return
        memory = self._memory()
        for index, row in enumerate(self._rows):
            self._publish_answer(index, row, memory.row(index, row.prompt.padding))

    def _before_first_forward(
        self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if threading.get_ident() != self._thread:
            return None
        self._hook.remove()
        self._cache = kwargs.get(self._runner.cache_name)
        prompts = split_rows(kwargs["input_ids"], kwargs.get("attention_mask"))
        start, layout = self._fill(prompts), self._store.layout
        kwargs = {**kwargs, "input_ids": kwargs["input_ids"][:, start:]}
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"][..., start:]
        # Without padding, or without attention, the mask says nothing about the tokens left.
        if not (layout.has_attention and any(prompt.padding for prompt in prompts)):
            kwargs.pop("attention_mask", None)
        self._store.counters.computed_tokens += sum(
            len(prompt.tokens) + prompt.padding - start for prompt in prompts
        )
        return args, kwargs

    def _fill(self, prompts: Sequence[Prompt]) -> int:
        """Fills the cache; returns how many columns of the batch are in it."""
        if len(prompts) == 1 and not prompts[0].padding:
            return self._fill_one(prompts[0])
        for prompt in prompts:
            self._prefill_but_last(prompt.tokens)
        layout = self._store.layout
        prefills = [self._prefills[prompt.tokens] for prompt in prompts]
        memories = [
            read_layers(prefill.cache, layout.layers, len(prefill.tokens) - 1)
            if len(prefill.tokens) > 1
            else layout.initial
            for prefill in prefills
        ]
        num_columns = prompts[0].padding + len(prompts[0].tokens)
        batch = stack_memories(memories, num_columns - 1)
        if batch.num_tokens:
            write_layers(self._cache, layout.layers, batch)
        for prefill in prefills:
            prefill.cache = None
        self._rows = [_Row(*pair) for pair in zip(prompts, prefills, strict=True)]
        return batch.num_tokens

    def _fill_one(self, prompt: Prompt) -> int:
        """All but the last segment, which ``generate``'s own forward computes."""
        tokens = prompt.tokens
        prefill = self._prefiller.begin(
            tokens, self._cache, end=len(tokens), min_computed=1, cache_salt=self._cache_salt
        )
        self._prefills[tokens] = prefill
        self._prefiller.run(prefill, prefill.segments[:-1])
        self._rows = [_Row(prompt, prefill)]
        return prefill.segments[-1].start

    def _prefill_but_last(self, tokens: tuple[int, ...]) -> None:
        if tokens in self._prefills:
            return
        prefill = self._prefiller.begin(
            tokens,
            self._runner.new_cache(),
            end=len(tokens) - 1,
            min_computed=1,
            cache_salt=self._cache_salt,
        )
        self._prefills[tokens] = prefill
        self._prefiller.run(prefill, prefill.segments)

    def _memory(self) -> SequenceMemory:
        """Everything in the cache of the batch now."""
        assert self._ids is not None
        return read_layers(self._cache, self._store.layout.layers, self._ids.shape[1] - 1)

    def _publish_prompts(self) -> None:
        """Caches what the first forward completed, before any row goes its own way."""
        memory = self._memory()
        for index, row in enumerate(self._rows):
            num_tokens = len(row.prompt.tokens)
            ends_block = num_tokens % self._store.layout.block_size_tokens == 0
            row.prefill.record.publish(
                memory.row(index, row.prompt.padding), num_tokens, has_state=ends_block
            )

    def _keep_boundaries(self) -> None:
        """Copies the states of rows that have just completed a block."""
        assert self._ids is not None
        size, num_columns = self._store.layout.block_size_tokens, self._ids.shape[1] - 1
        for index, row in enumerate(self._rows):
            num_tokens = num_columns - row.prompt.padding
            if num_tokens % size:
                continue
            if len(self._answer(index, row)) == num_tokens - len(row.prompt.tokens):
                kept = self._memory().row(index, row.prompt.padding)
                row.boundary = num_tokens
                row.states = [state.clone() for state in kept.states]
                row.windows = [window.clone() for window in kept.windows]

    def _publish_answer(self, index: int, row: _Row, memory: SequenceMemory) -> None:
        answer = self._answer(index, row)
        self._store.counters.computed_tokens += len(answer)
        record = row.prefill.record.fork()
        try:
            record.chain.append(answer)
            if row.boundary:
                kept = replace(memory, states=row.states, windows=row.windows)
                record.publish(kept, row.boundary, has_state=True)
            record.publish(memory, len(row.prompt.tokens) + len(answer), has_state=False)
        finally:
            record.close()

    def _answer(self, index: int, row: _Row) -> list[int]:
        """The tokens of a row that it generated and that went through the model, to its end."""
        assert self._ids is not None
        start = row.prompt.padding + len(row.prompt.tokens)
        tokens: list[int] = self._ids[index, start:-1].tolist()
        ends = [position for position, token in enumerate(tokens, 1) if token in self._eos]
        return tokens[: ends[0]] if ends else tokens


def remove_hooks(model: Any, store: PrefixStore) -> None:
    """Takes from a model the hooks of generations that broke off before they could do it.

    Args:
        model: A model of PyTorch.
        store: Whose generations; those of another cache of the same model are left alone.
    """
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = getattr(model, name)
        for key, hook in list(hooks.items()):
            # What keeps the compiler out of a hook wraps it.
            wrapped = getattr(hook, "__wrapped__", hook)
            owner = getattr(wrapped, "__self__", None)
            if isinstance(owner, Generation) and owner._store is store:
                del hooks[key]
                getattr(model, f"{name}_with_kwargs").pop(key, None)
