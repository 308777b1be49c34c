"""The command line: results, errors, exit codes, terminals and pipes."""

import dataclasses
import importlib
import json
import os
import pty
import re
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from sources import ROOT

from mamba_cache._version import __version__
from mamba_cache.bench.command import BENCHMARKS
from mamba_cache.bench.measure import Measurement
from mamba_cache.cli import demo, doctor, main
from mamba_cache.cli.app import run
from mamba_cache.cli.doctor import Check
from mamba_cache.cli.output import size_text
from mamba_cache.integrations.model_shapes import load_shape

PLAN = ["plan", "nemotron-h-8b", "--memory", "80", "--shared", "2000"]
ESCAPE = "\x1b["
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a command in this process; returns its exit code, stdout and stderr."""

    def run_command(*arguments):
        monkeypatch.setattr(sys, "argv", ["mamba-cache", *arguments])
        try:
            code = run()
        except SystemExit as exit:
            code = exit.code or 0
        return code, *capsys.readouterr()

    return run_command


def in_terminal(*arguments, **environment):
    """What a command writes to a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mamba_cache.cli", *arguments],
        stdout=theirs,
        stderr=theirs,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"} | environment,
    )
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 65536):
            parts.append(part)
    except OSError:
        pass  # the terminal is gone when its last writer is
    process.wait()
    os.close(ours)
    return b"".join(parts).decode()


def test_a_plan_as_json(call):
    code, out, err = call(*PLAN, "--json")
    plan = json.loads(out)
    assert (code, err) == (0, "")
    assert plan["bytes_per_slot"] == load_shape("nemotron-h-8b").state_spec.bytes_per_slot
    memory = plan["memory"]
    parts = ("weights", "reserved", "live_states", "kv_blocks", "slots")
    assert 0.98 * memory["total"] < sum(memory[part] for part in parts) <= memory["total"]
    config = plan["config"]
    assert memory["slots"] == config["max_slots"] * plan["bytes_per_slot"]
    assert (config["block_size_tokens"], config["ssm_chunk_size"]) == (128, 128)


def test_a_plan_as_a_table_says_the_same(call):
    settings = json.loads(call(*PLAN, "--json")[1])["config"]
    code, out, _ = call(*PLAN)
    assert code == 0
    assert ESCAPE not in out
    for name, value in settings.items():
        assert f"    {name}={value!r},\n" in out
    assert re.search(r"slot +97\.9 MiB", out)


