"""How the documentation is built: `sphinx-build -n -W docs docs/_build/html`."""

import importlib
import inspect
import json
import pkgutil
import re
import runpy
import shutil
from html import escape
from pathlib import Path
from types import MappingProxyType, ModuleType

from docutils.nodes import Element, document, image, raw
from prometheus_client import CollectorRegistry
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import Config, GoogleDocstring

import mamba_cache
from mamba_cache.integrations.prometheus import CacheCollector, CallDurations

project = "mamba_cache"
author = "the mamba_cache authors"
project_copyright = author
version = release = mamba_cache.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest"]
exclude_patterns = ["_build", "benchmarks/tables"]
html_theme = "furo"
html_title = f"mamba_cache {version}"
html_static_path = ["_static", "figures/figures.css"]
html_css_files = ["site.css", "figures.css"]
html_copy_source = False
html_use_index = html_domain_indices = False  # the reference and the search lead to every name

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"RowIndices": "mamba_cache.states.copier.RowIndices"}
# Each name is documented once, in the module that defines it, wherever else it is exported.
autodoc_default_options = {"members": True, "ignore-module-all": True, "show-inheritance": True}

nitpick_ignore_regex = [
    # The build needs no network, so names of other projects are not looked up in their inventories.
    (
        r"py:.*",
        r"(abc|argparse|ast|collections|concurrent|contextlib|contextvars|enum|os|pathlib|ssl|threading|types|typing)\..*",
    ),
    (r"py:.*", r"(np|numpy|prometheus_client|torch|zmq)\..*"),
    # An alias of one of numpy's types; the standard library's array, as it calls itself.
    (r"py:class", r"Int(64)?Array|array"),
    # A private base class or type variable may appear in a signature.
    (r"py:.*", r"(.*\.)?_[A-Z]\w*"),
]

DOCSTRINGS = Config(
    napoleon_use_ivar=True,  # `Attributes:` documents fields, so autodoc need not
    napoleon_custom_sections=["Returns"],  # text, which need not begin with a type
)
REFERENCE = Path(__file__).parent / "reference" / "api"
RESULTS = Path(__file__).parent / "benchmarks"
FIGURES = Path(__file__).parent / "figures"


def first_sentence(documented: object) -> str:
    """The first sentence of a docstring, on one line; "" if there is none."""
    text = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    sentence = re.match(r".*?[.?!](?= |$)", text)
    return literal_stars(sentence[0] if sentence else text)


def literal_stars(text: str) -> str:
    """The same text, in which a star, as in the shape [layers, *inner], is a star."""
    return re.sub(r"(?<![*\w`])\*(?=\w)", r"\\*", text)


def exports(package: ModuleType) -> list[str]:
    """What a package exports: each name with its sentence and a link to where it is documented."""
    lines = []
    for name in package.__all__:
        exported = getattr(package, name)
        home = getattr(exported, "__module__", None) or package.__name__
        if home.startswith("mamba_cache") and home != package.__name__:
            sentence = first_sentence(exported) if callable(exported) else ""
            lines.append(f"- :py:obj:`{name} <{home}.{name}>`: {sentence}".rstrip(": "))
    return titled("Exports", lines)


def exported_classes() -> set[str]:
    """The classes that a package exports, but exceptions, which stand together on one page."""
    found = [mamba_cache.__name__]
    found += [
        module.name
        for module in pkgutil.walk_packages(mamba_cache.__path__, "mamba_cache.")
        if module.ispkg and not re.search(r"\._|\.(bench|cli)\b", module.name)
    ]
    packages = [importlib.import_module(name) for name in found if not is_old_path(name)]
    classes = [getattr(package, name) for package in packages for name in package.__all__]
    return {
        f"{one.__module__}.{one.__qualname__}"
        for one in classes
        if inspect.isclass(one) and not issubclass(one, BaseException)
    }


def module_page(module: ModuleType, exported: set[str]) -> tuple[list[str], list[str]]:
    """A module's page, and the classes that have a page of their own."""
    name = module.__name__
    defined = [one for one in module.__all__ if is_defined_in(module, one)]
    apart = [one for one in defined if f"{name}.{one}" in exported and len(defined) > 1]
    lines = [name, "=" * len(name), ""]
    if len(defined) > 1:
        sentences_on = {one: first_sentence(getattr(module, one)) for one in defined}
        lines += [f"- :py:obj:`~{name}.{one}`: {text}" for one, text in sentences_on.items()]
    lines += ["", f".. automodule:: {name}"]
    lines += [f"   :exclude-members: {', '.join(apart)}"] if apart else []
    lines += [""]
    return lines, apart


def is_defined_in(module: ModuleType, name: str) -> bool:
    """Whether a module defines a class or a function itself."""
    one = getattr(module, name)
    is_its_own = getattr(one, "__module__", None) == module.__name__
    return is_its_own and (inspect.isclass(one) or inspect.isfunction(one))


