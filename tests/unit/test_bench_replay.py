"""What a replayed trace hits, against a model of it in plain Python."""

import json
import re
import sys

import pytest
from clocks import Clock
from sources import ROOT

from mamba_cache.bench import command, measure
from mamba_cache.bench.replay import PLACEMENTS, run_replay
from mamba_cache.bench.traces import TOKENS_PER_HASH_ID
from mamba_cache.bench.workload import draw_conversations
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.slots import SLOT_POLICIES

UNLIMITED = {"slots": [None], "policies": ["lru"], "placements": ["last"]}


def expected_hits(requests):
    """Tokens of KV matches and of state matches, where the last block of a prompt has a state."""
    seen, states, matched, skipped = set(), set(), 0, 0
    for request in requests:
        whole = request.hash_ids[: request.input_length // TOKENS_PER_HASH_ID]
        found = [n for n, hash_id in enumerate(whole, 1) if hash_id in seen]
        usable = [n for n in found if whole[n - 1] in states and n * 512 < request.input_length]
        matched += max(found, default=0) * 512
        skipped += max(usable, default=0) * 512
        seen.update(whole)
        states.update(whole[-1:])
    return matched, skipped


def test_unlimited_hits_are_those_of_the_trace():
    requests = draw_conversations(200)
    [record] = run_replay(limit=200, **UNLIMITED)["records"]
    matched, skipped = expected_hits(requests)
    total = sum(request.input_length for request in requests)
    assert 0 < skipped < matched
    assert (record["prompt_tokens"], record["skipped_tokens"]) == (total, skipped)
    assert record["kv_hit_rate"] == round(matched / total, 4)
    assert record["token_hit_rate"] == round(skipped / total, 4)
    assert (record["evicted_slots"], record["skipped_checkpoints"]) == (0, 0)
    assert record["kept_states"] == record["saved_states"] > 0


def test_chunks_change_no_hit():
    whole, chunked = (
        run_replay(limit=100, max_tokens=tokens, **UNLIMITED)["records"][0]
        for tokens in (200_000, 1_024)
    )
    assert whole["skipped_tokens"] == chunked["skipped_tokens"] > 0


def test_every_combination_is_a_record():
    result = run_replay(
        limit=60, slots=[8, None], policies=["lru", "score"], placements=["megatron", "every"]
    )
    combinations = [(r["placement"], r["policy"], r["slots"]) for r in result["records"]]
    assert combinations == [
        (placement, policy, slots)
        for placement in ("megatron", "every")
        for policy in ("lru", "score")
        for slots in (8, None)
    ]
    assert (result["passed"], result["workload"]["requests"]) == (True, 60)
    for record in result["records"]:
        assert record["requests"] == 60
        assert record["us_per_request"] > 0
        assert record["kept_states"] <= (record["slots"] or 10**9)


def test_a_saved_state_is_worth_more_under_the_score_policy():
    slots = {"slots": [40], "placements": ["megatron"], "limit": 400, "workload": "agents"}
    lru, score = (
        run_replay(policies=[policy], **slots)["records"][0]["token_hit_rate"]
        for policy in ("lru", "score")
    )
    assert score > 1.02 * lru


def test_few_blocks_are_evicted_and_too_few_fail():
    settings = {"limit": 40, "placements": ["last"], "policies": ["lru"], "slots": [None]}
    enough = run_replay(kv_blocks=300, **settings)
    assert enough["passed"]
    assert enough["records"][0]["evicted_blocks"] > 0
    too_few = run_replay(kv_blocks=10, **settings)
    assert not too_few["passed"]
    assert 0 < too_few["records"][0]["failed_requests"] < 40


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"limit": 0}, "limit must be an int >= 1, got 0"),
        ({"max_tokens": -1}, "max_tokens must be an int >= 1"),
        ({"policies": ["fifo"]}, r"policies must be of \['adaptive', .*\], got \['fifo'\]"),
        ({"placements": ["all"]}, "placements must be of"),
        ({"workload": "chess"}, r"workload must be of \['agents', .*\], got \['chess'\]"),
        ({"slots": [-1], "limit": 5}, "max_slots must be an int in"),
    ],
)
def test_settings_are_checked(settings, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        run_replay(**settings)


COMMAND = ["replay", "--slots", "4", "unlimited", "--policy", "score", "--placement", "last"]


def test_json_holds_the_records(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [4, 5]}
    path.write_text(2 * (json.dumps(line) + "\n"), encoding="utf-8")
    assert command.main([*COMMAND, "--trace", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["benchmark"], result["workload"]["source"]) == ("replay", "trace")
    assert [(r["slots"], r["skipped_tokens"]) for r in result["records"]] == [(4, 512), (None, 512)]


def test_the_table_names_budgets(capsys):
    assert command.main([*COMMAND, "--limit", "20"]) == 0
    printed = capsys.readouterr().out
    assert "unlimited" in printed
    assert "20 requests" in printed


def test_a_missing_trace_is_a_line_not_a_traceback(tmp_path, capsys):
    assert command.main(["replay", "--trace", str(tmp_path / "missing")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "cannot be read" in line


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_replay_that_is_piped_says_now_and_then_how_far_it_is(capsys, monkeypatch, has_rich):
    """It was silent for 20 minutes. The clock is read once and then before each request."""
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(measure, "time", Clock(measure._SECONDS_PER_LINE / 2))
    run_replay(limit=4, slots=[5, None], policies=["lru"], placements=["last"])
    assert capsys.readouterr().err.splitlines() == [
        "replay: 12%, last, lru, 5 slots",
        "replay: 38%, last, lru, 5 slots",
        "replay: 62%, last, lru, unlimited slots",
        "replay: 88%, last, lru, unlimited slots",
    ]


def test_a_short_replay_says_nothing_but_its_result(capsys, monkeypatch):
    monkeypatch.setattr(measure, "time", Clock(0))
    assert command.main([*COMMAND, "--limit", "4"]) == 0
    assert capsys.readouterr().err == ""


def test_the_benchmarks_page_quotes_the_run_beside_it():
    folder = ROOT / "docs" / "benchmarks"
    [path] = folder.glob("replayed-trace-20*.json")
    rates = {}
    for record in json.loads(path.read_text(encoding="utf-8"))["records"]:
        names = type(PLACEMENTS[record["placement"]]()), type(SLOT_POLICIES[record["policy"]]())
        rates.setdefault(tuple(name.__name__ for name in names), []).append(
            f"{record['token_hit_rate']:.1%}"
        )
    quoted, placement = {}, ""
    row = re.compile(r"^\| (?:`(\w+)` )?\| `(\w+)` \| (.*) \|$", re.M)
    for first, policy, cells in row.findall((folder / "index.md").read_text(encoding="utf-8")):
        placement = first or placement
        quoted[placement, policy] = cells.split(" | ")
    assert quoted == rates


def test_a_budget_for_both_is_split_by_the_sizes_of_a_model():
    result = run_replay(
        limit=20, cache_gb=2, state_shares=[0.5], policies=["adaptive"], placements=["last"]
    )
    [record] = result["records"]
    assert (record["slots"], record["kv_blocks"]) == (2**30 // 102_629_376, 2**30 // 2**23)
    assert result["settings"]["cache_gb"] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_gb": 0.1}, "at least one of each"),
        ({"cache_gb": 8, "state_shares": [1]}, "at least one of each"),
        ({"cache_gb": 8, "state_shares": [2]}, "state_share must be"),
        ({"cache_gb": 8, "model": "no-such-model"}, "no-such-model"),
        ({"hints_wrong": 1.5}, "hints_wrong must be"),
    ],
)
def test_budgets_and_hints_are_checked(settings, message):
    with pytest.raises(InvalidArgumentError, match=message):
        run_replay(limit=3, **settings)


def test_right_hints_help_the_policy_that_takes_them():
    settings = {"limit": 700, "slots": [15], "placements": ["last"], "policies": ["adaptive"]}
    [without] = run_replay(**settings)["records"]
    [right] = run_replay(hints_wrong=0, **settings)["records"]
    assert right["token_hit_rate"] > without["token_hit_rate"]


TIERED = {"limit": 120, "slots": [6], "policies": ["adaptive"], "placements": ["megatron"]}


def test_tiers_below_hit_more_and_say_what_it_takes():
    alone, host, disk, unlimited = (
        run_replay(**TIERED | more)["records"][0]
        for more in (
            {}, {"host_slots": 30}, {"host_slots": 30, "disk_slots": 300}, {"slots": [None]},
        )
    )  # fmt: skip
    rates = [each["skipped_tokens"] for each in (alone, host, disk, unlimited)]
    assert rates[0] < rates[1] < rates[2] <= rates[3]
    assert (alone["host_hits"], alone["disk_hits"], unlimited["host_hits"]) == (0, 0, 0)
    assert host["host_hits"] > 0 == host["disk_hits"]
    assert disk["disk_hits"] > 0
    assert host["tiers"]["host_states"] == 30
    assert "tiers" not in alone
    assert host["host_states"] <= 30
    assert disk["disk_states"] > 30
    times = [each["ttft_ms_mean"] for each in (alone, host, disk)]
    assert alone["uncached_ttft_ms_mean"] > times[0] > times[1] > times[2]
    assert alone["saved_flops"] == alone["skipped_tokens"] * 2 * 8_100_000_000


def test_tiers_keep_blocks_where_the_gpu_does_not_hold_all():
    few = {"slots": [6], "kv_blocks": 300}
    alone, both = (
        run_replay(**TIERED | few | more)["records"][0] for more in ({}, {"host_slots": 60})
    )
    assert both["tiers"]["host_blocks"] == 3000
    assert alone["skipped_tokens"] < both["skipped_tokens"]
    assert both["host_stored"] > both["saved_states"], "blocks too"


def test_budgets_in_gib_are_rows_of_the_models_sizes():
    result = run_replay(**TIERED | {"host_gb": 2.0, "disk_gb": 8.0})
    assert result["records"][0]["tiers"] == {
        "host_states": 2 * 2**30 // 102_629_376,
        "host_blocks": 0,
        "disk_states": 8 * 2**30 // 102_629_376,
        "disk_blocks": 0,
    }
    result = run_replay(**TIERED | {"host_gb": 2.0, "kv_blocks": 300})
    tiers = result["records"][0]["tiers"]
    assert tiers["host_states"] == int(1.5 * 2**30) // 102_629_376
    assert tiers["host_blocks"] == int(0.5 * 2**30) // 2**23


def test_a_slow_disk_is_left_alone():
    """Loading a state would take longer than computing what it stands for."""
    fast, slow = (
        run_replay(**TIERED, host_slots=5, disk_slots=300, disk_rate=rate)["records"][0]
        for rate in (2.0, 1e-4)
    )
    assert fast["disk_hits"] > 0 == slow["disk_hits"]


def test_hints_and_tenants_of_a_trace_count(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"hashes": [1, 2], "tenant": each, "will_continue": True} for each in ("a", "b", "a")]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    result = run_replay(trace=str(path), block_size=16, **UNLIMITED)
    assert result["settings"]["block_size_tokens"] == 16
    assert result["records"][0]["skipped_tokens"] == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"disk_slots": 9}, "a disk needs a host tier"),
        ({"disk_gb": 9.0}, "a disk needs a host tier"),
        ({"host_slots": 9, "host_gb": 1.0}, "give host_slots or host_gb, not both"),
        ({"host_slots": 9, "disk_slots": 9, "disk_gb": 1.0}, "give disk_slots or disk_gb"),
        ({"host_gb": 0.01}, r"host_gb=0\.01 holds no state of 102629376 bytes"),
        ({"host_slots": 0}, "host_slots must be an int >= 1"),
        ({"host_rate": 0.0}, "host_rate must be above 0"),
        ({"block_size": 16}, "block_size is for traces"),
    ],
)
def test_tiers_are_checked(settings, message):
    with pytest.raises(InvalidArgumentError, match=message):
        run_replay(**TIERED | {"limit": 3} | settings)


