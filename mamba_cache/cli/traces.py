"""Traces: requests as files list them, in three formats, and as tokens that share what they share.

A trace does not hold tokens. It names each run of ``block_size`` prompt tokens by an id that stands
for the whole prefix up to its end, so two prompts share as many tokens as they have leading ids in
common.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, cast

import numpy as np
import numpy.typing as npt

from mamba_cache._checks import check_int, check_number
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.trace import TRACE_FORMAT

__all__ = ["TOKENS_PER_HASH_ID", "TraceRequest", "prompt_tokens", "read_trace"]

TOKENS_PER_HASH_ID = 512
"""Tokens that an id stands for, where neither the file nor the caller says so: Mooncake's."""

_TOKEN_BITS = 17
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIXERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

_MAX_BLOCK: Final = 1 << 20

_FORMATS: Final = (
    "must be an object with hash_ids and input_length, an object with hashes, or a list of hashes"
)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    timestamp: float  # when it came, in milliseconds
    input_length: int  # tokens of the prompt
    output_length: int  # tokens of the answer; 0 if the trace does not say
    hash_ids: tuple[int, ...]  # of each block of the prompt; a part of a block may have none
    block_size: int = TOKENS_PER_HASH_ID
    will_continue: bool | None = None  # the hint that came with it
    tenant: str | None = None  # the cache salt

    def __post_init__(self) -> None:
        check_number("timestamp", self.timestamp, maximum=1e18)
        check_int("input_length", self.input_length, minimum=1)
        check_int("output_length", self.output_length, minimum=0)
        whole, rest = divmod(self.input_length, self.block_size)
        if len(self.hash_ids) not in (whole, whole + bool(rest)):
            raise InvalidArgumentError(
                f"{self.input_length} prompt tokens need {whole + bool(rest)} hash_ids, one for "
                f"each {self.block_size} tokens, got {len(self.hash_ids)}"
            )

    @property
    def whole_ids(self) -> tuple[int, ...]:
        """The ids of the complete blocks."""
        return self.hash_ids[: self.input_length // self.block_size]


def read_trace(
    path: str | Path, limit: int | None = None, *, block_size: int | None = None
) -> list[TraceRequest]:
    """Read a trace: a file of JSON lines, which may be compressed (``.gz``).

    A line is, whatever the others are,

    - Mooncake's: an object with ``hash_ids``, ``input_length``, and where they are known
      ``output_length`` and ``timestamp`` in milliseconds. Other fields are ignored;
    - a list of block hashes, numbers or strings, of a prompt whose complete blocks they name; or an
      object with such a list as ``hashes``, and where they are known ``length``, ``timestamp``,
      ``will_continue`` and ``tenant``;
    - a line of a log of ``integrations.trace.TraceLog``, which begins with a line that says what
      follows.

    Empty lines are passed over. An id stands for ``block_size`` tokens; by default for what the
    file says, or else 512.
    """
    if limit is not None:
        check_int("limit", limit, minimum=1)
    if block_size is not None:
        check_int("block_size", block_size, minimum=1, maximum=_MAX_BLOCK)
    try:
        with _open(path) as lines:
            requests = list(islice(_read_lines(lines, block_size), limit))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"trace {str(path)!r} cannot be read: {error}") from error
    if not requests:
        raise InvalidArgumentError(f"trace {str(path)!r} holds no request")
    return requests


def prompt_tokens(request: TraceRequest) -> npt.NDArray[np.int32]:
    """Make the tokens of a request's prompt, [input_length] int32.

    Each id gives a block of tokens that look random and are always the same (SplitMix64 of their
    number). Tokens at the end that no id names are those of the prompt's last id, one further.
    """
    ids, size = list(request.hash_ids), request.block_size
    if len(ids) * size < request.input_length:
        ids.append(~(ids[-1] if ids else 0))
    first = np.array(ids, np.int64).astype(np.uint64)[:, None] * np.uint64(size)
    bits = (first + np.arange(size, dtype=np.uint64)) * _GOLDEN
    for shift, mixer in zip((np.uint64(30), np.uint64(27)), _MIXERS, strict=True):
        bits = (bits ^ (bits >> shift)) * mixer
    tokens: npt.NDArray[np.int32] = (bits >> np.uint64(64 - _TOKEN_BITS)).astype(np.int32)
    return tokens.reshape(-1)[: request.input_length]


def _open(path: str | Path) -> IO[str]:
    if str(path).endswith(".gz"):
        return cast("IO[str]", gzip.open(path, "rt", encoding="utf-8-sig"))
    return open(path, encoding="utf-8-sig")


def _read_lines(lines: Iterable[str], block_size: int | None) -> Iterator[TraceRequest]:
    numbers: dict[object, int] = {}  # of names of blocks
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields: Any = json.loads(line)
            if isinstance(fields, dict) and TRACE_FORMAT in fields:
                block_size = _read_header(fields, block_size)
                continue
            request = _read_request(fields, block_size or TOKENS_PER_HASH_ID, numbers)
        except KeyError as error:
            raise InvalidArgumentError(f"line {line_number} of the trace lacks {error}") from None
        except json.JSONDecodeError as error:
            raise InvalidArgumentError(
                f"line {line_number} of the trace is not JSON: {error.msg} in {line.strip()[:40]!r}"
            ) from None
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            raise InvalidArgumentError(f"line {line_number} of the trace: {error}") from error
        yield request


def _read_header(fields: dict[str, Any], block_size: int | None) -> int:
    """Return the block size that a log's first line gives; logs of one file must agree."""
    check_int(TRACE_FORMAT, fields[TRACE_FORMAT], minimum=1, maximum=1)
    size = fields["block_size_tokens"]
    size = check_int("block_size_tokens", size, minimum=1, maximum=_MAX_BLOCK)
    if block_size not in (None, size):
        raise InvalidArgumentError(f"the blocks of this log have {size} tokens, not {block_size}")
    return size


def _read_request(fields: Any, size: int, numbers: dict[object, int]) -> TraceRequest:
    if isinstance(fields, list):
        fields = {"hashes": fields}
    if not isinstance(fields, dict):
        raise TypeError(f"{_FORMATS}; got {type(fields).__name__}")
    if not fields.keys() & {"hashes", "hash_ids"}:
        raise ValueError(f"{_FORMATS}; this object has {sorted(fields)}")
    name = "hashes" if "hashes" in fields else "hash_ids"
    ids = _read_ids(name, fields[name], numbers)
    if name == "hash_ids":
        length = fields["input_length"]
    else:  # a list of hashes names complete blocks; what came after them is not known
        length = fields.get("length", len(ids) * size + 1)
    hint, tenant = fields.get("will_continue"), fields.get("tenant")
    if not (hint is None or isinstance(hint, bool)):
        raise TypeError(f"will_continue must be true, false or null, got {hint!r}")
    if not (tenant is None or isinstance(tenant, (str, int))):
        raise TypeError(f"tenant must be a string, a number or null, got {tenant!r}")
    return TraceRequest(
        timestamp=fields.get("timestamp", 0),
        input_length=length,
        output_length=fields.get("output_length", 0),
        hash_ids=ids,
        block_size=size,
        will_continue=hint,
        tenant=None if tenant is None else str(tenant),
    )


def _read_ids(name: str, values: Any, numbers: dict[object, int]) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{name} must be a list, got {type(values).__name__}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise TypeError(f"{name} must be ints or strings, got {value!r}")
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)
