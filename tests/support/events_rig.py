"""KV events: a cache without tensors, the expected view of its subscribers, and a subscriber."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import zmq

from mamba_cache.cache import BlockHashChain, BlockHasher, KVBlockAllocator, LruSlotPolicy, SlotPool
from mamba_cache.events import Removed, Stored
from mamba_cache.integrations.events import EventPublisher
from mamba_cache.integrations.events import publisher as publishing
from mamba_cache.integrations.events.view import EventView

BLOCK = 4
PAUSE = threading.Event()
"""Never set: a short wait for it lets other threads run."""

END_SEQ = b"\xff" * 8

GOLDEN = bytes.fromhex(
    "93cb3ff8000000000000938aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf01020304"
    "05060708b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a"
    "6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f69647800b26b765f"
    "63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f7665"
    "64ac626c6f636b5f6861736865739107a66d656469756da3435055a967726f75705f6964780181a474797065b0416c6c"
    "426c6f636b73436c656172656400"
)
"""A batch with each kind of event, as vLLM 0.33's classes encode and decode it."""


class RecordedCache:
    """Both allocators, used like an engine does, and a plain record of their events."""

    def __init__(self, num_blocks: int = 24, num_slots: int = 6) -> None:
        self.block_size_tokens = BLOCK
        self.kv_block_allocator = KVBlockAllocator(num_blocks + 1)
        self.slot_allocator = SlotPool(
            num_slots, self.kv_block_allocator, policy=LruSlotPolicy(), evicts_held=True
        )
        self.listeners = self.kv_block_allocator.listeners
        self.hasher = BlockHasher(secret=b"key")
        self.blocks: dict[bytes, tuple[bytes | None, list[int] | None]] = {}
        self.states: set[bytes] = set()
        self.listeners.add(self._record, Stored, Removed)

    def _record(self, event: Any) -> None:
        if event.kind == "state":
            change = (
                self.states.update if isinstance(event, Stored) else self.states.difference_update
            )
            change(event.digests)
        elif isinstance(event, Stored):
            parent, size = event.parent_digest, event.block_size_tokens
            for index, digest in enumerate(event.digests):
                tokens = None
                if event.tokens is not None:
                    tokens = event.tokens[index * size : (index + 1) * size].tolist()
                self.blocks[digest] = parent, tokens
                parent = digest
        else:
            for digest in event.digests:
                self.blocks.pop(digest)

    def expected(self, mode: str) -> dict[int, dict[int, tuple[int | None, list[int]]]]:
        """The entries to announce by definition: by group, then by hash."""
        told = {}
        for digest in self.blocks:
            path = self._path(digest)
            if path is None:
                continue
            if mode == "resident":
                told.update(dict.fromkeys(path[-1:]))
            elif digest in self.states:
                told.update(dict.fromkeys(path))
        # A partial block is not announced, but its state makes the blocks before it usable.
        told = [h for h in told if len(self.blocks[h][1]) == BLOCK]
        wire = {h: self._wire_hash(h) for h in told}
        entries = {h: (wire.get(self.blocks[h][0]), self.blocks[h][1]) for h in told}
        return {
            0: {wire[h]: entries[h] for h in told},
            1: {wire[h]: entries[h] for h in told if h in self.states},
        }

    def _wire_hash(self, digest: bytes) -> int:
        """A block's hash in events, which depends on its prefix, not on the cache's secret."""
        before = 0
        for index, each in enumerate(self._path(digest) or []):
            data = np.array(self.blocks[each][1], "<i4").tobytes()
            start = before.to_bytes(8, "little") if index else b""
            hashed = hashlib.blake2b(start + data, digest_size=8).digest()
            before = int.from_bytes(hashed, "little")
        return before

    def _path(self, digest: bytes | None) -> list[bytes] | None:
        """The blocks from a sequence's start to this one; None without all blocks and tokens."""
        path: list[bytes] = []
        while digest is not None:
            if digest not in self.blocks or self.blocks[digest][1] is None:
                return None
            path.insert(0, digest)
            digest = self.blocks[digest][0]
        return path

    def run(self, tokens: list[int], states: list[int], *, salt: str | None = None) -> None:
        """Compute a sequence: match it, fill the rest, save states after some blocks."""
        kv_blocks, slots = self.kv_block_allocator, self.slot_allocator
        chain = BlockHashChain(BLOCK, hasher=self.hasher, cache_salt=salt)
        chain.append(tokens)
        hashes, array = chain.hashes, np.array(tokens, np.int32)
        held = kv_blocks.match_prefix(hashes)
        kv_blocks.retain_memory_blocks(held)
        first = len(held)
        held += kv_blocks.allocate_memory_blocks(len(hashes) - first)
        whole, told = len(hashes), salt is None
        registered = kv_blocks.register_kv_block_hashes(
            held[first:whole],
            hashes[first:],
            parent_digest=hashes.digests[first - 1] if first else None,
            tokens=array[first * BLOCK : whole * BLOCK] if told else None,
        )
        finders = [*held[:first], *registered]
        for number in states:
            if number <= len(finders) and finders[number - 1] is not None:
                [slot] = slots.reserve_slots([finders[number - 1]])
                if slot is not None:
                    slots.commit_reserved([slot], [finders[number - 1]])
        kv_blocks.release_memory_blocks(held)

    def load(self, rng: random.Random, num_calls: int) -> None:
        """Make random calls: mostly sequences with common prefixes, sometimes unusual calls."""
        for _ in range(num_calls):
            kind = rng.random()
            cached = [b for b in range(24) if self.kv_block_allocator.block_hashes[b] >= 0]
            if kind < 0.8 or not cached:
                length = rng.randrange(1, 9 * BLOCK)
                tokens = [rng.randrange(2) for _ in range(2)] + [7] * (length - 2)
                cut = rng.randrange(length)
                tokens = tokens[:cut] + [rng.randrange(3)] * (length - cut)
                states = rng.sample(range(1, 10), rng.randrange(4))
                self.run(tokens[:length], states, salt=rng.choice([None, None, None, "salt"]))
            elif kind < 0.9:
                self.slot_allocator.invalidate_block(rng.choice(cached))
            elif kind < 0.98:  # a removed parent makes its children unfindable
                self.kv_block_allocator.deregister_blocks([rng.choice(cached)])
            elif kind < 0.99:
                self.slot_allocator.reset()
            else:
                self.slot_allocator.reset()
                self.kv_block_allocator.reset()


