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
import typer
from sources import ROOT

from mamba_cache._version import __version__
from mamba_cache.cli import doctor, main, replay
from mamba_cache.cli.app import run
from mamba_cache.cli.doctor import Check
from mamba_cache.cli.output import size_text
from mamba_cache.integrations.model_shapes import load_shape
from mamba_cache.reference import Engine

PLAN = ["plan", "nemotron-h-8b", "--memory", "80", "--shared", "2000"]
TRACE = "the path of a trace"
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
    pytest.importorskip("transformers", reason="needs the extra transformers")
    config = {
        "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_L_cache": 3,
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 2, "vocab_size": 65536, "intermediate_size": 64, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ("plan", str(tmp_path), "--memory", "80")
    plan = json.loads(call(*command, "--json")[1])
    assert plan["memory"]["weights"] > 65536 * 2048 * 2
    budgets, counts = plan["prefix_cache"], plan["config"]
    for budget, count, each in (
        ("mamba_cache_gb", counts["max_slots"], plan["bytes_per_slot"]),
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
        (["serve", "--port", "80"], 2, "MODEL comes before all other options, got --port first"),
        (["plan", "nvidia/Nemotron-H-8B"], 2, "hf download nvidia/Nemotron-H-8B config.json"),
        (["plan", "zamba2-7b", "--memory", "inf"], 2, "--memory must be a number in"),
        (["plan", "zamba2-7b", "--memory", "80", "--weights", "inf"], 2, "--weights must be"),
        (["plan", "zamba2-7b", "--shared", "9", "--prompt", "8"], 2, "at most --prompt (8)"),
        (["plan", "zamba2-7b", "--memory", "80", "--block-size", "9999999999"], 2, "65536"),
        (["plan", "/nowhere/config.json"], 2, "There is no file or folder of that name"),
        (["dctor"], 2, "doctor"),
        (["doctor", "--jsn"], 2, "--json"),
        (["doctor", "--store", "ftp://host"], 2, "a store must be one of mooncake://"),
        (["du", "--sed", "4"], 2, "No such option: --sed; it has --json"),
        (["doctor", "four"], 2, "unexpected extra argument(s) (four)"),
        (["frobnicate", "x"], 2, "'frobnicate'; it has doctor, du, plan, replay, rm, serve"),
        (["replay"], 2, "mamba-cache replay: Missing argument 'TRACE'"),
        (["replay", "nowhere.jsonl"], 2, "nowhere.jsonl"),
        (["replay", TRACE, "--slots", "5,many"], 2, "--slots must be numbers or 'unlimited'"),
        (["replay", TRACE, "--kv-blocks", "5,6"], 2, "--kv-blocks must be a number or 'unlimited'"),
        (["replay", TRACE, "--policy", "lru,LRU"], 2, "policies must be of ['adaptive', "),
        (["replay", TRACE, "--placement", "all"], 2, "placement must be of ['megatron', "),
        (["replay", TRACE, "--limit", "0"], 2, "got '0'"),
    ],
)
def test_an_error_says_what_was_wrong_and_sets_the_exit_code(call, trace, arguments, code, said):
    given, out, err = call(*(trace if one is TRACE else one for one in arguments))
    assert (given, out, err.count("\n")) == (code, "", 1)
    assert said in err


def test_a_plan_needs_to_know_the_memory(call, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = call("plan", "nemotron-h-8b")
    assert (code, "give --memory" in err) == (2, True)


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "-h"]])
def test_help_goes_to_stdout(call, arguments):
    code, out, err = call(*arguments)
    assert (code, err) == (0, "")
    assert "usage: mamba-cache" in out.lower()
    assert ESCAPE not in out


@pytest.mark.parametrize(
    "command", [(), ("plan",), ("doctor",), ("replay",), ("du",), ("rm",)], ids=" ".join
)
def test_help_shows_flags_as_flags_and_names_what_options_take(call, command):
    code, out, _ = call(*command, "--help")
    assert code == 0
    assert re.search(r"--help +-h +Show", out)
    assert not re.search(r"<(bool|int|float|list|str)\b(?!> +(A Hugging|A file|The disk))", out)
    if command:
        assert re.search(r"--json +Print one JSON object", out)


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


@pytest.fixture
def trace(tmp_path):
    """The path of a trace: one prompt twice, of a block and a part of one."""
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [4, 5]}
    path.write_text(2 * (json.dumps(line) + "\n"), encoding="utf-8")
    return str(path)


def test_a_trace_is_replayed_under_every_policy_and_budget(call, trace):
    code, out, _ = call("replay", trace, "--slots", "4,unlimited", "--policy", "lru,score",
                        "--placement", "last", "--json")  # fmt: skip
    assert code == 0
    found = [(r["policy"], r["slots"], r["skipped_tokens"]) for r in json.loads(out)["records"]]
    assert found == [("lru", 4, 512), ("lru", None, 512), ("score", 4, 512), ("score", None, 512)]


