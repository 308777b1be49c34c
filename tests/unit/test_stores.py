"""Stores without servers: URLs, Valkey's answers, Mooncake's codes, injected faults."""

import gc
import importlib.machinery
import os
import select
import socket
import ssl
import sys
import threading
import types
from functools import partial

import numpy as np
import pytest
from store_rig import LOOPBACK, Speaker, free_port

from mamba_cache.errors import InvalidArgumentError, MissingExtraError
from mamba_cache.stores import (
    MooncakeStore,
    StoreFault,
    StoreHealth,
    ValkeyStore,
    open_store,
    urls,
)

MISSING = StoreFault.MISSING
OK = b"+OK\r\n"
INTERVAL = "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS"


def buffer(size=10, fill=7):
    return np.full(size, fill, np.uint8).data


# URLs


def test_a_url_names_the_server_the_database_and_the_user(monkeypatch):
    made = []
    monkeypatch.setattr(urls, "ValkeyStore", lambda *given, **named: made.append((given, named)))
    open_store("valkey://one")
    open_store("valkey://us%20er@two:7000/3")
    first, second = made
    assert first[0] == ("one", 6379)
    assert (first[1]["db"], first[1]["username"]) == (0, None)
    assert second[0] == ("two", 7000)
    assert (second[1]["db"], second[1]["username"]) == (3, "us er")
    monkeypatch.setenv("STORE_PASSWORD", "of the environment")
    open_store("valkey://me@host?password_env=STORE_PASSWORD")
    assert made[2][1]["password"] == "of the environment"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "must be one of mooncake://"),
        (7, "store must be a str"),
        ("valkey://", "needs a HOST"),
        ("valkey://host:99999", "port"),
        ("valkey://host:0", r"port must be an int in \[1, 65535\]"),
        ("valkey://ho\u2100st", r"must be SCHEME://"),
        ("valkey://host/first", "database, behind the host, must be a number"),
        ("valkey://host?ca=x", "has no other options than password_env"),
        ("valkeys://host?ca=/nowhere.pem", "files for TLS"),
        ("valkeys://host?key=ours.key", "key needs a cert"),
        ("valkey://host?ttl=0", "ttl must be a number above 0"),
        ("valkey://host?ttl=0.5", "ttl_seconds"),
        ("mooncake://host:1?connect=0", "connect must be a number above 0"),
        (f"valkey://host?ttl={'9' * 400}", "ttl must be a number above 0"),
        (f"mooncake://host:1?segment={'9' * 5000}", "must be bytes"),
        ("valkey://host?password_env=NO_SUCH_VARIABLE", "no variable of the name"),
        ("mooncake://host:1?segment=lots", "must be bytes, such as 512MiB"),
        ("mooncake://host", "HOST:PORT"),
        ("mooncake://:50051", "HOST:PORT"),
    ],
)
def test_wrong_urls_are_refused_in_words(url, said):
    with pytest.raises(InvalidArgumentError, match=said):
        open_store(url)


@pytest.mark.parametrize("text", ["4096", "4KiB", "4k", "4 KB"])
def test_sizes(text):
    assert urls._size({"segment": text}, "segment", "0") == 4096


@pytest.mark.parametrize("scheme", ["valkeys", "rediss"])
def test_tls_is_verified(scheme, monkeypatch):
    shown, made = [], []
    monkeypatch.setattr(
        ssl.SSLContext, "load_cert_chain", lambda context, *files: shown.append(files)
    )
    monkeypatch.setattr(urls, "ValkeyStore", lambda *given, tls, **named: made.append(tls))
    open_store(f"{scheme}://[::1]?cert=ours.pem&key=ours.key")
    assert shown == [("ours.pem", "ours.key")]
    open_store(f"{scheme}://host")
    assert all(each.verify_mode is ssl.CERT_REQUIRED and each.check_hostname for each in made)
    open_store("redis://host")
    assert made[2:] == [None]


# Valkey

GREETING = [OK, OK]  # of CLIENT SETINFO


def valkey(speaker, **options):
    return ValkeyStore(LOOPBACK, speaker.port, timeout_seconds=5.0, **options)


def test_without_redis_py_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtraError, match=r"\[valkey\]"):
        open_store("valkey://host")


