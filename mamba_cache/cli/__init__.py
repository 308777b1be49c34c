"""The command line, ``mamba-cache`` or ``python -m mamba_cache.cli``.

Exit codes: 0 if all is well, 1 if a check or a limit failed, 2 for wrong usage.
"""

from mamba_cache.cli.app import main

__all__ = ["main"]
