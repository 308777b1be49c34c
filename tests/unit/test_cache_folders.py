"""The folders of a disk cache: ownership, and files that are never touched."""

import errno
import os
import stat
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
from disk_rig import IDENTITY, make_identity, open_tier, put

from mamba_cache import InvalidArgumentError
from mamba_cache.tiers import directory as directories
from mamba_cache.tiers.directory import (
    CacheFolder,
    cache_secret,
    folder_of,
    folders,
    remove_folder,
)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def full_tier(path):
    """Open a tier without room: it would delete every folder that it takes for a cache."""
    tier = open_tier(path, states=1, blocks=1)
    assert put(tier, 1) is None
    return tier


def test_a_foreign_folder_with_our_prefix_is_not_deleted(tmp_path) -> None:
    foreign = tmp_path / "mc1-anything"
    foreign.mkdir(0o700)
    (foreign / "thesis.txt").write_bytes(b"x" * 10**6)
    full_tier(tmp_path).close()
    assert (foreign / "thesis.txt").read_bytes() == b"x" * 10**6
    assert sorted(each.name for each in foreign.iterdir()) == ["thesis.txt"]
    assert [each.path for each in folders(tmp_path)] == [folder_of(tmp_path, IDENTITY)]
    with pytest.raises(InvalidArgumentError, match="not a folder of a disk cache"):
        remove_folder(CacheFolder(foreign, 0, 0.0))
    assert (foreign / "thesis.txt").exists()


def test_a_foreign_folder_of_the_very_name_is_not_used(tmp_path) -> None:
    foreign = folder_of(tmp_path, IDENTITY)
    foreign.mkdir(0o700)
    (foreign / "thesis.txt").write_bytes(b"mine")
    with pytest.raises(InvalidArgumentError, match=r"disk_cache_path.*has other files.*elsewhere"):
        open_tier(tmp_path)
    assert [each.name for each in foreign.iterdir()] == ["thesis.txt"]


def test_a_marker_of_another_identity_is_not_trusted(tmp_path) -> None:
    open_tier(tmp_path, identity=make_identity("other weights")).close()
    other, mine = folder_of(tmp_path, make_identity("other weights")), folder_of(tmp_path, IDENTITY)
    other.rename(mine)
    with pytest.raises(InvalidArgumentError, match="has other files"):
        open_tier(tmp_path)
    assert folders(tmp_path) == []


def test_an_empty_folder_is_used_and_so_is_a_partly_made_one(tmp_path) -> None:
    folder = folder_of(tmp_path, IDENTITY)
    folder.mkdir(0o700)
    open_tier(tmp_path).close()
    (folder / "identity.json").unlink()
    (folder / "identity.json.new").write_bytes(b"{")
    open_tier(tmp_path).close()
    assert [each.path for each in folders(tmp_path)] == [folder]


def test_a_marker_that_another_process_writes_meanwhile_is_seen(tmp_path, monkeypatch) -> None:
    open_tier(tmp_path).close()
    marker = folder_of(tmp_path, IDENTITY) / "identity.json"
    content, listdir = marker.read_bytes(), os.listdir
    marker.unlink()

    def list_later(folder):
        if not marker.exists():
            marker.write_bytes(content)
            marker.chmod(0o600)
        return listdir(folder)

    monkeypatch.setattr(directories.os, "listdir", list_later)
    open_tier(tmp_path).close()


