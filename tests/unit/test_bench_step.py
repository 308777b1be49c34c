"""The step benchmark: what it measures on small sizes, and that its plain loop keeps books."""

import pytest

from mamba_cache.bench.step import PlainLoop, measure_decode_steps, measure_prompt_lives


def test_steps_are_measured_beside_a_plain_loop():
    measured = list(measure_decode_steps((1, 3), runs=2))
    assert [one.limit for one in measured] == [70, None, 140, None, None, None, None, None]
    assert [one.unit for one in measured] == ["us", "x"] * 4
    assert all(one.value > 0 for one in measured)


def test_ratios_are_held_to_limits_and_drafts_to_twice_them():
    measured = list(measure_decode_steps((64,), runs=1))
    assert [one.limit for one in measured] == [None, 0.6, None, 1.2]


@pytest.mark.parametrize("block_size", [16, 256])
def test_lives_of_prompts_are_measured_in_parts(block_size):
    (measured,) = measure_prompt_lives([(512, block_size, 1e9)], runs=2)
    assert measured.passed
    assert measured.value > 0
    assert [part.split()[0] for part in measured.detail.split(", ")] == [
        "add", "begin", "commit", "finish",
    ]  # fmt: skip


def test_the_plain_loop_describes_a_step_and_hashes_what_fills():
    loop = PlainLoop([3, 5], num_blocks=9, block_size=4)
    scheduled, (tokens, positions, slots, lengths, _, tables) = loop.begin()
    assert (tokens.tolist(), positions.tolist(), lengths.tolist()) == ([1, 1], [2, 4], [3, 5])
    assert (slots.tolist(), tables.tolist()) == ([2, 8], [[0, -1], [1, 2]])
    loop.commit(scheduled, [7, 8])
    assert [request.tokens[-1] for request in loop.running] == [7, 8]
    assert len(loop.begin()[0][0].blocks) == 1
    loop.commit(loop.running, [7, 8])
    _, (_, positions, slots, _, _, tables) = loop.begin()
    assert (positions.tolist(), slots.tolist()) == ([4, 6], [12, 10])
    assert tables.tolist() == [[0, 3], [1, 2]]
