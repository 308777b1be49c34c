"""What the cost model of a prefix cache learns, from clocks that the tests turn."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.integrations.transformers.costs import CostModel, fewest_winning, make_cost_model


class Machine:
    """A host and a device with clocks that are turned by hand; the device works when told to."""

    def __init__(self):
        self.host = self.device = 0.0
        self.queue = []
        self.num_events = 0

    def make_event(self):
        self.num_events += 1
        return Event(self)

    def work_off(self):
        for run in self.queue:
            run()
        self.queue.clear()

    def enqueue(self, seconds):
        def run():
            self.device += seconds

        self.queue.append(run)


class Event:
    def __init__(self, machine):
        self.machine, self.at = machine, None

    def record(self):
        def run():
            self.at = self.machine.device

        self.at = None
        self.machine.queue.append(run)

    def query(self):
        return self.at is not None

    def milliseconds_since(self, start):
        return 1e3 * (self.at - start.at)


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def costs(machine):
    return CostModel(clock=lambda: machine.host)


def forward(costs, machine, num_tokens, seconds, start=0, num_cuts=0):
    with costs.forward(num_tokens, start, num_cuts):
        machine.host += seconds


def restore(costs, machine, num_bytes, seconds):
    with costs.restore(num_bytes):
        machine.host += seconds


def test_the_first_run_of_a_length_warms_up(costs, machine):
    forward(costs, machine, 100, 9.0)
    assert costs.forward_seconds(100, 0) is None
    forward(costs, machine, 100, 2.0)
    assert costs.forward_seconds(100, 0) == 2.0


def test_of_the_last_runs_the_fastest_counts(costs, machine):
    for seconds in (9, 1, 5, 3, 4, 5, 5, 5, 5):
        forward(costs, machine, 100, seconds)
    assert costs.forward_seconds(100, 0) == 1
    forward(costs, machine, 100, 5)
    assert costs.forward_seconds(100, 0) == 3, "the run of one second is too long ago"


def test_lengths_that_are_near_share_their_runs(costs, machine):
    for length, seconds in ((100, 1), (102, 1.02), (101, 1.5)):
        forward(costs, machine, length, seconds)
    assert costs.forward_seconds(102, 0) == 1.02
    assert costs.forward_seconds(100, 0) == 1.02, "its own run warmed up for all of them"


def test_between_measured_lengths_times_are_linear(costs, machine):
    for length in (100, 300):
        for _ in range(2):
            forward(costs, machine, length, length / 100)
    assert costs.forward_seconds(200, 0) == pytest.approx(2)
    assert costs.forward_seconds(300, 0) == 3
    # A little beyond them it is as long, or longer in proportion; farther away it is not known.
    assert costs.forward_seconds(90, 0) == 1
    assert costs.forward_seconds(330, 0) == pytest.approx(3.3)
    assert costs.forward_seconds(70, 0) is None
    assert costs.forward_seconds(400, 0) is None


def test_what_does_more_in_less_time_corrects_the_shorter_run(costs, machine):
    for length, seconds in ((100, 8), (300, 2)):
        for _ in range(2):
            forward(costs, machine, length, seconds)
    assert costs.forward_seconds(100, 0) == 2


def test_forwards_that_go_on_are_kept_apart(costs, machine):
    for _ in range(2):
        forward(costs, machine, 10, 1)
        forward(costs, machine, 10, 2, start=500)
    assert (costs.forward_seconds(10, 0), costs.forward_seconds(10, 64)) == (1, 2)


def test_restores_have_a_fixed_part_and_one_per_byte(costs, machine):
    assert costs.restore_seconds(100) is None
    for _ in range(2):
        restore(costs, machine, 1000, 2)
    assert costs.restore_seconds(10) == 2
    assert costs.restore_seconds(3000) == 6
    for _ in range(2):
        restore(costs, machine, 3000, 3)
    assert costs.restore_seconds(100_000) == pytest.approx(1.5 + 50)
    assert costs.restore_seconds(200) == pytest.approx(1.6)
    assert costs.spent.seconds_restoring == 2 * 2 + 2 * 3


def test_a_cut_costs_what_a_forward_takes_longer_with_it(costs, machine):
    forward(costs, machine, 100, 7, num_cuts=1)
    assert costs.cut_seconds() is None, "what it takes without is not known"
    for _ in range(2):
        forward(costs, machine, 100, 5)
    for seconds in (90, 6, 5.5, 8, 4):  # the first one warms up
        forward(costs, machine, 100, seconds, num_cuts=2)
    assert costs.cut_seconds() == pytest.approx((0.25 + 0.5) / 2)
    assert costs.spent.seconds_splitting == pytest.approx(1 + 0.5 + 3)
    assert costs.forward_seconds(100, 0) == 5, "forwards with cuts tell nothing of those without"


def test_a_device_is_asked_and_never_waited_for(machine):
    costs = CostModel(clock=lambda: machine.host, make_event=machine.make_event)
    for _ in range(3):
        with costs.forward(100, 0):
            machine.host += 0.001
            machine.enqueue(0.05)
    assert costs.forward_seconds(100, 0) is None
    costs.collect()
    assert costs.forward_seconds(100, 0) is None, "the device has not begun"
    machine.work_off()
    costs.collect()
    assert costs.forward_seconds(100, 0) == pytest.approx(0.05)
    with costs.forward(100, 0):
        machine.host += 0.02
        machine.enqueue(0.01)
    machine.work_off()
    costs.collect()
    assert costs.forward_seconds(100, 0) == pytest.approx(0.02), "the host took longer"


def test_events_are_few_and_used_again(machine):
    costs = CostModel(clock=lambda: machine.host, make_event=machine.make_event)
    for _ in range(3):
        for _ in range(40):  # the device is far behind
            with costs.forward(100, 0):
                machine.enqueue(1.0)
        machine.work_off()
    assert machine.num_events == 32
    costs.collect()
    assert costs.forward_seconds(100, 0) == 1.0


@pytest.mark.parametrize("has_device", [False, True])
def test_what_fails_is_not_learned(machine, has_device):
    make_event = machine.make_event if has_device else None
    costs = CostModel(clock=lambda: machine.host, make_event=make_event)
    for _ in range(40):
        with pytest.raises(ValueError, match="lost"), costs.forward(100, 0):
            raise ValueError("lost")
    machine.work_off()
    costs.collect()
    assert costs.forward_seconds(100, 0) is None
    for _ in range(2):
        forward(costs, machine, 100, 1)
    machine.work_off()
    costs.collect()
    assert costs.forward_seconds(100, 0) == 1


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, -math.inf, 1e7])
def test_a_clock_that_jumps_tells_nothing(costs, machine, seconds):
    for _ in range(2):
        forward(costs, machine, 100, 1)
        restore(costs, machine, 100, 1)
    costs._clock = iter([0.0, seconds] * 2).__next__
    for timed in (costs.forward(100, 0), costs.restore(100)):
        with timed:
            pass
    assert costs.forward_seconds(100, 0) == 1
    assert (costs.restore_seconds(100), costs.spent.seconds_restoring) == (1, 2)


def test_hits_are_used_unless_they_are_known_to_lose(costs):
    assert costs.uses(None)
    assert costs.uses(2.5)
    assert costs.spent.seconds_saved == 2.5
    assert not costs.uses(0.0)
    assert not costs.uses(-1.0)
    assert costs.uses(2.5)
    assert costs.spent.seconds_saved == 5


def test_now_and_then_a_hit_is_used_that_would_lose(costs):
    """Nothing else would tell that it does not lose any more."""
    assert [costs.uses(-1.0) for _ in range(48)] == 3 * ([False] * 15 + [True])
    assert costs.spent.seconds_saved == 0


def test_if_it_is_off_no_clock_is_read():
    def refuse():
        raise AssertionError("read a clock")

    costs = CostModel(clock=refuse, make_event=refuse, is_on=False)
    for _ in range(3):
        with costs.forward(100, 0), costs.restore(100):
            pass
    assert costs.forward_seconds(100, 0) is costs.restore_seconds(100) is None


def test_other_devices_are_not_measured():
    """Neither the host's clock nor an event tells there when work is done."""
    for device, is_on in (("cpu", True), ("meta", False)):
        costs = make_cost_model(torch.device(device), is_on=True)
        for _ in range(9):
            with costs.forward(10, 0):
                pass
        assert (costs.forward_seconds(10, 0) is not None) == is_on
    off = make_cost_model(torch.device("cpu"), is_on=False)
    for _ in range(2):
        with off.forward(10, 0):
            pass
    assert off.forward_seconds(10, 0) is None