def test_a_users_files_in_a_cache_folder_survive_its_removal(tmp_path, monkeypatch) -> None:
    open_tier(tmp_path).close()
    [folder] = folders(tmp_path)
    (folder.path / "notes.txt").write_bytes(b"mine")
    remove_folder(folder)
    assert [each.name for each in folder.path.iterdir()] == ["notes.txt"]
    assert folders(tmp_path) == []
    (folder.path / "notes.txt").unlink()
    open_tier(tmp_path).close()

    def fail(_):
        raise OSError(errno.EBUSY, "mounted")

    with monkeypatch.context() as patch:
        patch.setattr(directories.Path, "rmdir", fail)
        with pytest.raises(OSError, match="mounted"):
            remove_folder(folder)
    folder.path.rmdir()
    with pytest.raises(FileNotFoundError):
        remove_folder(folder)


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o750, 0o701])
def test_a_path_that_others_may_enter_is_refused(tmp_path, mode) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    path.chmod(mode)
    for use in (open_tier, cache_secret, folders):
        with pytest.raises(InvalidArgumentError, match=f"disk_cache_path.*mode {mode:04o}.*chmod"):
            use(path)
    assert list(path.iterdir()) == []
    assert mode_of(path) == mode


@pytest.mark.parametrize("name", ["", "identity.json", "lock"])
def test_a_folder_or_file_that_others_may_change_is_refused(tmp_path, name) -> None:
    open_tier(tmp_path).close()
    changed = folder_of(tmp_path, IDENTITY) / name
    mode = 0o777 if changed.is_dir() else 0o666
    changed.chmod(mode)
    with pytest.raises(InvalidArgumentError, match=f"disk_cache_path.*mode {mode:04o}.*chmod"):
        open_tier(tmp_path)
    changed.chmod(0o700 if changed.is_dir() else 0o600)
    open_tier(tmp_path).close()


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch) -> None:
    open_tier(tmp_path).close()
    monkeypatch.setattr(directories.os, "geteuid", lambda: os.getuid() + 1)
    for use in (open_tier, cache_secret, folders):
        with pytest.raises(InvalidArgumentError, match=r"disk_cache_path.*belongs to user.*chown"):
            use(tmp_path)


def test_a_path_that_is_made_is_this_users_alone(tmp_path) -> None:
    path = tmp_path / "new" / "cache"
    mask = os.umask(0)
    try:
        tier = open_tier(path)
        cache_secret(path)
    finally:
        os.umask(mask)
    assert put(tier, 1) is None
    assert (mode_of(path), mode_of(tier.store.folder)) == (0o700, 0o700)
    assert {mode_of(file) for file in [*tier.store.folder.iterdir(), path / "secret"]} == {0o600}
    tier.close()


@pytest.mark.parametrize("name", ["lock", "identity.json"])
def test_files_are_not_opened_through_links(tmp_path, name) -> None:
    """A pipe or other non-regular file is not opened either."""
    open_tier(tmp_path / "cache").close()
    target = tmp_path / "precious"
    target.write_bytes(b"p" * 10**7)
    target.chmod(0o600)
    file = folder_of(tmp_path / "cache", IDENTITY) / name
    file.unlink()
    file.symlink_to(target)
    with pytest.raises(InvalidArgumentError, match=r"disk_cache_path.*is a link"):
        open_tier(tmp_path / "cache")
    for make in (os.mkdir, os.mkfifo):
        file.rmdir() if file.is_dir() else file.unlink()
        make(file)
        with pytest.raises(InvalidArgumentError, match=rf"disk_cache_path.*{name} is no file"):
            open_tier(tmp_path / "cache")
    file.unlink()
    file.with_name("identity.json").unlink(missing_ok=True)
    file.with_name("identity.json.new").symlink_to(target)
    open_tier(tmp_path / "cache").close()
    assert target.read_bytes() == b"p" * 10**7


def test_folders_are_not_entered_through_links(tmp_path) -> None:
    open_tier(tmp_path / "other").close()
    [other] = folders(tmp_path / "other")
    path = tmp_path / "cache"
    path.mkdir(0o700)
    (path / other.path.name).symlink_to(other.path)
    (path / "mc1-link").symlink_to(other.path)
    with pytest.raises(InvalidArgumentError, match=r"disk_cache_path.*is a link"):
        open_tier(path)
    assert folders(path) == []
    (tmp_path / "linked").symlink_to(tmp_path / "other")
    for use in (open_tier, cache_secret, folders):
        with pytest.raises(InvalidArgumentError, match=r"disk_cache_path.*is a link"):
            use(tmp_path / "linked")


