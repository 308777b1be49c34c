"""Prefixes of transformers models in lower tiers, which survive a restart of the process."""

import gc
import json
import os
import subprocess
import sys
import weakref
from dataclasses import fields, replace
from shutil import copytree

import notebook_rig
import pytest
import torch
from clocks import ManualClock
from disk_rig import entry_files, turn_bits
from faulty_store import FaultyStore, Trouble
from memory_store import MemoryStore
from notebook_rig import REUSABLE, ask, open_cache, prompts
from transformers_rig import BLOCK, GREEDY, budgets, make_cache, make_model, plain

from mamba_cache.context import prefetch
from mamba_cache.errors import ModelChangedError, TierInUseError
from mamba_cache.integrations.transformers import tiers as prefix_tiers
from mamba_cache.stores import StoreFault
from mamba_cache.tiers import Numerics, entry, lower, rows, transfers
from mamba_cache.tiers.disk import PAGE_BYTES

FAMILY = "granite 4"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """The package's clock jumps in tests, so loads from disk have no deadline."""
    monkeypatch.setattr(prefix_tiers, "_DEADLINE_SECONDS", None)


@pytest.fixture(scope="module")
def model():
    return make_model(FAMILY)


@pytest.fixture(scope="module")
def expected(model):
    return [plain(model, ids).sequences[0].tolist() for ids in prompts()]


def test_a_second_process_skips_what_the_first_computed_with_equal_answers(tmp_path) -> None:
    command = [sys.executable, notebook_rig.__file__, str(tmp_path), FAMILY]
    paths = os.pathsep.join(each for each in sys.path if each)
    environment = {**os.environ, "PYTHONPATH": paths}
    results = [
        json.loads(
            subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout
        )
        for _ in range(2)
    ]
    (first, skipped_first), (second, skipped) = results
    assert first == second
    assert skipped_first == 0
    assert skipped == sum(REUSABLE)


@pytest.fixture
def clock(monkeypatch):
    """The clock of stores, which stands still."""
    clock = ManualClock()
    for module in (lower, prefetch):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture(params=["disk", "store"])
def below(request, tmp_path):
    """Settings of caches over one disk, or over one store."""
    if request.param == "disk":
        return {"disk_cache_path": tmp_path, "disk_cache_gb": 0.05}
    request.getfixturevalue("clock")
    return {"store": MemoryStore(), "hash_secret": b"of this test"}


@pytest.mark.parametrize("family", [FAMILY, "mamba2"])
def test_the_next_cache_goes_on_with_what_lies_below(below, family) -> None:
    """The same prompts are found whole, and prompts that continue them."""
    model, settings = make_model(family), {"host_cache_gb": 0.01, **below}
    with make_cache(model, **settings) as first:
        answers, skipped = ask(first, prompts())
        assert skipped == 0
    assert answers == [plain(model, ids).sequences[0].tolist() for ids in prompts()]
    with make_cache(make_model(family), **settings) as second:
        assert ask(second, prompts()) == (answers, sum(REUSABLE))
        host, tier = second.tier_stats()
        assert (host.name, tier.refused) == ("host", {})
        assert tier.name == ("store" if "store" in below else "disk")
    longer = [torch.tensor([[*answer, 7, 8, 9]]) for answer in answers]
    with make_cache(model, **settings) as third:
        found, skipped = ask(third, longer)
        assert found == [plain(model, ids).sequences[0].tolist() for ids in longer]
        assert skipped >= 0.9 * sum(map(len, answers))


