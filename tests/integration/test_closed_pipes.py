"""Commands whose reader has seen enough, as in `... | head`."""

import os
import signal
import subprocess
import sys

import pytest
from sources import ROOT


@pytest.mark.parametrize(
    "command",
    [["examples/prefix_reuse.py"], ["-m", "mamba_cache.cli"]],
)
def test_a_command_that_nobody_reads_ends_without_a_traceback(command):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        result = subprocess.run(
            [sys.executable, *command, "--help"],
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=False,
        )
    assert (result.returncode, result.stderr) == (-signal.SIGPIPE, b"")
