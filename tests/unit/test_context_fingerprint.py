"""Ranks whose next steps would differ are told apart before those steps."""

import pytest
import torch
from context_rig import MODEL, add, make_config, make_context
from fingerprints import fingerprint
from shard_rig import CONFIG as SHARD_CONFIG
from shard_rig import Shard, ShardModel, Stream, shard_spec

from mamba_cache import DeviceTokens
from mamba_cache.context import DynamicInferenceContext
from mamba_cache.slots import AdaptiveSlotPolicy, ScoreSlotPolicy

DRAFTS = 2


@pytest.fixture
def ranks():
    config = make_config(num_speculative_tokens=DRAFTS, hash_secret=b"equal")
    made = [make_context(config) for _ in range(2)]
    for context in made:
        add(context, "old", [3, 1, 4])
        step(context, {"old": 9})
    assert agree(made)
    return made


def step(context, tokens, **options):
    begun = context.begin_step(**options)
    MODEL.forward(begun.metadata, context)
    context.commit_step(tokens)


def nothing_taken():
    return DeviceTokens(torch.zeros(1, 1 + DRAFTS, dtype=torch.int64), torch.tensor([0]).int())


def agree(ranks):
    return fingerprint(ranks[0]) == fingerprint(ranks[1])


def test_ranks_that_do_the_same_agree_after_every_call(ranks):
    for call in (
        lambda context: add(context, "new", [2, 7, 1, 8], chunk_tokens=3),
        lambda context: context.begin_step(decode_ids=["old"], drafts={"old": [4]}),
        lambda context: context.commit_step({"old": [4, 6]}),
        lambda context: context.preempt("new"),
        lambda context: step(context, nothing_taken()),
        lambda context: context.resume_request("new"),
        lambda context: context.collect_step(),
    ):
        before = fingerprint(ranks[0])
        call(ranks[0])
        # A collection that brings nothing is one that changes what the next step may do.
        assert fingerprint(ranks[0]) != before
        call(ranks[1])
        assert agree(ranks)


@pytest.mark.parametrize("policy", [AdaptiveSlotPolicy, ScoreSlotPolicy])
def test_ranks_agree_through_200_random_steps_whatever_they_have_learned(policy, rng):
    """Each knows its own memory, order of dicts and clock; what decides is counts alone."""
    seed = int(rng.integers(2**32))
    streams = []
    for _ in range(2):
        context = DynamicInferenceContext(SHARD_CONFIG, shard_spec(Shard()), slot_policy=policy())
        streams.append(Stream(context, ShardModel(Shard()), seed))
    for _ in range(200):
        for stream in streams:
            stream.step()
        assert agree([stream.context for stream in streams])
    stats = [stream.context.stats() for stream in streams]
    assert stats[0] == stats[1]
    assert min(stats[0].evicted_slots, stats[0].evicted_blocks, stats[0].hits) > 10
    assert (stats[0].refused_states > 10) == (policy is AdaptiveSlotPolicy)
