"""The server's models with their caches, its requests, and the thread that runs batches."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from mamba_cache.errors import (
    InvalidArgumentError,
    MambaCacheError,
    ModelChangedError,
    StepOrderError,
)
from mamba_cache.integrations.transformers.batching.answers import BatchRequest
from mamba_cache.integrations.transformers.batching.batcher import Batcher
from mamba_cache.integrations.transformers.batching.calls import answer_output, failed_output
from mamba_cache.integrations.transformers.checkpoints import chat_checkpoints
from mamba_cache.integrations.transformers.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from mamba_cache.integrations.events import EventPublisher  # an extra

__all__ = [
    "BatchManager",
    "ServedModel",
    "ServedModels",
    "ServedRequest",
    "current_request",
]

_log = logging.getLogger(__name__)

current_request: ContextVar[ServedRequest | None] = ContextVar("current_request", default=None)
"""The current request, also in tasks that its handler begins, such as a stream."""


@dataclass(slots=True, eq=False)
class ServedRequest:
    """One request of a model."""

    handler: Any = None  # the server's handler that answers it
    body: dict[str, Any] = field(default_factory=dict)  # what the client sent
    cache_salt: str | None = None  # requests of different salts share nothing
    messages: Sequence[Any] | None = None  # the chat, as the template gets it
    # Tokens of the prompt that were not computed; None: not known yet, or there is no cache.
    cached_tokens: int | None = None
    # For batched requests only: settings, positions where other prompts diverge, error, progress.
    settings: Any = None  # ``AnswerSettings``
    checkpoints: Sequence[int] = ()
    error: BaseException | None = None
    request_id: str = ""
    tokens: list[int] = field(default_factory=list)  # the prompt's tokens
    is_streaming: bool = False  # an output is delivered for every token
    deliver: Callable[[Any], None] | None = None  # result callback; None until registered
    request: BatchRequest | None = None  # its request in the batch
    is_cancelled: bool = False  # the client has disconnected
    num_delivered: int = 0  # answer tokens that were delivered, or will be at the end
    was_restarted: bool = False  # it was submitted again after a call that raised

    @property
    def will_continue(self) -> bool | None:
        """Whether a longer prompt will probably follow: a hint, no promise.

        A chat with tools or with an earlier answer continues more often than a first question. For
        completions it is unknown.
        """
        if self.messages is None:
            return None
        roles = {message.get("role") for message in self.messages if isinstance(message, dict)}
        return bool(self.body.get("tools")) or not roles.isdisjoint(("assistant", "tool"))

    def find_checkpoints(self, processor: Any, token_ids: Sequence[int]) -> list[int]:
        """Return the positions at which other prompts will diverge from this one.

        ``processor`` is a tokenizer, or a multimodal processor that has one.
        """
        if self.messages is None:
            return []
        tokenizer = getattr(processor, "tokenizer", processor)
        # The same arguments with which the server rendered the chat.
        options = dict(getattr(self.handler, "chat_template_kwargs", {}))
        options.update(self.body.get("chat_template_kwargs") or {})
        tools = self.body.get("tools")
        normalize = getattr(self.handler, "_normalize_tools", None)
        options["tools"] = tools if normalize is None else normalize(tools)
        return chat_checkpoints(tokenizer, self.messages, token_ids, **options)


_SERVER = "transformers server"
"""The source of hints: a policy trusts a source as far as its hints come true."""


class BatchManager:
    """Runs the server's requests in a thread.

    It has the methods of transformers' ``ContinuousBatchingManager`` that the server calls.

    A request with bad settings, processors or prompt fails alone. When a call of the cache raises,
    the cache is reset if necessary. Requests without a delivered token then run again from their
    beginning, once each; the other requests fail with the error.
    """

    def __init__(self, cache: PrefixCache, batching_config: Any = None) -> None:
        self.batching_config = batching_config
        self._cache = cache
        self._lock = threading.Lock()
        self._arrivals: dict[str, ServedRequest] = {}
        self._wake = threading.Event()
        self._is_stopped = False
        self.ended_by: BaseException | None = None  # why requests fail once the thread has ended
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.background_thread_status = SimpleNamespace(fatal_error=None)
        self.batch_processor = None

    def start(self) -> None:
        """Start the thread."""
        # A thread that is inside PyTorch when the interpreter exits would abort the process.
        atexit.register(self._stop_at_exit)
        self._thread.start()

    def stop(self, block: bool = True, timeout: float | None = None, **_: Any) -> None:
        """End the thread when all present requests have been answered."""
        self._is_stopped = True
        self._wake.set()
        if block:
            self._thread.join(timeout)

    def add_request(
        self, input_ids: Sequence[int], request_id: str, *, streaming: bool = False, **_: Any
    ) -> str:
        """Queue the prompt of the current request, with its ``settings``.

        With ``streaming`` an output is delivered for each token. Return the request's name; it
        differs from ``request_id`` if a request of that name runs, because clients choose names.
        """
        arrival = current_request.get() or ServedRequest()
        with self._lock:
            while request_id in self._arrivals:
                request_id += "'"
        arrival.request_id, arrival.tokens = request_id, list(input_ids)
        arrival.is_streaming = streaming
        self._admit(arrival)
        return request_id

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        """Register the current request's callback, before or after ``add_request``.

        ``callback`` is called in the running event loop with each ``GenerationOutput``.
        """
        loop = asyncio.get_running_loop()

        def deliver(output: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed: the client has disconnected
                loop.call_soon_threadsafe(callback, output)

        arrival = current_request.get() or ServedRequest()
        arrival.deliver = deliver
        self._admit(arrival)

    def _admit(self, arrival: ServedRequest) -> None:
        """Admit a request once ``add_request`` and ``register_result_handler`` were called."""
        if not arrival.request_id or arrival.deliver is None:
            return
        with self._lock:
            self._arrivals[arrival.request_id] = arrival
            reason = self.ended_by
        self._wake.set()
        if reason is not None:
            self._fail_all(reason)

    def cancel_request(self, request_id: str) -> None:
        """Cancel a request; it ends after the present step."""
        with self._lock:
            arrival = self._arrivals.get(request_id)
            if arrival is not None:
                arrival.is_cancelled = True
        self._wake.set()

    def _stop_at_exit(self) -> None:
        with self._lock:
            for arrival in self._arrivals.values():
                arrival.is_cancelled = True
        self.stop()

    def _work(self) -> None:
        reason: BaseException = StepOrderError("the thread that runs requests has ended")
        try:
            self._run_until_stopped()
        except ModelChangedError as error:  # the server continues without batches
            reason = error
        except BaseException as error:
            reason = self.background_thread_status.fatal_error = error
            raise
        finally:
            with self._lock:
                self.ended_by = reason
            self._fail_all(reason)
            del self._cache  # the server keeps this object when the model is unloaded
            atexit.unregister(self._stop_at_exit)

    def _run_until_stopped(self) -> None:
        while True:
            self._wake.clear()  # the call may raise before ``run`` clears it
            try:
                self._cache.run_batches(self)
            except Exception as error:
                self._restart(error)
            if self._is_stopped and not self._arrivals:
                return
            self._wake.wait()

    def _restart(self, error: Exception) -> None:
        """Restart requests after a call that raised; fail those that cannot run again.

        Raises:
            ModelChangedError: The model was moved or cast, so its cache cannot be used.
        """
        if isinstance(error, ModelChangedError):
            self._cache.reset()
        with self._lock:
            known = list(self._arrivals.values())
        for arrival in known:
            has_output = arrival.is_streaming and arrival.num_delivered > 0
            if has_output or arrival.was_restarted:
                self._fail(arrival, error)
            else:
                arrival.was_restarted, arrival.request, arrival.num_delivered = True, None, 0
                self._wake.set()

    def run(self, batcher: Batcher, begin: Callable[[], None]) -> None:
        """Run all requests, including those that arrive during the call, until none waits.

        ``begin`` checks the model before new requests are added.
        """
        while True:
            self._wake.clear()
            with self._lock:
                known = list(self._arrivals.values())
            new = [one for one in known if one.request is None and not one.is_cancelled]
            if new:
                begin()
            for arrival in new:
                self._submit(batcher, arrival)
            for arrival in known:
                if arrival.is_cancelled:
                    self._cancel(batcher, arrival)
            if not batcher.num_unfinished:
                return
            batcher.step()
            self._tell(known)

    def _submit(self, batcher: Batcher, arrival: ServedRequest) -> None:
        try:
            [arrival.request] = batcher.submit(
                arrival.request_id,
                arrival.tokens,
                arrival.settings,
                seed=int(torch.randint(2**62, (), device="cpu")),
                cache_salt=arrival.cache_salt,
                checkpoint_positions=arrival.checkpoints,
                will_continue=arrival.will_continue,
                source=_SERVER,
            )
        except Exception as error:  # the fault of this request alone, which was not submitted
            self._fail(arrival, error)

    def _cancel(self, batcher: Batcher, arrival: ServedRequest) -> None:
        if arrival.request is not None and not arrival.request.is_over:
            batcher.end(arrival.request)
        with self._lock:
            self._arrivals.pop(arrival.request_id, None)

    def _tell(self, arrivals: Sequence[ServedRequest]) -> None:
        for arrival in arrivals:
            request = arrival.request
            if request is None or arrival.is_cancelled:
                continue
            if request.answer and not arrival.num_delivered:
                arrival.cached_tokens = request.cached_tokens
            is_new = len(request.answer) > arrival.num_delivered
            arrival.num_delivered = len(request.answer)
            if request.is_over:
                arrival.error = request.error
                self._end(arrival, answer_output(request))
            elif is_new and arrival.is_streaming and arrival.deliver is not None:
                arrival.deliver(answer_output(request))

    def _end(self, arrival: ServedRequest, output: Any) -> None:
        assert arrival.deliver is not None  # checked by ``_admit``
        arrival.deliver(output)
        with self._lock:
            self._arrivals.pop(arrival.request_id, None)

    def _fail(self, arrival: ServedRequest, error: BaseException) -> None:
        arrival.error = error
        self._end(arrival, failed_output(arrival.request_id, arrival.tokens, error))

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            known = list(self._arrivals.values())
        for arrival in known:
            if not arrival.is_cancelled:
                self._fail(arrival, error)


_MAX_REASONS = 16
"""Maximum number of different warnings about a model's requests; each is logged once."""


