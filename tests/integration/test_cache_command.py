"""``mamba-cache cache``: a disk cache is listed, verified and pruned."""

import errno
import json
import os
import sys
from datetime import datetime, timedelta, timezone

import pytest
from disk_rig import IDENTITY, STATE_BYTES, make_identity, open_tier, put

from mamba_cache.cli import cache as command
from mamba_cache.cli.app import run
from mamba_cache.errors import TierInUseError
from mamba_cache.tiers import EntryKind
from mamba_cache.tiers import slab as slabs
from mamba_cache.tiers.directory import folder_of, payload_sizes, slab_path
from mamba_cache.tiers.slab import PAGE_BYTES, row_bytes_of

OTHER = make_identity("other weights")


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a command in this process; returns its exit code, stdout and stderr."""

    def run_command(*arguments):
        monkeypatch.setattr(sys, "argv", ["mamba-cache", "cache", *map(str, arguments)])
        try:
            code = run()
        except SystemExit as exit:
            code = exit.code or 0
        return code, *capsys.readouterr()

    return run_command


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(slabs, "_GROWTH_BYTES", 1)


@pytest.fixture
def path(tmp_path):
    """Two folders: of three states and two blocks, and of one state."""
    for identity, states, blocks in ((IDENTITY, 3, 2), (OTHER, 1, 0)):
        tier = open_tier(tmp_path, states=20, identity=identity)
        for number in range(states):
            assert put(tier, number, identity=identity) is None
        for number in range(blocks):
            assert put(tier, number, EntryKind.KV, identity=identity) is None
        tier.close()
    for age, identity in ((10, IDENTITY), (1, OTHER)):
        at = (datetime.now(timezone.utc) - timedelta(days=age)).timestamp()
        os.utime(folder_of(tmp_path, identity), (at, at))
    return tmp_path


def damage(path, offset=PAGE_BYTES + 5, row=1):
    with slab_path(folder_of(path, IDENTITY), EntryKind.STATE).open("r+b") as file:
        file.seek(row * row_bytes_of(STATE_BYTES) + offset)
        file.write(b"?")


def names(path):
    return sorted(each.name for each in path.iterdir())


def test_folders_are_listed(call, path) -> None:
    code, out, _ = call("ls", path, "--json")
    first, second = json.loads(out)["folders"]
    assert code == 0
    assert (first["model"], first["weights"], first["rank"]) == ("model", "w", 0)
    assert (first["states"], first["kv_blocks"], first["in_use"]) == (3, 2, False)
    assert (second["weights"], second["states"], second["kv_blocks"]) == ("other weights", 1, 0)
    assert first["bytes"] >= 3 * row_bytes_of(STATE_BYTES)
    code, out, _ = call("ls", path)
    assert code == 0
    assert all(text in out for text in ("other weights", "model", first["folder"]))


def test_what_is_in_use_or_cannot_be_read_is_listed_too(call, path) -> None:
    tier = open_tier(path, states=20)
    (folder_of(path, OTHER) / "rows.json").write_text("[]")
    listed = {each["folder"]: each for each in json.loads(call("ls", path, "--json")[1])["folders"]}
    assert listed[tier.folder.name]["in_use"]
    unknown = listed[folder_of(path, OTHER).name]
    assert unknown["states"] == 0
    assert "in use" in call("ls", path)[1]
    tier.close()


def test_what_is_whole_passes(call, path) -> None:
    code, out, _ = call("verify", path, "--json")
    result = json.loads(out)
    assert (code, result["passed"]) == (0, True)
    assert [each["states"] for each in result["folders"]] == [3, 1]
    assert [each["bad"] for each in result["folders"]] == [{}, {}]
    assert "none" in call("verify", path)[1]


def test_damage_is_found_counted_by_reason_and_erased_if_asked(call, path) -> None:
    damage(path)
    damage(path, offset=20, row=2)
    code, out, _ = call("verify", path, "--json")
    first = json.loads(out)["folders"][0]
    assert (code, first["bad"]) == (1, {"checksum": 1, "payload_digest": 1})
    assert first["states"] == 1
    code, out, _ = call("verify", path, "--erase")
    assert (code, "1 checksum, 1 payload_digest" in out) == (1, True)
    code, out, _ = call("verify", path, "--json")
    first = json.loads(out)["folders"][0]
    assert (code, first["bad"], first["states"]) == (0, {}, 1)


def test_entries_of_others_in_a_folder_are_bad(call, path) -> None:
    slab = slab_path(folder_of(path, IDENTITY), EntryKind.STATE)
    slab.write_bytes(slab_path(folder_of(path, OTHER), EntryKind.STATE).read_bytes())
    (folder_of(path, OTHER) / "rows.json").write_text(json.dumps({"kv": STATE_BYTES}))
    states = slab_path(folder_of(path, OTHER), EntryKind.STATE)
    states.rename(slab_path(folder_of(path, OTHER), EntryKind.KV))
    first, second = json.loads(call("verify", path, "--json")[1])["folders"]
    assert first["bad"] == {"identity": 1}
    assert second["bad"] == {"kind": 1}
    slab.unlink()
    assert call("verify", path, "--json")[0] == 1


def test_rows_that_cannot_be_read_are_bad(call, path, monkeypatch) -> None:
    def refuse(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(slabs.os, "preadv", refuse)
    code, out, _ = call("verify", path, "--json")
    assert code == 1
    assert [each["bad"] for each in json.loads(out)["folders"]] == [
        {"io_error": 5}, {"io_error": 1},
    ]  # fmt: skip


def test_what_is_in_use_is_not_verified(call, path) -> None:
    tier = open_tier(path, states=20)
    code, out, _ = call("verify", path, "--json")
    assert code == 0
    assert {each["folder"]: each["in_use"] for each in json.loads(out)["folders"]} == {
        tier.folder.name: True,
        folder_of(path, OTHER).name: False,
    }
    assert "left out" in call("verify", path)[1]
    tier.close()


def test_pruning_by_age_by_size_and_all(call, path) -> None:
    old, new = folder_of(path, IDENTITY).name, folder_of(path, OTHER).name
    result = json.loads(call("prune", path, "--older-than", 5, "--dry-run", "--json")[1])
    assert (result["deleted"], names(path)) == ([old], sorted([old, new]))
    size = json.loads(call("ls", path, "--json")[1])["folders"][1]["bytes"]
    result = json.loads(call("prune", path, "--keep", size / 2**30, "--json")[1])
    assert (result["deleted"], result["left_bytes"]) == ([old], size)
    assert names(path) == [new]
    assert call("prune", path, "--older-than", 5)[1].startswith("0 of 1 folders deleted")
    assert "1 of 1 folders would be deleted" in call("prune", path, "--all", "--dry-run")[1]
    assert call("prune", path, "--all")[0] == 0
    assert names(path) == []


def test_what_is_in_use_is_not_pruned(call, path, monkeypatch) -> None:
    tier = open_tier(path, states=20)
    assert call("prune", path, "--all")[0] == 0
    assert names(path) == [tier.folder.name]
    tier.close()

    def taken(folder):
        raise TierInUseError("since")

    monkeypatch.setattr(command, "remove", taken)
    assert json.loads(call("prune", path, "--all", "--json")[1])["deleted"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ls", "nowhere"), "there is no directory nowhere"),
        (("prune", "."), "say what to delete"),
        (("prune", ".", "--keep", "-1"), "--keep"),  # it deleted everything
        (("prune", ".", "--older-than", "-1"), "--older-than"),
        ((), ""),
    ],
)
def test_wrong_usage(call, arguments, said) -> None:
    code, _, err = call(*arguments)
    assert (code, said in err) == (2, True)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"x": 1}', '{"kv": "y"}', '{"kv": null}'])
def test_sizes_that_cannot_be_read_are_none(tmp_path, content) -> None:
    (tmp_path / "rows.json").write_text(content)
    assert payload_sizes(tmp_path) == {}
