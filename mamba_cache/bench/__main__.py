"""``python -m mamba_cache.bench``: the command ``mamba-cache bench``, without any extra."""

import signal
import sys

from mamba_cache.bench.command import main

__all__: list[str] = []

if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # a reader that has seen enough, such as `head`, ends this too
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(prog="python -m mamba_cache.bench"))
