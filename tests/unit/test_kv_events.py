"""Publishers of KV events: bytes, endpoints, and no cost for the cache."""

import inspect
import logging
import mmap
import random
import socket

import numpy as np
import pytest

zmq = pytest.importorskip("zmq", reason="needs the extra events")
msgspec = pytest.importorskip("msgspec", reason="needs the extra events")

from engine_rig import BLOCK, SamplingParams, make_engine  # noqa: E402
from events_rig import GOLDEN, PAUSE, RecordedCache, Subscriber, by_hand, catch_up, observe  # noqa: E402
from work import lines_executed  # noqa: E402

from mamba_cache.errors import InvalidArgumentError, StepOrderError  # noqa: E402
from mamba_cache.events import Stored  # noqa: E402
from mamba_cache.integrations.events import EventPublisher  # noqa: E402
from mamba_cache.integrations.events import publisher as publishing  # noqa: E402
from mamba_cache.integrations.events.publisher import _is_bound, encode_batch  # noqa: E402
from mamba_cache.integrations.events.view import (  # noqa: E402
    CLEARED,
    removed_event,
    stored_event,
)

ANY = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}


def wait_until(holds):
    """Wait for another thread, at most ten seconds."""
    for _ in range(1000):
        if holds():
            return
        PAUSE.wait(0.01)
    raise AssertionError("it did not happen")


# The bytes.


def test_a_batch_is_encoded_as_vllms_own_classes_encode_it():
    stored = stored_event(0, [0x0102030405060708], None, [1, 2, 3, 4])
    removed = {**removed_event(1, [7]), "medium": "CPU"}
    assert encode_batch(1.5, [stored, removed, CLEARED], 0) == GOLDEN
    largest = stored_event(1, [2**64 - 1], 2**63 - 1, [2**31 - 1])
    _, [event], rank = msgspec.msgpack.decode(encode_batch(0.0, [largest], 3))
    assert (event["block_hashes"], event["parent_block_hash"]) == ([2**64 - 1], 2**63 - 1)
    assert (event["kv_cache_spec_kind"], event["group_idx"], rank) == ("mamba", 1, 3)


def test_frames_are_a_topic_a_number_and_a_batch():
    with EventPublisher(**ANY, topic="kv@") as publisher:
        sub = zmq.Context.instance().socket(zmq.SUB)
        sub.linger = 0
        sub.subscribe(b"kv@")
        sub.connect(publisher.endpoint)
        publisher.watch(RecordedCache())
        assert sub.poll(10_000)
        topic, first, payload = sub.recv_multipart()
        _, second, _ = sub.recv_multipart()
        sub.close()
    assert (topic, len(first)) == (b"kv@", 8)
    assert int.from_bytes(second, "big") == int.from_bytes(first, "big") + 1
    assert len(msgspec.msgpack.decode(payload)) == 3


# Endpoints.


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("ipc:///tmp/x", True),
        ("tcp://127.0.0.1:5557", True),
        ("tcp://localhost:5557", True),
        ("tcp://[::1]:5557", True),
        ("tcp://10.0.0.5:5557", False),
        ("tcp://router.example:5557", False),
    ],
)
def test_endpoints_are_bound_or_connected(endpoint, binds):
    assert _is_bound(endpoint) is binds


def test_by_default_no_other_machine_can_listen():
    parameters = inspect.signature(EventPublisher).parameters
    assert parameters["endpoint"].default == "tcp://127.0.0.1:5557"
    assert parameters["replay_endpoint"].default is None


def test_an_endpoint_that_is_taken_is_named_and_nothing_stays_open(monkeypatch):
    monkeypatch.setattr(publishing, "_BIND_TRIES", 3)
    with EventPublisher(**ANY) as first:
        with pytest.raises(InvalidArgumentError, match=r"127\.0\.0\.1.*cannot be bound"):
            EventPublisher(first.endpoint)
        with pytest.raises(InvalidArgumentError, match="cannot be bound"):
            EventPublisher("tcp://127.0.0.1:*", replay_endpoint=first.endpoint)
    with pytest.raises(InvalidArgumentError, match="'tcp://nowhere' cannot be connected"):
        EventPublisher("tcp://nowhere")


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_the_error_of_an_endpoint_without_a_scheme_shows_an_example(name):
    with pytest.raises(InvalidArgumentError, match=rf"^{name} must be .* 'tcp://127.*'localhost:5"):
        EventPublisher(**{**ANY, name: "localhost:5557"})
    with pytest.raises(InvalidArgumentError, match="port of at most 65535"):
        EventPublisher(**{**ANY, name: "tcp://127.0.0.1:99999"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "all"),
        ("endpoint", 5557),
        ("replay_endpoint", 5558),
        ("topic", b"x"),
        ("data_parallel_rank", -1),
        ("heartbeat_seconds", -1),
    ],
)
def test_settings_are_checked(name, value):
    with pytest.raises(InvalidArgumentError, match=name):
        EventPublisher(**{**ANY, name: value})


