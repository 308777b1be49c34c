"""How messages say that something optional is missing."""

from mamba_cache import _extras
from mamba_cache._extras import install_hint


def test_the_hint_works_in_a_checkout():
    assert install_hint("metrics") == "pip install -e '.[metrics]'"
    assert install_hint("transformers", "peft") == "pip install -e '.[transformers,peft]'"


def test_the_hint_works_beside_an_installed_wheel(monkeypatch, tmp_path):
    """pip finds the package itself where it is installed, and asks the index for the rest."""
    monkeypatch.setattr(_extras, "__file__", str(tmp_path / "mamba_cache" / "_extras.py"))
    assert install_hint("metrics") == "pip install 'mamba-cache[metrics]'"
