"""The documentation's pages: their code blocks, and their text on one line."""

import re

from sources import ROOT

DOCS = ROOT / "docs"


def names_of_pages() -> list[str]:
    """The handwritten pages, relative to ``docs``."""
    paths = (path.relative_to(DOCS) for path in sorted(DOCS.rglob("*.md")))
    made = {"_build", "api", "results", "tables"}
    return [path.as_posix() for path in paths if not made & set(path.parts)]


def blocks(page: str, languages: str) -> list[str]:
    """The blocks of some languages on a page (a path from ``docs``), without indentation."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```(?:{languages})\n(.*?)^ *```$", text, flags=re.M | re.S)
    return [re.sub(rf"^{indent}", "", code, flags=re.M) for indent, code in found]


def python_blocks(page: str) -> list[str]:
    """The blocks of Python on a page that are not doctests."""
    return blocks(page, "python")


def text_of(page: str) -> str:
    """A page on one line, to search for sentences across line breaks."""
    return " ".join((DOCS / page).read_text(encoding="utf-8").split())
