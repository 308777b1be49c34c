"""The reference engine: runs requests through a model, with the protocol that models follow."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from operator import eq
from typing import Any, Literal, Protocol, cast

import torch

from mamba_cache._checks import check_hashable, check_int, check_kind
from mamba_cache._guard import CallGuard, guarded, weak_callback
from mamba_cache.config import CacheConfig
from mamba_cache.context import (
    Admission,
    DynamicInferenceContext,
    HitToVerify,
    PrefixContent,
    Request,
    Step,
)
from mamba_cache.context.scheduler import QueuedRequest, Scheduler
from mamba_cache.errors import (
    CapacityError,
    InvalidArgumentError,
    MambaCacheError,
    StepOrderError,
)
from mamba_cache.metadata import StepMetadata
from mamba_cache.reference.drafting import Drafter, NgramDrafter
from mamba_cache.reference.sampling import SamplingParams, sample, verify

__all__ = [
    "Completion",
    "Engine",
    "LanguageModel",
    "TokenEvent",
    "compute_prefix",
]

_PREFETCH_SECONDS = 5.0
"""Maximum wait of a queued request for entries of its prompt from disk and store."""


class LanguageModel(Protocol):
    """A hybrid model that computes one step of the context."""

    @property
    def config(self) -> Any:
        """The model's shape, with these attributes.

        ``vocab_size``; ``ssm_chunk_size``: tokens of the longest chunk that the model's scan takes;
        ``state_spec(dtype)`` and ``kv_spec(dtype)``: the contents of a slot and of a KV block for
        weights of ``dtype``.
        """

    dtype: torch.dtype
    """Dtype of the weights."""
    device: torch.device
    """Device of the model."""

    def forward(self, metadata: StepMetadata, caches: Any) -> torch.Tensor:
        """Compute a step: advance live states, fill the KV cache, write checkpoints.

        Args:
            metadata: The step.
            caches: The ``DynamicInferenceContext``; a model documents the attributes that it reads.

        Returns:
            Logits [num_decode_tokens + num_prefills, vocab_size] of every token of the decoding
            requests and of each prefill's last token, in batch order.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of a request.

    Attributes:
        request_id: The request.
        tokens: The generated tokens.
        finish_reason: Why the request ended: "stop", it generated one of its stop tokens; "length",
            it reached ``max_new_tokens`` or the context's ``max_sequence_length``; "failed", it
            needs more memory than the cache has, even when it runs alone.
        error: The shortage that made the request fail, or None.
        ttft_seconds: Time from ``submit`` to the first token; None without a token.
        admission: The match at the request's first run; None if it never ran, or was forked.
        skipped_tokens: Prompt tokens that were not computed; for a fork, all prompt tokens.
        computed_tokens: Tokens computed before decoding. Tokens computed again after a preemption
            or an aborted step are counted again.
    """

    request_id: Hashable
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length", "failed"]
    error: CapacityError | None
    ttft_seconds: float | None
    admission: Admission | None
    skipped_tokens: int
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token of a request, or the end of one that failed.

    Attributes:
        request_id: The request.
        token: The token; None if the request failed.
        completion: The result of the request, in its last event.
    """

    request_id: Hashable
    token: int | None
    completion: Completion | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class _EngineRequest(QueuedRequest):
    """A request as the engine records it; the context has the rest."""

    sampling: SamplingParams
    submitted_at: float  # seconds of ``time.perf_counter``
    drafter: Drafter | None
    known: list[int]  # prompt and answer, for the drafter
    num_delivered: int = 0  # tokens of its answer with an event
    prefill_tokens: int = 0  # computed before decoding, repeated ones included
    admission: Admission | None = None  # match at its first run
    ttft_seconds: float | None = None

    def note_admission(self, admission: Admission) -> None:
        """Record the match at the request's first run, for ``Completion``."""
        if not self.prefill_tokens and not self.num_delivered:  # a fork has tokens but no prefill
            self.admission = admission


