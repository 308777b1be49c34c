"""The command line: results, errors, exit codes and pipes."""

import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from sources import ROOT

from mamba_cache._version import __version__
from mamba_cache.cli import doctor, replay
from mamba_cache.cli.app import COMMANDS, run
from mamba_cache.cli.doctor import Check
from mamba_cache.cli.output import size_text
from mamba_cache.integrations.model_shapes import load_shape
from mamba_cache.reference import Engine

PLAN = ["plan", "nemotron-h-8b", "--memory", "80", "--shared", "2000"]
TRACE = "the path of a trace"


@pytest.fixture
def call(capsys):
    """Runs a command in this process; returns its exit code, stdout and stderr."""

    def run_command(*arguments):
        try:
            code = run(arguments)
        except SystemExit as exit:
            code = exit.code or 0
        return code, *capsys.readouterr()

    return run_command


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
    code, out, _ = call(*PLAN)
    assert code == 0
    for name, value in config.items():
        assert f"    {name}={value!r},\n" in out
    assert re.search(r"slot +97\.9 MiB", out)


def test_states_of_another_kind_get_the_budgets_of_a_prefix_cache(call, tmp_path):
    """The JSON gives budgets in GiB, to a thousandth; they hold the plan's slots and blocks."""
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
    guide = (ROOT / "docs" / "how-to" / "settings.md").read_text(encoding="utf-8")
    command, shown = re.search(
        r"```console\n\$ mamba-cache (.*?)\n(.*?)```", guide, re.DOTALL
    ).groups()
    assert lines_of(call(*command.split())[1]) == lines_of(shown)


def test_a_plan_takes_every_option(call):
    code, out, _ = call(
        "plan", "granite-4.0-h-tiny", "--memory", "24", "--prompt", "900", "--output", "40",
        "--concurrency", "3", "--shared", "600", "--block-size", "512", "--json",
    )  # fmt: skip
    plan = json.loads(out)
    assert code == 0
    assert plan["memory"]["total"] == 24 * 2**30
    assert {"block_size_tokens": 512, "max_requests": 3}.items() <= plan["config"].items()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "nemotron-h-8b", "--memry", "80"], 2, "unrecognized arguments: --memry"),
        (["plan", "nemotron-h-8", "--memory", "80"], 2, "must be one of nemotron-h-8b,"),
        (["plan", "nemotron-h-8b", "--memory", "much"], 2, "--memory: invalid float value: 'much'"),
        (["plan", "nemotron-h-8b", "--memory", "20"], 1, "must hold 32 requests at once"),
        (["plan", "nemotron-h-8b", "--memory", "80", "--block-size", "100"], 2, "multiple"),
        (["plan", "nemotron-h-8b", "--memory", "-5"], 2, "--memory must be a number in [0, "),
        (["plan"], 2, "mamba-cache plan: the following arguments are required: MODEL"),
        (["serve", "--port", "80", "m"], 2, "MODEL comes before all options that are passed on"),
        (["plan", "nvidia/Nemotron-H-8B"], 2, "hf download OWNER/NAME config.json"),
        (["plan", "zamba2-7b", "--memory", "inf"], 2, "--memory must be a number in"),
        (["plan", "zamba2-7b", "--memory", "80", "--shared", "9", "--prompt", "8"], 2, "--shared"),
        (["plan", "/nowhere/config.json"], 2, "got '/nowhere/config.json'"),
        (["frobnicate", "x"], 2, "invalid choice: 'frobnicate' (choose from "),
        ([], 2, "mamba-cache: the following arguments are required: COMMAND"),
        (["replay", "nowhere.jsonl"], 2, "nowhere.jsonl"),
        (["replay", TRACE, "--slots", "5,many"], 2, "--slots must be numbers or 'unlimited'"),
        (["replay", TRACE, "--policy", "lru,LRU"], 2, "policies must be of ['adaptive', "),
        (["replay", TRACE, "--limit", "0"], 2, "limit must be an int >= 1, got 0"),
    ],
)
def test_an_error_names_its_cause_and_sets_the_exit_code(call, trace, arguments, code, message):
    given, out, err = call(*(trace if one is TRACE else one for one in arguments))
    assert (given, out, err.count("\n")) == (code, "", 1)
    assert message in err