def test_other_weights_settings_secrets_and_salts_find_nothing(below, model) -> None:
    ids, settings = prompts()[0], {"host_cache_gb": 0.01, **below}
    with make_cache(model, **settings) as first:
        ask(first, [ids])
    changed = make_model(FAMILY)
    with torch.no_grad():
        next(changed.parameters())[0, 0] += 1e-3
    with make_cache(changed, **settings) as second:
        assert ask(second, [ids])[1] == 0
        assert second.tier_stats()[1].restored == 0
    other = make_model(FAMILY)
    other.config.attention_multiplier = 2.0
    for one, own in (
        (other, {}),
        (model, {"block_size_tokens": 2 * BLOCK}),
        *([(model, {"hash_secret": b"another"})] if "store" in below else []),
    ):
        with make_cache(one, **{**settings, **own}) as third:
            assert ask(third, [ids])[1] == 0
    with make_cache(model, **settings) as fourth:
        fourth.generate(ids, cache_salt="other", **GREEDY)
        assert fourth.stats().skipped_tokens == 0


def test_what_no_longer_fits_beside_the_model_is_found_in_host_memory(model, expected) -> None:
    probe = make_cache(model)
    small = make_cache(model, **budgets(probe, slots=3, blocks=18), host_cache_gb=0.01)
    ask(small, prompts())
    answers, skipped = ask(small, prompts())
    assert answers == expected
    assert skipped == sum(REUSABLE)
    assert [stats.name for stats in small.tier_stats()] == ["host"]
    assert small.tier_stats()[0].restored > 0
    assert probe.tier_stats() == ()


def test_a_change_of_the_weights_is_noticed_and_reset_takes_them_as_they_are(tmp_path) -> None:
    model = make_model(FAMILY)
    with open_cache(tmp_path, model) as cache:
        ask(cache, prompts()[:1])
        with torch.no_grad():
            next(model.parameters()).mul_(1.5)
        with pytest.raises(ModelChangedError):
            ask(cache, prompts()[:1])
        disk = weakref.ref(cache._store.tiers.lower_tiers[0])
        cache.reset()
        answers, skipped = ask(cache, prompts()[:1])
        assert skipped == 0
        gc.collect()
        assert disk() is None  # a model in training has new weights at each step
        assert answers == [plain(model, prompts()[0]).sequences[0].tolist()]
        cache.reset()  # drops host memory; entries are found on the disk
        assert ask(cache, prompts()[:1]) == (answers, REUSABLE[0])


def test_whatever_befalls_the_disk_answers_stay_the_same(tmp_path, model, expected) -> None:
    with open_cache(tmp_path, model) as first:
        ask(first, prompts())
        folder = first._store.tiers.lower_tiers[0].store.folder
    for number, file in enumerate(entry_files(folder)[::3]):
        turn_bits(file, PAGE_BYTES + number)
    with open_cache(tmp_path, model) as second:
        answers, skipped = ask(second, prompts())
        assert answers == expected
        assert skipped < sum(REUSABLE)
        assert second.tier_stats()[1].refused["mac"] > 0


def test_a_call_whose_deepest_boundary_is_damaged_takes_the_one_before(tmp_path, model) -> None:
    with open_cache(tmp_path, model) as first:
        ask(first, [prompts()[0][:, : 5 * BLOCK + 3]])
        answers, _ = ask(first, prompts()[:1])
        folder = first._store.tiers.lower_tiers[0].store.folder
    depths = {
        entry._FIELDS.unpack_from(file.read_bytes())[7]: file
        for file in entry_files(folder)
        if "-s-" in file.name
    }
    turn_bits(depths[REUSABLE[0]], PAGE_BYTES)
    with open_cache(tmp_path, model) as second:
        assert ask(second, prompts()[:1]) == (answers, 5 * BLOCK)
        assert second.tier_stats()[1].refused["mac"] == 1


def test_damage_in_host_memory_is_noticed(model, expected) -> None:
    probe = make_cache(model)
    small = make_cache(model, **budgets(probe, slots=3, blocks=18), host_cache_gb=0.01)
    ask(small, prompts())
    for memory in small._store.tiers.host.memory.values():
        for row in range(memory.num_ready):
            memory.row(row)[3] ^= 4
    answers, _ = ask(small, prompts())
    assert answers == expected
    assert small.tier_stats()[0].refused["payload_digest"] > 0


