"""The directory of a disk cache: one folder for each identity, used by one process at a time.

::

    PATH/secret                                                the key of hashes and MACs
        /mc1-<first 32 digits of the identity>/identity.json   the folder's identity, canonical
                                              /lock            held by the process that uses it
                                              /<key>           one entry: tenant-kind-digest-rank

Folders have mode 0700 and files 0600, and all belong to this user. Others are refused, and so are
links. ``identity.json`` is the marker of a folder: if it is missing or does not fit the folder's
name, nothing in the folder is read, changed or deleted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import finalize

from mamba_cache.errors import InvalidArgumentError, TierInUseError
from mamba_cache.tiers.entry import EntryKey, EntryKind
from mamba_cache.tiers.identity import CacheIdentity

__all__ = [
    "NEW",
    "CacheFolder",
    "FolderLock",
    "cache_secret",
    "entry_name",
    "folder_of",
    "folders",
    "named_entry",
    "open_folder",
    "open_own_file",
    "remove_folder",
]

NEW: Final = ".new"
"""Suffix of a file that is being written."""

_IDENTITY_FILE: Final = "identity.json"
_LOCK_FILE: Final = "lock"
_SECRET_FILE: Final = "secret"
_SECRET_BYTES: Final = 32
_PREFIX: Final = "mc1-"
_ENTRY: Final = re.compile(r"([0-9a-f]{32})-([sk])-((?:[0-9a-f]{32}){1,2})-(0|[1-9][0-9]{0,9})")


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """The folder of one identity."""

    path: Path
    num_bytes: int  # of all files, on the disk
    used_at: float  # when it was last opened, in seconds since 1970


class FolderLock:
    """Locks a folder for this process and keeps it open, until ``release`` or the process ends."""

    def __init__(self, folder: Path, folder_fd: int) -> None:
        self._fd = open_own_file(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, folder_fd)
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip()
                raise TierInUseError(
                    f"{folder} is in use by process {holder or 'unknown'}: a folder of a disk "
                    "cache has one user at a time; give this process another path"
                ) from None
            if not _is_same_file(self._fd, folder / _LOCK_FILE):
                raise TierInUseError(f"{folder} was removed while it was opened; open it again")
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except (OSError, TierInUseError):
            os.close(self._fd)
            raise
        self._pid = os.getpid()
        self.folder_fd = os.dup(folder_fd)
        self._closes = finalize(self, _close, self._fd, self.folder_fd)

    def release(self) -> None:
        """Unlock the folder for other processes."""
        if self._closes.alive and os.getpid() == self._pid:
            # Closing is not enough: a forked process has the file open, too, and keeps the lock.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._closes()


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def folder_of(path: Path, identity: CacheIdentity) -> Path:
    """Return the folder of an identity, below the path of a disk cache."""
    return path / f"{_PREFIX}{identity.digest.hex()[:32]}"


def cache_secret(path: str | os.PathLike[str]) -> bytes:
    """Return the secret of a disk cache; draw it if there is none.

    The file ``secret`` below the path holds the secret, with mode 0600. All processes with this
    path get the same secret.
    """
    root = Path(path).expanduser()
    with _own_folder(root, make=True) as folder:
        with suppress(FileNotFoundError):
            return _read_secret(folder, root)
        new = f"{_SECRET_FILE}.{secrets.token_hex(8)}"
        try:
            _write_new(folder, root, new, secrets.token_bytes(_SECRET_BYTES))
            # A link appears whole and replaces nothing: the first process wins.
            with suppress(FileExistsError):
                os.link(new, _SECRET_FILE, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            os.unlink(new, dir_fd=folder)
        os.fsync(folder)
        return _read_secret(folder, root)


def _read_secret(folder: int, root: Path) -> bytes:
    secret = _read(folder, root, _SECRET_FILE)
    if len(secret) != _SECRET_BYTES:
        raise InvalidArgumentError(
            f"disk_cache_path: {root / _SECRET_FILE} has {len(secret)} bytes and no secret: delete "
            "it, and the cache begins anew"
        )
    return secret


def open_folder(path: Path, identity: CacheIdentity) -> tuple[Path, FolderLock]:
    """Make the folder of an identity if there is none, and lock it."""
    name = folder_of(path, identity).name
    with _own_folder(path, make=True) as root:
        try:
            os.mkdir(name, 0o700, dir_fd=root)
        except FileExistsError:
            pass
        except OSError as error:
            raise _refusal(error, path / name, "no directory") from None
    folder = path / name
    with _own_folder(folder) as fd:
        _check_marker(fd, folder, identity)
        lock = FolderLock(folder, fd)
        try:
            _put_marker(fd, folder, identity)
            _delete(fd, [name for name in os.listdir(fd) if name.endswith(NEW)])
            os.utime(folder)
        except OSError:
            lock.release()
            raise
    return folder, lock


def _check_marker(fd: int, folder: Path, identity: CacheIdentity) -> None:
    """Check that a folder belongs to an identity, or is still empty."""
    try:
        is_ours = _read(fd, folder, _IDENTITY_FILE) == identity.canonical
    except FileNotFoundError:  # a new folder, or its process ended before it wrote the marker
        names = set(os.listdir(fd))
        if _IDENTITY_FILE in names:  # another process has written the marker meanwhile
            return _check_marker(fd, folder, identity)
        is_ours = not names - {_LOCK_FILE, _IDENTITY_FILE + NEW}
    if not is_ours:
        raise InvalidArgumentError(
            f"disk_cache_path: {folder} has other files than those of this cache: move the folder "
            "elsewhere, or give another path"
        )


def entry_name(key: EntryKey | str) -> str:
    """Return the file name of an entry; ``key`` may be the key's text."""
    return "-".join(str(key).split("/")[2:])


