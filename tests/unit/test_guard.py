"""What the guard makes of calls that end badly."""

import sys

import pytest

from mamba_cache._guard import CallGuard, exclusive, guarded
from mamba_cache.errors import (
    ConcurrentUseError,
    InvalidArgumentError,
    InvariantError,
    MambaCacheError,
    PoisonedError,
)


@pytest.fixture
def thing():
    return make_thing()


def make_thing():
    """Makes something with a guard, and books that are right or not.

    Its class is new as well: the decorators are under test.
    """

    class Thing:
        def __init__(self):
            self.is_right, self.num_checks, self.error = True, 0, None
            self._guard = CallGuard(self.check)

        def check(self):
            self.num_checks += 1
            if self.error:
                raise self.error
            if not self.is_right:
                raise InvariantError("two and two are five")

        @exclusive
        def do(self, work):
            return work()

        @guarded(renews=True)
        def _reset(self, work=lambda: None):
            work()
            self.is_right = True

    return Thing()


def raise_(error, context=None):
    if context is not None:
        try:
            raise context
        except type(context):
            raise error  # noqa: B904 (the rollback's own error)
    raise error


def test_a_call_that_ends_well_costs_no_check(thing):
    assert thing.do(lambda: 5) == 5
    assert thing.do(work=lambda: 6) == 6
    assert thing.num_checks == 0


def test_the_packages_own_errors_are_believed(thing):
    for _ in range(2):
        with pytest.raises(InvalidArgumentError):
            thing.do(lambda: raise_(InvalidArgumentError("no")))
    assert thing.num_checks == 0


@pytest.mark.parametrize("error", [OSError("disk"), MemoryError(), KeyboardInterrupt()])
def test_after_a_foreign_error_the_books_are_proved(thing, error):
    with pytest.raises(type(error)):
        thing.do(lambda: raise_(error))
    assert thing.num_checks == 1
    assert thing.do(lambda: 5) == 5


def test_books_that_are_wrong_poison(thing):
    thing.is_right = False
    with pytest.raises(OSError, match="disk"):
        thing.do(lambda: raise_(OSError("disk")))
    for _ in range(2):
        with pytest.raises(PoisonedError, match=r"do broke off .*disk.*two and two are five"):
            thing.do(lambda: 5)
    thing._reset()
    assert thing.do(lambda: 5) == 5


def test_an_own_error_on_the_way_back_from_a_foreign_one_is_not_believed(thing):
    """The rollback gave back twice what the interrupt had left half given back."""
    thing.is_right = False
    with pytest.raises(MambaCacheError):
        thing.do(lambda: raise_(MambaCacheError("twice"), OSError("disk")))
    with pytest.raises(PoisonedError):
        thing.do(lambda: 5)


def test_an_own_error_that_translates_a_foreign_one_is_believed(thing):
    def translate():
        try:
            raise TypeError
        except TypeError as error:
            raise InvalidArgumentError("no") from error

    thing.is_right = False
    with pytest.raises(InvalidArgumentError):
        thing.do(translate)
    assert thing.num_checks == 0


def test_an_interrupted_proof_proves_nothing(thing):
    thing.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        thing.do(lambda: raise_(OSError("disk")))
    with pytest.raises(PoisonedError, match="do was interrupted"):
        thing.do(lambda: 5)


@pytest.mark.parametrize("error", [OSError("disk"), MambaCacheError("own")])
def test_a_reset_that_fails_heals_nothing(thing, error):
    thing.is_right = False
    with pytest.raises(OSError, match="first"):
        thing.do(lambda: raise_(OSError("first")))
    with pytest.raises(type(error)):
        thing._reset(lambda: raise_(error))
    with pytest.raises(PoisonedError, match="reset was interrupted"):
        thing.do(lambda: 5)
    thing._reset()
    assert thing.do(lambda: 5) == 5


def test_a_call_from_within_is_refused_and_does_no_harm(thing):
    with pytest.raises(ConcurrentUseError, match="do was called from within it while do was"):
        thing.do(lambda: thing.do(lambda: 5))
    assert thing.do(lambda: 5) == 5


def test_the_guard_itself_may_be_interrupted_anywhere(thing):
    """Removed to see it fail: the second ``leave`` in ``_guard``."""
    module = sys.modules[CallGuard.__module__]
    for index in range(1, 400):
        thing = make_thing()
        tracer = _StrikeIn(module.__file__, index)
        previous = sys.gettrace()
        sys.settrace(tracer)
        try:
            thing.do(lambda: 5)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(previous)
        try:
            assert thing.do(lambda: 6) == 6
        except PoisonedError:
            thing._reset()
            assert thing.do(lambda: 6) == 6
    assert 20 < index < 399


class _StrikeIn:
    """Raises KeyboardInterrupt before the ``index``-th instruction in one file."""

    def __init__(self, file, index):
        self.file, self.left = file, index

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename != self.file:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self