def test_a_full_cache_takes_what_there_is_room_for(tmp_path, model, expected) -> None:
    with open_cache(tmp_path, model) as first:
        ask(first, prompts())
    probe = make_cache(model)
    with open_cache(tmp_path, model, **budgets(probe, slots=1, blocks=4)) as tiny:
        assert ask(tiny, prompts())[0] == expected


def test_a_call_that_breaks_off_leaves_the_tiers_usable(
    tmp_path, model, expected, monkeypatch
) -> None:
    with open_cache(tmp_path, model) as cache:
        with monkeypatch.context() as patch:
            patch.setattr(transfers.PlainTransfers, "spill", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                ask(cache, prompts()[:1])
        assert ask(cache, prompts())[0] == expected


@pytest.mark.parametrize("name", ["_use", "_lease"])
def test_a_change_of_host_memory_that_breaks_off_leaves_the_tiers_usable(
    tmp_path, model, expected, monkeypatch, name
) -> None:
    """The change breaks off during a load from disk; later calls, reset and close hung after it."""
    with open_cache(tmp_path, model) as first:
        ask(first, prompts())
    with open_cache(tmp_path, model) as cache:
        with monkeypatch.context() as patch:
            patch.setattr(rows.HostRows, name, _interrupted)
            with pytest.raises(KeyboardInterrupt):
                ask(cache, prompts()[:1])
        assert ask(cache, prompts())[0] == expected
        cache.check_invariants()


def _interrupted(*_, **__):
    raise KeyboardInterrupt


def test_a_disk_belongs_to_one_cache(tmp_path, model) -> None:
    with open_cache(tmp_path, model), pytest.raises(TierInUseError):
        open_cache(tmp_path, model)


def open_over(store, model):
    return make_cache(model, store=store, host_cache_gb=0.01, hash_secret=b"of this test")


def test_a_store_that_fails_for_one_boundary_is_not_tried_at_the_next(model, clock) -> None:
    """A dead holder costs a timeout at each boundary, and there may be many."""
    store = FaultyStore(MemoryStore())
    with open_over(store, model) as first:
        answers, _ = ask(first, prompts()[:1])
    longer = [torch.tensor([[*answers[0], 7, 8, 9]])]  # states at the prompt's and answer's ends
    expected = [plain(model, ids).sequences[0].tolist() for ids in longer]
    with open_over(store, model) as second:
        store.inject("get_many_into", Trouble.FAIL, times=1, fault=StoreFault.TRANSFER_FAILED)
        assert ask(second, longer) == (expected, 0)
    with open_over(store, model) as third:
        found, skipped = ask(third, longer)
        assert found == expected
        assert skipped >= 0.9 * len(answers[0])


def test_what_is_computed_in_other_dtypes_stays_beside_the_model(model) -> None:
    """Under autocast, a loaded entry would have the dtypes of the layout."""
    with make_cache(model, host_cache_gb=0.01) as cache:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answers, _ = ask(cache, prompts()[:1])
            assert ask(cache, prompts()[:1])[0] == answers
        assert cache.stats().skipped_tokens > 0
        assert cache._store.live_dtypes
        host = cache._store.tiers.host
        assert [len(host[kind]) for kind in entry.EntryKind] == [0, 0]


def test_other_numerics_and_kernels_find_nothing(tmp_path, model, monkeypatch) -> None:
    """Another GPU, torch, triton, kernel or precision: a hit would not equal a miss."""
    with open_cache(tmp_path / "own", model) as first:
        ask(first, prompts()[:1])
    own = Numerics.of("cpu", kernels="a")

    def other(name):
        return Numerics, "of", lambda *_, **__: replace(own, **{name: "another"})

    changes = [other(field.name) for field in fields(Numerics)]
    changes.append((prefix_tiers, "installed_version", lambda name: "99.0"))
    for number, change in enumerate(changes):
        copytree(tmp_path / "own", tmp_path / str(number))
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            with open_cache(tmp_path / str(number), model) as second:
                assert ask(second, prompts()[:1])[1] == 0, change[1:]
    with open_cache(tmp_path / "own", model) as third:
        assert ask(third, prompts()[:1])[1] == REUSABLE[0]
