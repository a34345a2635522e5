"""The pytest plugin that ``chainer_suite.py`` loads into every process of Chainer's own test suite.

It covers what has to happen inside the test process: making Chainer importable, choosing the tests,
seeding them, entering a `dynamemo.Runtime` around each, and writing every outcome to a log as it
happens. It starts no process and judges no result; the runner does both.

Invariants
----------
1. A test is logged as started before it runs and as finished after it, each line flushed, so that a
   process that dies names the test that it died in.
2. Which tests run depends on the node ids alone, never on the order of files or on a seed.
3. The random state before a test depends on its node id alone. Two runs therefore see the same
   numbers, and a difference between them is not chance.

The environment variable ``DYNAMEMO_TORTURE`` says where a Runtime is entered: unset or ``0``
nowhere, ``1`` around each test, ``session`` once around all tests of the process.
"""

import enum
import hashlib
import json
import math
import os
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest

import dynamemo  # makes `import chainer` work, which the suite's conftest is the first to do

#: Marks of Chainer's suite whose tests need what a CPU run lacks, or take minutes each. The suite's
#: own conftest turns its ``chainerx`` mark into ``skip`` where ChainerX was not built.
EXCLUDED_MARKS = (
    "gpu", "multi_gpu", "cudnn", "ideep", "chainerx", "theano", "slow", "skip",
)  # fmt: skip

#: Those that mark what needs one GPU: of a run on a GPU, only tests with any of them are run.
GPU_MARKS = ("gpu", "cudnn")

#: The Runtime of the torture mode; the policy evicts everything evictable after every function.
TORTURE_RUNTIME: dict[str, Any] = {"budget": "4GiB", "device": "cpu", "policy": "torture"}

#: Counters of `Runtime.statistics()` that show whether the torture really took place.
EVICTION_COUNTERS = (
    "dropped_bytes", "recomputed_bytes", "offloaded_bytes", "fetched_bytes", "recomputed_functions",
)  # fmt: skip


#: Names removed from NumPy that the suite's own files use, Chainer does not: whole files would fail
#: for them. They are put back in the test processes only.
REMOVED_NUMPY_NAMES = {"int": int, "product": np.prod}


class Torture(enum.Enum):
    """Where a Runtime is entered; the values are those of ``DYNAMEMO_TORTURE``."""

    OFF = "0"
    EACH_TEST = "1"
    SESSION = "session"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that the runner hands to each of its processes."""
    group = parser.getgroup("chainer suite")
    group.addoption("--suite-log", required=True, help="JSON lines, appended to")
    group.addoption("--suite-gpu", action="store_true", help="the tests for a GPU, and only they")
    group.addoption("--suite-sample", type=int, default=1, help="keep one test in this many")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare what test modules use while they are imported, and register the recorder."""
    for name, value in REMOVED_NUMPY_NAMES.items():
        setattr(np, name, value)
    _seed("collection")
    torture = Torture(os.environ.get("DYNAMEMO_TORTURE") or Torture.OFF.value)
    config.pluginmanager.register(SuiteRecorder(Path(config.getoption("--suite-log")), torture))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests for the device that are in the sample and were not started before."""
    runnable = runnable_tests(items, is_gpu=config.getoption("--suite-gpu"))
    sampled = sample(runnable, config.getoption("--suite-sample"))
    started = _started_ids(Path(config.getoption("--suite-log")))
    items[:] = [item for item in sampled if stable_id(item) not in started]


def runnable_tests(items: Sequence[pytest.Item], *, is_gpu: bool) -> list[pytest.Item]:
    """Return the tests that run on a CPU, or those that need one GPU."""
    wanted = GPU_MARKS if is_gpu else ()
    excluded = set(EXCLUDED_MARKS) - set(wanted)
    return [
        item
        for item in items
        if not any(map(item.get_closest_marker, excluded))
        and (not wanted or any(map(item.get_closest_marker, wanted)))
    ]


def stable_id(item: pytest.Item) -> str:
    """Return the node id on one line and without addresses, which differ between processes."""
    return re.sub(r"\s+", " ", re.sub(r"0x[0-9a-f]{6,}", "0x", item.nodeid))


def sample(items: Sequence[pytest.Item], one_in: int) -> list[pytest.Item]:
    """Keep one parameterisation in `one_in` of every test function, and at least one.

    Parameters
    ----------
    items
        Tests of any files.
    one_in
        At least 1; 1 keeps everything. Of a function with n parameterisations the
        ``ceil(n / one_in)`` whose node ids have the lowest hashes are kept.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[_function_of(item)].append(item)
    kept = {
        id(item)
        for group in functions.values()
        for item in sorted(group, key=lambda item: _digest(stable_id(item)))[
            : math.ceil(len(group) / one_in)
        ]
    }
    return [item for item in items if id(item) in kept]


