"""The directory of a disk cache: one folder for each identity, used by one process at a time.

::

    PATH/mc1-<first 32 digits of the identity>/lock            held by the process that uses it
                                              /identity.json   what it was made with, canonical
                                              /rows.json       bytes of a payload of each kind
                                              /states.slab     rows of states
                                              /kv.slab         rows of KV blocks
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import finalize

from mamba_cache.errors import InvalidArgumentError, TierInUseError
from mamba_cache.tiers.entry import EntryKind
from mamba_cache.tiers.identity import CacheIdentity

__all__ = [
    "CacheFolder",
    "FolderLock",
    "folder_of",
    "folders",
    "open_folder",
    "payload_sizes",
    "remove_folder",
    "slab_path",
]

_IDENTITY_FILE: Final = "identity.json"
_ROWS_FILE: Final = "rows.json"
_LOCK_FILE: Final = "lock"
_PATIENCE: Final = 0.05
_PREFIX: Final = "mc1-"
_SLABS: Final = {EntryKind.STATE: "states.slab", EntryKind.KV: "kv.slab"}


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """The folder of one identity.

    Attributes:
        path: Where it is.
        identity: What it was made with; None if that cannot be read.
        num_bytes: What its files take on the disk.
        used_at: When it was last opened, in seconds since 1970.
        is_in_use: Whether a process holds it.
    """

    path: Path
    identity: CacheIdentity | None
    num_bytes: int
    used_at: float
    is_in_use: bool


class FolderLock:
    """Holds a folder for this process, until ``release`` or the process's end.

    Args:
        folder: The folder, which is there.

    Raises:
        TierInUseError: Another process, or another part of this one, holds it.
        OSError: The lock cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Whoever looks whether it is held holds it for that moment: so not at the first try.
            if not _is_held(self._fd) and not _is_held(self._fd, after=_PATIENCE):
                holder = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip()
                raise TierInUseError(
                    f"{folder} is in use by process {holder or 'unknown'}: a folder of a disk "
                    "cache has one user at a time; give this process another path"
                )
            if not _is_same_file(self._fd, folder / _LOCK_FILE):
                raise TierInUseError(f"{folder} was removed while it was opened; open it again")
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except (OSError, TierInUseError):
            os.close(self._fd)
            raise
        self._pid = os.getpid()
        self._closes = finalize(self, os.close, self._fd)

    def release(self) -> None:
        """Let others have it, if they could not."""
        if self._closes.alive and os.getpid() == self._pid:
            # Processes that were forked since have the file open, too, and would keep it locked.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._closes()


def folder_of(path: Path, identity: CacheIdentity) -> Path:
    """Return where the entries of an identity are, below the path of a disk cache."""
    return path / f"{_PREFIX}{identity.digest.hex()[:32]}"


def open_folder(
    path: Path, identity: CacheIdentity, payload_bytes: Mapping[EntryKind, int]
) -> tuple[Path, FolderLock]:
    """Make the folder of an identity if there is none, and hold it.

    Args:
        path: Of the disk cache.
        identity: Whose folder.
        payload_bytes: Of each kind of entry that it holds, for whoever verifies it later.

    Raises:
        TierInUseError: Another process holds it.
        OSError: It cannot be made.
    """
    folder = folder_of(path, identity)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FolderLock(folder)
    try:
        sizes = {kind.name.lower(): size for kind, size in payload_bytes.items()}
        _write(folder / _IDENTITY_FILE, identity.canonical)
        _write(folder / _ROWS_FILE, json.dumps(sizes, sort_keys=True).encode())
        os.utime(folder)
    except OSError:
        lock.release()
        raise
    return folder, lock


def payload_sizes(folder: Path) -> dict[EntryKind, int]:
    """Return the bytes of a payload of each kind in a folder; none if that cannot be read."""
    try:
        sizes = json.loads((folder / _ROWS_FILE).read_bytes())
        return {EntryKind[kind.upper()]: int(size) for kind, size in sizes.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def slab_path(folder: Path, kind: EntryKind) -> Path:
    """Return the file with a folder's entries of one kind."""
    return folder / _SLABS[kind]


def folders(path: Path) -> list[CacheFolder]:
    """List the folders below a disk cache's path, the least recently opened first.

    One that this user may not look into counts as in use, and its bytes do not count.

    Raises:
        InvalidArgumentError: There is no such directory.
    """
    if not path.is_dir():
        raise InvalidArgumentError(f"there is no directory {path}")
    found = []
    for each in path.iterdir():
        if each.name.startswith(_PREFIX):
            with suppress(FileNotFoundError, NotADirectoryError):  # it went meanwhile, or is a file
                found.append(_look_at(each))
    return sorted(found, key=lambda folder: (folder.used_at, folder.path))


def remove_folder(folder: CacheFolder) -> None:
    """Delete a folder that nobody uses.

    Raises:
        TierInUseError: Somebody uses it.
        OSError: It cannot be deleted.
    """
    lock = FolderLock(folder.path)
    try:
        shutil.rmtree(folder.path)
    finally:
        lock.release()


def _write(file: Path, content: bytes) -> None:
    """Write a small file, all of it or nothing, unless it is there already.

    Raises:
        OSError: It cannot be written.
    """
    if file.exists() and file.read_bytes() == content:
        return
    written = file.with_suffix(".tmp")
    with open(written, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    written.replace(file)


def _look_at(folder: Path) -> CacheFolder:
    used_at = folder.stat().st_mtime
    try:
        stats = [file.stat() for file in folder.iterdir()]
        is_in_use = _is_in_use(folder)
    except PermissionError:
        return CacheFolder(folder, None, 0, used_at, is_in_use=True)
    try:
        identity = CacheIdentity((folder / _IDENTITY_FILE).read_bytes())
    except (OSError, InvalidArgumentError):
        identity = None
    num_bytes = sum(each.st_blocks * 512 for each in stats)
    return CacheFolder(folder, identity, num_bytes, used_at, is_in_use)


def _is_in_use(folder: Path) -> bool:
    try:
        fd = os.open(folder / _LOCK_FILE, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _is_held(fd)
    finally:
        os.close(fd)


def _is_held(fd: int, *, after: float = 0) -> bool:
    """Take the lock if nobody has it, and say whether it is held now."""
    time.sleep(after)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(fd: int, path: Path) -> bool:
    """Say whether a path still leads to an open file: its folder may be deleted and made anew."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
