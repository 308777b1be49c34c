"""The contract of stores, with real servers where installed (tests/engines/stores.sh).

The checks are functions of a store: stores that are wrong on purpose show that each can fail.
"""

import contextlib
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from faulty_store import FaultyStore, Trouble
from memory_store import MemoryStore
from sources import ROOT
from store_rig import (
    LOOPBACK,
    PAUSE,
    free_port,
    mooncake_master,
    valkey_server,
)

from mamba_cache.stores import (
    MooncakeStore,
    StoreFault,
    ValkeyStore,
    open_store,
)

MISSING = StoreFault.MISSING
SIZES = (1, 13, 4096, 65_537, 2**20 + 13, 4 * 2**20)

REAL = [pytest.param(name, marks=pytest.mark.engine) for name in ("valkey", "mooncake")]


@pytest.fixture(scope="module")
def servers():
    """Starts each server when a test first needs it."""
    running = {}
    makers = {"valkey": valkey_server, "mooncake": mooncake_master}

    def server(kind):
        if kind not in running:
            running[kind] = makers[kind]()
        return running[kind]

    yield server
    for each in running.values():
        each.kill()


@pytest.fixture
def opened(servers):
    """Opens stores of a kind, and closes them."""
    with contextlib.ExitStack() as stack:

        def open_kind(kind, options=""):
            if kind == "memory":
                store = MemoryStore()
            elif kind == "faulty":
                store = FaultyStore(MemoryStore())
            else:
                segment = "segment=256MiB" if kind == "mooncake" else ""
                port = servers(kind).port
                store = open_store(f"{kind}://{LOOPBACK}:{port}?{options or segment}")
            stack.callback(store.close)
            return store

        yield open_kind


@pytest.fixture(params=["memory", "faulty", *REAL])
def store(opened, request):
    return opened(request.param)


@pytest.fixture
def prefix(request):
    """No two tests have a key in common: the servers serve them all."""
    return request.node.name.replace("[", "/").replace("]", "/")


def blobs_of(rng, prefix, sizes=SIZES):
    return {f"{prefix}{i}": rng.integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)}


def views(arrays):
    return [array.data for array in arrays]


def put(store, blobs):
    assert store.put_many(list(blobs), views(blobs.values())) == [None] * len(blobs)


def remove(store, keys):
    """Mooncake keeps entries that were read or looked up until their lease ends."""
    for _ in range(500):
        faults = store.remove(keys)
        if StoreFault.LEASED not in faults:
            break
        PAUSE.wait(0.02)
    assert faults == [None] * len(keys)


def check_roundtrip(store, rng, prefix):
    blobs = blobs_of(rng, prefix)
    keys = list(blobs)
    assert store.exists_many(keys) == [MISSING] * len(keys)
    put(store, blobs)
    assert store.exists_many(keys) == [None] * len(keys)
    into = [np.full(array.size + 100, 7, np.uint8) for array in blobs.values()]
    assert store.get_many_into(keys, views(into)) == [array.size for array in blobs.values()]
    for array, read in zip(blobs.values(), into, strict=True):
        assert np.array_equal(read[: array.size], array)
        assert (read[array.size :] == 7).all()


def check_missing_among_others(store, rng, prefix):
    blobs = blobs_of(rng, prefix, (100, 200))
    put(store, blobs)
    first, last = blobs
    into = [np.zeros(300, np.uint8) for _ in range(3)]
    assert store.get_many_into([first, f"{prefix}none", last], views(into)) == [100, MISSING, 200]
    assert np.array_equal(into[2][:200], blobs[last])
    assert store.exists_many([first, f"{prefix}none", last]) == [None, MISSING, None]


def check_first_bytes_stay(store, rng, prefix):
    first, second = rng.integers(0, 256, (2, 1000), np.uint8)
    put(store, {f"{prefix}k": first})
    put(store, {f"{prefix}k": second[:500].copy()})
    into = np.zeros(1000, np.uint8)
    assert store.get_many_into([f"{prefix}k"], [into.data]) == [1000]
    assert np.array_equal(into, first)


def check_remove(store, rng, prefix):
    blobs = blobs_of(rng, prefix, (10, 20))
    keys = list(blobs)
    put(store, blobs)
    remove(store, [keys[0], f"{prefix}none"])
    assert store.exists_many(keys) == [MISSING, None]
    into = np.zeros(20, np.uint8)
    assert store.get_many_into([keys[0]], [into.data]) == [MISSING]
    put(store, {keys[0]: blobs[keys[1]]})
    assert store.get_many_into([keys[0]], [into.data]) == [20]
    assert np.array_equal(into, blobs[keys[1]])