class SuiteRecorder:
    """Write each test's outcome, time and eviction counters to the log, and enter the Runtimes."""

    def __init__(self, log: Path, torture: Torture) -> None:
        self._log_path = log
        self._torture = torture
        self._log: TextIO
        #: The Runtime now entered, if any.
        self._runtime: Any = None
        #: The record of the test now running.
        self._record: dict[str, Any] = {}

    def pytest_sessionstart(self) -> None:
        """Open the log and, in session torture, the one Runtime."""
        self._log = self._log_path.open("a", encoding="utf-8")
        if self._torture is Torture.SESSION:
            self._enter_runtime()

    def pytest_sessionfinish(self) -> None:
        """Leave the session's Runtime, if one was entered, and close the log."""
        if self._torture is Torture.SESSION:
            self._write({"session": self._leave_runtime()})
        self._log.close()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Log a file that cannot be imported as one test with the outcome ``error``."""
        if report.failed:
            self._write({"id": report.nodeid, "outcome": "error", "message": _message(report)})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Log the test before and after."""
        self._record = {"id": stable_id(item), "outcome": "passed"}
        self._write({"started": self._record["id"]})
        start_s = time.perf_counter()
        result = yield
        self._record["elapsed_s"] = round(time.perf_counter() - start_s, 4)
        self._write(self._record)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Seed the generators and enter the test's Runtime; an error in it is the test's."""
        _seed(stable_id(item))
        if self._torture is Torture.EACH_TEST:
            self._enter_runtime()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Leave the test's Runtime after its own teardown, also where that raised."""
        try:
            return (yield)
        finally:
            if self._torture is Torture.EACH_TEST and self._runtime is not None:
                self._record["evictions"] = self._leave_runtime()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the first thing that went wrong in setup, call or teardown."""
        if self._record["outcome"] != "passed" or report.passed:
            return
        if report.skipped:
            self._record["outcome"] = "xfailed" if hasattr(report, "wasxfail") else "skipped"
        else:
            self._record["outcome"] = "failed" if report.when == "call" else "error"
        self._record["message"] = _message(report)

    def _enter_runtime(self) -> None:
        runtime = dynamemo.Runtime(**TORTURE_RUNTIME)
        runtime.__enter__()
        self._runtime = runtime

    def _leave_runtime(self) -> dict[str, int]:
        runtime, self._runtime = self._runtime, None
        runtime.__exit__(None, None, None)
        statistics = runtime.statistics()
        return {name: getattr(statistics, name) for name in EVICTION_COUNTERS}

    def _write(self, record: dict[str, Any]) -> None:
        self._log.write(json.dumps(record) + "\n")
        self._log.flush()


def _function_of(item: pytest.Item) -> str:
    """Return file, class and function of a test without its parameters and its backend."""
    path, _, names = stable_id(item).partition("::")
    bare_class = re.split(r"_param_\d|_use_chainerx_", names, maxsplit=1)[0]
    function = getattr(item, "originalname", None) or item.name
    return f"{path}::{bare_class}::{function}"


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _seed(text: str) -> None:
    random.seed(_digest(text))
    np.random.seed(_digest(text) % 2**32)


def _started_ids(log: Path) -> frozenset[str]:
    """Return the ids of the tests that earlier processes of this file started."""
    if not log.exists():
        return frozenset()
    lines = log.read_text(encoding="utf-8").splitlines()
    return frozenset(record["started"] for record in map(json.loads, lines) if "started" in record)


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return on one line what went wrong: the innermost cause, else the end of the report."""
    chain = getattr(report.longrepr, "chain", None)
    if chain and chain[0][1] is not None:
        text = chain[0][1].message
    elif isinstance(report.longrepr, tuple):
        text = report.longrepr[2]
    else:
        text = next((x for x in reversed(report.longreprtext.splitlines()) if x.strip()), "")
    # Chainer's parameterised tests re-raise with a long text of their parameters before the cause.
    return " ".join(text.rpartition("(caused by)")[2].split())[:300]
