"""KV events of transformers' prefix caches for routers, and the server's option for them."""

import gc
import logging
import random
import weakref

import pytest

pytest.importorskip("zmq", reason="needs the extra events")
pytest.importorskip("msgspec", reason="needs the extra events")

import numpy as np
import torch
from events_rig import Subscriber, by_hand, catch_up, observe
from transformers_rig import BLOCK, GREEDY, budgets, cached, make_cache, make_model, text

from mamba_cache.cache import BlockHashChain
from mamba_cache.events import Stored
from mamba_cache.integrations.events import EventPublisher
from mamba_cache.integrations.transformers.serve.models import ServedModels, ServedRequest
from mamba_cache.integrations.transformers.tiers import PrefixTiers

ANY = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}


def assert_true(cache, known):
    """Check that a subscriber's blocks and states are exactly those that the cache finds."""
    store = cache._store
    key = store.tiers.key_for(cache._runner.fingerprint.key)

    def prefix(wire):
        parent, own = known.groups[0][wire]
        return [*(prefix(parent) if parent is not None else []), *own]

    for group, of_group in known.groups.items():
        for wire in of_group:
            chain = BlockHashChain(BLOCK, hasher=store.hasher, lora_id=key)
            chain.append(prefix(wire))
            hashes = chain.hashes
            block = store.kv_blocks.find_block(hashes.digests[len(hashes) - 1])
            assert block is not None
            assert not group or store.slots.has_state(block)
    whole = {*np.flatnonzero(store.kv_blocks.block_hashes >= 0).tolist()}
    assert len(known.groups[0]) == len(whole)
    assert len(known.groups[1]) == sum(store.slots.has_state(block) for block in whole)


def evicted(cache):
    """Return whether both KV blocks and slots were evicted."""
    return cache.stats().evicted_blocks and cache.stats().evicted_slots


def test_blocks_of_batches_and_tiers_are_published(generator, monkeypatch):
    """A subscriber's set equals the cache's, after publishing and eviction by any path."""
    probe = make_cache(make_model("granite 4"))
    room = {**budgets(probe, slots=8, blocks=14), "host_cache_gb": 0.01, "max_requests": 3}
    cache = make_cache(make_model("granite 4"), **room)
    order, brought, load = random.Random(generator.initial_seed()), [], PrefixTiers._load

    def noted(self, sequence, match, *given):
        is_found = load(self, sequence, match, *given)
        brought.extend([match.loaded_blocks] * is_found)
        return is_found

    monkeypatch.setattr(PrefixTiers, "_load", noted)
    stems = [text(generator, n)[0].tolist() for n in (5 * BLOCK, 3 * BLOCK + 5, 4 * BLOCK)]
    with (
        by_hand("resident", block_size=BLOCK) as publisher,
        Subscriber(publisher) as subscriber,
    ):
        observe(cache, publisher)
        for number in range(200):
            if number >= 20 and sum(brought) and evicted(cache):
                break
            prompts = []
            for _ in range(order.randrange(1, 4)):
                stem = order.choice(stems)
                own = text(generator, order.randrange(1, 7))[0].tolist()
                prompts.append(stem[: order.randrange(len(stem) + 1)] + own)
            if order.random() < 0.6:
                cache.generate_batch(prompts, max_new_tokens=order.randrange(1, 12))
            else:
                cache.generate(prompts[:1], **GREEDY)
            catch_up(publisher, subscriber)
            assert publisher.stats().untold_blocks == 0
            assert_true(cache, subscriber.known)
        assert sum(brought)
        assert evicted(cache)
        cache.reset()
        catch_up(publisher, subscriber)
        assert subscriber.known.groups == {0: {}, 1: {}}
    cache.close()


def test_salts_are_published_and_prompts_of_other_settings_are_not(generator):
    model = make_model("granite 4")
    cache = make_cache(model)
    with by_hand("resident", block_size=BLOCK) as publisher:
        observe(cache, publisher)
        ids = text(generator, 3 * BLOCK)
        cache.generate(ids, cache_salt="a", **GREEDY)
        publisher._step()
        salted = publisher.stats().told_blocks
        assert salted >= 3
        assert publisher._view.snapshot()[0]["extra_keys"][:2] == [("a",), None]
        cached(cache, ids)
        publisher._step()
        published = publisher.stats().told_blocks
        assert published >= salted + 3
        model.config.attention_multiplier = 0.5  # other prefixes for the same tokens
        cached(cache, ids)
        publisher._step()
        assert publisher.stats().told_blocks == published
        assert publisher.stats().untold_blocks >= 3
        cache.close()


@pytest.fixture
def endpoints():
    """Free endpoints."""
    with EventPublisher(**ANY) as publisher:
        return {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}


def test_a_server_publishes_its_first_model_and_after_that_the_next(endpoints, caplog):
    made = []

    def make_publisher():
        made.append(EventPublisher(**endpoints, heartbeat_seconds=0.05))
        return made[-1]

    settings = {"mamba_cache_gb": 0.02, "kv_cache_gb": 0.02, "block_size_tokens": 2 * BLOCK}
    served = ServedModels(settings, make_publisher)
    first, second = make_model("granite 4"), make_model("nemotron_h")
    for model in (first, second):
        served.add(model)
    with caplog.at_level(logging.WARNING):
        cache = served.find(first).prepare()
        assert not caplog.text
        served.find(second).prepare()
    assert "give each model a server" in caplog.text
    assert len(made) == 1
    assert made[0]._thread.is_alive()
    assert cache.listeners.wants(Stored)
    served.drop(first)
    assert len(made) == 2
    assert not made[0]._thread.is_alive()
    gone = weakref.ref(first)
    del first, cache, model
    gc.collect()
    assert gone() is None
    served.add(third := make_model("granite 4"))
    served.find(third).prepare()
    assert made[1]._thread.is_alive()
    served.close()
    assert not made[1]._thread.is_alive()


def test_a_dropped_cache_is_published_no_more(endpoints):
    served = ServedModels(
        {"mamba_cache_gb": 0.02, "kv_cache_gb": 0.02, "block_size_tokens": 2 * BLOCK},
        lambda: EventPublisher(**endpoints, mode="resident", heartbeat_seconds=0.05),
    )
    served.add(model := make_model("granite 4"))
    cache = served.find(model).prepare()
    publisher = served._publisher
    cache.generate(torch.arange(3, 60)[None], **GREEDY)
    for _ in range(1000):
        if publisher.stats().told_blocks:
            break
        publisher._stopping.wait(0.01)
    assert publisher.stats().told_blocks
    model.bfloat16()
    asked = {"input_ids": torch.arange(3, 60)[None], "tokenizer": None, **GREEDY}
    served.find(model).generate(ServedRequest(), asked)
    assert served.find(model).cache is None
    for _ in range(1000):
        if not publisher.stats().told_blocks:
            break
        publisher._stopping.wait(0.01)
    assert not publisher.stats().told_blocks
    served.close()
