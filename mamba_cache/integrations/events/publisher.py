"""The publisher of KV events: a thread that sends a cache's contents to routers."""

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

# Shared by all threads: an encoder has no state between calls.
_encode = msgspec.msgpack.Encoder().encode

_POLL_SECONDS = 0.02
_LINGER_MS = 500
_JOIN_SECONDS = 5.0
_MAX_PORT = 65_535
_BIND_TRIES = 100

_LOG_BATCHES = 256
"""Batches kept for replays; a subscriber that lacks more gets a snapshot in one batch."""

_SNAPSHOT_SECONDS = 1.0
"""Minimum time between two snapshots, for any number of requests."""

_MAX_FRAME_BYTES = 1024
"""A peer that sends a longer frame is disconnected: requests and subscriptions are short."""

_REQUEST_FRAMES = 3  # the client's id, an empty frame, the number of the first batch requested
_END_SEQ = (-1).to_bytes(8, "big", signed=True)
_LOOPBACK = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:")
_LOCAL = ("ipc://", "inproc://")


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Counts of a publisher's work, and the number of entries that it announces now.

    Attributes:
        batches: Batches sent, including empty ones.
        events: Events in these batches.
        replays: Answered requests for a replay.
        snapshots: Batches with all announced entries, for subscribers that lack more than the log.
        told_blocks: KV blocks announced now.
        told_states: States announced now.
        untold_blocks: Registered blocks that are not announced because their tokens are unknown:
            blocks of requests with ``tells_tokens=False``, or under other settings of a model.
        waiting_events: Events of the cache that are not processed yet.
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
    """Publishes the contents of a cache to routers, in the format of vLLM's KV events.

    A publisher serves one cache: one worker, or one rank of a data-parallel group. The cache only
    appends events to a queue; a thread sends them. If sending fails, the thread logs the error and
    ends: routers get no more events, and the cache goes on.

    Prompts can be read from these messages. By default sockets listen on this machine only; an
    endpoint may name another address.

    Args:
        endpoint: Address for batches. As in vLLM, endpoints with ``*`` or ``::``, ipc endpoints and
            inproc endpoints are bound, and others are connected. Loopback endpoints are bound too.
            Port ``*`` means any free port.
        replay_endpoint: Address for replay requests of subscribers that missed batches, always
            bound. None: no replays; such subscribers lack entries.
        mode: "reachable" announces the KV blocks up to a held state, which are those that a prompt
            can use; "resident" announces all KV blocks.
        topic: The first frame of each message.
        data_parallel_rank: The rank in each batch.
        heartbeat_seconds: An empty batch is sent after this time without a batch, so that
            subscribers can detect missed batches.

    Attributes:
        endpoint: Address for batches, with the port.
        replay_endpoint: Address for replay requests, with the port, or None.
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
        # The cache's thread appends, the publisher's thread pops; neither waits.
        self._waiting: deque[Stored | Removed] = deque()
        self._is_listening = True
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._heartbeat = heartbeat_seconds
        self._view = EventView(1, "resident")  # empty until ``watch``
        self._log: deque[tuple[bytes, bytes]] = deque(maxlen=_LOG_BATCHES)
        self._snapshot_seq = b""
        self._snapshot_at = -_SNAPSHOT_SECONDS
        self._is_snapshot_due = False
        # Not 0: a router may have seen an earlier process at this address, and would ignore smaller
        # numbers as old. With larger numbers the router sees a gap and requests a replay.
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
        """Publish the events of a cache from now on; the cache must be empty.

        Args:
            cache: A ``DynamicInferenceContext``, such as ``Engine.context``, or a ``PrefixCache``.
                The publisher becomes one of its listeners; after ``close`` it ignores events.

        Raises:
            InvalidArgumentError: ``cache`` is no cache, or holds blocks already.
            StepOrderError: The publisher watches a cache already, or is closed.
        """
        for name in ("kv_block_allocator", "listeners", "block_size_tokens"):
            if not hasattr(cache, name):
                raise InvalidArgumentError(
                    f"cache must have a {name}, but {type(cache).__name__} has none: give a "
                    "DynamicInferenceContext, an engine's context or a PrefixCache"
                )
        if self._thread is not None or self._stopping.is_set():
            state = "closed" if self._stopping.is_set() else "watching a cache already"
            raise StepOrderError(f"the publisher is {state}: create one for each cache")
        block_hashes = cache.kv_block_allocator.block_hashes
        num_registered = sum(hash_id >= 0 for hash_id in block_hashes.tolist())
        if num_registered:
            raise InvalidArgumentError(
                f"the cache holds {num_registered} blocks, whose tokens are unknown: watch the "
                "cache before its first request, or reset it"
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
        """Send that all blocks are cleared, and stop; the cache goes on without a publisher."""
        self._stopping.set()
        if self._thread is None:
            self._close_sockets()
        else:
            self._thread.join(_JOIN_SECONDS)

    def stats(self) -> PublisherStats:
        """Return the counts so far; any thread may call this."""
        view = self._view
        return PublisherStats(
            **self._counts,
            told_blocks=view.num_told_blocks,
            told_states=view.num_told_states,
            untold_blocks=view.num_untold,
            waiting_events=len(self._waiting),
        )

    def _take(self, event: Stored | Removed) -> None:
        """Queue an event of the cache: the listener that ``watch`` adds."""
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
        """Close the sockets; sent messages are delivered within half a second, or discarded."""
        for socket in self._sockets:
            socket.close()

    # The publisher's thread runs all methods from here on.

    def _run(self, view: EventView) -> None:
        """Send events until ``close``; an exception ends this thread, not the cache."""
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
        """Send that all blocks are cleared: an earlier process may have used this address."""
        self._view = view
        self._send([CLEARED])
        self._snapshot_seq = self._log[0][0]

    def _step(self) -> None:
        """Wait a moment, answer a replay request, and send the new events."""
        # Polls: waking this thread would cost the cache more than an append.
        if self._replay is None:
            self._stopping.wait(_POLL_SECONDS)
        elif self._replay.poll(int(_POLL_SECONDS * 1000)):
            self._answer(*self._receive())
        self._drain()
        if self._is_snapshot_due and time.monotonic() - self._snapshot_at >= _SNAPSHOT_SECONDS:
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
        """Send all announced entries to all subscribers; the log begins with this batch."""
        self._log.clear()
        self._send([CLEARED, *self._view.snapshot()])
        self._snapshot_seq = self._log[0][0]
        self._snapshot_at = self._sent_at
        self._is_snapshot_due = False
        self._counts["snapshots"] += 1

    def _receive(self) -> tuple[list[bytes], int]:
        """Receive a request; return its first frames and the number of its frames."""
        frames, count = [self._replay.recv()], 1
        while self._replay.rcvmore:
            frame, count = self._replay.recv(), count + 1
            if count <= _REQUEST_FRAMES:
                frames.append(frame)
        return frames, count

    def _answer(self, request: Sequence[bytes], num_frames: int) -> None:
        """Send a subscriber the batches that it lacks, or send a snapshot to all."""
        if num_frames != _REQUEST_FRAMES or len(request[2]) != 8:
            sizes = [len(frame) for frame in request]
            text = "a replay request is 3 frames, the last of 8 bytes, got %s frames, sizes %s"
            _log.warning(text, f"{num_frames:,}", sizes)
            return
        client, _, start = request
        if start < self._log[0][0]:
            # Published to all: routers refuse a replay that begins later than requested, but accept
            # published batches. Many requests at once share a snapshot.
            is_recent = time.monotonic() - self._snapshot_at < _SNAPSHOT_SECONDS
            if is_recent and self._log[0][0] == self._snapshot_seq:
                self._is_snapshot_due = True
            else:
                self._send_snapshot()
        for seq, payload in [*self._log, (_END_SEQ, b"")]:
            if seq >= start or not payload:
                self._replay.send_multipart((client, b"", self._topic, seq, payload))
        self._counts["replays"] += 1


def _is_bound(endpoint: str) -> bool:
    """Return whether to bind an endpoint, rather than connect to it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith((*_LOCAL, *_LOOPBACK))


def encode_batch(timestamp: float, events: Iterable[KVEvent], rank: int) -> bytes:
    """Encode the payload of a message, which also has a topic and a number."""
    encoded = []
    for event in events:
        if not any(event.get("extra_keys") or ()):  # vLLM omits fields that are None
            event = {key: event[key] for key in event if key != "extra_keys"}  # noqa: PLW2901
        encoded.append(msgspec.Raw(_encode(event)))
        time.sleep(0)  # one event of a long prompt is encoded with the interpreter's lock held
    batch: bytes = _encode([timestamp, encoded, rank])
    return batch
