"""Pages name files, tests and commands that exist, and their links lead somewhere.

Sphinx checks what it can see itself, under `-n -W`: references, pages and headings. Addresses of
other sites are not fetched.
"""

import ast
import json
import re
import runpy
from pathlib import Path

import pytest
from sources import ROOT, Source, is_old_path

from mamba_cache.bench.command import main as bench

DOCS = ROOT / "docs"
PAGES = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if not {"_build", "api", "results"} & set(page.relative_to(DOCS).parts)
]
TABLES = runpy.run_path(str(DOCS / "figures" / "tables.py"))
TEST_FILES = r"tests/[\w/]+\.py"

EVERY_PAGE = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "README.md"]


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
    named = found(r"(?:python -m mamba_cache\.bench|mamba-cache bench) ([a-z]\w*)")
    for name, pages in named.items():
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
    modules = package.glob("[!_]*.py")
    found |= {path.stem for path in modules if not is_old_path(Source(path))}
    wanted = {"mamba_cache", *(f"mamba_cache.{name}" for name in found)}
    page = text_of(DOCS / "reference" / "index.md")
    assert set(re.findall(r"^\| \{py:mod\}`([\w.]+)` \| .", page, flags=re.MULTILINE)) == wanted
    assert set(re.findall(r"^\w+ <api/([\w.]+)>$", page, flags=re.MULTILINE)) == wanted


def test_the_page_on_what_tests_share_names_every_module() -> None:
    support = ROOT / "tests" / "support"
    tables = re.findall(r"^\| (`[^|]*`) \|", text_of(support / "README.md"), flags=re.MULTILINE)
    listed = sorted(name for cell in tables for name in re.findall(r"`(\w+)`", cell))
    assert listed == sorted(path.stem for path in support.glob("*.py"))


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
        r"^\|.*\| `(?:mamba-cache (?:bench )?|python tests/(?:\w+/)*)(\w+)(?:\.py)?` \|", page, re.M
    )
    results = (DOCS / "benchmarks").glob("*.json")
    assert set(listed) == {json.loads(text_of(path))["benchmark"] for path in results}


def test_the_benchmarks_page_admits_every_limit_that_was_missed() -> None:
    page = text_of(DOCS / "benchmarks" / "index.md")
    results = [json.loads(text_of(path)) for path in (DOCS / "benchmarks").glob("*.json")]
    figures = [one for result in results for one in result.get("measurements", [])]
    missed = [one for one in figures if not one["passed"]]
    assert f"\n{len(missed)} figures of the runs kept here miss theirs" in page
    units = {"x": "times"}
    assert all(f"{one['limit']:g} {units.get(one['unit'], one['unit'])}" in page for one in missed)


def ttft_row(path: Path) -> tuple[str, ...]:
    """A run's row in the guide: family, tokens, and the four times."""
    found = {one["name"]: one["value"] for one in json.loads(text_of(path))["measurements"]}
    [hit] = filter(None, (re.fullmatch(r"hit, (.* \+ (\d+)) tokens", name) for name in found))
    names = [f"{what}, {hit[1]} tokens" for what in ("plain transformers", "miss", "hit")]
    times = [found.get(name) for name in (*names, f"forward of {hit[2]} tokens alone")]
    [family] = re.findall(r"^ttft-(.*?)(?:-\d+k)?-h200-", path.stem)
    return family, hit[1], *("out of memory" if ms is None else f"{ms:,.0f} ms" for ms in times)


def test_times_to_first_token_are_those_measured() -> None:
    """Each run of the reference path is a row of its table in the guide; there are no others."""
    guide = text_of(DOCS / "how-to" / "transformers.md").split(TABLES["END"])[1]
    rows = re.findall(r"^\| (.* \| [\d,]+ \+ \d+ \| .*) \|$", guide, flags=re.MULTILINE)
    paths = (DOCS / "benchmarks").glob("ttft-*.json")
    measured = {ttft_row(path) for path in paths if "-kernels-" not in path.stem}
    assert {tuple(row.split(" | ")) for row in rows} == measured


def test_the_guide_has_every_run_with_kernels() -> None:
    """If this fails, `python docs/figures/tables.py` writes them anew."""
    guide = text_of(DOCS / "how-to" / "transformers.md")
    written = guide.split(TABLES["BEGIN"])[1].split(TABLES["END"])[0]
    assert written.strip() == TABLES["block"](TABLES["kernel_runs"]()).strip()


@pytest.fixture
def kernel_run(tmp_path: Path) -> dict:
    """A run of a family with kernels, as the benchmark prints it."""
    times = {"plain transformers": 500.4, "miss": 520, "second sighting": 530, "hit": 50.2}
    times |= {"next turn": 51, "the new tokens alone": 48}
    chat = "chat of 2 users and 8 turns, first tokens, "
    totals = {"plain transformers": 2000, "through the cache": 840, "the new tokens alone": 800}
    values = {f"{way}, 16,128 + 256 tokens": value for way, value in times.items()}
    values |= {"hit, faster than plain, 16,128 + 256 tokens": 9.9, "break-even": 900}
    values |= {chat + way: value for way, value in totals.items()}
    run = {
        "family": "nemotron-h-8b",
        "machine": "x86_64, 16 CPUs, NVIDIA H200",
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0"},
        "kernels": {"scan": "mamba_ssm 2.3", "convolution": "reference (PyTorch)"},
        "chat": {"users": 2, "turns": 8, "system_tokens": 3000},
        "measurements": [
            {"name": name, "value": value, "detail": "all win"} for name, value in values.items()
        ],
    }
    path = tmp_path / "ttft-nemotron-h-8b-kernels-h200-2026-11-22.json"
    path.write_text(json.dumps(run), encoding="utf-8")
    [read] = TABLES["kernel_runs"](tmp_path)
    return read


def test_a_run_with_kernels_becomes_rows(kernel_run: dict) -> None:
    text = TABLES["block"]([kernel_run])
    assert "one NVIDIA H200, PyTorch 2.11.0, Triton 3.6.0, transformers 5.17.0, 2026-11-22" in text
    times = "500 ms | 520 ms | 530 ms | 50 ms | 51 ms | 48 ms"
    assert f"| nemotron-h-8b | mamba_ssm 2.3 | 16,128 + 256 | {times} |" in text
    assert "hits win from 900 cached tokens on (all win)" in text
    assert "| nemotron-h-8b | mamba_ssm 2.3 | 2,000 ms | 840 ms | 800 ms | 1.05x |" in text
    chat_alone = kernel_run | {"measurements": [], "kernels": {"scan": "a 1", "convolution": "b 2"}}
    assert TABLES["shown_run"]([chat_alone, kernel_run]) is kernel_run
    assert TABLES["shown_run"]([chat_alone]) is None
    row = TABLES["readme_row"](kernel_run)
    assert "kernels of mamba_ssm 2.3 | 50 ms instead of 500 ms; a miss takes 1.04x of that |" in row
    kernel_run["measurements"] = kernel_run["measurements"][1:]
    assert "| 16,128 + 256 | out of memory | 520 ms" in TABLES["rows"](kernel_run)[0]


def test_the_page_on_expectations_has_every_run_with_kernels() -> None:
    """If this fails, `python docs/figures/tables.py` writes it anew."""
    page = text_of(DOCS / "benchmarks" / "expect.md")
    shown = page.split(TABLES["BEGIN"])[1].split(TABLES["END"])[0]
    assert shown.strip() == TABLES["expected_block"](TABLES["kernel_runs"]())
