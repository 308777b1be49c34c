"""Guards of what hands things out, of what is part of another, and of callers that wait."""

import threading

import pytest

from mamba_cache._guard import CallGuard, exclusive, guarded, query
from mamba_cache.errors import ConcurrentUseError, InvalidArgumentError, PoisonedError


class Pool:
    """Hands out numbers, and cannot know who has them."""

    def __init__(self, guard=None):
        self.left = [1, 2, 3]
        self._guard = guard or CallGuard(self.check, proves_changes=False)

    def check(self):
        pass

    @guarded(nests=True)
    def take(self, work=lambda: None, *, then=lambda: None):
        work()
        self._guard.is_changing = True
        number = self.left.pop()
        then()
        return number

    @guarded(nests=True)
    def take_two(self):
        return self.take(), self.take()

    @query
    def num_left(self):
        return len(self.left)

    @guarded(nests=True, renews=True)
    def reset(self, refuse=lambda: None):
        refuse()
        self._guard.is_changing = True
        self.left = [1, 2, 3]


class Owner:
    """Has a pool, and a guard for both."""

    def __init__(self):
        self._guard = CallGuard(self.check)
        self.pool = Pool(self._guard)
        self.taken = []

    def check(self):
        if len(self.taken) + len(self.pool.left) != 3:
            raise InvalidArgumentError("numbers are lost")

    @exclusive
    def take(self, then=lambda: None):
        number = self.pool.take(then=then)
        self.taken.append(number)

    @guarded(waits=True)
    def wait(self, work):
        return work()


def raising(error):
    def work():
        raise error

    return work


def test_before_a_change_nothing_is_lost():
    pool = Pool()
    for error in (OSError(), KeyboardInterrupt(), InvalidArgumentError()):
        with pytest.raises(type(error)):
            pool.take(raising(error))
    assert pool.num_left() == 3


@pytest.mark.parametrize("error", [OSError(), KeyboardInterrupt(), InvalidArgumentError()])
def test_a_change_that_breaks_off_poisons_whatever_the_books_say(error):
    pool = Pool()
    with pytest.raises(type(error)):
        pool.take(then=raising(error))
    for call in (pool.take, pool.take_two, pool.num_left):
        with pytest.raises(PoisonedError, match=r"take broke off with .* in the middle"):
            call()
    pool.reset()
    assert (pool.take_two(), pool.num_left()) == ((3, 2), 1)


def test_a_reset_that_is_refused_changes_nothing():
    pool = Pool()
    with pytest.raises(InvalidArgumentError):
        pool.reset(raising(InvalidArgumentError()))
    assert pool.take() == 3
    with pytest.raises(OSError, match="disk"):
        pool.take(then=raising(OSError("disk")))
    with pytest.raises(InvalidArgumentError):
        pool.reset(raising(InvalidArgumentError()))
    with pytest.raises(PoisonedError, match="take broke off"):
        pool.take()
    with pytest.raises(OSError, match="disk"):
        pool.reset(raising(OSError("disk")))
    with pytest.raises(PoisonedError, match="reset was interrupted"):
        pool.take()
    pool.reset()
    assert pool.take() == 3


def test_what_is_part_of_another_is_proved_with_it():
    owner = Owner()
    with pytest.raises(OSError, match="disk"):
        owner.take(raising(OSError("disk")))
    for call in (owner.take, owner.pool.take, owner.pool.reset, owner.pool.num_left):
        with pytest.raises(PoisonedError, match=r"take broke off .*numbers are lost"):
            call()


def test_the_reset_of_a_part_does_not_make_the_whole_new():
    owner = Owner()
    owner.pool.reset()  # allowed, as between any two calls
    with pytest.raises(OSError, match="disk"):
        owner.take(raising(OSError("disk")))
    with pytest.raises(PoisonedError):
        owner.pool.reset()


def test_a_part_outlives_its_owner_but_cannot_be_proved_without():
    pool = Owner().pool
    assert pool.take() == 3
    with pytest.raises(OSError, match="disk"):
        pool.take(raising(OSError("disk")))
    with pytest.raises(PoisonedError, match="what it belonged to is gone"):
        pool.take()


