"""How the documentation is built: `sphinx-build -n -W docs docs/_build/html`."""

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import mamba_cache

project = "mamba_cache"
author = "the mamba_cache authors"
project_copyright = author
version = release = mamba_cache.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"mamba_cache {version}"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Each name is documented once, in the module that defines it, wherever else it is exported.
autodoc_default_options = {"members": True, "ignore-module-all": True, "show-inheritance": True}
# A class's `Attributes:` section documents its fields; autodoc must not list them again.
napoleon_use_ivar = True

# The build needs no network, so names of other projects are not looked up in their inventories.
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|contextlib|enum|np|numpy|torch|types|typing)\..*"),
]

REFERENCE = Path(__file__).parent / "reference" / "api"


def public_modules() -> list[str]:
    """Every module of the package without an underscore in front of any part of its name."""
    found = pkgutil.walk_packages(mamba_cache.__path__, "mamba_cache.")
    names = (module.name for module in found)
    return [name for name in names if not any(part.startswith("_") for part in name.split("."))]


def exports(package: ModuleType) -> list[str]:
    """Links from the names that a package exports to the pages that document them."""
    lines = []
    for name in package.__all__:
        home = getattr(getattr(package, name), "__module__", None) or package.__name__
        if home.startswith("mamba_cache") and home != package.__name__:
            lines.append(f"- :py:obj:`{name} <{home}.{name}>`")
    return ["Exports:", "", *lines, ""] if lines else []


def write_reference(_app: object) -> None:
    """Write one page a module, so that none can be forgotten."""
    REFERENCE.mkdir(exist_ok=True)
    names = ["mamba_cache", *public_modules()]
    for name in names:
        module = importlib.import_module(name)
        body = [name, "=" * len(name), "", f".. automodule:: {name}", ""]
        body += exports(module) if hasattr(module, "__path__") else []
        page = REFERENCE / f"{name}.rst"
        text = "\n".join(body)
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
    for page in REFERENCE.glob("*.rst"):
        if page.stem not in names:
            page.unlink()


def setup(app: object) -> None:
    app.connect("builder-inited", write_reference)
