"""Prompts of callers: checks, and their rows as arrays of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from mamba_cache._checks import as_ints, as_items
from mamba_cache.cache.hashing import as_token_array
from mamba_cache.errors import InvalidArgumentError

__all__ = [
    "Prompt",
    "check_prompts",
    "pad_prompts",
    "read_prompt",
    "read_prompts",
    "split_rows",
]

_ID_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One row of a batch without its padding."""

    tokens: npt.NDArray[np.int32]  # token ids
    padding: int  # number of padding columns on its left
    key: bytes  # equal for rows with equal tokens only


def _prompt(row: npt.NDArray[np.int32], padding: int) -> Prompt:
    tokens = np.ascontiguousarray(row[padding:])
    return Prompt(tokens, padding, tokens.tobytes())


def check_prompts(input_ids: torch.Tensor, attention_mask: Any, vocabulary: int) -> None:
    """Check a batch: [rows, length] ids, and a mask with zeros on the left only, or None."""
    if input_ids.dim() != 2 or not input_ids.numel() or input_ids.dtype not in _ID_DTYPES:
        raise InvalidArgumentError(
            f"input_ids must be an int64 or int32 tensor [rows, length] of at least one token, got "
            f"{input_ids.dtype} of shape {tuple(input_ids.shape)}"
        )
    # Checked on the host, so that it waits for the device only once for each tensor.
    ids = input_ids.cpu().numpy()
    _check_range(int(ids.min()), int(ids.max()), vocabulary, "input_ids")
    if attention_mask is None:
        return
    shape = tuple(getattr(attention_mask, "shape", ()))
    if not isinstance(attention_mask, torch.Tensor) or shape != tuple(input_ids.shape):
        raise InvalidArgumentError(
            f"attention_mask must be a tensor of the shape of input_ids, {tuple(input_ids.shape)}, "
            f"got {type(attention_mask).__name__} of shape {shape}"
        )
    mask = attention_mask.cpu()
    is_real: npt.NDArray[np.bool_] = (mask == 1).numpy()
    if not (is_real | (mask == 0).numpy()).all():
        raise InvalidArgumentError("attention_mask must be 1 for tokens and 0 for padding only")
    is_right = is_real[:, -1] & (is_real[:, :-1] <= is_real[:, 1:]).all(axis=1)
    if not is_right.all():
        raise InvalidArgumentError(
            f"attention_mask must be 0 on the left only, and not everywhere; row "
            f"{is_right.tolist().index(False)} is not: set tokenizer.padding_side = 'left', and "
            "give prompts without holes"
        )


def pad_prompts(
    rows: Sequence[Sequence[int] | npt.NDArray[np.int32]],
    pad_token_id: int | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts padded on the left, and their mask: [prompts, longest] int64 each."""
    tokens = [torch.as_tensor(row, dtype=torch.int64, device="cpu") for row in rows]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    ids, mask = pad(tokens, padding_value=pad_token_id or 0), pad([*map(torch.ones_like, tokens)])
    return ids.to(device), mask.to(device)


def read_prompts(prompts: Any, vocabulary: int) -> list[npt.NDArray[np.int32]]:
    """Return the token ids of each prompt of a collection, which may be empty."""
    if isinstance(prompts, (str, bytes, Mapping)):
        raise InvalidArgumentError(
            f"inputs must be prompts, each a list of token ids, got {_described(prompts)}"
        )
    given = as_items("inputs", prompts, "prompts, each a list of token ids")
    if len(given) and not any(map(_is_list, given)):
        is_flat = all(isinstance(one, int) for one in given)
        raise InvalidArgumentError(
            f"inputs must be prompts, each a list of token ids, got a list of "
            f"{_described(given[0])}"
            + (": for one prompt write [[1, 2, 3]], not [1, 2, 3]" if is_flat else "")
        )
    return [read_prompt(one, vocabulary, f"prompt {number}") for number, one in enumerate(given)]


def read_prompt(prompt: Any, vocabulary: int, name: str = "the prompt") -> npt.NDArray[np.int32]:
    """Return the token ids of one prompt: a tensor [1, length] or [length], or a list of ints."""
    if not _is_list(prompt):
        raise InvalidArgumentError(
            f"{name} must be a tensor of token ids [length] or [1, length], or a list of ints, got "
            f"{_described(prompt)}"
        )
    rows = prompt if len(prompt) and all(map(_is_list, prompt)) else [prompt]
    if len(rows) > 1:
        raise InvalidArgumentError(f"{name} must be one prompt, got {len(rows)} rows")
    try:
        tokens = as_token_array(rows[0])
    except InvalidArgumentError:  # items may be tensors; otherwise this error names the prompt
        ids = as_ints(f"the token ids of {name}", rows[0])
        if ids:
            _check_range(min(ids), max(ids), vocabulary, name)
        tokens = np.array(ids, dtype=np.int32)
    if not len(tokens):
        raise InvalidArgumentError(f"{name} must not be empty")
    _check_range(int(tokens.min()), int(tokens.max()), vocabulary, name)
    return tokens.astype(np.int32)


def split_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[Prompt] | None:
    """Return the rows of a batch; None if its mask hides other tokens than padding on the left.

    Token ids alone do not determine the result then.
    """
    ids = input_ids.cpu().numpy().astype(np.int32)
    if attention_mask is None:
        return [_prompt(row, 0) for row in ids]
    sees: npt.NDArray[np.bool_] = attention_mask.cpu().bool().numpy()
    padding = sees.argmax(axis=1)  # columns before the first visible one
    num_seen = sees.sum(axis=1)
    if not (num_seen.all() and (padding + num_seen == sees.shape[1]).all()):
        return None
    return [_prompt(row, before) for row, before in zip(ids, padding.tolist(), strict=True)]


def _check_range(lowest: int, highest: int, vocabulary: int, name: str) -> None:
    if lowest < 0 or highest >= vocabulary:
        raise InvalidArgumentError(
            f"token ids must be in [0, {vocabulary}), the model's vocabulary; {name} has "
            f"{lowest if lowest < 0 else highest}"
        )


def _is_list(value: Any) -> bool:
    """Return whether a value is a sequence of items, or an array of at least one dimension."""
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        return False
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def _described(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"{kind}: give its input_ids, or unpack it, as in generate(**inputs)"
    if isinstance(value, torch.Tensor):
        return f"{kind} of shape {tuple(value.shape)}"
    return f"{kind}: tokenize it" if isinstance(value, (str, bytes)) else kind
