"""The example of the swap: it runs without Megatron, and all that it shows holds."""

import re
import subprocess
import sys

from sources import ROOT


def test_it_runs_and_skips_what_is_saved():
    example = ROOT / "examples" / "megatron_dropin.py"
    # Blocked, so that the test is the same where Megatron Core is installed.
    program = (
        "import runpy, sys; sys.modules['megatron'] = None; "
        f"runpy.run_path({str(example)!r}, run_name='__main__')"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    assert "No swap: Megatron Core is not installed" in result.stdout
    rows = re.findall(r"^ +\d+ +(\d+) +(\d+) +(\d+)  as without a cache", result.stdout, re.M)
    assert [int(skipped) for _, skipped, _ in rows] == [0, 256, 256, 256]
    assert all(int(prompt) == int(skip) + int(rest) for prompt, skip, rest in rows)
    assert len(re.findall("^holds ", result.stdout, re.M)) == 3
