"""Installation of prefix caches behind transformers' own server, by replacing its functions."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Literal

from mamba_cache._checks import check_choice
from mamba_cache._extras import install_hint
from mamba_cache.errors import (
    InvalidArgumentError,
    MissingExtraError,
    SequenceLengthError,
    StepOrderError,
    UnsupportedVersionError,
)
from mamba_cache.integrations.transformers.batching.answers import AnswerSettingsReader
from mamba_cache.integrations.transformers.fingerprint import WeightsCheck
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.integrations.transformers.options import has_librarys_loop
from mamba_cache.integrations.transformers.prefix_cache import PrefixCache, check_settings
from mamba_cache.integrations.transformers.serve.models import (
    BatchManager,
    ServedModels,
    ServedRequest,
    current_request,
)
from mamba_cache.stores import open_store

__all__ = ["install", "installed", "uninstall"]

_SERVING = "transformers.cli.serving"
_NEEDED = ("transformers", "accelerate", "fastapi", "openai", "prometheus_client", "uvicorn")

_Call = Callable[..., Awaitable[None]]
"""An ASGI application."""

_TEXT = ("text", "input_text", "output_text")
"""Types of message parts that are text."""

_SALT_HEADER = b"x-cache-salt"
"""The header with the cache salt, in lower case as in ASGI."""

_salt_headers: ContextVar[tuple[str, ...]] = ContextVar("salt_headers", default=())
"""Values of the salt header in the current HTTP request."""

_originals: list[tuple[Any, str, Any]] = []
"""Present replacements: the owner, the attribute's name, and the original."""

_installed: list[ServedModels] = []
"""The served models; empty unless installed."""


def install(
    *,
    mamba_cache_gb: float,
    kv_cache_gb: float,
    weights_check: WeightsCheck = "sample",
    events_endpoint: str | None = None,
    events_replay_endpoint: str | None = None,
    events_mode: Literal["resident", "reachable"] = "reachable",
    **settings: Any,
) -> None:
    """Put a prefix cache behind each model that transformers' server loads from now on.

    Functions and classes of ``transformers.cli.serving`` are replaced in this process, so call this
    before the server is made: ``transformers.cli.serve.Serve(...)``. A model that cannot be cached,
    and a request that its cache does not serve, bypass the cache with one warning in the log
    ``mamba_cache`` that names the reason. A request whose settings cannot be served gets status 400
    with the reason. With continuous batching hybrid models are batched by their caches, and other
    models by transformers.

    Args:
        mamba_cache_gb: Budget for the saved states of each loaded model, in GiB.
        kv_cache_gb: Budget for the keys and values of each loaded model, in GiB.
        weights_check: How much of the weights each request compares. Default: ``"sample"``, because
            a server does not change them.
        events_endpoint: Endpoint of the KV events of the first loaded model, for routers, as in
            ``EventPublisher``: ``tcp://127.0.0.1:5557``, for example. None: no events.
        events_replay_endpoint: Endpoint at which routers request missed events.
        events_mode: The KV blocks for which events are sent.
        settings: Other settings of ``PrefixCache``, for each loaded model, such as
            ``block_size_tokens``, ``max_requests``, ``host_cache_gb`` and ``hash_secret``.

    Raises:
        InvalidArgumentError: A setting is out of range for every model, or an endpoint cannot be
            used.
        StepOrderError: It is installed already; ``uninstall`` first.
        MissingExtraError: A package that the extra ``serve`` or the store needs is not installed.
        UnsupportedVersionError: This version of transformers has no such server; the message names
            what is missing. Nothing was replaced.
    """
    settings |= {
        "mamba_cache_gb": mamba_cache_gb,
        "kv_cache_gb": kv_cache_gb,
        "weights_check": weights_check,
    }
    parameters = inspect.signature(PrefixCache).parameters
    unknown = settings.keys() - parameters.keys()
    if unknown:
        raise InvalidArgumentError(f"a PrefixCache has no settings {sorted(unknown)}")
    check_settings({name: each.default for name, each in parameters.items()} | settings)
    check_choice("events_mode", events_mode, ("resident", "reachable"))
    if events_replay_endpoint is not None and events_endpoint is None:
        raise InvalidArgumentError(
            "events_replay_endpoint goes with events_endpoint, "
            f"got {events_replay_endpoint!r} alone"
        )
    if _originals:
        raise StepOrderError("prefix caches are installed already: call uninstall() first")
    _check_extra()
    if isinstance(settings.get("store"), str):
        open_store(settings["store"]).close()
    found = [(*_find(path), substitute) for path, substitute in _REPLACEMENTS.items()]
    make_publisher = None
    if events_endpoint is not None:
        from mamba_cache.integrations.events import EventPublisher  # noqa: PLC0415 - an extra

        make_publisher = partial(
            EventPublisher,
            events_endpoint,
            replay_endpoint=events_replay_endpoint,
            mode=events_mode,
        )
    served = ServedModels(settings, make_publisher)
    _installed.append(served)
    for owner, name, substitute in found:
        original = vars(owner)[name]
        _originals.append((owner, name, original))
        setattr(owner, name, _substitute(substitute, served, original))


