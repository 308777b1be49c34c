"""``mamba-cache doctor --store``: what it says of stores that work, and of stores that do not."""

import pytest
from faulty_store import FaultyStore, Trouble

from mamba_cache.cli import doctor
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.stores import MemoryStore, StoreFault

ALL = ["store", "put", "exists", "get", "remove"]


@pytest.fixture
def faulty(monkeypatch):
    """The store that the doctor is given, with chunks that are quickly drawn."""
    store = FaultyStore(MemoryStore())
    monkeypatch.setattr(doctor, "_STORE_CHUNK_BYTES", 4096)
    monkeypatch.setattr(doctor, "open_store", lambda url: store)
    return store


def check():
    return {each.name: each for each in doctor.check_store("memory://")}


def test_a_store_that_works(monkeypatch):
    monkeypatch.setattr(doctor, "_STORE_CHUNK_BYTES", 4096)
    found = check()
    assert list(found) == ALL
    assert {each.status for each in found.values()} == {"ok"}
    assert "16 chunks of 0 MiB in " in found["get"].detail


@pytest.mark.parametrize(
    ("call", "trouble", "fault", "failed", "said"),
    [
        ("health", Trouble.FAIL, StoreFault.UNREACHABLE, "store", "injected"),
        ("health", Trouble.FAIL, StoreFault.DENIED, "store", "injected"),
        ("exists_many", Trouble.FAIL, StoreFault.TIMED_OUT, "exists remove", "16 timed_out"),
        ("put_many", Trouble.FAIL, StoreFault.FULL, "put", "16 full"),
        ("put_many", Trouble.DROP, None, "exists", "16 missing"),
        ("put_many", Trouble.LOSE, None, "exists", "16 missing"),
        ("get_many_into", Trouble.FAIL, StoreFault.TRANSFER_FAILED, "get", "16 transfer_failed"),
        ("get_many_into", Trouble.TEAR, None, "get", "16 transfer_failed"),
        ("get_many_into", Trouble.FLIP, None, "get", "chunks are not what was put"),
        ("get_many_into", Trouble.ZERO, None, "get", "chunks are not what was put"),
        ("get_many_into", Trouble.TRUNCATE, None, "get", "chunks are not what was put"),
        ("get_many_into", Trouble.SWAP, None, "get", "chunks are not what was put"),
        ("remove", Trouble.FAIL, StoreFault.LEASED, "remove", "16 leased"),
        ("remove", Trouble.DROP, None, "remove", "16 there"),
    ],
)
def test_what_is_wrong_is_named_where_it_is(faulty, call, trouble, fault, failed, said):
    faulty.inject(call, trouble, fault=fault or StoreFault.UNREACHABLE)
    found = check()
    names = failed.split()
    assert [name for name, each in found.items() if each.status == "failed"] == names
    for name in names:
        assert said in found[name].detail
        assert found[name].advice or call == "remove"
    if call != "remove" and failed in ("put", "get"):
        assert found["remove"].status == "ok"  # nothing is left behind


def test_a_lease_is_waited_for(faulty):
    faulty.inject("remove", Trouble.FAIL, fault=StoreFault.LEASED, times=20)
    assert check()["remove"].status == "ok"


@pytest.mark.parametrize("call", ["health", "put_many", "remove"])
def test_a_store_that_never_answers(faulty, call, monkeypatch):
    monkeypatch.setattr(doctor, "_STORE_SECONDS", 0.2)
    faulty.inject(call, Trouble.HANG)
    *_, last = check().values()
    assert last.status == "failed"
    assert "no answer within" in last.detail
    faulty.heal()


def test_a_store_that_breaks_its_word_and_raises(faulty):
    faulty.inject("put_many", Trouble.RAISE)
    assert "asked for" in check()["answer"].detail


def test_what_cannot_be_opened(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mooncake", None)
    [found] = doctor.check_store("mooncake://127.0.0.1:1")
    assert (found.name, found.status) == ("store", "failed")
    assert "mooncake" in found.detail
    with pytest.raises(InvalidArgumentError, match="must be one of"):
        list(doctor.check_store("ftp://127.0.0.1"))
