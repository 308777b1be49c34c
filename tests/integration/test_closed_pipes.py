"""A command whose reader has seen enough, as in `... | head`."""

import os
import signal
import subprocess
import sys

from sources import ROOT


def test_a_command_that_nobody_reads_ends_without_a_traceback():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        result = subprocess.run(
            [sys.executable, "-m", "mamba_cache.cli", "--help"],
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=False,
        )
    assert (result.returncode, result.stderr) == (-signal.SIGPIPE, b"")
