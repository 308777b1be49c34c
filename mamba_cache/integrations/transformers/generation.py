"""One call of ``generate``: it resumes from the cached prefix and caches its own tokens."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache.errors import ModelChangedError
from mamba_cache.integrations.transformers.batching.answers import AnswerSettings, BatchRequest
from mamba_cache.integrations.transformers.batching.batcher import Batcher
from mamba_cache.integrations.transformers.fingerprint import BypassReason
from mamba_cache.integrations.transformers.layers import (
    SequenceMemory,
    read_layers,
    stack_memories,
)
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.integrations.transformers.options import ServedOptions
from mamba_cache.integrations.transformers.prefill import Prefiller
from mamba_cache.integrations.transformers.prompts import Prompt, split_rows
from mamba_cache.integrations.transformers.replacement import intercepted, replaced
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.integrations.transformers.store import PrefixStore, SequenceRecord

__all__ = ["Generation"]


@dataclass(slots=True)
class _Row:
    """One row of the batch that generates."""

    prompt: Prompt
    record: SequenceRecord  # rows of the same prompt share it
    # States and windows at the answer's last block boundary so far.
    kept: SequenceMemory | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """Intercept the model's forwards in one call of ``generate``, and record the new tokens.

    ``generate`` gets an empty cache object and calls the model with that object and the whole
    prompt. All else in ``generate`` works as without a prefix cache.
    Other callers of the model are recognised because they pass a different cache object.

    If ``find_batcher`` returns a batcher that has room for the rows and replays their decode steps,
    all forwards are steps of this batch, and the cache object stays empty. Otherwise the first
    forward restores the cached prefix into it and computes the rest; later ones are the model's.

    Answers are cached if ``keeps_decoded`` is set and each row continues its own tokens: in beam
    search rows change places.
    """

    runner: ModelRunner
    prefiller: Prefiller
    store: PrefixStore
    fields: dict[str, Any]  # fields of each prompt's ``Request``
    checkpoints: Sequence[Sequence[int]]
    served: ServedOptions
    keeps_decoded: bool
    variant: str | None
    # None: the options exclude a batch.
    find_batcher: Callable[[], Batcher | None] | None = None
    has_streamer: bool = False
    cache: Any = None  # the cache object for ``generate``
    bypass: BypassReason | None = None  # why the call neither used the cache nor filled it
    _batcher: Batcher | None = None
    _is_batched: bool = False  # the forwards are steps of a batch
    _rows: list[_Row] = field(default_factory=list)
    _ends: set[int] = field(default_factory=set)  # columns of the rows' block ends, mod block size
    _records: dict[bytes, SequenceRecord] = field(default_factory=dict)
    _ids: torch.Tensor | None = None
    _columns: list[torch.Tensor] = field(default_factory=list)
    _answers: list[list[int]] = field(default_factory=list)
    _keeps_answers: bool = False
    _undo: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.cache = self.runner.new_cache()
        is_exact = self.prefiller.min_tokens == 1  # single tokens are computed as prompts are
        self._keeps_answers = self.served.follows_rows and self.keeps_decoded and is_exact

    def __enter__(self) -> Generation:
        """Intercept the first forward."""
        self.runner.fingerprint.look_ahead()
        self._intercept()
        return self

    def _intercept(self) -> None:
        model, store = self.runner.model, self.store
        self._undo = ExitStack()
        self._undo.enter_context(intercepted(store, model, "forward", self.forward))
        if self.runner.is_compiled:
            # Each new prompt length would compile the model again.
            self._undo.enter_context(replaced(store, model, "_compiled_call_impl", lambda _: None))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop intercepting and release the prompts; after an exception the guard releases them."""
        self._undo.close()
        if error is None:
            for record in self._records.values():
                record.close()

    def watch(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Keep states at block boundaries: this is a stopping criterion that stops nothing.

        ``input_ids`` are [rows, length] int64. The model has not computed their last column yet.
        """
        self._ids = input_ids
        self._keeps_answers &= len(input_ids) == len(self._rows)  # else the ids are of other rows
        if self._keeps_answers:
            size, num_columns = self.store.layout.block_size_tokens, input_ids.shape[1] - 1
            if self._columns and num_columns % size in self._ends:
                self._keep_boundaries()
            # A copy, because processors and criteria may write to these ids.
            self._columns.append(input_ids[:, -1].clone())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def publish(self, output: Any) -> None:
        """Make the answers findable, once ``generate`` has returned ``output``."""
        self._undo.close()  # a replaced forward would make the fingerprint read the model again
        if self._is_batched:
            assert self._batcher is not None
            self._take_rows()
            self._batcher.end_rows()
            if self.has_streamer and not self.runner.fingerprint.is_current():
                raise ModelChangedError(
                    "the model was changed while generate ran, by a streamer: call reset(), "
                    "because cached prefixes may come from both models"
                )
            return
        if self._ids is None or not self._keeps_answers:
            return
        # Where the host does not wait for each token, as on MPS, ``generate`` may drop the last.
        kept = (output if torch.is_tensor(output) else output.sequences).shape[1]
        del self._columns[len(self._columns) - (self._ids.shape[1] - kept) :]
        self._ids = self._ids[:, :kept]
        if len(self._columns) < 2:
            return  # the model has not computed an answer's last token
        fingerprint = self.runner.fingerprint
        if not fingerprint.is_current() or fingerprint.has_new_hooks():
            return  # a streamer or a processor changed the model, maybe for some tokens only
        self._read_columns(len(self._columns) - 1)
        returned = self._ids[:, self._ids.shape[1] - len(self._columns) : -1].tolist()
        if returned != self._answers:
            return  # a processor or criterion changed the ids after the model had computed them
        memory = self._memory()
        for index, row in enumerate(self._rows):
            self._publish_answer(index, row, memory.row(index, row.prompt.padding))

    def forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the rest of the prompts, or the next tokens, in the place of ``forward``.

        Arguments and result are those of ``forward``, with logits of the last token at least.
        """
        if kwargs.get(self.runner.cache_name) is not self.cache:  # a call by another caller
            return forward(*args, **kwargs)
        if self._is_batched:
            self._take_rows()
            with self._within(forward):
                return self._compute_rows()
        self._undo.close()  # the fingerprint must see the model as it is
        prompts = split_rows(kwargs["input_ids"], kwargs.get("attention_mask"))
        # Not earlier: a streamer gets the prompt before this forward and may change the model. And
        # once the checksums are enqueued, reading the token ids would wait for them.
        fingerprint = self.runner.fingerprint
        options: dict[str, Any] = {"may_differ": self.store.is_empty, "variant": self.variant}
        if prompts is not None and self.find_batcher is not None and fingerprint.assume(**options):
            try:
                if (output := self._compute_batch(forward, prompts)) is not None:
                    return output
            except Exception:
                if fingerprint.is_current():
                    raise
                self._drop_batch()  # the settings have changed, which may be why the batch failed
        fingerprint.begin(**options, has_looked=True)
        if prompts is None or fingerprint.foreign is not None:
            self.bypass = fingerprint.foreign[0] if fingerprint.foreign else "hidden tokens"
            self._keeps_answers = False
            return forward(**kwargs)
        if (output := self._compute_batch(forward, prompts)) is not None:
            return output
        with self._within(forward):
            return self._compute_prompts(prompts)

    def _within(self, forward: Callable[..., Any]) -> AbstractContextManager[None]:
        """Have the runner call ``forward`` in a ``with`` block, without the model's hooks.

        The block runs inside the model's own call, which runs the hooks.
        """
        return replaced(self.store, self.runner, "call", lambda _: forward)

    def _compute_batch(self, forward: Callable[..., Any], prompts: Sequence[Prompt]) -> Any:
        """Compute the prompts as a batch; return None if that is slower or out of memory."""
        try:
            with self._within(forward):
                self._is_batched = self._begin_batch(prompts)
                if self._is_batched:
                    output = self._compute_rows()
                    self._intercept()  # for the forwards that follow
                    return output
                self.find_batcher = None  # do not ask again in this call
        except torch.OutOfMemoryError:  # the prefiller can compute a prompt in smaller parts
            self._drop_batch()
            self.find_batcher = None
        return None

    def _drop_batch(self) -> None:
        self._is_batched = False
        if self._batcher is not None:
            self._batcher.drop()

    def _begin_batch(self, prompts: Sequence[Prompt]) -> bool:
        """Submit the rows to a batch if that is faster; return whether it is.

        Of several rows, the last prompt tokens are computed together, after all other tokens.
        """
        is_single = len(prompts) == 1
        if self.find_batcher is None or self.runner.fingerprint.has_foreign:
            return False
        can_wait = min(len(prompt.tokens) for prompt in prompts) > 1
        if not is_single and (self.prefiller.min_tokens > 1 or not can_wait):
            return False
        max_length = self.served.max_length  # maximum columns of prompts and answers
        if self.served.max_new_tokens is not None:
            max_length = prompts[0].padding + len(prompts[0].tokens) + self.served.max_new_tokens
        self._batcher = batcher = self.find_batcher()
        if batcher is None or not self._is_quicker(batcher, prompts, max_length):
            return False
        counts, named = Counter(prompt.key for prompt in prompts), self._checkpoints_of(prompts)
        made: dict[bytes, Iterator[BatchRequest]] = {}
        for prompt in prompts:
            if prompt.key in made:
                continue
            tokens = prompt.tokens if is_single else prompt.tokens[:-1]
            settings = AnswerSettings(
                max_new_tokens=max_length,
                num_answers=counts[prompt.key],
                eos_token_ids=frozenset(self.served.eos_token_ids),
                is_greedy=True,
            )
            requests = batcher.submit(
                "generate",
                tokens,
                settings,
                seed=0,
                first_token=None if is_single else int(prompt.tokens[-1]),
                checkpoint_positions=[min(p, len(tokens)) for p in sorted(named[prompt.key])],
                **self.fields,
            )
            made[prompt.key] = iter(requests)
        batcher.begin_rows([next(made[prompt.key]) for prompt in prompts])
        return True

    def _is_quicker(self, batcher: Batcher, prompts: Sequence[Prompt], max_length: int) -> bool:
        """Return whether a batch has room for the rows and CUDA graphs for their decode steps.

        If more uncached tokens are left than fit in one step, the model's own forward is faster.
        """
        lengths = [max_length - prompt.padding for prompt in prompts]
        own = {prompt.key: prompt.tokens for prompt in prompts}.values()
        chunk_tokens = batcher.chunk_tokens
        if not batcher.has_room(lengths) or (
            sum(map(len, own)) > chunk_tokens and self._num_uncached(own) > chunk_tokens
        ):
            return False
        batcher.configure()
        batcher.begin()
        batcher.warm_up(len(prompts))
        return batcher.replays(len(prompts))

    def _num_uncached(self, prompts: Iterable[npt.NDArray[np.int32]]) -> int:
        """Return the number of uncached tokens of prompts."""
        count, key = 0, self.runner.fingerprint.key
        for tokens in prompts:
            record = self.store.open(tokens, key, min_computed=1, **self.fields)
            count += len(tokens) - record.match.skip_tokens
            record.close()
        return count

    def _compute_rows(self) -> Any:
        """Compute the batch; return the model's output."""
        assert self._batcher is not None
        return self._output(self._batcher.compute_rows())

    def _output(self, logits: torch.Tensor) -> Any:
        """Return [rows, vocabulary] logits as the model's output."""
        kind = transformers().modeling_outputs.CausalLMOutputWithPast
        output = kind(logits=logits[:, None])
        output[self.runner.cache_name] = self.cache
        return output

    def _take_rows(self) -> None:
        """Pass each row's newest token to the batch."""
        assert self._batcher is not None
        assert self._ids is not None
        self._batcher.take_rows(self._ids[:, -1].tolist())

    def _compute_prompts(self, prompts: Sequence[Prompt]) -> Any:
        """Compute each different prompt by itself; return the model's output.

        Several rows, or one padded row, are then stacked into the call's cache object.
        """
        layout, named = self.store.layout, self._checkpoints_of(prompts)
        is_stacked = len(prompts) > 1 or prompts[0].padding > 0
        memories: dict[bytes, SequenceMemory] = {}
        logits: dict[bytes, torch.Tensor] = {}
        for prompt in prompts:
            if prompt.key in self._records:
                continue
            cache = self.runner.new_cache() if is_stacked else self.cache
            self._records[prompt.key], logits[prompt.key] = self.prefiller.compute(
                prompt.tokens,
                cache,
                needs_logits=True,
                checkpoint_positions=named[prompt.key],
                **self.fields,
            )
            if is_stacked:
                memories[prompt.key] = read_layers(cache, layout.layers, len(prompt.tokens))
        self._rows = [_Row(each, self._records[each.key]) for each in prompts]
        self._ends = {each.padding % layout.block_size_tokens for each in prompts}
        if is_stacked:
            num_columns = prompts[0].padding + len(prompts[0].tokens)
            batch = stack_memories([memories[each.key] for each in prompts], num_columns)
            layout.fill(self.cache, batch)
        return self._output(torch.cat([logits[each.key] for each in prompts]))

    def _checkpoints_of(self, prompts: Sequence[Prompt]) -> dict[bytes, set[int]]:
        """Return the named checkpoints by prompt; ``generate`` repeats a row for each answer."""
        named: dict[bytes, set[int]] = defaultdict(set)
        for row, checkpoints in enumerate(self.checkpoints):
            named[prompts[row * len(prompts) // len(self.checkpoints)].key].update(checkpoints)
        return named

    def _memory(self) -> SequenceMemory:
        """Return the present contents of the call's cache object."""
        assert self._ids is not None
        return read_layers(self.cache, self.store.layout.layers, self._ids.shape[1] - 1)

    def _keep_boundaries(self) -> None:
        """Copy the states of rows that have just completed a block, in place of older copies."""
        assert self._ids is not None
        size, num_columns = self.store.layout.block_size_tokens, self._ids.shape[1] - 1
        for index, row in enumerate(self._rows):
            num_tokens = num_columns - row.prompt.padding
            if num_tokens % size:
                continue
            is_open = len(self._rows) == 1  # the call ends when its only row ends
            if not is_open:
                self._read_columns(len(self._columns))
                is_open = len(self._answer(index)) == num_tokens - len(row.prompt.tokens)
            if is_open:
                row.kept = self._memory().row(index, row.prompt.padding).copy_states()

    def _publish_answer(self, index: int, row: _Row, memory: SequenceMemory) -> None:
        answer = self._answer(index)
        self.store.counters["computed_tokens"] += len(answer)
        # A token that ``generate`` dropped may have completed the block.
        if row.kept is None or row.kept.num_tokens > len(row.prompt.tokens) + len(answer):
            return
        record = row.record.fork(answer, row.kept.num_tokens)
        record.publish(replace(row.kept, tokens=memory.tokens))
        record.close()

    def _read_columns(self, end: int) -> None:
        """Copy the generated tokens of the first ``end`` columns to the host."""
        if not self._answers:
            self._answers = [[] for _ in self._rows]
        new = self._columns[len(self._answers[0]) : end]
        if new:
            for answer, tokens in zip(self._answers, torch.stack(new, 1).tolist(), strict=True):
                answer.extend(tokens)

    def _answer(self, index: int) -> list[int]:
        """Return a row's generated tokens that the model has computed, up to its first EOS."""
        tokens, eos = self._answers[index], self.served.eos_token_ids
        ends = [position for position, token in enumerate(tokens, 1) if token in eos]
        return tokens[: ends[0]] if ends else tokens
