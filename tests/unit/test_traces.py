"""Files of requests: the fields read of each format, and errors for invalid lines."""

import gzip
import json

import numpy as np
import pytest

from mamba_cache.cli.traces import TOKENS_PER_HASH_ID, TraceRequest, prompt_tokens, read_trace
from mamba_cache.errors import InvalidArgumentError

MOONCAKE = {"timestamp": 7, "input_length": 600, "output_length": 5, "hash_ids": [3, 9]}
HEADER = {"mamba_cache_trace": 2, "block_size_tokens": 16}
LOGGED = {"timestamp": 1.5, "input_length": 40, "hash_ids": ["a1", "b2"]}


@pytest.fixture
def trace(tmp_path):
    def write(*lines, name="trace.jsonl"):
        path = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts), encoding="utf-8")
        return path

    return write


def test_a_trace_is_read_in_order_up_to_the_limit(trace):
    path = trace(MOONCAKE, MOONCAKE | {"output_length": 8, "more": True}, MOONCAKE)
    first, second = read_trace(path, 2)
    assert first == TraceRequest(600, 5, (0, 1))
    assert second.output_length == 8
    assert len(read_trace(path)) == 3


def test_a_log_has_its_block_size(trace):
    path = trace(HEADER, LOGGED | {"will_continue": True, "tenant": "c3"}, "", LOGGED)
    first, second = read_trace(path)
    assert (first.block_size, first.input_length, first.output_length) == (16, 40, 0)
    assert (first.will_continue, first.tenant) == (True, "c3")
    assert (second.will_continue, second.tenant) == (None, None)
    assert first.hash_ids == second.hash_ids
    assert len(prompt_tokens(first)) == 40
    with pytest.raises(InvalidArgumentError, match=r"line 2 .* of 16 tokens, those before of 512"):
        read_trace(trace(MOONCAKE, HEADER, LOGGED))


def test_logs_of_two_runs_in_one_file_are_one_trace(trace):
    assert len(read_trace(trace(HEADER, LOGGED, HEADER, LOGGED))) == 2
    other = HEADER | {"block_size_tokens": 32}
    with pytest.raises(InvalidArgumentError, match=r"line 3 of the trace: .* of 32 tokens"):
        read_trace(trace(HEADER, LOGGED, other, LOGGED))


def test_a_line_before_a_trace_has_its_block_size(trace):
    line = {"input_length": 40, "hash_ids": [1, 2, 2**70], "type": "text"}
    [request] = read_trace(trace(HEADER, line))
    assert request.hash_ids == (0, 1, 2)
    with pytest.raises(InvalidArgumentError, match="need 1 hash_ids, one for each 512 tok"):
        read_trace(trace(line))


def test_compressed_and_marked_files_are_read(trace, tmp_path):
    plain = trace(MOONCAKE)
    with gzip.open(tmp_path / "trace.jsonl.gz", "wb") as file:
        file.write(b"\xef\xbb\xbf" + plain.read_bytes() + b"\r\n\n  \n")
    assert read_trace(tmp_path / "trace.jsonl.gz") == read_trace(plain)
    (tmp_path / "cut.jsonl.gz").write_bytes((tmp_path / "trace.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_trace(tmp_path / "cut.jsonl.gz")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2 of the trace is not JSON: .* in '{'"),
        ("3", "line 2 of the trace: must be an object with hash_ids and input_length, got 3"),
        ("null", "must be an object"),
        ("[" * 100_000, "line 2 of the trace: "),
        ({"hash_ids": [1]}, r"must be an object with .* got {'hash_ids': \[1\]}"),
        ({"input_length": 1}, "line 2 of the trace: must be an object with"),
        ({"hashes": ["a"], "length": 400}, "must be an object with hash_ids"),
        ("[1, 2]", "must be an object with hash_ids"),
        (MOONCAKE | {"hash_ids": []}, r"line 2 of the trace: 600 prompt tokens need 2 hash_ids"),
        (MOONCAKE | {"hash_ids": [3, 9, 4]}, "got 3"),
        (MOONCAKE | {"hash_ids": [3, None]}, r"a list of ints or strings, got \[3, None\]"),
        (MOONCAKE | {"hash_ids": [3, 1.5]}, r"a list of ints or strings, got \[3, 1.5\]"),
        (MOONCAKE | {"hash_ids": "39"}, "hash_ids must be a list of ints or strings, got '39'"),
        (MOONCAKE | {"input_length": 0}, "input_length must be an int >= 1, got 0"),
        (MOONCAKE | {"input_length": None}, "got None"),
        (MOONCAKE | {"output_length": -1}, "output_length must be an int >= 0, got -1"),
        (json.dumps(MOONCAKE).replace(": 600", ": NaN"), "input_length must be an int"),
        (MOONCAKE | {"will_continue": 1}, "will_continue must be true, false or null, got 1"),
        (MOONCAKE | {"tenant": [1]}, "tenant must be a string"),
        (HEADER | {"mamba_cache_trace": 1}, r"mamba_cache_trace must be an int in \[2, 2\]"),
        ({"mamba_cache_trace": 2}, "line 2 of the trace: block_size_tokens must be an int in"),
        (HEADER | {"block_size_tokens": 0}, "block_size_tokens must be an int in"),
    ],
)
def test_a_bad_line_is_named(trace, line, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        read_trace(trace(MOONCAKE, line))


def test_a_file_without_requests_is_refused(trace, tmp_path):
    for lines in ((), ("", " "), (HEADER,)):
        with pytest.raises(InvalidArgumentError, match="holds no request"):
            read_trace(trace(*lines))
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_trace(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_trace(tmp_path / "binary")
    with pytest.raises(InvalidArgumentError, match="limit must be"):
        read_trace(trace(MOONCAKE), limit=0)


def test_tokens_follow_from_the_ids_alone():
    one = prompt_tokens(TraceRequest(1_300, 1, (5, 6, 7)))
    other = prompt_tokens(TraceRequest(1_024, 2, (5, 8)))
    assert (one.dtype, one.shape) == (np.int32, (1_300,))
    assert (one[:TOKENS_PER_HASH_ID] == other[:TOKENS_PER_HASH_ID]).all()
    assert (one[TOKENS_PER_HASH_ID : 2 * TOKENS_PER_HASH_ID] != other[TOKENS_PER_HASH_ID:]).any()


def test_tokens_look_random():
    tokens = prompt_tokens(TraceRequest(512 * 1_000, 1, tuple(range(1_000))))
    assert 0 <= tokens.min() < 50
    assert 2**17 - 50 < tokens.max() < 2**17
    assert len(np.unique(tokens)) > 0.95 * (1 - np.exp(-512_000 / 2**17)) * 2**17
    assert len({row.tobytes() for row in tokens.reshape(1_000, 512)}) == 1_000