# The secret.


def test_a_secret_is_drawn_once_and_kept(tmp_path) -> None:
    first = cache_secret(tmp_path / "a")
    assert len(first) == 32
    assert cache_secret(str(tmp_path / "a")) == first != cache_secret(tmp_path / "b")
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["secret"]
    assert (tmp_path / "a" / "secret").read_bytes() == first
    assert mode_of(tmp_path / "a" / "secret") == 0o600


def test_processes_that_start_at_once_have_one_secret(tmp_path) -> None:
    path, fork = tmp_path / "new" / "cache", get_context("fork")
    start, secrets = fork.Barrier(4), fork.SimpleQueue()

    def take() -> None:
        start.wait()
        secrets.put(cache_secret(path))

    processes = [fork.Process(target=take) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert {secrets.get() for _ in processes} == {cache_secret(path)}


def test_the_second_process_takes_the_secret_of_the_first(tmp_path, monkeypatch) -> None:
    """Both processes found no secret. The file appears whole, so the second process reads it."""
    link, first = os.link, []

    def link_later(*arguments, **names):
        if not first:
            first.append(None)
            first[0] = cache_secret(tmp_path)
        link(*arguments, **names)

    def fail(_):
        raise OSError(errno.EIO, "no sync")

    with monkeypatch.context() as patch:
        patch.setattr(directories, "os", SimpleNamespace(**{**vars(os), "fsync": fail}))
        with pytest.raises(OSError, match="no sync"):
            cache_secret(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(directories.os, "link", link_later)
    assert cache_secret(tmp_path) == first[0]
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


def test_a_secret_that_others_know_or_that_is_no_secret_is_refused(tmp_path) -> None:
    secret = cache_secret(tmp_path)
    file = tmp_path / "secret"
    file.chmod(0o644)
    with pytest.raises(InvalidArgumentError, match=r"disk_cache_path.*secret has mode 0644"):
        cache_secret(tmp_path)
    file.chmod(0o600)
    file.write_bytes(secret[:31])
    with pytest.raises(InvalidArgumentError, match=r"31 bytes.*delete"):
        cache_secret(tmp_path)
    file.rename(tmp_path / "other")
    file.symlink_to(tmp_path / "other")
    with pytest.raises(InvalidArgumentError, match="is a link"):
        cache_secret(tmp_path)


def test_a_path_below_a_file_is_refused_by_the_settings_name(tmp_path) -> None:
    """Regression: FileExistsError or NotADirectoryError was raised."""
    (tmp_path / "file").touch()
    for path in ("file", "file/cache", "file/deep/cache"):
        for use in (open_tier, cache_secret):
            with pytest.raises(
                InvalidArgumentError, match=r"^disk_cache_path: .* is .*: give a folder"
            ):
                use(tmp_path / path)
    # Creating a folder in /proc fails with ENOENT.
    with pytest.raises(InvalidArgumentError, match=r"^disk_cache_path: /proc/x cannot be made"):
        cache_secret(Path("/proc/x"))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("at", ["the path", "a folder in it"])
def test_a_path_that_cannot_be_written_is_refused_by_the_settings_name(
    tmp_path, monkeypatch, number, at
) -> None:
    make = os.mkdir

    def fail(path, mode=0o777, *, dir_fd=None):
        if (dir_fd is None) == (at == "the path"):
            raise OSError(number, os.strerror(number), path)
        make(path, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", fail)
    kind = OSError if number == errno.EIO else InvalidArgumentError
    with pytest.raises(
        kind, match="Input/output" if kind is OSError else r"^disk_cache_path: .*may"
    ):
        open_tier(tmp_path / "new")
