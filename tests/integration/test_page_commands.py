"""Every command on the pages is one that its program takes: names, options, values, files.

Nothing is run: the package's own commands go through their parsers, of scripts the file and the
spelling of the options are looked for, and the programs of others are listed here.
"""

import re
import shlex
from collections.abc import Iterator

import pytest
import typer
from pages import blocks, names_of_pages, text_of
from sources import ROOT

from mamba_cache.bench import command as bench
from mamba_cache.cli.app import app

OTHERS = {
    *("apt-get", "ask", "ask()", "cd", "curl", "cut", "grep", "jq", "mooncake_master", "pip"),
    *("pytest", "sphinx-build", "valkey-server", "vllm", "vllm-router", ".", "}"),
}
"""Programs of others, and a function that a page defines."""

COMMAND_LINE = text_of("how-to/command_line.md")
USAGE_ERROR = typer.BadParameter.__base__

PAGES = [*names_of_pages(), "../README.md", "../CONTRIBUTING.md", "../examples/README.md"]


def lines_of(block: str) -> list[str]:
    """What is typed: after a ``$`` if the block has one, else every line."""
    lines = block.replace("\\\n", " ").splitlines()
    typed = [line[2:] for line in lines if line.startswith("$ ")]
    return typed or [line for line in lines if line.strip()]


def commands(line: str) -> Iterator[list[str]]:
    """The commands of a line, without variables before them and where their output goes."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    words: list[str] = []
    for token in [*lexer, ";"]:
        if token and set(token) <= set(";|&"):
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words[: words.index(">") if ">" in words else None]
            words = []
        else:
            words.append(token)


IN_TEXT = sorted(
    {
        span
        for page in PAGES
        for span in re.findall(r"`(mamba-cache (?:bench )?[a-z][^`]*)`", text_of(page))
        if not re.search(r"\.\.\.|\bNAME\b|\|", span)  # those that stand for several
    }
)

SHOWN = [
    pytest.param(words, id=f"{page}: {' '.join(words)[:60]}")
    for page in PAGES
    for block in blocks(page, "console|bash")
    for line in lines_of(block)
    for words in commands(line)
]


def check_own(words: list[str]) -> None:
    """Parses a command of ``mamba-cache``, as far as it goes without running."""
    if words and words[0] == "bench":
        bench._parser("mamba-cache bench").parse_args(words[1:])
        return
    context = typer.main.get_command(app).make_context("mamba-cache", words)
    while isinstance(group := context.command, typer.core.TyperGroup):
        name, command, rest = group.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = command.make_context(name, rest, parent=context)


def check_script(words: list[str]) -> None:
    """Looks for the file that Python is to run, and for its options in the file."""
    if words[0] == "-m":
        return
    path = ROOT / words[0]
    path = path / "__main__.py" if path.is_dir() else path
    text = path.read_text(encoding="utf-8")
    assert [word for word in words[1:] if word.startswith("--") and f'"{word}"' not in text] == []


@pytest.mark.parametrize("words", SHOWN)
def test_a_command_is_one_that_its_program_takes(words: list[str]) -> None:
    program, *rest = words
    if program == "mamba-cache":
        check_own(rest)
    elif program == "python":
        check_script(rest)
    elif program.startswith("tests/"):
        assert (ROOT / program).exists()
    else:
        assert program in OTHERS


@pytest.mark.parametrize("span", IN_TEXT)
def test_a_command_in_the_text_is_one_that_there_is(span: str) -> None:
    """Its names and options: what it needs besides may be left out."""
    [[_, *words]] = commands(span)
    command = typer.main.get_command(app)
    while words and not words[0].startswith("-") and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    has = {name for param in command.params for name in param.opts}
    if command.name == "bench" and words and not words[0].startswith("-"):
        [names] = bench._parser("")._subparsers._group_actions
        has |= set(names.choices[words[0]]._option_string_actions)
    if command.name == "serve":  # it passes these on
        has |= {"--continuous-batching", "--device", "--dtype", "--port"}
    assert {word for word in words if word.startswith("--")} <= has | {"--help"}


def test_benchmarks_that_are_said_to_need_something_are_there() -> None:
    said = re.search(r"`align`[^.]* need a GPU, [^.]* need transformers", COMMAND_LINE)
    named = re.findall(r"`([a-z]+)`", said[0])
    assert set(named) == {"align", "copy", "serve", "ttft"} <= set(bench.BENCHMARKS)


@pytest.mark.parametrize(
    "line",
    [
        "mamba-cache plan nemotron-h-8b --memry 80",
        "mamba-cache cache lst /tmp",
        "mamba-cache bench replay --slotz 5",
        "mamba-cache bench relay",
        "python examples/nowhere.py",
        "mamba-cash demo",
    ],
)
def test_a_command_that_there_is_not_is_noticed(line: str) -> None:
    [words] = commands(line)
    with pytest.raises((AssertionError, FileNotFoundError, SystemExit, USAGE_ERROR)):
        test_a_command_is_one_that_its_program_takes(words)
