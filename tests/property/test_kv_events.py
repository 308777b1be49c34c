"""Subscribers know all usable prefixes, whatever happens to the cache and to messages."""

import random
from contextlib import ExitStack

import pytest

pytest.importorskip("zmq", reason="needs the extra events")
pytest.importorskip("msgspec", reason="needs the extra events")

from events_rig import BLOCK, PAUSE, Known, RecordedCache, Subscriber, by_hand, observe
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_cache.events import Removed, Stored
from mamba_cache.integrations.events import EventPublisher
from mamba_cache.integrations.events.view import EventView

MODES = ("resident", "reachable")


def take_over(known, events):
    """Apply events to a router's view, without encoding."""
    for event in events:
        known.apply(event)


@examples(100)
@given(st.randoms(use_true_random=False), st.sampled_from(MODES))
def test_subscribers_match_the_definition_after_every_call(rng, mode):
    cache, view, known = RecordedCache(), EventView(BLOCK, mode), Known()
    cache.listeners.add(view.apply, Stored, Removed)
    for _ in range(40):
        cache.load(rng, 1)
        take_over(known, view.take_events())
        expected = cache.expected(mode)
        assert known.groups == expected
        assert (view.num_told_blocks, view.num_told_states) == tuple(map(len, expected.values()))
        untold = sum(tokens is None for _, tokens in cache.blocks.values())
        assert view.num_untold == untold
        anew = Known()
        take_over(anew, view.snapshot())
        assert anew.groups == expected


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from(MODES), st.sampled_from([1, 30, 300]))
def test_subscribers_that_come_late_lose_messages_and_reconnect_end_with_the_same(
    seed, mode, num_silent
):
    # Not Hypothesis's random: the draws for losses depend on the arrival times of messages.
    rng, fate, cache = random.Random(seed), random.Random(seed), RecordedCache()
    with by_hand(mode) as publisher, ExitStack() as connected:
        observe(cache, publisher)
        subscribers = [
            connected.enter_context(Subscriber(publisher)),
            connected.enter_context(Subscriber(publisher, loses=lambda: fate.random() < 0.4)),
            connected.enter_context(Subscriber(publisher)),
        ]
        always, lossy, away = subscribers
        for number in range(12):
            cache.load(rng, rng.randrange(4))
            publisher._step()
            for one in (always, lossy, *([away] if number < 4 else [])):
                one.receive(publisher._step)
        away.disconnect()
        for _ in range(num_silent):  # more messages than the log holds, or fewer
            publisher._send([])
        cache.load(rng, 3)
        away.connect()
        subscribers.append(connected.enter_context(Subscriber(publisher)))  # joins late
        lossy.loses = lambda: False
        expected = cache.expected(mode)
        for _ in range(1000):
            publisher._step()
            for one in subscribers:
                one.receive(publisher._step)
            if all(one.known.groups == expected for one in subscribers):
                break
        assert [one.known.groups for one in subscribers] == [expected] * 4
        assert subscribers[-1].num_replays


@pytest.mark.parametrize("mode", MODES)
def test_the_publishers_own_thread_publishes_all_under_load(mode, rng):
    draw, fate, cache = random.Random(int(rng.integers(2**32))), random.Random(0), RecordedCache()
    endpoints = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
    with (
        EventPublisher(**endpoints, mode=mode, heartbeat_seconds=0.05) as publisher,
        ExitStack() as connected,
    ):
        publisher.watch(cache)
        subscribers = [
            connected.enter_context(Subscriber(publisher)),
            connected.enter_context(Subscriber(publisher, loses=lambda: fate.random() < 0.3)),
        ]
        for _ in range(60):
            cache.load(draw, 5)
            PAUSE.wait(0.002)
            for one in subscribers:
                one.receive()
        subscribers.append(connected.enter_context(Subscriber(publisher)))
        subscribers[1].loses = lambda: False
        expected = cache.expected(mode)
        for _ in range(500):
            for one in subscribers:
                one.receive()
            if all(one.known.groups == expected for one in subscribers):
                break
            PAUSE.wait(0.01)
        assert [one.known.groups for one in subscribers] == [expected] * 3
        stats = publisher.stats()
        assert (stats.told_blocks, stats.told_states) == tuple(map(len, expected.values()))
        assert stats.replays >= 1


def test_a_run_of_blocks_is_one_event():
    cache, view = RecordedCache(), EventView(BLOCK, "resident")
    cache.listeners.add(view.apply, Stored, Removed)
    cache.run([5] * 6 * BLOCK, [])
    [event] = view.take_events()
    assert event["type"] == "BlockStored"
    assert len(event["block_hashes"]) == 6
    assert event["token_ids"] == [5] * 6 * BLOCK
