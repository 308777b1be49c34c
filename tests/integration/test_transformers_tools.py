"""The example of the prefix cache of transformers."""

import re
import runpy

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

from sources import ROOT

EXAMPLE = ROOT / "examples" / "transformers_script.py"


def test_the_example_computes_what_is_new_from_the_second_question_on(capsys):
    assert runpy.run_path(str(EXAMPLE))["main"]() == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^.*\? +(\d+) +(\d+) .* ms$", printed, re.M)
    skipped = [int(number) for _, number in rows]
    assert skipped == [0, 896, 896]
    computed = sum(int(length) for length, _ in rows) - sum(skipped)
    assert f"Prompt tokens computed: {computed:,} with the cache" in printed
