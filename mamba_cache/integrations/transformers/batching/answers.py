"""How answers are made: what a ``GenerationConfig`` asks of one request."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mamba_cache._checks import check_int
from mamba_cache.errors import InvalidArgumentError, MambaCacheError
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.integrations.transformers.options import (
    join_config,
    max_new_tokens,
    read_answer_config,
)

__all__ = ["AnswerSettings", "AnswerSettingsReader"]

_WARPERS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}
"""Processors of the library that are computed for all requests at once, in this order."""


@dataclass(slots=True)
class AnswerSettings:
    """How the answers to one prompt are made."""

    max_new_tokens: int  # tokens of each at most
    num_answers: int  # how many there are
    eos_token_ids: frozenset[int]  # tokens that end one; the token is its last
    is_greedy: bool  # the likeliest token is taken; otherwise one is drawn
    temperature: float = 1.0  # what logits are divided by
    top_k: int = 0  # of how many of the likeliest tokens one is drawn; 0: of all
    top_p: float = 1.0  # what the tokens of which one is drawn make up together
    min_p: float = 0.0  # what a token must have of the likeliest one's probability
    # Makes, for the tokens of a prompt, the library's processors, which are called for each token
    # of one answer by itself: those that are not among the four above, and these with them, in the
    # library's order. None: there are no others.
    make_processors: Callable[[Sequence[int]], Any] | None = None
    stops: Any = None  # the library's criterion that looks for stop strings; None: there are none
    _longest_stop: int = field(default=0)

    @property
    def is_simple(self) -> bool:
        """Whether the next token is that of the largest logit."""
        return self.is_greedy and self.make_processors is None

    def ends(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Say whether an answer ends with a stop string."""
        if self.stops is None:
            return False
        # A stop string may begin in the prompt, as for generate. So long is none in tokens.
        last = [*prompt[-self._longest_stop :], *answer][-self._longest_stop :]
        return bool(self.stops(torch.tensor([last], device="cpu"), None)[0])


class AnswerSettingsReader:
    """Reads the settings of one call's requests, whose configurations ``options`` changes.

    With ``tries_processors`` those of the library's processors that cannot be computed for all
    requests at once are called once: some check their settings only then.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        options: Mapping[str, Any],
        *,
        tries_processors: bool = False,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._options = dict(options)
        self._tries_processors = tries_processors
        self._known: list[tuple[Any, int | None, AnswerSettings]] = []
        self._joined: list[tuple[Any, Any]] = []

    def read(self, config: Any, prompt_tokens: int) -> AnswerSettings:
        """Return the settings of a prompt's answers.

        Raises:
            InvalidArgumentError: Something that is set cannot be served.
        """
        for known, length, settings in self._known:
            if known is config and length in (None, prompt_tokens):
                return settings
        joined = next((its for known, its in self._joined if known is config), None)
        with _refused_by_library(config):
            if joined is None:
                joined = read_answer_config(self._model, config, self._options)
                self._joined.append((config, joined))
            settings, is_for_any = self._read(joined, prompt_tokens)
        self._known.append((config, None if is_for_any else prompt_tokens, settings))
        return settings

    def check(self, config: Any, prompt_tokens: int) -> None:
        """Check that ``generate`` can make an answer as ``config`` says; compute no forward.

        Raises:
            InvalidArgumentError: The library refuses something that is set.
        """
        with _refused_by_library(config):
            self._read(join_config(self._model, config), prompt_tokens)

    def _read(self, joined: Any, prompt_tokens: int) -> tuple[AnswerSettings, bool]:
        config = copy.copy(joined)
        given = max_new_tokens(self._model, config)
        most = config.max_length - prompt_tokens if given is None else given
        if given is None and most < 1:
            raise InvalidArgumentError(
                f"max_length must be more than the prompt's {prompt_tokens} tokens, got "
                f"{config.max_length}: set max_new_tokens instead"
            )
        check_int("max_new_tokens", most, minimum=1)
        config.max_length = prompt_tokens + most
        if config.min_new_tokens is not None:
            config.min_length = prompt_tokens + config.min_new_tokens
        # On the CPU: this thread must not wait for the device, which other requests use.
        processors = _processors(self._model, config, torch.zeros(1, prompt_tokens).long(), "cpu")
        eos = config._eos_token_tensor
        settings = AnswerSettings(
            max_new_tokens=most,
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
            if self._tries_processors:
                self._try_out(processors, config)
            # Some keep what they have seen of an answer, and some read the prompt.
            settings.make_processors = partial(_processors_for, self._model, config)
        if config.stop_strings:
            self._read_stops(settings, config)
        return settings, is_plain and given is not None

    def _try_out(self, processors: Any, config: Any) -> None:
        """Call the processors once, on the CPU."""
        size = self._model.config.get_text_config(decoder=True).vocab_size
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            ids = getattr(config, name)
            for one in ids if isinstance(ids, list) else [ids]:
                # Out of range, it is an error of the device in the step that applies it.
                if one is not None and not 0 <= one < size:
                    raise InvalidArgumentError(f"{name} must be below {size}, got {one}")
        if config.guidance_scale in (None, 1):  # its processor runs the model
            processors(torch.zeros(1, 1).long(), torch.zeros(1, size))

    def _read_stops(self, settings: AnswerSettings, config: Any) -> None:
        if self._tokenizer is None:
            raise InvalidArgumentError("stop_strings need the tokenizer: give tokenizer= as well")
        criteria = transformers().generation.StopStringCriteria(
            tokenizer=self._tokenizer, stop_strings=config.stop_strings
        )
        settings.stops = criteria
        settings._longest_stop = int(criteria.maximum_token_len)


@contextmanager
def _refused_by_library(config: Any) -> Iterator[None]:
    """Turn whatever the library raises of a configuration into this package's error."""
    try:
        yield
    except MambaCacheError:
        raise
    except Exception as error:
        reason = str(error)
        if not isinstance(error, ValueError):  # of Python, so it does not name the field
            values = getattr(config, "__dict__", {}).items()
            given = [name for name, value in values if value is not None and name[0] != "_"]
            reason = f"{error!r}, with {', '.join(sorted(given))} set"
        raise InvalidArgumentError(f"transformers refuses the configuration: {reason}") from error


def _processors_for(model: Any, config: Any, prompt: Sequence[int]) -> Any:
    """Make the library's processors for one answer to a prompt."""
    own = copy.copy(config)
    ids = torch.tensor([prompt], device=model.device)
    return _processors(model, own, ids, str(model.device))


def _processors(model: Any, config: Any, prompt: torch.Tensor, device: str) -> Any:
    model._prepare_special_tokens(config, False, device=device, batch_size=1)
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt.shape[1],
        encoder_input_ids=prompt,
        device=device,
        model_kwargs={},
    )
