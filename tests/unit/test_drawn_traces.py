"""The default policy beside the simple ones, on traces drawn from seeds.

``mamba-cache bench replay --workload agents`` and ``mixed`` replay longer ones; their runs are kept
in docs/benchmarks.
"""

import json

import pytest
from sources import ROOT

from mamba_cache.bench.no_model import NoModel
from mamba_cache.bench.replay import _fit, replay
from mamba_cache.bench.workload import draw_agents, draw_mixed
from mamba_cache.reference import Engine
from mamba_cache.slots import SLOT_POLICIES, MegatronPlacement


@pytest.mark.parametrize(
    ("draw", "slots"), [(draw_agents, 25), (draw_mixed, 25), (draw_mixed, 100)]
)
def test_the_default_is_never_half_a_point_below_a_simple_policy(draw, slots):
    requests = draw(400, seed=1)
    rates = {}
    for policy, make in SLOT_POLICIES.items():
        config = _fit(requests, slots, None, 8192)
        engine = Engine(NoModel(), config, slot_policy=make(), placement=MegatronPlacement())
        rates[policy] = replay(engine, requests)["token_hit_rate"]
    assert rates["adaptive"] >= max(rates.values()) - 0.005, rates


@pytest.mark.parametrize("workload", ["agents", "mixed"])
def test_the_runs_that_are_kept_show_the_same_at_any_number_of_slots(workload):
    [path] = (ROOT / "docs" / "benchmarks").glob(f"drawn-{workload}-*.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    rates = {}
    for record in result["records"]:
        rates.setdefault(record["slots"], {})[record["policy"]] = record["token_hit_rate"]
    assert sorted(rates) == [25, 50, 100, 200, 400, 800]
    for of_policies in rates.values():
        assert of_policies.keys() == SLOT_POLICIES.keys()
        assert of_policies["adaptive"] >= max(of_policies.values()) - 0.005
