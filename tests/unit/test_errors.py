"""The exception tree: what callers catch, and what messages tell them."""

import pickle

import pytest

from mamba_cache import errors

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


def test_callers_who_know_only_built_ins_catch_them() -> None:
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
def test_capacity_errors_say_what_is_short(error: type[errors.CapacityError]) -> None:
    raised = error(7, 3)
    assert (raised.required, raised.available) == (7, 3)
    assert raised.resource in str(raised)
    assert "7 " in str(raised)
    assert "only 3 " in str(raised)


def test_detail_is_appended() -> None:
    raised = errors.BlockCapacityError(2, 1, "6 blocks are pinned")
    assert str(raised) == (
        "2 KV blocks are required, but only 1 are available: 6 blocks are pinned"
    )


def test_slot_message_is_the_one_that_embedders_know() -> None:
    raised = errors.MambaSlotCapacityError(4, 2)
    assert str(raised).endswith("only 2 free or evictable slots are available")


@pytest.mark.parametrize("error", CAPACITY)
def test_capacity_errors_survive_a_process_boundary(error: type[errors.CapacityError]) -> None:
    """Engines send a worker's exceptions to the process that serves the request."""
    raised = error(7, 3)
    copy = pickle.loads(pickle.dumps(raised))
    assert type(copy) is error
    assert (str(copy), copy.required, copy.available) == (str(raised), 7, 3)


def test_the_arguments_of_an_error_show_in_what_logs_print() -> None:
    assert repr(errors.BlockCapacityError(7, 3, "x")) == "BlockCapacityError(7, 3, 'x')"