def test_sent_commands():
    sizes = [b":3\r\n", b":0\r\n"]
    found = [b":1\r\n", b":0\r\n", *sizes, b"$3\r\nabc\r\n", b":1\r\n"]
    with Speaker([OK, *GREETING, OK, OK, b"$-1\r\n", *found]) as server:
        store = valkey(server, db=3, username="me", password="pass word", ttl_seconds=60)
        assert store.put_many(["a", "b"], [buffer(2, 65), buffer(1, 66)]) == [None, None]
        assert store.exists_many(["a", "b"]) == [None, MISSING]
        into = buffer(5)
        assert store.get_many_into(["a", "b"], [into, buffer()]) == [3, MISSING]
        assert bytes(into) == b"abc\7\7"
        assert store.remove(["a"]) == [None]
        store.close()
    heard = b"".join(server.heard)
    assert heard.startswith(b"*3\r\n$4\r\nAUTH\r\n$2\r\nme\r\n$9\r\npass word\r\n")
    assert b"*2\r\n$6\r\nSELECT\r\n$1\r\n3\r\n" in heard
    put = b"*6\r\n$3\r\nSET\r\n$1\r\na\r\n$2\r\nAA\r\n$2\r\nNX\r\n$2\r\nEX\r\n$2\r\n60\r\n"
    assert put in heard
    assert heard.endswith(b"*2\r\n$6\r\nUNLINK\r\n$1\r\na\r\n")


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"-OOM command not allowed\r\n", StoreFault.FULL),
        (b"-NOPERM no\r\n", StoreFault.DENIED),
        (b"-MASTERDOWN no\r\n", StoreFault.UNREACHABLE),
        (b"-MOVED 1 elsewhere:1\r\n", StoreFault.REJECTED),
        (b"-ERR \xff\r\n", StoreFault.REJECTED),
    ],
)
def test_errors_of_valkey(answer, fault):
    """Each error answers one key; the connection stays open."""
    with Speaker([*GREETING, answer, answer, answer, answer, OK]) as server:
        store = valkey(server)
        assert store.exists_many(["k"]) == [fault]
        assert store.put_many(["k"], [buffer()]) == [fault]
        assert store.get_many_into(["k"], [buffer()]) == [fault]
        assert store.remove(["k"]) == [fault]
        assert store.health() == StoreHealth(None, f"valkey at {LOOPBACK}:{server.port}, db 0")
        store.close()


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        ([*GREETING, b"", b""], StoreFault.UNREACHABLE),  # connection closed
        ([*GREETING, b"$5\r\nab", b""], StoreFault.UNREACHABLE),  # closed within an answer
        ([*GREETING, b"-LOADING it reads its file\r\n", b""], StoreFault.UNREACHABLE),
        ([*GREETING, b"$x\r\n", b""], StoreFault.REJECTED),
        ([*GREETING, b"a" * 100_000, b""], StoreFault.REJECTED),
        ([b"-NOAUTH Authentication required.\r\n"], StoreFault.DENIED),
        ([b"-WRONGPASS no\r\n"], StoreFault.DENIED),
        ([b"HTTP/1.1 400 Bad Request\r\n"], StoreFault.REJECTED),
    ],
)
def test_a_malformed_answer_ends_the_connection_and_not_the_store(answers, fault):
    with Speaker(answers, [*GREETING, b":2\r\n", b"$2\r\nab\r\n"]) as server:
        store = valkey(server)
        assert store.get_many_into(["k", "l"], [buffer(), buffer()]) == [fault, fault]
        assert store.get_many_into(["k"], [buffer()]) == [2]
        store.close()


def test_answers_before_the_end_of_a_connection_count():
    with Speaker([*GREETING, b":1\r\n", b":0\r\n", b""]) as server:
        store = valkey(server)
        assert store.exists_many(["a", "b", "c"]) == [None, MISSING, StoreFault.UNREACHABLE]
        store.close()


def test_an_answer_of_another_kind_is_ignored():
    lengths = [b":2\r\n", b":2\r\n", b":2\r\n"]
    with Speaker([*GREETING, OK, OK, *lengths, b":2\r\n", b"$3\r\nabc\r\n", b"$-1\r\n"]) as server:
        store = valkey(server)
        assert store.exists_many(["a"]) == [StoreFault.REJECTED]
        assert store.get_many_into(["a"], [buffer(2)]) == [StoreFault.REJECTED]
        into = [buffer(2), buffer(2), buffer(2)]
        answers = [StoreFault.REJECTED, StoreFault.REJECTED, MISSING]
        assert store.get_many_into(["a", "b", "c"], into) == answers
        assert all(bytes(each) == b"\7\7" for each in into)
        store.close()


