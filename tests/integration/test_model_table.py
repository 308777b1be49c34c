"""The README's table of supported models is what a prefix cache learns of them."""

import runpy

from sources import ROOT

TABLE = runpy.run_path(str(ROOT / "tests" / "model_table.py"))


def test_the_table_is_as_the_code_makes_it() -> None:
    """If this fails, `python tests/model_table.py` writes it anew."""
    readme = TABLE["README"].read_text(encoding="utf-8")
    shown = readme.split(TABLE["BEGIN"])[1].split(TABLE["END"])[0]
    assert shown.strip() == TABLE["table"]()
