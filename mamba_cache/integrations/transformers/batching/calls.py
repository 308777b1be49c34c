"""One call of ``generate_batch``: its arguments, its requests and its outputs."""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from mamba_cache._checks import as_items, check_int
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.transformers.batching.answers import (
    AnswerSettingsReader,
    BatchRequest,
)
from mamba_cache.integrations.transformers.batching.batcher import Batcher
from mamba_cache.integrations.transformers.checkpoints import read_checkpoints
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.integrations.transformers.prompts import read_prompts
from mamba_cache.integrations.transformers.runner import ModelRunner

__all__ = ["BatchCall", "answer_output", "failed_output"]

_PROMPT_SEED = 0x9E3779B97F4A7C15
_OUTPUTS = "transformers.generation.continuous_batching.requests"


class BatchCall:
    """Reads and checks the arguments of ``generate_batch``, and runs its requests."""

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
        lengths = [len(prompt) for prompt in self.prompts]
        each = zip(
            _one_each("cache_salt", cache_salt, count),
            [()] * count if checkpoints is None else read_checkpoints(checkpoints, lengths),
            _one_each("will_continue", will_continue, count),
            [source] * count,
            strict=True,
        )
        names = "cache_salt", "checkpoint_positions", "will_continue", "source"
        self._fields = [dict(zip(names, values, strict=True)) for values in each]
        own_seed = getattr(batching_config, "seed", None)
        self._seeds = _read_seeds(own_seed if seeds is None else seeds, count)
        self._tell = streamer if callable(streamer) else None
        self._streamers = self._read_streamers(streamer, count)
        self._streaming: dict[BatchRequest, Any] = {}
        self._batching = batching_config

    def _read_streamers(self, streamer: Any, count: int) -> list[Any]:
        """Return a streamer of transformers, or None, for each prompt."""
        if streamer is None or callable(streamer):
            return [None] * count
        if hasattr(streamer, "put"):  # a streamer; iterating over some of them never ends
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
        """Run the requests until all have finished; return a ``GenerationOutput`` by request id."""
        batcher.configure(self._batching)
        made = [self._submit(batcher, index) for index in range(len(self.prompts))]
        batcher.begin()
        if warms_up:
            batcher.warm_up(shows_progress=shows_progress)
        total = batcher.num_unfinished
        named = {"desc": f"Solving {total} requests", "unit": "request", "total": total}
        progress = transformers().utils.logging.tqdm(disable=not shows_progress, **named)
        with progress as bar:
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
        streamer, tell = self._streamers[index], self._tell
        if streamer is not None:

            def tell(_: str, token: int) -> None:
                streamer.put(torch.tensor([token]))

        made = batcher.submit(
            f"req_{index}",
            self.prompts[index],
            self._settings[index],
            seed=self._seeds[index],
            tell=tell,
            **self._fields[index],
        )
        if streamer is not None:
            self._streaming[made[0]] = streamer
            try:
                streamer.put(torch.from_numpy(self.prompts[index]).long())
            except Exception as error:  # the fault of this request alone
                made[0].refuse(error)
                batcher.end(made[0])
        return made

    def _end_stream(self, request: BatchRequest) -> None:
        try:
            if request in self._streaming:
                self._streaming[request].end()
        except Exception as error:  # the fault of this request alone
            request.refuse(error)


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    """Return one value for each prompt: a list's items, or the same value for all."""
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


def answer_output(request: BatchRequest, *, has_timestamps: bool = False) -> Any:
    """Return a ``GenerationOutput`` of a request, which may still be running."""
    library = importlib.import_module(_OUTPUTS)
    statuses = library.RequestStatus
    status = statuses.FINISHED if request.error is None else statuses.FAILED
    return library.GenerationOutput(
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
    """Return a ``GenerationOutput`` of a request that could not begin or continue."""
    library = importlib.import_module(_OUTPUTS)
    return library.GenerationOutput(
        request_id, list(prompt), error=_message_of(error), status=library.RequestStatus.FAILED
    )


def _message_of(error: BaseException) -> str:
    return str(error) or repr(error)
