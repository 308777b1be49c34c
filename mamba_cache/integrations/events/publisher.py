"""The publisher: what a cache holds, told to routers by a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mamba_cache._checks import INT32_MAX, check_choice, check_int, check_kind, check_number
from mamba_cache._extras import install_hint
from mamba_cache.errors import InvalidArgumentError, MissingExtraError, StepOrderError
from mamba_cache.events import Removed, Stored
from mamba_cache.integrations.events.view import CLEARED, EventMode, EventView, KVEvent

try:
    import msgspec
    import zmq
except ImportError as error:
    raise MissingExtraError(f"KV events need {error.name}: {install_hint('events')}") from error

__all__ = ["EventPublisher", "PublisherStats", "encode_batch"]

_log = logging.getLogger(__name__)

# Shared by all threads: it keeps nothing between two calls.
_encode = msgspec.msgpack.Encoder().encode

_POLL_SECONDS = 0.02
_LINGER_MS = 500
_JOIN_SECONDS = 5.0
_MAX_PORT = 65_535
_BIND_TRIES = 100

_LOG_BATCHES = 256
"""Batches that a replay sends one by one; who lacks more gets all that is held, in one batch."""

_SNAPSHOT_SECONDS = 1.0
"""So long at least lies between two batches with all that is held, however many ask for one."""

_MAX_FRAME_BYTES = 1024
"""A longer frame ends its peer's connection: requests and subscriptions are short."""

_REQUEST_FRAMES = 3  # who asks, an empty one, and the number of the first batch that is wanted
_END_SEQ = (-1).to_bytes(8, "big", signed=True)
_LOOPBACK = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:")
_LOCAL = ("ipc://", "inproc://")


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """What a publisher did, and what it tells of now.

    Attributes:
        batches: Batches sent, the empty ones included.
        events: Events in them.
        replays: Requests for a replay that were answered.
        snapshots: Batches with all that is held, for subscribers who lacked more than the log has.
        told_blocks: KV blocks that subscribers know of now.
        told_states: States that they know of.
        untold_blocks: Registered blocks of which nobody is told because their tokens are not known:
            those of requests with ``tells_tokens=False``, or under other settings of a model.
        waiting_events: Events of the cache that were not looked at yet.
    """

    batches: int = 0
    events: int = 0
    replays: int = 0
    snapshots: int = 0
    told_blocks: int = 0
    told_states: int = 0
    untold_blocks: int = 0
    waiting_events: int = 0


