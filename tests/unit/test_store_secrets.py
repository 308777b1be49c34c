"""Passwords of stores: no message contains one, for every answer of a server and every wrong
setting."""

import re
import socketserver
import threading
import traceback

import pytest

from mamba_cache import CacheConfig, InvalidArgumentError
from mamba_cache.stores import StoreFault, ValkeyStore, open_store

PASSWORD = "hunter2"
ECHOES = {
    "old server": b"-ERR unknown command `AUTH`, with args beginning with: `%s`, \r\n",
    "first word": b"-%s is no command\r\n",
    "known word": b"-WRONGPASS for %s\r\n",
    "other kind of word": b"-LOADING %s\r\n",
    "status": b"+%s\r\n",
    "number": b":%s\r\n",
    "blob": b"$%s\r\n",
    "no protocol": b"%s\r\n",
    "no end": b"%s" * 20_000,
}


class Echo(socketserver.StreamRequestHandler):
    """A server that echoes each command; the first ones may get normal answers."""

    def handle(self):
        for number, arguments in enumerate(iter(self.command, None)):
            if arguments[0] == b"AUTH":
                self.server.passwords.append(arguments[-1])
            if number < self.server.num_ok:
                self.wfile.write(b"+OK\r\n")
            else:
                self.wfile.write(self.server.echo.replace(b"%s", PASSWORD.encode()))

    def command(self):
        line = self.rfile.readline()
        if not line.startswith(b"*"):
            return None
        arguments = []
        for _ in range(int(line[1:])):
            size = int(self.rfile.readline()[1:])
            arguments.append(self.rfile.read(size))
            self.rfile.read(2)
        return arguments


@pytest.fixture
def echo(request):
    """Return a server without AUTH that echoes its input."""
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo)
    server.daemon_threads = True
    server.echo, server.num_ok, server.passwords = ECHOES["old server"], 0, []
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def store_at(server):
    return ValkeyStore("127.0.0.1", server.server_address[1], password=PASSWORD, timeout_seconds=5)


@pytest.mark.parametrize("num_ok", [0, 1, 3])
@pytest.mark.parametrize("echo_of", ECHOES)
def test_answers_of_a_server_after_the_password_are_not_repeated(echo, echo_of, num_ok) -> None:
    """The server echoes at AUTH, right after it, and at all later commands."""
    echo.echo, echo.num_ok = ECHOES[echo_of], num_ok
    store = store_at(echo)
    buffer = memoryview(bytearray(8))
    answers = [
        *store.exists_many(["key"]),
        *store.put_many(["key"], [buffer]),
        *store.get_many_into(["key"], [buffer]),
        *store.remove(["key"]),
    ]
    health = store.health()
    assert echo.passwords[0] == PASSWORD.encode()
    told = f"{health!r} {health.detail} {store!r} {answers!r}"
    assert PASSWORD not in told
    if echo_of == "old server":
        assert health.fault is StoreFault.REJECTED
        assert "ResponseError" in health.detail
    if echo_of == "known word":
        assert health.fault is StoreFault.DENIED
        assert "AuthenticationError" in health.detail
    store.close()


def test_without_a_password_a_servers_message_is_repeated(echo) -> None:
    """The server's message explains the error, and no secret was sent."""
    echo.echo = b"-ERR DB index is out of range\r\n"
    store = ValkeyStore("127.0.0.1", echo.server_address[1], db=99)
    assert "DB index is out of range" in store.health().detail
    store.close()


def whole_text_of(call):
    """Return an error's whole text: its message, its causes' messages, and its traceback."""
    with pytest.raises(InvalidArgumentError) as caught:
        call()
    frames = "".join(traceback.format_exception(caught.value))
    shown = re.sub(r"^  File .*\n(    .*\n)*", "", frames, flags=re.MULTILINE)  # source lines
    return f"{caught.value!r} {caught.value} {shown}"


@pytest.mark.parametrize(
    "store",
    [
        f"valkey://:{PASSWORD}@host".encode(),
        bytearray(f"valkey://:{PASSWORD}@host".encode()),
        [f"valkey://:{PASSWORD}@host"],
        {"password": PASSWORD},
    ],
    ids=["bytes", "bytearray", "list", "dict"],
)
@pytest.mark.parametrize("use", ["config", "open_store"])
def test_a_store_of_another_kind_is_not_repeated(store, use) -> None:
    settings = {"num_kv_blocks": 4, "max_slots": 2, "host_cache_gb": 1, "hash_secret": b"s"}
    if use == "config":
        told = whole_text_of(lambda: CacheConfig(**settings, store=store))
    else:
        told = whole_text_of(lambda: open_store(store))
    assert PASSWORD not in told
    assert type(store).__name__ in told


@pytest.mark.parametrize(
    "url",
    [
        f"valkey://host?{PASSWORD}",
        f"valkey://host?{PASSWORD}=1",
        f"valkey://host?timeout=1&{PASSWORD}",
        f"valkey://host?timeout={PASSWORD}",
        f"valkey://u:1?ttl={PASSWORD}@host",
        f"valkey://host?password_env={PASSWORD}",
        f"valkey://host/{PASSWORD}",
        f"valkey://host:{PASSWORD}",
        f"mooncake://host:1?segment={PASSWORD}",
        f"valkey://u:pass/{PASSWORD}@host",
        f"{PASSWORD}://host",
        f"valkeys://host?ca={PASSWORD}",
        f"valkeys://host?cert={PASSWORD}",
        f"valkey://:{PASSWORD}@host?x=1",
        f"valkey://:{PASSWORD}@host:99999",
        f"valkey://u:{PASSWORD}@/0",
        f"valkey://u:{PASSWORD}@ho\u2100st",
        # Passwords with characters that divide URLs.
        f"valkey://u:{PASSWORD}/1@host",
        f"valkey://u:1@2/{PASSWORD}@host",
        f"valkey://u:1?{PASSWORD}@host",
        f"valkey://u:{PASSWORD}?1@host",
        f"valkey://u:1#{PASSWORD}@host",
        f"valkey://u:{PASSWORD}#1@host",
        f"valkey://u:[{PASSWORD}@host",
        f"valkey://u:1@2?{PASSWORD}/",
        f"valkey://u:1@2/{PASSWORD}",
    ],
)
def test_no_part_of_a_url_that_may_be_a_password_is_repeated(url) -> None:
    assert PASSWORD not in whole_text_of(lambda: open_store(url))
    config = {"num_kv_blocks": 4, "max_slots": 2, "host_cache_gb": 1, "hash_secret": b"s"}
    assert PASSWORD not in repr(CacheConfig(**config, store=url))
