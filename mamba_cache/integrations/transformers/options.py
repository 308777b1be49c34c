"""The options of ``generate``: which are served, and whether answers can be cached."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import distributed

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.transformers.fingerprint import is_library
from mamba_cache.integrations.transformers.library import transformers

__all__ = [
    "ARGUMENTS",
    "FIELDS",
    "MODEL_ARGUMENTS",
    "REFUSED",
    "ROWS_FOLLOWED",
    "ROWS_MIXED",
    "OptionsReader",
    "ServedOptions",
    "has_librarys_loop",
    "has_own_code",
    "join_config",
    "max_new_tokens",
    "read_answer_config",
    "read_options",
    "without_text_types",
]

_GOES_BACK = "it goes back in the sequence, which a state cannot"
_DOES_NOT_EXIST = "a cached prefix is not computed again, so it has none"
_OTHERS_CODE = "it loads a decoding loop that may use the model in any way"

REFUSED = {
    "past_key_values": "the cache makes its own",
    "cache_params": "the cache makes its own",
    "inputs_embeds": "prefixes are found by token ids, which embeddings do not contain",
    "assistant_model": _GOES_BACK,
    "assistant_tokenizer": _GOES_BACK,
    "assistant_early_exit": _GOES_BACK,
    "is_assistant": _GOES_BACK,
    "prompt_lookup_num_tokens": _GOES_BACK,
    "use_mtp": _GOES_BACK,
    "prefill_chunk_size": "prompts are computed in segments anyway: see segment_tokens",
    "output_attentions": _DOES_NOT_EXIST,
    "output_hidden_states": _DOES_NOT_EXIST,
    "custom_generate": _OTHERS_CODE,
    "token_healing": "it puts other tokens into the prompt than those given",
    "synced_gpus": "ranks that wait for each other at each forward must run as many forwards, and "
    "with a cache one rank may compute less than another",
}
"""Options that are refused, with the reason; None and False are accepted."""

FIELDS = frozenset(
    {
        # They set the length, choose the next token, or choose what is returned. In all cases the
        # model computes the tokens of the result one by one.
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time"),
        *("stop_strings", "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h"),
        *("typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty"),
        *("encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        *("bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id"),
        *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens", "sequence_bias", "watermarking_config", "output_scores"),
        *("output_logits", "return_dict_in_generate", "pad_token_id", "bos_token_id"),
        *("eos_token_id", "decoder_start_token_id", "num_return_sequences"),
        # A second forward for each token, with another cache, that changes the logits.
        "guidance_scale",
        # They choose a mode, or only one mode reads them.
        *("num_beams", "early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"),
        *("constraints", "force_words_ids", "penalty_alpha", "low_memory", "dola_layers"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "max_matching_ngram_size"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
        *("assistant_ensemble_weight", "speculation_type"),
        # Some of their values are refused.
        *("use_cache", "cache_implementation"),
        # Read only with other kinds of caches, which are refused, or by other methods.
        *("cache_config", "max_cache_len", "compile_config", "disable_compile"),
        "continuous_batching_config",
        *("_from_model_config", "_commit_hash", "transformers_version"),
    }
)
"""Configuration fields whose effect on the model's cache is known; ``REFUSED`` has the others."""

ARGUMENTS = frozenset(
    {
        *("inputs", "generation_config", "logits_processor", "stopping_criteria"),
        *("prefix_allowed_tokens_fn", "streamer", "negative_prompt_ids"),
        *("negative_prompt_attention_mask", "tokenizer", "trust_remote_code"),
    }
)
"""Arguments of ``generate`` itself that may have any value; ``REFUSED`` has the others."""

MODEL_ARGUMENTS = frozenset({"attention_mask", "logits_to_keep", "output_router_logits"})
"""Arguments of the model's forward that do not change the contents of its cache."""

ROWS_FOLLOWED = frozenset({"greedy_search", "sample"})
"""Modes in which each row of the batch continues its own tokens."""

ROWS_MIXED = frozenset({"beam_search", "beam_sample"})
"""Modes whose rows change places, so that only prompts are cached."""

_TOKEN_TYPES = "mm_token_type_ids"
"""An input by processors of multimodal models: the type of each token, 0 for text."""


@dataclass(frozen=True, slots=True)
class ServedOptions:
    """The options of one call of ``generate`` that the prefix cache reads."""

    overrides: dict[str, Any]  # options that ``generate`` gets in the place of the caller's
    follows_rows: bool  # each row continues its own tokens, so its answer can be cached
    is_plain: bool  # a batch can compute the call: it returns token ids only
    max_new_tokens: int | None  # maximum tokens of an answer; None: ``max_length`` limits it
    max_length: int  # maximum tokens of prompt and answer
    eos_token_ids: tuple[int, ...]  # tokens that end an answer
    pad_token_id: int | None  # the padding token, if one is configured


