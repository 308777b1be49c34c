"""Shared setup of tests: where kernels run, random data, and which tests need a GPU.

Without arguments pytest runs all tests, in as many processes as there are CPUs if pytest-xdist is
installed.

Triton decides when a kernel is defined whether it runs in the interpreter, so the environment
variable is set here, before any test imports the package.
"""

import gc
import importlib.util
import os
import random
import sys
import time
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from clocks import JumpingClock
from hypothesis import HealthCheck, Phase, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
gc.disable()  # until all tests are collected: imported objects stay and need no more scans

# A script in tests/engines installs an engine and names its file; named files are always collected.
_ENGINES = {"vllm": "integration/test_vllm_real.py", "trl": "integration/test_trl.py"}
collect_ignore = [each for name, each in _ENGINES.items() if not importlib.util.find_spec(name)]

ALL_BUT_ENGINES = "not engine"  # pyproject.toml's selection: tests that need no engine

MAX_PROCESSES = 16  # each takes half a GiB of memory, and seconds to import torch

# No profile has a deadline, because timing depends on the machine.
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("ci", max_examples=25, derandomize=True, **_UNTIMED)
settings.register_profile("long", max_examples=50, derandomize=True, **_UNTIMED)
settings.register_profile("nightly", max_examples=1000, stateful_step_count=100, **_UNTIMED)
# For tests/mutation, which needs only a failure: no shrinking, no example database.
settings.register_profile(
    "mutation",
    max_examples=10,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
    **_UNTIMED,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="seed of the run's random data, to repeat a failure")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Take all CPUs for a run of all tests, before pytest-xdist reads how many it may take."""
    option = config.option
    if (
        getattr(option, "numprocesses", 0) is None  # -n is not given, and pytest-xdist is there
        and os.environ.get("PYTEST_XDIST_WORKER") is None
        and config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and not (option.keyword or option.collectonly)  # a few tests, or none
        and option.markexpr == ALL_BUT_ENGINES
        and not option.usepdb
        and option.capture != "no"
        and not getattr(option, "cov_source", None)  # pytest-cov needs -n on the command line
        and not torch.cuda.is_available()  # processes would share its memory
    ):
        option.numprocesses = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    if getattr(option, "numprocesses", None) and option.dist == "no":
        option.dist = "worksteal"  # keeps a file's fixtures in one process


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        given = getattr(config, "workerinput", {})
        config.option.seed = given.get("seed", random.SystemRandom().randrange(2**32))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give the run's seed to each process of pytest-xdist."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"random data: --seed={config.option.seed}"


def pytest_collection_finish() -> None:
    """Collect garbage of tests only; make the package's clocks jump: no test may depend on them.

    Clocks jump on a busy machine, too. They do not jump on a GPU, where waits are for the device.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    if torch.cuda.is_available():
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("mamba_cache.") and vars(module).get("time") is time:
            module.time = JumpingClock()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    addressed = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addressed:
        raise pytest.UsageError(f"ids must be the same in every process, got {addressed}")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of the test: derived from the run's seed and the test's name, not from the order.

    It is printed, so that pytest shows it beside a failure.
    """
    run_seed: int = request.config.option.seed
    print(f"repeat with: pytest '{request.node.nodeid}' --seed={run_seed}")
    return zlib.crc32(f"{run_seed} {request.node.nodeid}".encode())


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Fresh random data in numpy."""
    return np.random.default_rng(seed)


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    """Fresh random data in torch, on the CPU."""
    return torch.Generator().manual_seed(seed)
