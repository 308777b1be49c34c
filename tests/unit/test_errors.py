"""The exception tree: base classes that callers catch, and messages."""

import pickle

import pytest

from mamba_cache import _extras, errors
from mamba_cache._extras import install_hint

ALL = [getattr(errors, name) for name in errors.__all__]

BUILT_IN = {
    errors.CapacityError: RuntimeError,
    errors.ConcurrentUseError: RuntimeError,
    errors.ModelChangedError: RuntimeError,
    errors.UnresumableModelError: RuntimeError,
    errors.InvalidArgumentError: ValueError,
    errors.InvariantError: AssertionError,
    errors.MissingExtraError: ImportError,
    errors.MissingStateError: LookupError,
    errors.NotCopyableError: TypeError,
    errors.PoisonedError: RuntimeError,
    errors.StepOrderError: RuntimeError,
    errors.TierInUseError: RuntimeError,
    errors.UnsupportedVersionError: ImportError,
    errors.UnwrittenStateWarning: RuntimeWarning,
}

CAPACITY = [e for e in ALL if issubclass(e, errors.CapacityError)]


def test_one_root() -> None:
    assert [error for error in ALL if not issubclass(error, errors.MambaCacheError)] == []


def test_errors_are_subclasses_of_built_in_ones() -> None:
    uncaught = [
        (leaf, built_in)
        for error, built_in in BUILT_IN.items()
        for leaf in ALL
        if issubclass(leaf, error) and not issubclass(leaf, built_in)
    ]
    assert uncaught == []


def test_every_leaf_has_a_built_in() -> None:
    covered = {leaf for leaf in ALL for error in BUILT_IN if issubclass(leaf, error)}
    assert covered == set(ALL) - {errors.MambaCacheError}


@pytest.mark.parametrize("error", CAPACITY)
def test_capacity_errors_keep_their_numbers_in_every_process(
    error: type[errors.CapacityError],
) -> None:
    """Engines send a worker's exceptions to the process that serves the request."""
    copy = pickle.loads(pickle.dumps(error(7, 3, "6 are pinned")))
    assert type(copy) is error
    assert (copy.required, copy.available, copy.detail) == (7, 3, "6 are pinned")
    supply = "free or evictable slots are" if "slots" in error.resource else "are"
    expected = f"7 {error.resource} are required, but only 3 {supply} available: 6 are pinned"
    assert str(copy) == expected


def test_the_hint_works_in_a_checkout():
    assert install_hint("metrics") == "pip install -e '.[metrics]'"
    assert install_hint("transformers", "peft") == "pip install -e '.[transformers,peft]'"


def test_the_hint_works_beside_an_installed_wheel(monkeypatch, tmp_path):
    """pip finds the installed package, and asks the index for the missing extra."""
    monkeypatch.setattr(_extras, "__file__", str(tmp_path / "mamba_cache" / "_extras.py"))
    assert install_hint("metrics") == "pip install 'mamba-cache[metrics]'"