CHECKS = [check_roundtrip, check_missing_among_others, check_first_bytes_stay, check_remove]


@pytest.mark.parametrize("check", CHECKS)
def test_a_store(store, check, rng, prefix):
    check(store, rng, prefix)


class Overwriting(MemoryStore):
    def put_many(self, keys, buffers):
        self.remove(keys)
        return super().put_many(keys, buffers)


class Inventive(MemoryStore):
    """A store that finds keys it does not have."""

    def _get(self, key, buffer):
        size = super()._get(key, buffer)
        return 1 if size is MISSING else size


def troubled(call, trouble):
    store = FaultyStore(MemoryStore())
    store.inject(call, trouble)
    return store


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (lambda: troubled("put_many", Trouble.DROP), check_roundtrip),
        (lambda: troubled("put_many", Trouble.LOSE), check_roundtrip),
        (lambda: troubled("put_many", Trouble.FAIL), check_roundtrip),
        (lambda: troubled("exists_many", Trouble.FAIL), check_roundtrip),
        (lambda: troubled("get_many_into", Trouble.FAIL), check_roundtrip),
        (lambda: troubled("get_many_into", Trouble.FLIP), check_roundtrip),
        (lambda: troubled("get_many_into", Trouble.TRUNCATE), check_roundtrip),
        (lambda: troubled("get_many_into", Trouble.ZERO), check_roundtrip),
        (lambda: troubled("get_many_into", Trouble.TEAR), check_roundtrip),
        (lambda: troubled("get_many_into", Trouble.SWAP), check_missing_among_others),
        (Inventive, check_missing_among_others),
        (Overwriting, check_first_bytes_stay),
        (lambda: troubled("remove", Trouble.DROP), check_remove),
        (lambda: troubled("remove", Trouble.FAIL), check_remove),
    ],
)
def test_the_checks_find_a_store_that_is_wrong(make, check, rng):
    with pytest.raises(AssertionError):
        check(make(), rng, "k")


@pytest.mark.parametrize("kind", REAL)
def test_exists_detects_a_put_that_is_acknowledged_and_not_stored(kind, opened, rng, prefix):
    store = FaultyStore(opened(kind))
    store.inject("put_many", Trouble.DROP, matches=lambda key: key.endswith("1"))
    blobs = blobs_of(rng, prefix, (100, 100, 100))
    put(store, blobs)
    assert store.exists_many(list(blobs)) == [None, MISSING, None]


def test_short_buffers_are_reported_and_harm_no_other_key(store, rng, prefix):
    blobs = blobs_of(rng, prefix, (100_000, 200_000, 300))
    put(store, blobs)
    into = [np.zeros(size, np.uint8) for size in (100_000, 150_000, 300)]
    answers = store.get_many_into(list(blobs), views(into))
    assert answers == [100_000, StoreFault.SHORT, 300]
    assert np.array_equal(into[0], blobs[f"{prefix}0"])
    assert np.array_equal(into[2], blobs[f"{prefix}2"])


def test_many_keys_and_none(store, rng, prefix):
    blobs = blobs_of(rng, prefix, (50,) * 1000)
    put(store, blobs)
    keys = [*blobs, *(f"{prefix}none{i}" for i in range(1000))]
    assert store.exists_many(keys) == [None] * 1000 + [MISSING] * 1000
    into = np.zeros((1000, 50), np.uint8)
    assert store.get_many_into(list(blobs), views(into)) == [50] * 1000
    assert np.array_equal(into, np.stack(list(blobs.values())))
    assert store.exists_many([]) == store.put_many([], []) == store.get_many_into([], []) == []
    assert store.remove([]) == []


def test_calls_come_from_several_threads(store, prefix):
    def work(number):
        rng = np.random.default_rng(number)
        for turn in range(8):
            check_missing_among_others(store, rng, f"{prefix}{number}/{turn}/")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


def test_health_and_registered_memory(store, rng, prefix):
    assert store.health().fault is None
    memory = rng.integers(0, 256, 2**20, np.uint8)
    assert store.register(memory.data) is None
    put(store, {f"{prefix}k": memory[:1000]})
    assert store.get_many_into([f"{prefix}k"], [memory[5000:6000].data]) == [1000]
    assert np.array_equal(memory[:1000], memory[5000:6000])
    store.unregister(memory.data)
    store.unregister(memory.data)
    assert store.get_many_into([f"{prefix}k"], [memory[7000:8000].data]) == [1000]


