"""How the documentation is built: `sphinx-build -n -W docs docs/_build/html`."""

import importlib
import pkgutil
import re
import shutil
from pathlib import Path
from types import ModuleType

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

import mamba_cache

project = "mamba_cache"
author = "the mamba_cache authors"
project_copyright = author
version = release = mamba_cache.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"mamba_cache {version}"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"RowIndices": "mamba_cache.states._rows.RowIndices"}
# Each name is documented once, in the module that defines it, wherever else it is exported.
autodoc_default_options = {"members": True, "ignore-module-all": True, "show-inheritance": True}

nitpick_ignore_regex = [
    # The build needs no network, so names of other projects are not looked up in their inventories.
    (r"py:.*", r"(collections|contextlib|enum|np|numpy|torch|types|typing)\..*"),
    # A private base class or type variable may appear in a signature.
    (r"py:.*", r"(.*\.)?_[A-Z]\w*"),
]

DOCSTRINGS = Config(
    napoleon_use_ivar=True,  # `Attributes:` documents fields, so autodoc need not
    napoleon_custom_sections=["Returns"],  # text, which need not begin with a type
)
REFERENCE = Path(__file__).parent / "reference" / "api"


def exports(package: ModuleType) -> list[str]:
    """Links from the names that a package exports to the pages that document them."""
    lines = []
    for name in package.__all__:
        home = getattr(getattr(package, name), "__module__", None) or package.__name__
        if home.startswith("mamba_cache") and home != package.__name__:
            lines.append(f"- :py:obj:`{name} <{home}.{name}>`")
    return ["Exports:", "", *lines, ""] if lines else []


def write_reference(_app: object) -> None:
    """Write a page for each module, so that none can be forgotten; inner ones in a folder apart."""
    shutil.rmtree(REFERENCE, ignore_errors=True)
    (REFERENCE / "inner").mkdir(parents=True)
    found = pkgutil.walk_packages(mamba_cache.__path__, "mamba_cache.")
    names = [module.name for module in found if not module.name.endswith("__main__")]
    for name in ["mamba_cache", *names]:
        module = importlib.import_module(name)
        body = [name, "=" * len(name), "", f".. automodule:: {name}", ""]
        body += exports(module) if hasattr(module, "__path__") else []
        folder = REFERENCE / "inner" if "._" in name else REFERENCE
        (folder / f"{name}.rst").write_text("\n".join(body), encoding="utf-8")


def read_docstring(
    _app: object, what: str, name: str, obj: object, _options: object, lines: list[str]
) -> None:
    """Turn a Google style docstring into reStructuredText.

    `sphinx.ext.napoleon` as an extension would take what stands before a colon in the docstring of
    an attribute for its type; as a method's docstring it is read for its sections alone. A star, as
    in the shape [layers, *inner], is a star.
    """
    what = "method" if what in ("attribute", "data", "property") else what
    text = [re.sub(r"(?<![*\w`])\*(?=\w)", r"\\*", line) for line in lines]
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


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("autodoc-process-signature", read_signature)
