"""How to install what is optional, as messages say it."""

__all__ = ["install_hint"]


def install_hint(*extras: str) -> str:
    """Return the command that brings extras, to be run in a checkout of this project.

    No package index has mamba-cache so far. Once one has, this is the only line to change.
    """
    return f"pip install -e '.[{','.join(extras)}]'"
