"""The mutation check tells mutants that a test notices from those that none does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT

pytest.importorskip("mutmut", reason="needs the extra mutation")

QUEUE = "mamba_cache/_eviction_queue.py"
REBUILD = "if len(self._heap) > 3 * len(self._priorities) + 16:"


def check(test: str) -> tuple[int, str, dict[str, int]]:
    """The exit code, what is printed, and the counts of the module."""
    command = [sys.executable, "tests/mutation", "_eviction_queue.py", "--tests", test]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    [row] = re.findall(rf"^\| `{QUEUE}` \| ([\d |]+) \|", ran.stdout, re.MULTILINE)
    names = ("mutants", "noticed", "explained", "neither")
    return ran.returncode, ran.stdout, dict(zip(names, map(int, row.split(" | ")), strict=True))


def test_mutants_that_a_test_notices_are_told_from_the_others() -> None:
    """Survivors on explained lines: here, when the queue's heap is rebuilt."""
    status, printed, counts = check("tests/unit/test_eviction_queue.py")
    assert status == 0, printed
    assert counts["noticed"] > 10
    assert counts["explained"] == counts["mutants"] - counts["noticed"] > 0
    assert "| when the heap is rebuilt is a question of memory and time |" in printed


def test_an_unexplained_survivor_fails_the_check() -> None:
    """A test of something else notices nothing, and two lines alone are explained."""
    status, printed, counts = check("tests/unit/test_errors.py")
    assert status == 1, printed
    assert counts["neither"] > counts["explained"] > 0
    assert "+ self._heap = None" in printed
    assert f"+ {REBUILD}" not in printed


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