def test_a_publisher_is_for_one_cache_that_holds_nothing_yet():
    full = RecordedCache()
    full.run([1] * 8, [])
    with EventPublisher(**ANY) as publisher:
        with pytest.raises(InvalidArgumentError, match="kv_block_allocator"):
            publisher.watch(object())
        with pytest.raises(InvalidArgumentError, match="holds 2 blocks"):
            publisher.watch(full)
        publisher.watch(RecordedCache())
        with pytest.raises(StepOrderError, match="already"):
            publisher.watch(RecordedCache())
    with pytest.raises(StepOrderError, match="closed"):
        publisher.watch(RecordedCache())


# Events of a context.


@pytest.mark.parametrize(
    ("keys", "extra"),
    [
        ({"cache_salt": "a"}, [["a"], None, None]),
        ({"cache_salt": ""}, [[""], None, None]),
        ({"lora_id": 0}, [[0], [0], [0]]),
        (
            {"multimodal_keys": [(BLOCK + 3, "cat")], "lora_id": "x"},
            [["x"], ["x", ["cat", 3]], ["x"]],
        ),
    ],
)
def test_events_have_the_extra_keys_of_blocks_as_in_vllm(keys, extra):
    engine = make_engine()
    with by_hand("resident", block_size=BLOCK) as publisher, Subscriber(publisher) as subscriber:
        observe(engine.context, publisher)
        catch_up(publisher, subscriber)
        seen = []
        subscriber.known.apply = seen.append
        engine.submit([1] * 3 * BLOCK, SamplingParams(max_new_tokens=BLOCK + 2), **keys)
        list(engine.stream())
        catch_up(publisher, subscriber)
        first, *rest = [event for event in seen if event.get("group_idx") == 0]
        assert first["extra_keys"] == extra
        assert [event.get("extra_keys") for event in rest] == [extra[2] and extra[2:]]
        engine.generate([[1] * 3 * BLOCK], SamplingParams(max_new_tokens=2))
        catch_up(publisher, subscriber)
        assert publisher.stats().told_blocks == 7


# Costs for the cache.


def test_an_event_costs_the_cache_an_append_and_nothing_else():
    cache = RecordedCache()
    with by_hand() as publisher:
        assert lines_executed(lambda: publisher._take("event")) == 2
        publisher._waiting.clear()
        cache.run([1] * 32, [8])
        observe(cache, publisher)
        sent = publisher.stats().batches
        cache.load(random.Random(0), 50)
        assert publisher.stats().batches == sent
        assert publisher.stats().waiting_events > 50


def test_without_an_observer_no_tokens_are_gathered(monkeypatch):
    engine = make_engine()
    seen = []
    register = engine.context.kv_block_allocator.register

    def spy(*given, tokens, **others):
        seen.append(tokens)
        return register(*given, tokens=tokens, **others)

    monkeypatch.setattr(engine.context.kv_block_allocator, "register", spy)
    engine.generate([[1] * 40], SamplingParams(max_new_tokens=20))
    assert len(seen) > 2
    assert set(map(type, seen)) == {type(None)}
    engine.context.listeners.add(lambda event: None, Stored)
    engine.generate([[2] * 40], SamplingParams(max_new_tokens=20))
    assert isinstance(seen[-1], np.ndarray)


def test_a_publisher_that_fails_leaves_the_cache_as_it_is(caplog):
    engine = make_engine()
    publisher = EventPublisher(**ANY)
    publisher.watch(engine.context)
    engine.generate([[1] * 40], SamplingParams(max_new_tokens=4))
    wait_until(lambda: publisher.stats().told_blocks)
    publisher._pub.close()  # any interrupt in the thread's own calls
    with caplog.at_level(logging.ERROR):
        wait_until(lambda: not publisher._is_listening)
    assert "not published any more" in caplog.text
    [done] = engine.generate([[1] * 40], SamplingParams(max_new_tokens=4))
    assert done.skipped_tokens == 32
    engine.context.check_invariants()
    assert publisher.stats().waiting_events == 0
    publisher.close()


