"""``python tests/site_links.py FOLDER`` checks the links inside of a built site.

Each leads to a file that is there, and to a place in it; and the text of each page, not only the
bar beside it, has a way on to another one.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the places of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.own_links: set[str] = set()
        self.places: set[str] = set()
        self._depth = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note what a tag leads to and how it is called."""
        found = dict(attributes)
        self._depth += tag == "article"
        for name in ("id", "name"):
            if value := found.get(name):
                self.places.add(value)
        link = found.get("href" if tag in ("a", "link") else "src") or ""
        if link and not urlsplit(link).scheme and not link.startswith("//"):
            self.links.add(link)
            if self._depth and tag == "a":
                self.own_links.add(link)

    def handle_endtag(self, tag: str) -> None:
        """Leave the text of the page."""
        self._depth -= tag == "article"


def breaches(site: Path) -> list[str]:
    """What is wrong with a site."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = [] if len(pages) > 1 else [f"{site} is no site"]
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        targets = set()
        for link in sorted(page.links):
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{name} leads to {link}, which is not there")
            elif target in pages and unquote(parts.fragment) not in pages[target].places | {""}:
                found.append(f"{name} leads to {link}, where there is no such place")
            if link in page.own_links and target in pages and target != path:
                targets.add(target)
        is_made = {"_modules", "results", "api"} & set(name.parts)
        if not targets and not is_made and name.name not in ("genindex.html", "search.html"):
            found.append(f"{name} has no way on to another page")
    return found


if __name__ == "__main__":
    wrong = breaches(Path(sys.argv[1]))
    print("\n".join(wrong) or "every link inside leads somewhere")
    sys.exit(bool(wrong))
