"""The engine, and what it asks of a model: requests in, tokens out."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch

from mamba_cache._checks import check_hashable, check_int, check_number
from mamba_cache._guard import CallGuard, guarded
from mamba_cache._weak_callback import WeakCallback
from mamba_cache.config import CacheConfig
from mamba_cache.context import (
    DynamicInferenceContext,
    HitToVerify,
    Pin,
    PrefixContent,
    Request,
    Step,
)
from mamba_cache.context.scheduler import Scheduler
from mamba_cache.errors import (
    ConcurrentUseError,
    InvalidArgumentError,
    MambaCacheError,
    StepOrderError,
)
from mamba_cache.metadata import StepMetadata
from mamba_cache.reference.drafting import Drafter, NgramDrafter
from mamba_cache.reference.requests import EngineRequest
from mamba_cache.reference.results import Completion, DecodingStats, TokenEvent
from mamba_cache.reference.sampling import SamplingParams, sample, verify
from mamba_cache.slots import CheckpointPlacement, SlotEvictionPolicy
from mamba_cache.states import KVCacheSpec, StateSpec
from mamba_cache.tiers import CacheIdentity, LoadPlanner, ModelIdentity

__all__ = ["Engine", "LanguageModel", "ModelShape", "compute_prefix"]


class ModelShape(Protocol):
    """What a model says about its tokens, its chunks and the memory that it needs."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def ssm_chunk_size(self) -> int:
        """Tokens of the longest chunk that its SSM scan takes."""

    def state_spec(self, dtype: torch.dtype) -> StateSpec:
        """Return what one slot holds for weights of ``dtype``."""

    def kv_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """Return what one KV block holds for weights of ``dtype``."""


