"""Pages name files and tests that exist; so do links of pages that Sphinx does not build.

Sphinx checks the pages that it builds with `-n -W`: references, headings, included files.
"""

import ast
import re
from pathlib import Path

import pytest
from sources import ROOT, Source, is_old_path

DOCS = ROOT / "docs"
PAGES = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if not {"_build", "api", "results", "tables"} & set(page.relative_to(DOCS).parts)
]
TEST_FILES = r"tests/[\w/]+\.py"

EVERY_PAGE = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "README.md"]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def found(pattern: str) -> dict[str, list[Path]]:
    """Return the matches on all pages, each with its pages."""
    pages: dict[str, list[Path]] = {}
    for page in EVERY_PAGE:
        for match in re.findall(pattern, text_of(page)):
            pages.setdefault(match, []).append(page)
    assert pages
    return pages


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_links_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\(<?(?!https?:|#)([^)#>]+)", text_of(ROOT / page))
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_named_files_exist() -> None:
    named = found(r"(?:tests/[\w/]+\.(?:py|sh)|examples/\w+\.py|docs/[\w./-]+\.\w+)")
    assert {name: pages for name, pages in named.items() if not (ROOT / name).exists()} == {}


def test_named_tests_exist() -> None:
    missing = {}
    for test, pages in found(rf"{TEST_FILES}::\w+").items():
        file, name = test.split("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing[test] = pages
    assert missing == {}


def test_the_reference_lists_every_package_with_its_summary() -> None:
    """Packages directly below `mamba_cache`; generated pages list their contents."""
    package = ROOT / "mamba_cache"
    found = {path.parent.name for path in package.glob("*/__init__.py")}
    modules = package.glob("[!_]*.py")
    found |= {path.stem for path in modules if not is_old_path(Source(path))}
    wanted = {"mamba_cache", *(f"mamba_cache.{name}" for name in found)}
    page = text_of(DOCS / "reference" / "index.md")
    assert set(re.findall(r"^\| \{py:mod\}`([\w.]+)` \| .", page, flags=re.MULTILINE)) == wanted
    assert set(re.findall(r"^\w+ <api/([\w.]+)>$", page, flags=re.MULTILINE)) == wanted


def test_the_page_on_shared_test_modules_names_each_one() -> None:
    support = ROOT / "tests" / "support"
    tables = re.findall(r"^\| (`[^|]*`) \|", text_of(support / "README.md"), flags=re.MULTILINE)
    listed = sorted(name for cell in tables for name in re.findall(r"`(\w+)`", cell))
    assert listed == sorted(path.stem for path in support.glob("*.py"))


def test_the_runs_that_pages_name_are_kept() -> None:
    figures = [path.read_text(encoding="utf-8") for path in (DOCS / "figures").glob("*.svg")]
    texts = [*map(text_of, EVERY_PAGE), *figures]
    run = r"[\w.-]+-\d{4}-\d{2}-\d{2}(?=\.json|>|`)"
    named = {name for text in texts for name in re.findall(run, text)}
    assert named
    assert named <= {path.stem for path in DOCS.rglob("*-20*.json")}