class Engine:
    """Runs requests through a model: continuous batching, prefix caching, speculative decoding.

    Example::

        model = HybridModel(HybridModelConfig(ssm_chunk_size=64))
        config = CacheConfig(
            num_kv_blocks=64, max_slots=16, block_size_tokens=128, ssm_chunk_size=64
        )
        engine = Engine(model, config)
        engine.submit(prompt_tokens, SamplingParams(max_new_tokens=32))
        for event in engine.stream():
            print(event.token)

    One thread may use an engine at a time. After an exception the step in flight is aborted,
    and its requests go on with the next step. After an exception while bookkeeping changed, every
    later call raises ``PoisonedError`` until ``reset``.

    Args:
        model: Computes the steps.
        config: Settings of the cache. ``max_tokens`` is the token budget of one step. The default
            ``vocab_size`` is the model's. ``num_speculative_tokens`` is the maximum number of
            drafts of a request that a step verifies; answers do not depend on drafts.
        max_wait_steps: Maximum number of steps that a queued request waits for a prefix that
            another request computes; 0: no wait.
        drafter: Creates the drafter of one request: a class or ``functools.partial``. Not called
            without ``num_speculative_tokens``.
        options: Further arguments of ``DynamicInferenceContext``.

    Attributes:
        context: The requests' memory and the cache; ``context.stats()`` returns their counts.
        decoding: Counts over the decoding steps: "steps", counted once per request; "tokens",
            generated in these steps; "drafted_tokens", verified; "accepted_tokens", drafts that
            were right.

    Raises:
        BudgetError: A budget is too small for one block, or for one slot.
        InvalidArgumentError: ``model`` is no ``LanguageModel``, ``config`` no ``CacheConfig``,
            ``max_wait_steps`` not an int >= 0, or the config's ``ssm_chunk_size`` or
            ``vocab_size`` is larger than the model's.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: CacheConfig,
        *,
        max_wait_steps: int = 64,
        drafter: Callable[[], Drafter] = NgramDrafter,
        **options: Any,
    ) -> None:
        check_kind("config", config, CacheConfig)
        if not hasattr(getattr(model, "config", None), "state_spec"):
            raise InvalidArgumentError(
                f"model must be a LanguageModel, got {type(model).__name__}; around a model of "
                "transformers goes integrations.transformers.PrefixCache"
            )
        self.context = DynamicInferenceContext(
            _fit(config, model.config),
            model.config.state_spec(model.dtype),
            model.config.kv_spec(model.dtype),
            device=model.device,
            **options,
        )
        self._model = model
        self._make_drafter = drafter if config.num_speculative_tokens else None
        self._scheduler: Scheduler[_EngineRequest] = Scheduler(
            self.context,
            max_wait_steps=check_int("max_wait_steps", max_wait_steps, minimum=0),
            prefetch_seconds=_PREFETCH_SECONDS,
            propose=weak_callback(self._propose_drafts) if config.num_speculative_tokens else None,
        )
        self.decoding = Counter[str]()
        self._ids = count()
        self._guard = CallGuard(self, take_back=self._scheduler.recover)
        self._events: deque[TokenEvent] = deque()  # not delivered yet

    @property
    def num_requests(self) -> int:
        """Requests that are not finished, or whose last event ``step`` has not returned yet."""
        return len(self._scheduler) + sum(e.completion is not None for e in self._events)

    def submit(
        self,
        prompt_tokens: Any,
        sampling: SamplingParams | None = None,
        *,
        n: int = 1,
        request_id: Hashable | None = None,
        **fields: Any,
    ) -> Hashable:
        """Queue a prompt.

        Args:
            prompt_tokens: Token ids, 1-D: a list, a numpy array or a torch tensor.
            sampling: How to choose tokens. Default: ``SamplingParams()``.
            n: Number of answers. The first is this request's. The others are further requests with
                ids ``(request_id, 1)`` to ``(request_id, n - 1)``; their seeds are higher by 1 to
                ``n - 1``. They fork the first request when its prompt is computed, if there is
                room; answers do not depend on the fork.
            request_id: The request's id. Default: a number.
            fields: Further fields of ``Request``, such as ``cache_salt``.

        Returns:
            The request's id.

        Raises:
            InvalidArgumentError: The prompt is empty or malformed, ``sampling`` has a wrong type,
                an id is not hashable or is in use, ``n`` is not an int >= 1, or ``n`` is above 1 at
                temperature 0, which makes all answers equal.
            SequenceLengthError: The prompt is longer than ``max_sequence_length``.
        """
        submitted_at = time.perf_counter()
        sampling = SamplingParams() if sampling is None else sampling
        check_kind("sampling", sampling, SamplingParams)
        check_int("n", n, minimum=1)
        if n > 1 and sampling.temperature == 0:
            raise InvalidArgumentError(
                f"at temperature 0 all answers are the same: n must be 1, got {n}"
            )
        check_hashable("a request id", request_id)
        if request_id is None:
            request_id = next(i for i in self._ids if i not in self._scheduler)
        request = Request(request_id=request_id, prompt_tokens=prompt_tokens, **fields)
        prepared, config = self.context.prepare(request), self.context.config
        reusable_tokens = max(0, len(prepared.tokens) - config.min_computed_tokens)
        made = [
            _EngineRequest(
                prepared=replace(prepared, request=replace(request, request_id=each_id)),
                sampling=replace(sampling, seed=sampling.seed + index),
                submitted_at=submitted_at,
                reusable_blocks=reusable_tokens // config.block_size_tokens,
                drafter=self._make_drafter() if self._make_drafter else None,
                known=prepared.tokens.tolist() if self._make_drafter else [],
            )
            for index, each_id in enumerate([request_id, *((request_id, i) for i in range(1, n))])
        ]
        made[0].forks = made[1:]
        for fork in made[1:]:
            fork.fork_of = made[0]
        self._add(made)
        return request_id

    def step(self) -> list[TokenEvent]:
        """Compute one step for all requests that fit into the step.

        If the model raises, or no token can be sampled from its logits, the step is aborted and the
        exception reaches the caller. The step's requests resume with the next step.

        Returns:
            The sampled tokens, in order for each request, and the ends of requests that failed.
            Empty while prompts are being computed, and without requests.

        Raises:
            InvalidArgumentError: No token can be sampled from the logits; see ``sample``.
            ConcurrentUseError: Another thread's call is running.
            PoisonedError: A change was interrupted, and ``reset`` was not called since.
        """
        self._advance()
        events = list(self._events)
        self._events.clear()
        return events

    def stream(self) -> Iterator[TokenEvent]:
        """Step until no request is left. If the caller stops early, ``step`` returns the rest.

        Yields:
            Every event.
        """
        while self.num_requests:
            self._advance()
            while self._events:
                yield self._events.popleft()

    def generate(
        self, prompts: Iterable[Any], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Run prompts to completion. After an exception no prompt stays in the engine.

        Args:
            prompts: Prompts as for ``submit``.
            sampling: How to choose the tokens of all prompts.

        Returns:
            The result of each prompt, in order. If a prompt did not fit, its ``error`` is set.

        Raises:
            StepOrderError: Other requests are not finished; their events would be lost.
            InvalidArgumentError: ``prompts`` is not iterable, or a prompt is empty or malformed.
            SequenceLengthError: A prompt is longer than ``max_sequence_length``.
        """
        if self.num_requests:
            raise StepOrderError(
                f"generate needs an engine without requests, this one has {self.num_requests}: "
                f"finish them with stream, or submit the prompts"
            )
        if not isinstance(prompts, Iterable):
            raise InvalidArgumentError(f"prompts must be several, got {prompts!r}")
        try:
            ids = [self.submit(prompt, sampling) for prompt in prompts]
            ends = [event.completion for event in self.stream() if event.completion]
        except BaseException:
            with suppress(MambaCacheError):  # a poisoned engine requires a reset anyway
                self._end_all()
            raise
        done = {end.request_id: end for end in ends}
        return [done[request_id] for request_id in ids]

    @guarded()
    def cancel(self, request_id: Hashable) -> None:
        """End a queued or running request; its blocks and states cached so far stay findable.

        Raises:
            UnknownRequestError: There is no such request, or the request is finished.
            InvalidArgumentError: The id is not hashable.
        """
        check_hashable("a request id", request_id)
        self._scheduler.remove(request_id)

    @guarded(renews=True)
    def reset(self) -> None:
        """Remove all requests, events and cached prefixes, also from a poisoned engine."""
        with self._guard.ending(renews=True):
            self.context.reset()
            self._scheduler.reset()
            self._events.clear()

    @guarded()
    def _add(self, requests: Sequence[_EngineRequest]) -> None:
        for request in requests:
            if request.key in self._scheduler:
                raise InvalidArgumentError(f"request id {request.key!r} is in use")
        for request in requests:
            self._scheduler.add(request)

    @guarded()
    def _end_all(self) -> None:
        self._events.clear()
        self._scheduler.clear()

    @guarded()
    def _advance(self) -> None:
        """Compute a step, unless events wait for delivery."""
        self._collect()  # tokens that an interrupted call committed; these may end a request
        if not self._events:
            step = self._scheduler.begin_step()
            if step is not None:
                self._run(step)
            self._collect()

    def _propose_drafts(self, decoding: list[_EngineRequest]) -> dict[Hashable, list[int]]:
        """Return drafts for the step, oldest request first, while the step has room."""
        config = self.context.config
        # Prefill chunks get only the tokens that remain if every request has all possible drafts.
        # So if ``room`` ends before the drafts do, the step has no chunk.
        room = config.max_tokens - len(decoding)
        drafts = {}
        for request in decoding:
            output, num_prompt = self.context.output(request.key), len(request.prepared.tokens)
            useful = min(
                config.num_speculative_tokens,
                room,
                request.sampling.max_new_tokens - len(output) - 1,
                config.max_sequence_length - num_prompt - len(output),
            )
            if request.drafter is None or useful <= 0:
                continue
            # A growing list: joining prompt and answer at each step takes time.
            request.known += output[len(request.known) - num_prompt :]
            proposed = list(request.drafter.propose(request.known, useful)[:useful])
            if proposed:
                drafts[request.key] = proposed
            room -= len(proposed)
        return drafts

    def _run(self, step: Step) -> None:
        """Compute and commit a step."""
        logits = self._model.forward(step.metadata, self.context).cpu()
        logits = logits[:, : self.context.config.vocab_size]  # a model may pad its vocabulary
        lengths = [1 if r.is_prefill else r.num_tokens for r in step.requests]
        requests = [self._scheduler.find(r.request_id) for r in step.requests]
        parts = list(zip(step.requests, requests, torch.split(logits, lengths), strict=True))
        tokens = {}
        for scheduled, request, rows in parts:
            if scheduled.samples:
                num_known = scheduled.start + scheduled.num_tokens - len(scheduled.drafts)
                num_generated = num_known - len(request.prepared.tokens)
                tokens[request.key] = verify(
                    rows, scheduled.drafts, request.sampling, num_generated
                )
        preempted = self.context.commit_step(tokens)
        for scheduled, request, rows in parts:
            sampled = tokens.get(request.key, [])
            if scheduled.is_prefill:
                request.prefill_tokens += scheduled.num_tokens
            else:
                accepted = sum(map(eq, sampled, scheduled.drafts))
                self.decoding["steps"] += 1
                self.decoding["tokens"] += len(sampled)
                self.decoding["drafted_tokens"] += len(scheduled.drafts)
                self.decoding["accepted_tokens"] += accepted
            may_fork = request.forks and scheduled.samples and request.key not in preempted
            if may_fork and len(self._scheduler.output(request)) == 1:  # its first token
                self._scheduler.fork(request, partial(_sample_first, rows[0]))

    def _collect(self) -> None:
        """Create events for new tokens; remove requests that ended."""
        for request in self._scheduler:
            done = None
            for token in self._scheduler.output(request, request.num_delivered):
                request.num_delivered += 1
                if request.ttft_seconds is None:
                    request.ttft_seconds = time.perf_counter() - request.submitted_at
                done = self._end_of(request, token)
                self._events.append(TokenEvent(request.key, token, done))
                if done is not None:
                    break
            if done is None and request.error is not None:
                done = self._end_of(request, None)
                self._events.append(TokenEvent(request.key, None, done))
            if done is not None:
                self._scheduler.remove(request.key)

    def _end_of(self, request: _EngineRequest, token: int | None) -> Completion | None:
        """Return the result of a request if this token ends it; None means a failed request."""
        num_prompt, sampling = len(request.prepared.tokens), request.sampling
        # The last token exceeds the maximum, so it cannot be computed.
        is_too_long = num_prompt + request.num_delivered > self.context.config.max_sequence_length
        if token is None:
            reason: Literal["stop", "length", "failed"] = "failed"
        elif token in sampling.stop_tokens:
            reason = "stop"
        elif is_too_long or request.num_delivered == sampling.max_new_tokens:
            reason = "length"
        else:
            return None
        output = self._scheduler.output(request)
        is_fork = request.admission is None and output
        return Completion(
            request_id=request.key,
            tokens=tuple(output[: request.num_delivered]),
            finish_reason=reason,
            error=cast("CapacityError | None", request.error),
            ttft_seconds=request.ttft_seconds,
            admission=request.admission,
            skipped_tokens=num_prompt if is_fork else getattr(request.admission, "skip_tokens", 0),
            computed_tokens=request.prefill_tokens,
        )


