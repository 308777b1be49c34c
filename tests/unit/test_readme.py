"""What the README shows works when it is pasted."""

import re

import pytest
from sources import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]


def test_python_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other in one namespace, as a reader would paste them."""
    assert PYTHON
    namespace: dict[str, object] = {"__name__": "readme"}
    for code in PYTHON:
        exec(compile(code, "README.md", "exec"), namespace)
    assert capsys.readouterr().err == ""


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_commands_name_files_that_exist() -> None:
    commands = [code for language, code in BLOCKS if language == "console"]
    files = re.findall(r"[\w./]+\.(?:py|txt)", " ".join(commands))
    assert set(files) >= {"constraints.txt", "examples/prefix_reuse.py"}
    assert [file for file in files if not (ROOT / file).exists()] == []
