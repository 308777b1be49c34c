"""``mamba-cache serve``: transformers' own server, with a prefix cache behind its models."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from mamba_cache.errors import InvalidArgumentError, MambaCacheError

__all__ = ["serve"]


def serve(  # noqa: PLR0917 - typer passes them by name
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or hub id of the model; it is preloaded.")
    ],
    mamba_cache_gb: Annotated[float, typer.Option(help="Budget for saved states in GiB.")] = 2.0,
    kv_cache_gb: Annotated[float, typer.Option(help="Budget for keys and values in GiB.")] = 4.0,
    block_size_tokens: Annotated[
        int, typer.Option(help="Tokens of a block; states lie at block boundaries.")
    ] = 32,
    max_requests: Annotated[
        int, typer.Option(help="Requests that run at once, with --continuous-batching.", min=1)
    ] = 64,
    events_endpoint: Annotated[
        str | None,
        typer.Option(help="Where routers hear what is cached: tcp://127.0.0.1:5557 (ZMQ PUB)."),
    ] = None,
    events_replay_endpoint: Annotated[
        str | None, typer.Option(help="Where routers ask for what they missed (ZMQ ROUTER).")
    ] = None,
    events_mode: Annotated[
        str, typer.Option(help="reachable: what prompts can use; resident: every KV block.")
    ] = "reachable",
    hash_algorithm: Annotated[
        str,
        typer.Option(
            help="blake2b or sha256: a client cannot forge a prefix. xxh3_128: every client is "
            "trusted."
        ),
    ] = "blake2b",
    hash_secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File that holds the key of the block digests. A line break at its end does not "
            "count. Without a file the key is drawn.",
        ),
    ] = None,
) -> None:
    """Serve a model by OpenAI's API: `transformers serve`, with a prefix cache behind it.

    All other options are passed on: see `transformers serve --help`. The server has no
    authentication, and listens on localhost unless `--host` says otherwise.
    """
    if model.startswith("-"):  # it would be an option that is passed on
        raise typer.BadParameter(f"MODEL comes before all other options, got {model} first")
    from mamba_cache.integrations.transformers.serve import (  # noqa: PLC0415 - an extra
        installed,
    )

    settings: dict[str, Any] = {"mamba_cache_gb": mamba_cache_gb, "kv_cache_gb": kv_cache_gb}
    settings["max_requests"] = max_requests
    settings |= {"events_endpoint": events_endpoint, "events_mode": events_mode}
    settings["events_replay_endpoint"] = events_replay_endpoint
    settings["hash_algorithm"] = hash_algorithm
    if hash_secret_file is not None:
        settings["hash_secret"] = _secret_in(hash_secret_file)
    with installed(**settings, block_size_tokens=block_size_tokens):
        server = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        server.command()(importlib.import_module("transformers.cli.serve").Serve)
        _run(server, model, context.args)


def _secret_in(file: Path) -> bytes:
    """Return the secret in a file; on the command line other users of the machine could read it."""
    try:
        secret = file.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"--hash-secret-file cannot be read: {error}") from error
    secret = secret.removesuffix(b"\n").removesuffix(b"\r")
    if not secret:
        raise InvalidArgumentError(f"--hash-secret-file {file} is empty")
    return secret


def _run(server: typer.Typer, model: str, options: list[str]) -> None:
    """Serve a model; in a line, what transformers says in a traceback if there is none to load."""
    try:
        ended = server(args=[model, *options], prog_name="mamba-cache serve", standalone_mode=False)
    except MambaCacheError:
        raise
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise InvalidArgumentError(f"{model!r} cannot be served: {said}") from error
    if isinstance(ended, int):  # 130 after Ctrl-C
        raise typer.Exit(ended)
