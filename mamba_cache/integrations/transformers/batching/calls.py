"""One call of ``generate_batch``: what it was given, its requests, and what it returns."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from mamba_cache._checks import as_items, check_int
from mamba_cache.errors import (
    CapacityError,
    InvalidArgumentError,
    ModelChangedError,
    UnresumableModelError,
    UnsupportedVersionError,
)
from mamba_cache.integrations.transformers.batching.answers import AnswerSettingsReader
from mamba_cache.integrations.transformers.batching.batcher import Batcher
from mamba_cache.integrations.transformers.batching.requests import BatchRequest
from mamba_cache.integrations.transformers.checkpoints import read_checkpoints
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.integrations.transformers.prompts import PromptHint, read_prompts
from mamba_cache.integrations.transformers.runner import ModelRunner

__all__ = ["BatchCall", "answer_output", "check_batcher", "configure", "failed_output"]

_PROMPT_SEED = 0x9E3779B97F4A7C15
_TOLERANCES = {True: 1e-3, False: 0.15}
"""Of the logits' size, in single and in half precision: other attention is off by more than 1."""
_MAX_TOLERANCE = 0.5
"""Of models that differ from themselves as much, by rounding alone."""


class BatchCall:
    """The arguments of ``PrefixCache.generate_batch``, read and checked.

    Attributes:
        prompts: Token ids of each.

    Raises:
        InvalidArgumentError: One of them is malformed, or cannot be served.
    """

    def __init__(
        self,
        runner: ModelRunner,
        inputs: Any,
        generation_config: Any,
        batching_config: Any,
        *,
        seeds: Any,
        tokenizer: Any,
        streamer: Any,
        cache_salt: Any,
        checkpoints: Any,
        will_continue: Any,
        source: Hashable,
        options: Mapping[str, Any],
    ) -> None:
        self.prompts = read_prompts(inputs, runner.vocabulary)
        count = len(self.prompts)
        configs = _one_each("generation_config", generation_config, count)
        reader = AnswerSettingsReader(runner.model, tokenizer, options)
        self._settings = [
            reader.read(config, len(prompt))
            for config, prompt in zip(configs, self.prompts, strict=True)
        ]
        self._salts = _one_each("cache_salt", cache_salt, count)
        self._hints = [
            PromptHint(each, source) for each in _one_each("will_continue", will_continue, count)
        ]
        lengths = [len(prompt) for prompt in self.prompts]
        self._checkpoints = (
            [[] for _ in lengths] if checkpoints is None else read_checkpoints(checkpoints, lengths)
        )
        own_seed = getattr(batching_config, "seed", None)
        self._seeds = _read_seeds(own_seed if seeds is None else seeds, count)
        self._streamer = streamer
        self._streamers = self._read_streamers(streamer, count)
        self._batching = batching_config

    def _read_streamers(self, streamer: Any, count: int) -> list[Any]:
        """Return a streamer of transformers, or None, for each prompt."""
        if streamer is None or callable(streamer):
            return [None] * count
        if hasattr(streamer, "put"):  # some of these are endless when one asks what is in them
            raise InvalidArgumentError(
                "streamer must be a function, or streamers, one for each prompt: "
                "streamer=[streamer]"
            )
        streamers = as_items("streamer", streamer, "streamers, one for each prompt")
        if len(streamers) != count:
            raise InvalidArgumentError(
                f"streamer must be a function, or one streamer for each of the {count} prompts, "
                f"got {len(streamers)}"
            )
        for one, settings in zip(streamers, self._settings, strict=True):
            if one is not None and settings.num_answers > 1:
                raise InvalidArgumentError(
                    "a streamer takes one answer: num_return_sequences must be 1 for its prompt, "
                    f"got {settings.num_answers}"
                )
        return streamers

    def run(
        self, batcher: Batcher, *, warms_up: bool, shows_progress: bool, records_timestamps: bool
    ) -> dict[str, Any]:
        """Run the requests to their ends; return a ``GenerationOutput`` for each request id."""
        configure(batcher, self._batching)
        made = [self._submit(batcher, index) for index in range(len(self.prompts))]
        batcher.begin()
        if warms_up:
            batcher.warm_up(shows_progress=shows_progress)
        total = batcher.num_unfinished
        with _progress(total, is_shown=shows_progress) as bar:
            while batcher.num_unfinished:
                over = batcher.step()
                for request in over:
                    if request.fault is not None:
                        raise request.fault
                    self._end_stream(request)
                bar.update(len(over))
        ordered = [one for answers in made for one in (*answers[1:], answers[0])]
        return {
            one.request_id: answer_output(one, has_timestamps=records_timestamps) for one in ordered
        }

    def _submit(self, batcher: Batcher, index: int) -> list[BatchRequest]:
        streamer = self._streamers[index]
        made = batcher.submit(
            f"req_{index}",
            self.prompts[index],
            self._settings[index],
            seed=self._seeds[index],
            cache_salt=self._salts[index],
            checkpoints=self._checkpoints[index],
            will_continue=self._hints[index].will_continue,
            source=self._hints[index].source,
            tell=self._teller(streamer),
        )
        if streamer is not None:
            try:
                streamer.put(torch.from_numpy(self.prompts[index]).long())
            except Exception as error:  # of this request alone
                made[0].refuse(error)
                batcher.end(made[0])
        return made

    def _teller(self, streamer: Any) -> Callable[[str, int], None] | None:
        if streamer is not None:
            return lambda _, token: streamer.put(torch.tensor([token]))
        tell: Callable[[str, int], None] | None = self._streamer
        return tell if callable(tell) else None

    def _end_stream(self, request: BatchRequest) -> None:
        number = request.request_id.removeprefix("req_")
        if number.isdigit() and self._streamers[int(number)] is not None:
            try:
                self._streamers[int(number)].end()
            except Exception as error:  # of this request alone
                request.refuse(error)


