"""How to install what is optional, as messages say it."""

from pathlib import Path

__all__ = ["install_hint"]


def install_hint(*extras: str) -> str:
    """Return the command that brings extras, in a checkout of this project or without one.

    No package index has mamba-cache so far. Where it is installed from a wheel, pip finds it there
    and needs the index only for what the extras bring.
    """
    is_checkout = (Path(__file__).parents[1] / "pyproject.toml").is_file()
    what = "-e '." if is_checkout else "'mamba-cache"
    return f"pip install {what}[{','.join(extras)}]'"