class EventPublisher:
    """Tells routers what a cache holds, in the format of vLLM's KV events.

    One publisher stands for one cache: one worker, or one rank of a data-parallel group. The cache
    does nothing for it but append each event to a queue; a thread sends them. When that fails, the
    cache is not touched: the log says so, and routers learn nothing more.

    Prompts can be read from these messages. Everything listens on this machine alone unless an
    endpoint names another address.

    Args:
        endpoint: Where batches are published. As with vLLM, an endpoint with ``*`` or ``::``, and
            those of ipc and inproc, are bound, and others connected; one on loopback is bound too.
            A port ``*`` is any free one.
        replay_endpoint: Where subscribers ask for what they missed; it is always bound. None:
            nowhere, and who missed something knows less than there is.
        mode: "reachable" tells of KV blocks before a state that is held, which is what a prompt can
            use; "resident" of all.
        topic: The first frame of each message.
        data_parallel_rank: The rank that is named in each batch.
        heartbeat_seconds: An empty batch goes out after so long without one, so that a subscriber
            sees that it missed something.

    Attributes:
        endpoint: Where batches are published, with the port.
        replay_endpoint: Where replays are asked for, with the port; None if nowhere.
        mode: As given.

    Raises:
        InvalidArgumentError: A setting is out of range, or an endpoint cannot be used.
        MissingExtraError: On import, if pyzmq or msgspec is not installed.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        replay_endpoint: str | None = None,
        mode: EventMode = "reachable",
        topic: str = "",
        data_parallel_rank: int = 0,
        heartbeat_seconds: float = 1.0,
    ) -> None:
        check_choice("mode", mode, ("reachable", "resident"))
        check_kind("topic", topic, str)
        for name, given in (("endpoint", endpoint), ("replay_endpoint", replay_endpoint)):
            if given is not None or name == "endpoint":
                check_kind(name, given, str)
                scheme, _, address = str(given).partition("://")
                port = address.rpartition(":")[2]
                is_beyond = scheme == "tcp" and port.isdecimal() and int(port) > _MAX_PORT
                if not address or is_beyond:
                    raise InvalidArgumentError(
                        f"{name} must be an address such as 'tcp://127.0.0.1:5557', with a port of "
                        f"at most {_MAX_PORT}, got {given!r}"
                    )
        check_int("data_parallel_rank", data_parallel_rank, minimum=0, maximum=INT32_MAX)
        check_number("heartbeat_seconds", heartbeat_seconds, maximum=3600.0)
        self.mode: EventMode = mode
        # The cache's thread appends to it, the publisher's takes from it; neither waits.
        self._waiting: deque[Stored | Removed] = deque()
        self._is_listening = True
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._heartbeat = heartbeat_seconds
        self._view = EventView(1, "resident")  # of nothing, until ``watch``
        self._log: deque[tuple[bytes, bytes]] = deque(maxlen=_LOG_BATCHES)
        self._snapshot_seq = b""
        self._snapshot_at = -_SNAPSHOT_SECONDS
        self._owes_snapshot = False
        # Not 0: routers that knew an earlier process at this address would take for old whatever
        # comes before the number where that one stood. Like this they see a gap, and ask.
        self._next_seq = int(time.time() * 1e6)
        self._sent_at = 0.0
        self._counts = Counter(batches=0, events=0, replays=0, snapshots=0)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._sockets: list[Any] = []
        try:
            self._pub, self.endpoint = self._open(zmq.PUB, endpoint, _is_bound(endpoint))
            self._replay: Any = None
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                self._replay, self.replay_endpoint = self._open(zmq.ROUTER, replay_endpoint, True)
        except BaseException:
            self._close_sockets()
            raise

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def watch(self, cache: Any) -> None:
        """Tell of a cache from now on; it holds nothing yet.

        Args:
            cache: A ``DynamicInferenceContext``, such as ``Engine.context``, or a ``PrefixCache``.
                The publisher becomes one of its listeners; after ``close`` it ignores events.

        Raises:
            InvalidArgumentError: It is no cache, or holds something already.
            StepOrderError: The publisher tells of another one, or is closed.
        """
        for name in ("kv_block_allocator", "listeners", "block_size_tokens"):
            if not hasattr(cache, name):
                raise InvalidArgumentError(
                    f"cache must have a {name}, but {type(cache).__name__} has none: give a "
                    "DynamicInferenceContext, an engine's context or a PrefixCache"
                )
        if self._thread is not None or self._stopping.is_set():
            state = "closed" if self._stopping.is_set() else "telling of a cache already"
            raise StepOrderError(f"the publisher is {state}: make one for each cache")
        block_hashes = cache.kv_block_allocator.block_hashes
        num_registered = sum(hash_id >= 0 for hash_id in block_hashes.tolist())
        if num_registered:
            raise InvalidArgumentError(
                f"the cache holds {num_registered} blocks, whose tokens nobody told: watch it "
                "before its first request, or reset it"
            )
        self._thread = threading.Thread(
            target=self._run,
            args=(EventView(cache.block_size_tokens, self.mode),),
            name="mamba-cache-events",
            daemon=True,
        )
        self._thread.start()
        cache.listeners.add(self._take, Stored, Removed)

    def close(self) -> None:
        """Tell subscribers that nothing is held, and stop; the cache goes on without it."""
        self._stopping.set()
        if self._thread is None:
            self._close_sockets()
        else:
            self._thread.join(_JOIN_SECONDS)

    def stats(self) -> PublisherStats:
        """Return what it did so far, to any thread."""
        view = self._view
        return PublisherStats(
            **self._counts,
            told_blocks=view.num_told_blocks,
            told_states=view.num_told_states,
            untold_blocks=view.num_untold,
            waiting_events=len(self._waiting),
        )

    def _take(self, event: Stored | Removed) -> None:
        """Called by the cache with all that happens."""
        if self._is_listening:
            self._waiting.append(event)

    def _open(self, kind: int, endpoint: str, binds: bool) -> tuple[Any, str]:
        socket = zmq.Context.instance().socket(kind)
        self._sockets.append(socket)
        socket.linger = _LINGER_MS
        socket.maxmsgsize = _MAX_FRAME_BYTES + len(self._topic)
        for tries_left in reversed(range(_BIND_TRIES if binds else 1)):
            try:
                (socket.bind if binds else socket.connect)(endpoint)
                break
            except zmq.ZMQError as error:
                # The address of a publisher that was just closed is free a moment later.
                if error.errno != zmq.EADDRINUSE or not tries_left:
                    way = "bound" if binds else "connected"
                    raise InvalidArgumentError(
                        f"the endpoint {endpoint!r} cannot be {way}: {error}"
                    ) from error
                self._stopping.wait(_POLL_SECONDS)
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _close_sockets(self) -> None:
        """Close the sockets; what was sent is delivered within half a second, or not at all."""
        for socket in self._sockets:
            socket.close()

    # From here on all is done by the thread.

    def _run(self, view: EventView) -> None:
        """Send what happens until ``close``; whatever fails here ends it, and nothing else."""
        try:
            self._begin(view)
            while not self._stopping.is_set():
                self._step()
            self._drain()
            self._send([CLEARED])
        except Exception:
            _log.exception("KV events are not published any more; the cache goes on")
        finally:
            self._is_listening = False
            self._waiting.clear()
            self._close_sockets()

    def _begin(self, view: EventView) -> None:
        """Tell subscribers to forget what another process may have told them at this address."""
        self._view = view
        self._send([CLEARED])
        self._snapshot_seq = self._log[0][0]

    def _step(self) -> None:
        """Send what has happened, after some time, in which replays are answered."""
        # Asked at times and not woken: waking a thread would cost the cache more than an append.
        if self._replay is None:
            self._stopping.wait(_POLL_SECONDS)
        elif self._replay.poll(int(_POLL_SECONDS * 1000)):
            self._answer(*self._receive())
        self._drain()
        if self._owes_snapshot and time.monotonic() - self._snapshot_at >= _SNAPSHOT_SECONDS:
            self._send_snapshot()
        if time.monotonic() - self._sent_at >= self._heartbeat:
            self._send([])

    def _drain(self) -> None:
        while self._waiting:
            self._view.apply(self._waiting.popleft())
        events = self._view.take_events()
        if events:
            self._send(events)

    def _send(self, events: Sequence[KVEvent]) -> None:
        payload = encode_batch(time.time(), events, self._rank)
        seq = self._next_seq.to_bytes(8, "big")
        self._next_seq += 1
        self._log.append((seq, payload))
        self._pub.send_multipart((self._topic, seq, payload))
        self._sent_at = time.monotonic()
        self._counts["batches"] += 1
        self._counts["events"] += len(events)

    def _send_snapshot(self) -> None:
        """Send all that is held to everybody; the log begins with it."""
        self._log.clear()
        self._send([CLEARED, *self._view.snapshot()])
        self._snapshot_seq = self._log[0][0]
        self._snapshot_at = self._sent_at
        self._owes_snapshot = False
        self._counts["snapshots"] += 1

    def _receive(self) -> tuple[list[bytes], int]:
        """Receive a request: its first frames, and how many it has."""
        frames, count = [self._replay.recv()], 1
        while self._replay.rcvmore:
            frame, count = self._replay.recv(), count + 1
            if count <= _REQUEST_FRAMES:
                frames.append(frame)
        return frames, count

    def _answer(self, request: Sequence[bytes], num_frames: int) -> None:
        """Send a subscriber the batches that it lacks, or one with all that is held."""
        if num_frames != _REQUEST_FRAMES or len(request[2]) != 8:
            sizes = [len(frame) for frame in request]
            text = "a replay is asked for with 8 bytes, got %s frames, the first ones of %s"
            _log.warning(text, f"{num_frames:,}", sizes)
            return
        client, _, start = request
        if start < self._log[0][0]:
            # To everybody: routers refuse a replay that does not begin where they asked, but take
            # what is published. Not at once for each who asks.
            is_recent = time.monotonic() - self._snapshot_at < _SNAPSHOT_SECONDS
            if is_recent and self._log[0][0] == self._snapshot_seq:
                self._owes_snapshot = True
            else:
                self._send_snapshot()
        for seq, payload in [*self._log, (_END_SEQ, b"")]:
            if seq >= start or not payload:
                self._replay.send_multipart((client, b"", self._topic, seq, payload))
        self._counts["replays"] += 1


def _is_bound(endpoint: str) -> bool:
    """Say whether an endpoint is one to bind, and not one to connect to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith((*_LOCAL, *_LOOPBACK))


def encode_batch(timestamp: float, events: Iterable[KVEvent], rank: int) -> bytes:
    """Encode a batch: what one message carries, beside its topic and number."""
    encoded = []
    for event in events:
        if not any(event.get("extra_keys") or ()):  # vLLM leaves out what is None
            event = {key: event[key] for key in event if key != "extra_keys"}  # noqa: PLW2901
        encoded.append(msgspec.Raw(_encode(event)))
        time.sleep(0)  # a long prompt is encoded at once, with the interpreter's lock held
    batch: bytes = _encode([timestamp, encoded, rank])
    return batch
