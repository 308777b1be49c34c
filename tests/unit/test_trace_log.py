"""The log of requests: its contents, its robustness, and equal hits in a replay."""

import errno
import json
import os
import threading

import numpy as np
import pytest
from engine_rig import MODEL, cache_config

from mamba_cache.cache import compute_block_hashes
from mamba_cache.cli.replay import run_replay
from mamba_cache.cli.traces import read_trace
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.events import Admitted, Removed
from mamba_cache.integrations import trace
from mamba_cache.integrations.trace import TraceLog
from mamba_cache.reference import Engine, SamplingParams

FIRST = SamplingParams(max_new_tokens=1)


def prompts(rng, count):
    """Return prompts of a few conversations, some of two tenants, of any lengths."""
    heads = [rng.integers(1, MODEL.config.vocab_size, 80).tolist() for _ in range(4)]
    for _ in range(count):
        head = heads[rng.integers(len(heads))]
        tail = rng.integers(1, MODEL.config.vocab_size, int(rng.integers(1, 40))).tolist()
        tokens = head[: int(rng.integers(1, len(head)))] + tail
        heads[rng.integers(len(heads))] = (tokens + tail)[:100]
        yield tokens, (None, "a", "b")[rng.integers(3)], (None, True, False)[rng.integers(3)]


def serve(engine, requests):
    """Serve each request to its first token before the next one."""
    for tokens, salt, hint in requests:
        engine.submit(tokens, FIRST, cache_salt=salt, will_continue=hint)
        list(engine.stream())


def admitted(length, *, tokens=None, **fields):
    hashes = compute_block_hashes(list(range(length)) if tokens is None else tokens, 4)
    return Admitted(None, length, hashes.digests, 4, **fields)


def add(log, *lengths):
    for length in lengths:
        log(admitted(length))


def logging_engine(config, path):
    """Return an engine and the log of its requests."""
    engine, log = Engine(MODEL, config), TraceLog(path)
    engine.context.listeners.add(log)
    return engine, log


def written(path):
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "mamba_cache_trace" not in line]


@pytest.mark.parametrize("policy", ["adaptive", "lru"])
def test_a_replay_of_the_log_has_the_engines_hits(tmp_path, rng, policy):
    path = tmp_path / "requests.jsonl"
    budgets = {"max_slots": 6, "num_kv_blocks": 40}
    config = cache_config(
        **budgets, slot_policy=policy, max_sequence_length=160, max_tokens=160,
        max_requests=1,
    )  # fmt: skip
    engine, log = logging_engine(config, path)
    serve(engine, prompts(rng, 120))
    log.close()
    stats = engine.context.stats()
    assert stats.skipped_tokens > 0
    assert stats.evicted_blocks > 0
    [record] = run_replay(read_trace(path), slots=[6], kv_blocks=40, policies=[policy])["records"]
    assert (record["requests"], record["hits"]) == (stats.requests, stats.hits)
    assert record["skipped_tokens"] == stats.skipped_tokens
    assert record["saved_states"] == stats.saved_states
    assert record["evicted_blocks"] == stats.evicted_blocks


def test_a_line_discloses_shared_prefixes_and_nothing_else(tmp_path):
    path = tmp_path / "log"
    event = admitted(9, will_continue=False, cache_salt="somebody")
    with TraceLog(path) as log:
        log(event)
        log(admitted(9))
        log(Removed("block", (1,), (b"2",)))
    content = path.read_text(encoding="utf-8")
    header, first, second = map(json.loads, content.splitlines())
    assert header.keys() == {"mamba_cache_trace", "block_size_tokens", "began"}
    assert first.keys() == {"timestamp", "input_length", "hash_ids", "will_continue", "tenant"}
    assert second.keys() == {"timestamp", "input_length", "hash_ids"}
    assert first["hash_ids"] == second["hash_ids"]
    assert len(set(first["hash_ids"])) == 2
    assert first["timestamp"] <= second["timestamp"]
    assert not any(digest.hex()[:12] in content for digest in event.digests)
    assert "somebody" not in content
    assert path.stat().st_mode & 0o077 == 0, "other users must not read the log"


