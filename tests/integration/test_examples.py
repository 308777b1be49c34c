"""Examples print what the documentation shows of them, and do what they are there for."""

import importlib.util
import re
import subprocess
import sys

import numpy as np
import pytest
from sources import ROOT

from mamba_cache.slots import PlacementFacts


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(page: str, command: str) -> str:
    """The output that a page of the documentation shows under a command."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    [block] = re.findall(rf"^```console\n\$ {re.escape(command)}\n(.*?)^```$", text, re.M | re.S)
    return block


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("tutorial/embed.md", "embed_in_your_engine"),
        ("explanation/placement.md", "custom_policy"),
        ("how-to/forks.md", "forks"),
    ],
)
def test_output_is_as_shown(page, name, capsys):
    assert load(name).main() == 0
    assert capsys.readouterr().out == shown(page, f"python examples/{name}.py")


CHOOSER = (
    *("own_engine", "megatron_core", "transformers_script", "transformers_server"),
    "several_machines",
)
"""The examples of the README's chooser, one for each thing that somebody may have."""


@pytest.mark.parametrize("name", CHOOSER)
def test_what_the_chooser_leads_to_is_short_and_compares(name):
    """Each is under 100 lines, ends in a comparison, and fails if that finds a difference."""
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    assert "{'agree' if " in text
    assert "return 0 if " in text
    assert f"`{name}.py`" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


def test_every_turn_of_a_chat_skips_what_was_said_before(capsys):
    chat = load("own_engine")
    assert chat.main() == 0
    printed = capsys.readouterr().out
    turns = [line.split() for line in printed.splitlines() if re.match(r" +\d+ ", line)]
    assert len(turns) == len(chat.QUESTIONS)
    prompts = [int(turn[1]) for turn in turns]
    skipped = [int(turn[2]) for turn in turns]
    block = chat.BLOCK_SIZE_TOKENS
    for turn in range(1, len(turns)):
        # The last token of an answer is not computed in its turn, so neither is its block then.
        said_before = prompts[turn - 1] + chat.NEW_TOKENS - 1
        assert skipped[turn] == said_before // block * block


def test_a_chat_whose_answers_differ_fails(monkeypatch, capsys):
    chat = load("own_engine")
    turns = iter([[(2, 0, [7])], [(2, 0, [8])]])
    monkeypatch.setattr(chat, "converse", lambda *_: next(turns))
    assert chat.main() == 1
    assert "DO NOT AGREE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "package", "said"),
    [
        ("transformers_script", "transformers", r"needs transformers: .*-e '\.\[transformers\]'"),
        ("transformers_server", "transformers", r"needs a server: .*pip install -e '\.\[serve\]'"),
        ("megatron_core", "megatron", r"needs Megatron Core: .*pip install -e '\.\[megatron\]'"),
    ],
)
def test_an_example_whose_engine_is_missing_says_what_to_install(name, package, said):
    example = ROOT / "examples" / f"{name}.py"
    # Blocked, so that the test is the same where the engine is installed.
    program = (
        f"import runpy, sys; sys.modules[{package!r}] = None; "
        f"runpy.run_path({str(example)!r}, run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    [line] = result.stderr.splitlines()
    assert result.returncode == 1
    assert re.search(said, line)


def test_the_own_policy_keeps_what_was_used_most():
    policy = load("custom_policy").PopularSlotPolicy()
    policy.reset(4)
    policy.on_stored([0, 1, 2, 3], [64] * 4)
    policy.on_consumed([0])
    policy.on_consumed([2])
    policy.on_consumed([0])
    slots = np.arange(4)
    assert policy.choose(4, slots, slots.astype(np.int32), None) == [1, 3, 2, 0]
    policy.on_stored([0], [64])
    assert policy.choose(2, slots, slots.astype(np.int32), None) == [1, 3]
    assert policy.choose(4, slots, slots.astype(np.int32), None)[-1] == 2


def test_the_own_placement_doubles():
    placement = load("custom_policy").DoublingPlacement()
    facts = PlacementFacts(
        prompt_tokens=700, block_size_tokens=64, num_matched_blocks=0, num_required_blocks=11
    )
    assert sorted(placement.positions(facts)) == [64, 128, 256, 512, 640]


def test_the_page_on_examples_lists_each_with_its_length():
    """`examples/README.md` says which to read first."""
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    listed = {name: int(lines) for name, lines in re.findall(r"`(\w+)\.py` \| (\d+) \|", page)}
    lengths = {
        path.stem: len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "examples").glob("*.py")
    }
    assert listed == lengths