def named_entry(identity: CacheIdentity, name: str) -> EntryKey | None:
    """Return the key of the entry with a file name; None if no entry has such a name."""
    if (found := _ENTRY.fullmatch(name)) is None:
        return None
    tenant, kind, digest, rank = found.groups()
    tenant, digest = bytes.fromhex(tenant), bytes.fromhex(digest)
    return EntryKey(identity.digest, tenant, EntryKind(kind), digest, int(rank))


def folders(path: Path) -> list[CacheFolder]:
    """List the folders below a disk cache's path, the least recently opened first.

    The list has only folders of this user with the marker of a disk cache.
    """
    with _own_folder(path) as root:
        names = os.listdir(root)
    found = []
    for name in names:
        if name.startswith(_PREFIX):
            with suppress(OSError, InvalidArgumentError):  # deleted meanwhile, or another folder
                found.append(_look_at(path / name))
    return sorted(found, key=lambda folder: (folder.used_at, folder.path))


def remove_folder(folder: CacheFolder) -> None:
    """Delete an unused folder; files that are not the cache's are kept, and so is their folder."""
    with _own_folder(folder.path) as fd:
        identity = _read_marker(fd, folder.path)
        lock = FolderLock(folder.path, fd)
        try:
            entries = [
                name
                for name in os.listdir(fd)
                if named_entry(identity, name.removesuffix(NEW)) is not None
            ]
            # The marker is deleted last: without it no process may delete the other files.
            _delete(fd, [*entries, _IDENTITY_FILE + NEW, _IDENTITY_FILE, _LOCK_FILE])
        finally:
            lock.release()
    try:
        folder.path.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def _delete(folder: int, names: list[str]) -> None:
    """Delete files of a folder; a missing file is no error."""
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