class ServedModels:
    """The loaded models; their ``PrefixCache`` objects are made with ``settings``.

    ``make_publisher`` makes a publisher of events. It publishes one cache at a time: the first
    one, and after its model was unloaded, the next one.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        make_publisher: Callable[[], EventPublisher] | None = None,
    ) -> None:
        self._settings = settings
        self._make_publisher = make_publisher
        self._publisher = make_publisher() if make_publisher else None
        self._published_model: Any = None
        # Each entry keeps its model alive, so no other object gets the model's id.
        self._by_id: dict[int, ServedModel] = {}

    def add(self, model: Any) -> None:
        """Add a loaded model."""
        self._by_id[id(model)] = ServedModel(model, self._settings, self._tell)

    def drop(self, model: Any) -> None:
        """Remove a model that is unloaded; a running call keeps it alive until the call ends."""
        served = self._by_id.pop(id(model), None)
        if served is not None and served.manager is not None:
            served.manager.stop(block=False)
        if self._published_model is model and self._publisher is not None and self._make_publisher:
            self._published_model = None
            self._publisher.close()
            self._publisher = self._make_publisher()

    def close(self) -> None:
        """Close the publisher of events."""
        self._make_publisher = None
        if self._publisher is not None:
            self._publisher.close()

    def _tell(self, model: Any, cache: PrefixCache) -> None:
        """Publish the events of a new cache, unless another cache is published."""
        if self._publisher is None:
            return
        if self._published_model is not None:
            _log.warning(
                "KV events are published for %s, and none for %s: give each model a server",
                _name_of(self._published_model),
                _name_of(model),
            )
            return
        self._published_model = model
        self._publisher.watch(cache)

    def find(self, model: Any) -> ServedModel | None:
        """Return the entry of a model; None if the server has not loaded it, or has unloaded it."""
        return self._by_id.get(id(model))

    def caches(self, loaded: Mapping[str, Any]) -> Iterator[tuple[str, PrefixCache]]:
        """Yield the present caches, with the names under which the server has loaded the models."""
        for name, timed in list(loaded.items()):
            served = self.find(timed.model)
            if served is not None and served.cache is not None:
                yield name, served.cache

    def asked(self, model: Any) -> Any:
        """Return the object whose ``generate`` the server calls for the current request."""
        served, request = self.find(model), current_request.get()
        return model if served is None or request is None else _RequestModel(served, request)


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model and its cache, which the first request makes; ``tell`` is called with a new cache.

    ``cache`` is None before the first request, and if the model cannot be cached.
    """

    model: Any
    settings: Mapping[str, Any]
    tell: Callable[[Any, PrefixCache], object]
    cache: PrefixCache | None = None
    manager: BatchManager | None = None
    max_sequence_length: int | None = None  # in tokens, of batches
    _is_tried: bool = False
    serves_batches: bool | None = None  # None: not tried, or there is no cache
    _said: set[str] = field(default_factory=set)

    def prepare(self) -> PrefixCache | None:
        """Make the cache in the first call; log the reason if the model cannot be cached.

        To be called in the thread that calls the model, or before the server begins.
        """
        if not self._is_tried:
            self._is_tried = True
            try:
                self.cache = PrefixCache(self.model, **self.settings)
            except Exception as error:  # a model that cannot be cached may raise any exception
                self._warn(f"is served without a prefix cache: {str(error) or repr(error)}")
            else:
                self.tell(self.model, self.cache)
        return self.cache

    def batches(self) -> PrefixCache | None:
        """Return the cache if it can batch requests; otherwise log the reason once."""
        cache = self.prepare()
        if cache is not None and self.serves_batches is None:
            try:
                self.max_sequence_length = cache.prepare_batches()
                self.serves_batches = True
            except (MambaCacheError, torch.OutOfMemoryError) as error:
                self.serves_batches = False
                self._warn(f"is served request by request: {error}")
        if self.manager is not None and isinstance(self.manager.ended_by, ModelChangedError):
            self.serves_batches = False  # the model was moved or cast
        return cache if self.serves_batches else None

    def generate(self, request: ServedRequest, options: dict[str, Any]) -> Any:
        """Call ``generate`` of the cache, or of the model if the cache cannot serve the request.

        Set the number of cached tokens in the request.
        """
        cache = self.prepare()
        if cache is None:
            return self.model.generate(**options)
        ids = options["input_ids"][0].tolist()

        def count() -> None:
            # No other call uses the cache here: all calls of a model come from one thread.
            request.cached_tokens = cache.last_skipped_tokens

        for _ in range(2):  # twice, because the first call may end in a reset
            listener = _Streamer(options["streamer"], count) if options.get("streamer") else None
            try:
                output = cache.generate(
                    cache_salt=request.cache_salt,
                    checkpoints=request.find_checkpoints(options["tokenizer"], ids),
                    will_continue=request.will_continue,
                    source=_SERVER,
                    **{**options, "streamer": listener},
                )
            except (InvalidArgumentError, ModelChangedError) as error:
                if listener is not None and listener.has_begun:
                    raise
                if isinstance(error, InvalidArgumentError):
                    self._warn(f"answers such requests without its prefix cache: {error}")
                    break
                try:
                    cache.reset()
                    self._warn(f"begins its prefix cache anew: {error}")
                except ModelChangedError as reason:  # the model was moved or cast
                    self._warn(f"is served without a prefix cache: {reason}")
                    cache.close()  # also publishes the removal of its entries
                    self.cache = None
                    break
            else:
                count()
                return output
        request.cached_tokens = None
        return self.model.generate(**options)

    def _warn(self, what: str) -> None:
        """Log a message once."""
        if what not in self._said and len(self._said) < _MAX_REASONS:
            self._said.add(what)
            _log.warning("%s %s", _name_of(self.model), what)


def _name_of(model: Any) -> str:
    return f"{type(model).__name__} ({getattr(model, 'name_or_path', '')})"


class _RequestModel:
    """A model for one request: ``generate`` uses the cache; all else is the model's."""

    def __init__(self, served: ServedModel, request: ServedRequest) -> None:
        self._served = served
        self._request = request

    def generate(self, **options: Any) -> Any:
        return self._served.generate(self._request, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._served.model, name)


class _Streamer:
    """Passes tokens to the server's streamer; holds back the prompt until the first token.

    Until then the call may be repeated with a new object of this class.
    """

    def __init__(self, streamer: Any, on_answer: Callable[[], None]) -> None:
        self._streamer = streamer
        self._on_answer = on_answer
        self._prompt: Any = None
        self.has_begun = False  # the streamer has got a token of the answer

    def put(self, value: Any) -> None:
        """Take the prompt, and then each token."""
        if self._prompt is None:
            self._prompt = value
        else:
            self._begin()
            self._streamer.put(value)

    def end(self) -> None:
        self._begin()
        self._streamer.end()

    def _begin(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._on_answer()
            self._streamer.put(self._prompt)
