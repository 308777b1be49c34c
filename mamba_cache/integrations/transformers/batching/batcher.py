"""The batcher: runs the requests of one model together, step by step."""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache._checks import check_int
from mamba_cache._guard import weak_callback
from mamba_cache.cache.sequence import CachedSequence
from mamba_cache.context import (
    DeviceTokens,
    DynamicInferenceContext,
    PreparedRequest,
    Request,
    Step,
)
from mamba_cache.context.scheduler import Scheduler
from mamba_cache.errors import (
    CapacityError,
    InvalidArgumentError,
    ModelChangedError,
    PoisonedError,
    SequenceLengthError,
    UnresumableModelError,
)
from mamba_cache.integrations.transformers.batching.answers import (
    AnswerSettings,
    BatchRequest,
    choose_tokens,
)
from mamba_cache.integrations.transformers.batching.forwards import BatchForwards, ComputedChunks
from mamba_cache.integrations.transformers.batching.graphs import StepGraphs, padded_sizes
from mamba_cache.integrations.transformers.capture import StateCapture
from mamba_cache.integrations.transformers.layers import ints_to_device
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.integrations.transformers.probe import distance, random_tokens
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.integrations.transformers.store import PrefixStore

__all__ = ["BatchStats", "Batcher"]

_LONGEST = 2**17
"""Maximum tokens of a sequence if the model sets none; block tables have that width."""

_MAX_OFFERS = 1024
"""Maximum number of blocks and states that wait to be copied to the tiers below."""

_MAX_WAIT_STEPS = 64
"""Maximum number of steps that a request waits for a prefix that another request computes."""

_USES = 2
"""A shape of rectangle is captured when it is used for the second time."""

_TUNED_TOKENS = 256
"""Tokens per row of the rectangles that tune kernels in ``prepare``."""

_TOLERANCES = {True: 1e-3, False: 0.15}
"""Tolerated relative error of logits in single (True) and half precision; wrong ones exceed 1."""

_MAX_TOLERANCE = 0.5
"""Upper limit of the tolerance for models whose own results vary as much by rounding."""

_AHEAD_ON = ("cuda",)
"""Types of devices on which a step begins before the last step's tokens are on the host."""

_CHILD_SEED = 0xD1342543DE82EF95
_SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats:
    """Counts of batched computation; ``stats()`` returns the counts of the cache.

    A rectangle is a forward over chunks of prompts, one in each row, padded to one length.

    Attributes:
        generate_calls: Calls of ``generate`` that were computed as a batch.
        steps: Steps of all kinds.
        decode_steps: Steps in which a request decoded.
        decoded_tokens: Tokens from decode steps.
        prefill_forwards: Rectangles of any number of rows.
        prefill_tokens: Prompt tokens computed in rectangles.
        rectangles: Rectangles of more than one row.
        padding_tokens: Padding tokens computed in rectangles.
        moves: Requests moved to lower rows so that a smaller decode batch holds all.
        captures: CUDA graphs captured.
        graph_sizes: Sizes of decode batches that have a CUDA graph now.
        graph_shapes: Number of rectangle shapes that have a CUDA graph now.
        graph_bytes: Device memory of the present CUDA graphs.
        warm_up_seconds: Time of all captures, with the eager runs before them.
        replays: Decode steps replayed from a CUDA graph.
        eager_steps: Decode steps computed without a CUDA graph.
        eager_reason: Why the last eager decode step had no graph; empty if none was eager.
        prefill_replays: Rectangles replayed from a CUDA graph.
        eager_prefills: Rectangles of a size for graphs, computed without one.
        prefill_eager_reason: Why rectangles are not captured; empty if they are.
    """

    generate_calls: int = 0
    steps: int = 0
    decode_steps: int = 0
    decoded_tokens: int = 0
    prefill_forwards: int = 0
    prefill_tokens: int = 0
    rectangles: int = 0
    padding_tokens: int = 0
    moves: int = 0
    captures: int = 0
    graph_sizes: tuple[int, ...] = ()
    graph_shapes: int = 0
    graph_bytes: int = 0
    warm_up_seconds: float = 0.0
    replays: int = 0
    eager_steps: int = 0
    eager_reason: str = ""
    prefill_replays: int = 0
    eager_prefills: int = 0
    prefill_eager_reason: str = ""


@dataclass(slots=True)
class _Decoding:
    """The decoding requests; kept from step to step while the same requests decode."""

    ids: tuple[Hashable, ...] = ()  # the ids, in the step's order
    requests: list[BatchRequest] = field(default_factory=list)  # in the same order
    by_row: list[BatchRequest | None] = field(default_factory=list)  # by row of the batch
    size: int = 0  # number of rows of the batch
    is_simple: bool = True  # all requests are greedy
    places: torch.Tensor | None = None  # the batch row of each row of a call of ``generate``


