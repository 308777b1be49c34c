"""Answers of a batch: their settings, their requests, and the choice of their tokens."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache._checks import check_int
from mamba_cache._torch import to_device
from mamba_cache.context import Admission
from mamba_cache.context.scheduler import QueuedRequest
from mamba_cache.errors import InvalidArgumentError, MambaCacheError
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.integrations.transformers.options import (
    join_config,
    max_new_tokens,
    read_answer_config,
)

__all__ = ["AnswerSettings", "AnswerSettingsReader", "BatchRequest", "choose_tokens", "uniforms"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_WARPERS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}
"""Transformers' processors that are computed for all requests at once, in this order."""


@dataclass(slots=True)
class AnswerSettings:
    """Settings of the answers to one prompt."""

    max_new_tokens: int  # maximum tokens of each answer
    num_answers: int  # number of answers
    eos_token_ids: frozenset[int]  # tokens that end an answer as its last token
    is_greedy: bool  # choose the most likely token; otherwise sample
    temperature: float = 1.0  # logits are divided by it
    top_k: int = 0  # sample among so many most likely tokens; 0: among all
    top_p: float = 1.0  # sample among the most likely tokens with this total probability
    min_p: float = 0.0  # minimum probability of a token relative to the most likely one
    # Makes transformers' processors for a prompt, if there are others than the four above. Then all
    # processors, these four included, are called for each token of each answer by itself, in
    # transformers' order. None: there are no others.
    make_processors: Callable[[Sequence[int]], Any] | None = None
    stops: Any = None  # transformers' criterion of stop strings; None: there are none

    @property
    def is_simple(self) -> bool:
        """Whether the next token is always the one with the largest logit."""
        return self.is_greedy and self.make_processors is None

    @property
    def is_limited(self) -> bool:
        """Whether ``top_k``, ``top_p`` or ``min_p`` excludes tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def ends(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Return whether an answer ends with a stop string."""
        if self.stops is None:
            return False
        # As for generate, a stop string may begin in the prompt.
        longest = int(self.stops.maximum_token_len)
        last = [*prompt[-longest:], *answer][-longest:]
        return bool(self.stops(torch.tensor([last], device="cpu"), None)[0])


@dataclass(slots=True, eq=False)
class AnswerSettingsReader:
    """Reads the settings of one call's requests; ``options`` override each configuration.

    With ``tries_processors``, processors that cannot be computed for all requests at once are
    called once, because some check their settings only when they are called.
    """

    model: Any
    tokenizer: Any
    options: Mapping[str, Any]
    tries_processors: bool = field(default=False, kw_only=True)
    # Each configuration, given and joined; the prompt length, None: any; and the settings.
    _known: list[tuple[Any, Any, int | None, AnswerSettings]] = field(default_factory=list)

    def read(self, config: Any, prompt_tokens: int) -> AnswerSettings:
        """Return the settings of a prompt's answers."""
        joined = None
        for known, its, length, settings in self._known:
            if known is config:
                joined = its
                if length in (None, prompt_tokens):
                    return settings
        with _refused_by_library(config):
            if joined is None:
                joined = read_answer_config(self.model, config, self.options)
            settings, is_for_any = self._read(joined, prompt_tokens)
        self._known.append((config, joined, None if is_for_any else prompt_tokens, settings))
        return settings

    def check(self, config: Any, prompt_tokens: int) -> None:
        """Check that ``generate`` accepts ``config`` for such a prompt; no forward is computed."""
        with _refused_by_library(config):
            self._read(join_config(self.model, config), prompt_tokens)

    def _read(self, joined: Any, prompt_tokens: int) -> tuple[AnswerSettings, bool]:
        config = copy.copy(joined)
        given = max_new_tokens(self.model, config)
        limit = config.max_length - prompt_tokens if given is None else given
        if given is None and limit < 1:
            raise InvalidArgumentError(
                f"max_length must be more than the prompt's {prompt_tokens} tokens, got "
                f"{config.max_length}: set max_new_tokens instead"
            )
        check_int("max_new_tokens", limit, minimum=1)
        config.max_length = prompt_tokens + limit
        if config.min_new_tokens is not None:
            config.min_length = prompt_tokens + config.min_new_tokens
        # On the CPU, so that this thread does not wait for the device, which other requests use.
        ids = torch.zeros(1, prompt_tokens, dtype=torch.int64, device="cpu")
        processors = _processors(self.model, config, ids)
        eos = config._eos_token_tensor
        settings = AnswerSettings(
            max_new_tokens=limit,
            num_answers=int(config.num_return_sequences or 1),
            eos_token_ids=frozenset([] if eos is None else eos.tolist()),
            is_greedy=not config.do_sample,
        )
        names = [type(one).__name__ for one in processors]
        is_plain = names == [name for name in _WARPERS if name in names]
        if is_plain:
            for processor, name in zip(processors, names, strict=True):
                setattr(settings, _WARPERS[name], getattr(processor, _WARPERS[name]))
        else:
            if self.tries_processors:
                self._try_out(processors, config)
            # Made for each answer, because some keep its tokens, and some read the prompt.
            settings.make_processors = partial(_processors_for, self.model, config)
        if config.stop_strings:
            if self.tokenizer is None:
                raise InvalidArgumentError(
                    "stop_strings need the tokenizer: give tokenizer= as well"
                )
            settings.stops = transformers().generation.StopStringCriteria(
                tokenizer=self.tokenizer, stop_strings=config.stop_strings
            )
        return settings, is_plain and given is not None

    def _try_out(self, processors: Any, config: Any) -> None:
        """Call the processors once, on the CPU."""
        size = self.model.config.get_text_config(decoder=True).vocab_size
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            ids = getattr(config, name)
            for one in ids if isinstance(ids, list) else [ids]:
                # Out of range, the step that applies it would fail on the device.
                if one is not None and not 0 <= one < size:
                    raise InvalidArgumentError(f"{name} must be below {size}, got {one}")
        if config.guidance_scale in (None, 1):  # its processor runs the model
            processors(torch.zeros(1, 1).long(), torch.zeros(1, size))


