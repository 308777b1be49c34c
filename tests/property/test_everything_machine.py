"""A context with tiers, pins, salt shares, verified hits, both logs, in any order of calls."""

from everything_machine import WatchedDiskMachine, WatchedStoreMachine
from example_counts import examples
from fresh_examples import all_drawn

TestWatchedDiskMachine = all_drawn(WatchedDiskMachine.TestCase)
TestWatchedDiskMachine.settings = examples(15)
TestWatchedStoreMachine = all_drawn(WatchedStoreMachine.TestCase)
TestWatchedStoreMachine.settings = examples(10)