def test_a_replay_as_a_table_has_the_bound_beside_each_hit_rate(call, trace):
    pytest.importorskip("scipy", reason="needs the extra bound")
    code, out, _ = call("replay", trace, "--slots", "4,unlimited", "--policy", "lru", "--bound")
    assert (code, ESCAPE in out) == (0, False)
    assert re.search(r"lru +4 +36\.6% +36\.6% ", out)
    assert "unlimited" in out
    assert "2 requests, 700 prompt tokens each; placement megatron." in out
    assert "bound: an upper limit" in out


def test_a_replay_that_finds_no_room_exits_with_1(call, trace):
    code, out, _ = call("replay", trace, "--kv-blocks", "1", "--policy", "lru", "--slots", "1")
    assert (code, "2 requests failed: --kv-blocks does not hold them" in out) == (1, True)


def test_a_long_replay_says_on_stderr_how_far_it_is(call, trace, monkeypatch):
    """It was silent for 20 minutes. The clock is read once and then before each request."""
    monkeypatch.setattr(replay, "_PROGRESS_SECONDS", 0.0)
    code, _, err = call("replay", trace, "--policy", "lru", "--slots", "5,unlimited")
    assert (code, err.splitlines()) == (0, [
        "replay: 0%, lru, 5 slots", "replay: 25%, lru, 5 slots",
        "replay: 50%, lru, unlimited slots", "replay: 75%, lru, unlimited slots",
    ])  # fmt: skip


def test_the_doctor_fails_only_if_something_is_wrong(call, monkeypatch):
    found = [Check("one", "ok", "fine"), Check("two", "absent", "has [none]", "get it")]
    monkeypatch.setattr(doctor, "run_checks", lambda: iter(found))
    code, out, err = call("doctor")
    assert (code, ESCAPE in out + err) == (0, False)
    assert all(text in out for text in ("has [none]", "-> get it", "1 ok, 1 absent"))
    found.append(Check("three", "failed", "wrong"))
    assert call("doctor")[0] == 1
    code, out, _ = call("doctor", "--json")
    result = json.loads(out)
    assert (code, result["passed"]) == (1, False)
    assert [check["status"] for check in result["checks"]] == ["ok", "absent", "failed"]


def test_the_doctor_knows_what_is_installed(monkeypatch):
    here = {check.name: check.status for check in doctor._versions()}
    assert (here["mamba_cache"], here["torch"], here["triton"]) == ("ok", "ok", "ok")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    [triton] = [check for check in doctor._versions() if check.name == "triton"]
    assert (triton.status, "pip install triton" in triton.advice) == ("absent", True)
    assert {check.status for check in doctor._extras()} == {"absent"}
    assert "pip install -e '.[metrics]'" in [check.advice for check in doctor._extras()][1]


def test_the_doctor_finds_that_a_hit_equals_a_miss():
    [check] = doctor._hits()
    assert (check.status, check.detail) == (
        "ok", "3,072 tokens skipped over 4 prompts, the same answers",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "said"), [({"tokens": [1]}, "other answers"), ({"skipped_tokens": 0}, "no hit")]
)
def test_the_doctor_fails_where_hits_are_wrong_or_missing(monkeypatch, broken, said):
    class Broken(Engine):
        def generate(self, *given):
            wrong = broken if self.context.config.enable_prefix_caching else {}
            return [dataclasses.replace(one, **wrong) for one in super().generate(*given)]

    monkeypatch.setattr(doctor, "Engine", Broken)
    [check] = doctor._hits()
    assert (check.status, said in check.detail, bool(check.advice)) == ("failed", True, True)


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


@pytest.mark.parametrize(
    ("content", "secret"), [(b"a b\n", b"a b"), (b"\x00\n\n", b"\x00\n"), (b"x\r\n", b"x")]
)
def test_serve_reads_the_secret_in_a_file(call, monkeypatch, tmp_path, content, secret):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    serving = importlib.import_module("mamba_cache.integrations.transformers.serve")
    given = {}

    def installed(**settings):
        given.update(settings)
        raise typer.Exit(0)

    monkeypatch.setattr(serving, "installed", installed)
    file = tmp_path / "secret"
    file.write_bytes(content)
    code, _, _ = call(
        "serve", "some/model", "--hash-secret-file", str(file), "--hash-algorithm", "sha256"
    )
    assert (code, given["hash_secret"], given["hash_algorithm"]) == (0, secret, "sha256")


def test_serve_says_which_file_holds_no_secret(call, monkeypatch, tmp_path):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    empty = tmp_path / "empty"
    empty.write_bytes(b"\n")
    code, _, err = call("serve", "some/model", "--hash-secret-file", str(empty))
    assert (code, err) == (2, f"mamba-cache: --hash-secret-file {empty} is empty\n")
    code, _, err = call("serve", "some/model", "--hash-secret-file", str(tmp_path / "none"))
    assert code == 2
    assert "--hash-secret-file cannot be read: " in err


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