def test_states_of_another_kind_get_the_budgets_of_a_prefix_cache(call, tmp_path):
    """In the JSON: in GiB, to a thousandth, and they hold the slots and the blocks of the plan."""
    config = {
        "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "hidden_size": 2048,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ("plan", str(tmp_path), "--memory", "80", "--weights", "2")
    plan = json.loads(call(*command, "--json")[1])
    budgets, counts = plan["prefix_cache"], plan["config"]
    for budget, count, each in (
        ("mamba_cache_gb", counts["max_slots"], plan["bytes_per_slot"] + 65536 * 2),  # logits
        ("kv_cache_gb", counts["num_kv_blocks"], plan["bytes_per_block"]),
    ):
        assert 0 <= budgets[budget] * 2**30 - count * each < 2**30 / 1000
    code, out, _ = call(*command)
    assert (code, f"max_slots={counts['max_slots']}," in out) == (0, True)


def lines_of(text):
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_the_guide_shows_what_a_plan_prints(call):
    guide = (ROOT / "docs" / "how-to" / "choosing_budgets.md").read_text(encoding="utf-8")
    command, shown = re.search(
        r"```console\n\$ mamba-cache (.*?)\n(.*?)```", guide, re.DOTALL
    ).groups()
    assert lines_of(call(*command.split())[1]) == lines_of(shown)


def test_a_plan_takes_every_option(call):
    code, out, _ = call(
        "plan", "granite-4.0-h-tiny", "--memory", "24", "--weights", "7", "--reserve", "0.2",
        "--prompt", "900", "--output", "40", "--concurrency", "3", "--block-size", "512", "--int8",
        "--json",
    )  # fmt: skip
    plan = json.loads(out)
    assert code == 0
    assert plan["memory"]["weights"] == 7 * 2**30
    assert plan["memory"]["reserved"] == int(0.2 * 24 * 2**30)
    assert plan["bytes_per_slot"] < plan["bytes_per_live_state"] / 3
    wanted = {"block_size_tokens": 512, "max_requests": 3, "slot_quantization": "int8"}
    assert wanted.items() <= plan["config"].items()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["plan", "nemotron-h-8b", "--memry", "80"], 2, "--memory"),
        (["plan", "nemotron-h-8", "--memory", "80"], 2, "must be one of nemotron-h-8b,"),
        (["plan", "nemotron-h-8b", "--memory", "much"], 2, "--memory"),
        (["plan", "nemotron-h-8b", "--memory", "20"], 1, "must hold 32 requests at once"),
        (["plan", "nemotron-h-8b", "--memory", "80", "--block-size", "100"], 2, "multiple"),
        (["plan", "nemotron-h-8b", "--memory", "-5"], 2, "or equal to 0, got '-5'"),
        (["plan", "nemotron-h-8b", "--memory=-5"], 2, "or equal to 0, got '-5'"),
        (["plan"], 2, "mamba-cache plan: Missing argument 'MODEL' (mamba-cache plan --help"),
        (["demo", "--sed", "4"], 2, "No such option: --sed; it has --json"),
        (["demo", "four"], 2, "unexpected extra argument(s) (four)"),
        (["cache", "frobnicate", "x"], 2, "'frobnicate'; it has ls, prune, verify"),
        (["cache", "prune", ".", "--older-than", "-1"], 2, "--older-than"),
        (["cache", "prune", ".", "--keep", "-1"], 2, "got '-1'"),
        (["serve", "--port", "80"], 2, "MODEL comes before all other options, got --port first"),
        (["plan", "nvidia/Nemotron-H-8B"], 2, "hf download nvidia/Nemotron-H-8B config.json"),
        (["plan", "zamba2-7b", "--memory", "inf"], 2, "--memory must be a number in"),
        (["plan", "zamba2-7b", "--memory", "80", "--weights", "inf"], 2, "--weights must be"),
        (["plan", "zamba2-7b", "--shared", "9", "--prompt", "8"], 2, "at most --prompt (8)"),
        (["plan", "zamba2-7b", "--memory", "80", "--block-size", "9999999999"], 2, "65536"),
        (["bench", "ttft", "--family", "nemotron"], 2, "did you mean 'nemotron-h-8b'?"),
        (["plan", "/nowhere/config.json"], 2, "There is no file or folder of that name"),
        (["bench", "cpy"], 2, "copy"),
        (["bench", "tiers", "--only", "dsk"], 2, "'dsk' (choose from"),
        (["bench", "ttft", "--familly", "x"], 2, "no '--familly'; mamba-cache bench ttft --help"),
        (["dctor"], 2, "doctor"),
        (["doctor", "--jsn"], 2, "--json"),
        (["doctor", "--store", "ftp://host"], 2, "a store must be one of mooncake://"),
        (["bench", "replay", "--slots", "5", "--slots", "many"], 2, "a number or 'unlimited'"),
        (["bench", "replay", "--policy", "scor"], 2, "did you mean 'score'?"),
        (["bench", "replay", "--policy", "LRU"], 2, "did you mean 'lru'?"),
        (["bench", "replay", "--trace", "nowhere.jsonl"], 2, "nowhere.jsonl"),
        (["bench", "soak", "--minutes", "0"], 2, "minutes must be > 0"),
        (["bench", "soak", "--seed", "-1"], 2, "seed must be an int >= 0, got -1"),
        (["bench", "replay", "--state-share", "0.5"], 2, "state_shares divide cache_gb"),
    ],
)
def test_an_error_says_what_was_wrong_and_sets_the_exit_code(call, arguments, code, said):
    given, out, err = call(*arguments)
    assert (given, out, err.count("\n")) == (code, "", 1)
    assert said in err