def test_a_closed_store_reports_closed(store):
    buffer = np.zeros(10, np.uint8).data
    assert store.exists_many(["k"]) == [MISSING]  # it was open
    store.close()
    store.close()
    assert store.exists_many(["k"]) == [StoreFault.CLOSED]
    assert store.put_many(["k"], [buffer]) == [StoreFault.CLOSED]
    assert store.get_many_into(["k"], [buffer]) == [StoreFault.CLOSED]
    assert store.remove(["k"]) == [StoreFault.CLOSED]
    assert store.health().fault is StoreFault.CLOSED
    store.unregister(buffer)


def test_closing_while_calls_run_ends_them_well(store, prefix):
    """Mooncake ends the process if it is called after its own close."""
    memory = np.zeros((8, 2**20), np.uint8)
    begun = threading.Barrier(5)

    def work(number):
        begun.wait()
        keys = [f"{prefix}{number}/{i}" for i in range(8)]
        answers = []
        while StoreFault.CLOSED not in answers:
            answers = [*store.put_many(keys, views(memory)), *store.exists_many(keys)]
            assert set(answers) <= {None, MISSING, StoreFault.CLOSED, StoreFault.UNREACHABLE}

    with ThreadPoolExecutor(4) as threads:
        working = [threads.submit(work, number) for number in range(4)]
        begun.wait()
        PAUSE.wait(0.02)
        store.close()
    for each in working:
        each.result()


@pytest.mark.parametrize("kind", REAL)
def test_two_processes_worth_of_clients_share(kind, opened, rng, prefix):
    one, other = opened(kind), opened(kind)
    blobs = blobs_of(rng, prefix)
    put(one, blobs)
    into = [np.zeros(array.size, np.uint8) for array in blobs.values()]
    assert other.get_many_into(list(blobs), views(into)) == [a.size for a in blobs.values()]
    for array, read in zip(blobs.values(), into, strict=True):
        assert np.array_equal(read, array)


def call_all(store):
    """The answer of each call for one missing key, and the health."""
    buffer = np.zeros(10, np.uint8).data
    calls = (
        store.exists_many(["gone"]),
        store.put_many(["gone"], [buffer]),
        store.get_many_into(["gone"], [buffer]),
        store.remove(["gone"]),
    )
    return [answer for (answer,) in calls], store.health()


@pytest.mark.engine
def test_a_dead_valkey_is_unreachable_and_comes_back():
    with valkey_server() as server:
        store = ValkeyStore(LOOPBACK, server.port)
        assert store.exists_many(["k"]) == [MISSING]
        server.kill()
        answers, health = call_all(store)
        assert answers == [StoreFault.UNREACHABLE] * 4
        assert health.fault is StoreFault.UNREACHABLE
        assert "refused" in health.detail
        server.start()
        assert call_all(store) == ([MISSING, None, 10, None], store.health())
        assert store.health().fault is None
        store.close()


@pytest.mark.engine
def test_a_valkey_that_stands_still_times_out():
    with valkey_server() as server:
        store = ValkeyStore(LOOPBACK, server.port, timeout_seconds=0.2)
        assert store.exists_many(["k"]) == [MISSING]
        server.pause()
        answers, health = call_all(store)
        server.go_on()
        assert answers == [StoreFault.TIMED_OUT] * 4
        assert health.fault is StoreFault.TIMED_OUT
        assert store.exists_many(["k"]) == [MISSING]
        store.close()


@pytest.mark.engine
def test_a_full_valkey(rng):
    with valkey_server("--maxmemory", "20mb", "--maxmemory-policy", "noeviction") as server:
        store = ValkeyStore(LOOPBACK, server.port)
        blobs = blobs_of(rng, "k", (2**20,) * 40)
        answers = store.put_many(list(blobs), views(blobs.values()))
        assert set(answers) == {None, StoreFault.FULL}
        expected = [None if answer is None else MISSING for answer in answers]
        assert store.exists_many(list(blobs)) == expected
        store.close()


@pytest.mark.engine
def test_what_a_valkey_evicts_is_missing(rng):
    with valkey_server("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru") as server:
        store = ValkeyStore(LOOPBACK, server.port)
        blobs = blobs_of(rng, "k", (2**20,) * 40)
        put(store, blobs)
        found = store.exists_many(list(blobs))
        assert set(found) == {None, MISSING}
        store.close()