def _sample_first(logits: torch.Tensor, fork: _EngineRequest) -> int:
    return sample(logits, fork.sampling, 0)


def _fit(config: CacheConfig, shape: Any) -> CacheConfig:
    """Return the settings with the model's vocabulary; raise if the model cannot serve them."""
    if config.vocab_size is None:
        config = replace(config, vocab_size=shape.vocab_size)
    for name in ("ssm_chunk_size", "vocab_size"):
        ours, models = getattr(config, name), getattr(shape, name)
        if ours > models:
            raise InvalidArgumentError(f"the cache's {name} is {ours}, the model's only {models}")
    return config


def compute_prefix(
    model: LanguageModel, context: DynamicInferenceContext, hit: HitToVerify
) -> PrefixContent:
    """Compute the prefix of a context's hit with a temporary engine."""
    config, num_tokens = context.config, len(hit.tokens)
    num_blocks = -(-(num_tokens + 1) // config.block_size_tokens)
    alone_config = CacheConfig(
        block_size_tokens=config.block_size_tokens,
        max_requests=1,
        max_tokens=config.max_tokens,
        max_sequence_length=num_tokens + 1,
        num_kv_blocks=num_blocks,
        ssm_chunk_size=config.ssm_chunk_size,
        enable_prefix_caching=False,
        vocab_size=config.vocab_size,
    )
    engine = Engine(model, alone_config)
    # The second token is never computed, so states and blocks contain exactly the prefix.
    engine.submit(
        hit.tokens,
        SamplingParams(max_new_tokens=2),
        lora_id=hit.request.lora_id,
        multimodal_keys=hit.request.multimodal_keys,
    )
    while not engine.step():
        pass
    alone = engine.context
    states = {name: tensor[:, 0] for name, tensor in alone.live_states.tensors.items()}
    blocks = alone.request_to_kv_block_ids[0, :num_blocks].tolist()
    assert alone.kv_cache is not None, "a language model has a kv_spec"
    return PrefixContent(states, alone.kv_cache[:, :, blocks].flatten(2, 3)[:, :, :num_tokens])
