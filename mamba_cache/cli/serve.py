"""``mamba-cache serve``: transformers' own server, with a prefix cache behind its models."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mamba_cache.errors import InvalidArgumentError, MambaCacheError

__all__ = ["OPTIONS", "serve"]


OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"metavar": "MODEL", "help": "folder or hub id of the model; it is preloaded"},
    "--mamba-cache-gb": {"metavar": "GIB", "help": "budget for saved states"},
    "--kv-cache-gb": {"metavar": "GIB", "help": "budget for keys and values"},
    "--block-size-tokens": {
        "metavar": "N",
        "help": "tokens of a block; states lie at block boundaries",
    },
    "--max-requests": {
        "metavar": "N",
        "help": "requests that run at once, with --continuous-batching",
    },
    "--events-endpoint": {
        "metavar": "URL",
        "help": "where routers hear what is cached: tcp://127.0.0.1:5557 (ZMQ PUB)",
    },
    "--events-replay-endpoint": {
        "metavar": "URL",
        "help": "where routers ask for what they missed (ZMQ ROUTER)",
    },
    "--events-mode": {
        "metavar": "MODE",
        "help": "reachable: what prompts can use; resident: every KV block",
    },
    "--hash-algorithm": {
        "metavar": "NAME",
        "help": "blake2b or sha256: a client cannot forge a prefix; xxh3_128: every client is "
        "trusted",
    },
    "--hash-secret-file": {
        "metavar": "FILE",
        "help": "file that holds the key of the block digests, less a line break at its end; "
        "without a file the key is drawn",
    },
    "--host-cache-gb": {
        "metavar": "GIB",
        "type": float,
        "help": "budget for prefixes in host memory",
    },
    "--disk-cache-path": {
        "metavar": "FOLDER",
        "help": "where prefixes outlive the server; needs --host-cache-gb",
    },
    "--disk-cache-gb": {"metavar": "GIB", "help": "what everything in that folder may take"},
    "--store": {
        "metavar": "URL",
        "help": "store that servers share, such as valkey://HOST; needs --host-cache-gb and "
        "--hash-secret-file",
    },
}


def serve(
    model: str,
    *,
    mamba_cache_gb: float = 2.0,
    kv_cache_gb: float = 4.0,
    block_size_tokens: int = 32,
    max_requests: int = 64,
    events_endpoint: str | None = None,
    events_replay_endpoint: str | None = None,
    events_mode: str = "reachable",
    hash_algorithm: str = "blake2b",
    hash_secret_file: str | None = None,
    host_cache_gb: float | None = None,
    disk_cache_path: str | None = None,
    disk_cache_gb: float = 16.0,
    store: str | None = None,
    others: Sequence[str] = (),
) -> int:
    """Serve a model by OpenAI's API: `transformers serve`, with a prefix cache behind it.

    All other options are passed on: see `transformers serve --help`. The server has no
    authentication, and listens on localhost unless `--host` says otherwise.
    """
    from mamba_cache.integrations.transformers.serve import (  # noqa: PLC0415 - an extra
        installed,
    )

    secret = {} if hash_secret_file is None else {"hash_secret": _secret_in(Path(hash_secret_file))}
    with installed(
        mamba_cache_gb=mamba_cache_gb,
        kv_cache_gb=kv_cache_gb,
        block_size_tokens=block_size_tokens,
        max_requests=max_requests,
        events_endpoint=events_endpoint,
        events_replay_endpoint=events_replay_endpoint,
        events_mode=events_mode,
        hash_algorithm=hash_algorithm,
        host_cache_gb=host_cache_gb,
        disk_cache_path=disk_cache_path,
        disk_cache_gb=disk_cache_gb,
        store=store,
        **secret,
    ):
        typer = importlib.import_module("typer")  # transformers builds its commands with it
        server = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        server.command()(importlib.import_module("transformers.cli.serve").Serve)
        _check_options(typer.main.get_command(server), others)
        _run(server, model, others)
    return 0


def _check_options(command: Any, others: Sequence[str]) -> None:
    """Refuse an option that transformers does not know and that is nearly one of ours."""
    known = {"--help"}.union(*((*each.opts, *each.secondary_opts) for each in command.params))
    own = [name for name in OPTIONS if name.startswith("--")]
    for given in (each.partition("=")[0] for each in others):
        alike = get_close_matches(given, own, n=1) if given.startswith("--") else []
        if alike and given not in known:
            raise InvalidArgumentError(f"there is no option {given}: did you mean {alike[0]}?")


def _run(server: Any, model: str, others: Sequence[str]) -> None:
    """Serve a model; in a line, what transformers says in a traceback if there is none to load."""
    try:
        server(args=[model, *others], prog_name="mamba-cache serve")  # it ends the process
    except MambaCacheError:
        raise
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise InvalidArgumentError(f"{model!r} cannot be served: {said}") from error


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
