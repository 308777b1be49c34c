"""The default policy beside the simple ones, on traces drawn from seeds."""

import pytest
from drawn_traces import draw_agents, draw_mixed

from mamba_cache.cli.replay import run_replay


@pytest.mark.parametrize(
    ("draw", "slots"), [(draw_agents, 25), (draw_mixed, 25), (draw_mixed, 100)]
)
def test_the_default_is_never_half_a_point_below_a_simple_policy(draw, slots):
    records = run_replay(draw(200, seed=1), slots=[slots])["records"]
    rates = {record["policy"]: record["token_hit_rate"] for record in records}
    assert rates["adaptive"] >= max(rates.values()) - 0.005, rates
