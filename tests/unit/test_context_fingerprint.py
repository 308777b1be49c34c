"""All ranks decide alike, independent of what policies have learned."""

import pytest
from fingerprints import fingerprint
from shard_rig import CONFIG as SHARD_CONFIG
from shard_rig import Shard, ShardModel, Stream, shard_spec

from mamba_cache.cache import AdaptiveSlotPolicy, LruSlotPolicy
from mamba_cache.context import DynamicInferenceContext


@pytest.mark.parametrize("policy", [AdaptiveSlotPolicy, LruSlotPolicy])
def test_ranks_agree_through_200_random_steps_whatever_they_have_learned(policy, rng):
    """Memory addresses, dict order and clocks differ by rank; decisions depend on counts only."""
    seed = int(rng.integers(2**32))
    streams = []
    for _ in range(2):
        context = DynamicInferenceContext(SHARD_CONFIG, shard_spec(Shard()), slot_policy=policy())
        streams.append(Stream(context, ShardModel(Shard()), seed))
    for _ in range(200):
        for stream in streams:
            stream.step()
        assert len({fingerprint(stream.context) for stream in streams}) == 1
    stats = [stream.context.stats() for stream in streams]
    assert stats[0] == stats[1]
    assert min(stats[0].evicted_slots, stats[0].evicted_blocks, stats[0].hits) > 10
    assert (stats[0].refused_states > 10) == (policy is AdaptiveSlotPolicy)