@pytest.mark.engine
def test_passwords_of_valkey(monkeypatch):
    monkeypatch.setenv("STORE_PASSWORD", "p@ss:word")
    with valkey_server("--requirepass", "p@ss:word") as server:
        where = f"{LOOPBACK}:{server.port}"
        for url, fault in (
            (f"valkey://{where}", StoreFault.DENIED),
            (f"valkey://:wrong@{where}", StoreFault.DENIED),
            (f"valkey://nobody:p%40ss%3Aword@{where}", StoreFault.DENIED),
            (f"valkey://:p%40ss%3Aword@{where}", None),
            (f"valkey://default:p%40ss%3Aword@{where}", None),
            (f"valkey://{where}/3?password_env=STORE_PASSWORD", None),
        ):
            store = open_store(url)
            health = store.health()
            assert health.fault is fault
            assert "p@ss" not in health.detail
            assert store.exists_many(["k"]) == [fault or MISSING]
            store.close()


@pytest.mark.engine
def test_databases_and_time_to_live():
    with valkey_server() as server:
        url = f"valkey://{LOOPBACK}:{server.port}"
        one, other = open_store(f"{url}/0"), open_store(f"{url}/1?ttl=1")
        buffer = np.ones(10, np.uint8).data
        assert one.put_many(["k"], [buffer]) == [None]
        assert other.exists_many(["k"]) == [MISSING]
        assert other.put_many(["t"], [buffer]) == [None]
        assert other.exists_many(["t"]) == [None]
        for _ in range(500):
            if other.exists_many(["t"]) == [MISSING]:
                break
            PAUSE.wait(0.02)
        assert other.exists_many(["t"]) == [MISSING]
        assert one.exists_many(["k"]) == [None]
        one.close()
        other.close()


class TlsFront:
    """Speaks TLS for a server that does not: one thread for each direction of a connection."""

    def __init__(self, context, port):
        self._context, self._behind = context, port
        self._server = socket.create_server((LOOPBACK, 0))
        self.port = self._server.getsockname()[1]
        self._sockets = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                plain, _ = self._server.accept()
            except OSError:
                return
            with contextlib.suppress(OSError):
                front = self._context.wrap_socket(plain, server_side=True)
                back = socket.create_connection((LOOPBACK, self._behind))
                self._sockets += [front, back]
                lock = threading.Lock()
                for pair in ((front, back), (back, front)):
                    threading.Thread(target=self._pass_on, args=(*pair, lock), daemon=True).start()

    @staticmethod
    def _pass_on(source, target, lock):
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self):
        for each in (*self._sockets, self._server):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.mark.engine
def test_valkey_behind_tls(tmp_path, rng):
    import trustme  # noqa: PLC0415 - tests/engines/stores.sh brings it

    authority, stranger = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(LOOPBACK).configure_cert(context)
    ours, theirs = tmp_path / "ours.pem", tmp_path / "theirs.pem"
    authority.cert_pem.write_to_path(ours)
    stranger.cert_pem.write_to_path(theirs)
    with valkey_server() as server:
        front = TlsFront(context, server.port)
        store = open_store(f"valkeys://{LOOPBACK}:{front.port}?ca={ours}")
        assert store.health().fault is None
        check_roundtrip(store, rng, "k")
        store.close()
        store = open_store(f"rediss://{LOOPBACK}:{front.port}?ca={theirs}")
        health = store.health()
        assert health.fault is StoreFault.DENIED
        assert "certificate" in health.detail
        store.close()
        front.close()


@pytest.mark.engine
def test_a_dead_mooncake_master_is_unreachable_and_comes_back():
    with mooncake_master() as master:
        store = open_store(f"mooncake://{LOOPBACK}:{master.port}?segment=64MiB")
        assert store.exists_many(["k"]) == [MISSING]
        master.kill()
        answers, health = call_all(store)
        assert answers == [StoreFault.UNREACHABLE] * 4
        assert health.fault is StoreFault.UNREACHABLE
        master.start()
        buffer = np.ones(10, np.uint8).data
        for _ in range(3000):  # each second it pings the master and registers its segment
            store.put_many(["k"], [buffer])
            if store.exists_many(["k"]) == [None]:
                break
            PAUSE.wait(0.02)
        assert store.get_many_into(["k"], [buffer]) == [10]
        store.close()


@pytest.mark.engine
def test_a_mooncake_store_whose_master_is_not_there_yet():
    port = free_port()
    store = MooncakeStore(f"{LOOPBACK}:{port}")
    assert store.register(np.zeros(100, np.uint8).data) is None
    answers, health = call_all(store)
    assert answers == [StoreFault.UNREACHABLE] * 4
    assert "refused" in health.detail
    store.close()