def test_the_table_names_tiers_and_shares(capsys):
    tiers = ["--host-slots", "30", "--disk-slots", "90", "--limit", "5", "--policy", "lru"]
    budget = ["--placement", "last", "--cache-gb", "20", "--state-share", "0.2", "0.4"]
    assert command.main(["replay", *tiers, *budget]) == 0
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "41 + 30 + 90" in printed
    assert "83 + 30 + 90" in printed
    assert "without a cache" in printed


@pytest.mark.parametrize("text", ["0", "-1", "inf", "fast"])
def test_rates_are_numbers_above_0(text, capsys):
    with pytest.raises(SystemExit):
        command.main(["replay", "--host-rate", text])
    assert "must be a number above 0" in capsys.readouterr().err


def test_the_benchmarks_page_quotes_the_runs_with_tiers():
    folder = ROOT / "docs" / "benchmarks"
    paths = [*folder.glob("replayed-trace-host-*.json"), *folder.glob("replayed-trace-disk-*.json")]
    records = [
        record for path in paths for record in json.loads(path.read_text("utf-8"))["records"]
    ]
    [best] = [record["token_hit_rate"] for record in records if record["slots"] is None]
    expected = set()
    for record in records:
        tiers, hit = record.get("tiers", {}), record["token_hit_rate"]
        numbers = record["slots"], tiers.get("host_states"), tiers.get("disk_states")
        expected.add((
            "unlimited" if record["slots"] is None else f"{numbers[0]:,}",
            *(f"{number:,}" if number else "" for number in numbers[1:]),
            f"{hit:.1%}",
            "" if record["slots"] is None else f"{(best - hit) * 100:.1f}",
            f"{record['bound']:.1%}" if "bound" in record else "",
            f"{record['ttft_ms_mean']:,.0f} ms",
        ))  # fmt: skip
    page = (folder / "index.md").read_text(encoding="utf-8")
    [table] = re.findall(r"\| slots \| host \|.*\n\|[-|]+\n((?:\|.*\n)+)", page)
    quoted = {
        tuple(cell.strip() for cell in row.strip("|").split("|")) for row in table.splitlines()
    }
    assert quoted == expected


def test_the_benchmarks_page_quotes_the_run_with_one_budget():
    folder = ROOT / "docs" / "benchmarks"
    [path] = folder.glob("replayed-trace-80gib-*.json")
    [record] = json.loads(path.read_text(encoding="utf-8"))["records"]
    quoted = f"`--cache-gb 80 --bound` | {record['token_hit_rate']:.1%}, of at most "
    quoted += f"{record['bound']:.1%} |"
    assert quoted in (folder / "index.md").read_text(encoding="utf-8")


def test_the_benchmarks_page_quotes_the_bounds_of_slots():
    folder = ROOT / "docs" / "benchmarks"
    [path] = folder.glob("replayed-trace-adaptive-*.json")
    records = json.loads(path.read_text(encoding="utf-8"))["records"]
    hits, bounds = (
        ", ".join(f"{record[name]:.1%}" for record in records)
        for name in ("token_hit_rate", "bound")
    )
    page = (folder / "index.md").read_text(encoding="utf-8")
    assert f"`--slots 50 200 800 --bound` | {hits}, of at most {bounds} |" in page
