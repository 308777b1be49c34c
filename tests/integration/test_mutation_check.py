"""The mutation check tells mutants that a test notices from those that none does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT

pytest.importorskip("mutmut", reason="needs the extra mutation")

QUEUE = "mamba_cache/_eviction_queue.py"


def check(path: Path, test: str) -> tuple[subprocess.CompletedProcess, dict]:
    command = ["tests/mutation", "_eviction_queue.py", "--tests", test, "--json", str(path)]
    ran = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return ran, json.loads(path.read_text(encoding="utf-8"))


def test_mutants_that_a_test_notices_are_told_from_the_others(tmp_path: Path) -> None:
    """Survivors on explained lines: here, when the queue's heap is rebuilt."""
    ran, found = check(tmp_path / "result.json", "tests/unit/test_eviction_queue.py")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [part] = found["parts"]
    [counts] = found["modules"].values()
    assert counts == {kind: part[kind] for kind in counts}
    assert counts["noticed"] > 10
    assert counts["explained"] == counts["mutants"] - counts["noticed"] > 0
    assert counts["explained"] == len(part["survivors"])
    rebuild = "if len(self._heap) > 3 * len(self._priorities) + 16:"
    why = {survivor["becomes"]: survivor["why"] for survivor in part["survivors"]}
    assert why[rebuild] == "when the heap is rebuilt is a question of memory and time"


def test_an_unexplained_survivor_fails_the_check(tmp_path: Path) -> None:
    """A test of something else notices nothing, and two lines alone are explained."""
    ran, found = check(tmp_path / "result.json", "tests/unit/test_errors.py")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert found["modules"][QUEUE]["neither"] > found["modules"][QUEUE]["explained"] > 0
    assert "+ self._heap = None" in ran.stdout
    assert "+ if len(self._heap) > 3 * len(self._priorities) + 16:" not in ran.stdout


def test_an_explanation_stands_for_its_line_and_must_have_one() -> None:
    from mutation.mutants import explained_lines  # noqa: PLC0415 - needs the extra

    source = "a = 1\nif b:\n    a = 1\n"
    assert explained_lines(source, {"a = 1": "one", "if b:": "two"}) == {
        1: "one",
        2: "two",
        3: "one",
    }
    with pytest.raises(ValueError, match="c = 4"):
        explained_lines(source, {"c = 4": "gone"})


def test_what_a_decorator_has_made_changes_with_it(tmp_path: Path, monkeypatch) -> None:
    """It was made when its module was imported, before any mutant was."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "mutation")
    from mutants import mutants_of  # noqa: PLC0415 - needs the extra
    from search import _exchanges, _functions  # noqa: PLC0415

    file = tmp_path / "decorated.py"
    file.write_text(
        "def twice(method):\n"
        "    def run(number):\n"
        "        return method(number) * 2\n"
        "    return run\n"
        "@twice\n"
        "def successor(number):\n"
        "    return number + 1\n"
    )
    made: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), made)  # as importing it does
    assert made["successor"](4) == 10
    found = [one for one in mutants_of(file) if "/ 2" in one.change()[1]]
    assert [one.function for one in found] == ["twice"]
    for function, code in _exchanges(_functions({str(file)}), found[0], found[0].code()):
        function.__code__ = code
    assert made["successor"](4) == 2.5
