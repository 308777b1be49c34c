"""The page of settings has each setting of each entry point, with its default."""

import inspect
import re

import pytest
from sources import ROOT

from mamba_cache import CacheConfig
from mamba_cache.cli.serve import serve

PAGE = (ROOT / "docs" / "how-to" / "settings.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| ([^|]*)\| ([^|]*)\| ([^|]*)\|", PAGE, flags=re.MULTILINE)


def default(parameter: inspect.Parameter) -> str:
    """A default as the page writes it."""
    value = getattr(parameter.default, "value", parameter.default)
    if value is inspect.Parameter.empty:
        return "required"
    if callable(value):
        return f"`{value.__module__}.{value.__name__}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


@pytest.mark.parametrize("column", [1, 2, 3], ids=["CacheConfig", "PrefixCache", "serve"])
def test_the_table_has_every_setting_with_its_default(column: int) -> None:
    entry = (CacheConfig, None, serve)[column - 1]
    if entry is None:
        pytest.importorskip("transformers", reason="needs the extra transformers")
        from mamba_cache.integrations.transformers import PrefixCache as entry  # noqa: PLC0415
    shown = {row[0]: row[column].strip() for row in ROWS if row[column].strip()}
    parameters = inspect.signature(entry).parameters
    assert shown == {
        name: default(one) for name, one in parameters.items() if name not in ("model", "others")
    }
