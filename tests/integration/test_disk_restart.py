"""A second process goes on with what the first left on the disk."""

import json
import os
import subprocess
import sys

import pytest
import restart_rig
from disk_rig import entry_files, turn_bits
from restart_rig import PROMPT_TOKENS, make_engine, run, uncached

from mamba_cache.tiers.disk import PAGE_BYTES


def in_another_process(path, *seeds):
    """What the same prompts give there: answers and skipped tokens, by seed."""
    command = [sys.executable, restart_rig.__file__, str(path), *map(str, seeds)]
    paths = os.pathsep.join(each for each in sys.path if each)
    result = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, env={**os.environ, "PYTHONPATH": paths}
    )
    return json.loads(result.stdout)


def test_a_second_process_skips_what_the_first_computed_with_equal_tokens(tmp_path) -> None:
    """At least 95% of the prompts' tokens, and at once: before it has computed anything itself."""
    engine = make_engine(tmp_path)
    first, skipped = run(engine, 1)
    engine.context.close()
    assert set(skipped) == {0}
    [(second, skipped), (third, _)] = in_another_process(tmp_path, 1, 2)
    assert second == first
    assert first == uncached(1)
    assert third == uncached(2)
    assert sum(skipped) >= 0.95 * PROMPT_TOKENS * len(skipped)
    assert min(skipped) == 160


def test_what_is_used_once_is_not_written_by_default(tmp_path) -> None:
    """At the second use it is: with the default setting, all of it after the same prompts again."""
    first = make_engine(tmp_path, write_on_use=2)
    run(first, 1)
    assert first.context.disk_tier.flush()
    assert sum(first.context.disk_tier.stats().entries.values()) == 0
    run(first, 1)
    first.context.close()
    second = make_engine(tmp_path, write_on_use=2)
    answers, skipped = run(second, 1)
    assert answers == uncached(1)
    assert set(skipped) == {160}
    second.context.close()


@pytest.mark.parametrize(
    "change",
    [{"weights": "others"}, {"hash_secret": b"another"}, {"ssm_chunk_size": 2}, {"weights": "w"}],
    ids=str,
)
def test_another_identity_finds_nothing(tmp_path, change) -> None:
    first = make_engine(tmp_path)
    run(first, 1, count=2)
    first.context.close()
    second = make_engine(tmp_path, **change)
    answers, skipped = run(second, 1, count=2)
    assert set(skipped) == ({160} if change == {"weights": "w"} else {0})
    assert answers == uncached(1)[:2]
    second.context.close()


def test_whatever_befalls_the_disk_answers_stay_the_same(tmp_path) -> None:
    """Every other file is damaged: what is whole is used, the rest is computed and counted."""
    first = make_engine(tmp_path)
    run(first, 1)
    first.context.close()
    folder = first.context.disk_tier.folder
    for number, file in enumerate(entry_files(folder)[::2]):
        turn_bits(file, PAGE_BYTES + number)
    second = make_engine(tmp_path)
    answers, skipped = run(second, 1)
    assert answers == uncached(1)
    assert sum(skipped) < 160 * 6
    stats = second.context.disk_tier.stats()
    assert set(stats.refused) == {"mac"}
    assert stats.restored + stats.refused["mac"] == stats.loads
    second.context.check_invariants()
    second.context.close()


def test_a_disk_that_brings_nothing_in_time_is_not_waited_for(tmp_path, monkeypatch) -> None:
    first = make_engine(tmp_path)
    run(first, 1, count=2)
    first.context.close()
    second = make_engine(tmp_path)
    second._scheduler._prefetch_seconds = 0.0
    monkeypatch.setattr(type(second.context.disk_tier), "load", lambda *_: True)
    answers, skipped = run(second, 1, count=2)
    assert answers == uncached(1)[:2]
    assert set(skipped) == {0}
    monkeypatch.undo()