def test_a_closed_publisher_is_removed_and_its_subscribers_are_cleared():
    engine = make_engine()
    publisher = EventPublisher(**ANY)
    with Subscriber(publisher) as subscriber:
        publisher.watch(engine.context)
        engine.generate([[1] * 40], SamplingParams(max_new_tokens=4))
        wait_until(lambda: subscriber.receive() and subscriber.known.groups[0])
        publisher.close()
        wait_until(lambda: subscriber.receive() or not subscriber.known.groups[0])
        wait_until(lambda: not subscriber.known.groups[0])
        [done] = engine.generate([[1] * 40], SamplingParams(max_new_tokens=4))
        assert done.skipped_tokens == 32
        assert publisher.stats().waiting_events == 0
        publisher.close()


def test_a_new_process_at_the_same_address_is_not_taken_for_the_old_one():
    first, second = RecordedCache(), RecordedCache()
    publisher = EventPublisher(**ANY)
    with Subscriber(publisher) as subscriber:
        publisher.watch(first)
        first.run([1] * 32, [8])
        wait_until(lambda: subscriber.receive() and subscriber.known.groups[0])
        endpoints = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
        publisher._send = lambda events: None  # it dies without an event
        publisher.close()
        with EventPublisher(**endpoints, heartbeat_seconds=0.05) as publisher:
            publisher.watch(second)
            second.run([2] * 32, [4])
            wait_until(
                lambda: (
                    subscriber.receive() and subscriber.known.groups == second.expected("reachable")
                )
            )


def test_malformed_requests_for_a_replay_are_passed_over_and_only_counted(caplog):
    malformed = [[b"x"], [b"", b"short"], [b"", b"12345678", b"more"], [b"", *[bytes(8)] * 10_000]]
    with by_hand() as publisher:
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(publisher.replay_endpoint)
        for frames in malformed:
            dealer.send_multipart(frames)
        dealer.send_multipart([b"", bytes(8)])
        with caplog.at_level(logging.WARNING):
            wait_until(lambda: publisher._step() or dealer.poll(0))
        assert caplog.text.count("8 bytes") == len(malformed)
        assert "got 10,002 frames" in caplog.text
        assert len(caplog.text) < 2000
        assert publisher.stats().replays == 1
        dealer.close()


def speak(endpoint, kind):
    """Connect to a ZeroMQ socket and shake hands as a peer of this socket type."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    peer = socket.create_connection((host, int(port)))
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    peer.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
    return peer


def send_parts(peer, size):
    part = bytes(2**20)
    for _ in range(0, size, len(part)):
        peer.sendall(part)


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize(("name", "kind"), [("replay_endpoint", b"DEALER"), ("endpoint", b"SUB")])
def test_a_large_frame_ends_its_connection_and_takes_no_memory(name, kind):
    """A client announces 300 MB; other clients are still answered."""
    with EventPublisher(**ANY) as publisher:
        publisher.watch(RecordedCache())
        before, size = resident_bytes(), 300 * 2**20
        with speak(getattr(publisher, name), kind) as peer:
            peer.sendall(b"\x02" + size.to_bytes(8, "big"))
            with pytest.raises(OSError, match=r"reset|pipe|abort"):
                send_parts(peer, size)
        assert resident_bytes() - before < 50 * 2**20
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"", bytes(8)])
        assert dealer.poll(10_000)
        dealer.close()


def test_many_snapshot_requests_do_not_send_each_one_to_all():
    cache = RecordedCache()
    with by_hand() as publisher:
        publisher._is_snapshot_due = False
        observe(cache, publisher)
        cache.run([1] * 32, [8])
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(publisher.replay_endpoint)
        for _ in range(20):
            dealer.send_multipart([b"", bytes(8)])
        publisher._snapshot_at = float("inf")  # as if a snapshot had just been sent
        wait_until(lambda: publisher._step() or publisher.stats().replays == 20)
        dealer.close()
        assert publisher.stats().snapshots == 0
        assert publisher._is_snapshot_due
        publisher._snapshot_at = float("-inf")
        publisher._step()
        assert publisher.stats().snapshots == 1
        assert not publisher._is_snapshot_due