def test_a_plan_needs_to_know_the_memory_and_the_weights(call, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = call("plan", "nemotron-h-8b")
    assert (code, "give --memory" in err) == (2, True)
    config = {
        "layer_types": ["linear_attention"], "hidden_size": 8, "num_attention_heads": 1,
        "linear_conv_kernel_dim": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 1,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = call("plan", str(tmp_path), "--memory", "1")
    assert (code, "give --weights" in err) == (2, True)


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["plan", "-h"]])
def test_help_goes_to_stdout(call, arguments):
    code, out, err = call(*arguments)
    assert (code, err) == (0, "")
    assert "usage: mamba-cache" in out.lower()
    assert ESCAPE not in out


@pytest.mark.parametrize("command", [(), ("demo",), ("plan",), ("doctor",)], ids=" ".join)
def test_help_shows_flags_as_flags_and_names_what_options_take(call, command):
    code, out, _ = call(*command, "--help")
    assert code == 0
    assert re.search(r"--help +-h +Show", out)
    assert not re.search(r"<(bool|int|float|list|str)\b(?!> +A Hugging Face)", out)
    if command:
        assert re.search(r"--json +Print one JSON object", out)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_help_of_a_benchmark_says_what_each_option_takes(call, name):
    code, out, _ = call("bench", name, "--help")
    assert code == 0
    assert out.startswith(f"usage: mamba-cache bench {name} [-h] [--json]")
    assert re.search(r"--json +print one JSON object", out)
    for line in re.findall(r"^  --.*\n?.*", out, re.MULTILINE):
        assert re.search(r"(?:  |\n {20,})\S", line), f"no help: {line}"


def test_no_command_is_wrong_usage(call):
    assert call()[0] == 2


def test_version(call):
    assert call("--version")[:2] == (0, f"mamba-cache {__version__}\n")


def test_colour_is_for_terminals_that_want_it():
    assert COLOUR.search(in_terminal("--help"))
    assert not COLOUR.search(in_terminal("--help", NO_COLOR="1"))


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_one_line_names_it(package):
    program = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv = ['mamba-cache', 'plan']\n"
        "from mamba_cache.cli import main; main()"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r".* needs .*: pip install -e '\.\[cli\]'\n", result.stderr)