def read_options(model: Any, options: Mapping[str, Any]) -> ServedOptions:
    """Return the options of a call, or refuse them, by the configuration ``generate`` will use.

    This configuration joins the caller's options and ``generation_config``, the model's, and the
    defaults of transformers. The same method of transformers joins them here with the same
    arguments, so the result is the same. ``options`` is not changed.
    """
    mode, config, own, model_arguments = _join(model, options)
    unknown = [name for name in own if name not in ARGUMENTS]
    if unknown:
        raise InvalidArgumentError(
            f"{unknown} cannot be used with a prefix cache: this version of transformers takes "
            "them, but what they do to the model's cache is not known"
        )
    _check_model_arguments(model_arguments)
    _check_cache(config)
    if mode not in ROWS_FOLLOWED | ROWS_MIXED:
        raise InvalidArgumentError(
            f"generation mode {mode!r} cannot be used with a prefix cache: {_OTHERS_CODE}; modes "
            f"that can: {sorted(ROWS_FOLLOWED | ROWS_MIXED)}"
        )
    follows_rows = mode in ROWS_FOLLOWED and _is_known(config) and has_librarys_loop(model)
    is_plain = not (config.return_dict_in_generate or model_arguments.keys() - {"attention_mask"})
    eos = _as_ids(config.eos_token_id)
    pad = _as_ids(config.pad_token_id) or eos
    return ServedOptions(
        # generate refuses "dynamic" together with a cache, and it is given a dynamic cache.
        {} if config.cache_implementation is None else {"cache_implementation": None},
        follows_rows,
        follows_rows and is_plain,
        max_new_tokens(model, config),
        config.max_length,
        eos,
        pad[0] if pad else None,
    )


def max_new_tokens(model: Any, config: Any) -> int | None:
    """Return the maximum tokens of an answer; None: ``max_length`` limits prompt and answer."""
    own, default = model.generation_config.max_length, config._get_default_generation_params()
    is_default = own is None and config.max_length == default["max_length"]
    given: int | None = config.max_new_tokens
    return config.max_length if given is None and is_default else given


def has_own_code(options: Mapping[str, Any]) -> bool:
    """Return whether the caller's own code chooses tokens or stops the call."""
    lists = [options.get(name) or [] for name in ("logits_processor", "stopping_criteria")]
    if not all(isinstance(each, list) for each in lists):
        return True
    is_own = any(not is_library(type(one).__module__) for one in chain.from_iterable(lists))
    return is_own or options.get("prefix_allowed_tokens_fn") is not None