def configure(batcher: Batcher, batching_config: Any) -> None:
    """Configure a batcher as a ``ContinuousBatchingConfig`` says; None: as it was made.

    Raises:
        InvalidArgumentError: It is neither, or a number in it is less than 1.
    """
    if batching_config is not None and not hasattr(batching_config, "max_batch_tokens"):
        raise InvalidArgumentError(
            "continuous_batching_config must be a transformers.ContinuousBatchingConfig, got "
            f"{type(batching_config).__name__}"
        )
    for name in ("max_batch_tokens", "max_requests_per_batch"):
        number = getattr(batching_config, name, None)
        if number is not None:
            check_int(name, number, minimum=1)
    batcher.configure(
        chunk_tokens=getattr(batching_config, "max_batch_tokens", None),
        max_requests=getattr(batching_config, "max_requests_per_batch", None),
        is_eager=_why_eager(getattr(batching_config, "use_cuda_graph", None)),
        wants_logprobs=bool(getattr(batching_config, "return_logprobs", False)),
    )


def check_batcher(batcher: Batcher, runner: ModelRunner) -> None:
    """Compare a batch of requests with each of them alone; no request may run meanwhile.

    Raises:
        UnresumableModelError: They differ by more than rounding.
        CapacityError: There is no room for a single one.
    """
    size = batcher.context.block_size_tokens
    generator = torch.Generator().manual_seed(2)
    longest = batcher.context.config.max_sequence_length - 1
    count = min(batcher.context.max_requests, 3)
    longest = min(longest, batcher.context.config.max_tokens // count)
    lengths = [min(length, longest) for length in (size + 3, 5, 2)[:count]]
    blocks = batcher.context.kv_block_allocator
    room = blocks.num_free_blocks + blocks.num_cached_blocks
    for fewer in (lengths, lengths[:2], lengths[1:], lengths[-1:]):
        lengths = fewer or lengths
        if sum(length // size + 1 for length in lengths) <= room:  # with the token that is decoded
            break
    prompts = [
        torch.randint(runner.vocabulary, (length + 1,), generator=generator, device="cpu").tolist()
        for length in lengths
    ]
    name = type(runner.model).__name__
    try:
        logits = batcher.try_out(prompts)
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
        expected = runner.forward(prompt[-1:], cache, len(prompt) - 1)[0, -1].double()
        whole = runner.forward(prompt, runner.new_cache(), 0)[0, -1]
        norm = torch.linalg.vector_norm(expected)
        for found, other in ((errors, actual), (roundings, whole)):
            found.append(float(torch.linalg.vector_norm(other.double() - expected) / norm))
    is_single = runner.placement()[1].itemsize >= torch.float32.itemsize
    # In half precision a router may choose other experts for one of them. How far that goes shows
    # where the model computes the same prompt in one forward and in two.
    typical, rounding = (sorted(each)[len(each) // 2] for each in (errors, roundings))
    if not typical <= max(_TOLERANCES[is_single], min(3 * rounding, _MAX_TOLERANCE)):
        raise UnresumableModelError(
            f"{name} computes something else for several requests at once than for each by itself: "
            f"its logits are off by {typical:.1e} of their size; generate serves it"
        )


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    """Return what was given for all prompts, or for each."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise InvalidArgumentError(
            f"{name} must be one for all, or a list with one for each of the {count} prompts, got "
            f"{len(value)}"
        )
    return list(value)


def _read_seeds(seeds: Any, count: int) -> list[int]:
    if seeds is None:
        return list(torch.randint(2**62, (count,), device="cpu").tolist())
    if isinstance(seeds, (list, tuple)):
        return [
            check_int("each of seeds", seed, minimum=0) for seed in _one_each("seeds", seeds, count)
        ]
    seed = check_int("seeds", seeds, minimum=0)
    return [seed + index * _PROMPT_SEED for index in range(count)]


def _why_eager(use_cuda_graph: Any) -> str:
    is_off = use_cuda_graph is False or (
        isinstance(use_cuda_graph, tuple) and not use_cuda_graph[1]
    )
    return "use_cuda_graph is False" if is_off else ""


def answer_output(request: BatchRequest, *, has_timestamps: bool = False) -> Any:
    """Return a ``GenerationOutput`` of a request, which may not be over yet.

    Raises:
        UnsupportedVersionError: transformers has no such thing.
    """
    kind, statuses = _output_types()
    status = statuses.FINISHED if request.error is None else statuses.FAILED
    return kind(
        request_id=request.request_id,
        prompt_ids=request.prompt,
        generated_tokens=list(request.answer),
        logprobs=list(request.logprobs),
        error=None if request.error is None else _message_of(request.error),
        status=status if request.is_over else statuses.DECODING,
        created_time=request.created_time,
        lifespan=(request.started_time, request.finished_time),
        timestamps=list(request.timestamps) if has_timestamps else None,
    )


def failed_output(request_id: str, prompt: Sequence[int], error: BaseException) -> Any:
    """Return a ``GenerationOutput`` of a request that could not begin, or go on."""
    kind, statuses = _output_types()
    return kind(request_id, list(prompt), error=_message_of(error), status=statuses.FAILED)


def _message_of(error: BaseException) -> str:
    return str(error) or repr(error)


def _output_types() -> tuple[Any, Any]:
    try:
        library = importlib.import_module("transformers.generation.continuous_batching.requests")
        return library.GenerationOutput, library.RequestStatus
    except (ImportError, AttributeError) as error:
        raise UnsupportedVersionError(
            f"transformers {transformers().__version__} has no GenerationOutput: use a version "
            "that mamba_cache was tested with (docs/how-to/transformers.md)"
        ) from error


def _progress(total: int, *, is_shown: bool) -> Any:
    bars = importlib.import_module("tqdm")  # which transformers needs anyway
    return bars.tqdm(
        total=total, disable=not is_shown, desc=f"Solving {total} requests", unit="request"
    )