def test_an_import_that_fails_for_another_reason_is_not_hidden(monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_cache.cli.app", None)
    with pytest.raises(ImportError, match="app"):
        main()


@pytest.mark.parametrize(("limit", "code"), [(2.0, 0), (1.0, 1)])
def test_a_benchmark_that_misses_its_limit_exits_with_1(call, monkeypatch, limit, code):
    measured = [Measurement("a figure", 1.5, "x", limit)]
    changed = BENCHMARKS["control"]._replace(run=lambda: measured)
    monkeypatch.setitem(BENCHMARKS, "control", changed)
    given, out, _ = call("bench", "control", "--json")
    assert given == code
    assert json.loads(out)["measurements"][0]["value"] == 1.5
    given, out, _ = call("bench", "control")
    assert (given, "a figure" in out) == (code, True)


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_options_of_a_benchmark_reach_it(call, monkeypatch, passed, code):
    seen = {}

    def run_ttft(**options):
        seen.update(options)
        result = {"benchmark": "ttft", "family": "tiny", "machine": "none", "versions": {}}
        result |= {"kernels": {"scan": "fla"}}
        return result | {"passed": passed, "measurements": [], "failed": {"chat": "broken"}}

    monkeypatch.setitem(BENCHMARKS, "ttft", BENCHMARKS["ttft"]._replace(run=run_ttft))
    given, out, _ = call(
        "bench", "ttft", "--family", "tiny", "--prefix", "64", "--prefix", "128",
        "--suffix", "5", "--rounds", "2", "--chat", "--reference",
    )  # fmt: skip
    assert (given, "scan: fla" in out, "chat: broken" in out) == (code, True, True)
    assert seen == {
        "family": "tiny", "prefix": [64, 128], "suffix": 5, "rounds": 2, "chat": True,
        "reference": True,
    }  # fmt: skip
    seen.clear()
    assert json.loads(call("bench", "ttft", "--json")[1])["passed"] is passed
    assert seen == {}, "the benchmark has the defaults"


@pytest.mark.parametrize(
    "slots", [("--slots", "5", "--slots", "unlimited"), ("--slots", "5", "unlimited")]
)
def test_a_trace_is_replayed_under_every_setting_asked_for(call, slots):
    """An option of many values may be repeated, or be given all of them at once."""
    code, out, _ = call(
        "bench", "replay", "--limit", "20", *slots,
        "--policy", "lru", "--placement", "last", "--placement", "every",
        "--kv-blocks", "unlimited", "--json",
    )  # fmt: skip
    records = json.loads(out)["records"]
    assert code == 0
    assert [(one["placement"], one["policy"], one["slots"]) for one in records] == [
        ("last", "lru", 5), ("last", "lru", None), ("every", "lru", 5), ("every", "lru", None),
    ]  # fmt: skip
    assert all(one["requests"] == 20 and one["kv_blocks"] is None for one in records)


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_a_soak_that_fails_exits_with_1(call, monkeypatch, passed, code):
    seen = {}

    def run_soak(**options):
        seen.update(options)
        result = {"benchmark": "soak", "passed": passed, "broken": None}
        return result | {"measurements": [], "counts": {"finished": 7}}

    monkeypatch.setitem(BENCHMARKS, "soak", BENCHMARKS["soak"]._replace(run=run_soak))
    given, out, _ = call("bench", "soak", "--minutes", "0.5", "--model", "tiny", "--seed", "3")
    assert (given, "finished 7" in out) == (code, True)
    assert seen == {"minutes": 0.5, "model": "tiny", "seed": 3}
    assert json.loads(call("bench", "soak", "--json")[1])["passed"] is passed


@pytest.fixture(scope="module")
def answers():
    return list(demo.play())


def test_the_demo_hits_and_its_answers_are_equal(answers):
    assert all(answer.outputs_match for answer in answers)
    assert [answer.miss_reason for answer in answers[:3]] == ["no_kv_match", "no_state", None]
    assert all(answer.skipped_tokens >= 1280 for answer in answers[2:])


@pytest.mark.parametrize("equal", [True, False])
def test_the_demo_shows_its_answers(call, monkeypatch, answers, equal):
    shown = [dataclasses.replace(answer, outputs_match=equal) for answer in answers]
    monkeypatch.setattr(demo, "play", lambda: iter(shown))
    code, out, _ = call("demo")
    assert (code, ESCAPE in out) == (0 if equal else 1, False)
    assert "conversation goes on" in out
    assert ("are equal" in out, "DIFFER" in out) == (equal, not equal)
    code, out, _ = call("demo", "--json")
    result = json.loads(out)
    assert (code, result["outputs_match"]) == (0 if equal else 1, equal)
    assert result["skipped_tokens"] == sum(answer.skipped_tokens for answer in answers)


def test_the_demo_is_live_in_a_terminal(call, monkeypatch, answers):
    monkeypatch.setattr(demo, "play", lambda: iter(answers))
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    code, out, _ = call("demo")
    # The table is drawn anew with each answer.
    assert (code, out.count("the first prompt")) == (0, len(answers) + 1)


def test_the_doctor_fails_only_if_something_is_wrong(call, monkeypatch):
    found = [Check("one", "ok", "fine"), Check("two", "slow", "takes [long]", "wait")]
    monkeypatch.setattr(doctor, "run_checks", lambda: iter(found))
    code, out, err = call("doctor")
    assert (code, ESCAPE in out + err) == (0, False)
    assert all(text in out for text in ("takes [long]", "-> wait", "1 ok, 1 slow"))
    found.append(Check("three", "failed", "wrong"))
    assert call("doctor")[0] == 1
    code, out, _ = call("doctor", "--json")
    result = json.loads(out)
    assert (code, result["passed"]) == (1, False)
    assert [check["status"] for check in result["checks"]] == ["ok", "slow", "failed"]


def test_the_doctor_knows_what_is_installed(monkeypatch):
    here = {check.name: check.status for check in doctor._versions()}
    assert (here["mamba_cache"], here["torch"], here["triton"]) == ("ok", "ok", "ok")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    [triton] = [check for check in doctor._versions() if check.name == "triton"]
    assert (triton.status, "pip install triton" in triton.advice) == ("absent", True)
    assert [check.status for check in doctor._kernels()] == ["absent"]
    assert {check.status for check in doctor._extras()} == {"absent"}
    assert "pip install -e '.[metrics]'" in [check.advice for check in doctor._extras()][1]


def test_the_doctor_compares_kernels_with_their_twins(monkeypatch):
    monkeypatch.setattr(doctor, "_KERNEL_SECONDS", None)  # however busy the machine is
    found = list(doctor._kernels())
    assert len(found) == 6
    assert [(check.status, check.advice) for check in found] == 6 * [("ok", "")]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('the driver is too old')", "the driver is too old"),
        ("print('no json')", "Expecting value"),
        ('print(\'{"copy": "3 bytes differ"}\')', "3 bytes differ"),
    ],
)
def test_the_doctor_tells_what_became_of_kernels(monkeypatch, program, said):
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda _, **options: run([sys.executable, "-c", program], **options)
    )
    [check] = doctor._kernels()
    assert (check.status, said in check.detail, bool(check.advice)) == ("failed", True, True)