def _substitute(substitute: Callable[..., Any], served: ServedModels, original: Any) -> Any:
    """Return the substitute for a function, static method or class of the server."""
    is_static = isinstance(original, staticmethod)
    called = original.__func__ if is_static else original

    @wraps(called, updated=())
    def call(*args: Any, **kw: Any) -> Any:
        return substitute(served, called, *args, **kw)

    return staticmethod(call) if is_static else call


def uninstall() -> None:
    """Restore the functions of transformers' server; without ``install`` do nothing.

    Loaded models answer without a cache from then on.
    """
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)
    while _installed:
        _installed.pop().close()


@contextmanager
def installed(**settings: Any) -> Iterator[None]:
    """Install for a ``with`` block; the arguments are those of ``install``."""
    install(**settings)
    try:
        yield
    finally:
        uninstall()


def _check_extra() -> None:
    try:
        for name in _NEEDED:
            importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"a server with prefix caches needs {name}: {install_hint('serve')}"
        ) from error


def _find(path: str) -> tuple[Any, str]:
    """Return the owner and the name of the attribute at a dotted path in the server's package."""
    module, *inner, name = path.split(".")
    try:
        owner: Any = importlib.import_module(f"{_SERVING}.{module}")
        for part in inner:
            owner = getattr(owner, part)
        vars(owner)[name]
    except (ImportError, AttributeError, KeyError) as error:
        raise UnsupportedVersionError(
            f"transformers {transformers().__version__} has no {_SERVING}.{path}, which is "
            "replaced to serve with prefix caches: use a version that mamba_cache was tested with "
            "(docs/how-to/serve.md)"
        ) from error
    return owner, name


def _generate(
    served: ServedModels,
    original: Callable[..., Any],
    manager: Any,
    model: Any,
    *asked: Any,
    **kw: Any,
) -> Any:
    """Have a manager of generations call ``model.generate`` through the model's cache."""
    processor, inputs, gen_config = asked
    if has_librarys_loop(model):
        # Before a stream begins, while the response can still have an error status.
        _reader(model, processor).check(gen_config, inputs["input_ids"].shape[-1])
    return original(manager, served.asked(model), *asked, **kw)


def _reader(model: Any, processor: Any) -> AnswerSettingsReader:
    tokenizer = getattr(processor, "tokenizer", processor)
    return AnswerSettingsReader(model, tokenizer, {}, tries_processors=True)


def _resolve_model(
    served: ServedModels, original: Callable[..., Any], handler: Any, body: dict[str, Any]
) -> tuple[str, Any, Any]:
    """Return a request's model, with its tokenizer alone if a text request can be batched.

    The server batches no request of a multimodal processor, even if the request is only text.
    """
    name, model, processor = original(handler, body)
    tokenizer = getattr(processor, "tokenizer", None)
    is_batched = getattr(handler.generation_state, "_continuous_batching", False)
    if is_batched and getattr(tokenizer, "chat_template", None) and _is_text(body):
        one = served.find(model)
        if one is not None and one.batches() is not None:
            return name, model, tokenizer
    return name, model, processor


