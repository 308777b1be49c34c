"""The README's commands and times; tests/integration/test_page_blocks.py runs its lines."""

import re
import runpy
from argparse import ArgumentParser

from sources import ROOT

from mamba_cache.cli.app import add_options
from mamba_cache.cli.serve import OPTIONS

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_commands_have_the_options_that_are_shown() -> None:
    [serve] = re.findall(r"^mamba-cache serve (.*)$", README, flags=re.MULTILINE)
    parser = ArgumentParser()
    add_options(parser, OPTIONS)
    given = parser.parse_args(serve.split())
    assert (given.mamba_cache_gb, given.kv_cache_gb) == (4, 8)


def test_the_times_are_those_of_the_runs_that_are_kept() -> None:
    """If this fails, run `python docs/figures/tables.py` to rewrite the times."""
    tables = runpy.run_path(str(ROOT / "docs" / "figures" / "tables.py"))
    shown = README.split(tables["BEGIN"])[1].split(tables["END"])[0]
    assert shown.strip() == tables["readme_block"]()
