"""Traces: files of requests, and prompt tokens that share the same prefixes as the requests.

A trace does not hold tokens. It names each run of ``block_size`` prompt tokens by an id, which
stands for the whole prefix up to the run's end. So two prompts share the tokens of their common
leading ids.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mamba_cache._checks import check_int
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.trace import TRACE_FORMAT, TRACE_VERSION

__all__ = ["TOKENS_PER_HASH_ID", "TraceRequest", "prompt_tokens", "read_trace"]

TOKENS_PER_HASH_ID = 512
"""Tokens of an id in a file that does not give their number: Mooncake's."""

_TOKEN_BITS = 17
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIXERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

_MAX_BLOCK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    input_length: int  # tokens of the prompt
    output_length: int  # tokens of the answer; 0 if the trace does not say
    hash_ids: tuple[int, ...]  # one for each block of the prompt; an incomplete one may have none
    block_size: int = TOKENS_PER_HASH_ID
    will_continue: bool | None = None  # the request's hint
    tenant: str | None = None  # the cache salt

    def __post_init__(self) -> None:
        check_int("input_length", self.input_length, minimum=1)
        check_int("output_length", self.output_length, minimum=0)
        whole, rest = divmod(self.input_length, self.block_size)
        if len(self.hash_ids) not in (whole, whole + bool(rest)):
            raise InvalidArgumentError(
                f"{self.input_length} prompt tokens need {whole + bool(rest)} hash_ids, one for "
                f"each {self.block_size} tokens, got {len(self.hash_ids)}"
            )
        if not (self.will_continue is None or isinstance(self.will_continue, bool)):
            raise InvalidArgumentError(
                f"will_continue must be true, false or null, got {self.will_continue!r}"
            )
        if not (self.tenant is None or isinstance(self.tenant, str)):
            raise InvalidArgumentError(f"tenant must be a string or null, got {self.tenant!r}")


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace: a file of JSON lines, which may be compressed (``.gz``).

    Lines have Mooncake's format: an object with ``hash_ids``, ints or strings, ``input_length``
    and, if known, ``output_length``. A log of ``integrations.trace.TraceLog`` also has
    ``will_continue`` and ``tenant``, and its first line gives the number of tokens of an id. The
    default is 512. Other fields and empty lines are ignored.

    Raises:
        InvalidArgumentError: The file or a line cannot be read, or there is no request.
    """
    if limit is not None:
        check_int("limit", limit, minimum=1)
    try:
        opened: Any = gzip.open if str(path).endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8-sig") as lines:
            requests = list(islice(_read_lines(lines), limit))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"trace {str(path)!r} cannot be read: {error}") from error
    if not requests:
        raise InvalidArgumentError(f"trace {str(path)!r} holds no request")
    return requests


def prompt_tokens(request: TraceRequest) -> npt.NDArray[np.int32]:
    """Make the tokens of a request's prompt, [input_length] int32.

    Each id gives a block of tokens that look random and are always the same (SplitMix64 of their
    number). Tokens at the end without an id are those of the complement of the last id.
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


def _read_lines(lines: Iterable[str]) -> Iterator[TraceRequest]:
    numbers: dict[object, int] = {}  # consecutive numbers of the ids in the file
    size: int | None = None
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields: Any = json.loads(line)
            if isinstance(fields, dict) and TRACE_FORMAT in fields:
                size = _read_header(fields, size)
                continue
            size = size or TOKENS_PER_HASH_ID
            request = _read_request(fields, size, numbers)
        except json.JSONDecodeError as error:
            raise InvalidArgumentError(
                f"line {line_number} of the trace is not JSON: {error.msg} in {line.strip()[:40]!r}"
            ) from None
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidArgumentError(f"line {line_number} of the trace: {error}") from error
        yield request


def _read_header(fields: dict[str, Any], size: int | None) -> int:
    """Return the block size in the first line of a log; all logs of a file must have the same."""
    check_int(TRACE_FORMAT, fields[TRACE_FORMAT], minimum=TRACE_VERSION, maximum=TRACE_VERSION)
    given = check_int(
        "block_size_tokens", fields.get("block_size_tokens"), minimum=1, maximum=_MAX_BLOCK
    )
    if size not in (None, given):
        raise InvalidArgumentError(f"this log has blocks of {given} tokens, those before of {size}")
    return given


def _read_request(fields: Any, size: int, numbers: dict[object, int]) -> TraceRequest:
    if not isinstance(fields, dict) or not fields.keys() >= {"hash_ids", "input_length"}:
        raise TypeError(f"must be an object with hash_ids and input_length, got {fields!r:.200}")
    ids = fields["hash_ids"]
    if not isinstance(ids, list) or any(type(each) not in (int, str) for each in ids):
        raise TypeError(f"hash_ids must be a list of ints or strings, got {ids!r:.200}")
    return TraceRequest(
        input_length=fields["input_length"],
        output_length=fields.get("output_length", 0),
        hash_ids=tuple(numbers.setdefault(each, len(numbers)) for each in ids),
        block_size=size,
        will_continue=fields.get("will_continue"),
        tenant=fields.get("tenant"),
    )
