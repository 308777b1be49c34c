"""The models that the server has loaded, each with a prefix cache where it can have one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mamba_cache.errors import InvalidArgumentError, MambaCacheError, ModelChangedError
from mamba_cache.integrations.transformers.prefix_cache import PrefixCache
from mamba_cache.integrations.transformers.serve.requests import (
    SERVER,
    BatchManager,
    ServedRequest,
    current_request,
)

if TYPE_CHECKING:
    from mamba_cache.integrations.events import EventPublisher  # an extra

__all__ = ["ServedModel", "ServedModels"]

_log = logging.getLogger(__name__)

_MAX_REASONS = 16
"""Warnings of a model's requests that are logged, each once."""


class ServedModels:
    """The models that are loaded; each one's ``PrefixCache`` is made with ``settings``.

    ``make_publisher`` makes what tells routers of a cache: of the first that is made, and when its
    model is unloaded, of the next.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        make_publisher: Callable[[], EventPublisher] | None = None,
    ) -> None:
        self._settings = settings
        self._make_publisher = make_publisher
        self._publisher = make_publisher() if make_publisher else None
        self._told_model: Any = None
        # Each entry holds its model, so that no other object has its id.
        self._by_id: dict[int, ServedModel] = {}

    def add(self, model: Any) -> None:
        """Take in a model that was loaded."""
        self._by_id[id(model)] = ServedModel(model, self._settings, self._tell)

    def drop(self, model: Any) -> None:
        """Let go of a model that is unloaded; a call that still runs keeps it until it ends."""
        served = self._by_id.pop(id(model), None)
        if served is not None and served.manager is not None:
            served.manager.stop(block=False)
        if self._told_model is model and self._publisher is not None and self._make_publisher:
            self._told_model = None
            self._publisher.close()
            self._publisher = self._make_publisher()

    def close(self) -> None:
        """Tell nobody anything any more."""
        self._make_publisher = None
        if self._publisher is not None:
            self._publisher.close()

    def _tell(self, model: Any, cache: PrefixCache) -> None:
        """Tell routers of a cache that was made, unless they are told of another."""
        if self._publisher is None:
            return
        if self._told_model is not None:
            _log.warning(
                "routers are told what %s has cached, and nothing of %s: give each model a server",
                _name_of(self._told_model),
                _name_of(model),
            )
            return
        self._told_model = model
        self._publisher.watch(cache)

    def find(self, model: Any) -> ServedModel | None:
        """Return the entry of a model, None if it was not loaded by the server, or is no more."""
        return self._by_id.get(id(model))

    def caches(self, loaded: Mapping[str, Any]) -> Iterator[tuple[str, PrefixCache]]:
        """Yield the caches that are there now, by the names of what the server has loaded."""
        for name, timed in list(loaded.items()):
            served = self.find(timed.model)
            if served is not None and served.cache is not None:
                yield name, served.cache

    def asked(self, model: Any) -> Any:
        """Return what the server is to call ``generate`` of for the current request."""
        served, request = self.find(model), current_request.get()
        return model if served is None or request is None else _Asked(served, request)


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model, and its cache from the first request on that needs it, of which ``tell`` is told.

    The cache is None before it is made, and where the model can have none.
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
        """Make the cache if that was not tried yet, and says why if there can be none.

        Called where the model is called: in its thread, or before the server begins.
        """
        if not self._is_tried:
            self._is_tried = True
            try:
                self.cache = PrefixCache(self.model, **self.settings)
            except Exception as error:  # whatever a model raises that was not made for it
                self._warn(f"is served without a prefix cache: {str(error) or repr(error)}")
            else:
                self.tell(self.model, self.cache)
        return self.cache

    def batches(self) -> PrefixCache | None:
        """Return the cache if it serves the model in batches, else say why not, once."""
        cache = self.prepare()
        if cache is not None and self.serves_batches is None:
            try:
                self.max_sequence_length = cache.prepare_batches()
                self.serves_batches = True
            except (MambaCacheError, torch.OutOfMemoryError) as error:
                self.serves_batches = False
                self._warn(f"is served request by request: {error}")
        if self.manager is not None and isinstance(self.manager.ended_by, ModelChangedError):
            self.serves_batches = False  # it was moved or cast
        return cache if self.serves_batches else None

    def generate(self, request: ServedRequest, options: dict[str, Any]) -> Any:
        """Do what ``model.generate`` does, through the cache where it serves that.

        The request is told how many tokens were cached.
        """
        cache = self.prepare()
        if cache is None:
            return self.model.generate(**options)
        ids = options["input_ids"][0].tolist()

        def count() -> None:
            # Nobody else uses the cache meanwhile: all calls of a model come from one thread.
            request.cached_tokens = cache.last_skipped_tokens

        for _ in range(2):  # again after a reset
            listener = _Listener(options["streamer"], count) if options.get("streamer") else None
            try:
                output = cache.generate(
                    cache_salt=request.cache_salt,
                    checkpoints=request.find_checkpoints(options["tokenizer"], ids),
                    will_continue=request.will_continue,
                    source=SERVER,
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
                except ModelChangedError as reason:  # it was moved or cast
                    self._warn(f"is served without a prefix cache: {reason}")
                    cache.close()  # so that routers hear of it as well
                    self.cache = None
                    break
            else:
                count()
                return output
        request.cached_tokens = None
        return self.model.generate(**options)

    def _warn(self, what: str) -> None:
        """Say once what becomes of a request."""
        if what not in self._said and len(self._said) < _MAX_REASONS:
            self._said.add(what)
            _log.warning("%s %s", _name_of(self.model), what)


def _name_of(model: Any) -> str:
    return f"{type(model).__name__} ({getattr(model, 'name_or_path', '')})"


class _Asked:
    """A model as one request sees it: its ``generate`` goes through the cache."""

    def __init__(self, served: ServedModel, request: ServedRequest) -> None:
        self._served = served
        self._request = request

    def generate(self, **options: Any) -> Any:
        return self._served.generate(self._request, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._served.model, name)


class _Listener:
    """Hands tokens on to the server's streamer, which gets the prompt with the first of them.

    Until then the call may begin again, with another listener.
    """

    def __init__(self, streamer: Any, on_answer: Callable[[], None]) -> None:
        self._streamer = streamer
        self._on_answer = on_answer
        self._prompt: Any = None
        self.has_begun = False  # a token of the answer was handed on

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
