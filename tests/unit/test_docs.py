"""Pages name files, tests and commands that exist, and their links lead somewhere.

Sphinx checks what it can see itself, under `-n -W`: references, pages and headings. Addresses of
other sites are not fetched.
"""

import ast
import json
import re
from pathlib import Path

import pytest
from sources import ROOT

from mamba_cache.bench.__main__ import main as bench

DOCS = ROOT / "docs"
PAGES = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if not {"_build", "api", "results"} & set(page.relative_to(DOCS).parts)
]
TEST_FILES = r"tests/[\w/]+\.py"

EVERY_PAGE = [*PAGES, ROOT / "CONTRIBUTING.md"]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def found(pattern: str) -> dict[str, list[Path]]:
    """What matches on any page, and on which pages."""
    pages: dict[str, list[Path]] = {}
    for page in EVERY_PAGE:
        for match in re.findall(pattern, text_of(page)):
            pages.setdefault(match, []).append(page)
    assert pages
    return pages


@pytest.mark.parametrize(
    "pattern",
    [r"\]\(<?(?!https?:|#)([^)#>]+)", r"```\{(?:literalinclude|include)\} (\S+)"],
    ids=["links", "includes"],
)
def test_links_lead_to_files(pattern: str) -> None:
    broken = [
        (page, link)
        for link, pages in found(pattern).items()
        for page in pages
        if not (page.parent / link).exists()
    ]
    assert broken == []


def test_named_files_exist() -> None:
    named = found(rf"(?:{TEST_FILES}|examples/\w+\.py|docs/[\w./-]+\.\w+)")
    assert {name: pages for name, pages in named.items() if not (ROOT / name).exists()} == {}


def test_named_tests_exist() -> None:
    missing = {}
    for test, pages in found(rf"{TEST_FILES}::\w+").items():
        file, name = test.split("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing[test] = pages
    assert missing == {}


def test_named_benchmarks_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for name, pages in found(r"python -m mamba_cache\.bench (\w+)").items():
        with pytest.raises(SystemExit) as exit_:
            bench([name, "--help"])
        assert exit_.value.code == 0, (pages, capsys.readouterr().err)


def test_every_page_is_in_the_contents() -> None:
    """By name or by pattern; Sphinx warns of the others only while it builds."""
    listed = set()
    for page in PAGES:
        for entries in re.findall(r"```\{toctree\}\n(.*?)```", text_of(page), flags=re.DOTALL):
            for entry in entries.split():
                listed |= {path.resolve() for path in page.parent.glob(f"{entry}.md")}
    assert {page for page in PAGES if page != DOCS / "index.md"} == listed - {
        path for path in listed if "results" in path.parts
    }


def test_the_reference_lists_every_package_with_what_it_is() -> None:
    """Those right below `mamba_cache`; generated pages list what is in them."""
    package = ROOT / "mamba_cache"
    found = {path.parent.name for path in package.glob("*/__init__.py")}
    found |= {path.stem for path in package.glob("[!_]*.py")}
    wanted = {"mamba_cache", *(f"mamba_cache.{name}" for name in found)}
    page = text_of(DOCS / "reference" / "index.md")
    assert set(re.findall(r"^\| \{py:mod\}`([\w.]+)` \| .", page, flags=re.MULTILINE)) == wanted
    assert set(re.findall(r"^\w+ <api/([\w.]+)>$", page, flags=re.MULTILINE)) == wanted


def test_every_run_of_a_benchmark_says_what_it_measured() -> None:
    """The benchmarks page promises hardware, date and command of each file beside it."""
    results = sorted((DOCS / "benchmarks").glob("*.json"))
    assert results
    for path in results:
        assert re.search(r"-\d{4}-\d{2}-\d{2}$", path.stem), f"{path.name} bears no date"
        assert '"machine": "' in text_of(path), f"{path.name} names no hardware"
        assert '"benchmark": "' in text_of(path), f"{path.name} names no benchmark"


def test_the_benchmarks_page_lists_every_kind_of_run() -> None:
    page = text_of(DOCS / "benchmarks" / "index.md")
    listed = re.findall(
        r"^\|.*\| `(?:python -m mamba_cache\.bench|mamba-cache) (\w+)` \|", page, re.M
    )
    results = (DOCS / "benchmarks").glob("*.json")
    assert set(listed) == {json.loads(text_of(path))["benchmark"] for path in results}


def test_the_benchmarks_page_admits_every_limit_that_was_missed() -> None:
    page = text_of(DOCS / "benchmarks" / "index.md")
    results = [json.loads(text_of(path)) for path in (DOCS / "benchmarks").glob("*.json")]
    figures = [one for result in results for one in result.get("measurements", [])]
    missed = [one for one in figures if not one["passed"]]
    said = {0: "None", 1: "One", 2: "Two", 3: "Three", 4: "Four", 5: "Five"}[len(missed)]
    assert f"{said} figures of the runs kept here miss theirs" in page
    assert all(f"{one['limit']:g} times" in page for one in missed)


def ttft_row(path: Path) -> tuple[str, ...]:
    """A run's row in the guide: family, tokens, and the four times."""
    found = {one["name"]: one["value"] for one in json.loads(text_of(path))["measurements"]}
    [hit] = filter(None, (re.fullmatch(r"hit, (.* \+ (\d+)) tokens", name) for name in found))
    names = [f"{what}, {hit[1]} tokens" for what in ("plain transformers", "miss", "hit")]
    times = [found.get(name) for name in (*names, f"forward of {hit[2]} tokens alone")]
    [family] = re.findall(r"^ttft-(.*?)(?:-\d+k)?-h200-", path.stem)
    return family, hit[1], *("out of memory" if ms is None else f"{ms:,.0f} ms" for ms in times)


def test_times_to_first_token_are_those_measured() -> None:
    """Each run is a row of the table in the guide for transformers, and there are no others."""
    page = text_of(DOCS / "how-to" / "transformers.md")
    rows = re.findall(r"^\| (.* \| [\d,]+ \+ \d+ \| .*) \|$", page, flags=re.MULTILINE)
    measured = {ttft_row(path) for path in (DOCS / "benchmarks").glob("ttft-*.json")}
    assert {tuple(row.split(" | ")) for row in rows} == measured
