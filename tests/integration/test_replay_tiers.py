"""A trace of conversations, replayed with few slots and a host tier of ten times as many."""

import dataclasses

from tier_rig import always

from mamba_cache.bench.no_model import NoModel
from mamba_cache.bench.replay import _fit, _load, replay
from mamba_cache.reference import Engine
from mamba_cache.slots import LastBlock


def hit_rate(requests, slots, host_states=None):
    config = _fit(requests, slots, None, 8192)
    if host_states is not None:
        config = dataclasses.replace(config, num_host_states=host_states, num_host_blocks=0)
    engine = Engine(NoModel(), config, placement=LastBlock())
    if host_states is not None:
        engine.context._tiering.planner = always()
    return replay(engine, requests)["token_hit_rate"]


def test_a_tier_of_ten_times_the_slots_hits_almost_like_unlimited_slots():
    requests = _load(None, "conversations", 400)
    few, tiered, unlimited = (
        hit_rate(requests, 20), hit_rate(requests, 20, 200), hit_rate(requests, None),
    )  # fmt: skip
    assert few < unlimited - 0.02 <= tiered <= unlimited