_Part: TypeAlias = "tuple[torch.Tensor, Sequence[BatchRequest | None]]"
"""Logits [rows, vocabulary], and each row's request, or None where its settings do not matter."""


class Batcher:
    """Runs requests in batches: for ``generate_batch`` by ``step``, for ``generate`` by its rows.

    In each step the scheduler admits requests, the context begins and commits, ``BatchForwards``
    computes, and the batcher chooses tokens and ends requests. Prefixes lie in the shared store.
    """

    def __init__(
        self,
        runner: ModelRunner,
        store: PrefixStore,
        capture: StateCapture | None,
        *,
        chunk_tokens: int,
        is_eager: str = "",
    ) -> None:
        self._runner = runner
        self._store = store
        self.chunk_tokens = chunk_tokens  # maximum prompt tokens in one step
        self._why_eager = is_eager  # the reason for using no CUDA graphs; empty: they are used
        layout, config = store.layout, store.config
        # Decoded states are cached only if decoding computes the same as a prefill would.
        saves_answers = config.reuse_answers and config.min_computed_tokens == 1
        block_size, num_blocks = layout.block_size_tokens, store.kv_blocks.pool_size - 1
        self.context = DynamicInferenceContext(
            replace(
                config,
                max_tokens=chunk_tokens + config.max_requests,
                max_sequence_length=_longest(runner, num_blocks * block_size),
                ssm_chunk_size=block_size,  # only for metadata that transformers' models ignore
                vocab_size=runner.vocabulary,
                max_checkpoints_per_step=None if capture is not None else 0,
                save_decode_states=saves_answers,
                reuse_answers=saves_answers,
            ),
            layout.state_spec,
            layout.kv_spec(),
            device=layout.device,
            shared=store.share(),
        )
        self.counts: Counter[str] = Counter()  # by the fields of ``BatchStats``
        self._graphs = StepGraphs(self.context.device, self.counts)
        self._forwards = BatchForwards(
            runner,
            self.context,
            layout,
            graphs=self._graphs,
            capture=capture,
        )
        self._sizes = padded_sizes(config.max_requests)
        self._scheduler: Scheduler[BatchRequest] = Scheduler(
            self.context, max_wait_steps=_MAX_WAIT_STEPS, find=weak_callback(self._find)
        )
        self._decoding = _Decoding()
        self._num_requests = 0
        self._has_faults = False  # some requests may have a ``fault`` from their last step
        self._rows: list[BatchRequest] = []  # the rows of a call of ``generate``
        self._unannounced: list[PreparedRequest] = []  # prompts without ``Admitted`` events
        # Between ``compute_rows`` and ``take_rows``: the step, its sampling requests, its chunks.
        self._open: tuple[Step, list[BatchRequest], list[ComputedChunks]] | None = None
        # Two steps of one token each complete one block at most, if a block is longer than a token.
        self._runs_ahead = layout.device.type in _AHEAD_ON and block_size > 1
        # Late requests, whose newest token is on the device only; and how many of them decoded in
        # the last step: these come first. None: all tokens are on the host.
        self._late: tuple[list[BatchRequest], int] | None = None
        self.configure()

    def configure(self, batching_config: Any = None) -> None:
        """Set limits for the next requests from a ``ContinuousBatchingConfig``.

        No limit exceeds the settings of the cache. None: use these.
        """
        if batching_config is not None and not hasattr(batching_config, "max_batch_tokens"):
            raise InvalidArgumentError(
                "continuous_batching_config must be a transformers.ContinuousBatchingConfig, got "
                f"{type(batching_config).__name__}"
            )

        def limit(name: str, maximum: int) -> int:
            number = getattr(batching_config, name, None)
            return maximum if number is None else min(check_int(name, number, minimum=1), maximum)

        scheduler = self._scheduler
        scheduler.max_chunk_tokens = limit("max_batch_tokens", self.chunk_tokens)
        scheduler.max_requests = limit("max_requests_per_batch", self.context.max_requests)
        uses_graphs = getattr(batching_config, "use_cuda_graph", None)
        if isinstance(uses_graphs, tuple):  # for prompts, and for decoding
            uses_graphs = uses_graphs[1]
        self._is_eager = "use_cuda_graph is False" if uses_graphs is False else self._why_eager
        self._wants_logprobs = bool(getattr(batching_config, "return_logprobs", False))
        self._has_listeners = False
        scheduler.is_lockstep = False

    def submit(
        self,
        request_id: str,
        prompt: Any,
        settings: AnswerSettings,
        *,
        seed: int,
        first_token: int | None = None,
        tell: Callable[[str, int], None] | None = None,
        **fields: Any,
    ) -> list[BatchRequest]:
        """Queue a prompt.

        ``seed`` is the random seed of the first answer; the other seeds are derived from it.
        ``first_token``, if given, is the first token of each answer.
        ``tell`` is called with an answer's name and token for each new token.
        ``fields`` are more fields of ``Request``. Listeners get the prompt's event at the end of
        the next step, when the model's settings are confirmed.

        Return a request for each answer. The first one is named ``request_id``, the others
        ``request_id`` with "__child#0" and so on after it.
        """
        key = self._runner.fingerprint.key
        request = self._store.request(prompt, key, request_id, **fields)  # errors name this id
        prepared = self.context.prepare(request)
        longest = self._longest_beside_pins(prepared)
        size, min_own = self.context.block_size_tokens, self.context.config.min_computed_tokens
        first = self._num_requests
        made = [
            BatchRequest(
                prepared=replace(
                    prepared, request=replace(prepared.request, request_id=first + number)
                ),
                reusable_blocks=max(len(prepared.tokens) - min_own, 0) // size,
                request_id=f"{request_id}__child#{number - 1}" if number else request_id,
                settings=settings,
                seed=(seed + number * _CHILD_SEED) & _SEED_MASK,
                first_token=first_token,
            )
            for number in range(settings.num_answers)
        ]
        made[0].forks = made[1:]
        for one in made[1:]:
            one.fork_of = made[0]
        self._num_requests += len(made)
        self._has_listeners |= tell is not None or settings.make_processors is not None
        self._unannounced.append(prepared)
        for one in made:
            one.tell = None if tell is None else partial(tell, one.request_id)
            one.max_tokens = min(settings.max_new_tokens, longest - len(prepared.tokens) + 1)
            self._scheduler.add(one)
        return made

    def _longest_beside_pins(self, prepared: PreparedRequest) -> int:
        """Return the maximum length of a sequence: alone, it must fit beside the pinned blocks."""
        longest, pins = self.context.config.max_sequence_length, self._store.pins
        if not pins.held:
            return longest
        blocks = self.context.kv_block_allocator
        num_held = int(np.count_nonzero(pins.references))
        num_own = int(np.count_nonzero(pins.references[blocks.match_prefix(prepared.hashes)]))
        room = (blocks.pool_size - 1 - num_held + num_own) * self.context.block_size_tokens
        if room < len(prepared.tokens):
            raise SequenceLengthError(
                f"the prompt has {len(prepared.tokens)} tokens, and there is room for {room} "
                f"beside {num_held} pinned KV blocks: unpin some"
            )
        return min(longest, room)

    def has_room(self, lengths: Sequence[int]) -> bool:
        """Return whether sequences of these lengths can run at once, beside the pins."""
        blocks, size = self.context.kv_block_allocator, self.context.block_size_tokens
        num_free = blocks.pool_size - 1 - int(np.count_nonzero(self._store.pins.references))
        return (
            len(lengths) <= self.context.max_requests
            and max(lengths) <= self.context.config.max_sequence_length
            and sum(-(-length // size) for length in lengths) <= num_free
        )

    def replays(self, count: int) -> bool:
        """Return whether decode steps of ``count`` requests are replayed from CUDA graphs."""
        return self._size_for(count) in self._graphs.sizes

    def begin_rows(self, rows: list[BatchRequest]) -> None:
        """Begin a call of ``generate``; ``rows`` are all requests that were submitted.

        Afterwards call ``compute_rows`` and ``take_rows`` in turn. There must be room for all rows.
        """
        self._scheduler.is_lockstep = True
        self._rows = rows
        self.counts["generate_calls"] += 1

    def compute_rows(self) -> torch.Tensor:
        """Run steps until all rows need their next token; return its logits, [rows, vocabulary].

        Logits of finished rows are undefined.
        """
        while True:
            step, _ = self._begin_step()
            assert step is not None  # ``has_room`` was checked
            computed, logits = self._compute(step)
            self._runner.fingerprint.confirm()
            requests = [self._scheduler.find(key) for key in step.sampling_ids]
            firsts = {one.key: one.first_token for one in self._rows if one.first_token is not None}
            if requests and (logits is not None or not firsts):
                break
            known = [firsts[one.key] for one in requests]
            self._commit_rows(step, known, firsts, computed)
        self._open = step, requests, computed
        if logits is None:
            return computed[-1].logits
        decoding = self._decoding
        if decoding.places is None:
            others = decoding.requests[0]
            rows = [decoding.by_row.index(others if o.is_over else o) for o in self._rows]
            decoding.places = ints_to_device(rows, self.context.device)
        return logits.index_select(0, decoding.places)

    def take_rows(self, tokens: Sequence[int]) -> None:
        """Append each row's chosen token, and commit the step."""
        assert self._open is not None
        (step, requests, computed), self._open = self._open, None
        chosen = {one.key: token for one, token in zip(self._rows, tokens, strict=True)}
        self._commit_rows(step, [chosen[one.key] for one in requests], {}, computed)

    def _commit_rows(
        self,
        step: Step,
        tokens: Sequence[int],
        firsts: Mapping[Hashable, int],
        computed: Sequence[ComputedChunks],
    ) -> None:
        sampled = self._commit(step, np.array(tokens, dtype=np.int64), computed)
        self._end_finished(self._take_all(len(step.decode_rows), sampled, tokens, firsts))

    def end_rows(self) -> None:
        """End the call; its cached prefixes stay findable."""
        self._end_finished(self._rows)
        self._rows = []

    @property
    def num_unfinished(self) -> int:
        """Number of requests that wait or run."""
        return len(self._scheduler)

    def begin(self) -> None:
        """Drop graphs if the weights have moved; to be called before the first step of a call."""
        self._end_finished(self._collect_late())  # of a last step whose requests had all ended
        fingerprint = self._runner.fingerprint
        self._graphs.begin((fingerprint.key, fingerprint.addresses()), self._is_eager)

    def warm_up(self, max_requests: int | None = None, *, shows_progress: bool = False) -> None:
        """Capture decode steps of up to ``max_requests`` rows (None: one for each request)."""
        count = min(self._scheduler.max_requests, max(max_requests or self.num_unfinished, 1))
        largest = self._size_for(count)
        self._graphs.prepare(
            [size for size in self._sizes if size <= largest],
            self._forwards.decode,
            self._forwards.clear_decodes,
            shows_progress=shows_progress,
        )

    def prepare(self) -> None:
        """Capture all sizes, and cache nothing; to be called while no request runs."""
        self.configure()  # the last call may have turned CUDA graphs off
        self.begin()
        self.warm_up(self.context.max_requests, shows_progress=True)
        if not self._forwards.why_eager:
            self._capture_rectangles()  # pragma: no cover - tests/gpu run it

    def _capture_rectangles(self) -> None:  # pragma: no cover - tests/gpu run it
        """Compute rectangles so that all sizes for graphs are captured and kernels are tuned."""
        began, counted = time.perf_counter(), self._graphs.warm_up_seconds
        longest, largest = self.context.config.max_sequence_length, self.chunk_tokens
        known: set[tuple[int, int]] = set()
        with transformers().utils.logging.tqdm(desc="Capturing rectangles") as bar:
            # The first rectangles measure up to which size a graph saves time: see RectangleCosts.
            while sizes := [x for x in self._forwards.costs.sizes(largest) if x not in known]:
                known.update(sizes)
                bar.reset(total=len(known))
                bar.update(len(known) - len(sizes))
                for rows, size in sizes:
                    if rows <= self.context.max_requests and size <= longest:
                        for saves_states in (False, True):
                            for _ in range(_USES):
                                self._compute_random([size] * rows, saves_states)
                    bar.update()
                torch.cuda.synchronize(self.context.device)
        # Larger rectangles run eagerly: their kernels are compiled and tuned before the first call.
        size = min(_TUNED_TOKENS, longest)
        rows = min(self.context.max_requests, largest // size)
        for lengths in ([size] * rows, [size - 1 - row % 2 for row in range(rows)]):
            self._compute_random(lengths, saves_states=True)
        self._graphs.warm_up_seconds = counted + time.perf_counter() - began

    def _compute_random(  # pragma: no cover - tests/gpu run it
        self, lengths: Sequence[int], saves_states: bool
    ) -> None:
        """Compute random prompts of these lengths in one step; cache nothing."""
        with suppress(CapacityError), self._temporary(self._random_prompts(lengths), saves_states):
            step = self.context.begin_step()
            self._forwards.prefill(step, self.chunk_tokens)
            self.context.commit_step([0] * len(lengths))

    def step(self) -> list[BatchRequest]:
        """Compute one step of all requests that can run, or take the tokens of the last step.

        On a GPU a step begins before the tokens of the last step are on the host, so that the GPU
        need not wait for the host. If the last step turns out to have ended a request, the new
        step's token of this request is discarded.

        If the model raises, the step is aborted: running requests are preempted, keep their
        tokens and resume. A request whose steps fail twice in a row ends with the exception.

        Return the requests that have finished.
        """
        if self._late is not None and self._can_compact():
            return self._end_finished(self._collect_late())
        step, over = self._begin_step()
        if step is None:
            return over + self._end_finished(self._collect_late())
        firsts: dict[Hashable, int] = {}
        try:
            computed, logits = self._compute(step)
            parts, chosen = self._sampling(logits, computed)
            tokens: npt.NDArray[np.int64] | DeviceTokens
            if self._may_be_late(logits, chosen):
                tokens = self._choose_late(step, parts, chosen)
            else:
                tokens, firsts = self._choose(step, parts, chosen)
            # Waiting for the comparison of the weights costs nothing once all work is enqueued.
            self._runner.fingerprint.confirm()
        except (ModelChangedError, PoisonedError):
            raise
        except Exception as error:
            return over + self._end_finished(self._abort_step(step, error))
        ended = self._collect_late()
        sampled = self._commit(step, tokens, computed)
        for request in ended:  # this step's tokens of these requests are discarded
            self.end(request)
        if isinstance(tokens, DeviceTokens):
            self._late = sampled, len(step.decode_rows)
            for request in sampled:
                request.num_late = 1
        else:
            ended += self._take_all(len(step.decode_rows), sampled, tokens.tolist(), firsts)
        return over + self._end_finished(ended)

    def _begin_step(self) -> tuple[Step | None, list[BatchRequest]]:
        """Begin a step if any request can run; return it, and the requests that cannot run."""
        ending: set[Hashable] = set()  # requests whose late token is their last one
        if self._late is None:
            self._compact_rows()
        else:
            late, _ = self._late
            ending = {one.key for one in late if len(one.answer) + one.num_late >= one.max_tokens}
        step, failed = self._scheduler.begin_step(leaves_out=ending), self._scheduler.failed
        for request in failed:
            self.end(request)
        return step, failed

    def _compute(self, step: Step) -> tuple[list[ComputedChunks], torch.Tensor | None]:
        """Compute a step; return its computed chunks, and the logits of decoding requests."""
        computed, max_tokens = [], self._scheduler.max_chunk_tokens
        if step.prefills:
            computed = self._forwards.prefill(step, max_tokens)
        return computed, self._compute_decodes(step)

    def _abort_step(self, step: Step, fault: Exception) -> list[BatchRequest]:
        """Preempt all requests after a failed step; return the requests that have finished."""
        # The frames of the failed forward hold activations, whose memory the next step needs.
        traceback.clear_frames(fault.__traceback__)
        requests = [self._scheduler.find(one.request_id) for one in step.requests]
        # Before preempting: a request without its newest token would compute that token again.
        over = self._collect_late()
        self._scheduler.preempt_all()
        self._decoding = _Decoding()
        for request in requests:
            if request in over:
                continue
            if request.fault is not None:
                request.error = fault
                over.append(request)
            request.fault = fault
        self._has_faults = True
        return over

    def _find(self, request: BatchRequest) -> int:
        """Load a prompt's prefix from the tiers; return how many of its tokens are cached then."""
        prepared, tiers = request.prepared, self._store.tiers
        if tiers.host is not None:
            sequence = CachedSequence(prepared.request, prepared.tokens, prepared.chain)
            tiers.bring(sequence, self.context.config.min_computed_tokens)
        return self.context.match(prepared).skip_tokens

    def _can_compact(self) -> bool:
        """Return whether a smaller batch would hold all remaining requests."""
        if not self._scheduler.is_steady:
            return False
        return self._size_for(len(self._scheduler)) < self._decoding.size

    def _compact_rows(self) -> None:
        """Move requests to lower rows if a smaller batch then holds all remaining ones."""
        if not self._can_compact():
            return
        decoding, left = self._decoding, len(self._scheduler)
        size = self._size_for(left)
        rows = [(row, one) for row, one in enumerate(decoding.by_row) if one and not one.is_over]
        if len(rows) != left:  # new requests get their rows in the next step
            return
        for row, request in rows:
            if row >= size:
                old, key = request.key, self._num_requests
                try:
                    self.context.fork(old, [key])
                except CapacityError:  # a fork needs one more KV block for a moment
                    return
                self.context.finish(old)
                own = replace(request.prepared.request, request_id=key)
                request.prepared = replace(request.prepared, request=own)
                self._scheduler.rename(old, request)
                self._num_requests += 1
                self.counts["moves"] += 1
                self._store.counters["forks"] -= 1  # a move is not counted as a fork

    def _compute_decodes(self, step: Step) -> torch.Tensor | None:
        """Compute a token of each decoding request; return logits by row of the live states."""
        rows = step.decode_rows
        if not len(rows):
            return None
        decoding = self._decoding
        ids = step.sampling_ids[: len(rows)] if step.prefills else step.sampling_ids
        if ids is not decoding.ids and ids != decoding.ids:
            decoding = self._decoding = self._read_decoding(ids, rows)
        else:
            decoding.ids = ids
        idle, size = self._idle_rows(decoding.size), decoding.size
        with self._restoring(idle) if idle else nullcontext():
            logits = self._graphs.run(size, partial(self._forwards.decode, size))
        self.counts["decode_steps"] += 1
        return logits

    @contextmanager
    def _restoring(self, rows: Sequence[int]) -> Iterator[None]:
        """Restore the live states of ``rows`` after the body."""
        live, at = self.context.live_states.tensors, ints_to_device(rows, self.context.device)
        kept = {name: tensor.index_select(1, at) for name, tensor in live.items()}
        yield
        for name, states in kept.items():
            live[name].index_copy_(1, at, states)

    def _idle_rows(self, bound: int) -> list[int]:
        """Return rows below ``bound`` whose requests run but do not decode in this step."""
        if self._scheduler.is_steady:
            return []
        table = self.context.request_table
        rows = range(min(bound, len(table.num_blocks)))
        return [r for r in rows if r not in table.decoding_rows and table.num_blocks.item(r)]

    def _read_decoding(self, ids: tuple[Hashable, ...], rows: npt.NDArray[np.int64]) -> _Decoding:
        size = self._size_for(int(rows.max()) + 1)
        requests = [self._scheduler.find(key) for key in ids]
        by_row: list[BatchRequest | None] = [None] * size
        for row, request in zip(rows.tolist(), requests, strict=True):
            by_row[row] = request
        is_simple = all(one.settings.is_simple for one in requests)
        return _Decoding(ids, requests, by_row, size, is_simple)

    def _size_for(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)

    def _sampling(
        self, logits: torch.Tensor | None, computed: Sequence[ComputedChunks]
    ) -> tuple[list[_Part], list[BatchRequest]]:
        """Return logits with their requests, and requests and forks that sample first tokens."""
        parts: list[_Part] = []
        if logits is not None:
            decoding = self._decoding
            parts.append(
                (logits, [None] * decoding.size if decoding.is_simple else decoding.by_row)
            )
        chosen: list[BatchRequest] = []
        for chunks in computed:
            numbers: list[int] = []
            sampling: list[BatchRequest] = []
            for number, part in enumerate(chunks.requests):
                if not part.samples:
                    continue
                request = self._scheduler.find(part.request_id)
                forks = () if request.answer else request.forks
                waiting = (self._scheduler.find(o.key) for o in forks if self._scheduler.knows(o))
                for one in (request, *waiting):
                    if not one.answer:
                        one.begin_answer()
                    numbers.append(number)
                    sampling.append(one)
            if sampling:
                chosen += sampling
                rows = [chunks.logits[number : number + 1] for number in numbers]
                parts.append((torch.cat(rows), sampling))
        return parts, chosen

    def _choose(
        self, step: Step, parts: Sequence[_Part], chosen: Sequence[BatchRequest]
    ) -> tuple[npt.NDArray[np.int64], dict[Hashable, int]]:
        """Choose the step's tokens and copy them to the host; this waits for the device.

        Return a token for each sampling request, in the step's order; and the tokens of ``chosen``
        by request key.
        """
        if not parts:
            return np.zeros(0, dtype=np.int64), {}
        size = self._decoding.size if len(step.decode_rows) else 0
        pieces = [choose_tokens(*part) for part in parts]
        host = _join(pieces).cpu().numpy()
        if self._wants_logprobs:
            shares = [each.float().log_softmax(-1) for each, _ in parts]
            pairs = zip(shares, pieces, strict=True)
            found = _join([share.gather(-1, own[:, None])[:, 0] for share, own in pairs]).cpu()
            of_decoded = found[:size][torch.from_numpy(step.decode_rows)] if size else found[:0]
            requests = [*(self._decoding.requests if size else ()), *chosen]
            values = [*of_decoded.tolist(), *found[size:].tolist()]
            for request, value in zip(requests, values, strict=True):
                request.logprobs.append(value)
        firsts = {one.key: token for one, token in zip(chosen, host[size:].tolist(), strict=True)}
        tokens = [firsts[part.request_id] for part in step.prefills if part.samples]
        decoded = host[:size][step.decode_rows] if size else host[:0]
        return np.concatenate([decoded, np.array(tokens, dtype=np.int64)]), firsts

    def _may_be_late(self, logits: torch.Tensor | None, chosen: list[BatchRequest]) -> bool:
        """Return whether the next step may begin before this step's tokens reach the host."""
        decoding = [] if logits is None else self._decoding.requests
        requests = [*decoding, *chosen]
        needs_tokens = self._wants_logprobs or any(
            one.settings.make_processors is not None or (one.forks and not one.answer)
            for one in requests
        )
        return self._runs_ahead and not needs_tokens and bool(requests)

    def _choose_late(
        self, step: Step, parts: Sequence[_Part], chosen: Sequence[BatchRequest]
    ) -> DeviceTokens:
        """Choose the step's tokens without copying them to the host."""
        pieces = [choose_tokens(*part) for part in parts]
        places = step.decode_rows.tolist()
        firsts = {
            one.key: place for place, one in enumerate(chosen, len(parts[0][0]) if places else 0)
        }
        # A chunk that does not end its prompt gets an arbitrary token, which is not read.
        places += [firsts.get(part.request_id, 0) for part in step.prefills]
        at = ints_to_device(places, self.context.device)
        return DeviceTokens(_join(pieces).index_select(0, at)[:, None])

    def _collect_late(self) -> list[BatchRequest]:
        """Copy late tokens to the host and append them; return the requests that have finished."""
        if self._late is None:
            return []
        (late, num_decodes), self._late = self._late, None
        found = self.context.collect_step()
        for request in late:
            request.num_late = 0
        # Some requests were ended or preempted in the meantime.
        num_decodes = sum(one.key in found for one in late[:num_decodes])
        taken = [one for one in late if one.key in found]
        return self._take_all(num_decodes, taken, [found[one.key][0] for one in taken], {})

    def _commit(
        self,
        step: Step,
        tokens: npt.NDArray[np.int64] | DeviceTokens,
        computed: Sequence[ComputedChunks],
    ) -> list[BatchRequest]:
        """Commit a step; return the requests that sampled, in the order of their tokens."""
        while self._unannounced:
            prepared = self._unannounced.pop(0)
            self._store.tell_admitted(prepared.request, prepared.hashes)
        decoded = self._decoding.requests if len(step.decode_rows) else []
        chunks = [(self._scheduler.find(part.request_id), part) for part in step.prefills]
        self.context.commit_step(tokens)
        if self._has_faults:
            for one in step.requests:
                self._scheduler.find(one.request_id).fault = None
        self.counts["steps"] += 1
        self.counts["prefill_forwards"] += len(computed)
        self.counts["rectangles"] += sum(len(chunks.requests) > 1 for chunks in computed)
        self.counts["padding_tokens"] += sum(chunks.num_padded for chunks in computed)
        self.counts["prefill_tokens"] += sum(part.num_tokens for _, part in chunks)
        return decoded + [request for request, part in chunks if part.samples]

    def _take_all(
        self,
        num_decodes: int,
        requests: Sequence[BatchRequest],
        tokens: Sequence[int],
        firsts: Mapping[Hashable, int],
    ) -> list[BatchRequest]:
        """Append a token to each request's answer; return the requests that finish with it.

        Requests that had finished before are skipped. The first ``num_decodes`` requests decoded.
        ``firsts`` has the first tokens of forks.
        """
        self.counts["decoded_tokens"] += sum(not one.is_over for one in requests[:num_decodes])
        forks: list[tuple[BatchRequest, int]] = []
        for request in requests:
            if request.forks and not request.answer:
                for fork in self._scheduler.fork(request, lambda one: firsts[one.key]):
                    fork.begin()
                    forks.append((fork, firsts[fork.key]))
        taken = [*zip(requests, tokens, strict=True), *forks]
        return [one for one, token in taken if not one.is_over and self._take(one, token)]

    def _end_finished(self, over: list[BatchRequest]) -> list[BatchRequest]:
        """End finished requests between two steps; return them."""
        for request in over:
            if not request.is_over:
                self.end(request)
        tiers = self._store.tiers
        # Spilling blocks this thread: do it when idle, or when too many copies wait.
        if not self.num_unfinished or tiers.num_offers > _MAX_OFFERS:
            tiers.spill()
        if self._has_listeners and not self._runner.fingerprint.is_current():
            raise ModelChangedError(
                "the model was changed while generate_batch ran, by a streamer or a processor: "
                "call reset(), because cached prefixes may come from both models"
            )
        return over

    def _take(self, request: BatchRequest, token: int) -> bool:
        """Append a token to an answer; return whether it is the last one."""
        answer, settings = request.answer, request.settings
        if request.error is not None:
            return True
        answer.append(token)
        request.timestamps.append(time.perf_counter())
        if request.first_token is not None and len(answer) == 1:
            return False  # this token is the prompt's last one, which ends no answer
        try:
            if request.tell is not None:
                request.tell(token)
            if token in settings.eos_token_ids or settings.ends(request.prompt, answer):
                return True
        except Exception as error:  # this request's streamer or criterion failed; others continue
            request.refuse(error)
            return True
        if len(answer) < request.max_tokens:
            return False
        if len(answer) < settings.max_new_tokens:
            count = len(request.prepared.tokens) + len(answer)
            request.error = SequenceLengthError(
                f"request {request.request_id!r} has {count} tokens and cannot go on: "
                f"the longest sequence is {count - 1} tokens"
            )
        return True

    def end(self, request: BatchRequest) -> None:
        """End a request between two steps; its cached prefixes stay findable."""
        if self._scheduler.knows(request):
            self._scheduler.remove(request.key)
        request.end()

    def check(self) -> None:
        """Compare a batch of prompts with each prompt alone; no request may be running."""
        runner, name = self._runner, type(self._runner.model).__name__
        prompts = self._random_prompts(self._lengths_to_check())
        try:
            logits = self._compute_temporary(prompts)
        except (InvalidArgumentError, CapacityError, ModelChangedError):
            raise
        except Exception as error:
            raise UnresumableModelError(
                f"{name} cannot be run over several requests at once: {error!r}; generate serves it"
            ) from error
        errors: list[float] = []
        roundings: list[float] = []
        for prompt, actual in zip(prompts, logits, strict=True):
            cache = runner.new_cache()
            runner.forward(prompt[:-1], cache, 0)
            expected = runner.forward(prompt[-1:], cache, len(prompt) - 1)[0, -1]
            whole = runner.forward(prompt, runner.new_cache(), 0)[0, -1]
            errors.append(distance(expected, actual))
            roundings.append(distance(expected, whole))
        is_single = runner.placement()[1].itemsize >= torch.float32.itemsize
        # In half precision a router may choose other experts for one prompt. Two forwards and one
        # forward over the same prompt show how much the model's own results vary.
        typical, rounding = (sorted(each)[len(each) // 2] for each in (errors, roundings))
        if not typical <= max(_TOLERANCES[is_single], min(3 * rounding, _MAX_TOLERANCE)):
            raise UnresumableModelError(
                f"{name} computes something else for several requests at once than for each alone: "
                f"the relative error of its logits is {typical:.1e}; generate serves it"
            )

    def _random_prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return random prompts of these lengths, the same in each call."""
        generator = torch.Generator(device="cpu").manual_seed(2)
        return [random_tokens(self._runner, size, generator) for size in lengths]

    def _lengths_to_check(self) -> list[int]:
        """Return the lengths of up to three sequences that fit beside the pins."""
        config, count = self.context.config, min(self.context.max_requests, 3)
        longest = min(config.max_sequence_length - 1, config.max_tokens // count)
        # The decoded token is counted.
        given = [min(n, longest) + 1 for n in (config.block_size_tokens + 3, 5, 2)[:count]]
        fewer = given, given[:2], given[1:], given[-1:]
        return next((one for one in fewer if one and self.has_room(one)), given[-1:])

    def _compute_temporary(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Compute sequences as requests whose last token is decoded; cache nothing.

        Sequences have at least two tokens. Return [vocabulary] logits after each one's last token.
        """
        with self._temporary([tokens[:-1] for tokens in sequences]):
            step = self.context.begin_step()
            self._forwards.prefill(step, self.context.config.max_tokens)
            self.context.commit_step([tokens[-1] for tokens in sequences])
            rows = self.context.begin_step().decode_rows.tolist()
            logits = self._forwards.decode(self._size_for(max(rows) + 1))
            return [logits[row].clone() for row in rows]

    @contextmanager
    def _temporary(
        self, prompts: Sequence[Sequence[int]], saves_states: bool = False
    ) -> Iterator[None]:
        """Add requests while the body runs; then remove their cached prefixes and counts."""
        blocks, before = self.context.kv_block_allocator, self._store.counters.copy()
        salt, self._store.placement.is_off = os.urandom(16), not saves_states
        counts = Counter(self.counts)
        prepared = [
            self.context.prepare(Request(request_id=n, prompt_tokens=tokens, cache_salt=salt))
            for n, tokens in enumerate(prompts)
        ]
        try:
            for one in prepared:
                self.context.add_request(one)
            yield
        finally:
            self._store.placement.is_off = False
            self.context.reset(preserve_prefix_cache=True)
            for one in prepared:
                blocks.deregister_blocks(blocks.match_prefix(one.hashes))
            self._store.counters.clear()
            self._store.counters.update(before)
            captures = self.counts["captures"]
            self.counts.clear()
            self.counts.update(counts | Counter(captures=captures))

    def stats(self) -> BatchStats:
        """Return the counts so far."""
        graphs, counts = self._graphs, cast("dict[str, Any]", dict(self.counts))
        return BatchStats(
            **counts,
            graph_sizes=graphs.sizes,
            graph_shapes=graphs.num_shapes,
            graph_bytes=graphs.num_bytes,
            warm_up_seconds=graphs.warm_up_seconds,
            eager_reason=graphs.eager_reason,
            prefill_eager_reason=self._forwards.why_eager,
        )

    def drop(self) -> None:
        """Drop all requests and the step in flight; keep cached prefixes."""
        self._clear()
        self.context.reset(preserve_prefix_cache=True)

    def reset(self, *, keeps_graphs: bool = False) -> None:
        """Drop all requests, cached prefixes and counts, and the graphs unless they are kept.

        Graphs may be kept if only the values of weights have changed: they read the same memory.
        """
        self._clear()
        if not keeps_graphs:
            self._graphs.forget()
        self.counts.clear()
        self.context.reset()

    def _clear(self) -> None:
        self._forwards.put_back()
        self._scheduler.reset()
        self._decoding = _Decoding()
        self._has_faults = False
        self._rows, self._unannounced, self._open, self._late = [], [], None, None
        self._has_listeners = False


def _join(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([*pieces]) if len(pieces) > 1 else pieces[0]


def _longest(runner: ModelRunner, num_tokens: int) -> int:
    """Return the maximum length of a sequence: the model's, if the KV blocks hold it."""
    longest = getattr(runner.config, "max_position_embeddings", None)
    return min(num_tokens, longest if isinstance(longest, int) and longest > 0 else _LONGEST)