def titled(title: str, lines: list[str]) -> list[str]:
    """A part of a page, if it has lines."""
    return [title, "-" * len(title), "", *lines, ""] if lines else []


def contents(package: ModuleType) -> list[str]:
    """The modules of a package, those that define what it exports first; private ones are apart."""
    homes = [getattr(getattr(package, name), "__module__", None) for name in package.__all__]
    found = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    names = [module.name for module in found if not is_inner(module.name)]
    names = [name for name in names if not name.endswith("__main__") and not is_old_path(name)]
    if package is mamba_cache:
        return []  # its contents are those of the reference's first page
    # A name from a package below, such as `kernels`, counts for that package.
    public = [name for name in names if any(f"{home}.".startswith(f"{name}.") for home in homes)]
    others = [name for name in names if name not in public]
    if not public:
        public, others = others, []
    lines = titled("Modules", sentences(public)) + titled(
        "What they are made of", sentences(others)
    )
    listed = [f"   {name.rpartition('.')[2]} <{name}>" for name in [*public, *others]]
    return [*lines, ".. toctree::", "   :hidden:", "", *listed, ""] if listed else []


def sentences(names: list[str]) -> list[str]:
    """A line for each module: its name, which leads to its page, and what it is."""
    return [
        f"- :py:mod:`~{name}`: {first_sentence(importlib.import_module(name))}" for name in names
    ]


def is_inner(module: str) -> bool:
    """Whether a module is for those who work on the package, as its name says."""
    return "._" in module


def is_old_path(module: str) -> bool:
    """Whether a module only stands for another one, under the name that this had before."""
    return (importlib.import_module(module).__doc__ or "").startswith("Old import path of")


def overview(modules: list[str]) -> list[str]:
    """Every module by package, with a sentence on each; pages of inner ones are listed here."""
    title = "Every module"
    lines = [title, "=" * len(title), ""]
    packages = [name for name in modules if hasattr(importlib.import_module(name), "__path__")]
    for package in packages:
        members = [name for name in modules if name.rpartition(".")[0] == package]
        members = [name for name in members if name not in packages]
        about = f":py:mod:`{package}`: {first_sentence(importlib.import_module(package))}"
        lines += titled(package, [about, "", *sentences(members)])
    inner = [f"   {name} <inner/{name}>" for name in modules if is_inner(name)]
    return [*lines, ".. toctree::", "   :hidden:", "", *inner, ""]


def write_reference(_app: object) -> None:
    """Write a page for each module, so that none can be forgotten; inner ones in a folder apart."""
    shutil.rmtree(REFERENCE, ignore_errors=True)
    (REFERENCE / "inner").mkdir(parents=True)
    found = pkgutil.walk_packages(mamba_cache.__path__, "mamba_cache.")
    names = [module.name for module in found if not module.name.endswith("__main__")]
    names = ["mamba_cache", *(name for name in names if not is_old_path(name))]
    (REFERENCE / "modules.rst").write_text("\n".join(overview(names)), encoding="utf-8")
    exported = exported_classes()
    for name in names:
        module = importlib.import_module(name)
        body, apart = module_page(module, set() if is_inner(name) else exported)
        if hasattr(module, "__path__"):
            body += exports(module) + contents(module)
        folder = REFERENCE / "inner" if is_inner(name) else REFERENCE
        (folder / f"{name}.rst").write_text("\n".join(body), encoding="utf-8")
        for one in apart:
            # An orphan: hundreds of entries beside every page would help nobody.
            page = [":orphan:", "", one, "=" * len(one), "", f".. autoclass:: {name}.{one}", ""]
            page += [f"From :py:mod:`{name}`.", ""]
            (folder / f"{name}.{one}.rst").write_text("\n".join(page), encoding="utf-8")


def write_tables(_app: object) -> None:
    """Write the tables that pages include, from the runs that are kept."""
    folder = RESULTS / "tables"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in runpy.run_path(str(FIGURES / "tables.py"))["fragments"]().items():
        (folder / f"{name}.md").write_text(f"{text}\n", encoding="utf-8")
    (folder / "metrics.md").write_text("\n".join(metrics()), encoding="utf-8")


class AnyStats:
    """Statistics in which every count is 1, by whatever label."""

    name = "host"
    misses = bypasses = differences = dropped = refused = MappingProxyType({"": 1})
    entries = rows = row_bytes = MappingProxyType({"": 1})

    def __getattr__(self, _field: str) -> int:
        return 1

    def stats(self) -> "AnyStats":
        return self

    verification_stats = stats

    def tier_stats(self) -> list["AnyStats"]:
        return [self]


def metrics() -> list[str]:
    """A table of the metrics that a collector exports, and of the histogram beside them."""
    lines = ["| metric | labels besides `cache` | what it says |", "|---|---|---|"]
    registry = CollectorRegistry()
    registry.register(CacheCollector({"main": AnyStats()}))
    CallDurations(registry).watch("main", AnyStats())
    for metric in registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = dict.fromkeys(label for one in metric.samples for label in one.labels)
        others = ", ".join(f"`{label}`" for label in labels if label not in ("cache", "le"))
        lines.append(f"| `{name}` | {others} | {metric.documentation} |")
    return [*lines, ""]


