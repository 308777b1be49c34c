"""Stores by URL, for settings and command lines."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.stores.mooncake import MooncakeStore
from mamba_cache.stores.protocols import BlobStore
from mamba_cache.stores.valkey import ValkeyStore

__all__ = ["open_store"]

_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def open_store(url: str) -> BlobStore:
    """Create the store that a URL names.

    ``mooncake://HOST:PORT`` (the master; extra ``mooncake``), with the options ``segment`` (memory
    that this process gives to the store, such as ``4GiB``), ``protocol`` (``tcp``, ``rdma``),
    ``device``, ``host``, ``replicas`` and ``connect`` (seconds).

    ``valkey://[USER[:PASSWORD]@]HOST[:PORT][/DB]``, or ``valkeys://`` with TLS; ``redis://`` and
    ``rediss://`` are the same. Options: ``password_env`` (the environment variable that holds the
    password, to keep it out of the URL), ``timeout`` and ``ttl`` (seconds), and for TLS the files
    ``ca``, ``cert`` and ``key``.

    Args:
        url: One of the above. Options follow a ``?``, separated by ``&``.

    Raises:
        InvalidArgumentError: The URL is of another form; the message contains no password.
        MissingExtraError: Mooncake is not installed.
    """
    if not isinstance(url, str):  # not shown, because it may contain a password
        raise InvalidArgumentError(f"store must be a str, got {type(url).__name__}")
    try:
        parts, port = _split(url)
    except ValueError:  # its message may contain the password
        raise InvalidArgumentError(
            "the store's URL must be SCHEME://[USER:PASSWORD@]HOST[:PORT][/DB], its port up to "
            "65535, with % / ? # [ ] and @ in user and password written as %25, %2F and so on"
        ) from None
    if parts.scheme not in _SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise InvalidArgumentError(f"a store must be one of {known}")
    make, allowed = _SCHEMES[parts.scheme]
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if options.keys() - allowed:  # not shown: part of a password may be taken for an option
        raise InvalidArgumentError(
            f"{parts.scheme}:// has no other options than {', '.join(allowed)}"
        )
    return make(parts, port, options)


def _split(url: str) -> tuple[SplitResult, int | None]:
    """Split a URL; return its parts and port."""
    parts = urlsplit(url)
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    if any("@" in part for part in (parts.path, parts.fragment, *names)):
        raise ValueError
    return parts, parts.port


def _mooncake(parts: SplitResult, port: int | None, options: dict[str, str]) -> BlobStore:
    if not parts.hostname or port is None:
        raise InvalidArgumentError("a store mooncake:// needs the master's HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return MooncakeStore(
        f"{host}:{port}",
        segment_bytes=_size(options, "segment", "0"),
        protocol=options.get("protocol", "tcp"),
        device=options.get("device", ""),
        host=options.get("host"),
        num_replicas=int(_number(options, "replicas", "1")),
        connect_seconds=_number(options, "connect", "1"),
    )


def _valkey(parts: SplitResult, port: int | None, options: dict[str, str]) -> BlobStore:
    if not parts.hostname:
        raise InvalidArgumentError(f"a store {parts.scheme}:// needs a HOST")
    db = parts.path.strip("/")
    if db and not db.isdecimal():
        raise InvalidArgumentError("the database, behind the host, must be a number")
    return ValkeyStore(
        parts.hostname,
        6379 if port is None else port,
        db=int(db or 0),
        username=unquote(parts.username) if parts.username else None,
        password=_password(parts, options),
        tls=_tls(options) if parts.scheme in ("valkeys", "rediss") else None,
        timeout_seconds=_number(options, "timeout", "5"),
        ttl_seconds=int(_number(options, "ttl", "0")) if "ttl" in options else None,
    )


def _password(parts: SplitResult, options: dict[str, str]) -> str | None:
    variable = options.get("password_env")
    if variable is None:
        return unquote(parts.password) if parts.password else None
    if variable not in os.environ:
        raise InvalidArgumentError("the environment has no variable of the name in password_env")
    return os.environ[variable]


def _tls(options: dict[str, str]) -> ssl.SSLContext:
    certificate, key = options.get("cert"), options.get("key")
    if key and not certificate:
        raise InvalidArgumentError("the store's key needs a cert option as well")
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if certificate:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        raise InvalidArgumentError(f"the files for TLS: {error}") from error
    return context


def _number(options: dict[str, str], name: str, default: str) -> float:
    text = options.get(name, default)
    if not re.fullmatch(r"\d{1,15}(\.\d{1,15})?", text) or not float(text):
        raise InvalidArgumentError(f"the store's {name} must be a number above 0")
    return float(text)


def _size(options: dict[str, str], name: str, default: str) -> int:
    text = options.get(name, default)
    found = re.fullmatch(r"(\d{1,18}) ?(?:([KMG])i?)?B?", text, re.IGNORECASE)
    if not found:
        raise InvalidArgumentError(f"the store's {name} must be bytes, such as 512MiB or 4GiB")
    return int(found[1]) * _UNITS[(found[2] or "").upper()]


_Maker = Callable[[SplitResult, "int | None", "dict[str, str]"], BlobStore]
_OF_VALKEY: Final = ("password_env", "timeout", "ttl")
_OF_TLS: Final = (*_OF_VALKEY, "ca", "cert", "key")
_OF_MOONCAKE: Final = (
    "segment",
    "protocol",
    "device",
    "host",
    "replicas",
    "connect",
)
_SCHEMES: Final[dict[str, tuple[_Maker, tuple[str, ...]]]] = {
    "mooncake": (_mooncake, _OF_MOONCAKE),
    "valkey": (_valkey, _OF_VALKEY),
    "valkeys": (_valkey, _OF_TLS),
    "redis": (_valkey, _OF_VALKEY),
    "rediss": (_valkey, _OF_TLS),
}
"""The constructor of each scheme's store, and the options that the scheme has."""
