"""The mutation check tells mutants that a test notices from those that none does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT

pytest.importorskip("mutmut", reason="needs the extra mutation")


def test_mutants_that_a_test_notices_are_told_from_the_others(tmp_path: Path) -> None:
    """One file's unit tests leave it to the property tests when the queue's heap is rebuilt."""
    result = tmp_path / "result.json"
    tests = "tests/unit/test_eviction_queue.py"
    command = ["tests/mutation", "_eviction_queue.py", "--tests", tests, "--json", str(result)]
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    found = json.loads(result.read_text(encoding="utf-8"))
    assert list(found["modules"]) == ["mamba_cache/_eviction_queue.py"]
    assert found["modules"]["mamba_cache/_eviction_queue.py"]["killed"] > 10
    assert {survivor["function"] for survivor in found["survivors"]} == {"EvictionQueue.push"}
    rebuild = "if len(self._heap) > 3 * len(self._priorities) + 16:"
    assert rebuild in [survivor["becomes"] for survivor in found["survivors"]]
    assert f"+ {rebuild}" in ran.stdout
