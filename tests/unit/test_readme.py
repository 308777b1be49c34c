"""What the README shows works when it is pasted, and its figures are those that were measured."""

import json
import re
import runpy
from pathlib import Path

import pytest
from sources import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
RESULTS = ROOT / "docs" / "benchmarks"


def measurements(prefix: str) -> dict[str, dict]:
    """What the newest run whose file begins so has measured, by name."""
    path: Path = max(RESULTS.glob(f"{prefix}-2*.json"))
    result = json.loads(path.read_text(encoding="utf-8"))
    return {one["name"]: one for one in result["measurements"]}


def ttft_row() -> str:
    """The run with kernels, once there is one."""
    tables = runpy.run_path(str(ROOT / "docs" / "figures" / "tables.py"))
    if run := tables["shown_run"](tables["kernel_runs"]()):
        return tables["readme_row"](run).split(" | ")[1]
    found = measurements("ttft-nemotron-h-8b-h200")
    hit = found["hit, 4,096 + 256 tokens"]["value"]
    plain = found["plain transformers, 4,096 + 256 tokens"]["value"]
    return f"{hit:,.0f} ms instead of {plain:,.0f} ms"


def copy_row() -> str:
    found = measurements("copy-h200")
    flat, indexing, loop = (
        found[f"Nemotron-H-8B, fp32 SSM, 16 slots: {what}"]
        for what in ("time over a flat copy's", "faster than indexing", "faster than a loop")
    )
    microseconds = float(flat["detail"].split(" us")[0].replace(",", ""))
    return (
        f"{microseconds:,.0f} us: {flat['value']:.2f}x a flat copy of as many bytes; "
        f"{indexing['value']:.1f}x faster than indexing, {loop['value']:.1f}x than a loop of copies"
    )


def eviction_row() -> str:
    found = measurements("control-epyc")
    microseconds = found["evict and allocate 4 of 1,000,000 cached KV blocks"]["value"]
    ratio = found["the same, 1,000,000 blocks over 1,000"]["value"]
    return f"{microseconds:.0f} us, {ratio:.1f}x of 1,000 cached"


def admission_row() -> str:
    name = "add_request of a cached 32,768-token prompt, block 256, hashed before"
    return f"{measurements('control-epyc')[name]['value']:.0f} us"


@pytest.mark.parametrize(
    ("what", "result"),
    [
        ("Time to first token", ttft_row()),
        ("Copying 16 states", copy_row()),
        ("Evicting and allocating", eviction_row()),
        ("Admitting a cached prompt", admission_row()),
    ],
)
def test_figures_are_those_measured(what: str, result: str) -> None:
    [row] = re.findall(rf"^\| {what}[^|]*\| ([^|]*) \|", README, flags=re.MULTILINE)
    assert row == result


def test_python_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other in one namespace, as a reader would paste them."""
    assert PYTHON
    namespace: dict[str, object] = {"__name__": "readme"}
    for code in PYTHON:
        exec(compile(code, "README.md", "exec"), namespace)
    output = capsys.readouterr()
    assert output.err == ""
    promised = re.findall(r"# (skipped .*)", "".join(PYTHON))
    assert promised
    assert all(line in output.out for line in promised)


def test_commands_name_files_that_exist() -> None:
    commands = [code for language, code in BLOCKS if language == "console"]
    files = re.findall(r"[\w./]+\.(?:py|txt)", " ".join(commands))
    assert set(files) >= {"constraints.txt", "examples/prefix_reuse.py"}
    assert [file for file in files if not (ROOT / file).exists()] == []
