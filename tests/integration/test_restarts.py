"""A process skips the tokens that another one has computed, over a disk and real stores.

The stores need servers: tests/engines/stores.sh.
"""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import restart_rig
from clocks import ManualClock
from restart_rig import PROMPT_TOKENS, make_engine, run, uncached
from store_rig import LOOPBACK, mooncake_master, valkey_server

from mamba_cache.context import prefetch
from mamba_cache.stores import open_store
from mamba_cache.tiers import lower

SERVERS = {
    "valkey": (valkey_server, ""),
    "mooncake": (mooncake_master, "?segment=64MiB"),
}
REAL = [pytest.param(name, marks=pytest.mark.engine) for name in SERVERS]


@pytest.fixture
def store(request):
    """The URL of a store whose server runs."""
    make, options = SERVERS[request.param]
    with make() as server:
        yield f"{request.param}://{LOOPBACK}:{server.port}{options}"


class Process:
    """A process with an engine over a disk or a store."""

    def __init__(self, where, *seeds):
        command = [sys.executable, restart_rig.__file__, str(where), *map(str, seeds)]
        paths = os.pathsep.join(each for each in sys.path if each)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
            text=True,
        )

    def results(self):
        """Answers and skipped tokens, by seed."""
        return json.loads(self._process.stdout.readline())

    def end(self):
        """End the process; return its store tier's counters."""
        output, _ = self._process.communicate()
        assert self._process.returncode == 0
        return json.loads(output)

    def kill(self):
        if not self._process.stdout.closed:
            self._process.kill()
            self._process.communicate()


@contextmanager
def process(where, *seeds):
    running = Process(where, *seeds)
    try:
        yield running
    finally:
        running.kill()


def test_a_second_process_skips_what_the_first_computed_with_equal_tokens(tmp_path) -> None:
    """At least 95% of the prompts' tokens, before the second process has computed anything."""
    engine = make_engine(tmp_path)
    first, skipped = run(engine, 1)
    engine.context.close()
    assert set(skipped) == {0}
    with process(tmp_path, 1, 2) as other:
        [(second, skipped), (third, _)] = other.results()
    assert second == first
    assert first == uncached(1)
    assert third == uncached(2)
    assert sum(skipped) >= 0.95 * PROMPT_TOKENS * len(skipped)
    assert min(skipped) == 160


def test_what_is_used_once_is_not_written_by_default(tmp_path) -> None:
    """An entry is written at its second use: here when all prompts have come twice."""
    first = make_engine(tmp_path, write_on_use=2)
    run(first, 1)
    assert first.context.disk_tier.flush()
    assert sum(first.context.disk_tier.stats().entries.values()) == 0
    run(first, 1)
    first.context.close()
    second = make_engine(tmp_path, write_on_use=2)
    answers, skipped = run(second, 1)
    assert answers == uncached(1)
    assert set(skipped) == {160}
    second.context.close()


def test_a_disk_that_brings_nothing_in_time_is_not_waited_for(tmp_path, monkeypatch) -> None:
    first = make_engine(tmp_path)
    run(first, 1, count=2)
    first.context.close()
    second = make_engine(tmp_path, prefetch_seconds=0.0)
    monkeypatch.setattr(type(second.context.disk_tier), "load", lambda *_: True)
    answers, skipped = run(second, 1, count=2)
    assert answers == uncached(1)[:2]
    assert set(skipped) == {0}
    monkeypatch.undo()


@pytest.mark.parametrize("store", REAL, indirect=True)
def test_a_prefix_computed_in_one_process_is_resumed_in_another(store) -> None:
    """Equal tokens, and at least 95% of the prompts' tokens skipped."""
    with process(store, 1) as first:
        [(answers, skipped)] = first.results()
        assert answers == uncached(1)
        assert set(skipped) == {0}
        with process(store, 1, 2) as second:
            [(again, skipped), (others, not_skipped)] = second.results()
            stats = second.end()
        assert again == answers
        assert others == uncached(2)
        assert sum(skipped) >= 0.95 * PROMPT_TOKENS * len(skipped)
        assert set(not_skipped) == {0}
        assert stats["restored"] == stats["loads"] > 0
        first.end()


class Remembering:
    """A store that records the names of its entries."""

    def __init__(self, store):
        self._store, self.names = store, set()

    def put_many(self, keys, buffers):
        self.names.update(keys)
        return self._store.put_many(keys, buffers)

    def __getattr__(self, name):
        return getattr(self._store, name)

    def damage(self):
        """Invert the bits of every chunk; headers keep theirs."""
        for name in self.names:
            if name.count("/") == 6:
                buffer = bytearray(2**21)
                [size] = self._store.get_many_into([name], [memoryview(buffer)])
                turned = bytes(255 - byte for byte in buffer[:size])
                assert self._store.remove([name]) == [None]
                assert self._store.put_many([name], [memoryview(turned)]) == [None]


@pytest.mark.parametrize("store", REAL[:1], indirect=True)
def test_damage_is_a_counted_miss(store, monkeypatch) -> None:
    for module in (lower, prefetch):
        monkeypatch.setattr(module, "time", ManualClock())
    client = Remembering(open_store(store))
    first = make_engine(store, store=client)
    answers, _ = run(first, 1)
    first.context.close()
    client.damage()
    client.close()
    engine = make_engine(store)
    engine.context.wait_for_tiers()
    again, skipped = run(engine, 1)
    assert again == answers
    assert not any(skipped)
    assert set(engine.context.store_tier.stats().refused) == {"mac"}
    engine.context.close()