def test_a_blob_longer_than_its_buffer_is_not_requested():
    with Speaker([*GREETING, b":11\r\n", b":2\r\n", b"$2\r\nab\r\n"]) as server:
        store = valkey(server)
        into = [buffer(), buffer()]
        assert store.get_many_into(["a", "b"], into) == [StoreFault.SHORT, 2]
        assert [bytes(each[:3]) for each in into] == [b"\7\7\7", b"ab\7"]
        store.close()


def test_a_connection_that_ended_while_unused_costs_no_call():
    with Speaker([*GREETING, b":1\r\n"], [*GREETING, b":0\r\n"]) as server:
        store = valkey(server)
        assert store.exists_many(["k"]) == [None]
        [connection] = store._pool._available_connections
        assert select.select([connection._sock], [], [], 60)[0]  # the server has closed it
        assert store.exists_many(["k"]) == [MISSING]
        store.close()


def test_a_store_closed_while_a_call_runs_keeps_no_connection(monkeypatch):
    with Speaker([*GREETING, b":1\r\n"]) as server:
        store = valkey(server)
        monkeypatch.setattr(store, "_fault_of", None)  # the call ends well
        connection = store._pool.get_connection()
        send = connection.send_packed_command
        connection.send_packed_command = lambda command: (store.close(), send(command))
        store._pool.release(connection)
        assert store.exists_many(["k"]) == [None]
        assert not connection.is_connected
        assert store.exists_many(["k"]) == [StoreFault.CLOSED]


def test_a_buffer_of_other_items_than_bytes_is_sent_and_filled_whole():
    numbers = np.arange(4, dtype=np.float32).reshape(2, 2)
    blob = b"$16\r\n" + numbers.tobytes() + b"\r\n"
    with Speaker([*GREETING, OK, b":16\r\n", blob]) as server:
        store = valkey(server)
        assert store.put_many(["k"], [numbers.data]) == [None]
        assert blob in server.heard[2]
        read = np.zeros_like(numbers)
        assert store.get_many_into(["k"], [read.data]) == [16]
        assert np.array_equal(read, numbers)
        store.close()


def test_no_listener_or_no_answer():
    store = ValkeyStore(LOOPBACK, free_port())
    assert store.exists_many(["k"]) == [StoreFault.UNREACHABLE]
    assert "refused" in store.health().detail
    with socket.create_server((LOOPBACK, 0)) as silent:
        store = ValkeyStore(LOOPBACK, silent.getsockname()[1], timeout_seconds=0.05)
        assert store.exists_many(["k"]) == [StoreFault.TIMED_OUT]


def test_a_server_that_speaks_no_tls():
    with Speaker([b"-ERR what?\r\n"]) as server:
        store = valkey(server, tls=ssl.create_default_context())
        assert store.exists_many(["k"]) == [StoreFault.DENIED]


# Mooncake


class Client:
    """A fake Mooncake client that returns codes, and refuses calls after its close."""

    codes = 0
    setup_code = 0
    register_code = 0

    def __init__(self):
        self.calls, self.is_closed = [], False
        Client.made.append(self)

    def _answer(self, name, keys, *rest):
        assert not self.is_closed, "this ends the process"
        self.calls.append((name, keys, *rest))
        return list(self.codes) if isinstance(self.codes, list) else [self.codes] * len(keys)

    def setup(self, *arguments):
        self.setup_arguments = arguments
        return self.setup_code

    def batch_is_exist(self, keys):
        return self._answer("exist", keys)

    def batch_put_from(self, keys, addresses, sizes, replicas):
        return self._answer("put", keys, addresses, sizes, replicas.replica_num)

    def batch_get_into(self, keys, addresses, sizes):
        return self._answer("get", keys, addresses, sizes)

    def batch_remove(self, keys):
        return self._answer("remove", keys)

    def register_buffer(self, address, size):
        self.calls.append(("register", address, size))
        return self.register_code

    def unregister_buffer(self, address):
        self.calls.append(("unregister", address))
        return 0

    def close(self):
        assert not self.is_closed
        self.is_closed = True


