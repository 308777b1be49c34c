"""One call of ``generate``: its first forward goes on from the cache, and what it adds is kept."""

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
    # States and windows at the last block boundary since its prompt's end.
    kept: SequenceMemory | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """Stands in the way of the model's forwards, and watches the tokens that follow.

    ``generate`` is handed an empty cache, prepares its inputs as ever and calls the model with that
    cache and the whole prompt. So whatever ``generate`` does around it, it does as without a cache.
    Other callers of the model are recognised because they pass a different cache object.

    All forwards are steps of a batch, if ``find_batcher`` has one, with room for the rows, that
    replays their decode steps; the cache stays empty. Otherwise this fills the cache in the first
    forward and passes on only the tokens that are left, and later forwards are the model's own.

    Answers are cached if each row goes on with its own tokens (in beam search rows change places),
    and if what is computed token by token is to be kept, ``keeps_decoded``.
    """

    runner: ModelRunner
    prefiller: Prefiller
    store: PrefixStore
    fields: dict[str, Any]  # of the prompts, as ``Request`` has them
    checkpoints: Sequence[Sequence[int]]
    served: ServedOptions
    keeps_decoded: bool
    variant: str | None
    # None: no batch can compute what the options ask for.
    find_batcher: Callable[[], Batcher | None] | None = None
    has_streamer: bool = False
    cache: Any = None  # that ``generate`` is to use
    bypass: BypassReason | None = None  # why nothing was looked up or is kept
    _batcher: Batcher | None = None
    _is_batched: bool = False  # the forwards are steps of a batch
    _rows: list[_Row] = field(default_factory=list)
    _ends: set[int] = field(default_factory=set)  # columns of rows' block ends, modulo a block
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
        """Arm the first forward."""
        self.runner.fingerprint.look_ahead()
        self._arm()
        return self

    def _arm(self) -> None:
        model, store = self.runner.model, self.store
        self._undo = ExitStack()
        self._undo.enter_context(intercepted(store, model, "forward", self.forward))
        if self.runner.is_compiled:
            # Prompts have any length, and each new one would be compiled for itself.
            self._undo.enter_context(replaced(store, model, "_compiled_call_impl", lambda _: None))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Disarm it, and let go of the prompts; of a call that raised the guard does that."""
        self._undo.close()
        if error is None:
            for record in self._records.values():
                record.close()

    def watch(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Keep states at block boundaries; a stopping criterion that stops nothing.

        Of ``input_ids``, [rows, length] int64, the last token has not gone through the model.
        """
        self._ids = input_ids
        self._keeps_answers &= len(input_ids) == len(self._rows)  # else they are not these rows
        if self._keeps_answers:
            size, num_columns = self.store.layout.block_size_tokens, input_ids.shape[1] - 1
            if self._columns and num_columns % size in self._ends:
                self._keep_boundaries()
            # A copy: processors and criteria are given these ids, and may write to them.
            self._columns.append(input_ids[:, -1].clone())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def publish(self, output: Any) -> None:
        """Make the answers findable, once ``generate`` has returned ``output``."""
        self._undo.close()  # a model that is replaced in part would be read anew
        if self._is_batched:
            assert self._batcher is not None
            self._take_rows()
            self._batcher.end_rows()
            if self.has_streamer and not self.runner.fingerprint.is_current():
                raise ModelChangedError(
                    "the model was changed while generate ran, by a streamer: call reset(), for "
                    "what is cached may come from both models"
                )
            return
        if self._ids is None or not self._keeps_answers:
            return
        # Where the host does not wait for each token, as on MPS, the last one may be taken back.
        kept = (output if torch.is_tensor(output) else output.sequences).shape[1]
        del self._columns[len(self._columns) - (self._ids.shape[1] - kept) :]
        self._ids = self._ids[:, :kept]
        if len(self._columns) < 2:
            return  # the last token of an answer has not gone through the model
        fingerprint = self.runner.fingerprint
        if not fingerprint.is_current() or fingerprint.has_new_hooks():
            return  # a streamer or a processor changed the model, maybe for some tokens only
        self._read_columns(len(self._columns) - 1)
        returned = self._ids[:, self._ids.shape[1] - len(self._columns) : -1].tolist()
        if returned != self._answers:
            return  # somebody wrote to the ids: it is not they that went through the model
        memory = self._memory()
        for index, row in enumerate(self._rows):
            self._publish_answer(index, row, memory.row(index, row.prompt.padding))

    def forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute what is left of the prompts or the next tokens, in the place of ``forward``.

        It is called as ``forward`` is, and returns what that does, of the last token at least.
        """
        if kwargs.get(self.runner.cache_name) is not self.cache:  # another caller's
            return forward(*args, **kwargs)
        if self._is_batched:
            self._take_rows()
            with self._within(forward):
                return self._computed()
        self._undo.close()  # from here on the model is as it was, and may be looked at
        prompts = split_rows(kwargs["input_ids"], kwargs.get("attention_mask"))
        # Only now: a streamer hears the prompt before this, and may do anything to the model. And
        # not before the tokens are read, for which the host would wait behind the checksums.
        fingerprint = self.runner.fingerprint
        options: dict[str, Any] = {"may_differ": self.store.is_empty, "variant": self.variant}
        if prompts is not None and self.find_batcher is not None and fingerprint.assume(**options):
            try:
                if (output := self._compute_batch(forward, prompts)) is not None:
                    return output
            except Exception:
                if fingerprint.is_current():
                    raise
                self._drop_batch()  # other settings, under which it may have failed by that alone
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
        """Compute with ``forward`` alone in a ``with`` block, which the model's call is in.

        The hooks of that call have seen the prompt already, and will see what it returns.
        """
        return replaced(self.store, self.runner, "call", lambda _: forward)

    def _compute_batch(self, forward: Callable[..., Any], prompts: Sequence[Prompt]) -> Any:
        """Compute the prompts as a batch; None if that is not quicker or takes too much memory."""
        try:
            with self._within(forward):
                self._is_batched = self._begin_batch(prompts)
                if self._is_batched:
                    output = self._computed()
                    self._arm()  # for the forwards that follow
                    return output
                self.find_batcher = None  # the call is not asked about again
        except torch.OutOfMemoryError:  # in the loop a prompt may be computed in smaller parts
            self._drop_batch()
            self.find_batcher = None
        return None

    def _drop_batch(self) -> None:
        self._is_batched = False
        if self._batcher is not None:
            self._batcher.drop()

    def _begin_batch(self, prompts: Sequence[Prompt]) -> bool:
        """Begin to compute the rows as a batch, if that is quicker; return whether it is.

        Rows wait for each other before their last tokens, which are computed together.
        """
        is_single = len(prompts) == 1
        if self.find_batcher is None or self.runner.fingerprint.has_foreign:
            return False
        can_wait = min(len(prompt.tokens) for prompt in prompts) > 1
        if not is_single and (self.prefiller.min_tokens > 1 or not can_wait):
            return False
        most = self.served.max_length  # columns of prompts and answers
        if self.served.max_new_tokens is not None:
            most = prompts[0].padding + len(prompts[0].tokens) + self.served.max_new_tokens
        self._batcher = batcher = self.find_batcher()
        if batcher is None or not self._is_quicker(batcher, prompts, most):
            return False
        counts, named = Counter(prompt.key for prompt in prompts), self._checkpoints_of(prompts)
        made: dict[bytes, Iterator[BatchRequest]] = {}
        for prompt in prompts:
            if prompt.key in made:
                continue
            tokens = prompt.tokens if is_single else prompt.tokens[:-1]
            settings = AnswerSettings(
                max_new_tokens=most,
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
        """Return whether a batch has room for the rows, and graphs for what they decode.

        Of more new tokens than a step takes the library's own forward is the quicker one.
        """
        lengths = [max_length - prompt.padding for prompt in prompts]
        own = {prompt.key: prompt.tokens for prompt in prompts}.values()
        most = batcher.chunk_tokens
        if not batcher.has_room(lengths) or (
            sum(map(len, own)) > most and self._num_left(own) > most
        ):
            return False
        batcher.configure()
        batcher.begin()
        batcher.warm_up(len(prompts))
        return batcher.replays(len(prompts))

    def _num_left(self, prompts: Iterable[npt.NDArray[np.int32]]) -> int:
        """Count the tokens of prompts that are not cached."""
        count, key = 0, self.runner.fingerprint.key
        for tokens in prompts:
            record = self.store.open(tokens, key, min_computed=1, **self.fields)
            count += len(tokens) - record.match.skip_tokens
            record.close()
        return count

    def _computed(self) -> Any:
        """Compute the batch; return what the model would."""
        assert self._batcher is not None
        return self._output(self._batcher.compute_rows())

    def _output(self, logits: torch.Tensor) -> Any:
        """Return what the model would, with [rows, vocabulary] logits."""
        kind = transformers().modeling_outputs.CausalLMOutputWithPast
        output = kind(logits=logits[:, None])
        output[self.runner.cache_name] = self.cache
        return output

    def _take_rows(self) -> None:
        """Hand the token of each row to the batch."""
        assert self._batcher is not None
        assert self._ids is not None
        self._batcher.take_rows(self._ids[:, -1].tolist())

    def _compute_prompts(self, prompts: Sequence[Prompt]) -> Any:
        """Compute each prompt by itself; return what the model would.

        Several rows, or one that is padded, are stacked in the call's cache then.
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
        """Return what was named, by prompt; ``generate`` repeats a row for each of its answers."""
        named: dict[bytes, set[int]] = defaultdict(set)
        for row, checkpoints in enumerate(self.checkpoints):
            named[prompts[row * len(prompts) // len(self.checkpoints)].key].update(checkpoints)
        return named

    def _memory(self) -> SequenceMemory:
        """Everything in the cache of the batch now."""
        assert self._ids is not None
        return read_layers(self.cache, self.store.layout.layers, self._ids.shape[1] - 1)

    def _keep_boundaries(self) -> None:
        """Copy the states of rows that have just completed a block.

        A later boundary's states take the place of an earlier one's.
        """
        assert self._ids is not None
        size, num_columns = self.store.layout.block_size_tokens, self._ids.shape[1] - 1
        for index, row in enumerate(self._rows):
            num_tokens = num_columns - row.prompt.padding
            if num_tokens % size:
                continue
            is_open = len(self._rows) == 1  # one row ends with the call
            if not is_open:
                self._read_columns(len(self._columns))
                is_open = len(self._answer(index)) == num_tokens - len(row.prompt.tokens)
            if is_open:
                row.kept = self._memory().row(index, row.prompt.padding).copy_states()

    def _publish_answer(self, index: int, row: _Row, memory: SequenceMemory) -> None:
        answer = self._answer(index)
        self.store.counters["computed_tokens"] += len(answer)
        # A token that was taken back may have completed the block.
        if row.kept is None or row.kept.num_tokens > len(row.prompt.tokens) + len(answer):
            return
        record = row.record.fork(answer, row.kept.num_tokens)
        record.publish(replace(row.kept, tokens=memory.tokens))
        record.close()

    def _read_columns(self, end: int) -> None:
        """Bring the generated tokens of the first ``end`` columns to the host."""
        if not self._answers:
            self._answers = [[] for _ in self._rows]
        new = self._columns[len(self._answers[0]) : end]
        if new:
            for answer, tokens in zip(self._answers, torch.stack(new, 1).tolist(), strict=True):
                answer.extend(tokens)

    def _answer(self, index: int) -> list[int]:
        """Return the tokens of a row that were generated and went through the model, to its end."""
        tokens, eos = self._answers[index], self.served.eos_token_ids
        ends = [position for position, token in enumerate(tokens, 1) if token in eos]
        return tokens[: ends[0]] if ends else tokens