@pytest.mark.parametrize(
    ("gains", "tokens"),
    [
        ({}, None),
        ({1024: 4.0, 4096: 12.0}, 1024),
        ({1024: -4.0, 4096: 12.0}, 1792),
        ({1024: -4.0, 2048: 3.0, 4096: -1.0, 8192: 1.0}, 6144),
        ({1024: -4.0, 4096: 0.0}, None),
    ],
)
def test_break_even_is_where_hits_begin_to_win_for_good(gains, tokens):
    assert fewest_winning(gains) == tokens


ANY_SECONDS = st.floats(allow_nan=True, allow_infinity=True)


@given(
    runs=st.lists(st.tuples(st.integers(1, 5000), st.booleans(), st.integers(0, 2), ANY_SECONDS)),
    asked=st.lists(st.integers(1, 10_000), max_size=5),
)
def test_whatever_clocks_tell_times_are_numbers(runs, asked):
    now = [0.0]
    costs = CostModel(clock=lambda: now[0])
    for size, goes_on, num_cuts, seconds in runs:
        now[0] = 0.0
        with costs.forward(size, 64 * goes_on, num_cuts):
            now[0] = seconds
        now[0] = 0.0
        with costs.restore(size):
            now[0] = seconds
    times = [costs.cut_seconds()]
    for size in asked:
        times += [costs.forward_seconds(size, start) for start in (0, 64)]
        times.append(costs.restore_seconds(size))
    assert all(one is None or 0 <= one < math.inf for one in times)
