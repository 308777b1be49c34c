"""A progress bar for long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mamba_cache._extras import install_hint
from mamba_cache.errors import MissingExtraError

__all__ = ["token_progress"]


@contextmanager
def token_progress(enabled: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr while the context manager is open.

    Args:
        enabled: If False, nothing is shown.

    Yields:
        A function to call with the tokens done and the tokens in all.

    Raises:
        MissingExtraError: The bar is asked for, but rich is not installed.
    """
    if not enabled:
        yield lambda done, total: None
        return
    try:
        from rich import progress  # noqa: PLC0415 - an optional extra
        from rich.console import Console  # noqa: PLC0415 - likewise
    except ImportError as error:
        raise MissingExtraError(
            f"a progress bar needs rich: {install_hint('progress')}, or leave progress out"
        ) from error
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("tokens", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