@pytest.mark.engine
def test_a_mooncake_master_that_stands_still_does_not_stop_the_process():
    """Mooncake's own connect blocks all threads for as long as the master is stopped."""
    with mooncake_master() as master:
        master.pause()
        store = open_store(f"mooncake://{LOOPBACK}:{master.port}?connect=0.1&segment=16MiB")
        answers, health = call_all(store)
        assert answers == [StoreFault.UNREACHABLE] * 4
        assert "timed out" in health.detail
        master.go_on()
        assert store.health().fault is None
        assert call_all(store)[0] == [MISSING, None, 10, StoreFault.LEASED]
        store.close()


@pytest.mark.engine
def test_a_full_mooncake(rng):
    """Entries just looked up have a lease, so nothing can be evicted for new ones."""
    with mooncake_master("60s") as master:
        store = open_store(f"mooncake://{LOOPBACK}:{master.port}?segment=32MiB")
        blobs = blobs_of(rng, "k", (2**20,) * 24)
        keys = list(blobs)
        put(store, blobs)
        assert store.exists_many(keys) == [None] * 24
        more = blobs_of(rng, "m", (2**20,) * 24)
        answers = store.put_many(list(more), views(more.values()))
        assert set(answers) == {None, StoreFault.FULL}
        found = zip(answers, store.exists_many(list(more)), strict=True)
        # New entries have no lease yet, and the master may evict one for the next.
        assert {there for answer, there in found if answer is not None} == {MISSING}
        assert store.exists_many(keys) == [None] * 24
        assert store.remove(keys[:1]) == [StoreFault.LEASED]
        store.close()


@pytest.mark.engine
def test_what_a_mooncake_holder_had_is_gone_with_it(rng):
    with mooncake_master("2s", "--client_ttl=1") as master:
        where = f"mooncake://{LOOPBACK}:{master.port}"
        holder, reader = open_store(f"{where}?segment=64MiB"), open_store(where)
        blobs = blobs_of(rng, "k", (1000, 2000))
        put(holder, blobs)
        into = [np.zeros(array.size, np.uint8) for array in blobs.values()]
        assert reader.get_many_into(list(blobs), views(into)) == [1000, 2000]
        holder.close()
        answers = reader.get_many_into(list(blobs), views(into))
        assert set(answers) <= {MISSING, StoreFault.TRANSFER_FAILED}
        reader.close()


HOLDER = """
import signal, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
where = f"127.0.0.1:{sys.argv[1]}"
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 2**26, 2**24, "tcp", "", where)
print("ready", flush=True)
signal.pause()
"""


@contextlib.contextmanager
def mooncake_holder(master, log, ports):
    """A process that gives memory, and its port of a few; None if no port is free."""
    own = {"MC_MIN_RPC_PORT": str(ports[0]), "MC_MAX_RPC_PORT": str(ports[-1])}
    with log.open("w") as stderr:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(master.port)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | own | {"GLOG_minloglevel": "0"},
        )
    try:
        port = None
        if holder.stdout.readline():
            [*_, port] = re.findall(r"P2P handshake, listening on \S+:(\d+)", log.read_text())
        yield port
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.engine
def test_a_mooncake_holder_on_the_port_of_a_dead_one_is_written_to(rng, tmp_path):
    """Mooncake caches a port's metadata: of the dead holder, for ever if it is not read anew."""
    first = free_port() % 10_000 + 20_000
    seen, was_seen_before = set(), False
    with mooncake_master("1s", "--client_ttl=1") as master:
        store = open_store(f"mooncake://{LOOPBACK}:{master.port}")
        for number in range(100):  # a port may be free only 60 s after its connections were closed
            with mooncake_holder(master, tmp_path / "log", range(first, first + 8)) as port:
                for attempt in range(150 if port else 0):
                    blobs = blobs_of(rng, f"{number}-{attempt}-", (1000,))
                    if store.put_many(list(blobs), views(blobs.values())) == [None]:
                        break
                    PAUSE.wait(0.1)
                else:
                    assert port is None, f"{port}: {store.health()}"
            was_seen_before = port in seen
            if was_seen_before:
                break
            seen.add(port)
            seen.discard(None)
        assert was_seen_before
        store.close()


@pytest.mark.engine
def test_the_command_that_kills_a_valkey_runs_with_damaged_reads():
    command = [sys.executable, ROOT / "tests" / "store_kills.py", "--count=3", "--flips=0.2"]
    command += ["--only", "valkey", "reader"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