def test_logs_go_together_only_under_one_secret(tmp_path):
    names = []
    for number, secret in enumerate([None, None, b"s", b"s", b"t"]):
        log = TraceLog(tmp_path / str(number), secret=secret)
        add(log, 8)
        log.close()
        names.append(tuple(written(tmp_path / str(number))[0]["hash_ids"]))
    assert names[2] == names[3]
    assert len(set(names)) == 4


def test_a_thread_writes_queued_lines_without_a_flush(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "_SECONDS_BETWEEN_WRITES", 0.001)
    log = TraceLog(tmp_path / "log")
    was_written, append = threading.Event(), trace._append
    monkeypatch.setattr(trace, "_append", lambda *given: (append(*given), was_written.set()))
    add(log, 8)
    assert log._thread.daemon  # an unclosed log must not keep the process alive
    assert was_written.wait(60)
    log.close()
    assert len(written(tmp_path / "log")) == 1


def test_a_full_queue_drops_and_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "_MAX_QUEUED", 4)
    monkeypatch.setattr(trace, "_SECONDS_BETWEEN_WRITES", 1e6)
    monkeypatch.setattr(TraceLog, "_run", lambda self: None)
    log = TraceLog(tmp_path / "log")
    add(log, 1, 2, 3, 4, 5, 6)
    assert log.num_dropped == 2
    log.flush()
    add(log, 7)
    log.close()
    add(log, 8)
    assert [line["input_length"] for line in written(tmp_path / "log")] == [1, 2, 3, 4, 7]
    assert (log.num_written, log.num_dropped, log.num_errors) == (5, 3, 0)


def test_a_disk_that_is_full_costs_lines_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "log"
    log = TraceLog(path)
    add(log, 1)
    log.flush()
    write = os.write

    def short(file, content):
        return write(file, content[:5])

    def fails(file, content):
        raise OSError(errno.EIO, "no")

    for broken in (short, fails):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", broken)
            add(log, 2, 3)
            log.flush()
    add(log, 4)
    log.close()
    assert [line["input_length"] for line in written(path)] == [1, 4]
    assert (log.num_written, log.num_dropped, log.num_errors) == (2, 4, 2)
    assert len(read_trace(path)) == 2


def test_a_path_that_cannot_be_opened_is_counted_and_the_engine_serves(tmp_path, rng):
    engine, log = logging_engine(cache_config(), tmp_path / "no" / "such" / "folder")
    serve(engine, [([1, 2, 3], None, None)])
    log.close()
    assert (log.num_written, log.num_dropped, log.num_errors) == (0, 1, 1)
    assert engine.context.stats().requests == 1


def test_a_log_is_added_to(tmp_path):
    for length in (3, 5):
        log = TraceLog(tmp_path / "log")
        log.flush()
        add(log, length)
        log.close()
        log.close()
    assert [request.input_length for request in read_trace(tmp_path / "log")] == [3, 5]


def test_a_process_that_was_forked_leaves_the_log_alone(tmp_path, monkeypatch):
    log = TraceLog(tmp_path / "log")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    add(log, 3)
    log.flush()
    log.close()
    monkeypatch.undo()
    assert (log.num_dropped, log._thread) == (1, None)
    assert not (tmp_path / "log").exists()
    log.close()


def test_a_request_that_is_preempted_and_resumed_is_one_line(tmp_path, rng):
    path = tmp_path / "log"
    engine, log = logging_engine(cache_config(num_kv_blocks=12, max_requests=3), path)
    lengths = [20, 21, 22]
    engine.generate(
        [np.arange(1, n + 1).tolist() for n in lengths], SamplingParams(max_new_tokens=24)
    )
    log.close()
    assert engine.context.stats().requests > 3, "one request was resumed"
    assert sorted(line["input_length"] for line in written(path)) == lengths


def test_an_unclosed_log_is_written_at_the_end_of_the_process(tmp_path, monkeypatch):
    at_exit = []
    monkeypatch.setattr(trace.atexit, "register", at_exit.append)
    log = TraceLog(tmp_path / "log")
    add(log, 3, 20)
    [close] = at_exit
    close()
    assert not log._thread.is_alive()
    assert [line["input_length"] for line in written(tmp_path / "log")] == [3, 20]


def test_values_that_are_no_path_are_refused():
    with pytest.raises(InvalidArgumentError, match="path must be a path, got 5"):
        TraceLog(5)
