"""The command line, ``mamba-cache`` or ``python -m mamba_cache.cli``; needs the extra ``cli``.

Exit codes: 0 if all is well, 1 if a check or a limit failed, 2 for wrong usage.
"""

from __future__ import annotations

import signal
import sys

from mamba_cache._extras import install_hint

__all__ = ["main"]


def main() -> None:
    """Run the command that the process's arguments name, and exit."""
    if hasattr(signal, "SIGPIPE"):  # a reader that has seen enough, such as `head`, ends this too
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        from mamba_cache.cli.app import run  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "typer"):
            raise
        print(f"mamba-cache needs {error.name}: {install_hint('cli')}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run())