class LanguageModel(Protocol):
    """A hybrid model that computes one step of the context."""

    @property
    def config(self) -> ModelShape:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    def forward(self, metadata: StepMetadata, caches: Any) -> torch.Tensor:
        """Compute a step: advance live states, fill the KV cache, write checkpoints.

        Args:
            metadata: The step.
            caches: The ``DynamicInferenceContext``; a model names what it reads of it.

        Returns:
            Logits [num_decode_tokens + num_prefills, vocab_size] of every token of the decoding
            requests and of each prefill's last token, in batch order.
        """


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

    One thread uses an engine at a time. After an exception the step that was in flight is taken
    back, and its requests go on with the next one. If the exception came while bookkeeping changed,
    every later call raises ``PoisonedError`` until ``reset``.

    Arguments that are not listed are those of ``DynamicInferenceContext``.

    Args:
        model: Computes the steps.
        config: Settings of the cache; ``max_tokens`` is the token budget of one step. Its
            ``vocab_size`` is by default the model's. With ``num_speculative_tokens`` more than 0,
            so many drafts of a request are verified in one step; no answer depends on them.
        wait_for_prefix: Whether a queued request may wait for a prefix that it shares with one
            that is being computed, so that it need not compute it too.
        max_wait_steps: Steps that one request waits at most.
        drafter: Makes the drafter of one request, such as a class or a ``functools.partial`` of
            one. Not called without ``num_speculative_tokens``.
        prefetch_seconds: How long a queued request may wait for what the disk has of its prompt.

    Attributes:
        context: The requests' memory, and the cache; ``context.stats()`` says what it did.
        decoding: What the decoding steps of all requests brought.

    Raises:
        BudgetError: A budget is too small for one block, or for one slot.
        InvalidArgumentError: ``max_wait_steps`` is not an int >= 0, ``prefetch_seconds`` is no
            number >= 0, or the config's ``ssm_chunk_size`` or ``vocab_size`` is larger than the
            model's.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: CacheConfig,
        *,
        wait_for_prefix: bool = True,
        max_wait_steps: int = 64,
        drafter: Callable[[], Drafter] = NgramDrafter,
        slot_policy: SlotEvictionPolicy | None = None,
        placement: CheckpointPlacement | None = None,
        load_planner: LoadPlanner | None = None,
        disk_planner: LoadPlanner | None = None,
        identity: CacheIdentity | ModelIdentity | None = None,
        prefetch_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        max_wait_steps = check_int("max_wait_steps", max_wait_steps, minimum=0)
        self.context = DynamicInferenceContext(
            _fit(config, model.config),
            model.config.state_spec(model.dtype),
            model.config.kv_spec(model.dtype),
            device=model.device,
            slot_policy=slot_policy,
            placement=placement,
            load_planner=load_planner,
            disk_planner=disk_planner,
            identity=identity,
            clock=clock,
        )
        self._model = model
        self._make_drafter = drafter if config.num_speculative_tokens else None
        self._scheduler: Scheduler[EngineRequest] = Scheduler(
            self.context,
            max_wait_steps=max_wait_steps if wait_for_prefix else 0,
            prefetch_seconds=check_number("prefetch_seconds", prefetch_seconds, maximum=1e9),
            propose=WeakCallback(self._propose_drafts) if config.num_speculative_tokens else None,
        )
        self.decoding = DecodingStats()
        self._ids = count()
        self._guard = CallGuard(self, take_back=self._recover)
        # What the last step returned: only the next call can know that it arrived.
        self._news = _News([], [])
        self._is_untold = False
        self._is_behind = False

    @property
    def num_requests(self) -> int:
        """Requests that are not finished, or whose failure ``step`` has still to tell."""
        return len(self._scheduler) + len(self._ended_untold())

    def submit(
        self,
        prompt_tokens: Any,
        sampling: SamplingParams | None = None,
        *,
        n: int = 1,
        request_id: Hashable | None = None,
        cache_salt: str | bytes | None = None,
        lora_id: str | int | None = None,
        multimodal_keys: Sequence[tuple[int, str | bytes]] = (),
        checkpoint_positions: Sequence[int] = (),
        will_continue: bool | None = None,
        source: Hashable = None,
    ) -> Hashable:
        """Queue a prompt.

        Args:
            prompt_tokens: Token ids, 1-D: a list, a numpy array or a torch tensor.
            sampling: How to choose tokens. Default: ``SamplingParams()``.
            n: How many answers to give. The first is this request's. The others are requests of
                their own, named ``(request_id, 1)`` to ``(request_id, n - 1)``, whose seeds are
                as much higher. They fork the first when its prompt is computed, as far as there is
                room; what they answer does not depend on that.
            request_id: A name for it. Default: a number.
            cache_salt: As in ``Request``, like all that follow.
            lora_id: See there.
            multimodal_keys: See there.
            checkpoint_positions: See there.
            will_continue: See there.
            source: See there.

        Returns:
            The request's id.

        Raises:
            InvalidArgumentError: The prompt is empty or malformed, ``sampling`` is of another type,
                an id is not hashable or in use, or ``n`` is not an int >= 1, or more than 1 at
                temperature 0, at which all answers would be the same.
            SequenceLengthError: The prompt is longer than ``max_sequence_length``.
        """
        submitted_at = time.perf_counter()
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise InvalidArgumentError(
                f"sampling must be SamplingParams or None, got {type(sampling).__name__}"
            )
        check_int("n", n, minimum=1)
        if n > 1 and sampling.temperature == 0:
            raise InvalidArgumentError(
                f"at temperature 0 all answers are the same: n must be 1, got {n}"
            )
        check_hashable("a request id", request_id)
        if request_id is None:
            request_id = next(i for i in self._ids if not self._is_in_use(i))
        request = Request(
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            cache_salt=cache_salt,
            lora_id=lora_id,
            multimodal_keys=multimodal_keys,
            checkpoint_positions=checkpoint_positions,
            will_continue=will_continue,
            source=source,
        )
        prepared = self.context.prepare(request)
        made = []
        for index in range(n):
            if index:
                its_own = replace(request, request_id=(request_id, index))
                prepared = replace(prepared, request=its_own)
            drafter = self._make_drafter() if self._make_drafter else None
            its_sampling = replace(sampling, seed=sampling.seed + index)
            made.append(
                EngineRequest.make(
                    prepared, its_sampling, self.context.config, drafter, submitted_at
                )
            )
        made[0].forks = made[1:]
        for fork in made[1:]:
            fork.fork_of = made[0]
        try:
            self._add(made)
            return request_id
        except BaseException:
            for each in made:
                self._scheduler.forget(each)
            raise

    def pin(
        self,
        prompt_tokens: Any,
        *,
        ttl_seconds: float | None = None,
        cache_salt: str | bytes | None = None,
        lora_id: str | int | None = None,
        multimodal_keys: Sequence[tuple[int, str | bytes]] = (),
    ) -> Pin:
        """Keep a cached prompt findable, whatever else needs room: ``DynamicInferenceContext.pin``.

        Args:
            prompt_tokens: As for ``submit``, like all that follow. Run them before, alone or with
                ``checkpoint_positions`` at their end.
            ttl_seconds: Seconds until the pin ends by itself. Default: it does not.
            cache_salt: See there.
            lora_id: See there.
            multimodal_keys: See there.

        Returns:
            What ``unpin`` takes.

        Raises:
            InvalidArgumentError: The prompt is malformed, or ``ttl_seconds`` is out of range.
            SequenceLengthError: The prompt is longer than ``max_sequence_length``.
            MissingStateError: No state of the prompt is cached.
            BlockCapacityError: Pins would hold more than their share of KV blocks.
            MambaSlotCapacityError: Or of slots.
        """
        request = Request(
            request_id=None,
            prompt_tokens=prompt_tokens,
            cache_salt=cache_salt,
            lora_id=lora_id,
            multimodal_keys=multimodal_keys,
        )
        return self.context.pin(request, ttl_seconds=ttl_seconds)

    def unpin(self, pin: Pin) -> None:
        """End a pin before its time; one that is over is passed over.

        Raises:
            InvalidArgumentError: It is none.
        """
        self.context.unpin(pin)

    def step(self) -> list[TokenEvent]:
        """Compute one step for all requests that fit into it.

        If the model raises, or a token cannot be sampled from its logits,
        the step is taken back and the exception goes on to the caller; the step's requests resume
        with the next one. What was sampled by then and could not be told, the next call returns.

        Returns:
            The tokens sampled, those of each request in order, and the ends of requests that
            failed. Empty while prompts are being computed, and when there are no requests.

        Raises:
            InvalidArgumentError: Logits from which no token can be sampled; see ``sample``.
            ConcurrentUseError: Another thread's call is running.
            PoisonedError: A change broke off, and ``reset`` was not called since.
        """
        before = self._news
        try:
            return self._step()
        except ConcurrentUseError:
            raise
        except BaseException:
            # Made by this call, so nobody got them; those of the call before arrived with it.
            self._is_untold = self._is_untold or self._news is not before
            raise

    def stream(self) -> Iterator[TokenEvent]:
        """Step until all requests are finished, those submitted meanwhile too.

        What was not taken from it when it is closed, the next step returns.

        Yields:
            Every event.
        """
        while self.num_requests:
            events: list[TokenEvent] = []
            taken = 0
            try:
                events = self.step()
                while taken < len(events):
                    # One line: an interrupt comes before both or after both.
                    yield events[(taken := taken + 1) - 1]
            finally:
                if taken < len(events):
                    later = self._news.events if self._is_untold else []
                    self._news = _News([*events[taken:], *later], self._news.told)
                    self._is_untold = True

    def generate(
        self,
        prompts: Iterable[Any],
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Run prompts to their ends. If that raises, none of them stays in the engine.

        Args:
            prompts: Each as for ``submit``.
            sampling: How to choose the tokens of all.

        Returns:
            What became of each prompt, in order. One that did not fit has its ``error`` set.

        Raises:
            StepOrderError: Other requests are not finished; their events would be lost here.
            InvalidArgumentError: ``prompts`` are none, or one is empty or malformed.
            SequenceLengthError: A prompt is longer than ``max_sequence_length``.
        """
        if self.num_requests:
            raise StepOrderError(
                f"generate needs an engine without requests, this one has {self.num_requests}: "
                f"finish them with stream, or submit the prompts"
            )
        if not isinstance(prompts, Iterable):
            raise InvalidArgumentError(f"prompts must be several, got {prompts!r}")
        done: dict[Hashable, Completion] = {}
        try:
            ids = [self.submit(prompt, sampling) for prompt in prompts]
            while self.num_requests:
                ends = [event.completion for event in self.step() if event.completion]
                done.update({end.request_id: end for end in ends})
        except BaseException:
            with suppress(MambaCacheError):  # poisoned, it has to be reset anyway
                self._end_all()
            raise
        return [done[request_id] for request_id in ids]

    @guarded()
    def cancel(self, request_id: Hashable) -> None:
        """End a request, queued or running; what it cached so far stays findable.

        Of one whose failure ``step`` has still to tell, nothing will be told.

        Raises:
            UnknownRequestError: There is no such request, or it is finished.
            InvalidArgumentError: The id is not hashable.
        """
        check_hashable("a request id", request_id)
        if request_id in self._ended_untold():
            events = [event for event in self._news.events if event.request_id != request_id]
            self._news = _News(events, self._news.told)
            return
        self._scheduler.remove(request_id)

    @guarded()
    def verify_pending(self, max_hits: int | None = None) -> int:
        """Compute hits again that wait to be verified, and compare them with what is cached.

        With ``CacheConfig.verify_hits`` a part of the hits waits for this. Each takes as long as
        its prefix does. ``context.verification_stats()`` says what came of it.

        Args:
            max_hits: How many at most. Default: all that wait.

        Returns:
            How many were.

        Raises:
            InvalidArgumentError: ``max_hits`` is not an int >= 1.
        """
        compute = partial(compute_prefix, self._model, self.context)
        return self.context.verify_pending(compute, max_hits)

    @guarded(renews=True)
    def reset(self) -> None:
        """Forget all requests and all that is cached, whatever happened; nothing more is told."""
        with self._guard.ending(renews=True):
            self.context.reset()
            self._scheduler.reset()
            self._news, self._is_untold, self._is_behind = _News([], []), False, False

    @guarded()
    def _add(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            if self._is_in_use(request.request_id):
                raise InvalidArgumentError(f"request id {request.request_id!r} is in use")
        for request in requests:
            self._scheduler.add(request)

    @guarded()
    def _end_all(self) -> None:
        self._news, self._is_untold = _News([], []), False
        self._scheduler.clear()

    @guarded()
    def _step(self) -> list[TokenEvent]:
        if self._is_untold:
            news = _News([*self._news.events], self._news.told)
        else:
            # Tokens that a call which broke off committed come first: some may end a request.
            news = self._gather(self._scheduler) if self._is_behind else _News([], [])
            if not news.events:
                step = self._scheduler.begin_step()
                requests = [] if step is None else self._run(step)
                news = self._gather([*requests, *self._scheduler.failed])
        self._news = news  # from here on it is told, if not by this call then by the next
        self._is_untold = False
        self._mark_told(news)
        self._is_behind = False
        return news.events

    def _propose_drafts(self, decoding: list[EngineRequest]) -> dict[Hashable, list[int]]:
        """Collect drafts for the step, the oldest request's first, while its buffers last."""
        config = self.context.config
        # Chunks are scheduled only into what is left if every request brings all drafts that it
        # can have, so where this room ends before the drafts, there is no chunk.
        room = config.max_tokens - len(decoding)
        drafts = {}
        for request in decoding:
            max_drafts = min(config.num_speculative_tokens, room)
            output = self.context.output(request.key)
            proposed = request.propose_drafts(output, max_drafts, config.max_sequence_length)
            if proposed:
                drafts[request.key] = proposed
            room -= len(proposed)
        return drafts

    def _run(self, step: Step) -> list[EngineRequest]:
        """Compute and commit a step; return its requests."""
        logits = self._model.forward(step.metadata, self.context).cpu()
        logits = logits[:, : self.context.config.vocab_size]  # a model may pad its vocabulary
        lengths = [1 if r.is_prefill else r.num_tokens for r in step.requests]
        rows = torch.split(logits, lengths)
        tokens = self._verify(step, rows)
        preempted = self.context.commit_step(tokens)
        requests = []
        for scheduled, its_rows in zip(step.requests, rows, strict=True):
            request = self._scheduler.find(scheduled.request_id)
            self.decoding += request.note_computed(scheduled, tokens.get(request.request_id, []))
            requests.append(request)
            may_fork = request.forks and scheduled.samples and scheduled.request_id not in preempted
            if may_fork and len(self._scheduler.output(request)) == 1:  # its first token
                requests += self._fork(request, its_rows[0])
        return requests

    def _fork(self, request: EngineRequest, logits: torch.Tensor) -> list[EngineRequest]:
        """Fork a request whose first token was sampled from these logits; return the forks."""

        def sample_first(fork: EngineRequest) -> int:
            return sample(logits, fork.sampling, 0)

        return self._scheduler.fork(request, sample_first)

    def _verify(self, step: Step, rows: Sequence[torch.Tensor]) -> dict[Hashable, list[int]]:
        """Return the next tokens of each request that samples."""
        tokens = {}
        for scheduled, its_rows in zip(step.requests, rows, strict=True):
            if scheduled.samples:
                request_id = scheduled.request_id
                sampling = self._scheduler.find(request_id).sampling
                num_generated = self.context.progress(request_id).num_generated
                tokens[request_id] = verify(its_rows, scheduled.drafts, sampling, num_generated)
        return tokens

    def _gather(self, requests: Iterable[EngineRequest]) -> _News:
        """Make events of what was generated and not told; nothing changes here."""
        now, longest = time.perf_counter(), self.context.config.max_sequence_length
        news = _News([], [])
        for request in requests:
            events = request.events(partial(self._scheduler.output, request), now, longest)
            if events:
                num_tokens = sum(event.token is not None for event in events)
                told = _Told(request, request.num_told + num_tokens, now, events[-1].finished)
                news.told.append(told)
                news.events.extend(events)
        return news

    def _mark_told(self, news: _News) -> None:
        """Count events as told, and forget the requests that they end; twice is like once."""
        for request, num_told, now, is_end in news.told:
            request.num_told = num_told
            request.first_token_at = request.first_token_at or (now if num_told else None)
            if is_end and self._scheduler.knows(request):
                self._scheduler.remove(request.request_id)

    def _ended_untold(self) -> set[Hashable]:
        """Return the ids of requests that are forgotten, and of whose end nobody was told."""
        if not self._is_untold:
            return set()
        ended = {event.request_id for event in self._news.events if event.finished}
        return {request_id for request_id in ended if request_id not in self._scheduler}

    def _is_in_use(self, request_id: Hashable) -> bool:
        return request_id in self._scheduler or request_id in self._ended_untold()

    def _recover(self) -> None:
        """Take back what a call that raised left; what it committed is told by the next step."""
        self._is_behind = True
        self._scheduler.recover()


class _Told(NamedTuple):
    """What is known of a request once its events are told."""

    request: EngineRequest
    num_told: int
    now: float
    is_end: bool


class _News(NamedTuple):
    """Events of one step, and what is known once they are told."""

    events: list[TokenEvent]
    told: list[_Told]


def _fit(config: CacheConfig, shape: ModelShape) -> CacheConfig:
    """Return the settings with the model's vocabulary, if they are ones that it can serve."""
    if config.vocab_size is None:
        config = replace(config, vocab_size=shape.vocab_size)
    for name in ("ssm_chunk_size", "vocab_size"):
        ours, models = getattr(config, name), getattr(shape, name)
        if ours > models:
            raise InvalidArgumentError(f"the cache's {name} is {ours}, the model's only {models}")
    return config


def compute_prefix(
    model: LanguageModel,
    context: DynamicInferenceContext,
    hit: HitToVerify,
) -> PrefixContent:
    """Compute a hit's prefix with a context of its own, which is given up afterwards.

    Args:
        model: Computes the steps.
        context: Whose hit it is; it is not touched.
        hit: The hit.
    """
    config, tokens = context.config, hit.tokens
    size, count = config.block_size_tokens, len(tokens)
    own = CacheConfig(
        block_size_tokens=size,
        max_requests=1,
        max_tokens=config.max_tokens,
        max_sequence_length=count + 1,
        num_kv_blocks=-(-(count + 1) // size),
        ssm_chunk_size=config.ssm_chunk_size,
        enable_prefix_caching=False,
        vocab_size=config.vocab_size,
    )
    shape = model.config
    alone = DynamicInferenceContext(
        own, shape.state_spec(model.dtype), shape.kv_spec(model.dtype), device=model.device
    )
    row, blocks = _run_alone(model, alone, hit)
    states = {name: tensor[:, row] for name, tensor in alone.live_states.tensors.items()}
    assert alone.kv_cache is not None, "a language model has a kv_spec"
    return PrefixContent(states, alone.kv_cache[:, :, blocks].flatten(2, 3)[:, :, :count])


def _run_alone(
    model: LanguageModel, context: DynamicInferenceContext, hit: HitToVerify
) -> tuple[int, list[int]]:
    """Compute a prefix as one request; return its row and its blocks, of a step in flight."""
    request = Request(
        request_id=0,
        prompt_tokens=hit.tokens,
        lora_id=hit.request.lora_id,
        multimodal_keys=hit.request.multimodal_keys,
    )
    chunk = context.config.max_tokens
    context.add_request(request, chunk_tokens=chunk)
    while True:
        step = context.begin_step()
        [scheduled] = step.requests
        model.forward(step.metadata, context)
        if scheduled.samples:
            held = -(-len(hit.tokens) // context.block_size_tokens)
            return scheduled.row, context.request_to_kv_block_ids[scheduled.row, :held].tolist()
        context.commit_step({})
        context.schedule_prefill(0, chunk_tokens=chunk)