@contextmanager
def _refused_by_library(config: Any) -> Iterator[None]:
    """Turn any exception of transformers about a configuration into an error of the package."""
    try:
        yield
    except MambaCacheError:
        raise
    except Exception as error:
        reason = str(error)
        if not isinstance(error, ValueError):  # an error of Python that names no field
            values = getattr(config, "__dict__", {}).items()
            given = [name for name, value in values if value is not None and name[0] != "_"]
            reason = f"{error!r}, with {', '.join(sorted(given))} set"
        raise InvalidArgumentError(f"transformers refuses the configuration: {reason}") from error


def _processors_for(model: Any, config: Any, prompt: Sequence[int]) -> Any:
    """Return transformers' processors for one answer to a prompt."""
    return _processors(model, config, torch.tensor([prompt], device=model.device))


def _processors(model: Any, config: Any, prompt: torch.Tensor) -> Any:
    model._prepare_special_tokens(config, False, device=prompt.device, batch_size=1)
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt.shape[1],
        encoder_input_ids=prompt,
        device=str(prompt.device),
        model_kwargs={},
    )


@dataclass(slots=True, eq=False, kw_only=True)
class BatchRequest(QueuedRequest):
    """One answer to one prompt."""

    request_id: str  # the caller's name for it; ``key`` is its id in the context
    settings: AnswerSettings  # settings of the answer
    seed: int  # random seed of the answer
    first_token: int | None = None  # first token of the answer, if the caller gives it
    tell: Callable[[int], None] | None = None  # called with each token of the answer
    answer: list[int] = field(default_factory=list)  # tokens so far
    num_late: int = 0  # number of newer tokens that are on the device only
    # Log-probability of each token, if requested.
    logprobs: list[float] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)  # when each token was appended
    max_tokens: int = 0  # maximum tokens of the answer, by its settings and by the room for it
    fault: Exception | None = None  # the exception that failed the request's last step
    is_over: bool = False  # finished, with or without an error
    cached_tokens: int = 0  # prompt tokens that were cached when it was first admitted
    # Seconds of ``time.perf_counter``.
    created_time: float = field(default_factory=lambda: time.perf_counter())  # noqa: PLW0108
    started_time: float = -1.0  # time of the first admission; -1 before
    finished_time: float = -1.0  # time of the end; -1 before
    # Transformers' processors for this answer; None: there are none.
    processors: Any = field(init=False, default=None)
    _prompt: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The caller's name for the request."""
        return self.request_id

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens."""
        if not self._prompt:
            self._prompt = self.prepared.tokens.tolist()
        return self._prompt

    def note_admission(self, admission: Admission) -> None:
        """Record the cached tokens and the time of the first admission."""
        if self.started_time < 0:
            self.cached_tokens = admission.skip_tokens
            self.begin()

    def begin(self) -> None:
        """Record the time of the first admission."""
        self.started_time = time.perf_counter()

    def end(self) -> None:
        """Mark the request as finished, and record the time."""
        self.is_over = True
        self.finished_time = time.perf_counter()

    def begin_answer(self) -> None:
        """Make the answer's processors; called again for a fork that found no room before."""
        self.logprobs.clear()
        if self.settings.make_processors is not None:
            try:
                self.processors = self.settings.make_processors(self.prompt)
            except Exception as error:  # the fault of this request's settings; others continue
                self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Record an error of the request's own settings, processors or streamer."""
        if self.error is None:
            self.error = InvalidArgumentError(str(error) or repr(error))
            self.error.__cause__ = error