def test_without_a_guard_all_pass():
    pool = Pool()
    pool._guard = None
    pool.left = [9]
    assert pool.num_left() == 1
    with pytest.raises(OSError, match="disk"):
        Pool.take(pool, raising(OSError("disk")))


def test_a_query_by_another_thread_is_refused_while_a_call_runs():
    pool, errors = Pool(), []

    def ask():
        try:
            pool.num_left()
        except ConcurrentUseError as error:
            errors.append(str(error))

    def work():
        assert pool.num_left() == 3  # of the same thread, as a part of the call
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    pool.take(work)
    assert len(errors) == 1
    assert "num_left was called by another thread while take was running" in errors[0]


def test_one_who_waits_is_served_when_the_other_is_done():
    owner, order = Owner(), []
    entered, go_on = threading.Event(), threading.Event()

    def slow():
        entered.set()
        assert go_on.wait(30)
        order.append("first")

    first = threading.Thread(target=lambda: owner.wait(slow))
    first.start()
    assert entered.wait(30)
    second = threading.Thread(target=lambda: owner.wait(lambda: order.append("second")))
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert order == ["first", "second"]
    with pytest.raises(ConcurrentUseError, match="from within it"):
        owner.wait(lambda: owner.wait(list))


@pytest.mark.parametrize("by_another_thread", [False, True])
def test_a_call_that_never_came_to_its_end_stops_nobody_for_ever(by_another_thread):
    """Interrupted twice, it is still noted as running; but no frame of it is left."""
    owner = Owner()

    def break_off():
        owner._guard.enter((threading.get_ident(), "take"))

    if by_another_thread:
        thread = threading.Thread(target=break_off)
        thread.start()
        thread.join()
    else:
        break_off()
    for call in (owner.take, lambda: owner.wait(list)):
        with pytest.raises(PoisonedError, match="take was interrupted"):
            call()


def test_a_query_after_a_call_that_never_came_to_its_end_is_poisoned():
    pool = Pool()
    thread = threading.Thread(target=lambda: pool._guard.enter((threading.get_ident(), "take")))
    thread.start()
    thread.join()
    with pytest.raises(PoisonedError, match="take was interrupted"):
        pool.num_left()


def test_an_error_of_something_that_is_poisoned_itself_poisons():
    owner = Owner()
    with pytest.raises(PoisonedError):
        owner.wait(raising(PoisonedError("the one inside")))
    with pytest.raises(PoisonedError, match=r"wait broke off with .*the one inside"):
        owner.take()


def test_a_result_that_nobody_got_poisons(monkeypatch):
    """The number was taken, and the call that had taken it was interrupted as it returned."""
    pool, owner = Pool(), Owner()
    leave, calls = CallGuard.leave, []

    def interrupted(self, call):
        leave(self, call)
        calls.append(call)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(CallGuard, "leave", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.take()
    with pytest.raises(PoisonedError, match="take was interrupted when it had done its work"):
        pool.take()
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        owner.take()
    assert owner.taken == [3]  # which its owner knows, so nothing is lost
    owner.take()


def test_arguments_reach_a_method_within_another_call_and_without_a_guard():
    class Adder:
        _guard = None

        @guarded(nests=True)
        def add(self, first, *, second):
            return first + second

        @guarded(nests=True)
        def add_twice(self, first, *, second):
            return self.add(self.add(first, second=second), second=second)

        def check(self):
            pass

    adder = Adder()
    assert adder.add_twice(1, second=2) == 5
    adder._guard = CallGuard(adder.check)
    assert adder.add_twice(1, second=2) == 5


def test_only_a_call_that_makes_everything_new_ends_a_poisoning():
    class Counter:
        def __init__(self):
            self._guard = CallGuard(self.check, proves_changes=False)

        def check(self):
            pass

        @guarded()
        def count(self, work=lambda: None):
            self._guard.is_changing = True
            work()

        @guarded(renews=True)
        def reset(self):
            pass

    counter = Counter()
    with pytest.raises(OSError, match="disk"):
        counter.count(raising(OSError("disk")))
    for _ in range(2):
        with pytest.raises(PoisonedError, match="count broke off"):
            counter.count()
    counter.reset()
    counter.count()


def test_a_question_is_asked_as_it_is_put():
    class Sum:
        _guard = None

        @query
        def of(self, first, *, second):
            return first + second

    assert Sum().of(1, second=2) == 3
