"""Optional dependencies: the command that installs them, and installed versions."""

from importlib import metadata
from pathlib import Path

__all__ = ["install_hint", "installed_version"]


def install_hint(*extras: str) -> str:
    """Return the command that installs extras, in a checkout of this project or without one.

    No package index has mamba-cache so far. If it is installed from a wheel, pip uses that, and
    needs the index only for the dependencies.
    """
    is_checkout = (Path(__file__).parents[1] / "pyproject.toml").is_file()
    what = "-e '." if is_checkout else "'mamba-cache"
    return f"pip install {what}[{','.join(extras)}]'"


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
