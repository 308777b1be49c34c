"""The page of settings has each setting of each entry point, with its default."""

import inspect
import re
from argparse import ArgumentParser

import pytest
from sources import ROOT

from mamba_cache import CacheConfig
from mamba_cache.cli.app import add_options
from mamba_cache.cli.serve import OPTIONS

PAGE = (ROOT / "docs" / "how-to" / "settings.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| ([^|]*)\| ([^|]*)\| ([^|]*)\|", PAGE, flags=re.MULTILINE)


def shown_as(value: object) -> str:
    """Return a default in the page's notation."""
    value = getattr(value, "value", value)
    if value is inspect.Parameter.empty:
        return "required"
    if callable(value):
        return f"`{value.__module__}.{value.__name__}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def defaults_of_serve() -> dict[str, object]:
    parser = ArgumentParser()
    add_options(parser, OPTIONS)
    return vars(parser.parse_args(["a model"]))


@pytest.mark.parametrize("column", [1, 2, 3], ids=["CacheConfig", "PrefixCache", "serve"])
def test_the_table_has_every_setting_with_its_default(column: int) -> None:
    if column == 3:
        defaults = defaults_of_serve()
    else:
        entry = CacheConfig
        if column == 2:
            pytest.importorskip("transformers", reason="needs the extra transformers")
            from mamba_cache.integrations.transformers import PrefixCache as entry  # noqa: PLC0415
        parameters = inspect.signature(entry).parameters
        defaults = {name: one.default for name, one in parameters.items()}
    defaults.pop("model", None)
    shown = {row[0]: row[column].strip() for row in ROWS if row[column].strip()}
    assert shown == {name: shown_as(value) for name, value in defaults.items()}
