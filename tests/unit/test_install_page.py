"""The quickstart names every extra, and what each brings."""

import re

from sources import ROOT

PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def read_extras() -> dict[str, list[str]]:
    """The extras and what they need; lists of strings are spelled alike in TOML and in Python."""
    [section] = re.findall(
        r"^\[project.optional-dependencies\]$(.*?)^\[", PROJECT, flags=re.MULTILINE | re.DOTALL
    )
    extras: dict[str, list[str]] = {}
    exec(section, {}, extras)
    return extras


def named(requirement: str) -> set[str]:
    """What a requirement brings: a distribution, or extras of this one."""
    name, extras = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", requirement).groups()
    return set(extras.split(",")) if name == "mamba-cache" else {name}


def test_the_table_has_every_extra_and_what_it_brings() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|$", PAGE, flags=re.MULTILINE)
    shown = {name: set(re.findall(r"[\w.-]+", brings)) - {"and"} for name, brings in rows}
    wanted = {name: set().union(*map(named, needs)) for name, needs in read_extras().items()}
    assert shown == wanted