def without_text_types(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without token types if all tokens are text.

    Processors of multimodal models add them to each prompt; ``generate`` does not need them.
    """
    types = options.get(_TOKEN_TYPES)
    if not isinstance(types, torch.Tensor) or types.any():
        return options
    return {name: value for name, value in options.items() if name != _TOKEN_TYPES}


def read_answer_config(model: Any, config: Any, options: Mapping[str, Any]) -> Any:
    """Return the configuration of a batch's answers, joined as ``generate`` joins it, or refuse it.

    ``options`` override fields of ``config``, or of the model's configuration if it is None.
    """
    mode, joined, own, left = _join(model, {**options, "generation_config": config})
    unknown = sorted({*own, *left} - {"generation_config"})
    if unknown:
        raise InvalidArgumentError(
            f"generate_batch takes a generation_config and what changes it, got {unknown} too"
        )
    _check_cache(joined)
    if mode not in ROWS_FOLLOWED:
        raise InvalidArgumentError(
            f"generation mode {mode!r} cannot be used in a batch whose requests come and go: modes "
            f"that can: {sorted(ROWS_FOLLOWED)}"
        )
    if joined.max_time is not None:
        raise InvalidArgumentError("generate_batch takes no max_time: stop taking tokens instead")
    return joined


def join_config(model: Any, config: Any) -> Any:
    """Return the configuration that ``generate`` makes of ``config``, checked by transformers."""
    joined, _, _ = _prepare(model, {"generation_config": config})
    joined.validate()
    joined.get_generation_mode(None)
    return joined


class OptionsReader:
    """Reads the options of a model's calls; reuses the last result if they are the same.

    Transformers needs half a millisecond to join configurations.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._asked: object = None
        self._served: ServedOptions | None = None

    def read(self, options: Mapping[str, Any]) -> ServedOptions:
        """Return the result of ``read_options``."""
        _check_ranks(self._model)
        asked = self._what_is_read(options)
        with suppress(Exception):  # tensors of several elements cannot be compared, for example
            if self._served is not None and bool(asked == self._asked):
                return self._served
        served = read_options(self._model, options)
        with suppress(Exception):  # options that cannot be copied are read in each call
            self._asked, self._served = copy.deepcopy(asked), served
        return served

    def _what_is_read(self, options: Mapping[str, Any]) -> object:
        """Return all values that the result depends on, for comparison with the last call's."""
        given = options.get("generation_config")
        values = {
            name: value is None if name in _UNREAD else value for name, value in options.items()
        }
        # The object's contents are compared, not its identity.
        values.pop("generation_config", None)
        own = self._model.generation_config
        parts = [values, getattr(given, "__dict__", {}), getattr(own, "__dict__", {})]
        methods = [getattr(self._model, name, None) for name in _READ_BY]
        readers = [getattr(method, "__func__", method) for method in methods]
        return parts, [list(map(type, part.values())) for part in parts], readers


_UNREAD = (ARGUMENTS - {"generation_config"}) | {"attention_mask"}
"""Options whose values are passed on unread."""

_READ_BY = ("generate", "_sample", "_prepare_generation_config")
"""The model's methods that read the options."""


def _refuse(values: Mapping[str, Any]) -> None:
    for name, reason in REFUSED.items():
        value = values.get(name)
        if value is not None and value is not False:
            raise InvalidArgumentError(f"{name} cannot be used with a prefix cache: {reason}")


def _arguments_of_generate(model: Any) -> frozenset[str]:
    """Return the names of arguments that ``generate`` takes before it joins configurations."""
    parameters = inspect.signature(model.generate).parameters.values()
    named = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
    # ``generate`` takes these out of its keyword arguments.
    return frozenset(named | {"tokenizer", "assistant_tokenizer", "trust_remote_code"})


def _join(model: Any, options: Mapping[str, Any]) -> tuple[str, Any, list[str], dict[str, Any]]:
    """Return the generation mode and the results of ``_prepare``; raise for refused options."""
    _refuse(options)
    config, own, model_arguments = _prepare(model, options)
    _refuse(vars(config))
    mode = str(getattr(config.get_generation_mode(None), "value", ""))
    return mode, config, own, model_arguments


def _prepare(model: Any, options: Mapping[str, Any]) -> tuple[Any, list[str], dict[str, Any]]:
    """Return the configuration that ``generate`` will use.

    Return also its own arguments that are not None, and those that it will pass to the model.
    """
    given = options.get("generation_config")
    if given is not None and not isinstance(given, transformers().GenerationConfig):
        raise InvalidArgumentError(
            f"generation_config must be a transformers.GenerationConfig, got {type(given).__name__}"
        )
    own = _arguments_of_generate(model)
    rest = {name: value for name, value in options.items() if name not in own}
    config, model_arguments = model._prepare_generation_config(given, **rest)
    taken = [name for name, value in options.items() if name in own and value is not None]
    return config, taken, model_arguments


def _check_model_arguments(arguments: Mapping[str, Any]) -> None:
    others = [
        name
        for name, value in arguments.items()
        if value is not None and name not in MODEL_ARGUMENTS
    ]
    if others:
        alike = get_close_matches(others[0], FIELDS | ARGUMENTS, n=1)
        hint = f" (did you mean {alike[0]}?)" if alike else ""
        raise InvalidArgumentError(
            f"generate can be given no other input of the model than input_ids and "
            f"attention_mask, got {others} too{hint}: prefixes are found by token ids, which do "
            "not tell what else the model sees"
        )
    kept = arguments.get("logits_to_keep")
    if kept is not None and not isinstance(kept, int):
        raise InvalidArgumentError(
            f"logits_to_keep must be an int with a prefix cache, got {type(kept).__name__}: its "
            "positions would depend on how much of the prompt is computed"
        )


def _check_cache(config: Any) -> None:
    if not config.use_cache:
        raise InvalidArgumentError(
            f"use_cache must be True, got {config.use_cache!r}: there would be nothing to reuse"
        )
    kind = config.cache_implementation
    if kind not in (None, "dynamic"):
        raise InvalidArgumentError(f"cache_implementation must be 'dynamic' or None, got {kind!r}")


def _is_known(config: Any) -> bool:
    """Return whether all configuration fields with a value are in the lists above.

    A field that a newer version has added may change the states of an answer.
    """
    unset = _new_fields(transformers().GenerationConfig)
    return all(getattr(config, name, value) in (None, False, value) for name, value in unset)


@lru_cache
def _new_fields(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a configuration class that no list above has, with their defaults.

    Transformers does not read undeclared fields of a model's own configuration.
    """
    values: dict[str, Any] = {**vars(kind()), **kind._get_default_generation_params()}
    known = FIELDS | REFUSED.keys()
    return tuple((name, value) for name, value in values.items() if name not in known)


def has_librarys_loop(model: Any) -> bool:
    """Return whether ``model.generate`` and its decoding loop are those of transformers."""
    library, kind = transformers().GenerationMixin, type(model)
    loop = ("generate", "_sample")
    return all(getattr(kind, name, None) is getattr(library, name) for name in loop)


def _check_ranks(model: Any) -> None:
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    library = importlib.import_module("transformers.generation.utils")
    if distributed.get_world_size() > 1 and (
        library.is_deepspeed_zero3_enabled() or library.is_fsdp_managed_module(model)
    ):
        raise InvalidArgumentError(
            f"the model's weights must be whole on each rank, got FSDP or ZeRO-3: "
            f"{REFUSED['synced_gpus']}"
        )


def _as_ids(ids: Any) -> tuple[int, ...]:
    """Return configured special tokens, an id, a list, a tensor or None, as a tuple."""
    return () if ids is None else tuple(torch.as_tensor(ids, device="cpu").flatten().tolist())
