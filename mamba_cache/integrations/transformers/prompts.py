"""What callers pass as prompts, checked and taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mamba_cache.errors import InvalidArgumentError

__all__ = ["Prompt", "check_options", "pad_prompts", "setting", "split_rows"]

_REFUSED = {
    "past_key_values": "the cache makes its own",
    "cache_params": "the cache makes its own",
    "inputs_embeds": "prefixes are found by token ids, which embeddings do not tell",
    "assistant_model": "it goes back in the sequence, which a state cannot",
    "prompt_lookup_num_tokens": "it goes back in the sequence, which a state cannot",
    "use_mtp": "it goes back in the sequence, which a state cannot",
    "prefill_chunk_size": "prompts are computed in segments anyway: see segment_tokens",
    "output_attentions": "those of a prefix that is not computed again do not exist",
    "output_hidden_states": "those of a prefix that is not computed again do not exist",
    "custom_generate": "it may use the model in any way",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a batch without its padding.

    Attributes:
        tokens: Token ids.
        padding: Columns on the left that are not part of it.
    """

    tokens: tuple[int, ...]
    padding: int


def check_options(options: Mapping[str, Any], config: Any) -> None:
    """Checks what is passed to ``generate`` beside the prompt.

    Args:
        options: The keyword arguments.
        config: The generation configuration that stands behind them.

    Raises:
        InvalidArgumentError: One of them cannot be served; the message says why.
    """
    for name, reason in _REFUSED.items():
        value = setting(name, options, config)
        if value is not None and value is not False:
            raise InvalidArgumentError(f"{name} cannot be used with a prefix cache: {reason}")
    if setting("use_cache", options, config) is False:
        raise InvalidArgumentError("use_cache must not be False: there would be nothing to reuse")
    kind = setting("cache_implementation", options, config)
    if kind not in (None, "dynamic"):
        raise InvalidArgumentError(f"cache_implementation must be 'dynamic' or None, got {kind!r}")
    tensors = [
        name
        for name, value in options.items()
        if isinstance(value, torch.Tensor) and name not in ("input_ids", "attention_mask")
    ]
    if tensors:
        raise InvalidArgumentError(
            f"only input_ids and attention_mask may be tensors, got {tensors} too: prefixes are "
            "found by token ids, which do not tell what else the model sees"
        )


def setting(name: str, options: Mapping[str, Any], config: Any) -> Any:
    """Returns an option, or what the generation configuration says if it is not given."""
    return options[name] if name in options else getattr(config, name, None)


def pad_prompts(
    prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes a batch of prompts of different lengths, padded on the left.

    Returns:
        ``input_ids`` and ``attention_mask``, [prompts, length of the longest] int64 each.

    Raises:
        InvalidArgumentError: There is no prompt, or one is empty.
    """
    good = [isinstance(p, Sequence) and not isinstance(p, str) and len(p) > 0 for p in prompts]
    if not good or not all(good):
        raise InvalidArgumentError("give at least one prompt, each a list of token ids, not empty")
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.full((len(prompts), max(lengths)), pad_token_id, device=device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :] = torch.as_tensor(prompt, device=device)
        mask[row, -len(prompt) :] = 1
    return ids, mask


def split_rows(input_ids: Any, attention_mask: Any = None) -> list[Prompt]:
    """Takes a batch apart.

    Args:
        input_ids: [rows, length] token ids.
        attention_mask: [rows, length], 0 for padding, which is on the left; None: there is none.

    Raises:
        InvalidArgumentError: The ids are no such tensor, or the mask is none, or it has zeros
            anywhere but on the left, or nothing else.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or not input_ids.numel():
        shape = tuple(getattr(input_ids, "shape", ()))
        raise InvalidArgumentError(
            f"input_ids must be a tensor [rows, length] of at least one token, got "
            f"{type(input_ids).__name__} of shape {shape}"
        )
    ids = input_ids.tolist()
    if attention_mask is None:
        return [Prompt(tuple(row), 0) for row in ids]
    if tuple(attention_mask.shape) != tuple(input_ids.shape):
        raise InvalidArgumentError(
            f"attention_mask must be of the shape of input_ids, {tuple(input_ids.shape)}, got "
            f"{tuple(attention_mask.shape)}"
        )
    prompts = []
    for number, (row, mask) in enumerate(zip(ids, attention_mask.bool().tolist(), strict=True)):
        padding = mask.index(True) if True in mask else len(mask)
        if False in mask[padding:] or padding == len(mask):
            raise InvalidArgumentError(
                f"attention_mask must be 0 on the left only, and not everywhere; row {number} is "
                "not: set tokenizer.padding_side = 'left', and give prompts without holes"
            )
        prompts.append(Prompt(tuple(row[padding:]), padding))
    return prompts