@contextmanager
def _own_folder(path: Path, *, make: bool = False) -> Iterator[int]:
    """Open a folder that only this user can access; yield its descriptor."""
    if make:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
        except FileNotFoundError as error:  # /proc refuses every new folder like this
            raise InvalidArgumentError(
                f"disk_cache_path: {path} cannot be made: give a folder that this process may write"
            ) from error
        except OSError as error:
            raise _refusal(error, path, "below a file") from None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise _refusal(error, path, "no directory") from None
    try:
        _check_owner(fd, path, mode="700")
        yield fd
    finally:
        os.close(fd)


def open_own_file(path: Path, flags: int, folder: int) -> int:
    """Open a file that only this user can access, in a folder that ``_own_folder`` has opened."""
    # Without O_NONBLOCK, opening a pipe in place of the file would block this process.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path.name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        raise _refusal(error, path, "no file") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidArgumentError(f"disk_cache_path: {path} is no file")
        _check_owner(fd, path, mode="600")
    except InvalidArgumentError:
        os.close(fd)
        raise
    return fd


def _refusal(error: OSError, path: Path, kind: str) -> Exception:
    """Return the exception to raise for a file or folder that could not be opened."""
    if path.is_symlink():
        return InvalidArgumentError(
            f"disk_cache_path: {path} is a link, and links are not followed: remove it, or give "
            "the path that it leads to"
        )
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
        return InvalidArgumentError(f"disk_cache_path: {path} is {kind}: give a folder of your own")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return InvalidArgumentError(
            f"disk_cache_path: {path} cannot be used ({error.strerror}): give a folder that this "
            "process may write"
        )
    return error


def _check_owner(fd: int, path: Path, *, mode: str) -> None:
    """Check that an open file or folder belongs to this user, and no other user has access."""
    found = os.fstat(fd)
    user = os.geteuid()
    if found.st_uid != user:
        raise InvalidArgumentError(
            f"disk_cache_path: {path} belongs to user {found.st_uid} and not to this process's "
            f"user {user}, who could read and change the cache: chown it, or give another path"
        )
    if found.st_mode & 0o077:
        raise InvalidArgumentError(
            f"disk_cache_path: {path} has mode {stat.S_IMODE(found.st_mode):04o}, so others may "
            f"read or change the cache: chmod {mode} it, or give another path"
        )


def _read(folder: int, path: Path, name: str) -> bytes:
    """Read a small file in a folder that is open."""
    with open(open_own_file(path / name, os.O_RDONLY, folder), "rb") as file:
        return file.read()


def _write_new(folder: int, path: Path, name: str, content: bytes) -> None:
    """Write a small new file, and flush it to the disk."""
    fd = open_own_file(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _put_marker(folder: int, path: Path, identity: CacheIdentity) -> None:
    """Write the marker of a folder atomically, unless it is there."""
    if _IDENTITY_FILE in os.listdir(folder):
        return
    new = _IDENTITY_FILE + NEW
    _delete(folder, [new])  # left by a process that ended while it wrote
    _write_new(folder, path, new, identity.canonical)
    os.replace(new, _IDENTITY_FILE, src_dir_fd=folder, dst_dir_fd=folder)


def _look_at(path: Path) -> CacheFolder:
    with _own_folder(path) as fd:
        _read_marker(fd, path)
        used_at = os.fstat(fd).st_mtime
        stats = [os.stat(name, dir_fd=fd, follow_symlinks=False) for name in os.listdir(fd)]
    num_bytes = sum(each.st_blocks * 512 for each in stats)
    return CacheFolder(path, num_bytes, used_at)


def _read_marker(fd: int, path: Path) -> CacheIdentity:
    """Return the identity of a folder."""
    try:
        identity = CacheIdentity(_read(fd, path, _IDENTITY_FILE))
        if folder_of(path.parent, identity) == path:
            return identity
    except (FileNotFoundError, InvalidArgumentError):
        pass
    raise InvalidArgumentError(f"{path} is not a folder of a disk cache of this user")


def _is_same_file(fd: int, path: Path) -> bool:
    """Return whether a path still leads to an open file: a new folder may have replaced it."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