def _is_text(body: dict[str, Any]) -> bool:
    """Return whether a request is text alone, in messages of one part each."""
    asked = next((body[name] for name in ("messages", "input", "prompt") if name in body), None)
    if not isinstance(asked, list):
        return isinstance(asked, str)
    return all(isinstance(one, dict) and _is_one_text(one.get("content")) for one in asked)


def _is_one_text(content: Any) -> bool:
    if not isinstance(content, list):
        return content is None or isinstance(content, str)
    # A processor joins several parts differently from a tokenizer.
    return len(content) == 1 and isinstance(content[0], dict) and content[0].get("type") in _TEXT


def _use_batches(
    served: ServedModels, original: Callable[..., bool], state: Any, model: Any, modality: Any
) -> bool:
    """Choose continuous batching for a hybrid model only if its cache can batch."""
    if not original(state, model, modality):
        return False
    one = served.find(model)
    # Models without a cache are batched by transformers.
    return one is None or one.batches() is not None or one.serves_batches is None


def _init_batches(
    served: ServedModels, original: Callable[..., None], manager: Any, model: Any, gen_config: Any
) -> None:
    """Make the batch manager: ``BatchManager`` if the model's cache can batch."""
    one = served.find(model)
    cache = None if one is None else one.batches()
    if one is None or cache is None:
        original(manager, model, gen_config)
    elif manager._cb is None or manager._cb is not one.manager:  # the old one's model is unloaded
        manager._cb = one.manager = BatchManager(cache, getattr(manager, "_cb_config", None))
        manager._cb.start()


def _batched(
    served: ServedModels, original: Callable[..., Any], manager: Any, *asked: Any, **kw: Any
) -> Any:
    """Read a request's whole configuration: the server's manager passes on only two lengths."""
    model, processor, inputs, gen_config = asked
    one, request = served.find(model), current_request.get()
    if one is not None and one.manager is not None and request is not None:
        tokens, longest = list(inputs["input_ids"]), one.max_sequence_length
        if not tokens:  # refused here, a stream has not begun: its status can say so
            raise InvalidArgumentError("the prompt must have at least one token, got none")
        if longest is not None and len(tokens) > longest:
            raise SequenceLengthError(
                f"the prompt has {len(tokens)} tokens, max_sequence_length is {longest}"
            )
        config = copy.copy(gen_config)
        config.use_cache = True  # the server sets False for transformers' own batches
        request.settings = _reader(model, processor).read(config, len(tokens))
        request.settings.num_answers = 1
        request.checkpoints = request.find_checkpoints(processor, tokens)
    return original(manager, *asked, **kw)


async def _handle_request(
    _: ServedModels, original: Callable[..., Any], handler: Any, body: dict[str, Any], name: str
) -> Any:
    """Handle a request with ``current_request`` set."""
    headers, user = _salt_headers.get(), body.get("user")
    is_salted = user is not None or bool(headers)
    salt = json.dumps([headers, user], sort_keys=True) if is_salted else None
    handler._unused_fields = getattr(handler, "_unused_fields", set()) - {"user"}  # used as salt
    request = ServedRequest(handler, body, salt)
    current_request.set(request)
    try:
        return await original(handler, body, name)
    except InvalidArgumentError as error:
        raise _http_error(error) from error
    except RuntimeError as error:
        # Transformers raises a plain RuntimeError for a batch output with an error.
        if request.error is None or type(error) is not RuntimeError:
            raise
        raise _http_error(request.error) from error


def _http_error(error: BaseException) -> Exception:
    """Return the server's error for a request: 400 if the request is at fault, else 500."""
    fastapi = importlib.import_module("fastapi")
    status = 400 if isinstance(error, InvalidArgumentError) else 500
    made: Exception = fastapi.HTTPException(status, str(error) or repr(error))
    return made