@pytest.fixture
def master(monkeypatch):
    """Install a fake Mooncake module and a master that closes connections; return its port."""
    module = types.ModuleType("mooncake.store")
    module.MooncakeDistributedStore = type("MadeClient", (Client,), {})
    module.ReplicateConfig = types.SimpleNamespace
    package = types.ModuleType("mooncake")
    package.store = module
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(Client, "made", [], raising=False)
    with Speaker(*[[b""]] * 20) as server:
        yield server.port


def mooncake(port, **options):
    return MooncakeStore(f"{LOOPBACK}:{port}", **options)


def test_how_mooncake_is_set_up(master):
    url = f"mooncake://{LOOPBACK}:{master}?segment=4MiB&protocol=rdma&device=mlx5_0&replicas=2"
    store = open_store(url)
    [client] = Client.made
    sizes = (4 * 2**20, 16 * 2**20)
    where = f"{LOOPBACK}:{master}"
    assert client.setup_arguments == (LOOPBACK, "P2PHANDSHAKE", *sizes, "rdma", "mlx5_0", where)
    store.put_many(["k"], [buffer()])
    assert client.calls[-1][-1] == 2
    store.close()
    store.close()
    assert client.is_closed
    mooncake(master, host="node7").close()
    assert Client.made[1].setup_arguments[0] == "node7"
    assert open_store("mooncake://[::1]:1")._address == ("::1", 1)


@pytest.mark.parametrize("own", [None, "30"])
def test_mooncake_gets_its_interval_for_peer_updates_before_it_is_loaded(monkeypatch, master, own):
    """A new holder may get a dead holder's port; an interval set by the user is kept."""
    monkeypatch.delitem(os.environ, INTERVAL, raising=False)
    if own is not None:
        monkeypatch.setenv(INTERVAL, own)
    found = []
    monkeypatch.delitem(sys.modules, "mooncake.store")
    package = sys.modules["mooncake"]
    module = package.store
    del package.store
    package.__path__ = []
    loader = types.SimpleNamespace(
        create_module=lambda spec: found.append(os.environ.get(INTERVAL)) or module,
        exec_module=lambda module: None,
    )
    finder = types.SimpleNamespace(
        find_spec=lambda name, path, target=None: (
            importlib.machinery.ModuleSpec(name, loader) if name == "mooncake.store" else None
        )
    )
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    mooncake(master).close()
    assert found == [own or "5"]


CODES = {
    -1: StoreFault.REJECTED,
    -200: StoreFault.FULL,
    -601: StoreFault.UNREACHABLE,
    -703: MISSING,
    -704: MISSING,
    -706: StoreFault.LEASED,
    -707: StoreFault.TRANSFER_FAILED,
    -800: StoreFault.TRANSFER_FAILED,
    -900: StoreFault.UNREACHABLE,
    -901: StoreFault.TIMED_OUT,
    -9999: StoreFault.REJECTED,
}


@pytest.mark.parametrize(("code", "fault"), CODES.items())
def test_codes_of_mooncake(master, monkeypatch, code, fault):
    store = mooncake(master)
    monkeypatch.setattr(Client, "codes", code)
    monkeypatch.setattr(Client, "register_code", code)
    assert store.register(memoryview(buffer())) is fault
    assert store.exists_many(["a", "b"]) == [fault, fault]
    assert store.put_many(["a"], [buffer()]) == [fault]
    assert store.get_many_into(["a"], [buffer()]) == [fault]
    assert store.remove(["a"]) == [None if fault is MISSING else fault]
    health = store.health()
    assert health.fault is (None if fault is MISSING else fault)
    if fault.is_of_the_store:
        assert f"Mooncake answers {code}" in health.detail


def test_results_that_are_no_fault_of_mooncake(master, monkeypatch):
    store = mooncake(master)
    monkeypatch.setattr(Client, "codes", [1, 0])
    assert store.exists_many(["a", "b"]) == [None, MISSING]
    monkeypatch.setattr(Client, "codes", [10, -600])
    assert store.get_many_into(["a", "b"], [buffer(), buffer()]) == [10, StoreFault.SHORT]
    monkeypatch.setattr(Client, "codes", 0)
    assert store.get_many_into(["a"], [buffer()]) == [0]  # no bytes: verification refuses them


def test_answers_for_other_keys_than_requested_are_rejected(master, monkeypatch):
    store = mooncake(master)
    monkeypatch.setattr(Client, "codes", [1])
    assert store.exists_many(["a", "b"]) == [StoreFault.REJECTED] * 2
    monkeypatch.setattr(Client, "codes", [])
    assert "0 answers came for 1 keys" in store.health().detail