def test_a_plan_without_a_gpu_needs_the_memory(call, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = call("plan", "nemotron-h-8b")
    assert (code, "give --memory" in err) == (2, True)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_goes_to_stdout_names_what_options_take_and_fits_80_columns(
    call, monkeypatch, command
):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = call(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert f"usage: mamba-cache {command}" in out
    assert ("--json" in out) == (command not in ("", "serve"))
    if command == "plan":
        assert re.search(r"--shared N +tokens that all prompts begin with \(default: 0\)", out)
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_help_imports_no_torch():
    """The package imports no torch either before one of its names is used."""
    code = (
        "import sys, mamba_cache, mamba_cache.cli.app as app\n"
        "try: app.run(['--help'])\n"
        "except SystemExit: print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\nFalse False\n")


def test_version(call):
    assert call("--version")[:2] == (0, f"mamba-cache {__version__}\n")


@pytest.fixture
def trace(tmp_path):
    """The path of a trace: one prompt of a block and a part of a block, twice."""
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [4, 5]}
    path.write_text(2 * (json.dumps(line) + "\n"), encoding="utf-8")
    return str(path)


def test_a_trace_is_replayed_under_every_policy_and_budget(call, trace):
    arguments = ("--slots", "4,unlimited", "--policy", "lru,adaptive", "--json")
    code, out, _ = call("replay", trace, *arguments)
    assert code == 0
    found = [(r["policy"], r["slots"], r["skipped_tokens"]) for r in json.loads(out)["records"]]
    assert found == [(name, slots, 512) for name in ("lru", "adaptive") for slots in (4, None)]


def test_a_replay_is_printed_as_a_table(call, trace):
    code, out, _ = call("replay", trace, "--slots", "4,unlimited", "--policy", "lru")
    assert code == 0
    assert re.search(r"lru +4 +36\.6% +1\n", out)
    assert "unlimited" in out
    assert "2 requests, 700 prompt tokens each." in out


def test_a_replay_that_finds_no_room_exits_with_1(call, trace):
    code, out, _ = call("replay", trace, "--kv-blocks", "1", "--policy", "lru", "--slots", "1")
    assert (code, "2 requests failed: --kv-blocks does not hold them" in out) == (1, True)


def test_a_long_replay_prints_its_progress_on_stderr(call, trace, monkeypatch):
    """Long replays printed nothing for 20 minutes. The clock is read once, then at each request."""
    monkeypatch.setattr(replay, "_PROGRESS_SECONDS", 0.0)
    code, _, err = call("replay", trace, "--policy", "lru", "--slots", "5,unlimited")
    assert (code, err.splitlines()) == (0, [
        "replay: 0%, lru, 5 slots", "replay: 25%, lru, 5 slots",
        "replay: 50%, lru, unlimited slots", "replay: 75%, lru, unlimited slots",
    ])  # fmt: skip


def test_the_doctor_fails_only_if_something_is_wrong(call, monkeypatch):
    found = [Check("one", "ok", "fine"), Check("two", "absent", "has [none]", "get it")]
    monkeypatch.setattr(doctor, "check_machine", lambda: iter(found))
    code, out, _ = call("doctor")
    assert code == 0
    assert all(text in out for text in ("has [none]", "-> get it", "1 ok, 1 absent"))
    found.append(Check("three", "failed", "wrong"))
    assert call("doctor")[0] == 1
    code, out, _ = call("doctor", "--json")
    result = json.loads(out)
    assert (code, result["passed"]) == (1, False)
    assert [check["status"] for check in result["checks"]] == ["ok", "absent", "failed"]


def test_the_doctor_lists_what_is_installed_and_tries_a_hit(monkeypatch):
    here = {check.name: check for check in doctor.check_machine()}
    assert {here[name].status for name in ("mamba_cache", "torch", "triton")} == {"ok"}
    hit = here["a hit equals a miss"]
    assert (hit.status, hit.detail) == (
        "ok",
        "3,072 tokens skipped over 4 prompts, the same answers",
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "check_hits", lambda: hit)
    found = {check.name: check for check in doctor.check_machine()}
    absent = [found[name] for name in ("triton", "transformers", "prometheus_client")]
    assert {check.status for check in absent} == {"absent"}
    assert "pip install triton" in absent[0].advice
    assert "pip install -e '.[metrics]'" in absent[2].advice


@pytest.mark.parametrize(
    ("broken", "message"), [({"tokens": [1]}, "other answers"), ({"skipped_tokens": 0}, "no hit")]
)
def test_the_doctor_fails_where_hits_are_wrong_or_missing(monkeypatch, broken, message):
    class Broken(Engine):
        def generate(self, *given):
            wrong = broken if self.context.config.enable_prefix_caching else {}
            return [dataclasses.replace(one, **wrong) for one in super().generate(*given)]

    monkeypatch.setattr(doctor, "Engine", Broken)
    monkeypatch.setattr(doctor, "_HIT_PROMPTS", 2)
    check = doctor.check_hits()
    assert (check.status, message in check.detail, bool(check.advice)) == ("failed", True, True)


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


def test_serve_names_the_extra_that_it_needs(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    code, _, err = call("serve", "some/model")
    assert code == 2
    assert re.search(r"pip install -e '\.\[(serve|transformers)\]'", err)


@pytest.fixture
def serving():
    """The module with the ``installed`` that a command calls."""
    pytest.importorskip("transformers", reason="needs the extra transformers")
    return importlib.import_module("mamba_cache.integrations.transformers.serve")


def test_serve_passes_on_what_is_not_its_own(call, serving, monkeypatch):
    given = []

    def serve(force_model: str, port: int, quiet: bool = False, cb_block_size: int = 0) -> None:
        given.append((force_model, port, quiet))

    monkeypatch.setattr(serving, "installed", lambda **own: nullcontext(given.append(own)))
    monkeypatch.setitem(sys.modules, "transformers.cli.serve", SimpleNamespace(Serve=serve))
    own = {"--kv-cache-gb": "1", "--events-endpoint": "tcp://127.0.0.1:5557"}
    own |= {"--events-replay-endpoint": "tcp://127.0.0.1:5558"}
    arguments = (part for option in own.items() for part in option)
    code, _, _ = call("serve", *arguments, "some/model", "--max-requests", "3", "80", "--quiet")
    assert (code, given[1]) == (0, ("some/model", 80, True))
    taken = {"kv_cache_gb": 1.0, "max_requests": 3}
    taken |= {name: own[f"--{name.replace('_', '-')}"] for name in
              ("events_endpoint", "events_replay_endpoint")}  # fmt: skip
    assert taken.items() <= given[0].items()
    code, _, err = call("serve", "some/model", "--block-size=64")
    assert (code, "no option --block-size: did you mean --block-size-tokens?" in err) == (2, True)
    code, _, err = call("serve", "some/model", "80", "--cb-block-size", "x")
    assert (code, "--cb-block-size" in err) == (2, True)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"a b\n", b"a b"),
        (b"\x00\n\n", b"\x00\n"),
        (b"x\r\n", b"x"),
        (b"\n", "--hash-secret-file {} is empty"),
        (None, "--hash-secret-file cannot be read: "),
    ],
)
def test_serve_reads_the_secret_in_a_file(call, serving, monkeypatch, tmp_path, content, found):
    given, file = {}, tmp_path / "secret"

    def installed(**settings):
        given.update(settings)
        raise SystemExit

    monkeypatch.setattr(serving, "installed", installed)
    if content is not None:
        file.write_bytes(content)
    code, _, err = call("serve", "some/model", "--hash-secret-file", str(file))
    if isinstance(found, bytes):
        assert (code, given["hash_secret"]) == (0, found)
    else:
        assert code == 2
        assert err.startswith("mamba-cache: " + found.format(file))


@pytest.mark.parametrize("kind", [OSError, ValueError])
def test_a_model_that_cannot_be_loaded_is_reported_in_a_line(call, serving, monkeypatch, kind):
    monkeypatch.setattr(serving, "installed", lambda **_: nullcontext())

    def load(force_model: str) -> None:
        raise kind("no such\n repository")

    monkeypatch.setitem(sys.modules, "transformers.cli.serve", SimpleNamespace(Serve=load))
    code, _, err = call("serve", "some/model")
    assert (code, err) == (2, "mamba-cache: 'some/model' cannot be served: no such repository\n")


def test_a_command_with_a_closed_output_ends_without_a_traceback():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        result = subprocess.run(
            [sys.executable, "-m", "mamba_cache.cli", "--help"],
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=False,
        )
    assert (result.returncode, result.stderr) == (-signal.SIGPIPE, b"")
