"""``mamba-cache serve``: transformers' own server, with a prefix cache behind its models."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mamba_cache.cli.output import Option
from mamba_cache.errors import InvalidArgumentError, MambaCacheError

__all__ = ["OPTIONS", "serve"]


OPTIONS: tuple[Option, ...] = (
    ("model", "MODEL", None, "folder or hub id of the model; it is preloaded"),
    ("--mamba-cache-gb", "GIB", 2.0, "budget for saved states"),
    ("--kv-cache-gb", "GIB", 4.0, "budget for keys and values"),
    ("--block-size-tokens", "N", 32, "tokens of a block; states lie at block boundaries"),
    ("--max-requests", "N", 64, "requests that run at once, with --continuous-batching"),
    ("--events-endpoint", "URL", None, "events of the cache for routers: tcp://127.0.0.1:5557"),
    ("--events-replay-endpoint", "URL", None, "where routers ask for events that they missed"),
    ("--host-cache-gb", "GIB", None, "budget for prefixes in host memory"),
    ("--disk-cache-path", "FOLDER", None,
     "keeps prefixes when the server ends; needs --host-cache-gb"),
    ("--disk-cache-gb", "GIB", 16.0, "budget for all files in that folder"),
    ("--store", "URL", None,
     "store that servers share; needs --host-cache-gb, --hash-secret-file"),
    ("--hash-secret-file", "FILE", None, "file with the key of the block digests; a line break at "
     "its end is no part of the key (default: a random key)"),
)  # fmt: skip
"""All but the first and the last are settings of ``serve.install``, which has more settings."""


def serve(options: Namespace) -> None:
    """Serve a model by OpenAI's API: `transformers serve`, with a prefix cache behind it.

    All other options are passed on: see `transformers serve --help`. The server has no
    authentication, and listens on localhost unless `--host` says otherwise.
    """
    from mamba_cache.integrations.transformers.serve import (  # noqa: PLC0415 - an extra
        installed,
    )

    names = [option.removeprefix("--").replace("-", "_") for option, *_ in OPTIONS[1:-1]]
    settings = {name: getattr(options, name) for name in names}
    if options.hash_secret_file is not None:
        settings["hash_secret"] = _secret_in(Path(options.hash_secret_file))
    with installed(**settings):
        typer = importlib.import_module("typer")  # transformers builds its commands with it
        server = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        server.command()(importlib.import_module("transformers.cli.serve").Serve)
        _check_options(typer.main.get_command(server), options.others)
        try:  # the server ends the process
            server(args=[options.model, *options.others], prog_name="mamba-cache serve")
        except MambaCacheError:
            raise
        except (OSError, ValueError) as error:  # the model cannot be loaded
            reason = " ".join(str(error).split())
            raise InvalidArgumentError(f"{options.model!r} cannot be served: {reason}") from error


def _check_options(command: Any, others: Sequence[str]) -> None:
    """Refuse an option that transformers does not know and that resembles one of ours."""
    known = {"--help"}.union(*((*each.opts, *each.secondary_opts) for each in command.params))
    own = [option for option, *_ in OPTIONS[1:-1]]
    for given in (each.partition("=")[0] for each in others):
        alike = get_close_matches(given, own, n=1) if given.startswith("--") else []
        if alike and given not in known:
            raise InvalidArgumentError(f"there is no option {given}: did you mean {alike[0]}?")


def _secret_in(file: Path) -> bytes:
    """Read the secret from a file: other users of the machine can read the command line."""
    try:
        secret = file.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"--hash-secret-file cannot be read: {error}") from error
    secret = secret.removesuffix(b"\n").removesuffix(b"\r")
    if not secret:
        raise InvalidArgumentError(f"--hash-secret-file {file} is empty")
    return secret
