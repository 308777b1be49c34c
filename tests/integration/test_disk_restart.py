"""A second process goes on with what the first left on the disk."""

import json
import os
import subprocess
import sys

import restart_rig
from restart_rig import PROMPT_TOKENS, make_engine, run, uncached


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