class Known:
    """The view of a strict router, which rejects a block with an unknown parent."""

    def __init__(self) -> None:
        self.groups: dict[int, dict[int, tuple[int | None, list[int]]]] = {0: {}, 1: {}}

    def apply(self, event: dict[str, Any]) -> None:
        """Apply a decoded event."""
        if event["type"] == "AllBlocksCleared":
            self.groups = {0: {}, 1: {}}
        elif event["type"] == "BlockRemoved":
            for hash_id in event["block_hashes"]:
                self.groups[event["group_idx"]].pop(hash_id, None)
        else:
            parent, size = event["parent_block_hash"], event["block_size"]
            assert len(event["token_ids"]) == size * len(event["block_hashes"])
            for index, hash_id in enumerate(event["block_hashes"]):
                assert parent is None or parent in self.groups[0], "an unknown parent"
                tokens = event["token_ids"][index * size : (index + 1) * size]
                self.groups[event["group_idx"]][hash_id] = parent, tokens
                parent = hash_id


class Subscriber:
    """A subscriber like a router: it requests a replay after a gap, and skips old batches."""

    def __init__(
        self, publisher: EventPublisher, loses: Callable[[], bool] = lambda: False
    ) -> None:
        self._publisher = publisher
        self.loses = loses
        self.known = Known()
        self.last = -1
        self.num_replays = 0
        self.connect()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disconnect()

    def connect(self) -> None:
        """Reconnect, keeping the known entries."""
        context = zmq.Context.instance()
        self._sub, self._dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._sub.linger = self._dealer.linger = 0
        self._sub.subscribe(b"")
        self._sub.connect(self._publisher.endpoint)
        self._dealer.connect(self._publisher.replay_endpoint)

    def disconnect(self) -> None:
        self._sub.close()
        self._dealer.close()

    def receive(self, answer: Callable[[], object] = lambda: None) -> bool:
        """Apply all received batches; return whether there were any."""
        is_any = False
        while self._sub.poll(2):
            _, seq, payload = self._sub.recv_multipart()
            is_any = True
            if not self.loses():
                self._take(int.from_bytes(seq, "big"), payload, answer)
        return is_any

    def _take(self, seq: int, payload: bytes, answer: Callable[[], object]) -> None:
        if seq > self.last + 1:
            self.num_replays += 1
            asked = self.last + 1
            self._dealer.send_multipart([b"", asked.to_bytes(8, "big")])
            while True:
                if not self._dealer.poll(5):
                    answer()
                    continue
                empty, topic, number, old = self._dealer.recv_multipart()
                assert (empty, topic) == (b"", b"")
                if number == END_SEQ:
                    assert old == b""
                    break
                assert int.from_bytes(number, "big") >= asked
                self._apply(int.from_bytes(number, "big"), old)
        if seq > self.last:
            self._apply(seq, payload)

    def _apply(self, seq: int, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            self.known.apply(event)
        self.last = seq


@contextmanager
def by_hand(mode: str = "reachable", *, block_size: int = BLOCK) -> Iterator[EventPublisher]:
    """A publisher without a thread: the test calls its steps.

    Each step sends a batch, which may be empty.
    """
    publisher = EventPublisher(
        "tcp://127.0.0.1:*",
        replay_endpoint="tcp://127.0.0.1:*",
        mode=mode,
        heartbeat_seconds=0,
    )
    publisher._begin(EventView(block_size, publisher.mode))
    try:
        with mock.patch.object(publishing, "_POLL_SECONDS", 0.001):  # no wait between steps
            yield publisher
    finally:
        publisher.close()


def observe(cache: RecordedCache, publisher: EventPublisher) -> None:
    """Add the publisher as a listener, as ``watch`` does, without starting its thread."""
    cache.listeners.add(publisher._take, Stored, Removed)


def catch_up(publisher: EventPublisher, subscriber: Subscriber) -> None:
    """Step until the subscriber has the newest batch; connecting takes a moment."""
    publisher._step()
    newest = publisher._next_seq - 1
    for _ in range(1000):
        subscriber.receive(publisher._step)
        if subscriber.last >= newest:
            return
        publisher._step()
    raise AssertionError("nothing arrives")