def uniforms(seeds: npt.NDArray[np.uint64], numbers: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    """Return a random number in [0, 1) for each seed and token number, by splitmix64.

    The number depends on nothing else, so neither other requests in the batch nor computing a token
    again changes it.
    """
    with np.errstate(over="ignore"):
        x = seeds + (numbers + np.uint64(1)) * _GOLDEN
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    numbers_in_53_bits: npt.NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64)
    return numbers_in_53_bits / 2.0**53


def choose_tokens(logits: torch.Tensor, requests: Sequence[BatchRequest | None]) -> torch.Tensor:
    """Choose the next token of each row from [rows, vocabulary] logits; greedily without a request.

    Return [rows] int64 on the device, without waiting for the device.
    """
    if all(one is None or one.settings.is_simple for one in requests):
        return logits.argmax(-1)
    scores = logits.float()
    special = [(i, one) for i, one in enumerate(requests) if one and one.processors is not None]
    if special:
        scores = scores.clone()
        for index, one in special:
            ids = torch.tensor([[*one.prompt, *one.answer]], device=logits.device)
            try:
                scores[index : index + 1] = one.processors(ids, scores[index : index + 1])
            except Exception as error:  # the fault of this request alone; others continue
                one.refuse(error)
    greedy, settings = scores.argmax(-1), [one.settings if one else None for one in requests]
    are_greedy = [one is None or one.is_greedy for one in settings]
    if all(are_greedy):
        return greedy
    seeds = np.array([one.seed if one else 0 for one in requests], dtype=np.uint64)
    counts = [len(one.answer) + one.num_late if one else 0 for one in requests]
    numbers = np.array(counts, dtype=np.uint64)
    uniform = to_device(torch.from_numpy(uniforms(seeds, numbers)), logits.device)
    is_greedy = to_device(torch.tensor(are_greedy, device="cpu"), logits.device)
    return torch.where(is_greedy, greedy, _draw(scores, settings, uniform))


def _draw(
    scores: torch.Tensor, settings: Sequence[AnswerSettings | None], uniform: torch.Tensor
) -> torch.Tensor:
    """Sample a token of each row: the first whose cumulative probability exceeds ``uniform``."""
    # Rows with processors are left out: their temperature and limits are applied already.
    rows = [one if one and one.make_processors is None else None for one in settings]

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        values = [getattr(row, name) if row else default for row in rows]
        return to_device(torch.tensor(values, dtype=dtype, device="cpu"), scores.device)

    scores = scores / column("temperature", 1.0, torch.float32)[:, None]
    limited = [row is not None and not row.is_greedy and row.is_limited for row in rows]
    if not any(limited):
        return _pass(scores.double().softmax(-1), uniform)
    size = scores.shape[-1]
    # If one limited row has no ``top_k``, all tokens are sorted.
    limits = [row.top_k for row, is_one in zip(rows, limited, strict=True) if row and is_one]
    count = min(max(limits), size) if all(limits) else size
    values, ids = scores.topk(count, dim=-1)
    values = values.double()
    order = torch.arange(count, device=scores.device)
    top_k, top_p = column("top_k", 0, torch.int64), column("top_p", 1.0, torch.float64)[:, None]
    values = values.masked_fill(order >= torch.where(top_k > 0, top_k, size)[:, None], -math.inf)
    shares = values.softmax(-1)
    before = shares.cumsum(-1) - shares
    is_out = (before >= top_p) & (top_p < 1)
    is_out |= shares < column("min_p", 0.0, torch.float64)[:, None] * shares[:, :1]
    is_out[:, 0] = False
    values = values.masked_fill(is_out, -math.inf)
    chosen = ids.gather(-1, _pass(values.softmax(-1), uniform)[:, None])[:, 0]
    if all(limited):
        return chosen
    # Requests without limits sample in the order of token ids, also beside limited requests.
    is_limited = to_device(torch.tensor(limited, device="cpu"), scores.device)
    return torch.where(is_limited, chosen, _pass(scores.double().softmax(-1), uniform))


def _pass(shares: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    sums = shares.cumsum(-1)
    # right=True skips sums equal to the number, so a token of probability 0 is never chosen.
    at = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0]
    return at.clamp(max=shares.shape[-1] - 1)
