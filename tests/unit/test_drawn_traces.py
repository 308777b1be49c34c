"""The default policy beside the simple ones, on traces drawn from seeds.

``mamba-cache bench replay --workload agents`` and ``mixed`` replay longer ones; their runs are kept
in docs/benchmarks.
"""

import pytest

from mamba_cache.bench.no_model import NoModel
from mamba_cache.bench.replay import POLICIES, _fit, replay
from mamba_cache.bench.workload import draw_agents, draw_mixed
from mamba_cache.reference import Engine
from mamba_cache.slots import MegatronPlacement


@pytest.mark.parametrize(
    ("draw", "slots"), [(draw_agents, 25), (draw_mixed, 25), (draw_mixed, 100)]
)
def test_the_default_is_never_half_a_point_below_a_simple_policy(draw, slots):
    requests = draw(400, seed=1)
    rates = {}
    for policy, make in POLICIES.items():
        config = _fit(requests, slots, None, 8192)
        engine = Engine(NoModel(), config, slot_policy=make(), placement=MegatronPlacement())
        rates[policy] = replay(engine, requests)["token_hit_rate"]
    assert rates["adaptive"] >= max(rates.values()) - 0.005, rates