def _build_config(_: ServedModels, original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Make a configuration from a request body."""
    try:
        return original(*args, **kw)
    except Exception as error:  # a value of a wrong type may raise any exception
        raise InvalidArgumentError(
            f"the request's settings cannot be read: {str(error) or repr(error)}"
        ) from error


def _read_messages(_: ServedModels, original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Make the chat from a request body, and store it in the current request."""
    messages, request = original(*args, **kw), current_request.get()
    if request is not None:
        request.messages = messages
    return messages


def _usage(_: ServedModels, original: Callable[..., Any], **counts: Any) -> Any:
    """Return the usage of a completion, with its cached tokens."""
    request = current_request.get()
    if request is not None and request.cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": request.cached_tokens}
    return original(**counts)


def _response_usage(_: ServedModels, original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Return the usage of a response, with its cached tokens."""
    usage, request = original(*args, **kw), current_request.get()
    if request is not None and request.cached_tokens is not None:
        usage.input_tokens_details.cached_tokens = request.cached_tokens
    return usage


def _load(
    served: ServedModels, original: Callable[..., None], timed: Any, *args: Any, **kw: Any
) -> None:
    """Load a model, and add it to the served models."""
    original(timed, *args, **kw)
    served.add(timed.model)


def _unload(served: ServedModels, original: Callable[..., None], timed: Any) -> None:
    """Unload a model; first drop its cache, so that the method's garbage collection frees both."""
    served.drop(getattr(timed, "model", None))
    original(timed)


def _build_server(
    served: ServedModels, original: Callable[..., Any], manager: Any, *args: Any, **kw: Any
) -> Any:
    """Make the application, and add the metrics and the salt header."""
    app = original(manager, *args, **kw)
    if not getattr(kw.get("generation_state"), "_continuous_batching", False):
        # Caches of models loaded by now are made here, so that no first request waits for them.
        for timed in list(manager.loaded_models.values()):
            one = served.find(timed.model)
            if one is not None:
                one.prepare()
    app.add_route("/metrics", partial(_metrics, served, manager))
    app.add_middleware(_read_salt)
    return app


def _metrics(served: ServedModels, manager: Any, request: Any) -> Any:
    """Return the present metrics as a response."""
    from prometheus_client import CollectorRegistry, exposition  # noqa: PLC0415 - an extra

    from mamba_cache.integrations.prometheus import CacheCollector  # noqa: PLC0415

    registry = CollectorRegistry()
    if loaded := dict(served.caches(manager.loaded_models)):  # read each time: models change
        registry.register(CacheCollector(loaded))
    encode, kind = exposition.choose_encoder(request.headers.get("accept", ""))
    return importlib.import_module("fastapi").Response(encode(registry), media_type=kind)


def _read_salt(app: _Call) -> _Call:
    """Return middleware that reads the salt header."""

    async def read(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name.lower() == _SALT_HEADER]
            _salt_headers.set(tuple(value.decode("latin-1") for value in given))
        await app(scope, receive, send)

    return read


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "utils.GenerateManager.generate_streaming": _generate,
    "utils.GenerateManager.generate_non_streaming": _generate,
    "utils.BaseHandler._resolve_model": _resolve_model,
    "utils.GenerationState.use_continuous_batching": _use_batches,
    "utils.CBGenerateManager.init_cb": _init_batches,
    "utils.CBGenerateManager.generate_streaming": _batched,
    "utils.CBGenerateManager.generate_non_streaming": _batched,
    "utils.BaseHandler.get_processor_inputs_from_messages": _read_messages,
    "model_manager.TimedModel.__init__": _load,
    "model_manager.TimedModel.delete_model": _unload,
    "chat_completion.ChatCompletionHandler.handle_request": _handle_request,
    "completion.CompletionHandler.handle_request": _handle_request,
    "response.ResponseHandler.handle_request": _handle_request,
    "chat_completion.ChatCompletionHandler._build_generation_config": _build_config,
    "completion.CompletionHandler._build_generation_config": _build_config,
    "response.ResponseHandler._build_generation_config": _build_config,
    "chat_completion.CompletionUsage": _usage,
    "completion.CompletionUsage": _usage,
    "response.compute_usage": _response_usage,
    "server.build_server": _build_server,
}
"""Substitutes by attribute of the server; they get the served models and the original first."""