def test_addresses_and_registered_memory(master, monkeypatch):
    store = mooncake(master)
    [client] = Client.made
    memory = np.zeros(100, np.uint8)
    address = memory.ctypes.data
    assert store.register(memory.data) is None
    monkeypatch.setattr(Client, "codes", 10)
    store.get_many_into(["k"], [memory[10:20].data])
    assert client.calls == [("register", address, 100), ("get", ["k"], [address + 10], [10])]
    store.unregister(memory.data)
    store.unregister(memory.data)
    assert client.calls[2:] == [("unregister", address)]
    monkeypatch.setattr(Client, "register_code", -1)
    assert store.register(memory.data) is StoreFault.REJECTED
    store.unregister(memory.data)
    assert client.calls[3:] == [("register", address, 100)]
    store.close()
    assert store.register(memory.data) is StoreFault.CLOSED


def test_memory_registered_before_the_master_is_there(master, monkeypatch):
    store = mooncake(free_port())
    memory = np.zeros(100, np.uint8)
    gone = np.zeros(100, np.uint8)
    assert store.register(memory.data) is store.register(gone.data) is None
    store.unregister(gone.data)
    assert store.exists_many(["k"]) == [StoreFault.UNREACHABLE]
    assert Client.made == []
    store._address = (LOOPBACK, master)
    assert store.exists_many(["k"]) == [MISSING]
    [client] = Client.made
    assert client.calls[0] == ("register", memory.ctypes.data, 100)
    assert len(client.calls) == 2


def test_a_setup_that_fails_is_tried_again(master, monkeypatch):
    monkeypatch.setattr(Client, "setup_code", -1)
    store = mooncake(master)
    assert store.exists_many(["k"]) == [StoreFault.UNREACHABLE]
    assert "setup answers -1" in store.health().detail
    monkeypatch.setattr(Client, "setup_code", 0)
    assert store.exists_many(["k"]) == [MISSING]
    store.close()
    assert [each.is_closed for each in Client.made] == [False, False, False, True]


def test_mooncake_is_closed_by_the_last_call_that_runs(master, monkeypatch):
    store = mooncake(master)
    [client] = Client.made
    entered, leave, answers = threading.Event(), threading.Event(), []

    def waits(keys):
        entered.set()
        leave.wait()
        assert not client.is_closed
        return [1]

    monkeypatch.setattr(client, "batch_is_exist", waits, raising=False)
    thread = threading.Thread(target=lambda: answers.extend(store.exists_many(["k"])))
    thread.start()
    entered.wait()
    store.close()
    assert not client.is_closed
    assert store.exists_many(["k"]) == [StoreFault.CLOSED]
    leave.set()
    thread.join()
    assert client.is_closed
    assert answers == [None]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *[(partial(MooncakeStore, name), "'host:port'") for name in ("host", ":1", "host:", "h:x")],
        *[(partial(ValkeyStore, "host", n), r"int in \[1, 65535\]") for n in (0, 65536)],
    ],
)
def test_addresses_that_are_none(master, make, said):
    with pytest.raises(InvalidArgumentError, match=said):
        make()


def test_without_mooncake_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(MissingExtraError, match=r"\.\[mooncake\]"):
        open_store("mooncake://host:1")

    class Broken(types.ModuleType):
        __path__ = ()

    class Finder:
        @staticmethod
        def find_spec(name, *rest):
            if name == "mooncake.store":
                raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "mooncake", Broken("mooncake"))
    monkeypatch.delitem(sys.modules, "mooncake.store", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder])
    with pytest.raises(MissingExtraError, match="libibverbs1"):
        open_store("mooncake://host:1")


def test_a_forked_process_has_connections_of_its_own(monkeypatch):
    """On a shared connection, parent and child would read each other's answers."""
    conversation = [*GREETING, b"+PONG\r\n", b"+PONG\r\n"]
    with Speaker(conversation, conversation) as server:
        store = valkey(server)
        assert store.health().fault is None
        store._pool._lock.acquire()  # another thread held the lock at the fork
        monkeypatch.setattr(os, "getpid", lambda: -1)
        store._pool._checkpid()
        gc.collect()  # closes the parent's connection, as the server awaits
        assert store.health().fault is None
        assert store.health().fault is None  # over the same connection
        assert sum(b"LIB-NAME" in each for each in server.heard) == 2
        store.close()