def test_the_doctor_judges_hits(monkeypatch, answers):
    monkeypatch.setattr(doctor, "play", lambda: answers)
    assert [check.status for check in doctor._hits()] == ["ok"]
    for broken in ({"outputs_match": False}, {"skipped_tokens": 0}):
        wrong = [dataclasses.replace(answer, **broken) for answer in answers]
        monkeypatch.setattr(doctor, "play", lambda wrong=wrong: wrong)
        assert [check.status for check in doctor._hits()] == ["failed"]


@pytest.mark.parametrize(("value", "status"), [(9, "ok"), (11, "slow")])
def test_the_doctor_holds_decisions_to_their_limits(value, status):
    [check] = doctor._decisions(lambda: iter([Measurement("deciding", value, "us", 10)]))
    assert (check.name, check.status, bool(check.advice)) == ("deciding", status, status == "slow")


@pytest.mark.parametrize(("ratio", "status"), [(1.1, "ok"), (1.2, "slow")])
def test_the_doctor_judges_copies_on_a_gpu(monkeypatch, ratio, status):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (100 * 2**30, 100 * 2**30))
    measured = [Measurement("copy", ratio, "x", detail="1 us")]
    monkeypatch.setattr(doctor, "measure_copies", lambda *_: iter(measured))
    [check] = doctor._copies()
    assert (check.status, bool(check.advice)) == (status, status == "slow")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (2**30, 100 * 2**30))
    assert [check.status for check in doctor._copies()] == ["absent"]


def test_copies_on_the_cpu_are_timed():
    check = doctor._cpu_copies()
    assert (check.status, "GB/s" in check.detail) == ("ok", True)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1023, "1,023 bytes"),
        (999_999, "976.6 KiB"),
        (102_629_376, "97.9 MiB"),
        (5 * 2**30, "5.00 GiB"),
    ],
)
def test_sizes_as_people_read_them(num_bytes, text):
    assert size_text(num_bytes) == text


def test_serve_says_what_it_passes_on_and_needs(call, monkeypatch):
    code, out, _ = call("serve", "--help")
    assert (code, "--mamba-cache-gb" in out, "transformers serve --help" in out) == (0, True, True)
    code, _, err = call("serve", "--port", "80", "some/model")
    assert code == 2
    assert "MODEL comes before all other options" in err
    monkeypatch.setitem(sys.modules, "fastapi", None)
    code, _, err = call("serve", "some/model")
    assert code == 2
    assert re.search(r"pip install -e '\.\[(serve|transformers)\]'", err)


@pytest.mark.parametrize("kind", [OSError, ValueError])
def test_a_model_that_cannot_be_loaded_is_said_in_a_line(call, monkeypatch, kind):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    serving = importlib.import_module("mamba_cache.integrations.transformers.serve")
    monkeypatch.setattr(serving, "installed", lambda **_: nullcontext())

    def load(force_model: str) -> None:
        raise kind("no such\n repository")

    monkeypatch.setitem(sys.modules, "transformers.cli.serve", SimpleNamespace(Serve=load))
    code, _, err = call("serve", "some/model")
    assert (code, err) == (2, "mamba-cache: 'some/model' cannot be served: no such repository\n")