def write_results(_app: object) -> None:
    """Write a page for each run of a benchmark, and one that lists them; none is in the sidebar."""
    folder = RESULTS / "results"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    orphan = "---\norphan: true\n---\n"
    listed = [orphan, "# All runs", "", "Each as it was printed. [Back](../index.md).", ""]
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        date = path.stem[-len("2026-01-01") :]
        listed.append(f"- [{path.stem}]({path.stem}.md)")
        made = [result[key] for key in ("machine", "python") if key in result]
        lines = [orphan, f"# {path.stem}", "", f"{'; Python '.join(made)}; {date}."]
        lines += [f"{{download}}`The file <../{path.name}>`. [All runs](index.md).", ""]
        if "kernels" in result:
            kinds = [*result["versions"].items(), *result["kernels"].items()]
            lines += ["; ".join(f"{name}: {value}" for name, value in kinds) + ".", ""]
        if "measurements" in result:
            lines += ["| what | result | limit | |", "|---|---|---|---|"]
            lines += [result_row(one) for one in result["measurements"]]
        lines += ["", *records_table(result.get("records", []))]
        lines += ["", *records_table(result.get("chat", {}).get("requests", []))]
        (folder / f"{path.stem}.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    (folder / "index.md").write_text("\n".join([*listed, ""]), encoding="utf-8")


def result_row(one: dict) -> str:
    """A measurement as a row: name, figure, limit if it has one, and what it was derived from."""
    limit = "" if one.get("limit") is None else f"{one['limit']:g} {one['unit']}"
    kept = "" if one.get("passed", True) else " **missed**"
    sign = "" if not limit else "at least " if one["at_least"] else "at most "
    return (
        f"| {one['name']} | {one['value']:,.2f} {one['unit']} | {sign}{limit}{kept} "
        f"| {one['detail']} |"
    )


def in_words(value: object) -> str:
    """A value of a record; None stands for a budget that never runs out."""
    return "unlimited" if value is None else f"{value:,}" if type(value) is int else f"{value}"


def records_table(records: list[dict]) -> list[str]:
    """Records as a table, without the columns that are the same in every row."""
    names = dict.fromkeys(name for record in records for name in record)
    columns = [
        name
        for name in names
        if len({str(record.get(name)) for record in records}) > 1
        and not any(isinstance(record.get(name), dict) for record in records)
    ]
    if not columns:
        return []
    rows = [[name.replace("_", " ") for name in columns], ["---"] * len(columns)]
    rows += [
        [in_words(record[name]) if name in record else "" for name in columns] for record in records
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def read_docstring(
    _app: object, what: str, name: str, obj: object, _options: object, lines: list[str]
) -> None:
    """Turn a Google style docstring into reStructuredText.

    `sphinx.ext.napoleon` as an extension would take what stands before a colon in the docstring of
    an attribute for its type; as a method's docstring it is read for its sections alone.
    """
    what = "method" if what in ("attribute", "data", "property") else what
    text = [literal_stars(line) for line in lines]
    lines[:] = GoogleDocstring(text, DOCSTRINGS, what=what, name=name, obj=obj).lines()


def read_signature(
    _app: object,
    _what: str,
    _name: str,
    _obj: object,
    _options: object,
    args: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """Let Sphinx parse the signature of a dataclass in which a field has a `default_factory`."""
    return (args.replace("<factory>", "..."), returns) if args else None


def find_at_home(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Element
) -> Element | None:
    """Lead a link to a name of the front door to the module that documents it."""
    package, _, name = node["reftarget"].rpartition(".")
    home = getattr(getattr(mamba_cache, name, None), "__module__", None)
    if package != mamba_cache.__name__ or home is None or node["refdomain"] != "py":
        return None
    target = f"{home}.{name}"
    domain, page = env.get_domain("py"), node["refdoc"]
    return domain.resolve_xref(env, page, app.builder, node["reftype"], target, node, content)


def inline_figures(app: Sphinx, doctree: document, _page: str) -> None:
    """Put the figures into the pages, so that they follow the switch between light and dark."""
    if app.builder.format != "html":
        return
    for node in list(doctree.findall(image)):
        path = FIGURES / Path(node["uri"]).name
        if path.suffix == ".svg" and path.exists():
            svg = path.read_text(encoding="utf-8")
            svg = svg[svg.index("<svg") :]
            svg = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
            svg = re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{path.stem}-", svg)  # once on a page
            label = f'<svg class="figure" role="img" aria-label="{escape(node["alt"])}"'
            node.replace_self(raw("", svg.replace("<svg", label, 1), format="html"))


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_tables)
    app.connect("doctree-resolved", inline_figures)
    app.connect("builder-inited", write_reference)
    app.connect("builder-inited", write_results)
    app.connect("missing-reference", find_at_home)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("autodoc-process-signature", read_signature)
